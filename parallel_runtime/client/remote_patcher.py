"""A stock MODEL in, a stock MODEL out: a ModelPatcher whose weights and forward are in the pool.

It loads nothing in the UI. ComfyUI's own object patches put the remote ``_forward`` in place when
this patcher is loaded, and take it away when another clone of the same model is. So every sampler,
guider or wrapper that calls the model calls the right forward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ..crossing.attention import require_parts
from ..crossing.block_code import InBlockPatches, encode_images, in_block_patches, without_rebuilt
from ..crossing.options import crossing_options, hand_over_compilation, refuse_foreign_levers
from ..crossing.prepared_text import text_patch
from ..crossing.rows import Constants
from ..crossing.source import describe_source, state_source
from ..errors import OutOfMemory, Refused
from ..forward import PREFIX, forward_patch
from ..planner.keeping import WeightsWish, model_bytes
from ..refusals import require_plan, require_whole_groups
from ..watch.model_changes import Watch, require_unchanged
from ..weights.bypass import pack_bypass
from ..weights.comparison import give_back, is_patched
from ..weights.weight_patches import (
    cast_switches,
    content_id,
    hooked_id,
    pack_patches,
    plain_objects,
    widened_weights,
    with_hooks,
)
from .branch import Branch, SampleCall
from .groups import InGroups
from .interrupt import interrupted, interrupting, wait_for
from .memory_needs import Sampled
from .patch_backend import PipelineBackend
from .patch_sampling import SAMPLING, Patchwise
from .patching import Patching
from .pool_marker import InPool
from .queue_lookahead import QueueLookahead
from .remote_forward import WRAPPERS, RemoteForward, set_later
from .remote_model import Remote
from .remote_pool import RemotePool
from .residency import load_of, require_state
from .room import find_room, require_more_room
from .row_comparison import RowsApart
from .separability import WRAPPER_KEY
from .substitute import Instead, take_place
from .wait import waited_for
from .windows import windows_of


class RemotePatcher(Instead, InPool, ModelPatcher):
    """A ModelPatcher that computes in a pool. ``clone()`` keeps the class, so LoRA, ModelSampling
    and the rest chain as usual.
    """

    stock_class: type[ModelPatcher] = ModelPatcher  # of the MODEL that was parallelized
    hook_set: tuple[str, dict] = ("", {})
    patches_id = ""  # the name of the weights that ranks are to have
    watch: Watch | None = None
    # A name of its content, and what ranks put into place beside weight patches
    objects: tuple[str, dict] = ("", {})
    in_block: InBlockPatches | None = None  # what ranks get of the nodes' code

    def clone(self, *args: Any, **kwargs: Any) -> RemotePatcher:
        made = super().clone(*args, **kwargs)
        made.remote = self.remote
        made.stock_class = self.stock_class
        made.hook_set = self.hook_set
        made.skip_injection = True  # adapters are injected in the ranks
        return made

    # -- for ComfyUI's memory manager

    def model_size(self, *_args: Any, **_kwargs: Any) -> int:
        return self.remote.share_of(self.model.diffusion_model) if hasattr(self, "remote") else 0

    def loaded_size(self, *_args: Any, **_kwargs: Any) -> int:
        is_held = hasattr(self, "remote") and self.remote.pool.residency.held(self.remote.model)
        return self.model_size() if is_held else 0

    def current_loaded_device(self, *args: Any, **kwargs: Any) -> torch.device:
        """Returns the GPU while ranks hold the model, so that ComfyUI frees VRAM only for the rest.
        If it returned the CPU, ComfyUI would unload text encoder and VAE before every run.
        """
        return self.load_device if self.loaded_size() else super().current_loaded_device(*args, **kwargs)

    def get_free_memory(self, device: torch.device, *args: Any, **kwargs: Any) -> int:
        """Returns the free bytes of the rank that has least, as the run began; ComfyUI decides by
        it whether cond and uncond fit one batch. The same all through a run: other batches would
        be other branches.
        """
        free = self.remote.free_bytes
        return super().get_free_memory(device, *args, **kwargs) if free is None else free

    @interrupting
    def partially_load(self, *_args: Any, **_kwargs: Any) -> int:
        """Brings the pool to this clone's weights and puts the remote forward in place. Raises
        Refused, ModelError, PoolFailed.

        In this order: the shared model is unpatched if anything is refused, fails or is cancelled.
        """
        refuse_foreign_levers(self)
        self.remote.pool.admission.load(self.model)
        self.in_block = in_block = in_block_patches(self)
        require_parts(self, self.remote.pool.layout)
        plain = plain_objects(
            {key: value for key, value in self.object_patches.items() if key not in in_block.methods}
        )
        weights = self.remote.source.weights
        before, eldest = self.loaded_size(), eldest_of(self)
        self.watch = eldest.watch if eldest.watch is not None and eldest.watch.holds() else None
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            self.unpatch_model(self.offload_device, unpatch_weights=is_patched(self))
            require_plan(self.model.diffusion_model)  # again: a node may have changed the class since
            if self.watch is None:
                require_unchanged(
                    self.model.diffusion_model, operations=self.model.model_config.custom_operations
                )
            self.remote.model.end_check()
            weights.compare(self.model)
            changed = self.remote.source.attributes.changed(self.model)
            objects = {**cast_switches(self), **changed, **pack_bypass(self.injections), **plain}
            name = content_id({**objects, **in_block.identity}) + weights.changed_id
            self.objects = (
                name,
                {**weights.changed_tensors(self.model.diffusion_model), **objects, **in_block.objects},
            )
            self.remote.recut()
            try:
                with self.remote.computing():
                    if self.remote.pool.residency.held(self.remote.model) is None:
                        self.remote.check_weights()  # while ranks load, so that a short run need not wait
                    bring_up(self)
                self.patch_model(load_weights=False)
            except BaseException:
                self.remote.model.end_check()  # no run follows that would end it
                raise
            eldest.watch = self.watch
        return self.loaded_size() - before

    def unpatch_model(self, *args: Any, **kwargs: Any) -> None:
        self.eject_model()
        give_back(self, self.stock_class, *args, **kwargs)

    def patch_model(
        self,
        device_to: Any = None,
        lowvram_model_memory: int = 0,
        load_weights: bool = True,
        force_patch_weights: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        name, own = forward_patch(self.model.diffusion_model), self.object_patches
        state = self.in_block.state if self.in_block is not None else None
        widened, text = widened_weights(self.model, self.patches), text_patch(self)
        ours = {name: RemoteForward(self, name), **text}
        # Ours first: what is taken away again must have been put
        self.object_patches = {**ours, **widened, **own}
        for instead in ours:
            self.object_patches_backup.setdefault(instead, comfy.utils.ATTR_UNSET)
        try:
            model = super().patch_model(
                device_to, lowvram_model_memory, False, force_patch_weights, *args, **kwargs
            )
            self.watch = Watch(
                model.diffusion_model,
                (*ours.values(), *own.values()),
                model.model_config.custom_operations,
                self.remote.source.attributes.watched(model.diffusion_model),
                state.require_unchanged if state is not None and state.taken else None,
                self.watch,
            )
            return model
        except BaseException:
            self.unpatch_model(unpatch_weights=False)
            raise
        finally:
            self.object_patches = own

    def partially_unload(self, *_args: Any, **_kwargs: Any) -> int:
        """Releases the whole model in the pool (its pages stay in the page cache); returns the
        bytes that the UI's device gets back.
        """
        freed = self.loaded_size()
        if freed:
            self.remote.release()
        return freed

    def detach(self, unpatch_all: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Releases the model in the pool if ComfyUI frees memory (``unpatch_all``); else it only
        switches between clones.
        """
        if unpatch_all:
            self.remote.release()
            self.remote.sampling.free()
        return super().detach(unpatch_all, *args, **kwargs)

    # -- a run

    def pre_run(self, *args: Any, **kwargs: Any) -> None:
        """ComfyUI calls it before the first evaluation. Raises Refused."""
        self.remote.begin_run()
        super().pre_run(*args, **kwargs)

    def cleanup(self, *args: Any, **kwargs: Any) -> None:
        """ComfyUI calls it after every run, however it ended. Raises Refused."""
        try:
            self.remote.end_run()
        finally:
            super().cleanup(*args, **kwargs)

    def patch_hooks(self, hooks: Any, *_args: Any, **_kwargs: Any) -> None:
        """Scheduled weight patches: the pool applies the set before the next evaluation."""
        combined = {} if hooks is None else self.get_combined_hook_patches(hooks)
        self.hook_set = hooked_id(self, combined, self.remote.pool.digests), combined
        self.current_hooks = hooks

    def unpatch_hooks(self, *_args: Any, **_kwargs: Any) -> None:
        self.hook_set = ("", {})
        self.current_hooks = None

    def sample_call(self, arguments: dict[str, Any]) -> Any:
        """Returns the output of one evaluation, computed in the pool."""
        assert self.in_block is not None  # what is sampled was loaded
        options, latent = arguments.get("transformer_options", {}), next(iter(arguments.values()))
        branch = Branch.of(options)
        crossing = crossing_options(options, self.in_block, partial(set_later, self))
        sent = {**arguments, "transformer_options": crossing}
        if self.in_block.rebuilt:
            sent = without_rebuilt(sent, self.in_block.rebuilt)
        return with_room(
            self,
            lambda: self.remote.sampling.output_of(
                SampleCall(sent, replace(branch, weights=self.patches_id))
            ),
            (latent[0] if isinstance(latent, list) else latent).shape,
        )


