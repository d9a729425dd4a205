"""Where a run finds no room for what it keeps, what nobody uses makes room, and the run begins again as if nothing had been."""

from types import SimpleNamespace

import comfy.model_management as mm
import pytest
import torch
from pipemesh.parallel_runtime.client.patchwise import Patchwise, host_makes_room
from pipemesh.parallel_runtime.errors import NoRoom, OutOfMemory
from pipemesh.parallel_runtime.families import PLANS

GPU, OTHER_GPU, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


class Patcher:
    """What the host asks of a model that it holds."""

    def __init__(self, device=GPU, **more):
        self.model, self.load_device, self.parent, self.unloaded = object(), device, None, False
        vars(self).update(more)

    def clone(self):
        return Patcher(self.load_device, model=self.model)

    def is_clone(self, other):
        return self.model is other.model

    def is_dynamic(self):
        return False

    def model_size(self):
        return 1000

    def loaded_size(self):
        return 1000

    def model_mmap_residency(self, *args, **kwargs):
        return 0, 0

    def detach(self, unpatch_all=True):
        self.unloaded = True

    def partially_unload(self, *args):
        return 0


@pytest.fixture
def held(monkeypatch):
    """Makes the host hold these, and nothing else."""
    monkeypatch.setattr(mm, "get_free_memory", lambda *args, **kwargs: (0, 0) if kwargs.get("torch_free_too") else 0)
    monkeypatch.setattr(mm, "soft_empty_cache", lambda *args: None)

    def hold(*patchers):
        loaded = [mm.LoadedModel(patcher) for patcher in patchers]
        for one, patcher in zip(loaded, patchers, strict=True):
            one.real_model = lambda patcher=patcher: patcher.model
            one.model_finalizer = SimpleNamespace(detach=lambda: None)
        monkeypatch.setattr(mm, "current_loaded_models", loaded)

    return hold


def test_the_host_unloads_what_the_run_does_not_use_and_nothing_else(held):
    encoder, control, sampled, elsewhere = Patcher(), Patcher(), Patcher(remote="pool"), Patcher(OTHER_GPU)
    held(encoder, control, sampled, elsewhere)
    guider = SimpleNamespace(model_patcher=sampled, loaded_models=[control.clone()])
    assert host_makes_room(guider)
    assert encoder.unloaded and not (control.unloaded or sampled.unloaded or elsewhere.unloaded)
    assert not host_makes_room(guider), "there is nothing left"


@pytest.mark.parametrize(
    "guider",
    [SimpleNamespace(model_patcher=Patcher(CPU), loaded_models=[]), SimpleNamespace(model_patcher=Patcher(GPU))],
    ids=["on a CPU", "it is not known what is used"],
)
def test_nothing_is_unloaded_where_that_helps_nobody_or_may_break_the_run(held, guider):
    encoder = Patcher(guider.model_patcher.load_device)
    held(encoder, guider.model_patcher)
    assert not host_makes_room(guider)
    assert not encoder.unloaded


@pytest.mark.parametrize("error", [NoRoom, OutOfMemory])
def test_the_run_begins_again_from_the_same_random_numbers_until_nothing_can_make_room(held, error):
    encoder, sampled = Patcher(), Patcher(remote="pool")
    held(encoder, sampled)
    began = []
    engine = SimpleNamespace(make_room=lambda: False, begin_run=lambda: began.append("anew"))
    patchwise = Patchwise(engine, 2, PLANS[0], patches=3, warm_up=1)
    guider = SimpleNamespace(model_patcher=sampled, loaded_models=[])
    drawn = []

    def run():
        drawn.append(torch.randn(3))
        if not encoder.unloaded or len(drawn) > 2:
            raise error("no room")
        return drawn[-1]

    assert patchwise._making_room(run, guider, CPU) is drawn[1]
    assert torch.equal(*drawn) and began == ["anew"]
    with pytest.raises(error):
        patchwise._making_room(run, guider, CPU)
    assert len(drawn) == 3
