"""A prompt on the edge of memory: what it needs is asked for before it is sent, so that no rank
fails that need not fail. Counts are those of a video at its true size; ranks keep account of their
GPU.
"""

import re
from collections import Counter
from concurrent.futures import Future
from copy import copy
from types import SimpleNamespace

import pytest
from pipemesh.lab.commands.parity import BOUND, relative_error, stock_model
from pipemesh.parallel_runtime.client import large_pictures, room
from pipemesh.parallel_runtime.client.headroom import Picture
from pipemesh.parallel_runtime.client.memory_needs import Sampled
from pipemesh.parallel_runtime.client.patching import Patching
from pipemesh.parallel_runtime.client.remote_patcher import parallelize, with_room
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.client.session import Resident, ResidentState
from pipemesh.parallel_runtime.errors import OutOfMemory, PoolSpent, Refused
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.counts import Counts, NotCounted
from pipemesh.parallel_runtime.planner.prediction import beside_bytes
from pipemesh.parallel_runtime.wire.messages import Forward, Load, Memory, Release
from pipemesh.pool.verdict import Facts

from ..kit.in_groups import GroupsHere
from ..kit.models import run
from ..kit.patched import together
from ..kit.planned import counts
from ..kit.queues import Workflow, in_line, seeds_of
from ..planner.test_counting import done
from .test_ahead import TWO, Ahead

GIB, VIDEO = 1 << 30, counts("hunyuan 720p")
METHODS = {
    "whole": Layout(),
    "ulysses and ring": Layout(ulysses=2, ring=2),
    "pipeline": Layout(pipefusion=2),
    "cfg groups": Layout(cfg=2),
    "data groups": Layout(data=2),
}
STEPS, BRANCHES = 3, 2
PAIR, COUNTED, NOT_COUNTED = Layout(ulysses=2), done(VIDEO), Future()
NOT_COUNTED.set_exception(NotCounted("its meta model cannot be made"))


class OnGPUs(GroupsHere):
    """Pools whose ranks have the GPUs that ``gpus`` describes: ``nbytes`` of each beside the model
    that is sampled. A rank runs out of memory in an evaluation that ``takes`` more than is free,
    and that ends its pool. ``held``: bytes of other models; ``of_ui``: of ComfyUI on the first GPU.
    ``sent``: what ranks were asked for; ``starts``: pools that came after the first.
    """

    def __init__(self, layout, stock, nbytes=0, takes=0):
        super().__init__(layout, stock)
        self.facts = Facts(tuple(f"cuda:{rank}" for rank in range(layout.world_size)), layout.pipefusion)
        self.gpus = SimpleNamespace(nbytes=nbytes, takes=takes, held={}, of_ui=0, sent=Counter(), starts=0)
        self.gpus.pool = self
        self.tell()

    def live(self):
        return self.gpus.pool

    def ensure(self, interrupted):
        if self.gpus.pool is None:
            self.gpus.starts += 1
            self.gpus.pool = copy(self)
            self.gpus.pool.tell()
        return self.gpus.pool

    def free(self, rank):
        return self.gpus.nbytes - sum(self.gpus.held.values()) - (self.gpus.of_ui if rank == 0 else 0)

    def tell(self):
        free = [max(0, self.free(rank)) for rank in range(self.layout.world_size)]
        self.memory = [Memory(one, self.gpus.nbytes, 0) for one in free]

    def ask(self, request, fds=(), interrupted=lambda: False):
        self.gpus.sent[type(request)] += 1
        if isinstance(request, Release):
            self.gpus.held.pop(request.model, None)
        if isinstance(request, Load) and request.budget:
            self.gpus.held[request.model] = request.budget
        self.tell()
        return super().ask(request, fds, interrupted)

    def submit(self, request, group):
        self.gpus.sent[Forward] += 1
        if self.gpus.takes > min(map(self.free, group)):
            self.run_out(group[0])
        super().submit(request, group)

    def run_out(self, rank):
        self.gpus.held.clear()
        self.gpus.pool = None
        raise PoolSpent(f"Rank {rank} on cuda:{rank} ran out of memory.")


def needed(layout):
    return beside_bytes(VIDEO, layout, BRANCHES, 1)


