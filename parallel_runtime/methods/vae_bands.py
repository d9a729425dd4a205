"""Decode and encode with a VAE by bands of rows, one for each rank of a sequence; exactly.

A convolution is given the rows beside its band by the ranks that have them. Group norms are of all
ranks' rows. At attention each rank has the queries of its rows, and all keys.

Legend: B batch, C channels, R rows, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..comm.bands import ROWS, Bands, Window
from ..comm.device_copies import to_device
from ..comm.mesh import SequenceComm
from ..comm.rows import RowExchange
from ..errors import Refused
from ..vae_modules import CHUNK_SIZE, IN_CHUNKS
from .method import Method
from .vae_windows import NEEDED, ModuleForward, Windows

PIECES = 8  # in which numbers of less than fp32 are summed up, so that no copy is made of all
PADS_ITSELF = "CarriedConv3d"  # ComfyUI's class of convolutions before which it repeats the rows at the edges
NOISE = "decode_noise_scale"
CHUNK = 64 * 2**20  # bytes of frames that are computed at once; ComfyUI has 32 to 128 MiB, by a GPU's memory


class BandsOfRows(Method):
    """The method of a VAE. Its hooks are attributes of modules of this rank's model.

    ``on_progress`` is called before every message. ``is_cut``: the rows are cut; else a rank has
    all rows, and unknown modules stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: SequenceComm,
        device: torch.device,
        on_progress: Callable[[], None] = lambda: None,
        is_cut: bool = True,
    ):
        self._model = model
        self._device = device
        super().__init__(comm)
        self._on_progress = on_progress
        self._is_cut = is_cut
        self._rows = RowExchange(comm)
        self._put: list[tuple[nn.Module, str, Any]] = []

    def attach(self) -> None:
        if hasattr(self._model, NOISE):  # the UI has added it to all rows
            self._put.append((self._model, NOISE, getattr(self._model, NOISE)))
            setattr(self._model, NOISE, 0.0)
        padded = {id(one.conv) for one in self._model.modules() if type(one).__name__ == PADS_ITSELF}
        for module in self._model.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv3d)) and module.kernel_size[ROWS] > 1:
                added = module.kernel_size[ROWS] // 2 if id(module) in padded else 0
                self._put_in(module, "_conv_forward", partial(self._convolve, added))
            elif isinstance(module, nn.GroupNorm):
                self._put_in(module, "forward", self._normalise)
            elif not self._is_cut:
                continue
            elif isinstance(module, nn.AdaptiveAvgPool2d):
                self._put_in(module, "forward", self._average)
            elif all(hasattr(module, name) for name in NEEDED):
                for hooked, name, hook in Windows(module, self._rows, self._is_alone).hooks():
                    self._put_in(hooked, name, hook)
            elif hasattr(module, "optimized_attention"):
                self._put_in(module, "optimized_attention", self._attend)
            elif hasattr(module, "time_causal_padding"):
                self._put_in(module, "forward", partial(convolve_frames, self._rows))
            elif hasattr(module, IN_CHUNKS):
                self._put_in(module, IN_CHUNKS, partial(compute_in_chunks, self._rows))

    @property
    def attentions(self) -> int:
        return len(self._put)

    def _put_in(self, module: nn.Module, name: str, hook: Callable[..., Any]) -> None:
        self._put.append((module, name, vars(module).get(name)))
        setattr(module, name, partial(hook, module, getattr(module, name)))

    def detach(self) -> None:
        while self._put:
            module, name, before = self._put.pop()
            delattr(module, name)
            if before is not None:
                setattr(module, name, before)

    def forward(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int) -> Any:
        """Compute this rank's band of ``samples``; the first rank returns all of the picture.
        ``strides``: how all of it lies in the UI's memory, because kernels are chosen by that.
        """
        samples = arguments["samples"]
        self._comm.compare(tuple(samples.shape), samples.numel())
        rows, size = samples.shape[ROWS], self._comm.world.size
        weights = self._comm.shares.tokens or ()
        bands = Bands.of(rows, arguments["unit"], size, weights) if size > 1 else Bands((rows,))
        if bands is None:
            raise Refused(f"{rows} rows cannot be cut into bands for {size} ranks.")
        self._rows.bands, rank = bands, self._comm.world.rank
        own = samples.narrow(ROWS, bands.start(rank), bands.rows[rank])
        strides = arguments.get("strides") or torch.empty_like(own, device="meta").stride()
        own = own.new_empty_strided(own.shape, strides).copy_(own)  # another copy than the arena's
        output = forward(to_device(own, self._device), **arguments["options"])
        return self._rows.gathered(output) if size > 1 else output

    # -- in the VAE's modules

    def _is_alone(self) -> bool:
        """Return whether this rank has all rows, after noting progress. If so and the run was
        cancelled, it raises Stopped here.
        """
        self._on_progress()
        if self._comm.world.size == 1:
            self._comm.stop.decide(self._comm.stop.wants_stop)
        return self._comm.world.size == 1

    def _convolve(
        self, added: int, module: nn.Conv2d, own: ModuleForward, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Convolve a band as if it were a picture, then once more the output rows at its edges, of
        the rows that neighbours have: so no copy is made of the band, but of one that is all edge.
        ``added``: the rows that the model has put above and below ``x`` itself.
        """
        if self._is_alone():
            return own(x, *args, **kwargs)
        padding = added or int(module.padding[ROWS])
        window = Window(module.kernel_size[ROWS], module.stride[ROWS], padding, module.dilation[ROWS])
        end = x.shape[ROWS] - added
        band, above, below = self._rows.beside(x.narrow(ROWS, added, end - added), window)
        rows = band.shape[ROWS]
        if rows < window.of(3) and module.padding_mode != "zeros":  # edges that are made of other rows
            every = [one for one in (above, band, below) if one is not None]
            out = own(torch.cat(every, ROWS), *args, **kwargs)
            return out.narrow(ROWS, 0 if above is None else window.above, rows)
        if rows < window.of(3):
            nothing = band.new_zeros((*band.shape[:ROWS], padding - added, band.shape[-1]))
            first = (nothing, x.narrow(ROWS, 0, added)) if above is None else (above,)
            last = (x.narrow(ROWS, end, added), nothing) if below is None else (below,)
            with no_rows_added(module):
                return own(torch.cat((*first, band, *last), ROWS), *args, **kwargs)
        out = own(x, *args, **kwargs)
        with no_rows_added(module):
            if above is not None and (count := window.outputs(window.above)):
                strip = torch.cat((above, band.narrow(ROWS, 0, window.of(count) - window.above)), ROWS)
                out.narrow(ROWS, 0, count).copy_(own(strip, *args, **kwargs))
            if below is not None and (count := window.outputs(window.below)):
                kept = window.of(count) - window.below
                strip = torch.cat((band.narrow(ROWS, rows - kept, kept), below), ROWS)
                out.narrow(ROWS, out.shape[ROWS] - count, count).copy_(own(strip, *args, **kwargs))
        return out

    def _normalise(self, module: nn.GroupNorm, own: ModuleForward, x: torch.Tensor) -> torch.Tensor:
        if self._is_alone():
            return own(x)
        images, channels, *_ = x.shape
        if x.dtype == torch.float32:  # in the host's own kernel, whose output is of this band alone
            sizes = images, channels, x.numel() // (images * channels), module.num_groups
            _, mean, scale = torch.native_group_norm(x.contiguous(), None, None, *sizes, module.eps)
            mine = torch.stack((scale.pow(-2) - module.eps, mean))
        else:
            pieces = x.reshape(images, module.num_groups, -1).chunk(PIECES, 1)
            mine = torch.cat(
                [torch.stack(torch.var_mean(one.float(), -1, correction=0)) for one in pieces], 2
            )
        (var, mean), share = self._of_each(mine, x.shape[ROWS])
        of_all = (share * mean).sum(0)
        var = (share * (var + (mean - of_all).square())).sum(0)
        per_group = channels // module.num_groups
        mean, var = (one.flatten().repeat_interleave(per_group) for one in (of_all, var))
        weight, bias = (one.float().repeat(images) for one in (module.weight, module.bias))
        out = F.batch_norm(x.reshape(1, images * channels, -1), mean, var, weight, bias, eps=module.eps)
        return out.reshape(x.shape)

    def _average(self, module: nn.Module, own: ModuleForward, x: torch.Tensor) -> torch.Tensor:
        if self._is_alone():
            return own(x)
        (mean,), share = self._of_each(x.mean((-2, -1), dtype=torch.float32).unsqueeze(0), x.shape[ROWS])
        return (share * mean).sum(0)[..., None, None].to(x.dtype)

    def _of_each(self, mine: torch.Tensor, rows: int) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return the statistics ``mine`` of every rank, each (ranks, B, C), and each rank's share
        of all rows. ``mine`` (known, B, C) holds this rank's statistics of its ``rows``.
        """
        every = mine.new_empty((self._comm.world.size, *mine.shape))
        self._rows.exchange(list(mine.expand(every.shape)), list(every))
        sizes = torch.tensor(self._rows.of_all(rows), dtype=mine.dtype)
        return every.unbind(1), to_device(sizes / sizes.sum(), mine.device).view(-1, 1, 1)

    def _attend(
        self, module: nn.Module, own: ModuleForward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend from this rank's rows (B, C, R, W) to all rows, of one head."""
        if self._is_alone():
            return own(q, k, v)
        shape, every = q.shape, self._rows.every(torch.stack((k, v)).movedim(ROWS, 0).contiguous())
        # Contiguous: else torch takes no fused kernel, and holds all scores
        q, k, v = (
            one.flatten(2).transpose(1, 2).unsqueeze(1).contiguous() for one in (q, *every.movedim(0, ROWS))
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return out.squeeze(1).transpose(1, 2).reshape(shape)


@contextmanager
def no_rows_added(module: nn.Conv2d) -> Iterator[None]:
    """Inside, a convolution adds no zeros above and below."""
    padding, edges = module.padding, module._reversed_padding_repeated_twice
    *before, _rows, columns = map(int, padding)
    module.padding = (*before, 0, columns)  # pyright: ignore[reportAttributeAccessIssue]
    module._reversed_padding_repeated_twice = [*edges[:2], 0, 0, *edges[4:]]
    try:
        yield
    finally:
        module.padding = padding  # pyright: ignore[reportAttributeAccessIssue]
        module._reversed_padding_repeated_twice = edges


def convolve_frames(
    rows: RowExchange,
    module: Any,
    own: Callable[..., Any],
    x: torch.Tensor,
    conv_cache: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve one frame behind copies of itself: ComfyUI then has a faster way, which calls no
    layer that could be hooked.
    """
    if rows.size == 1 or module.time_kernel_size == 1 or x.shape[2] > 1 or conv_cache is not None:
        return own(x, conv_cache=conv_cache)
    return own(x, conv_cache=x.repeat_interleave(module.time_kernel_size - 1, 2))[0], None


def compute_in_chunks(
    rows: RowExchange, module: Any, own: Any, x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Compute frames in chunks that are as many on each rank: ComfyUI measures them by the device's
    memory and by the rows it is given, and every convolution of one is a message.
    """
    if rows.size == 1:
        return own(x, *args, **kwargs)
    size = CHUNK // max(rows.bands.rows) * x.shape[ROWS]
    names = {**own.__globals__, CHUNK_SIZE: lambda _device: size}
    alike = FunctionType(own.__code__, names, None, own.__defaults__, own.__closure__)
    if hasattr(module, "decode_output_shape"):  # else it is made in main memory
        kwargs["output_buffer"] = x.new_empty(module.decode_output_shape(x.shape))
    return alike(module, x, *args, **kwargs)
