"""Hold a VAE on a rank, which decodes and encodes by bands of rows."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.mesh import Mesh
from ..errors import Refused
from ..methods.method import Rank
from ..methods.vae_bands import BandsOfRows
from ..vae_modules import why_not_in_bands


class ResidentVAE:
    """``model`` is the host's own, on this rank's device; it has no weight patches. Raises Refused
    if it ``is_cut`` and has an unknown module. An upscale model computes whole tiles.
    """

    patches_id = ""
    kept = None
    recordings = None

    def __init__(
        self, model: torch.nn.Module, device: torch.device, mesh: Mesh, rank: Rank, is_cut: bool = True
    ):
        if is_cut and (why := why_not_in_bands(model)):
            raise Refused(f"{type(model).__name__}: {why}.")
        self._model = model
        self.method = BandsOfRows(model, mesh.sequence, device, rank.tick, is_cut)
        self.nbytes = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
        self.method.attach()

    def on_rank(self, arguments: dict[str, Any], number: int) -> Any:
        """``arguments["work"]``: decode, encode or upscale."""
        work = getattr(self._model, arguments["work"])
        return self.method.forward(work, arguments, number)

    def detach(self) -> None:
        self.method.detach()
