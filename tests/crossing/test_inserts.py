"""Modules between blocks or within them: each token gets what its own frame has, whichever rank
computes it, and no rank needs another's tokens.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families.plan import Frames, Insert
from pipemesh.parallel_runtime.forward import binder
from pipemesh.parallel_runtime.methods.inserts import Inserted
from pipemesh.parallel_runtime.methods.shards import Division, Shards


class Injector(torch.nn.Module):
    """Lets each token of the first ``count`` attend to the rows of its own frame, in place."""

    def forward(self, x, sound, also, count):
        frames = sound.shape[1] // 2
        keys = (sound + also).unflatten(1, (frames, 2))
        queries = x[:, :count].unflatten(1, (frames, -1))
        x[:, :count] += torch.nn.functional.scaled_dot_product_attention(queries, keys, keys).flatten(1, 2)
        return x


class Within(torch.nn.Module):
    """All tokens are of frames, and what is returned is no sum."""

    def forward(self, x, sound, also=None):
        return x.unflatten(1, (sound.shape[1] // 2, -1)).mul(sound[:, ::2].unsqueeze(2)).flatten(1, 2)


@settings(deadline=None)
@given(
    frames=st.integers(1, 5),
    each=st.integers(1, 6),
    more=st.integers(0, 9),
    ranks=st.integers(1, 6),
    patch=st.data(),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("module", [Injector(), Within()], ids=["some", "all"])
def test_each_token_gets_what_its_own_frame_has(module, frames, each, more, ranks, patch, seed):
    more = more if isinstance(module, Injector) else 0
    counted = {"count": frames * each} if isinstance(module, Injector) else {}
    total, generator = frames * each + more, torch.Generator().manual_seed(seed)
    x, sound, also = (
        torch.randn(2, total, 4, generator=generator),
        *torch.randn(2, 2, 2 * frames, 4, generator=generator),
    )
    also = also if isinstance(module, Injector) else None
    truth = module(x=x.clone(), sound=sound, also=also, **counted)
    start = patch.draw(st.integers(0, total - 1))
    active = {"img": (start, patch.draw(st.integers(1, total - start)))}
    plan = Insert(
        path="", frames=Frames(stream="img", each={"sound": 2, "also": 2}, count="count" if counted else "")
    )
    for rank in range(ranks):
        rows = Shards(Division({"img": total}, rank, ranks, active))
        inserted = Inserted(plan, binder(type(module).forward), lambda rows=rows: rows)
        entered = inserted.enter(
            module, (rows.slice(x, 1, ("img",)),), {"sound": sound, "also": also, **counted}
        )
        assert entered is not None
        assert entered[1]["sound"].shape[1] <= 2 * (rows.local["img"][1] // each + 2), (
            "it computes frames of others"
        )
        out = inserted.leave(module, (), module(**entered[1]))
        assert torch.allclose(out, rows.slice(truth, 1, ("img",)), atol=1e-6)


def test_a_module_that_has_all_tokens_is_let_be():
    inserted = Inserted(
        Insert(path="", frames=Frames(stream="img", each={"sound": 2})), binder(Within.forward), lambda: None
    )
    assert inserted.enter(Within(), (), {}) is None
    assert inserted.leave(Within(), (), torch.zeros(1, 2, 3)) is None


def test_frames_of_unequal_size_are_refused():
    module, rows = Within(), Shards(Division({"img": 7}, 0, 2))
    inserted = Inserted(
        Insert(path="", frames=Frames(stream="img", each={"sound": 1})),
        binder(type(module).forward),
        lambda: rows,
    )
    with pytest.raises(
        ModelError,
        match="7 tokens cannot be divided into 2 frames of sound: this model cannot be split by its plan",
    ):
        inserted.enter(module, (torch.zeros(1, 4, 3), torch.zeros(1, 2, 3)), {})
