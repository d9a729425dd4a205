"""Name the transformer's forward as ComfyUI calls it, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import ModelError

Bind = Callable[[tuple, dict], dict[str, Any]]  # (args, kwargs) -> all arguments by name
PREFIX = "diffusion_model."  # of every name below the transformer


def forward_name(diffusion_model: torch.nn.Module) -> str:
    """Returns the name of the method that the remote forward replaces: ``_forward`` if the class
    has one, else ``forward``.

    ``_forward`` runs inside ComfyUI's own DIFFUSION_MODEL wrappers, so they stay in the UI.
    """
    return "_forward" if hasattr(type(diffusion_model), "_forward") else "forward"


def forward_patch(diffusion_model: torch.nn.Module) -> str:
    """Returns that name as object patches have it."""
    return PREFIX + forward_name(diffusion_model)


def forward_binder(diffusion_model: torch.nn.Module, name: str) -> Bind:
    """Returns the binder of the method ``name`` (as ``forward_patch`` returns it). The first two
    arguments come first, the latent and the time, however a node gives them. The function raises
    TypeError, as Python does, for an argument that is given by position and by name.
    """
    method = getattr(type(diffusion_model), name.removeprefix(PREFIX))
    bind, names = binder(method), list(inspect.signature(method).parameters)[1:]

    def bind_in_order(args: tuple, kwargs: dict) -> dict[str, Any]:
        for name in names[: len(args)]:
            if name in kwargs:
                raise TypeError(f"{method.__qualname__} got multiple values for argument '{name}'")
        bound = bind(args, kwargs)
        return bound if len(args) > 1 else {name: bound[name] for name in names if name in bound} | bound

    return bind_in_order


def binder(method: Callable[..., Any], positional: Sequence[str] = ()) -> Bind:
    """Returns a function that names the arguments of a class's ``method``. ``positional`` names
    those of a method that takes ``*args``. The function raises ModelError for more arguments by
    position than have names.
    """
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters
    names = positional or [name for name, one in parameters.items() if one.kind in by_place][1:]

    def bind(args: tuple, kwargs: dict) -> dict[str, Any]:
        if len(args) > len(names):
            raise ModelError(
                f"{method.__qualname__} is given {len(args)} arguments by position and takes {len(names)}:"
                " this model needs another plan."
            )
        return {**dict(zip(names, args, strict=False)), **kwargs}

    return bind
