"""What the UI asks of a pool, seen with a pool that only writes it down."""

import re
import threading
from functools import partial
from itertools import count

import pytest
import torch
from pipemesh.lab.commands.parity import conditioning, stock_model
from pipemesh.parallel_runtime.client.branch import Branch
from pipemesh.parallel_runtime.client.conditioning import ConditioningCache
from pipemesh.parallel_runtime.client.evaluations import Work
from pipemesh.parallel_runtime.client.remote_patcher import bring_up, parallelize
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.client.residency import MOST_UNUSED
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.client.session import Ticket
from pipemesh.parallel_runtime.crossing.source import Source
from pipemesh.parallel_runtime.errors import ModelError, OutOfMemory, PoolFailed, Refused, RunCancelled
from pipemesh.parallel_runtime.forward import forward_binder, forward_patch
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.messages import (
    Done,
    EndRun,
    Forward,
    Load,
    Memory,
    Recorded,
    Release,
    SetWeightPatches,
)
from pipemesh.parallel_runtime.wire.segment import TensorRef
from pipemesh.parallel_runtime.wire.tree import decode_tree, encode_tree
from pipemesh.pool.verdict import Facts

from ..kit.models import run


class Ledger:
    """A pool of one rank with room for ``room`` models; ``short`` names a kind of request that
    needs one place more.
    """

    recorded: Recorded | None = None

    def __init__(self, room: int, short: type = Load, stages: int = 1):
        self.arena, self.memory, self.idle = Arena(), [Memory(1, 2, 3)], True
        self.facts, self.layout = Facts(("cpu",), stages=stages), Layout()
        self.next_request = partial(next, count(1))
        self.room, self.short = room, short
        self.models: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.submitted: list[Forward] = []
        self.ended: list[EndRun] = []
        self.abandoned = self.cancelled = 0

    def live(self):
        return self

    def ensure(self, interrupted):
        return self

    def settle(self, interrupted):
        pass

    def submit(self, request, group):
        assert group == (0,)
        self.submitted.append(request)
        self.asked.append((type(request).__name__, request.model))

    def abandon(self):
        self.abandoned += 1

    def call_back(self):
        self.cancelled += 1

    def collect(self, number, interrupted):
        request = next(request for request in self.submitted if request.request == number)
        return {0: self.answer(request)}

    def ask(self, request, fds=(), interrupted=lambda: False):
        if isinstance(request, Release) and interrupted():
            raise RunCancelled
        only_checks = isinstance(request, Load) and request.checks
        self.asked.append(("check" if only_checks else type(request).__name__, request.model))
        self.ended += [request] if isinstance(request, EndRun) else []
        return [self.answer(request)]

    def answer(self, request):
        if isinstance(request, Release):
            self.models = [model for model in self.models if model != request.model]
        elif isinstance(request, self.short) and len(self.models) >= self.room:
            raise OutOfMemory("full")
        elif isinstance(request, Load) and not request.checks:
            self.models.append(request.model)
        return Done(
            request=request.request,
            memory=self.memory[0],
            output=encode_tree([0], lambda path, tensor: None),
            recorded=self.recorded,
        )


def remote(pool: Ledger, *models: str) -> RemotePool:
    """With these models loaded."""
    made = RemotePool(pool)
    load(made, *models)
    return made


def ledger(*models: str, **options) -> tuple[Ledger, RemotePool]:
    pool = Ledger(**{"room": 1} | options)
    return pool, remote(pool, *models)


def raising(error: Exception):
    def fail(*_):
        raise error

    return fail


def model_of(client: RemotePool, name: str) -> PooledModel:
    """One that somebody uses for as long as the test lasts."""
    return client.residency.models.setdefault(name, PooledModel(name, name, users=1))


def submit(pool: RemotePool, arguments: dict, model: str = "a") -> Ticket:
    run = pool.runs.of(model_of(pool, model))
    return pool.evaluations.submit(run, Work(arguments, Branch(("cond",))), (0, 4, False))


