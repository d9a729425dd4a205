"""What the UI asks of a pool, seen with a pool that only writes it down."""

import pytest
import torch
from pipemesh.parallel_runtime.client.remote_model import Client
from pipemesh.parallel_runtime.comfy_bridge.source import Source
from pipemesh.parallel_runtime.errors import OutOfMemory, RunCancelled
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.messages import Done, Forget, Forward, Load, Memory, Release, SetWeightPatches
from pipemesh.parallel_runtime.wire.tree import NotPlain, decode_tree, encode_tree


class Ledger:
    """A pool of one rank with room for ``room`` models; ``short`` names a kind of request that
    needs one place more.
    """

    def __init__(self, room: int, short: type = Load):
        self.arena, self.memory, self.state, self.size, self.idle = Arena(), [Memory(1, 2, 3)], "ready", 1, True
        self.room, self.short, self.writer, self.stages = room, short, 0, 1
        self.models: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.submitted: list[Forward] = []

    def live(self):
        return self

    def ensure(self, interrupted):
        return self

    def next_request(self) -> int:
        return len(self.asked) + 1

    def settle(self, interrupted):
        pass

    def submit(self, request):
        self.submitted.append(request)

    def abandon(self):
        pass

    def collect(self, number, interrupted):
        return [Done(request=number, memory=self.memory[0], output=encode_tree([0], lambda path, tensor: None))]

    def call(self, request, fds=(), interrupted=lambda: False, right=lambda: True):
        if isinstance(request, Release) and interrupted():
            raise RunCancelled
        self.asked.append((type(request).__name__, request.model))
        if isinstance(request, Release):
            self.models = [model for model in self.models if model != request.model]
        elif isinstance(request, self.short) and len(self.models) >= self.room:
            raise OutOfMemory("full")
        elif isinstance(request, Load):
            self.models.append(request.model)
        output = encode_tree([0], lambda path, tensor: None)
        return [Done(request=request.request, memory=self.memory[0], output=output)] if right() else []


def test_a_submission_that_cannot_be_written_leaves_no_room_taken():
    pool = Ledger(room=2)
    client = Client(pool, shares_weights=False)
    load(client, "a")
    first = pool.arena.take(1)
    pool.arena.give(first, 1)
    x = torch.zeros(1, 16, 64, 64)
    with pytest.raises(NotPlain):
        client.submit("a", "", {"x": x, "timestep": x, "transformer_options": {"thing": object()}}, ("cond",), Part(1, 0))
    assert pool.arena.take(1) == first and not client.in_flight


def test_patches_in_flight_share_what_was_written_of_their_evaluation_until_the_last_is_back():
    pool = Ledger(room=2)
    client = Client(pool, shares_weights=False)
    load(client, "a")
    x, residual = torch.zeros(1, 16, 8, 8), torch.zeros(1, 1 << 20)

    def evaluation():
        return {"x": x, "timestep": x[0, 0, 0, :1], "context": x, "control": {"input": [residual]}}

    def submit(arguments):
        client.submit("a", "", arguments, ("cond",), Part(1, 0, (0, 4, False)))
        return pool.arena._allocator.end

    def is_free(place):
        offset = pool.arena.take(place.nbytes)
        pool.arena.give(offset, place.nbytes)
        return offset == place.offset

    one = evaluation()
    taken = [submit(arguments) for arguments in (one, one, evaluation())]
    assert taken[1] - taken[0] < residual.nbytes < taken[2] - taken[1]
    trees = [message.arguments for message in pool.submitted]
    assert trees[0] == trees[1] != trees[2]
    place = place_of(residual, pool.submitted[0])
    for ticket in list(client.memory.tickets[:2]):
        assert not is_free(place), "one of the two is on its way"
        client.collect(ticket, lambda: False)
    assert is_free(place)
    client.abandon()
    ends = []
    for _ in range(8):
        pair = evaluation()
        ends += [submit(pair), submit(pair)]
        client.abandon()
    assert len(set(ends)) == 1, "not all was given back"


