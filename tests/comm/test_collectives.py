"""The collectives and messages of all layouts of up to eight ranks: members of a group ask for the
same in the same order, and there is one order of everything that no interleaving can break.

All ranks run in this process, so orderings that only NCCL would hang on are found without a GPU.
"""

from functools import partial, wraps
from itertools import count, pairwise
from random import Random

import pytest
import torch
import torch.distributed as dist
from greenlet import getcurrent
from pipemesh.lab.dry_run.ranks import joined
from pipemesh.parallel_runtime.comm.exchange import Stopped
from pipemesh.parallel_runtime.comm.shares import shares_of
from pipemesh.parallel_runtime.comm.traffic import Unlike
from pipemesh.parallel_runtime.errors import NoRoom
from pipemesh.parallel_runtime.layout import Layout, layouts_of
from pipemesh.parallel_runtime.methods import ring_attention
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.methods.pipefusion.stage_hooks import Stub
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.worker.handler import Skipped
from pipemesh.pool.verdict import Meets, are_even

from ..fixtures import ALL
from ..kit import joint_model
from ..kit.collectives import Event, RankRun, Stuck, World, disagreements, has_an_order
from ..kit.evenness import answered, done, failed
from ..kit.joint_model import BLOCKS, CONDS, PLAN, Model, inputs

EVERY = [layout for ranks in range(2, 9) for layout in layouts_of(ranks)]
SEQUENCES = [layout for layout in EVERY if layout.groups == layout.pipefusion == 1]
PIPELINES = [layout for layout in EVERY if layout.groups == 1 < layout.pipefusion]
IN_GROUPS = [layout for layout in EVERY if layout.groups > 1]
BACKENDS = ["gloo", "nccl"]
PATCHES = ((0, 4, False), (4, 4, False), (8, 5, True))


class Rank:
    """What a method asks of its rank. ``requests``: all parts, submitted before any is computed."""

    def __init__(self, requests, ahead=True):
        self.requests, self.ahead, self.at, self.has_room = requests, ahead, 0, True

    def tick(self):
        pass

    def note(self, phase):
        pass

    def next_part(self):
        return self.requests[self.at + 1] if self.ahead and self.at + 1 < len(self.requests) else None

    def reserve(self, nbytes):
        if not self.has_room:
            raise NoRoom("made")


def evaluations(
    blocks,
    requests,
    outputs,
    ahead=True,
    prepare=lambda mesh, run, rank, model: None,
    inputs=lambda at, part: CONDS[part.branch],
    said=None,
):
    """The work of a rank: every part of ``requests`` in turn, then the end of the run. ``outputs``:
    (rank, place of the request) -> what came of it; ``said``: likewise, its answer. A rank that has
    left others waiting takes part in no more of that attempt, as ``RequestHandler`` has it.
    """
    said = {} if said is None else said

    def work(mesh, run):
        rank, model, left = Rank(requests, ahead), Model(blocks), None
        method = make_method(model, PLAN, mesh, rank)
        method.attach()
        prepare(mesh, run, rank, model)
        for rank.at, part in enumerate(requests):
            here = mesh.rank, rank.at
            if left == part.attempt:
                outputs[here], said[here] = Skipped, failed((0, 0), kind="skipped")
                continue
            traffic = mesh.sequence.traffic
            method.begin(part)
            try:
                fail_at("input")
                outputs[here] = method.forward(model, inputs(rank.at, part), rank.at + 1)
                traffic.is_complete = True
                fail_at("writing")
                said[here] = done()
            except Stopped:
                outputs[here], said[here] = Stopped, done(cancelled=True)
            except (NoRoom, Unlike, ZeroDivisionError) as error:
                outputs[here], said[here] = type(error), failed(traffic.at, traffic.is_complete)
                left = left if traffic.is_complete else part.attempt
        method.end_run()

    return work


def assert_right_where_even(layout, requests, outputs, said):
    """As long as all groups are even, what is whole of the same part is the same to the bit."""
    meets = Meets.STAGES if layout.pipefusion > 1 else Meets.SEQUENCE
    for number in range(layout.groups):
        group, whole = layout.members(number), {}
        writer = next(filter(layout.writes, group))
        for place, part in enumerate(requests):
            request = answered(meets, {rank: said[rank, place] for rank in group})
            if not are_even(request):
                break  # the pool ends
            if request.has_failed or part.patch:
                continue
            if not any(one.cancelled for one in request.answers.values()):
                before = whole.setdefault(part.branch, outputs[writer, place])
                assert torch.equal(before, outputs[writer, place])


