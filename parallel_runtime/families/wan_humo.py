"""HuMo (comfy/ldm/wan/model.py:HumoWanModel@0.30.0): Wan whose blocks let each token attend to the
sound of its own frame, 16 sound tokens. A reference's tokens come last, and have silence.
"""

from functools import partial
from typing import Any

import torch

from . import wan
from .plan import Frames, Insert
from .sample import sample

SOUND = Insert(path="blocks.*.audio_cross_attn_wrapper", frames=Frames(stream="img", each={"audio": 16}))
PLAN = wan.with_insert(SOUND, local=("cross_attn", "audio_cross_attn_wrapper"))


def sound(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the HuMo node: a sound encoder's output for each frame, and a reference."""
    generator = torch.Generator().manual_seed(11)
    _, channels, frames, height, width = latent.shape
    return {
        "audio_embed": torch.randn(1, frames, 8, 5, 1280, generator=generator),
        "reference_latents": [torch.randn(1, channels, 1, height, width, generator=generator)],
    }


CONFIG = partial(wan.config, model_type="humo")
# Beside the latent's channels, a reference's and its mask's
RELEASED = wan.released("humo-17b", extent=(832, 480, 97), in_dim=36)
INPUTS = {"latents": {"even": (1, 16, 3, 8, 6), "odd": (1, 16, 2, 6, 6)}, "prompt_extras": sound}
SAMPLES = (sample("wan-humo", "WAN21_HuMo", CONFIG, RELEASED, **INPUTS),)
