"""PipeMesh Pool: what it hands out, and what changes without another pool."""

import asyncio

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.switch import Switch
from pipemesh.nodes.local_devices import why_one_gpu
from pipemesh.nodes.pool import pool_nodes
from pipemesh.nodes.runtime import Runtime
from pipemesh.nodes.settings import Choice
from pipemesh.nodes.status.collection import pool_status, run_status, status_of
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.client.session import Session
from pipemesh.parallel_runtime.errors import LayoutError, Refused
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.pool.devices import Device, Placement

from ..kit.fake_pools import fake_setup
from ..kit.models import conditioning, load, run

STAGES = {"devices": "cpu", "layout": "by hand", "ulysses": 1, "pipefusion": 2}


def validated(node, **chosen):
    return asyncio.run(node.validate_inputs(**chosen))


@pytest.fixture
def node():
    """Of a runtime that can start nothing."""
    runtime = Runtime(fake_setup())
    return pool_nodes(lambda: runtime)[0]


def test_a_prompt_that_names_no_input_takes_every_device_in_a_layout_that_is_chosen(node):
    assert validated(node, devices="cpu") is True
    (choice,) = node.execute(devices="cpu").result
    assert choice.is_open and (choice.placement.layout, choice.patching) == (Layout(ulysses=2), None)


def test_an_input_of_a_layout_by_hand_is_not_passed_over_where_the_prompt_names_no_layout(node):
    sentence = "ulysses counts only with layout by hand: give layout too, or leave out ulysses and ring."
    assert validated(node, devices="cpu", ulysses=2, ring=1) == sentence
    assert validated(node, devices="cpu", ulysses=2, ring=1, layout=None) is True, "a link gives it"
    with pytest.raises(LayoutError, match=sentence):
        node.execute(devices="cpu", ulysses=2, ring=1)


def test_a_link_to_an_input_that_the_node_does_not_have_is_named(node):
    """ComfyUI passes such a link on; a value without a link it drops."""
    sentence = r"^PipeMesh Pool has no input gpus, only devices, .*: remove the link to it, or"
    with pytest.raises(LayoutError, match=sentence):
        node.execute(devices="cpu", gpus=2)


def test_of_itself_a_pipeline_takes_one_patch_more_than_stages_and_one_whole_evaluation(node):
    assert validated(node, **STAGES) is True
    assert node.execute(**STAGES).result[0].patching == Patching(3, 1)
    assert node.execute(**STAGES, patches=2, warm_up=4).result[0].patching == Patching(2, 4)
    assert node.execute(**STAGES, stages=" 20, 37 ").result[0].patching == Patching(3, 1, (20, 37))


def test_without_stages_patches_and_warm_up_mean_nothing(node):
    chosen = STAGES | {"pipefusion": 1, "patches": 5}
    assert validated(node, **chosen) is True
    assert node.execute(**chosen, warm_up=9).result[0].patching is None


@pytest.fixture(scope="module")
def one_runtime(setup):
    said = []
    runtime = Runtime(setup, lambda text: said.append(text) if "in patches" in text else None)
    runtime.said = said
    yield runtime
    runtime._keeper.close()


@pytest.fixture
def sampling_runtime(one_runtime):
    """What runs say of themselves is in ``said``."""
    one_runtime.said.clear()
    return one_runtime


def only_pool(runtime):
    (pool,) = runtime.pools()
    return pool_status(*pool)


def last_run(runtime, choice=None):
    """How the last run was sampled in patches."""
    return run_status(runtime, *runtime.last_run(choice)).figures.in_patches


def test_other_patches_are_sampled_by_the_same_ranks_and_a_parallelized_model_takes_them(
    sampling_runtime, files
):
    had = sum(
        pool.sessions.live.loads for _, pool in sampling_runtime.pools() if pool.sessions.live is not None
    )
    model = load(files["model"])
    three, four = (sampling_runtime.choose(**STAGES, patches=patches, stages="2,2") for patches in (3, 4))
    parallel = sampling_runtime.parallelize(model, three)
    run(parallel)
    before = only_pool(sampling_runtime)
    patched = last_run(sampling_runtime)
    assert (patched.mode, patched.patches, patched.whole) == ("free-running", 3, 1)
    again = sampling_runtime.parallelize(parallel, four)
    run(again)
    after = only_pool(sampling_runtime)
    assert last_run(sampling_runtime, three).patches == 4
    assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
    assert after.loads == before.loads == had + 1
    assert sampling_runtime.parallelized(again, None) is again


def test_a_variable_that_cannot_be_read_is_told_where_one_gpu_would_sample_by_itself_too(monkeypatch):
    broken = Runtime(fake_setup(), fault="PIPEMESH_STALL is x: set it to seconds.")
    one = Choice(Placement(layout=Layout(), devices=(Device("cuda:0", "0"),), backend="nccl"))
    monkeypatch.setattr(broken, "default_choice", lambda: one)
    with pytest.raises(LayoutError, match="PIPEMESH_STALL is x"):
        broken.parallelized(object(), None)
    assert not broken.notices.latest()


