"""A stock VAE in, a stock VAE out: decoded and encoded in a pool by bands of rows.

``first_stage_model`` is a stand-in whose ``decode`` and ``encode`` go to the ranks; ComfyUI's VAE
does the rest itself: loading, batches, the work before and after, and tiles if memory runs out.
Read: comfy/sd.py (VAE), comfy/model_management.py @ ComfyUI 0.30.0.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from comfy.utils import ProgressBar

from ..comm.bands import ROWS, Bands
from ..crossing.patch_objects import OF_PATCHERS
from ..crossing.source import Source, describe_vae, numbers_id, vae_source
from ..errors import OutOfMemory, Refused
from ..layout import ALONE, Layout
from ..tolerance import ROWS_OF_PICTURE
from ..vae_modules import why_not_in_bands
from ..weights.background_check import BackgroundCheck
from ..weights.quantisation import stored_bytes
from ..wire.arena import Board
from .branch import Branch
from .evaluations import Work
from .first_results import FirstResults, Look
from .headroom import Picture
from .interrupt import held, interrupted, interrupting, wait_for
from .large_pictures import trying
from .remote_pool import RemotePool
from .run import PooledModel
from .tiles import OnTile, side_by_side

SHOWN_AFTER_S = 1.0
STEPS = (1 << 32) - 1  # of a request, in its rank's counter
FRAMES, ROWS_EACH = 9, 6  # that are compared: rows of each rank, of the smallest picture in the VAE
BEHIND = (
    "This VAE is on the devices of a pool: put the node that copies it, changes it or chooses its device"
    " before PipeMesh Parallelize VAE, or leave PipeMesh Parallelize VAE out."
)
NOTES = OF_PATCHERS | {"device"}
VAEShare = tuple[torch.Tensor, tuple[int, ...], int]  # of what is computed: samples, ranks, their width
log = logging.getLogger("pipemesh")


class RemoteVAE:
    """A VAE in a pool. ``vae_of`` has the stock one. ``pool_of`` finds the pool, again at each
    load. ``holds_ui_device``: a rank is on the UI's own device. ``behind``: the sentence for a node
    that changes the VAE. Upscale models use this class too (``remote_upscaler``).
    """

    kind, behind = "vae", BEHIND

    def __init__(self, vae_of: Callable[[], Any], pool_of: Callable[[], RemotePool], holds_ui_device: bool):
        self._vae_of = vae_of
        self.holds_ui_device = holds_ui_device
        self._pool_of = pool_of
        self._at: tuple[RemotePool, PooledModel] | None = None  # the pool, and the VAE there
        self.firsts = FirstResults()  # of each work, by so many ranks
        # Of each work, number of frames and of ranks: how often a rank ticks, whatever the rows
        self._steps: dict[tuple[Any, ...], int] = {}

    @property
    def vae(self) -> Any:
        return self._vae_of()

    @property
    def module(self) -> torch.nn.Module:
        return self.vae.first_stage_model

    def why_by_stock(self) -> str:
        return why_by_stock(self.vae)

    def source(self) -> dict[str, Any]:
        """Returns the tree from which a rank builds the VAE."""
        return vae_source(self.vae)

    def ranks(self) -> int:
        return ranks_of(self._pool_of().layout)

    def tiles_at_once(self) -> int:
        return self._pool_of().layout.world_size

    def free_bytes(self) -> int | None:
        """Returns the least free bytes of all ranks; None if no pool is live."""
        session = self._at[0].sessions.live if self._at is not None else None
        return session.free_bytes if session is not None else None

    def share(self) -> int:
        """Returns the bytes on the UI's own device once ranks hold it."""
        return stored_bytes(self.module.parameters()) if self.holds_ui_device else 0

    def is_held(self) -> bool:
        return self._at is not None and self._at[0].residency.held(self._at[1]) is not None

    def release(self) -> None:
        if self._at is not None:
            self._at[0].residency.release(self._at[1])

    @interrupting
    def bring_up(self) -> tuple[RemotePool, PooledModel, Source]:
        """Has every rank of a live pool hold the VAE. Raises Refused, ModelError, PoolFailed."""
        if why := self.why_by_stock():
            raise Refused(f"{self.behind} What was changed: {why}.")
        pool = self._pool_of()
        session = pool.sessions.live
        if session is not None and session.tickets:
            raise Refused(
                "A VAE cannot be used in the pool while a pipeline samples there: give the VAE from the"
                " loader to the node that decodes while it samples."
            )
        if self._at is not None and pool is not self._at[0]:
            self.release()
        model, source = pool.residency.use(self.module, partial(describe_vae, self.vae, self.kind))
        if not model.name.endswith(numbers_id(self.vae, self.kind)):
            raise Refused(
                "A node has changed this VAE's numbers since the pool loaded it: unload the models and free"
                " the node cache in ComfyUI's menu, then queue again."
            )
        self._at = pool, model
        self.firsts = replace(self.firsts, notice=pool.admission.firsts.notice)
        pool.sessions.settle(interrupted)
        pool.runs.end_owed()
        if self.vae.patcher.backup:  # a clone with weight patches has put them on
            self.vae.patcher.unpatch_model(self.vae.patcher.offload_device)

        def state() -> dict[str, Any]:
            tree = self.source()
            source.weights.note_sent(tree["state"])
            return tree

        while (session := pool.sessions.live) is None or not session.is_ready(model, ""):
            pool.residency.load(model, source, state, interrupted)
        return pool, model, source

    @interrupting
    def compute(self, work: str, samples: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Returns the result of the stock ``work``, decode or encode. If memory ran out, raises the
        error that ComfyUI takes for that.
        """
        unit, samples = 1, with_noise(self.vae, work, samples)
        if work == "encode":
            unit = self.vae.spacial_compression_encode()
        with with_own_weights(self) as at, self._computing(*at, work, unit, options) as dispatch:
            pool = at[0]
            ranks, width = pool.layout.members(0, pool.layout.widths[-1]), pool.layout.widths[-1]
            if pool.layout.stages > 1 or Bands.of(samples.shape[ROWS], unit, len(ranks)) is None:
                why = "the pool is a pipeline" if pool.layout.stages > 1 else "it has too few rows"
                log.info("[PipeMesh] One worker alone will %s this picture: %s.", work, why)
                return dispatch([(samples, (0,), ALONE)])[0]
            if len(ranks) > 1:
                part = samples[:1, :, :FRAMES] if samples.dim() == 5 else samples[:1]
                part = part[..., : ROWS_EACH * len(ranks) * unit, : ROWS_EACH * unit].contiguous()
                shared, alone = [(part, ranks, width)], [(part, (0,), ALONE)]
                name = f"{type(self.module).__name__} by bands of rows"
                look = partial(dispatch, shared), partial(dispatch, alone)
                hold_part(self.firsts, (work, len(ranks)), name, look)
            return dispatch([(samples, ranks, width)])[0]

    @interrupting
    def compute_whole(self, work: str, tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the result of the stock ``work`` for each tile, to the bit, each computed on its
        own rank. There are at most as many tiles as ranks. Raises as ``compute`` does.
        """
        tiles = [with_noise(self.vae, work, tile) for tile in tiles]
        pool, model, _ = self.bring_up()
        with self._computing(pool, model, work, 1, {}) as dispatch:
            return dispatch([(tile, (rank,), ALONE) for rank, tile in enumerate(tiles)])

    @contextmanager
    def _computing(
        self, pool: RemotePool, model: PooledModel, work: str, unit: int, options: dict[str, Any]
    ) -> Iterator[Callable[[Sequence[VAEShare]], list[torch.Tensor]]]:
        """Yields a function that has the pool compute shares side by side."""
        with held(pool.turn):
            run = pool.runs.beside(model)

        def dispatch(shares: Sequence[VAEShare]) -> list[torch.Tensor]:
            works = []
            for samples, ranks, width in shares:  # on the CPU: outputs take no memory of the UI's device
                arguments = {"samples": samples.cpu(), "work": work, "unit": unit, "options": options}
                if width == ALONE:
                    arguments["strides"] = torch.empty_like(samples, device="meta").stride()
                works.append(Work(arguments, Branch(), ranks, width))
            samples, ranks, _ = max(shares, key=lambda share: share[0].numel())
            session, kind = pool.sessions.live, (work, *samples.shape[2:ROWS], len(ranks))

            def computed(wants_stop: Callable[[], bool]) -> list[torch.Tensor]:
                return pool.residency.retry_with_room(
                    model, partial(pool.evaluations.dispatch, run, works, wants_stop)
                )

            if session is None:  # the pool was lost: the error says so
                return computed(interrupted)
            picture = Picture(work, len(ranks), tuple(samples.shape))
            with trying(session, model, picture):
                if len(ranks) == 1:  # of tiles ComfyUI shows how many are done
                    return computed(interrupted)
                # The last rank's, which is asked for nothing more, as the one with the picture is
                total = self._steps.get(kind, 0) if pool.wait.is_seen() else 0
                done = StepsDone(session.pool.arena.board, ranks[-1], total)
                outputs = computed(done.interrupted)
                self._steps[kind] = done.count()
                return outputs

        try:
            yield dispatch
        except OutOfMemory as error:
            log.warning("[PipeMesh] %s", error)
            raise torch.OutOfMemoryError(str(error)) from error
        finally:
            pool.runs.end(model)


@contextmanager
def with_own_weights(remote: RemoteVAE) -> Iterator[tuple[RemotePool, PooledModel]]:
    """Yields the pool, and its model with the UI's present weights. Raises Refused at the end for a
    write that only the full comparison beside the ranks' work finds, and ComfyUI's interrupt.
    """
    *_, source = remote.bring_up()
    source.weights.compare(remote.module)
    if source.weights.changed:
        remote.release()
        *_, source = remote.bring_up()
        source.weights.compare(remote.module)
    check = BackgroundCheck(source.weights, type(remote.module).__name__)
    try:
        yield remote.bring_up()[:2]  # the pool may have been lost while weights were compared
        wait_for(check.require_unchanged)
    finally:
        check.end()


class StepsDone:
    """Shows on the node that executes how many steps a rank has begun, once its work has taken a
    while, of ``total``, as many as there were before; 0: nothing is shown, since no page has queued
    the prompt, or the steps were not counted before. A step is one of the hooks that exchange rows.
    A rank on a GPU begins it a few steps before the GPU does, as it goes by the cancel flags of a
    few steps ago: nobody has to wait for the GPU to know.
    """

    def __init__(self, board: Board, rank: int, total: int):
        self._board = board
        self._rank = rank
        self._bar = ProgressBar(total) if total else None
        self._shown_from = time.monotonic() + SHOWN_AFTER_S
        self._before = board.progress(rank) & ~STEPS  # of another request, which says nothing of this one

    def count(self) -> int:
        progress = self._board.progress(self._rank)
        return progress & STEPS if progress & ~STEPS != self._before else 0

    def interrupted(self) -> bool:
        """Shows it, unless the user pressed cancel; returns whether that is so."""
        if interrupted():
            return True
        if self._bar is not None and time.monotonic() >= self._shown_from:
            self._bar.update_absolute(self.count())
        return False


def ranks_of(layout: Layout) -> int:
    """Returns how many ranks compute a picture: in a pipeline one alone."""
    return 1 if layout.stages > 1 else len(layout.members(0, layout.widths[-1]))


def hold_part(firsts: FirstResults, key: tuple, name: str, look: Look) -> None:
    """Raises Refused if ranks and one device get different results for a part of a picture, because
    ComfyUI's code differs from the code that was cut. ``name``: of the VAE or upscale model.
    """
    refusal = (
        f"{name} is {{}} off from what one device makes of a part of this picture: leave PipeMesh Parallelize"
        " VAE out, and report it."
    )
    firsts.hold(key, name, [look], ROWS_OF_PICTURE.off, refusal)


def with_noise(vae: Any, work: str, samples: torch.Tensor) -> torch.Tensor:
    """Returns the samples that the stock VAE decodes: with the noise that it draws on its device.
    Else each rank would draw noise of its own.
    """
    model: Any = getattr(vae, "first_stage_model", None)  # an upscale model has none
    if work != "decode" or not getattr(model, "timestep_conditioning", False):
        return samples
    samples, scale = samples.to(vae.device), model.decode_noise_scale
    return torch.randn_like(samples) * scale + (1.0 - scale) * samples


class FirstStage:
    """Stands in for a VAE's ``first_stage_model``."""

    def __init__(self, remote: RemoteVAE):
        self.remote = remote

    def __getattr__(self, name: str) -> Any:
        return getattr(self.remote.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the attribute on the module itself, as a node means to; ``bring_up`` finds the
        change. Excepted are the notes of ComfyUI's memory manager.
        """
        is_own = name == "remote" or name in vars(FirstStage) or name in NOTES
        if is_own or not hasattr(self.remote.module, name):
            super().__setattr__(name, value)
        else:
            setattr(self.remote.module, name, value)

    def __deepcopy__(self, memo: Any) -> Any:
        raise Refused(self.remote.behind)

    def decode(
        self, samples: torch.Tensor, output_buffer: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        output = self.remote.compute("decode", samples, options)
        return output if output_buffer is None else output_buffer.copy_(output)

    def encode(self, samples: torch.Tensor, device: Any = None, **options: Any) -> torch.Tensor:
        return self.remote.compute("encode", samples, options)  # on each rank's own device


class VAEPatcher(ModelPatcher):
    """Shows ComfyUI's memory manager a VAE in a pool, which takes no memory in the UI."""

    model: FirstStage

    def model_size(self, *_args: Any, **_kwargs: Any) -> int:
        return self.model.remote.share()

    def loaded_size(self, *_args: Any, **_kwargs: Any) -> int:
        return self.model_size() if self.model.remote.is_held() else 0

    def current_loaded_device(self, *_args: Any, **_kwargs: Any) -> torch.device:
        return self.load_device if self.model.remote.is_held() else self.offload_device

    def get_free_memory(self, *args: Any, **kwargs: Any) -> int:
        """Returns the free bytes of the rank that has least: how many images ComfyUI gives to one
        call depends on it.
        """
        free = self.model.remote.free_bytes()
        return super().get_free_memory(*args, **kwargs) if free is None else free

    def partially_load(self, *_args: Any, **_kwargs: Any) -> int:
        before = self.loaded_size()
        self.model.remote.bring_up()
        return self.loaded_size() - before

    def partially_unload(self, *_args: Any, **_kwargs: Any) -> int:
        freed = self.loaded_size()
        self.model.remote.release()
        return freed

    def detach(self, unpatch_all: bool = True, *_args: Any, **_kwargs: Any) -> Any:
        if unpatch_all:
            self.model.remote.release()
        return self.model

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise Refused(self.model.remote.behind)

    deepclone_multigpu = add_patches = add_object_patch = _refuse


def in_tiles(work: str, name: str) -> Callable[..., torch.Tensor]:
    """Makes a method in place of ComfyUI's own of a VAE, which takes a picture in tiles: each rank
    computes whole ones.
    """

    def method(vae: Any, samples: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        def loop(on_tile: OnTile, **others: Any) -> torch.Tensor:
            its = copy(vae)
            vars(its).update(others, first_stage_model=SimpleNamespace(**{work: on_tile}))
            return getattr(VAE, name)(its, samples, *args, **kwargs)

        def prepare(tile: torch.Tensor) -> torch.Tensor:
            return (vae.process_input(tile) if work == "encode" else tile).to(vae.vae_dtype)

        remote: RemoteVAE = vae.first_stage_model.remote
        as_it_is = dict.fromkeys(("process_input", "process_output"), lambda picture: picture)
        ask_all = partial(
            loop, **as_it_is, vae_dtype=samples.dtype, device=samples.device, output_device="meta"
        )
        with with_own_weights(remote):
            at_once = remote.tiles_at_once()
            return side_by_side(ask_all, loop, partial(remote.compute_whole, work), at_once, prepare)

    return method


class VAEInPool(VAE):
    """A VAE whose ``first_stage_model`` is a ``FirstStage``: in tiles, because a node asks for that
    or memory ran out, each rank computes whole ones.
    """

    decode_tiled_ = in_tiles("decode", "decode_tiled_")
    decode_tiled_3d = in_tiles("decode", "decode_tiled_3d")
    encode_tiled_ = in_tiles("encode", "encode_tiled_")
    encode_tiled_3d = in_tiles("encode", "encode_tiled_3d")

    def through(self, call: Callable[[Any], Any]) -> Any:
        return call(self)


def why_by_stock(vae: Any) -> str:
    """Returns why ComfyUI itself decodes with a VAE; empty if a pool can do it."""
    if type(vae) is not VAE or "decode" in vars(vae) or "encode" in vars(vae) or not hasattr(vae, "patcher"):
        return "it is no VAE of ComfyUI's own"
    if vae.patcher.patches or vae.patcher.object_patches:
        return "it has weight patches"
    return why_not_in_bands(vae.first_stage_model)


def stock_of(vae: Any) -> Any:
    """Returns the VAE that came from a loader."""
    model = getattr(vae, "first_stage_model", None)
    return model.remote.vae if isinstance(model, FirstStage) else vae


def parallelize_vae(
    vae: Any, pool_of: Callable[[], RemotePool], holds_ui_device: bool, keeps: bool = True
) -> Any:
    """Makes a copy of a stock VAE that is computed in a pool, as ``RemoteVAE`` has it. Nothing is
    started or loaded before it is used. ``keeps``: the copy keeps the stock VAE alive, else the
    user of the copy must.
    """
    made = copy(vae)
    made.__class__ = VAEInPool
    remote = RemoteVAE((lambda: vae) if keeps else weakref.ref(vae), pool_of, holds_ui_device)
    made.remote = remote
    made.first_stage_model = FirstStage(remote)
    patcher = vae.patcher
    made.patcher = VAEPatcher(made.first_stage_model, patcher.load_device, patcher.offload_device)
    for name in ("memory_used_decode", "memory_used_encode"):
        setattr(made, name, partial(part_of, getattr(vae, name), remote))
    return made


def part_of(memory_used: Callable[..., float], remote: RemoteVAE, *args: Any, **kwargs: Any) -> float:
    return memory_used(*args, **kwargs) / remote.ranks()
