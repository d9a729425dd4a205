"""What only a GPU can show: ``python3 -m launcher test --cuda``.

One GPU is enough: ranks share it over gloo, and NCCL runs with one rank. Where there are several,
ranks with a GPU each run over NCCL too.
"""

import math
import time
from contextlib import contextmanager
from functools import cache, partial
from statistics import median

import pytest
import torch
import torch.distributed as dist
from pipemesh.lab.commands.parity import (
    BF16_BOUNDS,
    BOUND,
    Bench,
    Case,
    relative_error,
    rms,
    sample,
    stock_model,
)
from pipemesh.parallel_runtime.attention.kernels import EXPLICIT
from pipemesh.parallel_runtime.attention.trial import asks, tried_kernels, usual
from pipemesh.parallel_runtime.client.remote_patcher import Patching
from pipemesh.parallel_runtime.client.session import Resident
from pipemesh.parallel_runtime.comm.exchange import Exchange
from pipemesh.parallel_runtime.comm.mesh import connect
from pipemesh.parallel_runtime.errors import OutOfMemory, PoolFailed
from pipemesh.parallel_runtime.families.catalogue import PLAIN, sample_with
from pipemesh.parallel_runtime.families.sample import Size
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.keeping import LEFT_FREE, WeightsWish
from pipemesh.parallel_runtime.weights.quantisation import stored_bytes
from pipemesh.parallel_runtime.wire.messages import Memory
from pipemesh.parallel_runtime.wire.segment import mib
from pipemesh.pool.trial.rounding import bound

from ..kit.fake_pools import DEADLINE_S
from ..kit.models import load, run, with_lora, write_model
from ..kit.patched import execute
from ..kit.pipelines import ALL_WARM, HEADS, with_callback
from ..pool.test_pool_faults import Once, in_forward, kill

CASE = Case(PLAIN, "ulysses1", "odd", HEADS, 4.0, False, "euler")
TWO, FOUR = (
    [Layout(ulysses=2), Layout(ring=2), Layout(pipefusion=2)],
    [Layout(ulysses=4), Layout(ring=4), Layout(ulysses=2, ring=2)],
)
STAGES = [Layout(pipefusion=4), Layout(ulysses=2, pipefusion=2)]
MIB = 1 << 20
SLACK = 64 * MIB  # what a driver keeps of its own, in each process
UIS_OWN, LEFT = 1024 * MIB, 256 * MIB  # of a GPU that is nearly full
ROUNDS = 9  # in each of three turns
STEPS = 40
NEAR_STOCK = 1.01


@pytest.fixture(scope="module")
def truth():
    """The stock MODEL, what it computes, and the largest difference that rounding explains."""
    stock = cache(partial(stock_model, HEADS))
    computed = cache(lambda: sample(stock(), CASE))
    return stock, computed, cache(lambda: max(BOUND, bound(partial(sample, case=CASE), stock(), computed())))


def test_kernels_with_lse_compute_attention(device, figure):
    found = tried_kernels(torch.device(device))
    used = dict.fromkeys(found.choose(ask).name for ask in asks(torch.device(device)))
    figure(f"used: {', '.join(used)}; by most models: {usual(found, torch.device(device))}")
    for sentence in found.refused:
        figure(sentence)
    assert usual(found, torch.device(device)) != EXPLICIT.name
    assert not [sentence for sentence in found.refused if sentence.startswith("torch's")]


def patching_of(layout):
    """Whole evaluations alone: exact under pipefusion too."""
    return Patching(2, ALL_WARM) if layout.pipefusion > 1 else None


@pytest.mark.parametrize("layout", TWO + FOUR + STAGES, ids=Layout.equation)
def test_fp32_is_stocks_over_gloo(truth, parallel, figure, layout):
    stock, computed, allowed = truth
    error = relative_error(sample(parallel(stock(), layout, patching=patching_of(layout)), CASE), computed())
    figure(f"off by {error:.2g} of the image's scale, {allowed():.2g} would be rounding")
    assert error <= allowed()


