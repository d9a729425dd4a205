"""The table of model families tells the truth about the registry and about the host's classes."""

import json
from dataclasses import replace
from pathlib import Path

import comfyui_version
import pytest
from pipemesh.lab.commands import families
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families import FILES
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, PLANS, REGISTERED, SAMPLES
from pipemesh.parallel_runtime.families.plan import Together
from pipemesh.parallel_runtime.families.unplanned_models import NOT_YET, ON_ONE_GPU, WITHOUT_PLAN, why_no_plan
from pipemesh.tests.fixtures import COMFYUI, ROOT

INTERLEAVED = (*PLANS[0].blocks[:-1], replace(PLANS[0].blocks[-1], interleaved=True))


@pytest.mark.host
def test_docs_families_is_what_the_registry_says():
    """`python3 -m lab families --markdown > docs/FAMILIES.md` brings it up to date, on each
    host.
    """
    text, hosts = (ROOT / "docs" / "FAMILIES.md").read_text(encoding="utf-8"), families.tested_hosts()
    assert hosts[comfyui_version.__version__] == [*families.transformers(Path(COMFYUI))]
    assert text == families.markdown(families.rows(), hosts)


@pytest.mark.host
def test_every_class_of_a_plan_and_every_one_without_is_a_tested_hosts():
    hosts = {name for classes in families.tested_hosts().values() for name in classes}
    planned = set(FILES)
    assert len(hosts) > 40
    ahead = {model for row in families.rows() if row.ahead for model in row.models}
    assert planned <= hosts | {*families.OF_NO_TYPE, *ahead} and not hosts & ahead
    assert not planned & {*WITHOUT_PLAN, *ON_ONE_GPU}
    assert {*WITHOUT_PLAN, *ON_ONE_GPU} <= hosts and not set(WITHOUT_PLAN) & set(ON_ONE_GPU)


def test_a_class_of_a_newer_host_says_which_hosts_have_it_and_an_unknown_one_has_no_plan_yet():
    text = families.markdown([], {"1.0": ["a:Old"], "1.1": ["a:Old", "a:New"]})
    for name, first in (("Old", "yes"), ("New", "no")):
        assert f"| `{name}` | {NOT_YET} | no | {first} | yes |" in text
    assert why_no_plan("builtins:dict") == NOT_YET


@pytest.mark.parametrize(
    ("change", "pipefusion", "says"),
    [
        ({}, "approximate", "approximate"),
        ({"together": Together(always="it looks at all frames")}, "whole", "whole: it looks at all frames"),
        ({"blocks": INTERLEAVED}, "refused", "refused"),
        (
            {"together": Together(refiners=("first",), arguments=("ref_latents",))},
            "approximate",
            "approximate: step by step, because of the model's first, which looks at the whole image; whole with"
            " ref_latents",
        ),
    ],
)
def test_a_plan_that_is_not_cut_or_is_bound_says_why(change, pipefusion, says):
    row = families.row_of(replace(PLANS[0], **change), FAMILIES[0])
    assert row.pipefusion == pipefusion and says in families.markdown([row], {})


def test_the_command_lists_families_and_those_on_one_gpu_with_the_reason(capsys):
    host = ComfyInstall(python="", comfyui=COMFYUI, version="", base="")
    assert families.main(["--json"], host) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {family.name for family in REGISTERED} == {row["family"] for row in answer["families"]}
    assert answer["one_gpu"]["comfy.ldm.seedvr.model:NaDiT"].startswith("it exchanges the halves")
    assert families.main([], host) == 0
    assert "NaDiT; it exchanges the halves" in capsys.readouterr().out


def test_a_model_that_no_stage_can_hold_a_part_of_is_refused_before_anything_starts(client):
    refused = [one for one in FAMILIES if any(plan.why_no_stages for plan in one.plans)]
    sample = next(one for one in SAMPLES.values() if any(one in family.samples for family in refused))
    model = sample.form.random_model(sample.tiny.size(sample.heads[0]))
    with pytest.raises(
        Refused, match=r"cannot be divided into stages, because its .* run among its other blocks"
    ):
        parallelize(model, client, 0.0, Patching(2))
