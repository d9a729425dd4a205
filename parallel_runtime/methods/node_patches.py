"""Apply the patches that nodes attach to a model's blocks: blocks that are left out, the choice of
an attention function, ``torch.compile``, and functions in the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..errors import Refused
from ..families.plan import COMPILE, LEFT_OUT, TokenPlan
from ..refusals import ON_ONE_GPU
from .blocks import EnteredBlocks, blocks_of
from .compiled_blocks import CompiledBlocks
from .override import AttentionOverride
from .patch_points import PatchPoints
from .sharding import Sharding

OVERRIDE = "optimized_attention_override"  # ComfyUI's name of the option that replaces attention


class NodePatches:
    """Holds the patches that nodes attached to one model, from ``begin`` of an evaluation to the
    next ``begin`` or to ``end``. Compiled blocks stay for the next run, until an evaluation no
    longer wants them. ``attention`` is the model's own attention, which graphs call. ``override``
    is the node's function that is called in place of an attention. Patches are called at
    ``points``, if the evaluation has any. ``entered`` counts the blocks that ran with their hooks.
    """

    def __init__(self, model: nn.Module, plan: TokenPlan, sharding: Sharding, attention: AttentionOverride):
        self._model = model
        self._plan = plan
        self._sharding = sharding
        self._attention = attention
        self._compiled: CompiledBlocks | None = None
        self.entered = EnteredBlocks(type(model).__name__)
        self.override: Callable[..., Any] | None = None
        self._left_out: list[tuple[nn.Module, Any]] = []  # blocks, and what stood for their forward before
        self.points: PatchPoints | None = None

    def begin(self, options: dict[str, Any]) -> dict[str, Any]:
        """Begin an evaluation: return its ``transformer_options`` for the model. Of these,
        ``patches`` are (name, function) by point.
        """
        options = dict(options)
        self.entered.count = 0
        self.override, self.points = options.pop(OVERRIDE, None), None
        if self._left_out:
            self._put_back()
        compilation, left_out = options.pop(COMPILE, None), options.pop(LEFT_OUT, ())
        if options.get("patches"):
            compilation = None  # a graph would keep the patches it was made with
        if self._compiled is not None or compilation is not None:
            self._compile(compilation)
        if left_out:
            self._leave_out(left_out)
        if patches := options.pop("patches", {}):
            self.points = PatchPoints(self._model, self._plan, self._sharding)
            options["patches"] = self.points.called(patches)
        return options

    def end(self) -> None:
        """Free the memory of the run's patches."""
        self.entered.forget()
        self.override = self.points = None
        if self._compiled is not None:
            self._compiled.detach()
        self._put_back()

    def detach(self) -> None:
        """Leave the model as it was."""
        self.begin({})

    def _compile(self, wanted: Mapping[str, Any] | None) -> None:
        if self._compiled is not None and self._compiled.wanted != wanted:
            self._compiled.remove()
            self._compiled = None
        if self._compiled is None and wanted is not None:
            self._compiled = CompiledBlocks(self._model, self._plan, wanted, self._attention)
        if self._compiled is not None:
            self._compiled.attach()

    def _put_back(self) -> None:
        """Let blocks that were left out compute again."""
        while self._left_out:
            block, before = self._left_out.pop()
            del block.forward
            if before is not None:
                block.forward = before

    def _leave_out(self, blocks: Sequence[tuple[str, int]]) -> None:
        """Let these blocks, (kind, index), return their tokens as they come. Hooks stay in place:
        rows enter, travel and leave as ever.
        """
        wanted, kinds = set(blocks), kinds_of(self._model, self._plan)
        if self._plan.prefix is not None or any(group.branch for group in self._plan.blocks):
            # The model asks every block for the keys and values that it keeps, or hands on.
            raise Refused(
                f"No block of {type(self._model).__name__} can be left out in the pool: remove the node that"
                f" does so, or {ON_ONE_GPU}."
            )
        if (
            any(group.interleaved for group in self._plan.blocks)
            and (next(iter(kinds.values()), ""), 0) in wanted
        ):
            # Behind it the host adds to the tokens in place, which other blocks are given too.
            raise Refused(
                f"The first block of {type(self._model).__name__} cannot be left out in the pool: "
                f"take it off the list of layers of the node, or {ON_ONE_GPU}."
            )
        for container, index, group in blocks_of(self._model, self._plan):
            block = container[index]
            if (kinds.get(group.path), index) in wanted and not hasattr(block, "stands_for"):
                self._left_out.append((block, vars(block).get("forward")))
                block.forward = partial(pass_through, group.returns)


def kinds_of(model: nn.Module, plan: TokenPlan) -> dict[str, str]:
    """Return, for the path of each container of blocks, the name under which the model looks up
    replacements of its blocks: "double_block" or "single_block". Containers whose blocks cannot be
    replaced are left out.
    """
    methods = (method for kind in type(model).__mro__ for method in vars(kind).values())
    looked_up = {
        constant
        for method in methods
        for constant in getattr(getattr(method, "__code__", None), "co_consts", ())
    }
    kinds: dict[str, str] = {}
    for group in plan.blocks:
        kind = "single_block" if "single" in group.path else "double_block"
        if {"patches_replace", kind} <= looked_up and kind not in kinds.values():
            kinds[group.path] = kind
    return kinds


def pass_through(returns: Sequence[str], **arguments: Any) -> Any:
    """Return the tokens as a block that ``returns`` these arguments does."""
    tokens = [arguments[name] for name in dict.fromkeys(name.partition(".")[0] for name in returns)]
    return tuple(tokens) if len(tokens) > 1 else tokens[0]