def test_of_models_that_nobody_uses_and_no_rank_holds_the_last_are_known():
    residency = remote(Ledger(room=1)).residency
    for number in range(MOST_UNUSED + 20):
        loaded = torch.nn.Identity()
        residency.use(loaded, lambda number=number: Source(model=f"vae-{number}"))
        del loaded
    names = list(residency.models)
    assert len(names) <= MOST_UNUSED + 1 and names[-1] == f"vae-{MOST_UNUSED + 19}"


def test_a_submission_that_cannot_be_written_leaves_no_room_taken():
    pool, client = ledger("a", room=2)
    first = pool.arena.take(1)
    pool.arena.give(first, 1)
    x = torch.zeros(1, 16, 64, 64)
    with pytest.raises(Refused, match="transformer_options/thing"):
        submit(client, {"x": x, "timestep": x, "transformer_options": {"thing": object()}})
    assert pool.arena.take(1) == first and not client.sessions.live.tickets


def controlled(x: torch.Tensor, residual: torch.Tensor) -> dict:
    return {"x": x, "timestep": x[0, 0, 0, :1], "context": x, "control": {"input": [residual]}}


def test_patches_in_flight_share_what_was_written_of_their_evaluation_until_the_last_is_back():
    pool, client = ledger("a", room=2)
    x, residual = torch.zeros(1, 16, 8, 8), torch.zeros(1, 1 << 20)

    def written(arguments):
        submit(client, arguments)
        return pool.arena.end

    def is_free(place):
        offset = pool.arena.take(place.nbytes)
        pool.arena.give(offset, place.nbytes)
        return offset == place.offset

    one = controlled(x, residual)
    taken = [written(arguments) for arguments in (one, one, controlled(x, residual))]
    assert taken[1] - taken[0] < residual.nbytes < taken[2] - taken[1]
    trees = [message.arguments for message in pool.submitted]
    assert trees[0] == trees[1] != trees[2]
    places: list[TensorRef] = []
    decode_tree(trees[0], lambda ref: places.append(ref) or x)
    place = next(one for one in places if one.nbytes == residual.nbytes)
    for ticket in list(client.sessions.live.tickets[:2]):
        assert not is_free(place), "one of the two is on its way"
        client.evaluations.collect(ticket, lambda: False)
    assert is_free(place)
    client.evaluations.abandon()
    ends = []
    for _ in range(8):
        pair = controlled(x, residual)
        ends += [written(pair), written(pair)]
        client.evaluations.abandon()
    assert len(set(ends)) == 1, "not all was given back"


def test_residuals_are_sent_to_be_read_in_place_and_nothing_else_is():
    pool, client = ledger("a", room=2)
    x, residual = torch.zeros(1, 16, 8, 8), torch.zeros(1, 5, 4)
    evaluate(client, "a", {**controlled(x, residual), "context": x[:, :3]})
    refs = []
    decode_tree(pool.submitted[-1].arguments, lambda ref: refs.append(ref) or x)
    assert [ref.shape for ref in refs if ref.in_place] == [(1, 5, 4)] and len(refs) == 4


def test_what_is_left_of_a_run_after_another_inside_it_ends_with_it_and_once_in_the_ranks():
    pool, client = ledger("a")
    client.runs.begin(model_of(client, "a"))
    client.runs.begin(model_of(client, "a"))
    client.runs.end(model_of(client, "a"))  # the inner one
    evaluate(client, "a")
    for _ in range(2):
        client.runs.end(model_of(client, "a"))
    assert pool.asked.count(("EndRun", "a")) == 3 and client.runs.models() == set()


def test_an_evaluation_without_a_sampler_begins_a_run_by_itself_which_is_in_nobodys_way():
    _, client = ledger("a", "b", room=2)
    evaluate(client, "a")
    run = client.runs.last
    evaluate(client, "a")
    assert client.runs.last is run and len(run.evaluations) == 2
    assert client.residency.make_room(model_of(client, "b"))
    assert not client.residency.held(model_of(client, "a"))


