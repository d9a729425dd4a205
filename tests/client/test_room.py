"""A run that finds too little memory for its keys and values has models released that it does not
use, and begins again from the same random numbers.
"""

from types import SimpleNamespace

import comfy.model_management as mm
import comfy.samplers
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from pipemesh.lab.commands.parity import Case, sample, stock_model
from pipemesh.nodes.room import held_by_comfyui
from pipemesh.parallel_runtime.client.free_gpu import unload_unused, used_by
from pipemesh.parallel_runtime.client.patch_sampling import Patching, Patchwise
from pipemesh.parallel_runtime.client.separability import known_guider
from pipemesh.parallel_runtime.errors import NoRoom, OutOfMemory
from pipemesh.parallel_runtime.families.catalogue import PLAIN, PLANS

GPU, OTHER_GPU, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


class Patcher:
    """What the host asks of a model that it holds."""

    def __init__(self, device=GPU, **more):
        self.model, self.load_device, self.parent, self.unloaded = object(), device, None, False
        vars(self).update(more)

    def clone(self):
        return Patcher(self.load_device, model=self.model)

    def detach(self, unpatch_all=True):
        self.unloaded = True

    is_clone = lambda self, other: self.model is other.model  # noqa: E731
    is_dynamic = lambda self: False  # noqa: E731
    model_size = loaded_size = lambda self: 1000
    model_mmap_residency = lambda self, *args, **kwargs: (0, 0)  # noqa: E731
    partially_unload = lambda self, *args: 0  # noqa: E731


@pytest.fixture
def held(monkeypatch):
    """Makes the host hold these, and nothing else; each gives 1000 bytes back where it goes."""
    free = lambda *args, **kwargs: (0, 0) if kwargs.get("torch_free_too") else 0  # noqa: E731
    monkeypatch.setattr(mm, "get_free_memory", free)
    monkeypatch.setattr(mm, "soft_empty_cache", lambda *args: None)

    def hold(*patchers):
        loaded = [mm.LoadedModel(patcher) for patcher in patchers]
        for one, patcher in zip(loaded, patchers, strict=True):
            one.real_model = lambda patcher=patcher: patcher.model
            one.model_finalizer = SimpleNamespace(detach=lambda: None)
        given_back = lambda device: (1000 * sum(patcher.unloaded for patcher in patchers), 10000)  # noqa: E731
        monkeypatch.setattr(mm, "current_loaded_models", loaded)
        monkeypatch.setattr(torch.cuda, "mem_get_info", given_back)

    return hold


def sampled_on(device=GPU, part=0.5):
    return Patcher(device, remote=SimpleNamespace(holds_ui_device=part))


def guider_of(patcher, *loaded, kind=comfy.samplers.CFGGuider):
    guider = object.__new__(kind)
    guider.model_patcher, guider.loaded_models = patcher, list(loaded)
    return guider


def frees(guider):
    return unload_unused(guider, is_known=known_guider(guider))


def test_the_host_unloads_what_the_run_does_not_use_and_nothing_else(held):
    encoder, control, wrapped = (Patcher() for _ in range(3))
    sampled, elsewhere = sampled_on(), Patcher(OTHER_GPU)
    sampled.model_patches_models = lambda: [wrapped.clone()]
    held(encoder, control, sampled, elsewhere, wrapped)
    guider = guider_of(sampled, control.clone())
    assert frees(guider)
    assert encoder.unloaded and not any(used.unloaded for used in (control, sampled, elsewhere, wrapped))
    assert not frees(guider), "there is nothing left"


class ForeignGuider(comfy.samplers.CFGGuider):
    pass


NOT_FREED = {
    "on a CPU": guider_of(sampled_on(CPU)),
    "no rank is there": guider_of(sampled_on(part=0)),
    "another model's run": guider_of(Patcher()),
    "it is not known what is used": guider_of(sampled_on(), kind=ForeignGuider),
}


@pytest.mark.parametrize("why", NOT_FREED)
def test_nothing_is_unloaded_where_that_helps_nobody_or_may_break_the_run(held, why):
    guider = NOT_FREED[why]
    encoder = Patcher(guider.model_patcher.load_device)
    held(encoder, guider.model_patcher)
    assert not frees(guider) and not encoder.unloaded


def test_the_hosts_guider_tells_inside_a_run_what_models_it_loaded_beside_the_sampled_one():
    model, seen = stock_model(4), []
    watched = model.clone()

    def wrapper(executor, guider, *args, **kwargs):
        seen.append((known_guider(guider), guider.model_patcher is watched, list(used_by(guider))))
        return executor(guider, *args, **kwargs)

    watched.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "test", wrapper)
    sample(watched, Case(PLAIN, "ulysses1", "even", 4, 1.0, False, "euler"), steps=1)
    assert seen == [(True, True, [])]


@pytest.mark.parametrize("error", [NoRoom, OutOfMemory])
def test_the_run_begins_again_from_the_same_random_numbers_and_the_host_is_asked_once(held, error):
    encoder, sampled, began, drawn = Patcher(), sampled_on(), [], []
    held(encoder, sampled)
    others = ["another model of the pool"]
    engine = SimpleNamespace(
        make_room=lambda: bool(others and others.pop()),
        begin_run=lambda: began.append("anew"),
        constants=None,
    )
    patchwise = Patchwise(engine, 2, PLANS[0], Patching(3))

    def run(enough=3):
        drawn.append(torch.randn(3))
        if len(drawn) < enough:
            raise error("no room")
        return drawn[-1]

    assert patchwise._making_room(run, guider_of(sampled), CPU) is drawn[2]
    assert encoder.unloaded and began == ["anew", "anew"]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2])

    def brings_its_encoder_back():
        encoder.unloaded = False
        held(encoder, sampled)
        return run(enough=100)

    drawn.clear()
    with pytest.raises(error):
        patchwise._making_room(brings_its_encoder_back, guider_of(sampled), CPU)
    assert len(drawn) == 2, "for ever"


def test_what_comfyui_holds_is_counted_on_its_own_device(held):
    held(Patcher(), Patcher(OTHER_GPU), sampled_on())
    assert (held_by_comfyui(GPU), held_by_comfyui(OTHER_GPU), held_by_comfyui(CPU)) == (1000, 1000, 0)