@pytest.mark.parametrize("layout", TWO + FOUR + STAGES, ids=Layout.equation)
def test_fp32_is_stocks_over_nccl_on_a_gpu_each(truth, parallel, figure, layout):
    stock, computed, allowed = truth
    model = parallel(stock(), layout, "nccl", patching_of(layout))
    errors = [relative_error(sample(model, CASE), computed()) for _ in range(2)]
    figure(f"off by {max(errors):.2g} of the image's scale")
    assert max(errors) <= allowed()


@pytest.mark.parametrize("layout", [*TWO[:2], Layout(ulysses=4)], ids=Layout.equation)
def test_what_is_computed_over_nccl_follows_a_lora(parallel, files, figure, layout):
    stock = load_exactly(files["model"])
    ours, errors = parallel(stock, layout, "nccl"), []
    for strength in (0.0, 0.0, 1.0, 1.0, 0.0):
        model, due = (with_lora(one, files, strength) if strength else one for one in (ours, stock))
        errors.append(relative_error(run(model), run(due)))
    figure(f"off by {max(errors):.2g} of the image's scale")
    assert max(errors) <= BOUND


@pytest.mark.parametrize("layout", [Layout(), *TWO[:2], Layout(ulysses=4), FOUR[2]], ids=Layout.equation)
def test_pieces_that_are_replayed_follow_size_lora_and_stop(
    parallel, pools, device, files, figure, monkeypatch, layout
):
    """Each has as many steps as make a rank record, and as many again. Ranks that share a GPU wait
    for each other there, so they are asked to record though no GPU waits for its process.
    """
    monkeypatch.setattr(Resident, "is_held_up", property(lambda _: True, lambda *_: None))
    import comfy.model_management as mm

    stock, errors, told = load_exactly(files["model"]), [], []
    ours = parallel(stock, layout, "nccl")
    sizes = [torch.zeros(1, 16, *size) for size in ((8, 8), (10, 8))]

    def graphs():
        return [one.graphs for one in pools(layout, "nccl").remote.sessions.live.pool.memory]

    def compare(latent, strength=0.0):
        model, due = (with_lora(one, files, strength) if strength else one for one in (ours, stock))
        began = time.perf_counter()
        image = run(model, latent=latent, steps=STEPS)
        told.append((time.perf_counter() - began) / STEPS)
        errors.append(relative_error(image, run(due, latent=latent, steps=STEPS)))

    for latent in (sizes[0], sizes[0], sizes[1], sizes[1], sizes[0]):
        compare(latent)
    held = graphs()
    assert device == "cpu" or all(held), "none was recorded"

    def interrupt(step, *_):
        if step == STEPS // 2:
            mm.interrupt_current_processing()

    with pytest.raises(mm.InterruptProcessingException):
        run(ours, latent=sizes[0], steps=STEPS, callback=interrupt)
    mm.interrupt_current_processing(False)
    for strength in (0.0, 1.0, 1.0, 0.0, 0.0):
        compare(sizes[0], strength)
    figure(
        f"off by {max(errors):.2g} of the image's scale; {', '.join(map(mib, held))} of graphs; ms a step"
        f" {', '.join(f'{1e3 * one:.1f}' for one in told)}"
    )
    assert max(errors) <= BOUND and (device == "cpu" or all(graphs()))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("weights", ["sharded", "offloaded"])
def test_weights_that_are_not_whole_compute_what_whole_ones_do_under_a_lora(
    parallel, pools, files, figure, monkeypatch, weights, backend
):
    """Offloaded: half of them. To what lies on a GPU ComfyUI adds a LoRA in fp16, and elsewhere in
    the weight's precision (comfy/model_management.py lora_compute_dtype, comfy/model_patcher.py
    LowVramPatch @ ComfyUI 0.30.0): halves are no further apart than all of both.
    """
    layout, images = TWO[0], []
    nbytes = stored_bytes(load_exactly(files["model"]).model.diffusion_model.parameters())
    monkeypatch.setattr(WeightsWish, "kept_in", half_of(WeightsWish.kept_in, nbytes))
    for kept in ("whole", weights):
        model = parallel(load_exactly(files["model"]), layout, backend, weights=kept)
        images.append(run(with_lora(model, files, 1.0)))
        held = pools(layout, backend).remote.sessions.live.models[model.remote.model].weights
        assert held.kept == kept
    error = relative_error(images[1], images[0])
    allowed = BOUND + lora_rounding(files, monkeypatch) * (weights == "offloaded")
    figure(f"off by {error:.2g} of the image's scale, {allowed:.2g} would be rounding")
    assert error <= allowed


