"""A token plan applied to a model: hooks that let its blocks run on some rows of every stream. What
rows, and what attention sees, is a method's business.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..families.plan import Along, Blocks, Leave, Ranges, TokenPlan
from .pipefusion.rope_cache import Remembered
from .shards import Rows


class TokenHooks(ABC):
    """Attached to one model until ``detach``."""

    def __init__(self, model: nn.Module, plan: TokenPlan, at_block: Callable[[], None] = lambda: None):
        """``at_block`` is called before every block."""
        self._plan = plan
        self._at_block = at_block
        self._rows: Rows | None = None
        self._control: dict[str, list] | None = None
        self._shared_attention = False
        self._handles = []
        self._remembered: list[Remembered] = []
        first = True
        for group in plan.blocks:
            for block in model.get_submodule(group.path):
                self._attach_block(block, group, first)
                first = False
        leave = model.get_submodule(plan.leave.path)
        self._handles.append(leave.register_forward_pre_hook(self._entering_leave(leave, plan.leave), with_kwargs=True))
        self._handles.append(leave.register_forward_hook(lambda _module, _args, out_BlC: self._left(out_BlC)))

    def _attach_block(self, block: nn.Module, group: Blocks, first: bool) -> None:
        self._handles.append(block.register_forward_pre_hook(self._entering(block, group, first), with_kwargs=True))
        self._handles.append(block.register_forward_hook(lambda *_: self._share_attention(False)))
        for path in group.local if not hasattr(block, "stands_for") else ():
            local = block.get_submodule(path)
            self._handles.append(local.register_forward_pre_hook(lambda *_: self._share_attention(False)))
            self._handles.append(local.register_forward_hook(lambda *_: self._share_attention(True)))

    def detach(self) -> None:
        for handle in (*self._handles, *self._remembered):
            handle.remove()
        self._handles.clear()
        self._remembered.clear()

    def _remember_positions(self, model: nn.Module) -> None:
        """For methods that compute in patches: the same positions are embedded once.
        ``_forget_positions`` follows between runs.
        """
        self._remembered = [Remembered(model.get_submodule(path)) for path in self._plan.positions]

    def _forget_positions(self) -> None:
        for remembered in self._remembered:
            remembered.forget()

    def begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of one evaluation's forward, ready to be called here."""
        self._rows = None
        self._share_attention(False)
        control = arguments.get("control")
        self._control = dict(control) if control else None
        options = {**arguments.get("transformer_options", {}), "optimized_attention_override": self._attend}
        return {**arguments, "transformer_options": options, **({"control": self._control} if self._control else {})}

    # -- what a method decides

    @abstractmethod
    def _choose_rows(self, totals: Mapping[str, int]) -> Rows | None:
        """Asked once per evaluation, with the tokens of each stream; None: all of them, nothing is
        cut.
        """

    @abstractmethod
    def _attend(self, attention: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask=None, *args, **kwargs):
        """The host's ``optimized_attention_override``; a method's to compute only where
        ``_shared_attention`` and the rows are cut.
        """

    @abstractmethod
    def _left(self, out_BlC: torch.Tensor) -> torch.Tensor | None:
        """The leaving stream's output for the rows carried -> for all its rows; None leaves it as
        it is.
        """

    # -- tokens in

    def _share_attention(self, shared: bool) -> None:
        self._shared_attention = shared

    def _entering(self, block: nn.Module, group: Blocks, first: bool) -> Callable:
        bind = binder(block, group.positional)

        def hook(_block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            arguments = bind(args, kwargs)
            if first:
                self._enter(group, arguments)
            self._localize(arguments, group.along, group.ranges)
            self._share_attention(True)
            self._at_block()
            return (), arguments

        return hook

    def _enter(self, group: Blocks, arguments: dict[str, Any]) -> None:
        lengths = {stream: arguments[arg].shape[1] for arg, (stream,) in group.tokens.items()}
        self._rows = self._choose_rows({stream: lengths[stream] for stream in self._plan.streams})
        if self._control:
            self._bring_control(self._control, arguments[next(iter(group.tokens))].device)
            self._control = None  # the forward has it: what was brought goes with the forward
        if self._rows is None:
            return
        for arg, streams in group.tokens.items():
            arguments[arg] = self._rows.slice(arguments[arg], 1, streams)

    def _bring_control(self, control: dict[str, list], device: torch.device) -> None:
        """Of a ControlNet's residuals the rows carried, to where the tokens are; all others stay
        where they lie. A residual that stands in several places, as hosts repeat those of a net
        with fewer blocks, is brought once.
        """
        own = slice(None)
        if self._rows is not None:
            start, size = self._rows.carried[self._plan.leave.stream]
            own = slice(start, start + size)
        brought: dict[tuple, torch.Tensor] = {}

        def bring(rows: torch.Tensor) -> torch.Tensor:
            key = (rows.data_ptr(), rows.shape, rows.stride(), rows.dtype)
            if key not in brought:
                brought[key] = rows[:, own].to(device)
            return brought[key]

        for key in {group.control for group in self._plan.blocks}:
            if control.get(key) is not None:
                control[key] = [
                    bring(rows) if rows is not None and self._adds(key, behind) else None for behind, rows in enumerate(control[key])
                ]

    def _adds(self, key: str, behind: int) -> bool:
        """Whether the residual that the host adds behind that block of its container is anybody's
        business here.
        """
        return True

    def _localize(self, arguments: dict[str, Any], along: Sequence[Along], ranges: Sequence[Ranges]) -> None:
        if self._rows is None:
            return
        for item in along:
            if arguments.get(item.arg) is not None:
                arguments[item.arg] = self._rows.along(arguments[item.arg], item)
        for item in ranges:
            if arguments.get(item.arg) is not None:
                arguments[item.arg] = self._rows.ranges(arguments[item.arg], item)

    def _entering_leave(self, module: nn.Module, leave: Leave) -> Callable:
        bind = binder(module)

        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            arguments = bind(args, kwargs)
            self._localize(arguments, leave.along, leave.ranges)
            return (), arguments

        return hook


def split_heads(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """(B, l, H*D) or (B, l, H, D) -> (B, H, l, D)."""
    return tensor.reshape(*tensor.shape[:2], -1, dim).transpose(1, 2)


def binder(module: nn.Module, positional: Sequence[str] = ()) -> Callable[[tuple, dict], dict[str, Any]]:
    """(args, kwargs) -> all arguments by name. ``positional`` names those of a forward that takes
    ``*args``. A stub takes what the block takes that it ``stands_for``.
    """
    signature = inspect.signature(getattr(module, "stands_for", type(module)).forward)

    def bind(args: tuple, kwargs: dict) -> dict[str, Any]:
        if positional:
            return {**dict(zip(positional, args, strict=False)), **kwargs}
        arguments = dict(signature.bind(module, *args, **kwargs).arguments)
        arguments.pop("self")
        arguments.update(arguments.pop("kwargs", {}))
        return arguments

    return bind
