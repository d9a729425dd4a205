"""What the command says of a template, on a server that gives what a test wants: same, different,
one GPU, refused, error, or of another pack.
"""

from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.comfyui.api import RunError, node
from pipemesh.lab.templates.cut import HELD_NODE, RECORD_NODE, ROUNDED_NODE
from pipemesh.lab.templates.run import Tries
from pipemesh.lab.templates.surgery import EXACT, HELD, PARALLEL
from pipemesh.parallel_runtime.refusals import ON_ONE_GPU
from safetensors.torch import save_file

from .test_template_stand_ins import GRAPH, INFO, takes

TRUTH, OTHER = (torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
NO_PLAN = f"Net has no token plan (a UNet): {ON_ONE_GPU}."
FIRST, SECOND = f"{PARALLEL} patch 0", f"{PARALLEL} model 0"
TEMPLATE = GRAPH | {"model": node("UNETLoader", unet_name="a.safetensors")}


class Server:
    """Gives what ``answer`` makes of a graph: a latent for every sampler, or an error."""

    def __init__(self, output, answer, readers, clock):
        self.output, self.answer, self.graphs = output, answer, []
        self.readers, self.clock = readers, clock  # which classes read all that the graph gives

    def run(self, graph, timeout_s):
        self.graphs.append(graph)
        given = self.answer(graph)
        if isinstance(given, RunError):
            return SimpleNamespace(error=given)
        for one in graph.values():
            if one["class_type"] == RECORD_NODE:
                save_file({"0": given.contiguous()}, self.output / one["inputs"]["name"])
        held = [key for key, one in graph.items() if one["class_type"] == HELD_NODE]
        return SimpleNamespace(error=None, outputs={key: {"text": ["Net", *self.readers]} for key in held})

    def get(self, path):
        runs = sum(map(is_parallel, self.graphs))
        figures = {"began": self.clock * runs, "evaluations": 7} if runs else None
        return {"last_runs": [{"figures": figures}, {"figures": None}]}


@pytest.fixture
def outcome_of(tmp_path):
    """An answer -> the outcome of the last template, and the graphs that were run."""

    def tried(answer, *templates, info=INFO, readers=("Net", "Other"), clock=1.0):
        server = Server(tmp_path, answer, readers, clock)
        tries = Tries(server, info, {"ulysses": 2})
        return [tries.outcome("a", one) for one in templates or (TEMPLATE,)][-1], server.graphs

    return tried


def is_parallel(graph):
    return any(key.startswith(PARALLEL) for key in graph)


def refusal(key, message):
    return RunError("failed", key, "PipeMeshParallelize", message, "pipemesh.Refused")


def test_equal_latents_are_the_same_and_the_pool_was_asked(outcome_of):
    outcome, graphs = outcome_of(lambda graph: TRUTH)
    assert (outcome.result, outcome.samplers, outcome.error, outcome.evaluations) == ("same", 2, 0.0, 7)
    assert [is_parallel(graph) for graph in graphs] == [False, True]


@pytest.mark.parametrize(("readers", "by_name"), [(["Net"], []), (["Net", "Other"], ["Net"])])
def test_an_outcome_says_which_models_have_the_word_of_a_files_name_alone(outcome_of, readers, by_name):
    second = node("KSampler", **TEMPLATE["second"]["inputs"], positive=["t", 0])
    info = INFO | {"KSampler": takes("LATENT", model="MODEL", positive="CONDITIONING")}
    outcome, graphs = outcome_of(
        lambda graph: TRUTH, {**TEMPLATE, "second": second}, info=info, readers=readers
    )
    assert (outcome.result, outcome.by_name) == ("same", by_name)
    assert [any(key.startswith(HELD) for key in one) for one in graphs] == [True, False]


def test_a_template_of_which_nothing_ran_in_the_pool_is_an_error(outcome_of):
    """Of a pool that stays up, the last run may be another template's."""
    assert outcome_of(lambda graph: TRUTH, clock=0.0)[0].result == "same"
    second, _graphs = outcome_of(lambda graph: TRUTH, TEMPLATE, TEMPLATE, clock=0.0)
    assert (second.result, second.evaluations) == ("error", 0)


def test_a_template_with_a_node_of_another_pack_is_said_to_be_one_and_is_not_tried(outcome_of):
    outcome, graphs = outcome_of(lambda graph: TRUTH, TEMPLATE | {"126:96": {"inputs": {}}})
    assert outcome.result == "other pack" and "126:96" in outcome.reason and graphs == []


def test_other_latents_of_weights_that_were_never_quantised_are_different(outcome_of):
    outcome, _graphs = outcome_of(lambda graph: TRUTH + 1e-4 * OTHER if is_parallel(graph) else TRUTH)
    assert outcome.result == "different" and outcome.ratio is None
    assert "of the latent's scale" in outcome.reason


@pytest.mark.parametrize(("ours", "result"), [(1.1, "same"), (1.3, "different")])
def test_quantised_weights_may_bring_us_no_further_from_the_truth_than_stock(outcome_of, ours, result):
    def answer(graph):
        is_exact = graph["model"]["inputs"]["unet_name"].endswith(EXACT)
        return TRUTH if is_exact else TRUTH + (-ours if is_parallel(graph) else 1.0) * 0.01 * OTHER

    outcome, _graphs = outcome_of(answer)
    assert outcome.result == result and outcome.ratio == pytest.approx(ours, rel=1e-3)


@pytest.mark.parametrize(("ours", "result"), [(4.0, "same"), (6.0, "different")])
def test_what_rounding_does_to_stock_may_rounding_do_to_us(outcome_of, ours, result):
    def rounded(graph):
        return sum(one["class_type"] == ROUNDED_NODE for one in graph.values())

    outcome, graphs = outcome_of(
        lambda graph: TRUTH + 1e-4 * OTHER * (ours if is_parallel(graph) else float(rounded(graph) > 0))
    )
    assert outcome.result == result and (result == "different" or "sensitivity" in outcome.reason)
    assert rounded(graphs[3]) == 2


@pytest.mark.parametrize(("without_plan", "result"), [((SECOND,), "same"), ((FIRST, SECOND), "one GPU")])
def test_a_model_without_a_plan_is_left_to_stock_and_the_others_are_tried(outcome_of, without_plan, result):
    def answer(graph):
        refused = next((key for key in without_plan if key in graph), None)
        return refusal(refused, NO_PLAN) if refused else TRUTH

    outcome, graphs = outcome_of(answer)
    assert outcome.result == result
    if result == "same":
        assert outcome.one_gpu == [NO_PLAN] and FIRST in graphs[-1] and SECOND not in graphs[-1]
    else:
        assert outcome.reason == NO_PLAN


@pytest.mark.parametrize(
    ("exception", "result"),
    [("pipemesh.Refused", "refused"), ("pipemesh.PoolFailed", "error"), ("TypeError", "error")],
)
def test_what_is_refused_is_told_from_what_fails(outcome_of, exception, result):
    error = RunError("failed", "second", "KSampler", "the patch X cannot run in the pool", exception)
    outcome, _graphs = outcome_of(lambda graph: error if is_parallel(graph) else TRUTH)
    assert outcome.result == result and "the patch X" in outcome.reason


@pytest.mark.parametrize(
    "given",
    [RunError("failed", "model", "UNETLoader", "no such file"), TRUTH * float("nan")],
    ids=["fails", "nan"],
)
def test_a_template_that_stock_cannot_run_is_an_error_of_stocks(outcome_of, given):
    outcome, graphs = outcome_of(lambda graph: given)
    assert outcome.result == "error" and outcome.reason.startswith("stock: ") and len(graphs) == 1
