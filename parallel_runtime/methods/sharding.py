"""The decisions that a method takes in the middle of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from .override import Attention
from .shards import Rows


class Sharding(Protocol):
    """Decides for one method, asked by the hooks on the model."""

    def choose_rows(self, all_tokens: Mapping[str, int]) -> Rows | None:
        """Choose the rows of each stream that are computed here; None computes all of them, and
        nothing is cut. Called once per evaluation.
        """

    def enter_block(self) -> None:
        """Note that a block begins: called before every one."""

    def acts_behind(self, path: str, block: int) -> bool:
        """Return True if this rank does ComfyUI's work behind that block of the container at
        ``path``: adding a ControlNet residual, calling patches of nodes.
        """
        ...

    def all_rows(self, rows: Rows, local_BlC: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        """Return all rows (B, L, C) of ``streams``, of which ``local_BlC`` are the local ones. All
        ranks of the sequence must call it.
        """
        ...

    def attend(
        self,
        rows: Rows | None,
        attention: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute an attention over streams that are cut. The arguments are those of the host's
        ``optimized_attention_override``.
        """
        ...

    def attend_over(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, **kwargs: Any
    ) -> torch.Tensor:
        """Compute an attention whose queries every rank has whole, over keys that are cut."""
        ...

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor) -> torch.Tensor | None:
        """Return all rows of the leaving stream's output, of which ``out_BlC`` are the local ones;
        None leaves it as it is.
        """
