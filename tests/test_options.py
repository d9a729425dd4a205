"""What nodes set among a MODEL's options reaches the transformer in the ranks, or is refused."""

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families.every import SAMPLES

from .models import run

pytestmark = pytest.mark.host


def with_option(model, **options):
    clone = model.clone()
    clone.model_options["transformer_options"].update(options)
    return clone


def their_function(*_args):
    raise AssertionError("nobody calls it")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            object(),
            (
                r"The option theirs \(builtins\.object\) of this MODEL is no plain data and cannot be sent to"
                r" the pool: remove"
            ),
        ),
        ({"of": [1, torch.device("cpu")]}, r"The option theirs/of/1 \(torch\.device\) of this MODEL"),
        (their_function, r"The option theirs \(.*\.their_function\) of this MODEL"),
        (
            frozenset((1, their_function)),
            r"The option an item of theirs \(.*\.their_function\) of this MODEL",
        ),
    ],
)
def test_an_option_that_no_rank_can_read_is_refused_by_name_and_the_pool_goes_on(pair, value, says):
    stock, parallel = pair
    with pytest.raises(Refused, match=says):
        run(with_option(parallel, theirs=value))
    plain = {"plain": [1, 2.0, torch.zeros(1)], "blocks": frozenset((3, 1)), "names": {"a", "b"}}
    assert relative_error(run(with_option(parallel, **plain)), run(stock)) <= BOUND


@pytest.mark.parametrize("name", ["uuids", "easycache", "context_window", "prefetch_dynamic_vbars"])
def test_comfyuis_own_objects_that_only_its_process_reads_refuse_nothing(name):
    from pipemesh.parallel_runtime.crossing.options import crossing_options

    assert name not in crossing_options({name: object(), "sigmas": 1.0})


def test_ltx_spatio_temporal_guidance_computes_what_stock_computes(client):
    from comfy_extras import nodes_lt

    if not hasattr(nodes_lt, "LTXVSpatioTemporalGuidance"):
        pytest.skip("this ComfyUI does not have the node")
    with_audio = next(name for name, one in SAMPLES.items() if one.form.config_class == "LTXAV")
    case = Case(with_audio, "ulysses2", "odd", 4, 1.0, False, "euler")

    def guided(model):
        return nodes_lt.LTXVSpatioTemporalGuidance.execute(model, 1.0, "0", 0.0, 1.0).result[0]

    stock = stock_model(case.heads, family=case.family)
    truth = sample(guided(stock), case)
    assert relative_error(truth, sample(stock, case)) > 0.1, "the node does nothing"
    assert (
        relative_error(sample(guided(parallelize(stock, client, holds_ui_device=False)), case), truth)
        <= BOUND
    )
