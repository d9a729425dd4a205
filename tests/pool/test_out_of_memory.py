"""A rank that runs out of memory in the middle of an evaluation: one sentence, and the next run is
right in a fresh pool, in every method and however often.
"""

from itertools import count
from math import prod

import pytest
from pipemesh.lab.commands.parity import BOUND, relative_error, sample
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.errors import OutOfMemory
from pipemesh.parallel_runtime.families.catalogue import PLAIN

from ..fixtures import ALL
from ..kit.patched import together
from ..kit.pipelines import case

METHODS = {
    "ulysses": ((2,), lambda model: model),
    "ring": ((1, 2), lambda model: model),
    "both": ((2, 2), lambda model: model),
    "free-running": ((1, 1, 2), lambda model: model),
    "single-timeline": ((1, 1, 2), together),
    "stages of two": ((2, 1, 2), lambda model: model),
    "stages of a ring": ((1, 2, 2), lambda model: model),
}
TIMES = 100 if ALL else 2
COVERED = ("free-running",)  # of a sequence: test_pool_faults


@pytest.mark.parametrize("method", METHODS if ALL else COVERED)
def test_a_rank_that_runs_out_of_memory_is_named_and_the_next_run_is_right(broken, truths, method):
    layout, wrap = METHODS[method]
    of, client = case(), broken("runs_out_of_memory", *layout)
    patching = Patching(3) if len(layout) > 2 else None
    model = wrap(parallelize(truths.stock_model(PLAIN), client, holds_ui_device=False, patching=patching))
    right, bound = (
        (truths.patched(of, 3), truths.bound(of))
        if patching
        else (sample(truths.stock_model(PLAIN), of), BOUND)
    )
    client.sessions.open(lambda: False)
    ranks = prod(layout)
    for number in range(TIMES):
        client.runs._ids = count(2 * number + 1, 2)
        with pytest.raises(
            OutOfMemory, match=rf"^Rank {number % ranks} on cpu ran out of memory while computing \("
        ):
            sample(model, of)
        client.runs._ids = count(2 * number + 2, 2)
        assert relative_error(sample(model, of), right) <= bound
        assert client.sessions.live.pool.idle