def lora_rounding(files, monkeypatch):
    import comfy.model_management as mm

    images = []
    for dtype in (mm.lora_compute_dtype(mm.get_torch_device()), torch.float32):
        monkeypatch.setitem(mm.LORA_COMPUTE_DTYPES, mm.get_torch_device(), dtype)
        images.append(run(with_lora(load_exactly(files["model"]), files, 1.0)))
    return relative_error(*images)


def load_exactly(path):
    """In fp32: on a GPU ComfyUI would choose bf16, to which a LoRA is rounded where it is added."""
    import comfy.sd

    with torch.inference_mode():
        return comfy.sd.load_diffusion_model(str(path), {"dtype": torch.float32})


def half_of(real, nbytes):
    def kept_in(self, names, layout, memory, parts=()):
        return real(
            self,
            names,
            layout,
            [Memory(len(names) * (LEFT_FREE + nbytes // 2), 1 << 40, 0) for _ in memory],
            parts,
        )

    return kept_in


@contextmanager
def nearly_full(device):
    own = torch.empty(UIS_OWN, dtype=torch.uint8, device=device)  # its cache stays this process's
    taken = torch.empty(torch.cuda.mem_get_info()[0] - LEFT, dtype=torch.uint8, device=device)
    del own
    yield
    del taken
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", TWO, ids=Layout.equation)
def test_a_forward_without_memory_leaves_the_pool_alive(truth, device, parallel, pools, figure, layout):
    """All but a little of the GPU is taken while a large latent is sampled."""
    stock, computed, allowed = truth
    model = parallel(stock(), layout, patching=patching_of(layout))
    assert relative_error(sample(model, CASE), computed()) <= allowed()
    pids = pools(layout).remote.sessions.live.pool.ranks.pids
    if device == "cuda":
        with nearly_full(device), pytest.raises(OutOfMemory) as error:
            run(model, latent=torch.zeros(1, 16, 1024, 1024))
        figure(str(error.value))
    assert relative_error(sample(model, CASE), computed()) <= allowed()
    assert pools(layout).remote.sessions.live.pool.ranks.pids == pids


@pytest.mark.parametrize("method", ["ulysses2", "ring2", "ulysses4", "2x2"])
def test_bf16_is_as_far_from_fp32_as_stocks(pools, figure, method):
    case = Case(PLAIN, method, "odd", HEADS, 4.0, False, "euler")
    ratio = Bench(lambda ulysses, ring: pools(Layout(ulysses=ulysses, ring=ring)).remote).bf16_ratio(case)
    figure(f"{ratio:.3f} times stock's distance")
    assert BF16_BOUNDS[0] <= ratio <= BF16_BOUNDS[1]


@pytest.mark.parametrize(
    "layout", [Layout(pipefusion=2), Layout(ulysses=2, pipefusion=2)], ids=Layout.equation
)
def test_patches_come_near_stock_free_running(truth, parallel, figure, layout):
    stock, computed, _ = truth
    near = sample(parallel(stock(), layout, patching=Patching(3, 1)), CASE)
    figure(
        f"{rms(near - computed()) / float(computed().std()):.3f} of the image's scale away (approximate by"
        " design)"
    )
    assert near.isfinite().all()


def test_a_pool_of_one_rank_is_stock(truth, parallel, figure):
    stock, computed, allowed = truth
    error = relative_error(sample(parallel(stock(), Layout()), CASE), computed())
    figure(f"off by {error:.2g} of the image's scale")
    assert error <= allowed()


def test_nccl_connects_and_exchanges_with_one_rank(device, figure, tmp_path):
    backend, own = ("nccl", torch.device("cuda", 0)) if device == "cuda" else ("gloo", None)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=own)
    try:
        mesh = connect(Layout(), 0, device=torch.device(device), via_cpu=False, wants_stop=lambda: False)
        for dtype in (torch.bfloat16, torch.float32):
            sent = torch.arange(1 << 10, device=device).to(dtype)
            came = torch.empty_like(sent)
            dist.all_to_all_single(came, sent, [sent.numel()], [sent.numel()])
            assert torch.equal(came, sent)
            dist.all_reduce(came)
            assert torch.equal(came, sent)
        assert isinstance(mesh.sequence.world, Exchange) and not mesh.sequence.world.largest(
            torch.zeros(1, device=device)
        )
        figure(f"all_to_all and all_reduce over {backend}, bound to {own or 'no device'}")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(ring=2)], ids=Layout.equation)
