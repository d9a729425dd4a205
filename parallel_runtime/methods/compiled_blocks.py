"""Compile a model's blocks (``torch.compile``) below a method.

A block's forward becomes one graph. Hooks on the block run around it as ever. Attention, where a
method exchanges tokens with other ranks, is one operation of the graph that the compiler does not
look into.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import Refused
from ..families.plan import TokenPlan
from .blocks import blocks_of
from .override import ASKED, NOTHING, Attention, AttentionChoice, AttentionOverride, Shared, by_name

# Replayed as a CUDA graph, an attention would send what it sent when it was recorded, and look for
# no cancel. Graphs that hold an operation of this tag are not recorded, or around it.
UNSAFE = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


class CompiledBlocks:
    """The blocks of one model that are compiled until ``remove``; their graphs call ``attention``.

    ``wanted``: ``paths`` of modules of the transformer that are to be compiled, of which "" names
    all, and the ``kwargs`` of ``torch.compile``. A block is compiled where it or a module around it
    is named.
    """

    def __init__(
        self, model: nn.Module, plan: TokenPlan, wanted: Mapping[str, Any], attention: AttentionOverride
    ):
        if not UNSAFE and records_graphs(**wanted["kwargs"]):
            raise Refused(
                f"torch {torch.__version__} would record the ranks' messages into CUDA graphs: have the node"
                " compile with inductor, in another mode than reduce-overhead and max-autotune, or update"
                " torch to 2.9."
            )
        self.wanted = wanted
        self._attention = attention
        self._blocks: list[nn.Module] = []
        for container, index, group in blocks_of(model, plan):
            block = container[index]
            if not hasattr(block, "stands_for") and is_compiled(f"{group.path}.{index}", wanted["paths"]):
                block.forward = torch.compile(block.forward, **with_own_guards(**wanted["kwargs"]))
                self._blocks.append(block)

    def attach(self) -> None:
        """Have graphs call this model's attention until ``detach``."""
        self._attention.opaque = opaque_attention()
        opaque_attention().override = self._attention

    def detach(self) -> None:
        opaque_attention().override = self._attention.opaque = None

    def remove(self) -> None:
        for block in self._blocks:
            del block.forward
        self._blocks.clear()
        self.detach()


def records_graphs(
    backend: object = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_rest: Any,
) -> bool:
    """Whether ``torch.compile`` with these arguments records CUDA graphs."""
    return (
        backend == "cudagraphs"
        or mode in ("reduce-overhead", "max-autotune")
        or bool((options or {}).get("triton.cudagraphs"))
    )


def is_compiled(path: str, paths: Collection[str]) -> bool:
    return any(not one or path == one or path.startswith(f"{one}.") for one in paths)


def with_own_guards(
    mode: str | None = None, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Return the arguments with a filter of guards among the options, which ``torch.compile`` does
    not take beside a mode.
    """
    of_mode = torch._inductor.list_mode_options(mode) if mode else {}
    return {**kwargs, "options": {**of_mode, **(options or {}), "guard_filter_fn": guards_to_keep}}


def guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Let a graph stand for all evaluations of a shape, as ComfyUI's TorchCompileModel does:
    ``transformer_options`` change with every step, and its values would be guarded.
    """
    return ["transformer_options" not in guard.name for guard in guards]


class Note(NamedTuple):
    """Keeps the parts of a call that are no tensors. ``functions`` are the function that it calls,
    and the functions of its ``AttentionChoice``.
    """

    functions: tuple[weakref.ref[Any] | None, ...]
    args: tuple
    kwargs: dict[str, Any]
    shared: Shared

    @property
    def is_void(self) -> bool:
        return any(one is not None and one() is None for one in self.functions)


@cache
def opaque_attention() -> OpaqueAttention:
    """Return the operation of this process: torch keeps graphs per process and class, so that a
    graph made for one model serves another.
    """
    return OpaqueAttention()


class OpaqueAttention:
    """The operation that graphs call for an attention. ``override``: of the evaluation at hand.

    All that a call has besides tensors is constant in a graph: it is noted while the graph is made,
    and the graph holds the note's number. A note keeps no function that its model brought: without
    it no graph calls it, and the next note has its number.
    """

    def __init__(self) -> None:
        self.override: AttentionOverride | None = None
        self._notes: list[Note] = []
        self._library = torch.library.Library("pipemesh", "DEF")
        self._library.define(
            "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, int note) -> Tensor", tags=UNSAFE
        )
        self._library.impl("attend", self._attend, "CompositeExplicitAutograd")
        torch.library.register_fake("pipemesh::attend", self._like, lib=self._library)
        self._operation = torch.ops.pipemesh.attend

    def __call__(
        self, attention: Attention, q, k, v, heads: int, mask=None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        kwargs.pop("transformer_options", None)
        assert self.override is not None
        number = self._note(
            attention, (heads, *args), tuple(kwargs), tuple(kwargs.values()), self.override.shared
        )
        return self._operation(q, k, v, mask, number)

    @torch.compiler.assume_constant_result
    def _note(
        self, attention: Attention, args: tuple, names: tuple[str, ...], values: tuple, shared: Shared
    ) -> int:
        kwargs = dict(zip(names, values, strict=True))
        functions = (attention, *kwargs.pop(ASKED, NOTHING))
        held = tuple(one if one is None else weakref.ref(one) for one in functions)
        note = Note(held, args, kwargs, shared)
        if note not in self._notes:
            assert self.override is not None
            self.override.brought += functions
            void = (place for place, one in enumerate(self._notes) if one.is_void)
            place = next(void, len(self._notes))
            self._notes[place : place + 1] = [note]
        return self._notes.index(note)

    def _attend(self, q, k, v, mask: torch.Tensor | None, note: int) -> torch.Tensor:
        functions, (heads, *args), kwargs, shared = self._notes[note]
        attention, *asked = (one if one is None else one() for one in functions)
        override = self.override
        assert override is not None and override.attend is not None
        before = override.shared
        override.share(shared)
        try:
            kwargs = {**kwargs, ASKED: AttentionChoice(*asked), "transformer_options": override.options}
            return override.attend(attention, q, k, v, heads, mask, *args, **kwargs).contiguous()
        finally:
            override.share(before)

    def _like(self, q, k, v, mask: torch.Tensor | None, note: int) -> torch.Tensor:
        """An empty tensor of the output's shape, (B, L, H*D) or (B, H, L, D)."""
        _functions, (heads, *args), kwargs, _shared = self._notes[note]
        given = {**by_name(tuple(args)), **kwargs}
        by_heads = given.get("skip_reshape", False)
        batch, tokens = q.shape[0], q.shape[-2 if by_heads else 1]
        dim = v.shape[-1] if by_heads else q.shape[-1] // heads
        return q.new_empty(
            (batch, heads, tokens, dim)
            if given.get("skip_output_reshape", False)
            else (batch, tokens, heads * dim)
        )
