"""A late GPU shows what a real one need not. Between ComfyUI's process and ranks on such GPUs
nothing is read before it is there, nor overwritten while it is needed: with evaluations in flight,
where one is stopped, where one fails.
"""

from collections import defaultdict, deque
from functools import cache
from itertools import count

import pytest
import torch
from greenlet import getcurrent
from pipemesh.parallel_runtime.client.branch import Branch
from pipemesh.parallel_runtime.client.evaluations import Work
from pipemesh.parallel_runtime.client.patched_weights import drop_sets
from pipemesh.parallel_runtime.comm.device_copies import LateValue, Reached, to_cpu, to_device
from pipemesh.parallel_runtime.errors import ModelError, RunCancelled
from pipemesh.parallel_runtime.layout import Layout

from ..kit.joint_model import CONDS, Model
from ..kit.late_device import late_device
from ..kit.late_pool import pooled
from ..kit.late_queues import DEVICE, Op, Stuck
from ..methods.test_late_methods import on_gpu

STEPS, IN_FLIGHT = 3, 3
PATCHES = ((0, 4, False), (4, 4, False), (8, 5, True))
LAYOUTS = [Layout(), Layout(ulysses=2), Layout(pipefusion=2)]


def arguments_of(step, branch):
    cond = CONDS[branch]
    return {"img": cond["img"] * (-1.5) ** step, **{name: cond[name] for name in ("txt", "mask")}}


def asked(layout):
    """What is evaluated, in order: (step, branch, patch)."""
    whole = [(0, branch, None) for branch in (0, 1)]
    patches = PATCHES if layout.pipefusion > 1 else (None,)
    return whole + [
        (step, branch, patch) for step in range(1, STEPS) for patch in patches for branch in (0, 1)
    ]


class Sampler:
    """What ComfyUI's process does: so many runs, with evaluations in flight. ``stops``: from which
    one on the user wants the first run to stop.
    """

    def __init__(self, layout, runs=2, stops=-1):
        self.layout, self.stops = layout, stops
        self.runs = [None] * runs  # of each the outputs, or the error that it ends with

    def __call__(self, remote):
        for place in range(len(self.runs)):
            try:
                self.runs[place] = self.sampled(remote)
            except (RunCancelled, ModelError) as error:
                self.runs[place] = type(error)
                self.stops = -1
                remote.evaluations.abandon()
            remote.runs.end(remote.residency.models["m"])
        self.block_s = remote.residency.models["m"].balance.costs()

    def sampled(self, remote):
        remote.sessions.open(lambda: False)  # what was stopped is over
        run, evaluations = remote.runs.begin(remote.residency.models["m"]), remote.evaluations
        tickets, outputs, given = deque(), [], {}

        def collect():
            place, ticket = tickets.popleft()
            output = evaluations.collect(ticket, lambda: place >= self.stops >= 0)
            outputs.append(output.to("cpu", copy=True))

        for place, (step, branch, patch) in enumerate(asked(self.layout)):
            if (step, branch) not in given:
                given[step, branch] = {**on_gpu(arguments_of(step, branch)), "transformer_options": {}}
            name = Branch((str(branch),))
            tickets.append((place, evaluations.submit(run, Work(given[step, branch], name), patch)))
            if len(tickets) == IN_FLIGHT:
                collect()
        while tickets:
            collect()
        return outputs


@cache
def expected_of(layout):
    sampler = Sampler(layout, runs=1)
    pooled(layout, sampler, at_once=True)
    return sampler.runs[0]


def assert_run(outputs, expected):
    """One run's outputs are these to the bit."""
    assert isinstance(outputs, list), outputs
    for place, (one, other) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.equal(one, other), place


