"""Name the transformer's forward as ComfyUI calls it, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

PREFIX = "diffusion_model."  # of every name below the transformer


def forward_name(diffusion_model: torch.nn.Module) -> str:
    """Returns the name of the method that the remote forward replaces: ``_forward`` where the class
    has one, else ``forward``.

    ``_forward`` runs inside ComfyUI's own DIFFUSION_MODEL wrappers, so they stay in the UI.
    """
    return "_forward" if hasattr(type(diffusion_model), "_forward") else "forward"


def forward_patch(diffusion_model: torch.nn.Module) -> str:
    """Returns that name as object patches have it."""
    return PREFIX + forward_name(diffusion_model)


def forward_binder(diffusion_model: torch.nn.Module, name: str) -> Callable[[tuple, dict], dict[str, Any]]:
    """Returns a function (args, kwargs) -> all arguments by name, of the method ``name`` (as
    ``forward_patch`` returns it).
    """
    signature = inspect.signature(getattr(type(diffusion_model), name.removeprefix(PREFIX)))

    def bind(args: tuple, kwargs: dict) -> dict[str, Any]:
        arguments = dict(signature.bind(None, *args, **kwargs).arguments)
        arguments.pop("self")
        arguments.update(arguments.pop("kwargs", {}))
        return arguments

    return bind
