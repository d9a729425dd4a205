"""The first evaluation that ranks share on a ComfyUI that was not tested is what one rank makes of
it alone, or the image is ComfyUI's own and a sentence says why. It costs one evaluation, once; of
numbers smaller than fp32 one more, and one that ranks share.
"""

import re
import weakref
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfy.model_management import InterruptProcessingException
from pipemesh.lab.commands.fingerprints import with_host
from pipemesh.lab.commands.parity import BOUND, relative_error, stock_model
from pipemesh.parallel_runtime.client.memory_needs import MemoryNeeds, Sampled
from pipemesh.parallel_runtime.client.patching import Patching
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.client.shared_evaluation import Admission, SharedEvaluation, as_it_is
from pipemesh.parallel_runtime.crossing.rows import latents_of
from pipemesh.parallel_runtime.errors import ModelError, OutOfMemory, Refused
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import SAMPLES
from pipemesh.parallel_runtime.forward import forward_name
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.usp import SequenceParallel
from pipemesh.parallel_runtime.planner.counts import Counts, count_nothing
from pipemesh.parallel_runtime.planner.keeping import Keeping
from pipemesh.parallel_runtime.wire.messages import Memory
from pipemesh.pool.trial import host_trials
from pipemesh.pool.trial.rounding import deviation_of
from pipemesh.pool.trial.tiny_samples import empty_latent_of, sampled

from ..fixtures import COMFYUI
from ..kit.bounds import assert_same
from ..kit.collectives import outputs_of
from ..kit.in_groups import GroupsHere, in_groups
from ..kit.models import load, run
from ..kit.planned import attention_alone
from ..nodes.test_auto import auto, notices, said, settings
from ..planner.test_counting import done
from ..pool.test_host_trials import FLUX, NOTHING, never, trial, trials

__all__ = ["auto", "notices", "settings", "trial", "trials"]  # fixtures
PAIR = Layout(ulysses=2)
LARGE = (32, 32)  # 256 tokens, where those of the tiny models are fewer than 100


class WrongTogether(GroupsHere):
    """What a newer ComfyUI may do where it is large: look at neighbours, which another rank has."""

    def _computed(self, arguments, part, group):
        out = super()._computed(arguments, part, group)
        is_large = latents_of(arguments)[0].shape[-1] == LARGE[-1]
        return out + 0.5 * out.roll(1, -1) if len(group) > 1 and is_large else out


@pytest.fixture(autouse=True)
def tiny_models_are_the_same(trial):
    trial.ends.set()


def watched(made, layout=PAIR):
    """What a pool is made with."""
    return {
        "admission": Admission(
            lambda model: made.admit(type(model.diffusion_model), never),
            partial(made.first, layout=layout),
            made.not_judged,
        ),
        "counts": Counts(lambda asked: done(attention_alone(64))),
    }


def alone_in(pool):
    """How many evaluations one rank computed by itself, since this was asked."""
    asked, pool.asked = pool.asked, []
    return [ranks for ranks, _, _ in asked].count((0,))


def why_not(told):
    """What users were told of evaluations that were not judged."""
    says = r"The first evaluation of Flux in float32 .* untested ComfyUI \(9\.9\), could .* \((.*)\): compare an image"
    return [found[1] for one in told if (found := re.match(says, one))]


def test_it_costs_one_evaluation_once_for_each_comfyui_class_and_numbers(trials, monkeypatch):
    monkeypatch.setattr("pipemesh.lab.commands.fingerprints.classes", lambda: [FLUX])
    stock, made = stock_model(5), trials()
    ours, pool = in_groups(PAIR, stock, **watched(made))
    assert_same(partial(run, cfg=4.0), ours, stock)
    assert alone_in(pool) == 1
    assert len(ours.remote.pool.runs.last.evaluations) == 6, "it is none of the run's"
    assert [one.name for one in made.verdicts()] == ["Flux", "Flux in float32"]
    run(ours)
    assert alone_in(pool) == 0
    for why, times, numbers, changed in (
        ("after a restart", 0, torch.float32, {}),
        ("a tested ComfyUI", 0, torch.bfloat16, {"known": with_host(NOTHING, "9.9", Path(COMFYUI))}),
        ("turned off", 0, torch.bfloat16, {"is_on": False}),
        ("other numbers, and in fp32", 2, torch.bfloat16, {}),
        ("those again", 0, torch.bfloat16, {}),
        ("another PipeMesh", 2, torch.bfloat16, {}),
    ):
        if why == "another PipeMesh":
            monkeypatch.setattr(host_trials, "pack_digest", lambda: "other")
        again, pool = in_groups(PAIR, stock_model(5, numbers), **watched(trials(**changed)))
        run(again)
        assert alone_in(pool) == times, why
        assert len(again.remote.pool.runs.last.evaluations) == 3