@pytest.mark.parametrize("through_stages", [False, True], ids=["whole", "in patches"])
def test_residuals_are_sent_to_be_read_in_place_and_nothing_else_is(through_stages):
    pool = Ledger(room=2)
    client = Client(pool, shares_weights=False)
    load(client, "a")
    x = torch.zeros(1, 16, 8, 8)
    arguments = {"x": x, "timestep": x[0, 0, 0, :1], "context": x[:, :3], "control": {"input": [torch.zeros(1, 5, 4)]}}
    if through_stages:
        client.submit("a", "", arguments, ("cond",), Part(1, 0, (0, 4, False)))
    else:
        pool.call = lambda request, *args, call=pool.call, **kwargs: pool.submitted.append(request) or call(request)
        client.forward("a", "", arguments, ("cond",), lambda: False)
    refs = []
    decode_tree(pool.submitted[-1].arguments, lambda ref: refs.append(ref) or x)
    assert [ref.shape for ref in refs if ref.in_place] == [(1, 5, 4)] and len(refs) == 4
    client.abandon()


def place_of(tensor, request):
    """Where it lies in the arena, by its size."""
    places = []
    decode_tree(request.arguments, lambda ref: places.append(ref) or tensor)
    return next(place for place in places if place.nbytes == tensor.nbytes)


def test_a_model_that_is_in_a_run_is_no_room_for_another_one_in_it():
    pool = Ledger(room=3)
    client = Client(pool, shares_weights=False)
    load(client, "a", "b")
    client.begin_run("b")
    assert not client.make_room("a") and client.holds("b")
    client.end_run("b")
    assert client.make_room("a") and not client.holds("b")


def test_the_end_of_a_run_asks_nothing_of_ranks_that_are_still_at_what_was_cancelled():
    pool = Ledger(room=1)
    pool.stages = 2
    client = Client(pool, shares_weights=False)
    load(client, "a")
    client.end_run("a")
    assert pool.asked[-1] == ("Forget", "a")
    pool.idle = False
    before = list(pool.asked)
    client.end_run("a")
    assert pool.asked == before


def test_the_end_of_a_run_hides_nothing_that_the_run_ended_with(caplog):
    pool = Ledger(room=1, short=Forget)
    pool.stages = 2
    client = Client(pool, shares_weights=False)
    load(client, "a")
    client.end_run("a")
    assert pool.asked[-1] == ("Forget", "a") and "full" in caplog.text


def load(client: Client, *models: str) -> None:
    for model in models:
        client.load(Source(model=model, factory="f"), dict, lambda: False)


def test_the_least_recently_used_model_makes_room_for_another():
    pool = Ledger(room=2)
    client = Client(pool, shares_weights=False)
    load(client, "a", "b")
    assert client.ready_for("a", "")  # b is the older one now
    load(client, "c")
    assert pool.models == ["a", "c"]
    assert not client.holds("b")


def test_weight_patches_and_forwards_without_room_release_other_models_and_go_on():
    for short, ask in ((SetWeightPatches, patch), (Forward, forward)):
        pool = Ledger(room=2, short=short)
        client = Client(pool, shares_weights=False)
        load(client, "a", "b", "c")
        ask(client, "c")
        assert pool.models == ["c"]
        assert client.holds("c")


def test_a_cancel_amid_making_room_forgets_no_model_that_the_ranks_hold():
    pool = Ledger(room=2)
    client = Client(pool, shares_weights=False)
    load(client, "a", "b")
    client.load(Source(model="c", factory="f"), dict, lambda: True)
    assert sorted(pool.models) == ["b", "c"]
    assert [model for model in "abc" if client.holds(model)] == ["b", "c"]


def test_a_model_that_does_not_fit_alone_is_an_error_and_keeps_nothing():
    pool = Ledger(room=0)
    client = Client(pool, shares_weights=False)
    with pytest.raises(OutOfMemory):
        load(client, "a")
    assert not client.holds("a")
    pool = Ledger(room=1, short=Forward)
    client = Client(pool, shares_weights=False)
    load(client, "a")
    with pytest.raises(OutOfMemory):
        forward(client, "a")
    assert pool.models == ["a"]


def patch(client: Client, model: str) -> None:
    client.patch(model, "p", {}, {}, {}, lambda: False)


def forward(client: Client, model: str) -> None:
    arguments = {"x": torch.zeros(1), "timestep": torch.zeros(1), "context": torch.zeros(2)}
    client.forward(model, "", arguments, (), lambda: False)