class Prompts:
    """A MODEL on such ranks. Each call samples a prompt; its image is stock's, and of patches,
    which these ranks compute without keys and values of others, the same each time.
    """

    def __init__(self, layout, *, spare=0, takes=0.95, count=COUNTED, weights="whole", made=OnGPUs):
        self.stock, self.need = stock_model(4), needed(layout)
        self.truth = run(self.stock, cfg=2.0) if layout.stages == 1 else None
        self.ranks = made(layout, self.stock, int(self.need + spare), int(takes * self.need))
        self.gpus = self.ranks.gpus
        self.remote = RemotePool(self.ranks, counts=Counts(lambda asked: count))
        patching = Patching(STEPS) if layout.stages > 1 else None
        self.model = parallelize(self.stock, self.remote, 0.0, patching, weights=weights)

    def hold(self, name, nbytes):
        """Ranks hold another model beside it."""
        resident = Resident(state=ResidentState.READY)
        self.remote.sessions.open(lambda: False).models[PooledModel(name, name, users=1)] = resident
        self.gpus.held[name] = int(nbytes)
        self.ranks.tell()

    def __call__(self, **given):
        self.gpus.sent.clear()
        image = run(self.model, cfg=2.0, **given)
        self.truth = image if self.truth is None else self.truth
        assert relative_error(image, self.truth) <= BOUND
        return self.gpus.sent

    def with_room(self):
        self.gpus.takes = 0
        self()
        return self

    def grow(self, *_):
        """As a callback: from now on an evaluation takes more than is free."""
        self.gpus.takes = self.ranks.free(0) + 1


@pytest.fixture
def unloads(monkeypatch):
    """For GPUs on the first of which ComfyUI unloads its models; returns who asked it to."""
    asked = []

    def of(gpus):
        def unload(guider, *, is_known):
            asked.append(type(guider).__name__)
            freed, gpus.of_ui = gpus.of_ui, 0
            return freed > 0

        monkeypatch.setattr(room, "unload_unused", unload)
        return asked

    return of


@pytest.mark.parametrize("method", METHODS)
def test_other_models_and_comfyuis_make_room_before_an_evaluation_is_sent_and_no_pool_starts_anew(
    method, unloads
):
    """A model too many, and one that the run may keep; then one that ComfyUI has loaded since."""
    prompts = Prompts(METHODS[method], spare=GIB)
    asked = unloads(prompts.gpus)
    prompts()
    prompts.hold("old", 0.5 * prompts.need)
    prompts.hold("new", 0.5 * GIB)
    sent = prompts()
    assert (sent[Release], prompts.gpus.starts) == (1, 0) and [*prompts.gpus.held] == ["new"]
    computed = sent[Forward]
    sent = prompts()
    assert (sent[Release], sent[Load], sent[Forward], prompts.gpus.starts) == (0, 0, computed, 0)
    assert not asked
    prompts.gpus.of_ui = int(prompts.need)  # a text encoder: no rank has been asked since
    prompts()
    assert (asked, prompts.gpus.starts) == (["CFGGuider"], 0)


def test_comfyuis_models_stay_where_a_rank_on_another_gpu_is_short(unloads):
    prompts = Prompts(PAIR, takes=0.4)
    prompts.remote.runs.beside_ui = (0,)
    asked = unloads(prompts.gpus)
    prompts.ranks.free = lambda rank: int((1 if rank == 0 else 0.5) * prompts.need)
    prompts()
    assert not asked and prompts.gpus.starts == 0


def test_weights_that_leave_too_little_by_now_are_loaded_anew_once_and_no_pool_starts_anew():
    """Another program has taken 2 GiB since they were loaded."""
    prompts = Prompts(PAIR, spare=4 * GIB, weights="offloaded")
    assert prompts()[Load] == 1
    prompts.gpus.of_ui = 2 * GIB
    sent = prompts()
    assert (sent[Release], sent[Load], prompts.gpus.starts) == (1, 1, 0)
    assert prompts()[Load] == 0
    prompts.gpus.of_ui = 2 * prompts.gpus.nbytes
    with pytest.raises(OutOfMemory, match="ran out of memory"):
        prompts()
    assert prompts.gpus.sent[Load] == 1, "with nothing of them on the GPUs no more can be left"


def test_what_is_counted_too_high_is_sent_when_nothing_is_left_to_free_and_asked_for_no_more():
    prompts = Prompts(PAIR, spare=-0.4 * needed(PAIR), takes=0.5)
    prompts()
    prompts.hold("other", 1 << 20)
    assert prompts()[Release] == 0 and prompts.gpus.starts == 0


def test_what_is_counted_too_low_costs_one_start_and_the_next_prompts_ask_for_more(unloads):
    prompts = Prompts(PAIR, spare=0.1 * needed(PAIR), takes=1.05)
    unloads(prompts.gpus)
    for _prompt in range(4):
        prompts.gpus.of_ui = int(0.1 * prompts.need)
        prompts()
    assert prompts.gpus.starts == 1