def test_ranks_compile_their_blocks(truth, parallel, figure, layout):
    stock, computed, allowed = truth
    compiled = execute("nodes_torch_compile", "TorchCompileModel", stock(), "inductor")
    began = time.perf_counter()
    model = parallel(compiled, layout)
    error = relative_error(sample(model, CASE), computed())
    first = time.perf_counter() - began
    began = time.perf_counter()
    sample(model, CASE)
    figure(
        f"off by {error:.2g} of the image's scale; {first:.1f} s with compiling,"
        f" {time.perf_counter() - began:.1f} s without"
    )
    assert error <= 10 * allowed(), "fused operations round in another order"


@pytest.mark.parametrize("form", ["fp8", "fp8_scaled"])
@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(ring=2)], ids=Layout.equation)
def test_fp8_is_as_far_from_fp32_as_stocks(parallel, figure, tmp_path, layout, form):
    import comfy.sd
    from pipemesh.lab.quantised_files import FORMATS, write_quantised

    whole = str(write_model(tmp_path / "whole.safetensors", blocks=(1, 2)))
    small = str(write_quantised(tmp_path / "small.safetensors", whole, form))
    options = {} if FORMATS[form].algorithm else {"dtype": FORMATS[form].dtype}
    with torch.inference_mode():
        stock, exact = comfy.sd.load_diffusion_model(small, options), load(whole)
    due, rounded = run(exact), run(stock)
    ratio = rms(run(parallel(stock, layout)) - due) / rms(rounded - due)
    figure(f"{ratio:.3f} times stock's distance")
    assert BF16_BOUNDS[0] <= ratio <= BF16_BOUNDS[1]


@pytest.mark.parametrize("layout", [Layout(), Layout(ulysses=2)], ids=Layout.equation)
def test_an_evaluation_comes_to_the_pool_and_back(truth, parallel, pools, figure, layout):
    model = parallel(truth[0](), layout)
    for _ in range(3):
        sample(model, CASE)
    evaluations = pools(layout).remote.runs.last.evaluations
    hops = sorted(1e3 * one.hop_s for one in evaluations)
    figure(
        f"hop {median(hops):.2f} ms beside {1e3 * median(one.seconds for one in evaluations):.2f} ms of an"
        " evaluation"
    )
    assert hops


def test_one_rank_takes_stocks_time(device, parallel, figure, wait_for_device):
    """Within 1 %, where an evaluation is long enough for the hop to be less than that. They take
    turns of several rounds: ComfyUI loads a MODEL anew when it comes after its parallel MODEL.
    """
    kind, size = sample_with("large")
    on_gpu = device == "cuda"
    size, side, rounds = (size, 256, ROUNDS) if on_gpu else (Size(heads=2, head_dim=64, blocks=(1, 2)), 16, 1)
    stock = kind.form.random_model(size, dtype=torch.bfloat16 if on_gpu else torch.float32)
    text = [
        [torch.randn(1, 64, size.text_dim or 64), {"pooled_output": torch.randn(1, size.pooled_dim or 32)}]
    ]
    latent = torch.zeros(1, 16, side, side)
    models = {"stock": stock, "one rank": parallel(stock, Layout())}
    taken = {name: [] for name in models}
    for name in [*models] * 3:
        sampled = partial(run, models[name], steps=4, latent=latent, positive=text, negative=text)
        sampled()
        for _ in range(rounds):
            wait_for_device()
            began = time.perf_counter()
            sampled()
            wait_for_device()
            taken[name].append(time.perf_counter() - began)
    ratio = median(taken["one rank"]) / median(taken["stock"])
    figure(f"{ratio:.4f} of stock's time, {1e3 * median(taken['stock']) / 4:.1f} ms an evaluation")
    if on_gpu:
        assert ratio <= NEAR_STOCK