def test_a_model_that_a_guider_evaluates_beside_the_sampled_one_is_in_the_same_run_and_its_figures():
    pool, client = ledger("c", "a", "b", room=3)
    run = client.runs.begin(model_of(client, "a"))
    for model in "abab":
        evaluate(client, model)
    assert client.runs.last is run and len(run.evaluations) == 4
    made_room = [client.residency.make_room(model_of(client, "x")) for _ in "12"]
    assert made_room == [True, False], "c is in no run"
    client.runs.end(model_of(client, "a"))
    assert pool.asked[-2:] == [("EndRun", "a"), ("EndRun", "b")]
    assert client.residency.make_room(model_of(client, "x"))


def test_what_ranks_replayed_of_a_models_last_run_is_known_once_they_have_told():
    pool, told = Ledger(room=1), Recorded(20, 17)
    client = remote(pool, "a")
    for recorded in (told, None):
        pool.recorded = recorded
        client.runs.begin(model_of(client, "a"))
        client.runs.end(model_of(client, "a"))
        assert client.sessions.live.models[model_of(client, "a")].recorded == (recorded,)


def test_the_end_of_a_run_that_ranks_were_too_busy_to_hear_is_told_once_they_are_free():
    """Else its keys and values would stay beside those of the next run, of another model."""
    pool, client = ledger("a", "b", room=2)
    client.runs.begin(model_of(client, "a"))
    pool.idle = False
    client.runs.end(model_of(client, "a"))
    assert pool.asked[2:] == []
    pool.idle = True
    client.runs.begin(model_of(client, "b"))
    for _ in range(2):
        client.runs.end_owed()
    assert pool.asked[2:] == [("EndRun", "a")]


@pytest.mark.parametrize("error", [RunCancelled(), OutOfMemory("gone"), OSError("gone")])
def test_an_end_of_a_run_that_was_not_answered_is_told_and_not_raised(monkeypatch, caplog, error):
    """It would hide the error that the run ended with."""
    pool, client = ledger("a")
    client.runs.begin(model_of(client, "a"))
    monkeypatch.setattr(pool, "ask", raising(error))
    client.runs.end(model_of(client, "a"))
    assert ("gone" in caplog.text) == (str(error) == "gone")


def test_only_ranks_on_the_uis_own_device_give_back_what_torch_caches():
    pool = Ledger(room=1)
    client = RemotePool(pool, beside_ui=())
    load(client, "a")
    client.runs.begin(model_of(client, "a"))
    client.runs.end(model_of(client, "a"))
    assert pool.ended[-1].cleared == ()


def conditioned(text: float) -> dict:
    return {"x": torch.zeros(1), "timestep": torch.zeros(1), "context": torch.full((2,), text)}


def test_conditioning_is_compared_while_ranks_compute_with_what_it_is_assumed_to_be(monkeypatch):
    pool, client = ledger("a")
    evaluate(client, "a", conditioned(1.0))
    order = []
    monkeypatch.setattr(ConditioningCache, "_is_content", lambda *_: order.append("compared") or True)
    monkeypatch.setattr(
        pool, "submit", lambda *args, submit=pool.submit: order.append("submitted") or submit(*args)
    )
    evaluate(client, "a", conditioned(1.0))
    assert order == ["submitted", "compared"]