def uncounted(layout=PAIR, **options):
    """Their weights leave what is spare, as without a count."""
    return Prompts(layout, **{"spare": 4 * GIB, "weights": "offloaded", "count": NOT_COUNTED} | options)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "pipeline"])
def test_ranks_that_run_out_of_memory_cost_one_pool_and_the_image_is_stocks(method):
    """In the first evaluation, in the third, and with other models in the pool that ended."""
    prompts = uncounted(METHODS[method])
    prompts.gpus.takes = 2 * GIB + (1 << 29)  # what is left free without a count is less
    for _ in range(2):
        prompts()
        assert prompts.gpus.starts == 1, "the weights leave more in the second prompt"

    def grows(step, *_):
        prompts.gpus.takes += (step == 1) * (GIB + (1 << 29))

    prompts(callback=grows)
    assert prompts.gpus.starts == 2
    whole = Prompts(METHODS[method], count=NOT_COUNTED)
    whole()
    whole.hold("other", 0.5 * whole.need)
    whole()
    assert whole.gpus.starts == 1, "the other model went with its pool"


def test_what_has_no_room_in_a_fresh_pool_either_is_told_and_repeated_no_more():
    prompts, starts = uncounted(), []
    prompts.gpus.takes = 100 * GIB
    for _prompt in range(3):
        with pytest.raises(PoolSpent, match="ran out of memory"):
            prompts()
        starts.append(prompts.gpus.starts)
    assert starts == [1, 2, 3], "one for the first prompt, and each of the others needs its own"
    prompts.with_room().grow()
    prompts()
    assert prompts.gpus.starts == 5, "one for the prompt that had room, and one repeat again"


def test_a_run_goes_on_in_a_fresh_pool_once():
    """It had room in that; in a later step it has none again."""
    prompts = uncounted(spare=6 * GIB).with_room()
    with pytest.raises(PoolSpent):
        prompts(callback=prompts.grow)
    assert prompts.gpus.starts == 1


@pytest.mark.parametrize(
    "why", ["run again, and they will leave more free", "The checkpoint changed on disk"]
)
def test_a_run_that_cannot_go_on_in_a_fresh_pool_says_so_and_starts_none(why, monkeypatch):
    """As with a node's code in the blocks, or if its file was overwritten meanwhile."""
    prompts = uncounted().with_room()
    remote = prompts.model.remote

    def refuse():
        raise Refused("The checkpoint changed on disk.")

    def grows(step, *_):
        prompts.grow()
        if "checkpoint" in why:
            monkeypatch.setattr(remote, "require_same_file", refuse)
        else:
            remote.model.run.names.load = remote.model.loads

    with pytest.raises((OutOfMemory, Refused), match=why):
        prompts(callback=grows)
    assert prompts.gpus.starts == 0


def test_one_sampler_of_all_patches_goes_on_with_a_whole_evaluation_in_a_fresh_pool():
    """Such ranks compute patches without the keys of others: only what is whole is stock's."""
    prompts = uncounted(Layout(pipefusion=2))
    prompts.model = together(prompts.model)
    prompts.with_room()

    def whole():
        return sum(one.part.patch is None for one in prompts.remote.runs.last.evaluations)

    before = whole()
    image = run(prompts.model, cfg=2.0, callback=lambda step, *_: step == 1 and prompts.grow())
    assert image.isfinite().all()
    assert prompts.gpus.starts == 1 and whole() == 2 * before, "it is warm again"


def test_patches_that_rely_on_those_before_them_are_not_repeated():
    prompts = uncounted(Layout(pipefusion=2), weights="whole")
    prompts.gpus.takes = prompts.gpus.nbytes + 1
    with pytest.raises(PoolSpent):
        prompts()
    assert prompts.gpus.starts == 0
    assert prompts.with_room().gpus.starts == 1


@pytest.mark.parametrize("kind", ["not yet", "never", "on CPUs"])
def test_nobody_waits_for_a_count_and_what_is_not_counted_is_sent_as_ever(kind):
    count = {"not yet": Future(), "never": NOT_COUNTED, "on CPUs": COUNTED}[kind]
    prompts = Prompts(PAIR, count=count, takes=0.0)
    if kind == "on CPUs":
        prompts.ranks.facts = Facts(("cpu",) * 2, 1)
    prompts.hold("other", 0.5 * prompts.need)
    assert prompts()[Release] == 0
    if kind == "not yet":
        count.set_result(VIDEO)
        assert prompts()[Release] == 1, "the next prompt is asked for"