@pytest.fixture
def traced(monkeypatch):
    """layout, backend, requests -> the world, the traces, and what came of each request."""

    def run(layout, backend, requests, blocks=BLOCKS, speeds=(), **how):
        world, outputs, said = World(layout, backend, monkeypatch, speeds), {}, {}
        with torch.inference_mode():
            traces = world.run(evaluations(blocks, requests, outputs, said=said, **how), Random(7).choice)
        assert_right_where_even(layout, requests, outputs, said)
        return world, traces, outputs

    return run


def assert_sound(world, traces):
    assert any(traces)
    assert disagreements(traces, world.members) == []
    assert has_an_order(traces, in_order=world.backend == "nccl")


def truth(branch, blocks=BLOCKS):
    with torch.inference_mode():
        return Model(blocks)(**CONDS[branch])


WARM = [Part(1, branch) for branch in (0, 1)]
IN_PATCHES = [Part(1, branch, patch) for _ in range(2) for patch in PATCHES for branch in (0, 1)]


@pytest.mark.cover(4)
@pytest.mark.parametrize("layout", SEQUENCES + PIPELINES + IN_GROUPS, ids=Layout.equation)
def test_every_rank_makes_the_same_groups_in_the_same_order(layout, monkeypatch):
    world = World(layout, "nccl", monkeypatch)
    assert all(made == world.made[0] for made in world.made)
    for rank, made in enumerate(world.meshes):
        for axis, group in (("ulysses", made.sequence.ulysses.group), ("ring", made.sequence.ring._group)):
            assert group is None or world.members[world.name_of(group)] == layout.group(axis, rank)


def opens(layout, rank):
    """The ranks, the operation and the other end of each first message of ``rank``."""
    for wide in map(layout.joined, layout.widths):
        ring, ulysses = wide.group("ring", rank), wide.group("ulysses", rank)
        if len(ring) > 1:
            yield ring, "all_to_all", -1
            yield tuple(wide.sequence(rank)), "all_to_all", -1
        if len(ulysses) > 1:
            yield ulysses, "all_to_all", -1
    for before, after in pairwise(layout.of_stages(rank)):
        if rank == after:
            yield (before, after), "receive", before
        if rank == before:
            yield (before, after), "send", after


@pytest.mark.cover(4)
@pytest.mark.parametrize("layout", SEQUENCES + PIPELINES + IN_GROUPS, ids=Layout.equation)
def test_every_communicator_is_opened_by_the_operation_it_is_for_in_one_order(layout, monkeypatch):
    world = World(layout, "nccl", monkeypatch)
    groups = {f"group of {ranks}": ranks for ranks in world.members.values()}
    assert disagreements(world.opened, groups) == []
    assert has_an_order(world.opened, in_order=True)
    for rank, opened in enumerate(world.opened):
        assert {(event.group, event.operation, event.peer) for event in opened} == {
            (f"group of {ranks}", operation, peer) for ranks, operation, peer in opens(layout, rank)
        }
        assert {count for event in opened for count in event.counts} <= {0, 1}


def test_a_pipeline_of_three_stages_posts_no_message_on_the_worlds_communicator(traced):
    world, traces, _ = traced(Layout(pipefusion=3), "nccl", WARM + IN_PATCHES)
    of = {event.group for trace in traces for event in trace if event.operation != "wait"}
    assert sorted(world.members[group] for group in of) == [(0, 1), (1, 2)]


def test_a_connection_that_fails_names_its_ranks(monkeypatch):
    def fail(*sent, **how):
        raise RuntimeError("no route")

    monkeypatch.setattr(dist, "all_to_all_single", fail)
    with (
        pytest.raises(RuntimeError, match="The ring group of ranks 0, 2 could not connect: no route"),
        joined(Layout(ulysses=2, ring=2), 0),
    ):
        pass