def test_an_evaluation_whose_conditioning_was_not_the_one_assumed_is_called_back_and_made_again(monkeypatch):
    pool, client = ledger("a")
    evaluate(client, "a", conditioned(1.0))
    clock = count(100.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    began = next(clock) + 1
    evaluate(client, "a", conditioned(2.0))
    assert (pool.cancelled, pool.abandoned, len(pool.submitted)) == (1, 0, 3), "ranks are waited for"
    first, assumed, right = (request.arguments for request in pool.submitted)
    assert first == assumed != right
    assert len(client.runs.last.evaluations) == 2
    assert client.runs.last.evaluations[-1].began == began, "its time is that of all its attempts"


@pytest.mark.parametrize(
    ("cancelled", "error", "says"),
    [(False, PoolFailed, "No rank returned an output"), (True, RunCancelled, "")],
    ids=["no output", "left by its ranks"],
)
def test_an_evaluation_without_an_output_is_an_error_and_one_that_its_ranks_left_a_cancelled_run(
    monkeypatch, cancelled, error, says
):
    pool, client = ledger("a")
    left = partial(Done, memory=pool.memory[0], cancelled=cancelled)
    monkeypatch.setattr(pool, "answer", lambda request: left(request=request.request))
    with pytest.raises(error, match=says):
        evaluate(client, "a")


def test_a_submission_that_could_not_be_sent_is_not_in_flight_and_holds_no_model(monkeypatch):
    pool, client = ledger("a")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(pool, "submit", raising(MemoryError()))
        evaluate(client, "a")
    assert not client.sessions.live.tickets
    client.residency.release(model_of(client, "a"))
    assert pool.models == []


def test_an_error_while_conditioning_is_compared_calls_the_ranks_back(monkeypatch):
    pool, client = ledger("a")
    evaluate(client, "a", conditioned(1.0))
    monkeypatch.setattr(ConditioningCache, "_is_content", raising(MemoryError()))
    with pytest.raises(MemoryError):
        evaluate(client, "a", conditioned(1.0))
    assert pool.abandoned == 1 and not client.sessions.live.tickets


def load(client: RemotePool, *models: str) -> None:
    for model in models:
        source = Source(model=model, factory="f")
        client.residency.load(model_of(client, model), source, dict, lambda: False)


@pytest.mark.parametrize(("device", "asked"), [("cpu", ["Load"]), ("far/cpu", ["check", "Load"])])
def test_where_another_machine_is_to_load_a_file_all_check_it_before_any_loads_it(device, asked):
    pool, client = ledger()
    pool.facts = Facts((device,))
    load(client, "a")
    assert pool.asked == [(one, "a") for one in asked]


def test_the_least_recently_used_model_makes_room_for_another():
    pool, client = ledger("a", "b", room=2)
    assert client.sessions.live.is_ready(model_of(client, "a"), "")  # b is the older one now
    load(client, "c")
    assert pool.models == ["a", "c"]
    assert not client.residency.held(model_of(client, "b"))


def test_weight_patches_and_forwards_without_room_release_other_models_and_go_on():
    for short, ask in ((SetWeightPatches, patch), (Forward, evaluate)):
        pool = Ledger(room=2, short=short)
        client = remote(pool, "a", "b", "c")
        ask(client, "c")
        assert pool.models == ["c"]
        assert client.residency.held(model_of(client, "c"))
    assert [request.part.attempt for request in pool.submitted] == [0, 1, 2], "what ranks kept is void"


@pytest.mark.parametrize("error", [ModelError, OutOfMemory, Refused, PoolFailed])
def test_a_release_that_ranks_fail_in_is_told_and_fails_nobody_who_needed_the_memory(
    monkeypatch, caplog, error
):
    pool, client = ledger("a", "b", room=2)
    monkeypatch.setattr(pool, "answer", raising(error("Rank 0 failed while releasing")))
    client.residency.release(model_of(client, "a"))
    assert [*client.sessions.live.models] == [model_of(client, "b")]
    assert "Rank 0 failed while releasing" in caplog.text
    client.sessions.live.leaving.append(model_of(client, "b"))
    client.residency.release_leaving(client.sessions.live)
    assert not client.sessions.live.models


def test_a_cancel_amid_making_room_forgets_no_model_that_the_ranks_hold():
    pool, client = ledger("a", "b", room=2)
    client.residency.load(model_of(client, "c"), Source(model="c", factory="f"), dict, lambda: True)
    assert sorted(pool.models) == ["b", "c"]
    assert [model for model in "abc" if client.residency.held(model_of(client, model))] == ["b", "c"]


def test_a_model_that_does_not_fit_alone_is_an_error_and_keeps_nothing():
    pool = Ledger(room=0)
    client = remote(pool)
    with pytest.raises(OutOfMemory):
        load(client, "a")
    assert not client.residency.held(model_of(client, "a"))
    pool = Ledger(room=1, short=Forward)
    client = remote(pool, "a")
    with pytest.raises(OutOfMemory):
        evaluate(client, "a")
    assert pool.models == ["a"]


def patch(client: RemotePool, model: str) -> None:
    client.residency.set_weight_patches(model_of(client, model), "p", {}, ("", {}), lambda: False)


def evaluate(client: RemotePool, model: str, arguments: dict | None = None) -> None:
    held = model_of(client, model)
    run, work = client.runs.of(held), Work(arguments or conditioned(0.0), Branch(("cond",)))
    client.residency.retry_with_room(held, lambda: client.evaluations.dispatch(run, [work], lambda: False))


class Successive:
    """A handle on pools of which each is lost after its first Load, but the last."""

    def __init__(self, *pools: Ledger):
        self.pools, self.layout = list(pools), Layout()

    def live(self):
        if len(self.pools) > 1 and self.pools[0].models:
            del self.pools[0]
        return self.pools[0]

    def ensure(self, interrupted):
        return self.live()


def test_a_pool_that_is_lost_between_a_load_and_its_weight_patches_is_replaced_and_loaded_again():
    first, second = Ledger(room=1), Ledger(room=1)
    patched = stock_model(1).clone()
    key, weight = next(item for item in patched.model_state_dict().items() if item[0].endswith(".weight"))
    patched.add_patches({key: ("diff", (torch.zeros_like(weight),))})
    parallel = parallelize(patched, RemotePool(Successive(first, second)), holds_ui_device=0.0)
    bring_up(parallel)
    assert [kind for kind, _model in first.asked + second.asked] == ["Load", "Load", "SetWeightPatches"]


def test_a_model_that_nobody_uses_is_released_at_once_by_the_thread_that_asks_and_later_by_others():
    pool = Ledger(room=2)
    client = remote(pool)

    class Loaded:
        """Stands for a loader's output."""

    def loaded(name):
        made = Loaded()
        client.residency.use(made, lambda: Source(model=name, factory="f"))
        load(client, name)
        return made

    outputs = [loaded("a"), loaded("b")]
    outputs.pop()
    assert pool.models == ["a"]
    elsewhere = threading.Thread(target=outputs.pop)
    elsewhere.start()
    elsewhere.join()
    assert pool.models == ["a"]
    load(client, "c")
    assert pool.models == ["c"]


def test_the_latent_and_the_time_come_first_however_a_node_gives_them():
    class Model:
        def _forward(self, x, timestep, context, y=None, **kwargs): ...

    bind = forward_binder(Model(), forward_patch(Model()))
    first = [*bind((), {"extra": 4, "context": 3, "timestep": 2, "x": 1}).items()][:3]
    assert first == [("x", 1), ("timestep", 2), ("context", 3)]
    assert list(bind((1,), {"context": 3, "timestep": 2})) == ["x", "timestep", "context"]
    with pytest.raises(TypeError, match="multiple values for argument 'timestep'"):
        bind((1, 2), {"timestep": 2})


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ulysses": 1, "data": 2}])
def test_an_error_of_the_models_own_is_told_in_its_own_words(clients, degrees):
    """With numbers of the part that a rank has: of three images, groups have two and one."""
    wide, said = [[text[..., :-1], more] for text, more in conditioning(1, 13)], []
    for model in (stock_model(5), parallelize(stock_model(5), clients(**degrees), holds_ui_device=True)):
        with pytest.raises(RuntimeError) as caught:
            run(model, positive=wide, batch=3)
        told = str(caught.value)
        said.append(told if degrees["ulysses"] > 1 else re.sub(r"\d+", "N", told))
    assert said[0] in said[1]
