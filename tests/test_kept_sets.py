"""Sets of weight patches that come back are patched once: UI and ranks agree on what is kept,
whatever fails.
"""

from contextlib import suppress

import comfy.hooks
import comfy.utils
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error
from pipemesh.parallel_runtime.client import patched_weights
from pipemesh.parallel_runtime.client.patched_weights import within
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.errors import ModelError, OutOfMemory, Refused
from pipemesh.parallel_runtime.wire.messages import Adopt, Load, SetWeightPatches
from pipemesh.parallel_runtime.worker.patched_sets import PatchedSet, PatchedSets

from .models import run
from .test_client import Ledger, load

SIZES = {"a": 1000, "b": 2000, "c": 3000, "d": 40_000}  # the last is larger than all the room
LIMIT = 8 << 10
FAILURES = (None, None, None, *((message, rank) for message in (SetWeightPatches, Adopt) for rank in (0, 1)))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text("abc", max_size=2), st.integers(1, 50)), st.integers(0, 120))
def test_sets_are_kept_within_their_bytes_the_last_used_first(sets, limit):
    kept = within(sets, limit)
    assert sum(kept.values()) <= limit and list(kept.items()) == list(sets.items())[len(sets) - len(kept) :]
    assert len(kept) == len(sets) or sum(list(sets.values())[-len(kept) - 1 :]) > limit


class Ranks(Ledger):
    """Two ranks, of which one may fail where the other does not."""

    def __init__(self):
        super().__init__(room=1)
        self.sets = [PatchedSets(), PatchedSets()]
        self.fails = None
        self.computed = 0

    def answer(self, request):
        if isinstance(request, Load):
            self.sets = [PatchedSets(), PatchedSets()]
        for rank, sets in enumerate(self.sets):
            if self.fails == (type(request), rank):
                raise self.error
            if isinstance(request, SetWeightPatches) and request.recalled:
                sets.recall(request.patches_id, lambda key, weight: None)
                sets.keep(request.keeps)
            elif isinstance(request, SetWeightPatches):
                sets.keep(request.keeps)
                sets.begin(PatchedSet(request.patches_id, {}, None))
            elif isinstance(request, Adopt):
                sets.adopt(lambda key, weight: None, request.keeps)
                self.computed += rank
        return super().answer(request)


STEPS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d", "release"]), st.sampled_from(FAILURES), st.booleans()),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_what_the_ui_recalls_every_rank_has_whatever_failed_before(steps):
    pool = Ranks()
    client = RemotePool(pool, shares_weights=True)
    load(client, "m")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(patched_weights, "room_for_sets", lambda sets: LIMIT)
        for name, failure, is_memory in steps:
            if name == "release":
                client.residency.release("m")
                load(client, "m")
                continue
            pool.fails, pool.error = failure, OutOfMemory("full") if is_memory else ModelError("broken")
            known, computed = name in client.session.models["m"].sets, pool.computed
            with suppress(ModelError):
                client.residency.set_weight_patches(
                    "m", name, {"k": [torch.zeros(4)]}, {}, {"k": SIZES[name]}, lambda: False, keeps=True
                )
                assert pool.computed == computed + (not known)
            kept = client.session.models["m"].sets
            assert sum(kept.values()) <= LIMIT and "d" not in kept
            assert all(kept.keys() <= sets._kept.keys() for sets in pool.sets)
    pool.arena.close()


def test_a_set_that_a_rank_does_not_have_is_refused():
    with pytest.raises(Refused, match="not kept any more: run again"):
        PatchedSets().recall("set", lambda key, weight: None)


def test_lora_hooks_that_take_turns_are_patched_once_each_while_there_is_memory_for_them(
    pair, files, client, requests, monkeypatch
):
    def hooked(seed, strength):
        hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(files["lora"]), strength, 0.0)
        return [[tensor, {**extras, "hooks": hooks}] for tensor, extras in conditioning(seed, 13)]

    def patched(model, *strengths):
        requests.clear()
        image = run(
            model, positive=hooked(1, strengths[0]), negative=hooked(2, strengths[1]), cfg=2.0, steps=3
        )
        return image, requests["SetWeightPatches"], requests["Adopt"]

    stock, parallel = pair
    truth, other = (patched(stock, *strengths)[0] for strengths in ((0.8, -0.5), (0.8, 0.8)))
    assert relative_error(other, truth) > 100 * BOUND, "the second hook does nothing"
    computed = []
    for is_new in (True, False, True):  # another test may have left the model with its weights shared out
        if is_new:
            client.residency.release(parallel.remote.model)
        ours, switches, adopted = patched(parallel, 0.8, -0.5)
        assert relative_error(ours, truth) <= BOUND and switches >= 2 * 3 - 1
        computed.append(adopted)
    assert computed == [2, 0, 2]
    resident = client.session.models[parallel.remote.model]
    assert len(resident.sets) == 2
    monkeypatch.setattr("pipemesh.parallel_runtime.client.patched_weights.SHARE_OF_SETS", 0)
    ours, switches, adopted = patched(parallel, 0.8, -0.5)
    assert relative_error(ours, truth) <= BOUND and adopted >= switches - 2 and not resident.sets
