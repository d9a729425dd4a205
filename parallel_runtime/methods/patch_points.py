"""Call the patches that nodes put in or behind blocks, on a rank that has some of the tokens. Each
patch gets the rows that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from ..families.plan import BEFORE_BLOCKS, BlockPatch, Blocks, TokenPlan
from .sharding import Sharding
from .shards import Rows

BEHIND_BLOCKS = ("double_block",)  # points where ComfyUI calls patches behind a block, not in it
OPTIONS = ("transformer_options", "extra_options")  # the names under which patches get options


class PatchPoints:
    """Calls one model's patches in one evaluation."""

    def __init__(self, model: nn.Module, plan: TokenPlan, sharding: Sharding):
        self._model = model
        self._plan = plan
        self._sharding = sharding
        self._rows: Rows | None = None
        self._group: Blocks | None = None  # of the block at hand
        self._block = 0

    def called(self, patches: Mapping[str, list[tuple[str, Callable]]]) -> dict[str, list[Callable]]:
        """Return the patches (name, function) of each point as the model calls them. In a stage
        that is not the last, which leaves a forward in the middle, what a patch with a network of
        its own notes from block to block ends with the evaluation.
        """
        fresh: dict[int, Callable] = {}

        def begun(name: str, patch: Callable) -> Callable:
            known = self._plan.block_patch(name)
            is_left = known is not None and known.adds and not self._acts_behind_all()
            return fresh.setdefault(id(patch), copy(patch)) if is_left else patch

        return {
            point: [partial(self._call, point, name, begun(name, patch)) for name, patch in items]
            for point, items in patches.items()
        }

    def _acts_behind_all(self) -> bool:
        path = self._plan.blocks[-1].path
        return self._sharding.acts_behind(
            path, sum(1 for _ in self._model.get_submodule(path).children()) - 1
        )

    def enter(self, rows: Rows | None, group: Blocks, block: int) -> None:
        """Note which block begins, on which rows."""
        self._rows, self._group, self._block = rows, group, block

    def _call(self, point: str, name: str, patch: Callable, *args: Any, **kwargs: Any) -> Any:
        known = self._plan.block_patch(name)
        if known is not None and known.instead == "nothing":
            return args[0]
        if known is not None and known.instead == "keep references":
            return self._keep_references(patch, *args, **kwargs)
        if point in BEFORE_BLOCKS or self._group is None:
            return patch(*args, **kwargs)
        acts = point not in BEHIND_BLOCKS or self._sharding.acts_behind(self._group.path, self._block)
        if self._rows is None and acts:
            return patch(*args, **kwargs)
        if known is not None and known.adds and self._rows is not None:
            return self._add(self._rows, self._group.points[point], patch, args[0], acts)
        if not acts or self._rows is None:
            return args[0]
        if known is None:
            return self._on_all_rows(self._rows, self._group.points[point], patch, args[0])
        with own_attributes(self._rows, self._plan.leave.stream, known, patch):
            return patch(*self._with_own_options(known, args), **self._with_own_options(known, kwargs))

    def _keep_references(
        self,
        patch: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extra_options: dict[str, Any],
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        """Keep the keys and values (B, H, l, D) of this rank's reference tokens. In later
        evaluations, put the kept ones in their place.
        """
        count = sum(extra_options.get("reference_image_num_tokens", ()))
        if self._rows is not None:
            stream = self._plan.leave.stream
            start, size = self._rows.local[stream]
            count = min(size, max(0, start + size - self._rows.all_tokens[stream] + count))
        if not count:
            return {}
        layer = f"{extra_options['block_type']}_{extra_options['block_index']}"
        kept = patch.cache
        if layer not in kept:
            kept[layer] = tuple(rows[:, :, -count:].clone() for rows in (k, v))
            return {}
        batch = k.shape[0]
        again = (rows.repeat(-(-batch // rows.shape[0]), 1, 1, 1)[:batch] for rows in kept[layer])
        k, v = (torch.cat((rows[:, :, :-count], old), 2) for rows, old in zip((k, v), again, strict=True))
        return {"q": q, "k": k, "v": v}

    def _add(
        self,
        rows: Rows,
        held: Mapping[tuple[str, ...], tuple[str, ...]],
        patch: Callable,
        given: dict[str, Any],
        acts: bool,
    ) -> dict[str, Any]:
        """Let a patch add to tokens that are zero, and add its sums to the local rows. The patch is
        called behind blocks of other stages too, because it may count on being called behind every
        block.
        """
        zeros = {}
        for entries, streams in held.items():
            for entry, stream in zip(entries, streams, strict=True):
                like = given[entry]
                zeros[entry] = like.new_zeros(like.shape[0], rows.all_tokens[stream], *like.shape[2:])
        patch({**given, **zeros})
        for entries, streams in held.items() if acts else ():
            for entry, own in local_entries(
                rows, given, entries, torch.cat([zeros[entry] for entry in entries], 1), streams
            ):
                given[entry] += own
        return given

    def _on_all_rows(
        self,
        rows: Rows,
        held: Mapping[tuple[str, ...], tuple[str, ...]],
        patch: Callable,
        given: dict[str, Any],
    ) -> Any:
        """Call a patch on all tokens, and return the local rows of its result."""
        whole = dict(given)
        for entries, streams in held.items():
            local = torch.cat([given[entry] for entry in entries], 1)
            gathered = self._sharding.all_rows(rows, local.flatten(2), streams).unflatten(2, local.shape[2:])
            whole.update(
                zip(entries, gathered.split([rows.all_tokens[stream] for stream in streams], 1), strict=True)
            )
        out = patch(dict(whole))
        (entries, streams), *_ = held.items()
        if isinstance(out, torch.Tensor):
            return rows.slice(out, 1, streams)
        for entries, streams in held.items():
            changed = torch.cat([out.get(entry, whole[entry]) for entry in entries], 1)
            for entry, own in local_entries(rows, given, entries, changed, streams):
                given[entry].copy_(own)
        return {**out, **given}

    def _with_own_options(self, known: BlockPatch, arguments: Any) -> Any:
        """Return the arguments of a call. The tensors that ``known.options`` lists are cut to local
        rows.
        """
        rows, stream = self._rows, self._plan.leave.stream
        if not known.options or rows is None:
            return arguments
        if isinstance(arguments, tuple):
            return tuple(
                self._with_own_options(known, one) if isinstance(one, dict) else one for one in arguments
            )
        for name in OPTIONS:
            if name in arguments:
                options = arguments[name]
                own = {
                    entry: {key: own_rows(rows, stream, value) for key, value in options[entry].items()}
                    for entry in known.options
                }
                arguments = {**arguments, name: {**options, **own}}
        return arguments


def local_entries(
    rows: Rows,
    given: Mapping[str, torch.Tensor],
    entries: tuple[str, ...],
    whole: torch.Tensor,
    streams: tuple[str, ...],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (entry, rows): the local ones of ``whole``, as many as the entry has. The model may
    have split its local tokens by lengths of whole streams.
    """
    own = rows.slice(whole, 1, streams)
    yield from zip(entries, own.split([given[entry].shape[1] for entry in entries], 1), strict=True)


def own_rows(rows: Rows, stream: str, tensor_BLC: torch.Tensor) -> torch.Tensor:
    """Return the rows of a patch's tensor that belong to local tokens. The tensor has one row for
    each of the stream's first tokens.
    """
    start, size = rows.local[stream]
    return tensor_BLC[:, start : start + size]


@contextmanager
def own_attributes(rows: Rows, stream: str, known: BlockPatch, patch: Any) -> Iterator[None]:
    """Let a patch see its attributes cut to the local rows."""
    whole = {name: getattr(patch, name) for name in known.attributes}
    try:
        for name, tensor in whole.items():
            setattr(patch, name, own_rows(rows, stream, tensor))
        yield
    finally:
        for name, tensor in whole.items():
            setattr(patch, name, tensor)