def test_groups_that_share_no_evaluation_have_nothing_to_compare(trials):
    ours, pool = in_groups(Layout(cfg=2), stock_model(5), **watched(trials()))
    run(ours, cfg=4.0)
    assert [len(ranks) for ranks, _, _ in pool.asked] == [1] * 6


FIRST = "its first evaluation in float32"


def test_what_is_wrong_only_when_shared_and_large_is_refused_with_the_figure_after_a_restart_too(trials):
    made = trials()
    ours, pool = in_groups(PAIR, stock_model(5), made=WrongTogether, **watched(made))
    sentence = (
        rf"^Flux of this ComfyUI \(9\.9\) is computed otherwise in workers than by ComfyUI alone \({FIRST}"
        r" with ulysses 2: off by [\d.]+ of its scale from that of one worker, up to [\de.-]+ is"
        r" rounding; its code is \w{16}, PipeMesh's \w{16}\): update PipeMesh, or set PIPEMESH_TRIAL=0"
    )
    with pytest.raises(Refused, match=sentence):
        run(ours, size=LARGE)
    assert len(pool.asked) == 3, "shared, alone, and alone off by a rounding"
    for one in (made, trials()):
        with pytest.raises(Refused, match=FIRST):
            one.require(type(ours.model.diffusion_model))
    pool.asked.clear()
    with pytest.raises(Refused, match=FIRST):
        run(ours)
    assert not pool.asked, "before anything is computed"
    ours.remote.pool.admission = Admission()
    assert run(ours).isfinite().all(), "the pool goes on"


def test_one_gpu_samples_what_differs_and_a_notice_says_why(
    auto, settings, requests, notices, files, client, monkeypatch
):
    """Ranks are real."""
    model, found = load(files["model"]), []
    truth = run(model, cfg=2.0)

    def judge(shared):
        found.append(deviation_of(shared, "bfloat16"))
        raise Refused("Flux is computed otherwise in workers than by ComfyUI alone: update PipeMesh.")

    monkeypatch.setattr(client, "admission", Admission(first=lambda _: judge))
    monkeypatch.setattr(client.memory_needs, "why_not_alone", lambda *_: "")
    settings(True)
    requests.clear()
    assert relative_error(run(model, cfg=2.0), truth) <= BOUND
    assert requests["Forward"] == 4, "shared and alone, and both in fp32"
    assert [(one.is_rounding, one.computed_in) for one in found] == [(True, "float32")]
    assert said(notices) == ["On one GPU: Flux is computed otherwise in workers than by ComfyUI alone."]


# -- where one rank cannot


def test_where_one_rank_has_no_room_a_notice_says_so_once_and_the_next_run_tries_again(trials):
    told = []
    ours, pool = in_groups(PAIR, stock_model(5), **watched(trials(notice=told.append)))
    for free, alone in ((1 << 20, 0), (1 << 28, 0), (1 << 40, 1)):
        pool.memory = [Memory(free, 1 << 40, 0)] * 2
        run(ours)
        assert alone_in(pool) == alone, "the last run has room"
    assert why_not(told) == ["one worker would need 0.5 GiB for it, and 0.0 GiB are free"]


def test_stop_while_the_evaluation_is_counted_is_no_reason(trials):
    told = []
    known = {**watched(trials(notice=told.append)), "counts": Counts(lambda asked: Future(), lambda: True)}
    ours, _ = in_groups(PAIR, stock_model(5), **known)
    with pytest.raises(InterruptProcessingException):
        run(ours)
    assert not why_not(told)


def test_a_pipeline_has_no_rank_with_all_blocks_and_a_notice_says_so(trials):
    told, layout = [], Layout(pipefusion=2)
    known = watched(trials(notice=told.append), layout)
    ours, pool = in_groups(layout, stock_model(5), Patching(2, 9), **known)
    run(ours)
    assert why_not(told) == ["each worker of a pipeline has a part of its blocks"]
    assert alone_in(pool) == 0


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ("sharded", "each worker has a part of its weights"),
        ("whole", "its memory is not known (nothing counts here)"),
    ],
)
def test_parts_of_weights_and_what_is_not_counted_are_reasons(kept, why):
    model, pooled = stock_model(5).model, PooledModel("model", "model")
    held = {pooled: SimpleNamespace(weights=Keeping(kept))}
    live = SimpleNamespace(models=held, pool=SimpleNamespace(facts=SimpleNamespace(speeds=())))
    sampled = Sampled(weakref.ref(model), (1, 16, 8, 8), {"positive": [{}]})
    needs = MemoryNeeds(SimpleNamespace(live=live, layout=PAIR), None, Counts(count_nothing))
    assert needs.why_not_alone(pooled, sampled, 1) == why