@interrupting
def with_room(patcher: RemotePatcher, compute: Callable[[], Any], latent: Sequence[int] = ()) -> Any:
    """Returns the outputs of evaluations that ``compute`` returns. Brings the pool up first if it
    failed, was closed or serves another clone. If an evaluation runs out of memory, frees memory
    and calls ``compute`` again; once a run in a fresh pool, if ranks ran out of memory while others
    waited for them. ``latent`` is the shape of the first latent, to ask for room; empty if room was
    asked for.
    """
    remote, model, unloads = patcher.remote, patcher.remote.model, True
    with remote.computing():
        if model.check is None or model.run is None:  # in no run that tells when it is done
            wait_for((model.check or remote.check_weights()).require_unchanged)
        while True:
            try:
                sampled = remote.sampled
                # Else nothing has changed, but for a loss that those in flight tell of
                if remote.pool.evaluations.session is None:
                    bring_up(patcher)
                    if latent and sampled is not None and math.prod(latent[2:]) > sampled.elements:
                        find_room(patcher, latent, bring_up)
                outputs = compute()
                if patcher.in_block is not None and patcher.in_block.objects:
                    remote.pool.runs.of(model).names.load = load_of(remote.pool.residency, model)
                asked = sampled is not None and sampled.needed
                if asked or model.headroom.reloads or model.headroom.has_restarted:
                    remote.pool.memory_needs.had_room(model, sampled)
                return outputs
            except OutOfMemory as error:
                unloads = require_more_room(patcher, error, unloads)


