"""Drafts the sample of a class of transformers that PipeMesh does not know, and what its plan is
about, by the files of a ComfyUI alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

GIVEN = ("self", "device", "dtype", "operations")  # ComfyUI gives these to every transformer
NO_NUMBER = "..."  # what the reader has to find out
EVEN = {1: (64,), 2: (16, 12), 3: (3, 8, 6)}  # small latents, by their dimensions
ODD = {1: (63,), 2: (13, 18), 3: (3, 7, 10)}


def draft(root: Path, kind: str, models: Sequence[str]) -> Iterator[str]:
    """Yields the lines. ``models``: the classes of comfy/model_base.py that have this
    transformer.
    """
    module, _, name = kind.partition(":")
    methods = methods_of(classes_of(root.joinpath(*module.split(".")).with_suffix(".py")), name)
    for path, call in blocks_of(methods):
        yield f"Blocks(path={path!r}): {call}"
    configs = classes_of(root / "comfy" / "supported_models.py")
    made = [
        name for name, one in configs.items() if any(f"model_base.{base}(" in made_by(one) for base in models)
    ]
    for config_class in made[:1]:
        given = assigned(configs, config_class, "unet_config")
        config = (
            {ast.unparse(key): value for key, value in zip(given.keys, given.values, strict=True) if key}
            if isinstance(given, ast.Dict)
            else {}
        )
        written = {
            **{repr(one): default for one, default in arguments_of(methods).items()},
            **{key: ast.unparse(value) for key, value in config.items()},
        }
        form = f"Form(config_class={config_class!r}, config=lambda size: {{"
        yield f"Sample(name={config_class.lower()!r}, form={form}"
        yield from (f"    {key}: {value}," for key, value in written.items())
        even, odd = latents_of(root, assigned(configs, config_class, "latent_format"))
        yield f"}}), latents={{'even': {even}, 'odd': {odd}}})"


def classes_of(file: Path) -> dict[str, ast.ClassDef]:
    if not file.is_file():
        return {}
    return {one.name: one for one in ast.parse(file.read_bytes()).body if isinstance(one, ast.ClassDef)}


def methods_of(classes: dict[str, ast.ClassDef], name: str) -> dict[str, ast.FunctionDef]:
    """Returns a class's methods, with those of its bases in the same file."""
    if (found := classes.get(name)) is None:
        return {}
    inherited = [methods_of(classes, ast.unparse(base)) for base in found.bases]
    own = {one.name: one for one in found.body if isinstance(one, ast.FunctionDef)}
    return {key: value for each in [*inherited[::-1], own] for key, value in each.items()}


def arguments_of(methods: dict[str, ast.FunctionDef]) -> dict[str, str]:
    """Returns what a transformer is built with: name -> its default."""
    if "__init__" not in methods:
        return {}
    given = methods["__init__"].args
    names = [one.arg for one in given.args]
    defaults = [NO_NUMBER] * (len(names) - len(given.defaults)) + [ast.unparse(one) for one in given.defaults]
    keywords = [
        (one.arg, NO_NUMBER if one_default is None else ast.unparse(one_default))
        for one, one_default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return {
        name: default
        for name, default in [*zip(names, defaults, strict=True), *keywords]
        if name not in GIVEN
    }


def blocks_of(methods: dict[str, ast.FunctionDef]) -> Iterator[tuple[str, str]]:
    """Yields each list of modules that a method goes through, and how it calls one."""
    for method in methods.values():
        for loop in (one for one in ast.walk(method) if isinstance(one, ast.For)):
            paths = [
                one.attr
                for one in ast.walk(loop.iter)
                if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"
            ]
            block = [one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)][-1:]
            calls = [
                one
                for one in ast.walk(loop)
                if isinstance(one, ast.Call) and ast.unparse(one.func).split(".")[0] in block
            ]
            if paths and calls:
                yield paths[0], ast.unparse(calls[0])  # the others are in functions for patches


def assigned(classes: dict[str, ast.ClassDef], name: str, key: str) -> ast.expr | None:
    """Returns what a class, or one of its bases in that file, sets ``key`` to."""
    if (found := classes.get(name)) is None:
        return None
    own = [
        one.value for one in found.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == key
    ]
    inherited = [assigned(classes, ast.unparse(base).rpartition(".")[2], key) for base in found.bases]
    return next((one for one in [*own, *inherited] if one is not None), None)


def made_by(config: ast.ClassDef) -> str:
    return "".join(
        ast.unparse(one)
        for one in config.body
        if isinstance(one, ast.FunctionDef) and one.name == "get_model"
    )


def latents_of(root: Path, latent_format: ast.expr | None) -> tuple[tuple, tuple]:
    """Returns a latent with an even and one with an odd number of tokens."""
    name = "" if latent_format is None else ast.unparse(latent_format).rpartition(".")[2]
    formats = classes_of(root / "comfy" / "latent_formats.py")
    said = [assigned(formats, name, key) for key in ("latent_channels", "latent_dimensions")]
    channels, dimensions = (
        value.value if isinstance(value, ast.Constant) and isinstance(value.value, int) else default
        for value, default in zip(said, (4, 2), strict=True)
    )
    return (1, channels, *EVEN.get(dimensions, EVEN[2])), (1, channels, *ODD.get(dimensions, ODD[2]))
