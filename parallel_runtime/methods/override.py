"""Stand in for ComfyUI's attention: as its override, in calls that pass no ``transformer_options``,
and around calls that ask for more than an override is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..errors import ModelError
from ..layout import Split
from ..refusals import ON_ONE_GPU
from .shards import Joint, KeysByFrame, Shards

Attention = Callable[..., torch.Tensor]
QKV = torch.Tensor | Sequence[torch.Tensor]  # 3 x (B, h, g, D)
Shared = bool | Literal["keys"]

ATTENTION = ("optimized_attention", "optimized_attention_masked")  # the names that ComfyUI's models import


# What an attention of ComfyUI takes behind its mask
BY_POSITION = ("attn_precision", "skip_reshape", "skip_output_reshape")


def by_name(args: tuple) -> dict[str, Any]:
    """The arguments that an attention is given by position behind its mask. Raises ModelError for
    more than there are names.
    """
    if len(args) > len(BY_POSITION):
        raise ModelError(
            f"Attention is given {len(args)} arguments by position behind its mask, and only"
            f" {len(BY_POSITION)} are known ({', '.join(BY_POSITION)}): this model needs another plan."
        )
    return dict(zip(BY_POSITION, args, strict=False))


class AttentionChoice(NamedTuple):
    """The parts of a call to ComfyUI's attention that an override does not get: the ``function``
    that is called, the function that its layer has ``preferred``, and the class of the
    ``container`` in which the call hands over q, k and v.
    """

    function: Attention | None = None
    preferred: Attention | None = None
    container: Callable[[torch.Tensor], Any] | None = None


NOTHING = AttentionChoice()
ASKED = "_pipemesh_asked"  # among a call's arguments, so that a graph keeps it


class AttentionCall(NamedTuple):
    """One call of the host's attention, as each rank computes it for its own heads. ``mask`` is
    the host's, of all heads and tokens in the host's order. ``before``: keys and values of tokens
    before those, 2 x (B, h, P, D), which every rank has whole.
    """

    attention: Attention
    options: dict[str, Any]
    mask: torch.Tensor | None
    heads: Split
    own: slice
    joint: Joint
    rows: Shards
    before: tuple[torch.Tensor, torch.Tensor] | None = None
    by_frame: KeysByFrame | None = None  # own heads, and all tokens of its stream

    @property
    def host_order(self) -> torch.Tensor | None:
        """The places of tokens in the host's order, as ``Joint.rank_major`` has them. None if the
        attention does not need that order, or if the tokens lie in it already.
        """
        needs_order = getattr(self.attention, "needs_order", False)
        if not needs_order or len(self.joint.streams) < 2:
            return None
        return self.rows.memoise(self.joint, ("order",), self.joint.rank_major)

    def compute(self, qkv: QKV, mask: torch.Tensor | None) -> torch.Tensor:
        """3 x (B, h, g, D) -> (B, h, g, D) by the host's own attention."""
        q, k, v = qkv
        if self.by_frame is not None:
            return self._frame_by_frame(self.by_frame, q, k, v)
        if self.before is not None:
            k, v = (torch.cat(parts, 2) for parts in zip(self.before, (k, v), strict=True))
        return self.attention(
            q, k, v, q.shape[1], mask, skip_reshape=True, skip_output_reshape=True, **self.options
        )

    def _frame_by_frame(self, more: KeysByFrame, q, k, v) -> torch.Tensor:
        out, alone = torch.empty_like(q), self._replace(by_frame=None, before=None)
        for rows, keys in more.segments(0, q.shape[2]):
            k_here, v_here = k, v
            if keys is not None:
                k_here = torch.cat((k, more.keys[:, :, keys]), 2)
                v_here = torch.cat((v, more.values[:, :, keys]), 2)
            out[:, :, rows] = alone.compute((q[:, :, rows], k_here, v_here), None)
        return out