@pytest.mark.parametrize("layout", TWO, ids=Layout.equation)
def test_memory_comes_back(device, parallel, pools, figure, layout):
    """Behind a run of a large latent ranks hold what they hold behind one of a tiny latent: the
    weights. Nothing is unloaded before it is looked at. After the pool has ended, all is back.
    """
    import comfy.model_management as mm

    def taken():
        mm.soft_empty_cache(force=True)  # of this process alone
        return -(
            torch.cuda.mem_get_info()[0] if device == "cuda" else mm.get_free_memory(torch.device(device))
        )

    for backend in ("gloo", "nccl") if device == "cuda" and torch.cuda.device_count() > 1 else ("gloo",):
        for other in [Layout(), *TWO, *FOUR, *STAGES] if backend == "gloo" else TWO:
            pools(other, backend).handle.close()
    stock, side = stock_model(HEADS), 768 if device == "cuda" else 24
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run(stock, latent=torch.zeros(1, 16, side, side), steps=1)
        assert torch.cuda.max_memory_allocated() > 8 * SLACK, "too small a latent to show anything"
    mm.unload_all_models()
    before, held = taken(), []
    model = parallel(stock, layout, patching=patching_of(layout))
    for size in (8, side, side, 8):
        run(model, latent=torch.zeros(1, 16, size, size), steps=1)
        held.append(taken() - before)
    pools(layout).handle.close()
    mm.unload_all_models()
    after = taken() - before
    figure(
        f"held after runs of a tiny, two large and a tiny latent: {', '.join(map(mib, held))}; after the pool"
        f" has ended: {mib(after)}"
    )
    if device == "cuda":
        assert max(held) - held[0] <= layout.world_size * SLACK, "a run gives its activations back"
        assert after <= SLACK


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("layout", [*TWO, Layout(ulysses=2, pipefusion=2)], ids=Layout.equation)
def test_stop_leaves_the_pool_warm(truth, parallel, pools, figure, layout, backend):
    import comfy.model_management as mm

    stock, computed, allowed = truth
    model, asked = parallel(stock(), layout, backend, patching_of(layout)), []
    sample(model, CASE)
    pids = pools(layout, backend).remote.sessions.live.pool.ranks.pids

    def interrupt():
        asked.append(time.perf_counter())
        mm.interrupt_current_processing()

    with pytest.raises(mm.InterruptProcessingException):
        with_callback(model, CASE, interrupt)
    figure(f"stopped after {1e3 * (time.perf_counter() - asked[0]):.0f} ms")
    mm.interrupt_current_processing(False)
    assert relative_error(sample(model, CASE), computed()) <= allowed()
    assert pools(layout, backend).remote.sessions.live.pool.ranks.pids == pids
    assert not math.isnan(float(computed().std()))


@pytest.mark.parametrize("layout", TWO[:2], ids=Layout.equation)
def test_fresh_ranks_compute_the_image_after_one_was_killed_over_nccl(truth, parallel, pools, figure, layout):
    """Between two evaluations the same run goes on; amid one it ends, and the next one is right."""
    stock, computed, allowed = truth
    model = parallel(stock(), layout, "nccl", patching_of(layout))
    sessions = pools(layout, "nccl").remote.sessions

    def image(act=lambda: None):
        began = time.perf_counter()
        assert relative_error(with_callback(model, CASE, act), computed()) <= allowed()
        return time.perf_counter() - began

    def lose():
        kill(sessions.live.pool, 1)
        sessions.live.pool.ranks._crew.supervisor.exit_of(1, DEADLINE_S)

    image()
    warm, again = image(), image(lose)
    figure(f"killed between two evaluations: {again:.1f} s for the image, {warm:.2f} s without")
    pool = sessions.live.pool
    killer, began = Once(lambda: in_forward(pool, 1), lambda: kill(pool, 1)), time.perf_counter()
    try:
        image()
    except PoolFailed as error:
        figure(f"killed amid one: {time.perf_counter() - began:.2f} s until it was said: {error}")
    killer.join()
    assert killer.acted
    figure(f"the next image: {image():.1f} s")
    assert sessions.live.pool is not pool
