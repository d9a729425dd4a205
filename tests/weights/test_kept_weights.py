"""How ranks keep a model's weights: however, they compute the same; which way fits, and why."""

import json
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.boxes import published_box
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.parallel_runtime.client import memory_needs
from pipemesh.parallel_runtime.client.evaluations import Evaluations
from pipemesh.parallel_runtime.client.headroom import Headroom
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.errors import OutOfMemory
from pipemesh.parallel_runtime.families.catalogue import PLAIN
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.cost import costs_of
from pipemesh.parallel_runtime.planner.evaluation_count import ModelBytes, Shareable
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.keeping import LEFT_FREE, WeightsWish
from pipemesh.parallel_runtime.planner.prediction import beside_bytes, fullest
from pipemesh.parallel_runtime.weights.offloaded_weights import OffloadedWeights
from pipemesh.parallel_runtime.weights.quantisation import stored_tensors
from pipemesh.parallel_runtime.wire.messages import Memory

from ..kit.models import load, run
from ..kit.models import with_lora as with_model_lora
from ..kit.planned import counts
from .test_quantised import loaded, with_lora, written

__all__ = ["written"]  # a fixture
DEGREES = {"ulysses": (2,), "prompts": (1, 1, 1, 2)}


def aligned(file):
    """The same file with tensors of whole multiples of 64 bytes first, each of which so begins at
    one; scales and odd ones behind them.
    """
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header, parts = json.loads(content[8:begin]), []
    metadata = {"__metadata__": header.pop("__metadata__")} if "__metadata__" in header else {}
    spans = {name: one["data_offsets"] for name, one in header.items()}
    for name in sorted(spans, key=lambda name: ((spans[name][1] - spans[name][0]) % 64 != 0, spans[name])):
        at = sum(map(len, parts))
        parts.append(content[begin + spans[name][0] : begin + spans[name][1]])
        header[name]["data_offsets"] = [at, at + len(parts[-1])]
    written = json.dumps(metadata | header).encode()
    written = written.ljust(-(-(8 + len(written)) // 64) * 64 - 8)
    copy = file.parent / "aligned" / file.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(b"".join([len(written).to_bytes(8, "little"), written, *parts]))
    return str(copy)


def kept(model, clients, degrees, weights):
    return parallelize(model, clients(*DEGREES[degrees]), holds_ui_device=0, weights=weights)


def test_offloaded_weights_are_stocks(files, clients, monkeypatch):
    """Half of them, with what a LoRA does to them."""
    pool = clients(2)
    release_all(pool)
    stock = load(files["model"])
    monkeypatch.setattr(WeightsWish, "kept_in", half_of(WeightsWish.kept_in, stock))
    model = kept(load(files["model"]), clients, "ulysses", "offloaded")
    truth, ours = (run(with_model_lora(one, files, 1.0)) for one in (stock, model))
    assert relative_error(ours, truth) <= BOUND
    held = pool.sessions.live.pool.memory[0].model
    assert 0 < held < 0.6 * sum(p.nbytes for p in stock.model.diffusion_model.parameters())


def release_all(pool):
    """The models of other tests."""
    for model in list(pool.sessions.live.models) if pool.sessions.live is not None else ():
        pool.residency.release(model)


def half_of(real, stock):
    nbytes = sum(parameter.nbytes for parameter in stock.model.diffusion_model.parameters())

    def kept_in(self, names, layout, memory, parts=()):
        half = Memory(len(names) * (LEFT_FREE + nbytes // 2), 1 << 40, 0)
        return real(self, names, layout, [half] * len(memory))

    return kept_in


META = torch.device("meta")


def on_device_within(path, lora, part):
    """A budget, ``part`` of the weights, and the bytes on the device without a LoRA and with it."""
    patcher = with_lora(loaded(path), lora, True)
    patches, patcher.patches = patcher.patches, {}
    model = patcher.model.diffusion_model

    def stored():
        return [tensor for parameter in model.parameters() for tensor in stored_tensors(parameter)]

    def on_device():
        return sum(tensor.nbytes for tensor in stored() if tensor.device == META)

    budget = int(part * sum(tensor.nbytes for tensor in stored()))

    with torch.inference_mode():
        weights = OffloadedWeights(patcher, META, budget, lambda nbytes: None)
        loaded_bytes = on_device()
        weights.applies(patches)
        patched_bytes = on_device()
        weights.restore()
        assert on_device() == 0
    return budget, loaded_bytes, patched_bytes


@pytest.mark.parametrize("form", ["", "fp8_scaled"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_a_budget_is_never_passed(written, form, part):
    budget, *held = on_device_within(written(PLAIN, form), written(PLAIN, "lora"), part)
    assert max(held) <= budget and (part < 0.5 or held[0] > 0)


# -- the choice


GIB = 1 << 30
TWO_GPUS = ("cuda:0", "cuda:1")
ALONE = "no other rank has the same blocks: raise ulysses or ring to share weights out"
BLOCKS = [23 * GIB // 56] * 56
FLUX = ModelBytes(
    weight_bytes=GIB + sum(BLOCKS),
    block_weight_bytes=BLOCKS,
    shareable=Shareable(
        BLOCKS,
        0,
        GIB,
        2 * GIB,
        layers=[*([GIB] for _ in BLOCKS), []],
        together=[*([2 * GIB] for _ in BLOCKS), []],
    ),
)


def asked(asked="auto", free=80, ranks=2, stages=1, held=0, names=None, size=FLUX, **groups):
    layout = Layout(ulysses=ranks, pipefusion=stages, **groups)
    names = names or [f"cuda:{rank}" for rank in range(layout.world_size)]
    memory = [Memory(int(free * GIB), 96 * GIB, int(held * GIB)) for _ in names]
    return WeightsWish(asked, size).kept_in(names, layout, memory)


@pytest.mark.parametrize(
    ("request_", "kept", "why"),
    [
        ({}, "whole", "each rank needs 24.0 GiB, and 78.5 GiB are free"),
        ({"free": 24}, "sharded", "each rank needs 16.5 GiB, and 22.5 GiB are free"),
        ({"free": 16}, "sharded by layer", "each rank needs 13.6 GiB, and 14.5 GiB are free"),
        (
            {"free": 14, "held": 20},
            "whole",
            "each rank needs 24.0 GiB, and 32.5 GiB are free without other models",
        ),
        ({"free": 10}, "offloaded", "each rank needs 13.6 GiB of weights, and 8.5 GiB are free"),
        ({"free": 24, "ranks": 1}, "offloaded", "each rank needs 24.0 GiB of weights, and 22.5 GiB are free"),
        ({"free": 24, "ranks": 1, "stages": 2}, "whole", "each rank needs 12.5 GiB, and 22.5 GiB are free"),
        (
            {"free": 40, "names": ["cuda:0", "cuda:0"]},
            "sharded",
            "each rank needs 16.5 GiB, and 18.5 GiB are free",
        ),
        (
            {"free": 0, "names": ["cpu", "cpu"]},
            "whole",
            "ranks on the CPU map the checkpoint, one copy for all",
        ),
        ({"asked": "sharded"}, "sharded", "as chosen"),
        ({"asked": "sharded", "free": 16}, "sharded by layer", "as chosen"),
        ({"asked": "sharded", "names": ["cpu", "cpu"]}, "sharded by layer", "as chosen"),
        ({"asked": "sharded", "ranks": 1, "cfg": 2}, "whole", ALONE),
        ({"asked": "whole", "free": 1}, "whole", "as chosen"),
        ({"asked": "offloaded", "free": 11.5}, "offloaded", "as chosen"),
    ],
)
def test_the_first_way_that_fits_is_taken_and_says_why(request_, kept, why):
    keeping = asked(**request_)
    assert (keeping.kept + " by layer" * keeping.by_layer, keeping.why) == (kept, why)
    assert keeping.budget == (int((request_["free"] - 1.5) * GIB) if kept == "offloaded" else 0)


def test_each_stage_needs_room_for_the_blocks_that_it_has():
    """Of devices of 24 and 12 GiB free, by their speeds, evenly, and the other way round."""
    layout, memory = Layout(pipefusion=2), [Memory(24 * GIB, 24 * GIB, 0), Memory(12 * GIB, 12 * GIB, 0)]

    def kept(*parts):
        return WeightsWish("auto", FLUX).kept_in(TWO_GPUS, layout, memory, parts)

    assert kept(2.0, 1.0).kept == "whole" and kept(37, 19) == kept(2.0, 1.0)
    assert kept(2.0, 1.0).why == "each rank needs 8.8 GiB, and 10.5 GiB are free", "the tightest"
    assert kept().kept == kept(1.0, 1.0).kept == kept(1.0, 2.0).kept == "offloaded"
    assert kept().why == kept(1.0, 1.0).why == "each rank needs 12.5 GiB of weights, and 10.5 GiB are free"


@pytest.mark.parametrize(("spare", "kept"), [(1, "whole"), (-1, "sharded"), (-12, "offloaded")])
def test_what_an_evaluation_needs_beside_the_weights_is_left_free(spare, kept):
    """Of a video it is gigabytes: two GPUs hold half of it each, and what goes between them."""
    layout, whole = Layout(ulysses=2), counts("hunyuan 720p")
    needed = beside_bytes(whole, layout, branches=1, batch=1)
    assert whole.activations.peak_bytes / 2 < needed < whole.activations.peak_bytes
    free = FLUX.weight_bytes + needed + spare * GIB
    keeping, chosen = (
        WeightsWish(asked, FLUX, lambda: needed).kept_in(TWO_GPUS, layout, [Memory(free, 96 * GIB, 0)] * 2)
        for asked in ("auto", "offloaded")
    )
    assert keeping.kept == kept
    assert keeping.leaves >= needed and keeping.nbytes + keeping.leaves <= free
    assert chosen.budget == free - needed


@pytest.mark.parametrize("kept", ["whole", "sharded"])
@pytest.mark.parametrize(
    ("layout", "branches", "batch"),
    [
        (Layout(cfg=2), 3, 1),
        (Layout(data=2), 1, 3),
        (Layout(cfg=2, data=2), 2, 3),
        (Layout(ring=2, cfg=2), 1, 1),
        (Layout(pipefusion=2), 2, 1),
    ],
    ids=str,
)
def test_no_less_is_left_free_than_the_planner_counts_on_whether_groups_join_or_not(
    kept, layout, branches, batch
):
    whole, box = counts("hunyuan 720p"), published_box(f"{layout.world_size}xH100-NVLink")
    _, _, activations = fullest(
        costs_of(Job(whole=whole, branches=branches, batch=batch), layout, box, kept), kept
    )
    assert beside_bytes(whole, layout, branches, batch) >= activations


def capped(monkeypatch, memory):
    """Pools whose GPUs have so much free, and what was chosen on them, in order: each time by speed
    and evenly.
    """
    made, real = [], WeightsWish.kept_in

    def kept_in(self, names, layout, _, parts=()):
        gpus, free = [f"cuda:{rank}" for rank in range(len(names))], [Memory(memory, 1 << 40, 0)] * len(names)
        made.append(real(self, gpus, layout, free, parts))
        return made[-1]

    monkeypatch.setattr(WeightsWish, "kept_in", kept_in)
    return made


def needing(monkeypatch, pool, nbytes):
    """What an evaluation needs, by the pixels of its latent."""
    monkeypatch.setattr(memory_needs, "beside_bytes", lambda whole, *_: nbytes(whole))
    monkeypatch.setattr(
        pool.memory_needs, "_counts", SimpleNamespace(of=lambda model, cond, shape, *_: shape[-1] * shape[-2])
    )
    for model in pool.residency.models.values():
        model.headroom = Headroom()
    release_all(pool)


def test_a_run_that_needs_more_than_weights_leave_has_them_kept_anew(files, clients, monkeypatch):
    """And one that needs less has not."""
    pool, made = clients(2), capped(monkeypatch, 9 * GIB)
    needing(monkeypatch, pool, lambda pixels: 3 * GIB if pixels <= 64 else 5 * GIB)
    model = kept(load(files["model"]), clients, "ulysses", "offloaded")
    for side, left, choices in ((8, 3, 1), (8, 3, 1), (16, 5, 2), (8, 5, 2)):
        run(model, latent=torch.zeros(1, 16, side, side))
        assert (made[-1].leaves, made[-1].budget, len(made)) == (left * GIB, (9 - left) * GIB, 2 * choices)


@pytest.mark.parametrize("degrees", ["ulysses", "prompts"])
def test_weights_that_left_too_little_leave_more_and_the_evaluation_is_computed(
    files, clients, monkeypatch, degrees
):
    """Of both prompts too, where each is computed by a group of its own."""
    pool, made = clients(*DEGREES[degrees]), capped(monkeypatch, 6 * GIB)
    needing(monkeypatch, pool, lambda _: 0)
    submit, truth = Evaluations.submit, run(load(files["model"]), cfg=2.0)

    def without_memory(self, *args, **more):
        if made[-1].leaves < 5 * GIB:
            raise OutOfMemory("Rank 1 ran out of memory.")
        return submit(self, *args, **more)

    monkeypatch.setattr(Evaluations, "submit", without_memory)
    model = kept(load(files["model"]), clients, degrees, "offloaded")
    assert relative_error(run(model, cfg=2.0), truth) <= BOUND
    assert [keeping.leaves / GIB for keeping in made[::2]] == [1.5, 3.0, 6.0]
    monkeypatch.setattr(Evaluations, "submit", submit)
    run(model, cfg=2.0)
    assert len(made) == 6, "it is known of the next run"
    monkeypatch.setattr(Evaluations, "submit", fails)
    with pytest.raises(OutOfMemory):
        run(model, cfg=2.0)


def test_weights_that_were_asked_to_leave_more_and_do_not_are_loaded_anew_no_further_time():
    held = SimpleNamespace(weights=SimpleNamespace(leaves=GIB, kept="offloaded", budget=GIB))
    model = PooledModel("m", "m")
    sessions, released = SimpleNamespace(latest=SimpleNamespace(models={model: held})), []
    made = memory_needs.MemoryNeeds(sessions, SimpleNamespace(release=released.append), None)
    assert [made.leave_more(model) for _ in range(3)] == [True, False, False] and released == [model]


def test_a_model_is_loaded_anew_three_times_for_an_evaluation_and_then_the_error_says_what_to_do():
    weights = SimpleNamespace(leaves=GIB, kept="offloaded", budget=GIB)
    pooled = PooledModel("m", "m")
    sessions = SimpleNamespace(latest=SimpleNamespace(models={pooled: SimpleNamespace(weights=weights)}))

    def reload(model):
        weights.leaves = model.headroom.more

    made, left = memory_needs.MemoryNeeds(sessions, SimpleNamespace(release=reload), None), []
    with pytest.raises(OutOfMemory, match=r"anew 3 times.* 11\.5 GiB left free .*: make the image or"):
        while len(left) < 20 and made.leave_more(pooled):
            left.append(weights.leaves / GIB)
    assert left == [2.5, 5.5, 11.5]
    assert made.leave_more(pooled), "the next prompt may be a larger one"
    for _evaluation in range(9):
        made.had_room(pooled)
        assert made.leave_more(pooled)


def fails(*_args, **_more):
    raise OutOfMemory("Rank 1 ran out of memory.")
