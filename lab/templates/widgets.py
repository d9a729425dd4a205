"""The inputs and widgets of a node, from the server's /object_info and the values in a workflow.

Follows the frontend (comfyui-frontend-package@1.47.12): which inputs have a widget, in which order
they take the values of ``widgets_values``, and which of them a prompt has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .dynamic_prompt import first_choice
from .workflow import UNSET, GraphError, Node, Raw, Slot, Widget, saved_slots

AUTOGROW, DYNAMIC_COMBO, MATCH_TYPE = "COMFY_AUTOGROW_V3", "COMFY_DYNAMICCOMBO_V3", "COMFY_MATCHTYPE_V3"
SEEDS = ("seed", "noise_seed")
UPLOADS = ("image_upload", "video_upload", "animated_image_upload")
HAS_PLAYER = ("LoadAudio", "SaveAudio", "PreviewAudio", "SaveAudioMP3", "SaveAudioOpus", "SaveAudioAdvanced")
CUSTOM_COMBO = "CustomCombo"  # the frontend makes its options
REPLACEMENT = re.compile(r"%(date:[^%]*|[^%.]+\.[^%.]+)%")  # in names of files, filled by the frontend

Take = Callable[[Widget], Widget]  # the widget with its saved value


@dataclass(frozen=True)
class Spec:
    """One declared input."""

    name: str
    type: str
    options: Raw

    @property
    def has_widget(self) -> bool:
        return self.widget_type in WIDGETS and not self.options.get("forceInput")

    @property
    def widget_type(self) -> str:
        return self.options.get("widgetType") or self.type


@dataclass(frozen=True)
class Parts:
    slots: tuple[Slot, ...] = ()
    widgets: tuple[Widget, ...] = ()

    def __add__(self, other: Parts) -> Parts:
        return Parts(self.slots + other.slots, self.widgets + other.widgets)


def configured(node: Node, info: Raw) -> Node:
    """The node with the inputs and widgets that its class declares; links and values are those of
    the file.
    """
    specs = _specs(info)
    saved = {slot.name: slot for slot in saved_slots(node.saved)}
    linked = frozenset(slot.name for slot in saved.values() if slot.link is not None)
    values = _values(node.saved, info, specs, linked)
    take = _taker(values)
    parts = _all_parts(specs, take, linked)
    if node.type == CUSTOM_COMBO:
        parts += Parts(widgets=_custom_options(parts.widgets[0], values))
    slots = [
        replace(slot, link=saved[slot.name].link) if slot.name in saved else slot for slot in parts.slots
    ]
    declared = {slot.name for slot in slots}
    groups = tuple(f"{spec.name}." for spec in specs if spec.type == DYNAMIC_COMBO)
    names = {widget.name for widget in parts.widgets}
    slots += [
        slot
        for slot in saved.values()
        if slot.name not in declared
        and not slot.name.startswith(groups)
        and (not slot.widget or slot.widget in names)
    ]
    outputs = tuple(
        "COMBO" if isinstance(output, list) else "*" if output == MATCH_TYPE else output
        for output in info.get("output") or ()
    )
    return replace(
        node, inputs=tuple(slots), widgets=parts.widgets, outputs=outputs + node.outputs[len(outputs) :]
    )


def prompt_value(node: Node, widget: Widget) -> Any:
    """What the prompt has for the widget. A list would be read as a link, so it comes boxed. Raises
    GraphError for a name that only a browser can fill in.
    """
    value = widget.value
    if isinstance(value, str) and widget.is_dynamic_prompt:
        return first_choice(value)
    if isinstance(value, str) and widget.name == "filename_prefix" and REPLACEMENT.search(value):
        raise GraphError(
            f"The file name {value} of node {node.id} ({node.type}) is filled in by the browser: write it"
            " out."
        )
    return boxed(value)


def boxed(value: Any) -> Any:
    return {"__value__": value} if isinstance(value, list) else value


# -- declared inputs


def _specs(info: Raw) -> list[Spec]:
    """Every declared input, in the order of the widgets."""
    declared = info.get("input") or {}
    required = {**(declared.get("required") or {}), **_added(info, declared.get("required") or {})}
    optional = declared.get("optional") or {}
    specs = {
        **{name: _spec(name, raw) for name, raw in required.items()},
        **{name: _spec(name, raw, is_optional=True) for name, raw in optional.items()},
    }
    order = info.get("input_order") or {}
    first = [name for name in order.get("required") or () if name in required and name not in optional]
    first += [name for name in order.get("optional") or () if name in optional]
    return [specs[name] for name in dict.fromkeys([*first, *specs])]


def _spec(name: str, raw: Any, is_optional: bool = False) -> Spec:
    """The options of a combo are ``options["options"]`` in all notations."""
    options = dict(raw[1]) if len(raw) > 1 and raw[1] else {}
    if is_optional and options.get("defaultInput"):
        options["forceInput"] = True
    if isinstance(raw[0], list):
        return Spec(name, "COMBO", {**options, "options": raw[0]})
    return Spec(name, raw[0], options)


def _added(info: Raw, required: Raw) -> dict[str, Any]:
    """Inputs that the frontend adds: players and upload buttons."""
    added: dict[str, Any] = {"audioUI": ["AUDIO_UI"]} if info.get("name") in HAS_PLAYER else {}
    if _options(required.get("audio")).get("audio_upload") is True:
        added["upload"] = ["UPLOAD"]
    for raw in required.values():
        if (isinstance(raw[0], list) or raw[0] == "COMBO") and any(
            _options(raw).get(kind) is True for kind in UPLOADS
        ):
            added["upload"] = ["UPLOAD"]
    return added


def _options(raw: Any) -> Raw:
    return raw[1] if raw and len(raw) > 1 and isinstance(raw[1], Mapping) else {}


# -- values


def _values(saved: Raw, info: Raw, specs: Iterable[Spec], linked: frozenset[str]) -> list[Any] | Raw:
    """``widgets_values`` without the places that forced inputs took in old files."""
    values = saved.get("widgets_values")
    if not isinstance(values, list):
        return values or []
    names = {widget.name for widget in _all_parts(specs, lambda widget: widget, linked).widgets}
    forced: list[bool] = []
    for spec in specs:
        if spec.name in names or spec.options.get("forceInput"):
            forced += [
                bool(spec.options.get("forceInput")),
                *([False] if spec.options.get("control_after_generate") else []),
            ]
    if len(forced) != len(values):
        return values
    return [value for value, is_forced in zip(values, forced, strict=True) if not is_forced]


def _taker(values: list[Any] | Raw) -> Take:
    """Takes values in their order, or by name where a pack's script has saved them so. A combo
    without a value has its first.
    """
    rest: Iterator[Any] = iter(values if isinstance(values, list) else ())

    def take(widget: Widget) -> Widget:
        if isinstance(values, Mapping):
            value = values.get(widget.name, widget.value)
        else:
            value = next(rest, widget.value) if widget.is_saved else widget.value
        return replace(widget, value=widget.choices[0] if value is None and widget.choices else value)

    return take


# -- inputs and widgets


def _all_parts(specs: Iterable[Spec], take: Take, linked: frozenset[str]) -> Parts:
    """Inputs without a widget come first."""
    parts = Parts()
    for wanted in (False, True):
        for spec in specs:
            if spec.has_widget is wanted:
                parts += _parts(spec, take, linked)
    return parts


def _parts(spec: Spec, take: Take, linked: frozenset[str]) -> Parts:
    if not spec.has_widget:
        return Parts(slots=tuple(_sockets(spec, linked)))
    main, *beside = (take(widget) for widget in WIDGETS[spec.widget_type](spec))
    parts = Parts((Slot(spec.name, spec.type, widget=spec.name),), (main, *beside))
    if spec.type == DYNAMIC_COMBO:
        chosen = next(
            (option["inputs"] for option in spec.options["options"] if option["key"] == main.value), {}
        )
        for kind in ("required", "optional"):
            for name, raw in (chosen.get(kind) or {}).items():
                parts += _parts(_spec(f"{spec.name}.{name}", raw), take, linked)
    return parts


def _sockets(spec: Spec, linked: frozenset[str]) -> Iterator[Slot]:
    if spec.type == AUTOGROW:
        yield from _grown(spec, linked)
    elif spec.type == MATCH_TYPE:
        yield Slot(spec.name, spec.options["template"]["allowed_types"])
    else:
        yield Slot(spec.name, spec.type)


def _grown(spec: Spec, linked: frozenset[str]) -> Iterator[Slot]:
    """One group of inputs more than is linked or asked for."""
    template = spec.options["template"]
    elements = [
        _spec(name, raw)
        for kind in ("required", "optional")
        for name, raw in (template["input"].get(kind) or {}).items()
    ]
    names = template.get("names")

    def name_of(element: Spec, index: int) -> str:
        if names:
            return f"{spec.name}.{names[index]}"
        return f"{spec.name}.{template.get('prefix', '') if len(elements) == 1 else element.name}{index}"

    limit = len(names) if names else template.get("max", 100)
    used = [index for index in range(limit) if any(name_of(element, index) in linked for element in elements)]
    for index in range(min(limit, max([template.get("min", 1), *(index + 1 for index in used)]) + 1)):
        for element in elements:
            for slot in _sockets(element, linked):
                yield replace(slot, name=name_of(element, index))


def _custom_options(choice: Widget, values: list[Any] | Raw) -> tuple[Widget, ...]:
    """The options that a user has written, up to the first empty one; and the chosen one's index,
    which is -1 where none is chosen.
    """
    options: list[Any] = []
    for value in values[2:] if isinstance(values, list) else ():
        options.append(value)
        if not value:
            break
    else:
        options.append("")
    index = options.index(choice.value) if choice.value in options else -1
    return (
        Widget("index", index),
        *(Widget(f"option{number}", option) for number, option in enumerate(options, 1)),
    )


# -- kinds of widgets: each gives those of an input, its own first


def _default(fallback: Any) -> Callable[[Spec], tuple[Widget, ...]]:
    def widgets(spec: Spec) -> tuple[Widget, ...]:
        given = spec.options.get("default")
        return (Widget(spec.name, fallback if given is None else given),)

    return widgets


def _text(spec: Spec) -> tuple[Widget, ...]:
    (widget,) = _default("")(spec)
    return (replace(widget, is_dynamic_prompt=spec.options.get("dynamicPrompts") is True),)


def _number(spec: Spec) -> tuple[Widget, ...]:
    """A seed has a second widget, which says what becomes of it after a run."""
    asked = spec.options.get("control_after_generate")
    has_control = spec.name in SEEDS and spec.type == "INT" if asked is None else asked
    return (*_default(0)(spec), *([_control(spec)] if has_control else []))


def _control(spec: Spec) -> Widget:
    asked = spec.options.get("control_after_generate")
    choices = ("fixed", "increment", "decrement", "randomize")
    return Widget(
        asked if isinstance(asked, str) else "control_after_generate",
        "randomize",
        in_prompt=False,
        choices=choices,
    )


def _combo(spec: Spec) -> tuple[Widget, ...]:
    options = spec.options
    if options.get("multi_select"):
        return (Widget(spec.name, []), *([_control(spec)] if options.get("control_after_generate") else []))
    choices = tuple(options.get("options") or ())
    value = options.get("default") or (
        choices[0] if choices else "Loading..." if options.get("remote") else UNSET
    )
    controls = (
        (_control(spec), Widget("control_filter_list", "", in_prompt=False))
        if options.get("control_after_generate")
        else ()
    )
    return (Widget(spec.name, value, choices=choices), *controls)


def _dynamic_combo(spec: Spec) -> tuple[Widget, ...]:
    keys = tuple(option["key"] for option in spec.options["options"])
    return (Widget(spec.name, keys[0] if keys else UNSET, choices=keys),)


def _box(spec: Spec) -> tuple[Widget, ...]:
    """The whole box, then a field for each of its sides."""
    (box,) = _default({"x": 0, "y": 0, "width": 512, "height": 512})(spec)
    return (
        box,
        *(Widget(field, box.value[field], in_prompt=False) for field in ("x", "y", "width", "height")),
    )


def _recorder(spec: Spec) -> tuple[Widget, ...]:
    """Nothing is recorded, whatever is saved: of a player and a button."""
    return (Widget(spec.name, "", is_saved=False), *(Widget(spec.name, "", in_prompt=False),) * 2)


WIDGETS: Mapping[str, Callable[[Spec], tuple[Widget, ...]]] = {
    "INT": _number,
    "FLOAT": _number,
    "BOOLEAN": _default(False),
    "STRING": _text,
    "MARKDOWN": _default(""),
    "TEXTAREA": _default(""),
    "COMBO": _combo,
    DYNAMIC_COMBO: _dynamic_combo,
    "COLOR": _default("#000000"),
    "COLORS": _default([]),
    "CURVE": _default({"points": [[0, 0], [1, 1]], "interpolation": "monotone_cubic"}),
    "RANGE": _default({"min": 0.0, "max": 1.0}),
    "BOUNDING_BOX": _box,
    "BOUNDING_BOXES": _default([]),
    "CHART": _default({}),
    "GALLERIA": _default([]),
    "PAINTER": _default(""),
    "IMAGECOMPARE": lambda spec: (Widget(spec.name, ["", ""], is_saved=False),),
    "IMAGEUPLOAD": lambda spec: (Widget(spec.name, "image", in_prompt=False),),
    "UPLOAD": lambda spec: (Widget(spec.name, "", in_prompt=False),),
    "AUDIO_UI": lambda spec: (Widget(spec.name, "", is_saved=False, in_prompt=False),),
    "AUDIO_RECORD": _recorder,
}