@pytest.mark.cover(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", SEQUENCES, ids=Layout.equation)
def test_ranks_that_share_a_sequence_agree_on_every_collective(traced, layout, backend):
    world, traces, outputs = traced(layout, backend, WARM, blocks=2)
    assert_sound(world, traces)
    for branch in (0, 1):
        assert torch.allclose(outputs[0, branch], truth(branch, 2), atol=1e-5)


@pytest.mark.cover(4)
@pytest.mark.parametrize("backend", BACKENDS if ALL else ["nccl"])  # both in turn: test_stages.py
@pytest.mark.parametrize(
    "layout", PIPELINES + [layout for layout in IN_GROUPS if layout.pipefusion > 1], ids=Layout.equation
)
def test_stages_agree_on_every_message(traced, layout, backend):
    world, traces, outputs = traced(layout, backend, WARM + IN_PATCHES)
    assert_sound(world, traces)
    for rank in filter(layout.writes, range(layout.world_size)):
        for branch in (0, 1):  # with equal inputs, stale keys and values are those of now
            whole, *patches = [
                outputs[rank, place] for place, part in enumerate(WARM + IN_PATCHES) if part.branch == branch
            ]
            assert all(
                torch.allclose(one, truth(branch), atol=1e-5)
                for one in (whole, sum(patches[:3]), sum(patches[3:]))
            )


UNLIKE = {  # layout -> the speeds of its ranks
    Layout(ulysses=3): (100, 30, 60),
    Layout(ring=3): (20, 100, 60),
    Layout(ulysses=2, ring=2): (30, 100, 10, 70),
    Layout(pipefusion=2): (30, 100),
    Layout(ulysses=2, pipefusion=2): (30, 100, 20, 90),
    Layout(ring=2, pipefusion=2): (30, 100, 20, 90),
    Layout(ulysses=2, ring=2, pipefusion=2): (20, 80, 30, 100, 10, 90, 50, 40),
}


@pytest.mark.cover(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", UNLIKE, ids=Layout.equation)
def test_ranks_on_unlike_devices_agree_on_every_message_and_compute_what_one_does(traced, layout, backend):
    requests = WARM + IN_PATCHES * (layout.pipefusion > 1)
    world, traces, outputs = traced(layout, backend, requests, speeds=UNLIKE[layout])
    assert_sound(world, traces)
    for branch in (0, 1):
        whole, *patches = [
            outputs[layout.writer, place] for place, part in enumerate(requests) if part.branch == branch
        ]
        assert all(
            torch.allclose(one, truth(branch), atol=1e-5)
            for one in (whole, *([sum(patches[3:])] if patches else ()))
        )
    size = layout.sequence_size
    if layout.pipefusion > 1 < size:
        onwards = (
            [sum(one.counts) for one in traces[rank] if (one.operation, one.peer) == ("send", rank + size)]
            for rank in (0, 1)
        )
        slower, faster = map(sum, onwards)
        assert faster > slower, "a stage passes on what the next one takes; evenly, the first has most"
    is_otherwise = traces != traced(layout, backend, requests)[1]
    assert is_otherwise is (size > 1), "ranks of one sequence share it by speed"


GROUPED = [(layout, ()) for layout in IN_GROUPS if layout.pipefusion == 1]


UNLIKE_GROUPS = [
    (Layout(cfg=3), (30, 100, 60)),
    (Layout(ulysses=2, cfg=2), (100, 30, 20, 70)),
    (Layout(ring=2, data=2), (9, 99, 50, 50)),
]


@pytest.mark.cover(4)
@pytest.mark.parametrize(("layout", "speeds"), GROUPED + UNLIKE_GROUPS, ids=str)
def test_groups_agree_on_every_collective_apart_joined_and_apart_again(layout, speeds, monkeypatch):
    outputs = {}

    def work(mesh, run):
        model = Model(2)
        method = make_method(model, PLAN, mesh, Rank(WARM))
        method.attach()
        for turn, width in enumerate((*layout.widths, 1)):
            joined = layout.joined(width)
            branch = mesh.rank * joined.groups // layout.world_size % 2
            mesh.sequence.use(width)
            assert mesh.sequence.shares == shares_of(joined, mesh.rank, speeds)
            method.begin(Part(1, branch))
            output = method.forward(model, CONDS[branch], turn + 1)
            if joined.writes(mesh.rank):
                outputs[turn, mesh.rank] = output, branch
        method.end_run()

    world = World(layout, "nccl", monkeypatch, speeds)
    with torch.inference_mode():
        traces = world.run(work, Random(7).choice)
    assert disagreements(traces, world.members) == [] and has_an_order(traces, in_order=True)
    assert len(outputs) == sum(layout.groups // width for width in (*layout.widths, 1))
    assert all(torch.allclose(output, truth(branch, 2), atol=1e-5) for output, branch in outputs.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "layout", [Layout(pipefusion=3), Layout(ulysses=2, pipefusion=2)], ids=Layout.equation
)
def test_receives_that_are_posted_late_change_nothing(traced, layout, backend):
    world, late, _ = traced(layout, backend, WARM + IN_PATCHES, ahead=False)
    assert_sound(world, late)
    assert late != traced(layout, backend, WARM + IN_PATCHES)[1]


@pytest.mark.cover(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", range(4))
@pytest.mark.parametrize(
    "layout",
    [layout for layout in layouts_of(4) if layout.groups == 1 and layout.pipefusion < 4],
    ids=Layout.equation,
)
def test_ranks_leave_together_where_one_wishes_to_stop_and_go_on_together(traced, layout, backend, who):
    def prepare(mesh, run, rank, model):
        asked = count()
        if mesh.rank == who:
            # In the second attention of the second request
            run.wants_stop = lambda: rank.at == 1 and next(asked) > 0

    requests = [*WARM, *WARM]
    world, traces, outputs = traced(layout, backend, requests, blocks=4, prepare=prepare)
    assert_sound(world, traces)
    left = {rank for rank in range(4) if outputs[rank, 1] is Stopped}
    assert left == {*layout.sequence(who)}
    assert torch.allclose(outputs[layout.writer, 2], truth(0, 4), atol=1e-5)


@pytest.mark.cover(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", range(4))
@pytest.mark.parametrize(
    "layout",
    [layout for layout in layouts_of(4) if layout.groups == 1 < layout.pipefusion],
    ids=Layout.equation,
)
def test_a_rank_without_room_ends_its_stage_and_stages_stay_in_step(traced, layout, backend, who):
    def prepare(mesh, run, rank, model):
        rank.has_room = mesh.rank != who

    requests = [*WARM, Part(2, 0)]
    world, traces, outputs = traced(layout, backend, requests, prepare=prepare)
    assert_sound(world, traces)
    for rank in layout.sequence(who):
        assert outputs[rank, 0] is (NoRoom if rank == who else Stopped)


TEXTS = {"fewer tokens": 3, "more tokens": 9}


@pytest.mark.cover(24)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", [0, -1])
@pytest.mark.parametrize("what", TEXTS)
@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize(
    "layout",
    [*SEQUENCES, Layout(ulysses=2, pipefusion=2), Layout(ring=2, pipefusion=2), Layout(ulysses=2, cfg=2)],
    ids=Layout.equation,
)
def test_ranks_that_would_compute_unlike_tokens_all_fail_before_the_first_message_and_go_on(
    traced, layout, what, when, who, backend
):
    """In the first evaluation of a part of a run: in the first run, and in a later one."""
    who %= layout.world_size

    def conditions(at, part):
        return inputs(TEXTS[what]) if at == when and getcurrent().rank == who else CONDS[1]

    requests = [Part(run, 1, attempt=int(run > when)) for run in range(when + 1)]
    requests += [Part(2, 1, attempt=1)] * 2
    world, traces, outputs = traced(layout, backend, requests, blocks=4, inputs=conditions)
    assert_sound(world, traces)
    left = {outputs[rank, when] for rank in layout.sequence(who)}
    assert left == {Unlike} or (layout.pipefusion > 1 and left == {Unlike, Stopped})
    for at in range(len(requests)):
        assert at == when or torch.allclose(outputs[layout.writer, at], truth(1, 4), atol=1e-5)


@pytest.mark.parametrize(
    "layout", [Layout(ulysses=2), Layout(ring=2), Layout(pipefusion=2, ulysses=2)], ids=str
)
def test_ranks_whose_node_catches_errors_around_attention_fail_before_unlike_messages_too(traced, layout):
    """Else they would compute on, and send messages of other lengths than others wait for."""

    def prepare(mesh, run, rank, model):
        for block in (block for block in model.blocks if not isinstance(block, Stub)):
            block.forward = partial(patched_block, block.forward)

    def conditions(at, part):
        return inputs(TEXTS["fewer tokens"]) if not at and getcurrent().rank == 0 else CONDS[1]

    requests = [Part(1, 1), Part(2, 1, attempt=1)]
    world, traces, outputs = traced(layout, "gloo", requests, blocks=4, prepare=prepare, inputs=conditions)
    assert_sound(world, traces)
    assert {outputs[rank, 0] for rank in layout.sequence(0)} == {Unlike}
    assert torch.allclose(outputs[layout.writer, 1], truth(1, 4), atol=1e-5)


def test_ranks_compare_what_they_compute_once_for_each_part_of_a_run(traced):
    """Where they know it, an evaluation has no message but its own."""
    requests = [*WARM, *WARM, Part(2, 0), Part(2, 0), Part(2, 0, attempt=1)]
    asked = dict.fromkeys(range(len(requests)), 0)

    def prepare(mesh, run, rank, model):
        largest = mesh.sequence.world.largest

        def noted(flags):
            asked[rank.at] += mesh.rank == 0
            return largest(flags)

        mesh.sequence.world.largest = noted

    traced(Layout(ulysses=2), "nccl", requests, prepare=prepare)
    assert [*asked.values()] == [1, 1, 0, 0, 1, 0, 1]


def patched_block(own, txt, img, mask, options):
    """A block in which a node's override has its own attention wherever ComfyUI's fails."""
    override = options["optimized_attention_override"]

    def guarded(attention, *args):
        try:
            return override(attention, *args)
        except Exception:  # noqa: BLE001 as nodes have it
            return attention(*args)

    return own(txt, img, mask, {**options, "optimized_attention_override": guarded})


AGAIN = [Part(2, branch, attempt=1) for branch in (0, 1)]
FAILING = [Layout(ulysses=2, ring=2), Layout(ring=3), Layout(pipefusion=3), Layout(ulysses=2, pipefusion=2)]
if ALL:
    FAILING = [layout for layout in SEQUENCES + PIPELINES if layout.world_size < 7 and layout.pipefusion <= 4]
PLACES = ("input", "first block", "attention", "last block", "head", "writing")


@pytest.fixture
def failing(traced, monkeypatch):
    """layout, backend, rank -> the place where it fails in the second of five requests -> outputs
    and answers, as far as they came, and the world with its traces if all ranks came to the end.
    """

    def run(layout, backend, fails):
        requests = [Part(1, branch) for branch in (0, 1, 0)]

        def prepare(mesh, run, rank, model):
            run.fails = lambda here: rank.at == 1 and fails.get(mesh.rank) == here
            own = [block for block in model.blocks if not isinstance(block, Stub)]
            for module, here in ((own[0], "first block"), (own[-1], "last block"), (model.head, "head")):
                module.register_forward_pre_hook(lambda *_, here=here: fail_at(here))

        said, outputs = {}, {}
        world = World(layout, backend, monkeypatch)
        work = evaluations(4, requests + AGAIN, outputs, prepare=prepare, said=said)
        with torch.inference_mode():
            try:
                traces = world.run(work, Random(7).choice)
            except (Stuck, RuntimeError):  # the pool would have ended before they met so
                return outputs, said, None
        return outputs, said, (world, traces)

    def failing_at_attention(real):
        return wraps(real)(lambda *args, **kwargs: (fail_at("attention"), real(*args, **kwargs))[1])

    monkeypatch.setattr(joint_model, "attention_basic", failing_at_attention(joint_model.attention_basic))
    monkeypatch.setattr(
        ring_attention, "partial_attention", failing_at_attention(ring_attention.partial_attention)
    )
    return run


def evenness(layout, said):
    """Whether the pool would go on behind the second request: no rank owes an answer, and all are
    even.
    """
    meets = Meets.STAGES if layout.pipefusion > 1 else Meets.SEQUENCE
    group = range(layout.world_size)
    if any((rank, 1) not in said for rank in group):
        return False
    return are_even(answered(meets, {rank: said[rank, 1] for rank in group}))


@pytest.mark.cover(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", FAILING, ids=Layout.equation)
def test_ranks_are_told_even_only_where_all_can_go_on(failing, layout, place):
    """One rank fails, then all at that place, then two at unlike places."""
    everyone = range(layout.world_size)
    cases = [{who: place} for who in everyone] + [dict.fromkeys(everyone, place)]
    cases += [
        {**dict.fromkeys(everyone, place), who: other}
        for who in (0, layout.world_size - 1)
        for other in PLACES
    ]
    for number, fails in enumerate(cases if ALL else cases[::2]):
        outputs, said, whole = failing(layout, BACKENDS[number % 2], fails)
        if not evenness(layout, said):
            continue  # the pool ends
        assert whole is not None, (layout, fails)
        assert_sound(*whole)
        assert torch.equal(outputs[layout.writer, 3], outputs[layout.writer, 0])
        assert torch.allclose(outputs[layout.writer, 4], truth(1, 4), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(ring=3), Layout(ulysses=2, ring=2)], ids=str)
def test_a_sequence_goes_on_where_all_fail_at_one_place_and_where_one_fails_behind_all_messages(
    failing, layout, backend
):
    everyone, even = range(layout.world_size), {}
    for place in PLACES:
        for fails in ({0: place}, dict.fromkeys(everyone, place)):
            even[place, len(fails) > 1] = evenness(layout, failing(layout, backend, fails)[1])
    alone = {place for place, of_all in even if even[place, of_all] and not of_all}
    assert alone == {"writing"} and all(even[place, True] for place in PLACES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pipeline_goes_on_where_a_stage_of_one_rank_fails(failing, backend):
    """It takes and sends its messages all the same."""
    layout = Layout(pipefusion=3)
    for place in PLACES[1:]:
        reach = [layout.writer] if place == "head" else range(layout.world_size)
        assert all(evenness(layout, failing(layout, backend, {who: place})[1]) for who in reach), place


def fail_at(place):
    run = getcurrent()
    if isinstance(run, RankRun) and run.fails(place):
        raise ZeroDivisionError


# -- that it would be seen


def test_two_collectives_that_a_rank_swaps_are_found():
    """Two groups of the same ranks: each sees the same of its own, and both wait for ever."""

    def meet(rank, group):
        return Event(rank, group, "all_to_all", (1, 1, 1, 1))

    traces = [[meet(rank, "ulysses"), meet(rank, "world")] for rank in (0, 1)]
    members = {"ulysses": (0, 1), "world": (0, 1)}
    assert has_an_order(traces, in_order=True) and has_an_order(traces, in_order=False)
    traces[1].reverse()
    assert disagreements(traces, members) == []
    assert not has_an_order(traces, in_order=True) and not has_an_order(traces, in_order=False)


def test_a_swapped_gather_is_found_in_the_trace_of_real_ranks(traced):
    # The second time ranks do not compare their tokens
    world, traces, _ = traced(Layout(ulysses=2, ring=2), "nccl", WARM + WARM, blocks=4)
    whole, mine = [*traces], [*traces[1]]
    of_all = next(name for name, ranks in world.members.items() if len(ranks) == 4)
    place = max(at for at, event in enumerate(mine) if event.group == of_all)
    before = max(at for at in range(place) if mine[at].operation == "all_to_all")
    assert has_an_order(whole, in_order=True)
    mine[place], mine[before] = mine[before], mine[place]
    whole[1] = mine
    assert disagreements(whole, world.members) == [] and not has_an_order(whole, in_order=True)


def test_a_stage_that_sends_before_it_receives_is_found_where_operations_run_in_order():
    circle = [
        [Event(rank, "all", kind, (3,), peer=1 - rank) for kind in ("send", "receive")] for rank in (0, 1)
    ]
    assert disagreements(circle, {}) == [] and not has_an_order(circle, in_order=True)
    assert has_an_order(circle, in_order=False), "waited for later, or never"
    waits = [[Event(rank, "", "wait", (), waits_for=place) for place in (0, 1)] for rank in (0, 1)]
    posted = [[*trace, *own] for trace, own in zip(circle, waits, strict=True)]
    assert has_an_order(posted, in_order=False)
    at_once = [[trace[0], own[0], trace[1]] for trace, own in zip(circle, waits, strict=True)]
    assert not has_an_order(at_once, in_order=False)
