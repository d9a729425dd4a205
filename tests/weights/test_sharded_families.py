"""Every family's models with their weights shared out or offloaded compute what they do with them
whole, to the last bit, in every format: all ranks in one process, each a ResidentModel of its own.
"""

import itertools
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from comfy_kitchen.exceptions import NoCapableBackendError
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.lab.random_files import write_model
from pipemesh.parallel_runtime.comm.shard_gather import ShardGather
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.weights.quantisation import stored_bytes, stored_tensors
from pipemesh.parallel_runtime.weights.weight_patches import pack_patches
from pipemesh.parallel_runtime.worker.resident_model import ResidentModel

from ..comm.test_collectives import Rank
from ..fixtures import ALL
from ..kit.collectives import World
from ..kit.models import calls_within, in_one
from .test_kept_weights import aligned
from .test_quantised import (
    FORMATS,
    SAMPLE_OF,
    WITHOUT_FILE,
    WITHOUT_STAGES,
    loaded,
    sampled,
    size_of,
    with_lora,
    written,
)

__all__ = ["written"]  # a fixture
CPU = torch.device("cpu")
BY_COMFYUI = "partly loaded by ComfyUI"
LAYOUTS = {
    "2": Layout(ulysses=2),
    "3": Layout(ring=3),
    "4": Layout(ulysses=2, ring=2),
    "stages": Layout(ring=2, pipefusion=2),
}
PRODUCT = [
    (family, form, ranks)
    for family, form, ranks in itertools.product(SAMPLE_OF, ("", *FORMATS), LAYOUTS)
    if ranks == "2" or form in ("", "fp8_scaled")
    if not (ranks == "stages" and family in WITHOUT_STAGES)
]
WITH_FILE = [name for name, sample in SAMPLE_OF.items() if sample.form.file is not None]
# Formats whose weights are stored as other tensors: the rest differ by what is in them
STORED = ("", "mxfp8", "fp8_scaled", "nvfp4", "int8_convrot", "fp8", "convrot_w4a4")


def every_layout():
    """Layouts in turn, every other one of a family without a file."""
    families = itertools.cycle((WITH_FILE[0], WITHOUT_FILE, WITH_FILE[1], WITHOUT_FILE))
    return list(zip(families, STORED, itertools.cycle(LAYOUTS), strict=False))


def asked(path, family):
    """The arguments of the first evaluation of each branch, as stock calls the model."""
    model = loaded(path)
    _, calls = calls_within(model, lambda: sampled(model, family, cfg=2.0))
    return [{**one, "transformer_options": {"cond_or_uncond": [0]}} for one in calls[:2]]


def serving(mesh, weights, runs, calls):
    """A rank, the Parts that it is asked for, one for each run and branch, and its load."""
    if weights == "sharded":
        mesh.sequence.share_weights(mesh.sequence.world.group)
    requests = [Part(run, branch) for run in runs for branch in range(len(calls))]
    rank = Rank(requests, ahead=False)
    rank.count = lambda done, total: None
    return rank, requests, SimpleNamespace(stages=(), weights=weights, budget=0, by_layer=False)


def bytes_of(resident):
    """A copy of what this rank has of the weights that are shared out, or of all of them."""
    blocks = [block for block, _ in getattr(resident.weights, "_sharded", {}).values()]
    weights = resident.patcher.model.diffusion_model.parameters()
    every = [block.part for block in blocks] or [one for weight in weights for one in stored_tensors(weight)]
    return [one.clone().reshape(-1).view(torch.uint8) for one in every]


def computed(monkeypatch, layout, weights, path, calls, patches):
    """(rank, evaluation) -> outputs: under a LoRA twice, so that the order of layers is known, then
    without it; and the residents. With weights that ComfyUI itself loads in part: under the LoRA
    alone.
    """
    world, outputs, residents = World(layout, "gloo", monkeypatch), {}, {}

    def work(mesh, _run):
        rank, requests, load = serving(mesh, weights, (1, 1) if weights == BY_COMFYUI else (1, 1, 2), calls)
        patcher = loaded(path)
        load.budget = stored_bytes(patcher.model.diffusion_model.parameters()) // 2
        if weights == BY_COMFYUI:
            patcher.patches = patches
            patcher.load(CPU, lowvram_model_memory=load.budget)
        resident = ResidentModel(patcher, CPU, mesh, rank, load, free_bytes=lambda device: 1 << 40)
        residents[mesh.rank] = resident
        if weights != BY_COMFYUI:
            resident.patch("lora", pack_patches(patches), {}, rank, True)
        merged = bytes_of(resident)
        for rank.at, part in enumerate(requests):
            if rank.at == 2 * len(calls):
                resident.patch("", {}, {}, rank, True)
            resident.method.begin(part)
            out = resident.on_rank(dict(calls[part.branch]), rank.at + 1)
            outputs[mesh.rank, rank.at] = None if out is None else in_one(out)
        if patches and weights in ("whole", "sharded"):
            assert resident.patch("lora", None, {}, rank, True), "the set comes back"
            assert all(map(torch.equal, bytes_of(resident), merged))
        resident.end_run()

    with torch.inference_mode():
        world.run(work, Random(7).choice)
    return outputs, residents