def test_weight_hooks_are_named_sampled_in_patches_all_the_same_and_stock_when_warm(sampling_runtime, files):
    import comfy.hooks
    import comfy.utils

    def hooked():
        hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(files["lora"]), 0.8, 0.0)
        return [[tensor, {**extras, "hooks": hooks}] for tensor, extras in conditioning(1, 13)]

    model = load(files["model"])
    truth = run(model, positive=hooked(), cfg=2.0)
    mode = "single-timeline, because of hooks on the positive conditioning"
    for warm_up in (100, 1):
        choice = sampling_runtime.choose(**STAGES, warm_up=warm_up)
        ours = run(sampling_runtime.parallelize(model, choice), positive=hooked(), cfg=2.0)
        assert sampling_runtime.said.pop() == f"PipeMesh samples in patches, {mode}."
        assert relative_error(ours, truth) <= BOUND or warm_up == 1
    assert (last_run(sampling_runtime).whole, last_run(sampling_runtime).patches) == (2, 3)


def test_how_much_memory_ranks_have_free_is_the_same_all_through_a_run(sampling_runtime, files, monkeypatch):
    parallel = sampling_runtime.parallelize(load(files["model"]), sampling_runtime.choose(**STAGES))
    run(parallel)
    asked = []
    monkeypatch.setattr(Session, "free_bytes", property(lambda _: asked.append(1) or 1 << 40))
    run(parallel, cfg=2.0)
    assert len(asked) == 1


@pytest.mark.cover(2)
@pytest.mark.parametrize("pipefusion", [1, 2])
@pytest.mark.parametrize("shape", [(0, 16, 8, 8), (1, 16, 0, 8), (1, 16, 8, 0)])
def test_an_empty_latent_is_refused_before_a_pool_starts(files, setup, pipefusion, shape):
    runtime = Runtime(setup)
    model = runtime.parallelize(
        load(files["model"]), runtime.choose(**STAGES | {"ulysses": 3 - pipefusion, "pipefusion": pipefusion})
    )
    with pytest.raises(Refused) as caught:
        run(model, latent=torch.zeros(*shape))
    assert (
        str(caught.value)
        == f"The latent is empty ({' x '.join(map(str, shape))}): connect one with at least one image of at"
        " least one pixel."
    )
    assert only_pool(runtime).state == "closed"


@pytest.mark.parametrize(
    ("layout", "names", "stages", "part", "computed"),
    [
        (Layout(ulysses=2), ("cuda:0", "cuda:1"), None, 1.0, 0.5),
        (Layout(ulysses=2), ("cuda:1", "cuda:0"), None, 1.0, 0.5),
        (Layout(ulysses=2), ("cuda:1", "cuda:2"), None, 0.0, 0.0),
        (Layout(ulysses=2), ("cuda:0", "cuda:0"), None, 1.0, 1.0),
        (Layout(ulysses=2, ring=2), ("cuda:0", "cuda:0", "cuda:1", "cuda:1"), None, 1.0, 0.5),
        (Layout(pipefusion=4), ("cuda:1", "cuda:2", "cuda:3", "cuda:0"), (), 0.25, 1.0),
        (Layout(pipefusion=2), ("cuda:0", "cuda:0"), (), 1.0, 2.0),
        (Layout(pipefusion=2), ("cuda:0", "cuda:1"), (1, 4), 0.2, 1.0),
        (Layout(ulysses=2, pipefusion=2), ("cuda:1", "cuda:1", "cuda:0", "cuda:0"), (1, 4), 0.8, 1.0),
    ],
)
def test_whichever_ranks_compute_on_the_uis_device_their_part_is_counted(
    layout, names, stages, part, computed
):
    placement = Placement(layout=layout, devices=tuple(map(Device, names)), backend="gloo")
    choice = Choice(placement, None if stages is None else Patching(3, stages=stages))
    assert choice.held_on("cuda:0") == part and choice.computed_on("cuda:0") == computed


def test_the_host_counts_a_stages_part_of_the_weights(files, client, requests):
    model = load(files["model"])
    whole = parallelize(model, client, holds_ui_device=1.0)
    client.residency.release(whole.remote.model)  # another test may have kept its weights elsewhere
    stage = parallelize(model, client, holds_ui_device=0.5, patching=Patching(3))
    assert 0 < stage.model_size() == whole.model_size() // 2


# -- layout


