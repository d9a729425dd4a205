"""A pool's layout is chosen for what is sampled: counted on the MODEL without weights, predicted
for the devices that are there, and the image is stock's own whatever is chosen.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import comfy.samplers
import pytest
import torch
from comfy_execution.utils import CurrentNodeContext
from pipemesh.lab.boxes import published_box
from pipemesh.lab.commands.parity import conditioning, stock_model
from pipemesh.nodes.auto.layouts import require_more_than_frames, require_several
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.switch import Switch
from pipemesh.nodes.notices import Notices
from pipemesh.nodes.past_choices import PastChoices
from pipemesh.nodes.planning import (
    STEP_BYTES,
    PlannedLayout,
    Planning,
    Sampling,
    may_replay,
    placed,
    provisional,
    rank_devices,
)
from pipemesh.nodes.report.text import plan_text
from pipemesh.nodes.room import room_on_devices
from pipemesh.nodes.runtime import tell_of_restart
from pipemesh.nodes.settings import Choice
from pipemesh.nodes.status.sums import longer_alone, plan_figures
from pipemesh.nodes.timing import StepTimes
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.client.run import Evaluation, Run, RunNames
from pipemesh.parallel_runtime.client.wait import Wait
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families.catalogue import PLANS
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.recordings import why_not_recorded
from pipemesh.parallel_runtime.planner.choice import plan, with_running
from pipemesh.parallel_runtime.planner.counts import NotCounted
from pipemesh.parallel_runtime.planner.job import Job
from pipemesh.parallel_runtime.planner.machine import (
    PLAIN_GPU,
    MachineBox,
    RankDevice,
    machine_box,
    over_machines,
    published_name,
)
from pipemesh.parallel_runtime.planner.prediction import RESERVED, predict
from pipemesh.parallel_runtime.texts import Text
from pipemesh.parallel_runtime.wire.messages import Memory
from pipemesh.pool.devices import Device, Placement, place

from ..kit.bounds import assert_same
from ..kit.foreign_pack import unet, video_unet
from ..kit.in_groups import GroupsHere
from ..kit.models import VIDEO, run
from ..kit.patched import in_windows
from ..kit.planned import box, counts
from ..kit.shared_runtime import no_trials

NOWHERE = Path("/nowhere")
FLUX = counts("flux 1024")
OPEN = Choice(place(Layout(ulysses=2), "cpu", "auto", ()), is_open=True)
TWO_GPUS = Placement(layout=Layout(ulysses=2), devices=(Device("cuda:0"), Device("cuda:1")), backend="nccl")
PROMPT = {"cross_attn": torch.zeros(1, 13, 64), "pooled_output": torch.zeros(1, 32)}


def planning(count=lambda *_: FLUX):
    return Planning(StepTimes(), SimpleNamespace(of=count), NOWHERE)


def box_of_gpus(title="NVIDIA L40", count=2, gib=48, **how):
    return machine_box([RankDevice(title, gib << 30)] * count, **how)


@pytest.fixture
def known(monkeypatch):
    """Pools are predicted by this box of published figures."""
    return lambda a_box: monkeypatch.setattr(
        Planning, "_here", lambda *_: MachineBox(a_box, "published", "by figures")
    )


def asked(branches=1, batch=1, evaluations=20):
    return lambda: Sampling((batch, 16, 8, 10), (PROMPT,) * branches, evaluations)


# -- what is asked


def guider(cfg, batch=1, model=None):
    made = comfy.samplers.CFGGuider(model or stock_model(5))
    made.set_conds(conditioning(1, 13), conditioning(2, 7))
    made.set_cfg(cfg)
    return made, torch.zeros(batch, 16, 8, 10), torch.linspace(1, 0, 4)


def test_what_a_guider_is_about_to_sample_is_known_before_it_begins():
    alone, both = (Sampling.of(*guider(cfg, batch=2)) for cfg in (1.0, 4.0))
    assert (len(alone.conds), len(both.conds), both.shape[0], both.evaluations) == (1, 2, 2, 3)
    assert both.text == "2 prompts, 2 latents of 16 x 8 x 10, 3 evaluations"
    with pytest.raises(NotCounted, match="several latents at once"):
        Sampling.of(guider(1.0)[0], object(), torch.ones(3))


def test_context_windows_are_planned_for_as_evaluations_of_their_own_size():
    model = stock_model(5, family=VIDEO)
    windowed = in_windows(model, context_length=5, context_overlap=2)
    sampled, _, sigmas = guider(4.0, model=windowed)
    asked = Sampling.of(sampled, torch.zeros(1, 16, 11, 8, 6), sigmas)
    assert (asked.shape, asked.windows, asked.branches) == ((1, 16, 6, 8, 6), 3, 6), "a frame before two of 5"
    assert asked.text == "2 prompts, 1 latent in 3 context windows of 16 x 6 x 8 x 6, 3 evaluations"
    plan = planning().choose(model.model, OPEN, lambda: asked, ())
    assert plan.layout.groups == 2
    one = Sampling.of(sampled, torch.zeros(1, 16, 5, 8, 6), sigmas)
    assert (one.shape, one.windows) == ((1, 16, 5, 8, 6), 1)


# -- what is chosen


def test_what_another_packs_guider_lacks_is_what_planning_hears_of_a_videos_too():
    model, given = video_unet(), {"noise": torch.zeros(4, 4, 8, 8), "sigmas": torch.ones(3)}
    require_more_than_frames(model, SimpleNamespace(), given)
    asks = partial(Sampling.of, SimpleNamespace(), *given.values())
    assert planning().choose(model.model, OPEN, asks, ()).why == "AttributeError, see the log"


def test_prompts_and_images_go_to_groups_and_one_alone_is_shared_by_all_ranks():
    def layout(*how):
        return planning().choose(unet().model, OPEN, asked(*how), ()).layout

    assert layout(2, 1) in (Layout(cfg=2), Layout(data=2)) and layout(1, 2) == Layout(data=2)
    assert layout(1, 1).world_size == 2 and layout(1, 1).groups == 1


def test_the_frames_of_a_video_are_not_shared_out_and_its_two_prompts_are():
    choice = replace(OPEN, placement=place(Layout(ulysses=4), "cpu", "auto", ()))
    one, two = (planning().choose(video_unet().model, choice, asked(many, 6), ()).layout for many in (1, 2))
    assert one.data == two.data == one.cfg == 1 and two.cfg == 2


def test_over_machines_what_sends_least_goes_between_them_and_what_is_assumed_is_said():
    def opened(devices):
        return Choice(place(Layout(ulysses=devices.count("cpu")), devices, "auto", ()), is_open=True)

    def chosen(devices, *how):
        return planning().choose(unet().model, opened(devices), asked(*how), ())

    two, groups = "cpu,cpu,far/cpu,far/cpu", Layout(ulysses=2, cfg=2)
    assert placed(opened(two), chosen(two, 2)).placement == place(groups, two, "auto", ())
    assert chosen(two, 1, 2).layout == Layout(ulysses=2, data=2)
    assert chosen(two).box == "2x2xCPU-10G"
    assumed = ", if each machine is like this one, with 10 Gbit/s between them, not measured"
    assert chosen(two).why.endswith(assumed)
    unequal = "the devices do not name equally many of each machine, ComfyUI's machine first"
    for devices in ("far/cpu,far/cpu", "far/cpu,cpu", "cpu,far/cpu,far/cpu"):
        assert chosen(devices).why == unequal


def test_machines_alike_are_the_box_that_plan_names_so():
    here, named = machine_box([RankDevice("NVIDIA L40", 48 * 10**9)] * 8), published_box("2x8xL40-PCIe-10G")
    assert over_machines(here, 16).box == named
    assert over_machines(here, 8) is here
    assert over_machines(here, 12).box == named.first(12), "the last machine has fewer"


def test_what_cannot_be_counted_keeps_all_devices_on_one_image_and_says_why():
    def chosen(error):
        def fail(*_args):
            raise error

        return planning(fail).choose(unet().model, OPEN, asked(2), ())

    known = chosen(NotCounted("it is not known"))
    assert (known.layout, known.why, known.seconds) == (Layout(ulysses=2), "it is not known", None)
    assert chosen(KeyError("another pack's")).why == "KeyError, see the log"
    assert provisional(OPEN, unet()).placement.layout == Layout(cfg=2), "a model that cannot be cut"


@pytest.fixture
def slow_links(known):
    """Two GPUs that are faster as stages; returns an open choice of them."""
    known(box(2, port=1e9, flops=1e14))
    return Choice(TWO_GPUS, allows_approximate=True, is_open=True)


def test_stages_are_chosen_where_they_may_be_and_the_model_has_some(slow_links):
    choice, model = slow_links, stock_model(5).model
    chosen = planning().choose(model, choice, asked(evaluations=40), ())
    own = placed(choice, chosen)
    assert (own.placement.layout, own.patching.patches, own.patching.warm_up) == (Layout(pipefusion=2), 3, 2)
    assert "the first 2 are whole (warm-up)" in plan_text(plan_figures(chosen))
    exact = planning().choose(model, replace(choice, allows_approximate=False), asked(), ())
    assert not exact.plan.best.layout.is_approximate
    assert planning().choose(unet().model, choice, asked(), ()).layout.pipefusion == 1


def test_ranks_that_are_up_stay_unless_another_layout_saves_more_than_its_start():
    job, up = Job(whole=FLUX, branches=2, evaluations=20), Layout(ulysses=2)

    def best(job, a_box, running=up, **how):
        return with_running(job, a_box, plan(job, a_box, sizes=(2,)), running, **how).best

    fast, slow = box(2, flops=1e14), box(2, flops=1e12, port=1e6)
    made = plan(job, fast, sizes=(2,))
    assert made.best.layout.groups == best(job, slow).layout.groups == 2
    kept = with_running(job, fast, made, up)
    assert kept.best.layout == up and {row.loss for row in kept.rows[1:]} >= {Text("lost_running")}
    saved = round(10 / (predicted(job, fast, up) - made.best.prediction.seconds))
    for times, again, stays in (
        (0.9, False, True),
        (1.5, False, False),
        (1.5, True, True),
        (2.1, True, False),
    ):
        longer = replace(job, evaluations=round(times * saved))
        assert (best(longer, fast, is_wanted_again=again).layout == up) is stays
    alone = best(Job(whole=FLUX, evaluations=1000), fast, Layout(cfg=2))
    assert alone.layout == Layout(cfg=2), "its groups share the sequence of one prompt"


@pytest.mark.parametrize("branches", [1, 2])
def test_running_groups_are_taken_to_keep_weights_as_they_would(branches):
    """Where whole weights have no room, one sequence would share them; groups cannot."""
    job, small = Job(whole=FLUX, branches=branches, evaluations=1), box(2, flops=1e14, memory=18 << 30)
    made = plan(job, small, sizes=(2,))
    assert made.best.prediction.kept == "sharded"
    due = min((one.seconds for one in predict(job, Layout(cfg=2), small)), default=None)
    best = with_running(job, small, made, Layout(cfg=2)).best
    kept = best.prediction.kept, best.prediction.seconds
    assert best.layout != Layout(cfg=2) or kept == ("offloaded", due)


def predicted(job, a_box, layout):
    return min(one.seconds for one in predict(job, layout, a_box))


def test_a_workflow_of_two_kinds_of_samplings_counts_the_way_back_until_one_of_them_is_gone(
    known, monkeypatch
):
    known(box(2, flops=1e14))
    chooser, model, counted, best = planning(), stock_model(5).model, [], {}

    def noted(_job, _box, made, _running, *, is_wanted_again, **_):
        counted.append(is_wanted_again)
        return made

    monkeypatch.setattr("pipemesh.nodes.planning.with_running", noted)
    for branches in (2, 1, 2, 1, 1, 1, 1, 1):
        running = [best[3 - branches]] if 3 - branches in best else []
        best[branches] = chooser.choose(model, OPEN, asked(branches), running).layout
        assert best[branches].groups == branches
    assert counted == [True, True, True, True, True, True, False]


def test_a_notice_of_a_layout_that_was_chosen_does_not_advise_to_connect_one_pool():
    told = []
    notices = SimpleNamespace(tell=lambda text, one_gpu: told.append(text))
    chooser, model = planning(), stock_model(5).model
    with CurrentNodeContext("a prompt", "1"):
        taken = placed(OPEN, chooser.choose(model, OPEN, asked(2), ())).placement
    other = place(Layout(ulysses=2), "cpu", "auto", ())
    # Node 2 has a pool by hand, of the layout that node 1 got by choice
    for node, old, new in (("1", other, taken), ("1", taken, other), ("2", other, taken)):
        with CurrentNodeContext("a prompt", node):
            tell_of_restart(notices, chooser.past.led_to, old, new)
    assert [text.rpartition(", ")[2] for text in told] == [
        "set layout of PipeMesh Pool to by hand.",
        "connect one pool to all samplers.",
        "connect one pool to all samplers.",
    ]


def test_a_restart_may_be_asked_about_while_a_sampling_is_planned():
    """Another thread looks at the choices, as ``led_to`` does, and one is noted before it ends."""
    past, (devices, layout) = PastChoices(), (OPEN.placement.devices, OPEN.placement.layout)
    for kind in (("first",), ("second",)):
        past.note(devices, kind, None, layout)
    looked_at = iter(past)
    first = next(looked_at)
    past.note(devices, ("third",), None, layout)
    assert [one.kind for one in (first, *looked_at)] == [("first",), ("second",)]
    assert [one.kind for one in past] == [("first",), ("second",), ("third",)]


# -- the devices


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("A100-SXM4-80GB", "A100"),
        ("GeForce RTX 4090", "RTX4090"),
        ("RTX 6000 Ada Generation", "RTX6000Ada"),
        ("RTX A6000", "A6000"),
        ("L40S", "L40S"),
        *((title, "") for title in ("L4", "GeForce RTX 4090 Laptop GPU", "A10")),
    ],
)
def test_a_gpu_has_the_published_figures_of_its_name(title, kind):
    assert published_name(f"NVIDIA {title}") == kind


def test_how_the_speeds_of_a_box_are_known_is_said():
    linked = box_of_gpus("NVIDIA H100 80GB HBM3")
    assert (linked.known, linked.box.name) == ("published", "2xH100-NVLink")
    assert box_of_gpus("NVIDIA H100 PCIe").box.name == "2xH100-PCIe"
    staged, direct = (
        box_of_gpus("NVIDIA RTX A6000", staged=staged).box.levels[0] for staged in (True, False)
    )
    assert staged.bytes_per_s < direct.bytes_per_s
    strange = box_of_gpus("Strange GPU", gib=8)
    assert strange.known == "plain"
    assert f"no figures of Strange GPU are known, and those of {PLAIN_GPU}" in strange.said
    assert strange.box.devices[0].memory_bytes == 8 << 30
    cpus = [RankDevice("CPU", 1, cores=1)] * 2
    assert machine_box(cpus).known == "plain"


def test_memory_is_what_is_free_and_what_models_hold_that_would_make_room(monkeypatch):
    names = ("cuda:0", "cuda:0", "cuda:1")
    pair = Placement(layout=Layout(ulysses=3), devices=tuple(map(Device, names)), backend="gloo")
    free = [Memory(10 * STEP_BYTES, 0, held * STEP_BYTES + 3) for held in (3, 3, 2)]
    room = room_on_devices([(pair, free)])
    first, second = 16 * STEP_BYTES + 6 + 2 * RESERVED, 12 * STEP_BYTES + 3 + RESERVED
    assert room == {"cuda:0": first, "cuda:1": second}
    gpu = SimpleNamespace(name="NVIDIA L40", total_memory=48 << 30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _name: gpu)
    assert [one.memory_bytes for one in rank_devices(pair, {})] == [24 << 30, 24 << 30, 48 << 30]
    steps = [(one.memory_bytes - RESERVED) / STEP_BYTES for one in rank_devices(pair, room)]
    assert steps == [8, 8, 12], "a few bytes are not told"


def test_what_was_predicted_for_a_like_sampling_is_not_predicted_again(slow_links, monkeypatch):
    asked_for, model = [], stock_model(5).model
    chooser = planning(lambda *_: replace(FLUX))
    monkeypatch.setattr(
        "pipemesh.nodes.planning.plan", lambda *args, **how: asked_for.append(1) or plan(*args, **how)
    )
    first, again, other = (
        chooser.choose(model, slow_links, asked(evaluations=many), ()).plan for many in (20, 20, 4)
    )
    assert again is first is not other and len(asked_for) == 2


def test_the_way_to_keep_weights_is_part_of_the_choice_where_whole_ones_have_no_room(known):
    def chosen(weights):
        choice = replace(OPEN, weights=weights)
        made = planning().choose(stock_model(5).model, choice, asked(), ())
        return made, placed(choice, made).weights

    known(box(2, memory=16 << 30))
    made, weights = chosen("auto")
    assert made.kept == weights == "sharded"
    assert chosen("whole")[0].why == "no layout fits into memory"
    assert chosen("offloaded")[0].kept == "offloaded"
    known(box(2))
    assert chosen("auto")[1] == "auto", "the ranks see what is free"


def test_where_the_planner_itself_finds_one_device_faster_stock_runs(made_auto, known):
    """Links so slow that no layout of two ranks gains anything."""
    known(box(2, port=1e3, latency=1.0))
    runtime, stock = PoolsHere(stock_model(5)), run(stock_model(5))
    made = made_auto(runtime)
    made.switch.fixed = True
    assert torch.equal(run(stock_model(5)), stock)
    (notice,) = made._notices.latest()
    assert notice.text == "On one GPU: One GPU is faster here than several, by figures."
    assert not any(here.asked for here, _ in runtime.pools.values())
    one = runtime.planning.choose(stock_model(5).model, OPEN, asked(), ())
    with pytest.raises(Refused, match="UNetModel has no token plan"):
        require_several(one, unet(), OPEN)


# -- sampled so


class PoolsHere:
    """A runtime whose pools are all in this process, one for each layout."""

    def __init__(self, stock):
        self.wait, self.trials = Wait(), no_trials()
        self.stock, self.pools = stock, {}
        self.planning = planning()

    def default_choice(self):
        return OPEN

    def plan(self, model, choice, asked, to_come=None):
        return self.planning.choose(model.model, choice, asked, ())

    def parallelize(self, model, choice, left_open=None):
        layout = choice.placement.layout
        if layout not in self.pools:
            here = GroupsHere(layout, self.stock)
            self.pools[layout] = here, RemotePool(here)
        made = parallelize(model, self.pools[layout][1], 0.0)
        self.planning.leave_open(made.remote, left_open or (choice if choice.is_open else None))
        return made


@pytest.fixture
def made_auto(request):
    def made(runtime):
        auto = Auto(lambda: runtime, Switch({"PIPEMESH_AUTO": "0"}, lambda: None), Notices(), StepTimes())
        auto.install()
        request.addfinalizer(auto.remove)
        return auto

    return made


@pytest.mark.parametrize("by_node", [True, False])
def test_each_sampling_has_the_layout_that_is_chosen_for_it_and_the_image_is_stocks_own(made_auto, by_node):
    """Of a pool node whose layout is auto, and of auto mode."""
    runtime, model, stock = PoolsHere(stock_model(5)), stock_model(5), stock_model(5)
    made = made_auto(runtime)
    ours = runtime.parallelize(model, OPEN) if by_node else model

    def sampled(one):
        made.switch.fixed = one is ours and not by_node
        return run(one, cfg=4.0)

    assert_same(sampled, ours, stock)
    here, pool = runtime.pools.get(Layout(cfg=2)) or runtime.pools[Layout(data=2)]
    assert {ranks for ranks, _, _ in here.asked} == {(0,), (1,)}
    figures = plan_figures(runtime.planning.of(pool.runs.last), pool.runs.last)
    assert figures.predicted_ms > 0 < figures.achieved_ms and figures.losers
    assert "2 prompts, 1 latent of 16 x 8 x 10, 3 evaluations" in plan_text(figures)
    if by_node:
        assert not runtime.pools[Layout(ulysses=2)][0].asked
        assert runtime.planning.left_open(ours.remote) == OPEN, "the next sampling is planned too"


# -- told


def test_the_report_says_why_a_layout_was_chosen_and_why_others_were_not():
    made = plan(Job(whole=FLUX, branches=2), box(4, flops=1e13))
    planned = PlannedLayout(made.best.layout, "by published figures of 4xL40-PCIe", "2 prompts", made)
    ran = Run(evaluations=[Evaluation(0.5, 0.0, 0.0, 0)], names=RunNames(branches={"a": 0, "b": 1}))
    said = plan_text(plan_figures(planned, ran)).splitlines()
    assert said[0] == f"Layout chosen: {made.best.layout.equation()}, by published figures of 4xL40-PCIe"
    assert re.match("  predicted per evaluation: .* 4.00 times as fast as one device$", said[2])
    assert said[3] == "  achieved: 500.0 ms", "groups compute both prompts at once"
    assert " ms more " in said[4] and said[-1].startswith("  and ")
    apart = replace(planned, layout=Layout(ulysses=4))
    assert plan_figures(apart, ran).achieved_ms == 1000.0
    said = "Layout taken: ulysses 2 = 2 ranks; nothing was predicted: links are not known"
    assert plan_text(plan_figures(PlannedLayout(Layout(ulysses=2), "links are not known"))) == said


def test_why_others_lose_is_told_in_texts_that_every_language_has():
    made = plan(Job(whole=FLUX, branches=2), box(4, flops=1e13, memory=25e9))
    losers = plan_figures(PlannedLayout(made.best.layout, "", plan=made)).losers
    assert [one.why for one in losers] == [row.loss for row in made.rows if row.loss is not None]
    assert Text("lost_approximate") in {one.why for one in losers}
    assert all((one.predicted_ms is None) == (one.why.name == "lost_memory") for one in losers)


def test_where_ranks_cannot_be_timed_one_gpu_takes_what_the_planner_predicts_and_nothing_where_it_cannot():
    """NCCL's messages run beside the clock that ranks look at."""
    made = plan(Job(whole=FLUX), box(2, flops=1e13))
    planned = PlannedLayout(Layout(ulysses=2), "", plan=made, known="published")
    evaluations = [Evaluation(seconds, 0.0, 0.0, 0) for seconds in (9.0, 0.5, 0.5)]
    ran = Run(evaluations=evaluations, names=RunNames(branches={"a": 0}))
    assert longer_alone(ran, TWO_GPUS, planned) == pytest.approx(made.alone().prediction.seconds / 0.5)
    for unknown in (None, replace(planned, known="plain"), replace(planned, plan=None)):
        assert longer_alone(ran, TWO_GPUS, unknown) is None
    assert longer_alone(Run(), TWO_GPUS, planned) is None


@pytest.mark.parametrize("sigmas", [None, torch.zeros(1)])
def test_a_sampling_without_a_step_is_not_counted(sigmas):
    guider = comfy.samplers.CFGGuider(SimpleNamespace(model_options={}))
    guider.original_conds, guider.cfg = {"positive": [{}]}, 3.0
    with pytest.raises(NotCounted, match="nothing to evaluate"):
        Sampling.of(guider, torch.zeros(1, 16, 8, 8), sigmas)


def test_replays_are_predicted_where_workers_may_record(monkeypatch):
    plans = [one for one in PLANS if not why_not_recorded(one)]
    assert not may_replay(plans[0], "nccl")
    monkeypatch.setenv("PIPEMESH_GRAPHS", "1")
    assert may_replay(plans[0], "nccl") and not may_replay(plans[0], "gloo") and not may_replay(None, "nccl")
    refused = next(one for one in PLANS if one.prefix is not None)
    assert not may_replay(refused, "nccl")