@pytest.mark.parametrize(("family", "form", "ranks"), PRODUCT if ALL else every_layout())
def test_a_family_computes_the_same_however_its_weights_are_kept(written, monkeypatch, family, form, ranks):
    path, layout = aligned(Path(written(family, form))), LAYOUTS[ranks]  # as test_kept_weights says
    try:
        calls = asked(path, family)
    except NoCapableBackendError as error:
        pytest.skip(f"by stock neither: {error}")
    patches = with_lora(loaded(path), written(family, "lora"), True).patches

    def kept(weights):
        with monkeypatch.context() as patch:
            return computed(patch, layout, weights, path, calls, patches)

    truth, _ = kept("whole")
    written_by = [key for key, out in truth.items() if out is not None and key[0] == layout.writer]
    assert len(written_by) == 3 * len(calls)
    assert not torch.equal(truth[written_by[0]], truth[written_by[-len(calls)]]), "the LoRA does nothing"
    ours, residents = kept("sharded")
    assert all(map(is_equal, truth.values(), (ours[key] for key in truth)))
    assert all(resident.weights.turns._order._follows for resident in residents.values()), "none is learned"
    if ranks == "2":  # a LoRA is not rounded to the format where a layer has it as it computes
        truth |= kept(BY_COMFYUI)[0]
        ours, _ = kept("offloaded")
        assert all(map(is_equal, truth.values(), (ours[key] for key in truth)))


def is_equal(one, other):
    return one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_evaluation_gathers_each_block_in_one_message_and_waits_once_for_it(
    written, monkeypatch, by_layer
):
    path, started, waits = str(written(WITH_FILE[0], "")), [], Counter()
    calls, start, wait = asked(path, WITH_FILE[0])[:1], ShardGather.start, ShardGather.wait
    world = World(Layout(ulysses=2), "gloo", monkeypatch)

    def work(mesh, _run):
        rank, requests, load = serving(mesh, "sharded", (1, 2), calls)
        load.by_layer = by_layer
        resident = ResidentModel(loaded(path), CPU, mesh, rank, load)
        for rank.at, part in enumerate(requests):
            begun, waited = len(started), waits[mesh.rank]
            resident.method.begin(part)
            resident.on_rank(dict(calls[0]), rank.at + 1)
            own = [index for at, index in started[begun:] if at == mesh.rank]
            blocks = {id(block) for block, _ in resident.weights._sharded.values()}
            modules = {name.rpartition(".")[0] for name in resident.weights._sharded}
            assert len(own) == len(set(own)) == len(blocks), "each once"
            # Also before each, and at the end
            assert waits[mesh.rank] - waited == 2 * len(blocks) + 1
            assert len(modules) == len(blocks) if by_layer else len(modules) > 2 * len(blocks)

    def noted(gather, part, whole):
        started.append((gather.rank, part.data_ptr()))
        start(gather, part, whole)

    def counted(gather):
        waits[gather.rank] += 1
        wait(gather)

    monkeypatch.setattr(ShardGather, "start", noted)
    monkeypatch.setattr(ShardGather, "wait", counted)
    with torch.inference_mode():
        world.run(work, Random(7).choice)
    assert started


def in_turn(monkeypatch, layout, weights, paths, calls):
    """The writer's outputs of two models that the ranks hold at once: a run of the first, one of
    the second, and one of the first again.
    """
    world, outputs = World(layout, "gloo", monkeypatch), []

    def work(mesh, _run):
        rank, requests, load = serving(mesh, weights, (1, 2, 3), calls)
        residents = [ResidentModel(loaded(path), CPU, mesh, rank, load) for path in paths]
        for rank.at, part in enumerate(requests):
            resident = residents[(part.run - 1) % 2]
            resident.method.begin(part)
            out = resident.on_rank(dict(calls[part.branch]), rank.at + 1)
            outputs.extend([in_one(out)] if layout.writes(mesh.rank) else [])
            if part.branch == len(calls) - 1:
                resident.end_run()

    with torch.inference_mode():
        world.run(work, Random(7).choice)
    return outputs


@pytest.mark.cover(2)
@pytest.mark.parametrize("weights", ["sharded", "offloaded"])
def test_two_models_in_turn_compute_what_they_do_with_whole_weights(written, monkeypatch, weights):
    """As Wan 2.2 has one for high noise and one for low."""
    family, layout = WITH_FILE[1], LAYOUTS["2"]
    second = Path(written(family)).parent / "second" / Path(written(family)).name
    second.parent.mkdir(exist_ok=True)
    paths = (written(family), str(write_model(second, SAMPLE_OF[family].form, size_of(family), seed=5)))
    calls = asked(paths[0], family)
    found = {}
    for kept in ("whole", weights):
        with monkeypatch.context() as patch:
            found[kept] = in_turn(patch, layout, kept, paths, calls)
    truth, ours = found["whole"], found[weights]
    assert len(truth) == len(ours) == 3 * len(calls)
    assert not torch.equal(truth[0], truth[len(calls)]), "both models are the same"
    assert max(map(relative_error, ours, truth)) <= BOUND
