"""ComfyUI's step caches over stale patches in one process, and how many evaluations they skip."""

import pytest
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.parallel_runtime.errors import ModelError

from ..kit.models import run
from ..kit.patched import SIZE, execute, models_let_go, patched, stock  # noqa: F401


def of_cache(name, model):
    return execute("nodes_easycache", name, model, 0.5, 0.1, 0.95, False)


@pytest.mark.parametrize("name", ["EasyCache", "LazyCache"])
def test_a_step_cache_skips_as_many_evaluations_of_stale_patches_as_stock_skips(name):
    counted = []
    options = {"size": SIZE, "steps": 8}

    def of(model, forward):
        clone = model.clone()
        clone.add_object_patch(
            "diffusion_model._forward",
            lambda *args, **kwargs: (counted.append(1), forward(*args, **kwargs))[1],
        )
        return clone

    plain = stock()
    truth = run(of(of_cache(name, plain), plain.model.diffusion_model._forward), **options)
    kept, stale = len(counted), patched(warm_up=1)
    assert 0 < kept < 8
    counted.clear()
    ours = run(
        of(of_cache(name, stale.model), stale.model.object_patches["diffusion_model._forward"]), **options
    )
    assert stale.mode.startswith("single-timeline") and len(counted) == kept
    assert relative_error(ours, truth) > 100 * BOUND, "nothing was stale"


def test_patches_without_a_whole_evaluation_before_them_are_refused():
    with pytest.raises(ModelError, match=r"warm_up 0: .* choose 1 or more"):
        patched(warm_up=0)
