"""The prompts that ComfyUI's own page makes of the official templates."""

import json

import pytest
from pipemesh.lab.templates.files import prompts
from pipemesh.lab.templates.stand_ins import names
from pipemesh.lab.templates.surgery import model_files
from pipemesh.launcher.comfyui.search import COMFYUI_VERSION
from pipemesh.tests.fixtures import ROOT

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def found(host):
    return prompts(host)


def test_every_template_that_samples_a_transformer_is_found_and_no_other(found, host):
    assert not [name for name in found if name.startswith(("audio_", "3d_", "api_"))]
    if host.version == COMFYUI_VERSION:
        assert len(found) == 181


def test_the_prompts_that_are_kept_for_tests_without_a_page_are_those_of_the_page(found, host):
    """Where not: `python3 -m lab templates --prompts FILE` writes them, with --name for each."""
    kept = json.loads((ROOT / "lab" / "templates" / "prompts.json").read_text(encoding="utf-8"))
    if host.version == COMFYUI_VERSION:
        assert {name: found[name] for name in kept} == kept


def test_every_model_file_of_a_template_stands_for_a_model(found):
    files = {
        file
        for prompt in found.values()
        for file in model_files({key: node for key, node in prompt.items() if "class_type" in node})
        if "sam3" not in file
    }
    assert len({names.known_whole(names.MODELS, file, "model").sample for file in files}) > 30
