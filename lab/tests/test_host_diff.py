"""What another ComfyUI changes is told by the files of both."""

import tarfile

import pytest
from pipemesh.lab.commands import host_diff
from pipemesh.launcher.errors import LaunchError

BASE = """
import comfy.ldm.flux.model
from comfy.ldm.new.model import Newcomer
class Flux:
    def __init__(self): super().__init__(unet_model=comfy.ldm.flux.model.Flux)
class New:
    def __init__(self, model_config, device=None, unet_model=Newcomer): super().__init__(unet_model=unet_model)
class BaseModel:
    def apply_model(self, x): return x
"""
OLD = {
    "model_base.py": BASE.replace("=Newcomer", "=comfy.ldm.flux.model.Flux"),
    "ldm/flux/model.py": "class Flux:\n    def forward(self, x, transformer_options): return transformer_options.get('block')\n",
    "ops.py": "def cast_bias_weight(): pass\n",
}
NEW = {
    "model_base.py": BASE.replace("return x", "return x + 1"),
    "ldm/flux/model.py": OLD["ldm/flux/model.py"].replace(".get('block')", "['kept']"),
    "ops.py": OLD["ops.py"],
    "supported_models.py": """
class NewOne(BASE):
    unet_config = {"image_model": "new"}
    latent_format = comfy.latent_formats.Wide
    def get_model(self, state_dict): return model_base.New(self)
""",
    "latent_formats.py": "class Wide(LatentFormat):\n    latent_channels = 48\n    latent_dimensions = 3\n",
    "ldm/new/model.py": """
class Parent:
    def __init__(self, width, depth=40, image_model=None, dtype=None): self.layers = ModuleList()
class Newcomer(Parent):
    def forward(self, x, c):
        for i, layer in enumerate(self.layers): x = layer(x, context=c)
""",
}


SAID = """Families whose code differs:
  comfy.ldm.flux.model:Flux
    changed comfy.ldm.flux.model:Flux.forward
Code of most families that differs:
New classes of transformers:
  comfy.ldm.new.model:Newcomer
    Blocks(path='layers'): layer(x, context=c)
    Sample(name='newone', form=Form(config_class='NewOne', config=lambda size: {
        'width': ...,
        'depth': 40,
        'image_model': 'new',
    }), latents={'even': (1, 48, 3, 8, 6), 'odd': (1, 48, 3, 7, 10)})
Keys of transformer_options:
  new kept
  gone block
Seams that differ:
  comfy/model_base.py: BaseModel
"""


@pytest.fixture
def trees(tmp_path):
    for name, files in (("old", OLD), ("new", NEW)):
        for file, text in files.items():
            path = tmp_path / name / "comfy" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return tmp_path / "old", tmp_path / "new"


def test_changed_functions_new_classes_option_keys_and_seams_are_named(trees, capsys, tmp_path):
    archive = tmp_path / "new.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(trees[1], "ComfyUI")
    assert host_diff.main([str(trees[0]), str(archive)], None) == 0
    assert capsys.readouterr().out == SAID
    with pytest.raises(LaunchError, match="holds no ComfyUI"):
        host_diff.main([str(tmp_path), str(tmp_path)], None)