class AttentionOverride:
    """ComfyUI's ``optimized_attention_override`` of one attached model; ``attend`` computes while a
    run is open.

    ``shared``: the part of an attention that is shared with other ranks: all, the keys that whole
    queries look at, or nothing. ``options``: the evaluation's ``transformer_options``. ``opaque``:
    what stands for ``attend`` in graphs of ``torch.compile``, and ``brought`` the functions that
    they call. ``asked``: by the call at hand.
    """

    def __init__(self) -> None:
        self.attend: Attention | None = None  # of the hooks, which hold this
        self.shared: Shared = False
        self.options: dict[str, Any] = {}
        self.opaque: Attention | None = None
        self.brought: list[Any] = []
        self.asked = NOTHING

    def share(self, shared: Shared) -> None:
        self.shared = shared

    def __call__(self, attention: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.asked is not NOTHING:
            kwargs[ASKED] = self.asked
        if self.opaque is not None and torch.compiler.is_compiling():
            return self.opaque(attention, *args, **kwargs)
        assert self.attend is not None
        return self.attend(attention, *args, **kwargs)

    def close(self) -> None:
        """Free the memory of the run's attention."""
        self.attend, self.options = None, {}


def in_its_place(attention: Attention, override: Any, asked: AttentionChoice) -> Attention:
    """Return the function that ComfyUI would call in place of ``attention``: the one that a node's
    ``override`` chose, the override itself, or the one that the layer prefers. It gets containers
    if the call has containers and the function takes them.
    """
    holder: Any = asked.function or attention
    if override is not None:
        chosen = getattr(override, "chosen", None)
        attention, holder = of_a_node(override, attention) if chosen is None else chosen, chosen or override
    elif asked.preferred is not None:
        attention = holder = asked.preferred
    takes = getattr(holder, "container_function", None)
    if asked.container is None or takes is None:
        return attention
    return in_containers(attention, takes, asked.container)


def of_a_node(override: Attention, attention: Attention) -> Attention:
    """Return a node's override of ``attention``. It may look at tokens by their places, so it has
    ``needs_order``: that of the host.
    """
    made: Any = partial(override, attention)
    made.needs_order = True
    return made


def in_containers(attention: Attention, takes: Attention, container: Callable) -> Attention:
    @wraps(attention)
    def call(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return takes(container(q), container(k), container(v), *args, **kwargs)

    return call


class Overridden:
    """One module whose forward calls attention by way of ``around`` until ``remove``.

    The forward is the module's own, with other names for attention around it: nothing changes for
    other modules of its class, nor for its file, which ComfyUI's process may share.
    """

    def __init__(self, module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]):
        own = type(module).forward
        names = {name: around(own.__globals__[name]) for name in ATTENTION if name in own.__globals__}
        known = {**own.__globals__, **names}
        del known["__name__"]  # by which torch.compile would look the names up in the module itself
        forward = FunctionType(own.__code__, known, own.__name__, own.__defaults__, own.__closure__)
        forward.__kwdefaults__ = own.__kwdefaults__
        self._module = module
        self._module.forward = MethodType(forward, module)

    def remove(self) -> None:
        del self._module.forward


def with_override(override: Callable[..., Any], attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``attention`` for calls that pass no options."""
    options = {"optimized_attention_override": override}

    def call(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **{**kwargs, "transformer_options": options})

    return call


# What ComfyUI's attention reads before it calls an override: the layer's wish, and the class of
# what q, k and v may come in
PREFERRED, CONTAINER = "preferred_attention", "AttentionTensorContainer"
OF_A_LAYER = "ComfyAttention"  # the class of a layer's wish, a child of it


def telling(override: AttentionOverride, attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``attention`` for calls that ask for more than it tells an override."""

    def call(*args: Any, **kwargs: Any) -> Any:
        preferred = getattr(kwargs.get(PREFERRED), "function", None)
        container = type(args[0]) if args and not isinstance(args[0], torch.Tensor) else None
        override.asked = AttentionChoice(attention, preferred, container)
        try:
            return attention(*args, **kwargs)
        finally:
            override.asked = NOTHING

    return call


class Preferring:
    """One module that tells its wish to the function it is given to attend by, until ``remove``:
    ``override`` is told it in that one's place.
    """

    def __init__(self, module: nn.Module, override: AttentionOverride, wish: Any):
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            override.asked = AttentionChoice(preferred=wish.function)
            try:
                return own(*args, **kwargs)
            finally:
                override.asked = NOTHING

        self._module = module
        self._module.forward = forward

    def remove(self) -> None:
        del self._module.forward


def asks_for_more(module: nn.Module) -> bool:
    """True if the forward of a module's class calls attention so."""
    names, keywords = names_used_by(module)
    return bool(names.intersection(ATTENTION)) and (PREFERRED in keywords or CONTAINER in names)


def names_used_by(module: nn.Module) -> tuple[set[str], set[str]]:
    """Return the names that the forward of a module's class uses, and the keywords in its calls."""
    code = getattr(type(module).forward, "__code__", None)
    if not isinstance(code, CodeType):
        return set(), set()
    return {*code.co_names}, {name for names in code.co_consts if isinstance(names, tuple) for name in names}


def told_of(model: nn.Module, override: AttentionOverride) -> list[Overridden | Preferring]:
    """Let ``override`` know the attention functions that layers of a model ask for. Raises
    ModelError if a layer prefers a function of its own and asks for it outside of its forward.
    """
    found: list[Overridden | Preferring] = []
    for path, module in list(model.named_modules()):
        wish = next((one for one in module.children() if type(one).__name__ == OF_A_LAYER), None)
        if asks_for_more(module):
            found.append(Overridden(module, partial(telling, override)))
        elif wish is not None and wish.function is not None:
            if PREFERRED not in names_used_by(module)[1]:
                raise ModelError(
                    f"{path} of {type(model).__name__} attends by its own function, and not as ranks know it:"
                    f" {ON_ONE_GPU}."
                )
            found.append(Preferring(module, override, wish))
    return found