def bring_up(patcher: RemotePatcher) -> None:
    """Has every rank hold the model under exactly this clone's weight patches and object patches;
    begins again if the pool is lost on the way. Raises PoolFailed if ranks have lost the state of a
    run that cannot go on without it.
    """
    hook_id, hook_patches = patcher.hook_set
    objects_id, objects = patcher.objects
    patched = any(key.startswith(PREFIX) for key in (*patcher.patches, *hook_patches))
    name = f"{hook_id or patcher.patches_uuid.hex}{objects_id}" if patched or objects else ""
    if patcher.patches_id != name:
        patcher.patches_id = name
    pool, model = patcher.remote.pool, patcher.remote.model
    residency, sessions = pool.residency, pool.sessions
    sessions.settle(interrupted)
    if (session := sessions.live) is not None and session.owed:
        pool.runs.end_owed()
    if model.run is not None and model.run.names.load:
        require_state(residency, pool.runs, model)
    while (session := sessions.live) is None or not session.is_ready(model, patcher.patches_id):
        state = partial(state_source, patcher, patcher.remote.source.weights)
        transformer = patcher.model.diffusion_model
        size = model_bytes(transformer, require_plan(transformer))
        wish = WeightsWish(patcher.remote.weights, size, patcher.remote.left_free)
        residency.load(model, patcher.remote.source, state, interrupted, wish)
        if (session := sessions.live) is not None and not session.is_ready(model, patcher.patches_id):
            patches, takes_turns = pack_patches(with_hooks(patcher, hook_patches)), bool(patcher.hook_patches)
            residency.set_weight_patches(
                model, patcher.patches_id, patches, patcher.objects, interrupted, comes_back=takes_turns
            )


@waited_for
def prepare_sampling(
    executor: Any,
    model: RemotePatcher,
    noise_shape: Any,
    conds: Any,
    *args: Any,
    model_options: Any = None,
    **kwargs: Any,
) -> Any:
    """Shows the host a smaller shape to estimate activations from (reference latents are counted
    whole), so that text encoder and VAE are not unloaded for activations on other devices. A
    PREPARE_SAMPLING wrapper. Raises Refused for a latent without elements, which no model can
    reshape.
    """
    if 0 in noise_shape:
        shape = " x ".join(map(str, noise_shape))
        raise Refused(
            f"The latent is empty ({shape}): connect one with at least one image of at least one pixel."
        )
    _, shape = windows_of(model_options or {}, noise_shape)
    model.remote.sampled = Sampled(weakref.ref(model.model), shape, conds)
    hand_over_compilation(model_options or {}, model.model)
    encode_images(
        model.model.diffusion_model, (model_options or {}).get("transformer_options", {}), noise_shape
    )
    shape = [noise_shape[0] * model.remote.activations, *noise_shape[1:]]
    # By name, as other wrappers look for it
    return executor(model, shape, conds, *args, model_options=model_options, **kwargs)