@pytest.mark.parametrize("pins", [False, True], ids=["staged", "pinned"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
def test_amid_a_run_ranks_wait_for_nothing_behind_which_their_gpu_is_idle(layout, pins):
    seen = defaultdict(list)

    def prepare(rank, model):
        def note(*_):
            gpu = getcurrent().gpu
            seen[rank].append((gpu.waits["copy"], gpu.idle.total()))

        model.register_forward_pre_hook(note)

    sampler = Sampler(layout, runs=1)
    pooled(layout, sampler, pins=pins, prepare=prepare)
    assert len(sampler.block_s) == (4 if layout.stages > 1 else 0), "its blocks are timed all the same"
    for noted in seen.values():
        ends = len(asked(layout))
        amid = noted[ends - ends // 3 : ends]
        assert len(set(amid)) == 1, amid


@pytest.mark.cover(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
def test_evaluations_in_flight_read_and_write_what_is_theirs(layout, seed):
    sampler, expected, model = Sampler(layout), expected_of(layout), Model(4)
    pooled(layout, sampler, seed)
    for outputs in sampler.runs:
        assert_run(outputs, expected)
    for (step, branch, patch), output in zip(asked(layout), expected, strict=True):
        if patch is None:
            with torch.inference_mode():
                truth = model(**arguments_of(step, branch), transformer_options={})
            assert torch.allclose(output, truth, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
def test_after_a_run_that_is_stopped_or_fails_the_next_is_right(layout):
    expected = expected_of(layout)
    for seed, error in enumerate((RunCancelled, ModelError)):

        def prepare(rank, model, error=error):
            entered = count()

            def fail(*_):
                if next(entered) == 3:
                    raise ZeroDivisionError

            if error is ModelError and (layout.stages == 1 or rank == layout.world_size - 1):
                model.blocks[-1].register_forward_pre_hook(fail)

        sampler = Sampler(layout, stops=3 if error is RunCancelled else -1)
        pooled(layout, sampler, seed, prepare=prepare)
        assert sampler.runs[0] is error
        assert_run(sampler.runs[1], expected)


def test_a_sampler_that_writes_in_place_and_an_output_larger_than_the_latent():
    """The text counts as the latent here, and of the second prompt it is smaller than the image."""
    outputs = []

    def sample(remote):
        run, given = remote.runs.begin(remote.residency.models["m"]), [on_gpu(cond) for cond in CONDS]
        for step in range(3):
            works = [Work(one, Branch((str(branch),))) for branch, one in enumerate(given)]
            found = [remote.evaluations.dispatch(run, [work], lambda: False)[0] for work in works]
            outputs.append([one.to("cpu", copy=True) for one in found])
            for one, output in zip(given, found, strict=True):
                one["img"].mul_(-1.5).add_(output.repeat(1, 1, 3))
            if step == 1:
                given[0]["mask"].mul_(0.5)
        remote.runs.end(remote.residency.models["m"])

    pooled(Layout(ulysses=2), sample, seed=2)
    model = Model(4)
    given = [{**cond, "img": cond["img"].clone()} for cond in CONDS]
    for step, found in enumerate(outputs):
        for one, output in zip(given, found, strict=True):
            with torch.inference_mode():
                truth = model(**one)
            assert torch.allclose(output, truth, atol=1e-4), step
            one["img"] = one["img"] * -1.5 + truth.repeat(1, 1, 3)
        if step == 1:
            given[0]["mask"] = given[0]["mask"] * 0.5


class Steps(Sampler):
    """So many evaluations of one branch, one after another, in each of two runs."""

    def sampled(self, remote):
        remote.sessions.open(lambda: False)
        run, evaluations = remote.runs.begin(remote.residency.models["m"]), remote.evaluations
        outputs = []
        for step in range(8):
            given = {**on_gpu(arguments_of(step, 0)), "transformer_options": {}}
            ticket = evaluations.submit(run, Work(given, Branch(("0",))))
            output = evaluations.collect(ticket, lambda step=step: step >= self.stops >= 0)
            outputs.append(output.to("cpu", copy=True))
        return outputs


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=Layout.equation)
@pytest.mark.parametrize("stops", [-1, 6], ids=["to the end", "stopped"])
def test_ranks_replay_in_a_pool_whose_gpus_wait_for_their_processes(layout, stops):
    """At seed 1 a GPU has computed each operation before the next is asked for. With one rank it
    computes nothing at seed 0 before somebody waits: then nobody asks for recordings.
    """
    expected = Steps(layout, runs=1)
    pooled(layout, expected, at_once=True)
    for seed, replays in ((1, True), (0, layout.world_size > 1)):
        sampler = Steps(layout, stops=stops)
        gpus = pooled(layout, sampler, seed, worth=3)
        assert [gpu.replays > 0 for gpu in gpus] == [replays] * layout.world_size, seed
        for outputs in sampler.runs[stops >= 0 :]:
            assert_run(outputs, expected.runs[0])
    assert stops < 0 or sampler.runs[0] is RunCancelled


class Short(Steps):
    """Runs, and behind each its graphs are dropped, because memory is short or a load wants it."""

    def sampled(self, remote):
        outputs = super().sampled(remote)
        session = remote.sessions.live
        remote.runs.end(remote.residency.models["m"])
        remote.runs.end_owed()
        remote.sessions.settle(lambda: False)
        self.told.append([one.graphs for one in session.pool.memory])
        self.told.append([drop_sets(session, self.is_short), drop_sets(session)])
        return outputs


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=Layout.equation)
@pytest.mark.parametrize("is_short", [True, False], ids=["an evaluation lacks it", "a load wants it"])
def test_recordings_are_freed_for_others_and_none_are_made_after_a_lack_of_memory(layout, is_short):
    sampler = Short(layout)
    sampler.told, sampler.is_short = [], is_short
    pooled(layout, sampler, 1, worth=3)
    first, dropped, second, again = sampler.told
    assert all(first) and dropped == [True, False]
    assert any(second) != is_short and again == [not is_short, False]
    assert_run(sampler.runs[1], sampler.runs[0])


class Alternating(Steps):
    """Two prompts of unlike length, one after the other."""

    steps = 24

    def sampled(self, remote):
        remote.sessions.open(lambda: False)
        run, evaluations = remote.runs.begin(remote.residency.models["m"]), remote.evaluations
        for step in range(self.steps):
            img, txt = (on_gpu(arguments_of(0, 0))[name] for name in ("img", "txt"))
            txt = txt[:, step % self.lengths :].clone()
            given = {"img": img, "txt": txt, "mask": None, "transformer_options": {}}
            ticket = evaluations.submit(run, Work(given, Branch((str(step % self.lengths),))))
            evaluations.collect(ticket, lambda: False)
        return []


def test_a_prompt_that_is_replayed_does_not_keep_the_other_one_from_being_recorded():
    counts = []
    for lengths in (1, 2):
        sampler = Alternating(Layout(), runs=1)
        sampler.lengths = lengths
        counts.append(pooled(Layout(), sampler, 1, worth=5)[0].recordings)
    assert counts[1] == 2 * counts[0] > 0


def test_what_is_not_waited_for_is_not_there():
    with late_device() as box:
        numbers = to_device(torch.arange(3.0), DEVICE)
        place, reached = to_cpu(numbers * 2), Reached(DEVICE)
        assert place.isnan().all() and not box.gpu.waits
        reached.wait()
        assert place.tolist() == [0, 2, 4] and box.gpu.waits == {"Event.synchronize": 1}
        late = LateValue(numbers.sum())
        assert late.read() == 3


def test_what_lies_in_pinned_memory_is_read_when_the_gpu_comes_to_it():
    with late_device():
        staged = torch.empty(3, pin_memory=True)
        moved = staged.copy_(torch.arange(3.0)).to(DEVICE, non_blocking=True)
        staged.fill_(7)
        assert moved.tolist() == [7, 7, 7]


def test_memory_that_is_not_pinned_is_waited_for():
    with late_device() as box:
        pageable = torch.arange(3.0)
        moved = pageable.to(DEVICE, non_blocking=True)
        pageable.fill_(7)
        assert moved.tolist() == [0, 1, 2] and box.gpu.waits["copy"] == 2


def test_memory_that_is_free_is_written_behind_what_its_stream_was_asked_for_before():
    with late_device():
        freed = torch.ones(3, device=DEVICE)
        content, read = freed.content, freed + 1
        del freed
        assert read.tolist() == [2, 2, 2]
        assert content.isnan().all(), "another stream that reads it has no right to it"


def test_a_wait_for_what_never_comes_is_an_error():
    with late_device() as box, pytest.raises(Stuck):
        box.gpu.wait_for(box.queue().push(needs=(Op(),)), "nothing")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:2"])
def test_a_process_that_asks_for_another_gpu_or_for_none_by_number_is_told(device):
    with late_device() as box:
        box.own.device = torch.device("cuda", 1)
        for ask in (lambda: torch.ones(2, device=device), lambda: torch.ones(2).to(device)):
            with pytest.raises(RuntimeError, match=f"{device} in a process that computes on cuda:1"):
                ask()
        assert torch.ones(2, device="cuda:1").device == box.own.device
