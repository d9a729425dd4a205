"""Finds the changes that other packs made to a transformer in place: to the methods, hooks, classes
and submodules of its modules, and to ComfyUI's own functions that they use.

ComfyUI does not know of such changes, and ranks build the model without them: a change that is not
found here would silently have no effect, or keep the forward from the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import Refused
from ..refusals import ON_ONE_GPU, patch_name
from .attributes import ModuleAttributes
from .host_code import HostFunctions, edited_code, replaced_code
from .python_file import LIBRARIES, root_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def require_unchanged(
    diffusion_model: torch.nn.Module, ours: Sequence[Any] = (), operations: Any = None
) -> None:
    """Raises Refused for the first change in place, naming it. ``ours`` are those of PipeMesh
    itself; ``operations``: the class whose layers the loader chose.
    """
    trusted = LIBRARIES | {root_of(type(diffusion_model)), root_of(operations)}
    for path, module in diffusion_model.named_modules():
        for what, culprit in _changes_of(module, ours, trusted):
            raise refused_change(path, what, culprit)
    for where, culprit in replaced_code(diffusion_model, trusted):
        raise refusal_of_code(where, culprit)
    for file, function in edited_code(diffusion_model):
        raise Refused(
            f"{file} was edited after ComfyUI imported it ({function} differs), and ranks would import the"
            " new version: restart ComfyUI."
        )


class Watch:
    """A transformer as it was when it was loaded, for a check so short that every evaluation can
    have it: tens of microseconds for a thousand modules.
    """

    def __init__(
        self,
        diffusion_model: torch.nn.Module,
        ours: Sequence[Any] = (),
        operations: Any = None,
        attributes: Sequence[ModuleAttributes] = (),
        check_state: Callable[[], None] | None = None,
        before: Watch | None = None,
    ):
        """``check_state`` raises Refused for values that were set since in the modules of packs
        whose code ranks run. ``before`` is an earlier Watch of the same transformer; its records
        are taken over if they still hold.
        """
        self._model = diffusion_model
        self._attributes = attributes
        self._check_state = check_state
        self._ours = ours
        self._operations = operations
        if before is not None and before.holds(ours):
            self._seen, self._code = before._seen, before._code
        else:
            self._record()

    def _record(self) -> None:
        self._seen = [
            (
                module,
                type(module),
                own := vars(module),
                len(own),
                (*methods_of(module),),
                own["_modules"],
                dict(own["_modules"]),
                *(own[name] for name in HOOKS),
            )
            for module in self._model.modules()
        ]
        self._code = HostFunctions(self._model)

    def holds(self, ours: Sequence[Any] = ()) -> bool:
        """Returns whether all modules and functions are the recorded ones, without hooks: then all
        that was found before still holds. ``ours`` are PipeMesh's own functions since.
        """
        ours = (*self._ours, *ours)
        return self._code.changed() is None and all(
            module.__class__ is kind
            and len(own) == count
            and not any(_is_replaced(module, name, own.get(name), ours) for name in methods)
            and own["_modules"] is children
            and children == before
            and not (hooks or pre_hooks)
            for module, kind, own, count, methods, children, before, hooks, pre_hooks in self._seen
        )

    def check(self) -> None:
        """Raises Refused for a change since, naming it. Only the watched attributes are compared:
        ComfyUI itself sets others.
        """
        for watched in self._attributes:
            if watched.get(watched.own) != watched.before:
                raise watched.refusal()
        if self._check_state is not None:
            self._check_state()
        replaced = self._code.changed()
        if replaced is not None:
            raise refusal_of_code(*replaced)
        changed = False
        for module, kind, own, count, _methods, children, before, hooks, pre_hooks in self._seen:
            if module.__class__ is not kind or len(own) != count or hooks or pre_hooks:
                changed = True
            if own["_modules"] is not children or children != before:
                raise self._swapped(module, before)
        if changed:
            require_unchanged(self._model, self._ours, self._operations)
            for module, kind, *_ in self._seen:
                if module.__class__ is not kind:
                    what = "is of another class than it was loaded with"
                    raise refused_change(self._path_of(module), what, type(module))
            self._record()

    def _swapped(self, module: torch.nn.Module, before: dict[str, torch.nn.Module | None]) -> Refused:
        now = module._modules
        name = next((name for name in {**before, **now} if before.get(name) is not now.get(name)), "")
        path = ".".join(part for part in (self._path_of(module), name) if part)
        child = now.get(name)
        inside = list(child.modules()) if child is not None else []
        inner = next((one for one in inside if root_of(type(one)) not in LIBRARIES), child)
        return refused_change(path, "was swapped while the model samples", type(inner))

    def _path_of(self, module: torch.nn.Module) -> str:
        return next((path for path, one in self._model.named_modules() if one is module), "")


def _changes_of(
    module: torch.nn.Module, ours: Sequence[Any], trusted: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    kind, own = type(module), vars(module)
    if root_of(kind) not in trusted:
        yield "is of a class of another pack", kind
    for name, value in methods_of(module).items():
        if _is_replaced(module, name, value, ours):
            yield f"has its method {name} replaced in place", value
    for name in HOOKS:
        for hook in own[name].values():
            yield "has a forward hook", hook


def methods_of(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the attributes of the module itself that hide methods of its class."""
    kind = type(module)
    return {name: value for name, value in vars(module).items() if callable(value) and hasattr(kind, name)}


def _is_replaced(module: torch.nn.Module, name: str, value: Any, ours: Sequence[Any]) -> bool:
    """Returns whether a method was replaced. False for the module's own method, which ComfyUI puts
    back after it took a replacement away.
    """
    own = getattr(type(module), name)
    is_own = getattr(value, "__self__", None) is module and getattr(value, "__func__", None) is own
    return not is_own and not any(value is one for one in ours)


def refused_change(path: str, what: str, culprit: Any) -> Refused:
    """Makes the error of a change at ``path`` below the transformer, made by ``culprit``."""
    name = patch_name(culprit)
    caches = "cache" in name.lower()
    move = "use EasyCache in its place, which works in the pool" if caches else "remove the node that does it"
    place = f"diffusion_model.{path}".removesuffix(".")
    return Refused(
        f"{place} of this MODEL {what} ({name}), and the workers do not have that change: {move}, or"
        f" {ON_ONE_GPU}."
    )


def refusal_of_code(where: str, culprit: Any) -> Refused:
    """Makes the error for ComfyUI's function at ``where``, which ``culprit`` has replaced."""
    return Refused(
        f"ComfyUI's {where} was replaced for all models ({patch_name(culprit)}), and the workers do not have"
        f" that change: remove the node or the pack that does it and restart ComfyUI, or {ON_ONE_GPU}."
    )