def test_auto_takes_every_device_and_no_other_input_counts(node):
    by_hand = STAGES | {"pipefusion": 3, "patches": 4, "backend": "gloo"}
    for devices, ranks in {"auto": 2, "cpu": 2, "cpu, cpu ,cpu": 3}.items():
        chosen = by_hand | {"devices": devices, "layout": "auto"}
        assert validated(node, **chosen) is True
        (choice,) = node.execute(**chosen).result
        assert (choice.placement.layout, choice.patching) == (Layout(ulysses=ranks), None)
        assert len(choice.placement.devices) == ranks


def test_auto_takes_all_gpus(node, monkeypatch):
    gpus = tuple(Device(f"cuda:{index}", f"GPU-{index}") for index in range(3))
    monkeypatch.setattr("pipemesh.nodes.runtime.visible_gpus", lambda cpu_only: gpus)

    def chosen(**inputs):
        return node.execute(**inputs).result[0].placement

    pair = chosen(**STAGES | {"layout": "auto"})
    assert (pair.layout, pair.backend) == (Layout(ulysses=2), "gloo"), "cpu was chosen"
    every = chosen(**STAGES | {"devices": "auto", "layout": "auto"})
    assert (every.layout, every.devices, every.backend) == (Layout(ulysses=3), gpus, "nccl")
    by_hand = chosen(devices="auto", layout="by hand", ulysses=2)
    assert by_hand.devices == gpus[:2], "by hand, the degrees count"


@pytest.fixture
def elsewhere(monkeypatch, request):
    """ComfyUI computes on a device of another maker."""
    monkeypatch.setattr("comfy.model_management.get_torch_device", lambda: torch.device(request.param))
    monkeypatch.setattr(
        "comfy.model_management.get_torch_device_name", lambda device: f"{device} of another maker"
    )
    sizes = {"get_total_memory": 2, "get_free_memory": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(f"comfy.model_management.{name}", lambda device, size=size: size)
    return request.param


NO_RANKS = (
    "ComfyUI computes on {}, and PipeMesh on GPUs of NVIDIA and AMD, or on the CPU: "
    "sample without PipeMesh, or set devices of PipeMesh Pool to cpu."
)


@pytest.mark.parametrize("elsewhere", ["xpu:0", "privateuseone:0", "mps"], indirect=True)
def test_where_no_rank_computes_a_pool_is_refused_in_a_sentence_that_the_page_and_the_log_have_too(
    elsewhere, node, files, caplog
):
    runtime = Runtime(fake_setup())
    sentence = NO_RANKS.format(elsewhere)
    with pytest.raises(LayoutError) as caught:
        pool_nodes(lambda: runtime)[1].execute(load(files["model"]))
    assert str(caught.value) == sentence
    for layout in ("auto", "by hand"):
        assert validated(node, **STAGES | {"devices": "auto", "layout": layout}) == sentence
        assert validated(node, **STAGES | {"layout": layout}) is True, "cpu was named"
    caplog.set_level("INFO", "pipemesh")
    auto = Auto(lambda: runtime, Switch({"PIPEMESH_AUTO": "1"}, lambda: None), runtime.notices)
    auto.install()
    auto.remove()
    status = status_of(runtime, auto)
    assert (status.auto.on, status.auto.unavailable.english) == (False, sentence)
    assert [(one.name, one.title) for one in status.devices] == [(elsewhere, f"{elsewhere} of another maker")]
    assert caplog.messages.count(f"[PipeMesh] {sentence}") == 1
    assert not runtime.pools()


def test_with_one_gpu_the_model_stays_itself_no_worker_starts_and_a_notice_says_why(monkeypatch, files):
    runtime, model = Runtime(fake_setup()), load(files["model"])
    for gpus, is_itself in ((1, True), (2, False)):
        seen = tuple(Device(f"cuda:{index}", f"GPU-{index}") for index in range(gpus))
        monkeypatch.setattr("pipemesh.nodes.runtime.visible_gpus", lambda cpu_only, seen=seen: seen)
        (made,) = pool_nodes(lambda: runtime)[1].execute(model).result
        assert (made is model, not runtime.pools()) == (is_itself, is_itself)
    assert [one.text for one in runtime.notices.latest()] == [
        "On one GPU: There is one GPU here, so there is no second one to share an image with."
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr("pipemesh.nodes.local_devices.hidden_gpus", lambda environ: 4)
    assert why_one_gpu().startswith(
        "ComfyUI sees one of the 4 GPUs here, because CUDA_VISIBLE_DEVICES is 1. Start"
    )


def test_a_layout_that_is_chosen_may_be_approximate_where_that_is_allowed_and_one_by_hand_is_what_it_says(
    node,
):
    def allowed(**chosen):
        return node.execute(**STAGES | chosen).result[0].allows_approximate

    approximate = {"quality": "approximate allowed"}
    assert allowed(layout="auto", **approximate)
    assert not allowed(layout="auto") and not allowed(layout="auto", quality="exact")
    assert not allowed(layout="by hand", **approximate)