@pytest.mark.parametrize("error", [OutOfMemory, ModelError, Refused])
def test_a_rank_that_fails_alone_is_no_verdict_and_a_notice_says_so(trials, error):
    told, model = [], stock_model(5).model
    made = trials(notice=told.append)
    made.admit(type(model.diffusion_model), never)

    def alone(change=None, in_fp32=False):
        raise error("rank 0 ran out of memory.")

    made.first(model, PAIR)(SharedEvaluation([torch.zeros(1)], alone, alone))
    assert why_not(told) == ["rank 0 ran out of memory"]
    assert made.first(model, PAIR) is not None


# -- how much is rounding


@pytest.mark.parametrize("numbers", [torch.float32, torch.float16, torch.bfloat16])
def test_another_order_is_rounding_in_any_numbers_and_a_fault_is_not(numbers):
    generator = torch.Generator().manual_seed(1)
    layers = [torch.randn(64, 64, generator=generator).div(8).to(numbers) for _ in range(24)]
    latent = torch.randn(32, 64, generator=generator).to(numbers)
    another = torch.randperm(64, generator=generator)

    def computed(change=as_it_is, in_fp32=False, parts=(slice(None),), shift=0):
        out = change(latent)
        for layer in layers:
            layer = layer.float() if in_fp32 else layer
            out = out + torch.tanh(sum(out[:, part] @ layer[part] for part in parts))
        return [out.roll(shift, 0)]

    def judged(**how):
        again = partial(computed, **how)
        return deviation_of(SharedEvaluation(again(), again, computed), str(numbers).removeprefix("torch."))

    found = judged(parts=(another[:32], another[32:]))
    assert 0 < found.size <= found.allowed and found.computed_in == "float32"
    assert not judged(shift=1).is_rounding


# -- in numbers smaller than fp32


class InRanks(GroupsHere):
    """Whose ranks share an evaluation by a plan that is given."""

    def __init__(self, layout, stock, plan, monkeypatch):
        super().__init__(layout, stock)
        self.plan, self.patch = plan, monkeypatch

    def _computed(self, arguments, part, group):
        if len(group) == 1:
            return super()._computed(arguments, part, group)

        def compute(mesh):
            model = deepcopy(self.model)
            method = SequenceParallel(model, self.plan, mesh.sequence)
            method.attach()
            forward = partial(getattr(type(model), forward_name(model)), model)
            return method.forward(forward, dict(arguments), 1)

        return outputs_of(self.layout, compute, self.patch)[0]


# Forms whose references have a timestep of their own, of classes that have a form without one
EDITED = [
    name
    for name, one in SAMPLES.items()
    if one.extras(empty_latent_of(one, "odd"), 0).get("reference_latents_method") == "index_timestep_zero"
]


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("edited", EDITED)
def test_a_plan_for_another_form_of_the_class_is_refused_in_bf16_and_its_own_is_not(
    trials, monkeypatch, edited, is_right
):
    """As another form reads it, no reference has a timestep of its own."""
    facts, made = SAMPLES[edited], trials()
    stock = stock_model(facts.heads[-1], torch.bfloat16, family=edited)
    own = plan_for(type(stock.model.diffusion_model))
    other = replace(own, blocks=tuple(replace(group, ranges=()) for group in own.blocks))
    in_ranks = partial(InRanks, plan=own if is_right else other, monkeypatch=monkeypatch)
    ours, _ = in_groups(PAIR, stock, made=in_ranks, **watched(made))
    ask = partial(sampled, ours, facts, "odd", 1.0, False, "euler", seed=7, steps=1)
    says = "its first evaluation in bfloat16 with ulysses 2, computed in float32: off by "
    if is_right:
        assert ask().isfinite().all()
        assert says in made.verdicts()[-1].says
    else:
        with pytest.raises(Refused, match=rf"{says}0\.\d+ of its scale .*, up to \S+e-05 is rounding"):
            ask()
