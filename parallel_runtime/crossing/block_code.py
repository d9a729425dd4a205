"""Patches of nodes that run inside a model's blocks: sent to the ranks with the object patches, and
named by numbers in each evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..families.plan import BEFORE_BLOCKS, TokenPlan
from ..forward import PREFIX
from ..patches import TokenGrid
from ..refusals import patch_name, require_plan
from .code import name_of
from .named_code import OVERRIDE, Options, attention_backend, options_by_name
from .pack_state import PackState, PackValue, made_state, put_state
from .patch_objects import Assembly, Disassembly
from .readers import OptionReaders

IN_BLOCK = "patches inside blocks"  # their name among the object patches of a rank


class InBlockPatches:
    """In the UI: the patches of one MODEL that run inside its blocks, and the methods that they
    replace there (``objects``: object patches), in the form in which ranks get them. Raises Refused
    for one that holds what cannot cross; one that the plan cannot serve is left out.

    ``numbers`` of the patches, by their ids; ``rebuilt`` and ``kept`` of the plan; ``state``: what
    their code reads in packs' modules. ``objects``: the object patch that brings all of it to the
    ranks; ``identity``: the same with ids in place of models.
    """

    def __init__(
        self,
        transformer: torch.nn.Module,
        plan: TokenPlan,
        options: Options,
        objects: Options = MappingProxyType({}),
    ):
        served = [patch for point, patch in patches_of(options) if can_serve(plan, point, patch)]
        served += node_override(options)
        self._functions = list({id(patch): patch for patch in served}.values())
        self.numbers = {id(patch): number for number, patch in enumerate(self._functions)}
        self.methods = {
            key: value
            for key, value in objects.items()
            if callable(value) and plan.has_own_rows(name_of(value))
        }
        apart = Disassembly(transformer)
        taken: dict[str, Any] = {
            "patches": [[name_of(patch), apart.take(patch, patch_name(patch))] for patch in self._functions],
            "methods": {key: apart.take(value, patch_name(value)) for key, value in self.methods.items()},
        }
        self.rebuilt, self.kept = plan.rebuilt, plan.kept
        self.state = PackState(apart.code, apart.take)
        taken["state"] = self.state.taken
        self.readers = OptionReaders(type(transformer), apart.code)
        some = any(taken.values())
        self.objects: dict[str, Any] = {IN_BLOCK: {**taken, "models": apart.models}} if some else {}
        self.identity: dict[str, Any] = {IN_BLOCK: taken} if some else {}


def without_rebuilt(arguments: Mapping[str, Any], rebuilt: Sequence[str]) -> dict[str, Any]:
    """Return a forward's arguments without the entries that ranks make anew (``rebuilt`` of the
    plan).
    """
    sent = dict(arguments)
    for name in rebuilt:
        argument, _, left_out = name.partition(".")
        if sent.get(argument):
            sent[argument] = {entry: one for entry, one in sent[argument].items() if entry != left_out}
    return sent


def in_block_patches(patcher: Any) -> InBlockPatches:
    """In the UI: the patches of nodes on a MODEL that ranks get. Raises Refused, naming one that
    cannot run there.
    """
    transformer, options = patcher.model.diffusion_model, patcher.model_options["transformer_options"]
    below = {key: value for key, value in patcher.object_patches.items() if key.startswith(PREFIX)}
    patches = InBlockPatches(transformer, require_plan(transformer), options, below)
    options_by_name(options, patches.numbers)
    return patches


def runs_code_in_blocks(patcher: Any) -> bool:
    """True if ranks run a node's code inside the blocks: it may look at the batch that ComfyUI made
    of conds and images, or keep a state between evaluations.
    """
    in_block = getattr(patcher, "in_block", None)
    return in_block is not None and bool(in_block.objects)


def patches_of(options: Options) -> Iterator[tuple[str, Any]]:
    """Yields (point, patch) of all lists of patches."""
    yield from ((point, patch) for point, items in options.get("patches", {}).items() for patch in items)


def node_override(options: Options) -> list[Any]:
    """Returns a node's attention override if it does more than choose a function known by name."""
    override = options.get(OVERRIDE)
    return [override] if override is not None and attention_backend(override) is None else []


def can_serve(plan: TokenPlan, point: str, patch: Any) -> bool:
    """True if a patch can be called at that point while each rank has some of the tokens."""
    return point in BEFORE_BLOCKS or plan.block_patch(name_of(patch)) is not None or plan.gathers_at(point)


def why_all_rows(plan: TokenPlan, options: Options) -> list[str]:
    """Names the patches that need all tokens of an evaluation at once."""
    overrides = [f"the attention override {patch_name(one)}" for one in node_override(options)]
    return overrides + [
        f"the patch {patch_name(patch)}, which needs all tokens"
        for point, patch in patches_of(options)
        if point not in BEFORE_BLOCKS and not plan.has_own_rows(name_of(patch))
    ]


class PatchesHere(NamedTuple):
    """The patches in a rank: (name, patch) of each; methods, as object patches; and the values that
    their code reads in packs' modules.
    """

    patches: Sequence[tuple[str, Callable]] = ()
    methods: Mapping[str, Callable] = MappingProxyType({})
    state: Sequence[PackValue] = ()


def put_patches(model: Any, packed: dict[str, Any], device: torch.device) -> PatchesHere:
    """In a rank: makes the patches from ``InBlockPatches.objects``."""
    together = Assembly(model.diffusion_model, packed["models"], device)
    made = [(name, together.put(taken)) for name, taken in packed["patches"]]
    methods = {key: together.put(taken) for key, taken in packed["methods"].items()}
    state = made_state(packed["state"], together.put)
    put_state(state)
    for _, patch in made:
        if hasattr(patch, "to"):
            patch.to(device)  # as ComfyUI does when it loads a model
    return PatchesHere(made, methods, state)


def clean_up(patches: Sequence[tuple[str, Any]]) -> None:
    """In a rank, after a run: as ComfyUI does it."""
    for _, patch in patches:
        if hasattr(patch, "cleanup"):
            patch.cleanup()


class Encoded(Exception):
    """A patch has got as far as tokens."""


class NoTokens:
    """Stands for tokens and block numbers, and ends a patch that looks at them."""

    def __getitem__(self, _rows: Any) -> Any:
        raise Encoded

    def __floordiv__(self, _blocks: Any) -> Any:
        raise Encoded


def encode_images(transformer: torch.nn.Module, options: Options, shape: Sequence[int]) -> None:
    """In the UI, before sampling: lets patches that encode an image by their VAE do it for a latent
    of this shape. In a rank they have no VAE.
    """
    for _, patch in patches_of(options):
        plan = require_plan(transformer)
        known = plan.block_patch(name_of(patch))
        size = (
            padded_shape(shape, plan.patch_size_of(transformer))
            if known is not None and known.padded
            else torch.Size(shape)
        )
        if hasattr(patch, "encode_render_video"):
            if patch.prepared_render is None or patch.prepared_render.shape[2:] != size[2:]:
                patch.prepared_render = patch.encode_render_video(tuple(size[2:]))
        elif hasattr(patch, "vae") and hasattr(patch, "encoded_image"):
            with suppress(Encoded):
                patch({"x": torch.empty(size, device="meta"), "img": NoTokens(), "block_index": NoTokens()})


def padded_shape(shape: Sequence[int], patch_size: int | Sequence[int]) -> torch.Size:
    """Returns the shape of a latent padded to whole tokens."""
    grid = TokenGrid.of(shape, patch_size)
    return torch.Size(
        [*shape[:2], *(count * edge for count, edge in zip(grid.counts, grid.edges, strict=True))]
    )
