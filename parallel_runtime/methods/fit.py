"""Check that a token plan fits the model of this host."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from ..errors import Refused
from ..families.plan import Blocks, Leave, TokenPlan
from .blocks import blocks_of, entry_of, forward_of
from .inserts import inserts_of, modules_at


def require_fit(model: nn.Module, plan: TokenPlan) -> None:
    """Raise Refused if the plan names a module or an argument that the model does not have. A host
    that renamed one would be given rows that do not belong together: hooks leave out what is not
    there, and no sample of a trial fills every argument.
    """
    modules = dict(model.named_modules())
    told = [path for group in plan.blocks for path in (group.path, *group.lengths.values())]
    for path in (*told, *plan.leave.paths, *plan.together.refiners):
        if path not in modules:
            raise Refused(_misfit(model, plan, path))
    if plan.prefix is not None:
        forward = inspect.signature(getattr(type(model), "_forward", type(model).forward))
        if plan.prefix.kept_in and plan.prefix.counted_by not in forward.parameters:
            raise Refused(_misfit(model, plan, plan.prefix.counted_by))
        if plan.prefix.forget and not hasattr(model, plan.prefix.forget):
            raise Refused(_misfit(model, plan, plan.prefix.forget))
    for container, index, group in blocks_of(model, plan):
        for path in (*group.local, *group.whole_queries, *filter(None, (group.without_options,))):
            if path not in dict(container[index].named_modules()):
                raise Refused(_misfit(model, plan, f"{group.path}.{index}.{path}"))
        branch = group.branch
        kept = branch.kept if branch is not None else None
        for name in [called.entry for called in (group, branch, kept) if called is not None]:
            if not hasattr(container[index], name):
                raise Refused(_misfit(model, plan, f"{group.path}.{index}.{name}"))
        entry = entry_of(container[index], group)
        more = {branch.frame, *branch.keys} if branch is not None else set()
        along = {one.arg for one in branch.along} if branch is not None else set()
        _require_arguments(model, plan, group.path, entry, (_named(group) | more) - {*group.positional})
        for called in filter(None, (branch, kept)):
            of_branch = getattr(type(container[index]), called.entry)
            _require_arguments(model, plan, group.path, of_branch, {called.tokens} | along)
    for path in plan.leave.paths:
        _require_arguments(model, plan, path, forward_of(modules[path]), _named(plan.leave))
    for insert in inserts_of(plan):
        module = next(modules_at(model, insert.path), None)
        if module is None:
            raise Refused(_misfit(model, plan, insert.path))
        frames = (
            {insert.frames.tokens, *insert.frames.each, insert.frames.count} - {""}
            if insert.frames
            else set()
        )
        _require_arguments(
            model, plan, insert.path, forward_of(module), {one.arg for one in insert.along} | frames
        )


def _named(item: Blocks | Leave) -> set[str]:
    tokens = (*item.tokens, *item.returns) if isinstance(item, Blocks) else ()
    if isinstance(item, Blocks) and item.prefix:
        tokens += (item.prefix.kept_in or item.prefix.counted_by,)
    return {one.arg for one in (*item.along, *item.ranges)} | {name.partition(".")[0] for name in tokens}


def _require_arguments(
    model: nn.Module, plan: TokenPlan, path: str, entry: Callable, wanted: set[str]
) -> None:
    parameters = inspect.signature(entry).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in sorted(wanted - set(parameters)) if not takes_any else ():
        raise Refused(_misfit(model, plan, f"{path}({name}=)"))


def _misfit(model: nn.Module, plan: TokenPlan, name: str) -> str:
    return (
        f"{type(model).__name__} of this ComfyUI has no {name}, which its plan names: update"
        " PipeMesh, or sample without it."
    )