def parallelize(
    patcher: ModelPatcher,
    pool: RemotePool,
    holds_ui_device: float,
    patching: Patching | None = None,
    notice: Callable[[str], None] = lambda mode: None,
    activations: float = 1.0,
    weights: str = "whole",
    ahead: QueueLookahead | None = None,
    can_join: bool = True,
) -> RemotePatcher:
    """Makes a clone of a stock MODEL that computes in ``pool``. Nothing is started or loaded before
    it is sampled.

    ``holds_ui_device``: the part of the weights that ranks on the UI's own device hold;
    ``activations``: their part of an evaluation's activations. ``patching``: for a pool that is a
    pipeline; ``notice`` is told how each run is sampled. ``weights``: how ranks are to keep them.
    ``ahead`` samples waiting prompts beside the running one, in groups. ``can_join``: whether
    groups may share an image. Raises Refused for a model without a token plan, ModelError for a
    checkpoint that is gone.
    """
    plan = require_plan(patcher.model.diffusion_model)
    if (
        isinstance(patcher, RemotePatcher)
        and patcher.remote.pool is pool
        and patching is None
        and patcher.remote.weights == weights
    ):
        return patcher
    require_whole_groups(patcher.model.diffusion_model, pool.layout)
    if patching is not None:
        plan.require_stages(type(patcher.model.diffusion_model))
    model, source = pool.residency.use(patcher.model, lambda: describe_source(patcher))
    if patching is not None:
        beside_ui = holds_ui_device > 0
        backend = PipelineBackend(pool, model, Constants(pool.layout.groups), beside_ui)
        patch_size = plan.patch_size_of(patcher.model.diffusion_model)
        sampling = Patchwise(backend, patch_size, plan, patching, notice, with_room)
    else:
        rows = None
        if not plan.blocks and pool.layout.groups > 1:
            rows = RowsApart(pool.admission.firsts, patcher.model.diffusion_model, plan.is_tried)
            rows.require()
        ahead = None if weights == "sharded" else ahead
        sampling = InGroups(pool, model, with_room, can_join and bool(plan.blocks), rows, ahead)
    stages = patching.stages if patching else ()
    remote = Remote(pool, model, source, holds_ui_device, activations, sampling, stages, weights)
    made = remote_clone(patcher, remote)
    for kind in (*SAMPLING, WrappersMP.PREPARE_SAMPLING, *WRAPPERS):
        made.remove_wrappers_with_key(kind, WRAPPER_KEY)
    own = {
        WrappersMP.PREPARE_SAMPLING: prepare_sampling,
        WrappersMP.SAMPLER_SAMPLE: remote.sampler_sample,
        **WRAPPERS,
    }
    for kind, wrapper in own.items():
        made.add_wrapper_with_key(kind, WRAPPER_KEY, wrapper)
    sampling.attach(made)
    made.parent = stand_in(patcher, remote)
    take_place(made, patcher)
    return made


def eldest_of(patcher: RemotePatcher) -> RemotePatcher:
    """Returns the clone that lives for as long as the loader's output does, if there is one."""
    while isinstance(patcher.parent, RemotePatcher) and patcher.parent.model is patcher.model:
        patcher = patcher.parent
    return patcher


def remote_clone(patcher: ModelPatcher, remote: Remote) -> RemotePatcher:
    """Makes a clone of another class. It has no weights of its own in the UI."""
    made = ModelPatcher.clone(
        patcher, disable_dynamic=True, model_override=patcher.get_clone_model_override()
    )
    made.__class__ = RemotePatcher
    made.stock_class = patcher.stock_class if isinstance(patcher, RemotePatcher) else type(patcher)
    made.remote = remote
    made.skip_injection = True
    made.size = 0
    return made


def stand_in(patcher: ModelPatcher, remote: Remote) -> RemotePatcher:
    """Makes the parent that the host's memory manager turns to when a patcher is gone. A sampler
    node's own clone is gone after its run; this parent, kept by the loader's output, still tells
    the size of the model in the pool and takes an unload to it.
    """
    root = patcher
    # A clone with a LoRA may be gone as soon
    while root.parent is not None and root.parent.model is patcher.model:
        root = root.parent
    key = f"pipemesh-{id(remote.pool)}"
    kept = root.get_attachment(key)
    if kept is None or kept.remote.pool is not remote.pool or kept.model is not root.model:
        kept = remote_clone(root, remote)
        kept.parent = None
        root.set_attachments(key, kept)
    kept.remote = remote
    return kept
