"""Adapters in bypass mode (the node Load LoRA (Bypass)): a LoRA that is computed beside each layer,
not added to its weights. They are packed as plain data in the UI, and injected in a rank by
ComfyUI's own hooks.

Read: comfy/weight_adapter/bypass.py, comfy/sd.py (load_bypass_lora_for_models) @ ComfyUI 0.30.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..forward import PREFIX

BYPASS = "bypass adapters"  # their name among the object patches of a rank


def adapters_of(injection: Any) -> dict[str, tuple[Any, float]] | None:
    """Returns the adapters that an injection puts beside layers, by the layers' names: (adapter,
    strength). None if it is another pack's, or trains.
    """
    from comfy.weight_adapter import WeightAdapterBase
    from comfy.weight_adapter.bypass import BypassInjectionManager

    inject = getattr(injection, "inject", None)
    if getattr(inject, "__module__", "") != BypassInjectionManager.__module__:
        return None
    managers = [cell.cell_contents for cell in getattr(inject, "__closure__", None) or ()]
    if len(managers) != 1 or not isinstance(managers[0], BypassInjectionManager):
        return None
    adapters = managers[0].adapters
    return (
        adapters if all(isinstance(adapter, WeightAdapterBase) for adapter, _ in adapters.values()) else None
    )


def pack_bypass(injections: dict[str, Iterable[Any]]) -> dict[str, list]:
    """Returns the adapters of a MODEL's injections as an object patch; nothing if there are
    none.
    """
    packed = [
        [key, type(adapter).__name__, adapter.weights, strength]
        for items in injections.values()
        for injection in items
        for key, (adapter, strength) in (adapters_of(injection) or {}).items()
        if key.startswith(PREFIX)
    ]
    return {BYPASS: packed} if packed else {}


def put_bypass(model: Any, packed: list) -> Callable[[], Any]:
    """In a rank: injects adapters beside the layers that it has. Returns a function that removes
    them.
    """
    import comfy.utils
    import comfy.weight_adapter
    from comfy.weight_adapter.bypass import BypassForwardHook

    hooks = []
    for key, kind, weights, strength in packed:
        try:
            module = comfy.utils.get_attr(model, key)
        except AttributeError:  # another stage's
            continue
        hooks.append(BypassForwardHook(module, getattr(comfy.weight_adapter, kind)(set(), weights), strength))
    for hook in hooks:
        hook.inject()
    return lambda: [hook.eject() for hook in reversed(hooks)]
