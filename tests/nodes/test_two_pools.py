"""A pool of the graph and that of auto mode on the same devices, with fake workers: the same pool
where the layout is the same, and a notice where another layout has the workers started anew, or
where there are more ranks than cores.
"""

from types import SimpleNamespace

import pytest
import torch
from comfy_execution.utils import CurrentNodeContext
from pipemesh.lab.commands.parity import stock_model
from pipemesh.nodes.planning import Sampling
from pipemesh.nodes.report.text import NO_POOL, report_text
from pipemesh.nodes.runtime import Runtime
from pipemesh.parallel_runtime.layout import Layout

from ..kit.fake_pools import fake_setup
from ..kit.foreign_pack import unet
from ..kit.planned import counts

PROMPT = {"cross_attn": torch.zeros(1, 13, 64), "pooled_output": torch.zeros(1, 32)}


@pytest.fixture
def runtime(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPEMESH_CACHE", str(tmp_path))  # speeds that were measured here choose otherwise
    made = Runtime(fake_setup())
    made.planning.counts = SimpleNamespace(of=lambda *_: counts("flux 1024"))  # test_counting.py counts
    yield made
    made._keeper.close()


def handle_of(runtime, choice):
    pool = runtime._pool(choice.placement)
    return next(handle for handle, one in runtime.pools(choice) if one is pool)


def told_of(runtime):
    return [(notice.prompt, notice.node, notice.text, notice.count) for notice in runtime.notices.latest()]


@pytest.mark.parametrize(
    "chosen",
    [
        {"layout": "auto"},
        {"layout": "by hand", "ulysses": 2},
        {"layout": "by hand", "devices": "cpu,cpu", "ulysses": 2, "backend": "gloo"},
    ],
)
def test_auto_mode_and_a_pool_of_the_same_layout_on_the_same_devices_share_their_workers(runtime, chosen):
    first = handle_of(runtime, runtime.choose(**chosen)).ensure()
    assert handle_of(runtime, runtime.default_choice()).ensure() is first
    assert not told_of(runtime)


def test_what_is_running_is_no_layout_of_an_exact_choice_nor_of_a_model_that_cannot_have_it(runtime):
    """A pipeline that another node asked for, one rank, and a UNet where ranks share a sequence."""
    auto, exact = runtime.default_choice(), stock_model(5)
    asked = Sampling((1, 16, 128, 128), (PROMPT,), 20)
    for chosen in ({"layout": "by hand", "pipefusion": 2, "ulysses": 1}, {"layout": "by hand", "ulysses": 1}):
        handle_of(runtime, runtime.choose(**chosen)).ensure()
        assert runtime.plan(exact, auto, lambda: asked).layout in (Layout(ulysses=2), Layout(ring=2))
    handle_of(runtime, runtime.choose(layout="by hand", ulysses=2)).ensure()
    both = Sampling((1, 4, 16, 16), (PROMPT,) * 2, 20)
    assert runtime.plan(unet("SD15"), auto, lambda: both).layout == Layout(cfg=2)


def test_the_wait_for_the_first_step_is_shown_while_a_layout_is_chosen(runtime, monkeypatch):
    """Counting a model of which no kind was counted yet takes a moment."""
    done = []

    monkeypatch.setattr(runtime.wait, "begin", lambda: done.append("wait"))
    monkeypatch.setattr(runtime.planning, "choose", lambda *_, **__: done.append("choose"))
    runtime.plan(stock_model(5), runtime.default_choice(), lambda: None)
    assert done == ["wait", "choose"]


def test_a_model_on_the_same_pool_by_another_choice_leaves_the_one_that_came_in_as_it_is(runtime):
    by_hand = runtime.parallelize(stock_model(5), runtime.choose(layout="by hand", ulysses=2))
    left_open = runtime.parallelize(by_hand, runtime.default_choice())
    by_hand.theirs = "set by a node"
    assert left_open.theirs == "set by a node"
    assert (
        runtime.planning.left_open(by_hand.remote) is None
        and runtime.planning.left_open(left_open.remote) is not None
    )
    assert runtime.parallelize(left_open, runtime.choose(layout="by hand", ulysses=2)) is not left_open
    assert runtime.planning.left_open(left_open.remote) is not None


def test_another_layout_on_the_same_devices_has_the_workers_started_anew_and_says_so_once_for_each_node(
    runtime,
):
    chosen, auto = runtime.choose(layout="by hand", pipefusion=2, ulysses=1), runtime.default_choice()
    for choice, node in ((chosen, "1"), (auto, "2"), (chosen, "3"), (auto, "2")):
        with CurrentNodeContext("prompt", node):
            handle_of(runtime, choice).ensure()
    pipeline, shared = "pipefusion 2 = 2 ranks", "ulysses 2 = 2 ranks"
    move = "If one workflow uses both, connect one pool to all samplers."
    told = "Workers are started anew: {} needs the devices of {}. " + move
    assert told_of(runtime) == [
        ("prompt", "2", told.format(shared, pipeline), 2),
        ("prompt", "3", told.format(pipeline, shared), 1),
    ]
    latest = tuple(runtime.notices.latest())
    assert report_text([], None, latest) == NO_POOL and not any(notice.one_gpu for notice in latest)


def test_more_ranks_than_cores_are_told_of(runtime, monkeypatch):
    monkeypatch.setattr("pipemesh.pool.devices.own_cores", lambda: [0, 1])
    runtime.choose(layout="by hand", ulysses=2)
    assert not told_of(runtime)
    runtime.choose(layout="by hand", ulysses=3)
    (notice,) = runtime.notices.latest()
    assert (
        notice.text.startswith("ulysses 3 = 3 ranks on the CPU, which has 2 cores here")
        and not notice.one_gpu
    )