def test_room_is_asked_for_once_a_run_and_again_for_a_larger_latent():
    prompts, asked = Prompts(PAIR), []
    beside = prompts.remote.memory_needs
    beside.short = lambda _, sampled, measures: asked.append((sampled.shape, measures)) or ()
    prompts()
    assert asked == [((1, 16, 8, 10), True)], "of six evaluations"
    sampled = prompts.model.remote.sampled = Sampled(None, (2, 16, 8, 10), {})
    asked.clear()
    for sides in ((8, 10), (8, 10), (4, 20), (2, 2), (9, 10), (9, 10), (8, 10)):
        with_room(prompts.model, list, (4, 16, *sides))
    assert asked == [((2, 16, 8, 10), True), ((2, 16, 9, 10), False)] and sampled.elements == 90


@pytest.fixture
def pictures(monkeypatch):
    """Two ranks with so much ``free`` that ``trying`` shares of a shape may run out of memory."""
    told, session = SimpleNamespace(free=8 * GIB, measured=0), SimpleNamespace()
    models = {name: PooledModel(name, name) for name in ("vae", "another")}

    def tell(*_):
        told.measured += 1
        session.room = [2 * told.free, told.free]

    def trying(*shape, fails=False, work="decode", model="vae", ranks=2):
        """What became of it: it was not asked for, ran out of memory, or was made."""
        what, picture = "not asked", Picture(work, ranks, tuple(shape))
        try:
            with large_pictures.trying(session, models[model], picture):
                what = "failed"
                if fails:
                    raise OutOfMemory("Rank 1 on cuda:1 ran out of memory.")
                what = "made"
        except OutOfMemory as error:
            told.says = str(error)
        return what

    tell()
    monkeypatch.setattr(large_pictures, "tell", tell)
    told.trying = trying
    return told


def test_a_picture_no_smaller_than_one_that_had_no_room_is_not_asked_for_until_more_is_free(pictures):
    trying = pictures.trying
    assert trying(1, 16, 160, 90, fails=True) == "failed"
    assert [trying(*shape) for shape in ((1, 16, 160, 90), (1, 16, 90, 160), (2, 16, 192, 108))] == [
        "not asked"
    ] * 3
    assert trying(1, 16, 128, 72) == "made", "a smaller one"
    assert trying(1, 16, 9, 40, 60) == "made", "more elements, of many small frames"
    assert trying(1, 16, 160, 90, work="encode") == trying(1, 16, 160, 90, ranks=1) == "made"
    assert trying(1, 16, 160, 90, model="another") == "made"
    pictures.free *= 1.05
    assert trying(1, 16, 160, 90) == "not asked", "as much, but for what others come and go with"
    pictures.free *= 2
    assert trying(1, 16, 160, 90) == "made", "other models are gone"
    pictures.free /= 2
    assert trying(1, 16, 160, 90) == "not asked", "with so little it had no room"
    pictures.free *= 2
    assert trying(1, 16, 160, 90, fails=True) == "failed" and trying(1, 16, 160, 90) == "not asked"


def test_it_costs_no_message_to_know_and_the_sentence_has_the_picture_and_what_is_free(pictures):
    pictures.trying(1, 16, 160, 90)
    pictures.trying(1, 16, 160, 90, fails=True)
    assert pictures.measured == 1, "ranks are asked only where something is known"
    assert pictures.trying(1, 16, 160, 90) == "not asked"
    says = r"not asked to decode 1 x 16 x 160 x 90 in one piece: .* no more free memory now \(8\.0 GiB\)\. Smaller"
    assert re.search(says, pictures.says)


def test_room_is_asked_for_before_several_prompts_are_sampled_at_once():
    ours = Ahead(TWO, made=OnGPUs)
    ours.model.remote.pool.memory_needs._counts = Counts(lambda asked: COUNTED)
    gpus = ours.pool.gpus
    gpus.nbytes, gpus.takes = int(1.2 * needed(TWO)), int(0.9 * needed(TWO))
    other = PooledModel("other", "other", users=1)
    ours.model.remote.pool.sessions.open(lambda: False).models[other] = Resident(state=ResidentState.READY)
    gpus.held["other"] = int(0.5 * needed(TWO))
    ours.pool.tell()
    in_line(ours.model, ours.line, *seeds_of(Workflow(), 11, 12, 13))
    assert gpus.sent[Release] == 1 and not gpus.starts and ours.images == (1, 0)
