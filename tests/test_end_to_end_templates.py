"""A workflow template of ComfyUI's on the server: loaders stood in for, the pool before the
sampler. All others run by command, `python3 -m launcher templates`.
"""

from pipemesh.launcher.templates.files import installed
from pipemesh.launcher.templates.graph import api_prompt
from pipemesh.launcher.templates.run import Tries

MOST_USED = "image_z_image_turbo"


def test_a_workflow_template_gives_the_stock_latent_through_the_pool(server, host):
    (template,) = [one for one in installed(host) if one.name == MOST_USED]
    tries = Tries(server, server.get("/object_info"), {"devices": "cpu", "ulysses": 2, "backend": "auto"})
    outcome = tries.outcome(template.name, api_prompt(template.workflow(), tries.info))
    assert outcome.result == "same", outcome.reason
    assert outcome.samplers == 1 and outcome.evaluations and outcome.models == ["z_image_turbo_bf16.safetensors"]
