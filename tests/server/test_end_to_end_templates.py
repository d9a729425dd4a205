"""Workflow templates of ComfyUI's on the server: loaders stood in for, the pool before the
samplers. A few stand for what differs between them; all run by command, `python3 -m lab templates`,
and their prompts are the page's (lab/tests/test_templates_in_browser.py).
"""

import json

import pytest
from pipemesh.lab.templates.run import Tries

from ..fixtures import ROOT

COVER = {  # template -> what it stands for
    "image_z_image_turbo": "the one that is used most, in bf16",
    "flux_fill_inpaint_example": "a noise mask, and latent channels beside the latent",
    "03_video_wan2_2_14B_i2v_subgraphed": "two models, one behind the other, in scaled fp8 and with LoRA",
    "image_qwen_image_instantx_controlnet": "a ControlNet, and a second sampler before it",
    "flux1_dev_uso_reference_image_gen": "a patch by reference, a LoRA and references",
    "image_krea2_turbo_t2i_int8": "weights in int8",
    "video_wan_vace_14B_v2v": "blocks among others, and a controlling video",
}


@pytest.fixture(scope="module")
def tried(server):
    tries = Tries(server, server.get("/object_info"), {"devices": "cpu", "layout": "by hand", "ulysses": 2})
    prompts = json.loads((ROOT / "lab" / "templates" / "prompts.json").read_text(encoding="utf-8"))
    return lambda name: tries.outcome(name, prompts[name])


@pytest.mark.cover(3)
@pytest.mark.parametrize("name", COVER)
def test_a_workflow_template_gives_the_stock_latent_through_the_pool(tried, name):
    outcome = tried(name)
    assert outcome.result == "same", outcome.reason
    assert outcome.samplers and outcome.evaluations and outcome.models
