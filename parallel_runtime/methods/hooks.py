"""Apply a token plan to a model: hooks let its blocks run on some rows of every stream.

A Sharding decides which rows, and what attention over them sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..comm.device_copies import to_device
from ..families.plan import Along, Blocks, BranchTokens, Leave, TokenPlan
from ..forward import binder
from .blocks import as_BLC, as_given, blocks_of, entry_of, forward_of, put, taken
from .entries import MethodHook
from .inserts import Inserted, inserts_of, modules_at
from .node_patches import OVERRIDE, NodePatches
from .override import (
    ASKED,
    NOTHING,
    Attention,
    AttentionOverride,
    Overridden,
    by_name,
    in_its_place,
    told_of,
    with_override,
)
from .sharding import Sharding
from .shards import KeysByFrame, Rows


class TokenHooks:
    """Hooks on one model from ``attach`` to ``detach``. ``patches``: what nodes attached to it.
    ``told``: rows of ``lengths`` and of the prefix in the evaluation at hand.
    """

    def __init__(self, model: nn.Module, plan: TokenPlan, sharding: Sharding):
        self._model = model
        self._plan = plan
        self._sharding = sharding
        self._rows: Rows | None = None
        self._control: dict[str, list] | None = None
        self.told: dict[str, int] = {}
        self._has_entered = False  # a block of this evaluation
        self._is_prefix_alone = False  # what the block at hand is given
        # All rows of what the block makes its mask of
        self._key_mask: tuple[torch.Tensor, Along] | None = None
        self._attention = AttentionOverride()
        self.patches = NodePatches(model, plan, sharding, self._attention)
        self._handles: list[Any] = []

    def attach(self) -> None:
        self._handles += told_of(self._model, self._attention)
        for stream, path in self._plan.blocks[0].lengths.items():
            self._behind(self._model.get_submodule(path), partial(told_by, self.told, stream))
        for group in self._plan.blocks:
            if group.branch is not None:
                own = next(iter(group.tokens.values()))[0]
                module = self._model.get_submodule(group.branch.counted_by)
                self._behind(module, partial(counted_by, self.told, own))
        blocks = list(blocks_of(self._model, self._plan))
        for place, (container, index, group) in enumerate(blocks):
            self._attach_block(container[index], group, index, first=place == 0)
        for insert in inserts_of(self._plan):
            for module in modules_at(self._model, insert.path):
                inserted = Inserted(insert, binder(forward_of(module)), lambda: self._rows)
                self._before(module, inserted.enter)
                self._behind(module, inserted.leave)
        if self._plan.leaves_behind_blocks:
            container, index, group = blocks[-1]
            self._behind(container[index], partial(self._left_behind, group))
            return
        for leave in map(self._model.get_submodule, self._plan.leave.paths):
            # Else leave them be: some modules take arguments by position only
            if self._plan.leave.along or self._plan.leave.ranges:
                self._before(leave, self._entering_leave(leave))
            self._behind(leave, self._left)

    def _before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _behind(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _attach_block(self, block: nn.Module, group: Blocks, index: int, first: bool) -> None:
        entering, leaving = (
            self._entering(block, group, index, first),
            lambda *_: self._attention.share(False),
        )
        if group.entry == "forward":
            self._before(block, entering)
            self._behind(block, leaving)
        else:
            self._handles.append(MethodHook(block, group.entry, entering, leaving))
        if group.branch is not None:
            for called in filter(None, (group.branch, group.branch.kept)):
                in_branch = self._entering_branch(block, group.branch, called.entry, called.tokens)
                self._handles.append(MethodHook(block, called.entry, in_branch, leaving))
        if group.sliced_between:
            self._behind(block, lambda _block, _args, out: spread(self._rows, group, out))
        if hasattr(block, "stands_for"):
            return
        if group.without_options:
            module = block.get_submodule(group.without_options)
            self._handles.append(Overridden(module, partial(with_override, self._attention)))
        inner = {**dict.fromkeys(group.local, False), **dict.fromkeys(group.whole_queries, "keys")}
        for path, shared in inner.items():
            self._before(block.get_submodule(path), lambda *_, shared=shared: self._attention.share(shared))
            self._behind(block.get_submodule(path), lambda *_: self._attention.share(True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.patches.detach()
        self._attention.close()

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin an evaluation: return the arguments to call the model's forward with."""
        self._rows, self._has_entered = None, False
        self.told.clear()
        if self._plan.prefix is not None:
            self.told[self._plan.prefix.stream] = arguments.get(self._plan.prefix.counted_by) or 0
        self._attention.share(False)
        control = arguments.get("control")
        self._control = dict(control) if control else None
        options = self.patches.begin(arguments.get("transformer_options", {}))
        options[OVERRIDE] = self._attention
        self._attention.attend, self._attention.options = self._attend, options
        return {
            **arguments,
            "transformer_options": options,
            **({"control": self._control} if self._control else {}),
        }

    def end_run(self) -> None:
        """Free the tensors that were made from the last evaluation's arguments."""
        self._rows = self._control = self._key_mask = None
        self._attention.close()
        self.patches.end()
        if self._plan.prefix is not None and self._plan.prefix.forget:
            getattr(self._model, self._plan.prefix.forget)()

    def _left(self, _module: nn.Module, _args: Any, out_BlC: torch.Tensor) -> torch.Tensor | None:
        leave = self._plan.leave
        if self._rows is None:
            return self._sharding.leave(None, out_BlC)
        return gathered(self._rows, leave, self._sharding, leave.streams or (leave.stream,), out_BlC)

    def _left_behind(self, group: Blocks, _block: nn.Module, _args: Any, out: Any) -> Any:
        """Gather the leaving stream's rows in the output of the last block."""
        if self._rows is None or self._is_prefix_alone:
            return None
        returned = list(out) if isinstance(out, tuple) else [out]
        place, streams = next(
            (place, group.tokens[arg])
            for place, arg in enumerate(group.returns)
            if self._plan.leave.stream in group.tokens.get(arg, ())
        )
        whole = gathered(self._rows, self._plan.leave, self._sharding, streams, as_BLC(returned[place]))
        if whole is None:
            return None
        if self._rows.behind is not None:
            self._rows.behind()
        returned[place] = as_given(whole, self._rows.grid)
        return tuple(returned) if isinstance(out, tuple) else returned[0]

    def _attend(
        self, attention: Attention, q, k, v, heads: int, mask=None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The host's ``optimized_attention_override``. Attention outside the plan's blocks passes
        through: it sees nothing that is cut.
        """
        attention = in_its_place(attention, self.patches.override, kwargs.pop(ASKED, NOTHING))
        prefix = self._plan.prefix
        sees_prefix_alone = prefix is not None and k.shape[-2] <= self.told[prefix.stream]
        if sees_prefix_alone or not self._attention.shared:
            return attention(q, k, v, heads, mask, *args, **kwargs)
        if mask is not None and self._rows is not None and self._key_mask is not None:
            mask = self._rows.key_mask(*self._key_mask, mask)
        attend = self._sharding.attend_over if self._attention.shared == "keys" else self._sharding.attend
        return attend(self._rows, attention, q, k, v, heads, mask, **by_name(args), **kwargs)

    def _entering(self, block: nn.Module, group: Blocks, index: int, first: bool) -> Callable:
        bind = binder(entry_of(block, group), group.positional)
        by_tokens = (*group.along, *group.ranges)
        masks = [item for item in group.along if item.masks_keys]
        # By itself where the model does not give blocks its keys and values
        prefix = group.prefix if group.prefix is not None and not group.prefix.kept_in else None

        def hook(_block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            arguments = bind(args, kwargs)
            self._is_prefix_alone = prefix is not None and (
                arguments[prefix.counted_by] == taken(arguments, next(iter(group.tokens))).shape[1]
            )
            if self._is_prefix_alone:
                return (), arguments
            self.patches.entered.count += 1
            if first and (group.branch is None or not self._has_entered):
                self._enter(group, arguments)
            elif self._rows is not None and (group.interleaved or group.sliced_between or group.branch):
                arguments |= {
                    arg: self._rows.localized(arguments[arg], streams, group.sliced_between)
                    for arg, streams in group.tokens.items()
                }
            given = [(arguments[item.arg], item) for item in masks if item.arg in arguments]
            self._key_mask = given[0] if given else None
            if self._rows is not None and group.branch is not None:
                self._rows.attending = next(iter(group.tokens.values()))
                self._rows.by_frame = keys_by_frame(group.branch, arguments)
            if self._rows is not None:
                self._rows.cut(arguments, by_tokens)
            self._attention.share(True)
            if self.patches.points is not None:
                self.patches.points.enter(self._rows, group, index)
            self._sharding.enter_block()
            return (), arguments

        return hook

    def _entering_branch(self, block: nn.Module, branch: BranchTokens, entry: str, argument: str) -> Callable:
        bind, streams = binder(getattr(type(block), entry)), (branch.stream,)

        def hook(_block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            arguments = bind(args, kwargs)
            tokens = arguments[argument]
            if not self._has_entered:
                self._has_entered = True
                self._rows = self._sharding.choose_rows({**self.told, branch.stream: tokens.shape[1]})
            if self._rows is not None:
                arguments[argument] = self._rows.localized(tokens, streams)
                self._rows.attending, self._rows.by_frame = streams, None
                self._rows.cut(arguments, branch.along)
            self._attention.share(True)
            self._sharding.enter_block()
            return (), arguments

        return hook

    def _enter(self, group: Blocks, arguments: dict[str, Any]) -> None:
        self._has_entered = True
        tokens = {arg: taken(arguments, arg) for arg in group.tokens}
        grid = next(iter(tokens.values())).shape[1:-1]
        tokens = {arg: as_BLC(one) for arg, one in tokens.items()}
        prefix = group.prefix
        if prefix is not None and not prefix.kept_in:
            self.told[prefix.stream] = arguments[prefix.counted_by]
        elif prefix is not None and arguments.get(prefix.kept_in):
            self.told[prefix.stream] = 0
        lengths: dict[str, int] = {}
        for arg, streams in group.tokens.items():
            told = {stream: self.told.get(stream, 0) for stream in streams if stream in group.told}
            (rest,) = set(streams) - set(told)
            lengths |= {**told, rest: tokens[arg].shape[1] - sum(told.values())}
        self._rows = self._sharding.choose_rows(
            {
                stream: lengths[stream]
                for stream in self._plan.streams
                if stream in lengths or not group.branch
            }
        )
        if prefix is not None and self._rows is not None:
            self._rows.keep_whole(prefix.stream, lengths[prefix.stream])
        if self._control:
            device = taken(arguments, next(iter(group.tokens))).device
            if self._rows is not None:
                self._rows.behind = last_residual(self._control, self._model, self._plan, device)
            bring_control(self._control, self._plan, self._rows, self._sharding, device)
            self._control = None  # the forward has it: what was brought goes with the forward
        if self._rows is None:
            return
        self._rows.grid = grid
        for arg, streams in group.tokens.items():
            put(arguments, arg, as_given(self._rows.slice(tokens[arg], 1, streams), (-1, 1, 1)[: len(grid)]))

    def _entering_leave(self, module: nn.Module) -> Callable:
        bind, by_tokens = binder(forward_of(module)), (*self._plan.leave.along, *self._plan.leave.ranges)

        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            arguments = bind(args, kwargs)
            if self._rows is not None:
                self._rows.cut(arguments, by_tokens)
            return (), arguments

        return hook


def told_by(told: dict[str, int], stream: str, _module: nn.Module, _args: Any, out_BLC: torch.Tensor) -> None:
    """Note the rows of a stream, as a forward hook."""
    told[stream] = out_BLC.shape[1]


def counted_by(told: dict[str, int], stream: str, _module: nn.Module, _args: Any, out: torch.Tensor) -> None:
    """Note the rows of the first output (B, C, ...) in an evaluation, as a forward hook."""
    told.setdefault(stream, out.shape[2:].numel())


def keys_by_frame(branch: BranchTokens, arguments: dict[str, Any]) -> KeysByFrame | None:
    """Take a branch's keys and values from the arguments of a block, which attends to its own alone
    then: ``SequenceAttention`` adds them.
    """
    keys, values = (arguments[name] for name in branch.keys)
    arguments |= dict.fromkeys(branch.keys)
    if keys is None:
        return None
    return KeysByFrame(keys.transpose(1, 2), values.transpose(1, 2), branch.stream, arguments[branch.frame])


def bring_control(
    control: dict[str, list], plan: TokenPlan, rows: Rows | None, sharding: Sharding, device: torch.device
) -> None:
    """Move the local rows of the ControlNet residuals that are added on this rank to ``device``;
    all other rows stay in place. A host repeats the residuals of a net with fewer blocks: a
    residual that stands in several places is moved once.
    """
    own = slice(None)
    if rows is not None:
        start, size = rows.local[plan.leave.stream]
        own = slice(start, start + size)
    brought: dict[tuple, torch.Tensor] = {}

    def bring(residual: torch.Tensor) -> torch.Tensor:
        key = (residual.data_ptr(), residual.shape, residual.stride(), residual.dtype)
        if key not in brought:
            brought[key] = to_device(residual[:, own], device)
        return brought[key]

    for key, path in {group.control: group.path for group in plan.blocks}.items():
        if control.get(key) is not None:
            control[key] = [
                bring(residual) if residual is not None and sharding.acts_behind(path, block) else None
                for block, residual in enumerate(control[key])
            ]


def last_residual(
    control: dict[str, list], model: nn.Module, plan: TokenPlan, device: torch.device
) -> Callable[[], None] | None:
    """Return a function that brings all rows of the residual behind the last block, for a model
    whose rows leave behind that block. None if there is no such residual.
    """
    last = plan.blocks[-1]
    block = len(list(model.get_submodule(last.path).children())) - 1
    residuals = control.get(last.control) or ()
    if not plan.leaves_behind_blocks or len(residuals) <= block or residuals[block] is None:
        return None

    def bring_whole() -> None:
        if control[last.control][block] is not None:
            control[last.control][block] = to_device(residuals[block], device)

    return bring_whole


def gathered(
    rows: Rows, leave: Leave, sharding: Sharding, streams: Sequence[str], out_BlC: torch.Tensor
) -> torch.Tensor | None:
    """Return ``out_BlC``, the local rows of ``streams``, with all rows of the one that leaves; of
    the others as many as the model expects. None leaves it as it is.
    """
    parts = list(out_BlC.split([rows.local[stream][1] for stream in streams], dim=1))
    own = streams.index(leave.stream)
    left = sharding.leave(rows, parts[own])
    if left is None:
        return None
    if leave.streams:
        return rows.among(left, leave.stream, leave.streams)
    parts[own] = left
    return torch.cat(parts, dim=1) if len(parts) > 1 else left


def spread(rows: Rows | None, group: Blocks, out: Any) -> Any:
    """Widen a block's output to all rows of the streams that the model slices behind the block."""
    if rows is None:
        return None
    returned = list(out) if isinstance(out, tuple) else [out]
    for place, arg in enumerate(group.returns):
        returned[place] = rows.spread(returned[place], group.tokens.get(arg, ()), group.sliced_between)
    return tuple(returned) if isinstance(out, tuple) else returned[0]


def split_heads(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """(B, l, H*D) or (B, l, H, D) -> (B, H, l, D)."""
    return tensor.reshape(*tensor.shape[:2], -1, dim).transpose(1, 2)
