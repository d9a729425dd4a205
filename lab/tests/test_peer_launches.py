"""What others' code launches for an evaluation of FLUX, by which their published times are
predicted: diffusers' model, with an exchange of the operations that xDiT's has (its usp.py of
November 2024). ``pip install --no-deps diffusers==0.31.0`` into the python that ``launcher host``
prints; without it the counts are not looked at.
"""

import pytest
import torch
import torch.nn.functional as F
from pipemesh.lab.tests.test_plan_published import XDIT_LAUNCHES
from pipemesh.parallel_runtime.planner.dry_device import DEVICE, DeviceCounts, computing_dry
from pipemesh.parallel_runtime.planner.fake_mode import QuickFakeMode

TEXT, IMAGE = 512, 4096


class Exchanged(DeviceCounts):
    """Counts attentions whose q, k and v are exchanged for the heads of one of ``ranks``, and their
    output back: each laid out anew, sent by one message, and laid out for what follows.
    """

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks

    def attend(self, q, k, v, **options):
        heads = [self._moved(tensor, 1, 2) for tensor in (q, k, v)]
        return self._moved(SDPA(*heads, **options), 2, 1)

    def _moved(self, tensor, cut, joined):
        """(B, H, L, D), in parts along ``cut``; those that come lie along ``joined``."""
        parts = torch.stack(tensor.chunk(self.ranks, cut))
        self.launches += 1
        return torch.cat(parts.unbind(), joined)


SDPA = F.scaled_dot_product_attention


@pytest.mark.parametrize("ranks", XDIT_LAUNCHES)
def test_diffusers_with_an_exchange_of_three_operations_launches_what_predictions_take(ranks, monkeypatch):
    models = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    mode, counts = QuickFakeMode(), Exchanged(ranks)
    with computing_dry(mode, DeviceCounts()):
        torch.set_default_dtype(torch.bfloat16)
        try:
            with DEVICE:
                model = models.FluxTransformer2DModel(guidance_embeds=True)
        finally:
            torch.set_default_dtype(torch.float32)
        made = {
            "hidden_states": (1, IMAGE // ranks, 64),
            "encoder_hidden_states": (1, TEXT // ranks, 4096),
            "pooled_projections": (1, 768),
            "timestep": (1,),
            "guidance": (1,),
            "img_ids": (IMAGE // ranks, 3),
            "txt_ids": (TEXT // ranks, 3),
        }
        arguments = {
            name: torch.zeros(*shape, dtype=torch.bfloat16, device=DEVICE) for name, shape in made.items()
        }
    if ranks > 1:
        monkeypatch.setattr(F, "scaled_dot_product_attention", counts.attend)
    with computing_dry(mode, counts):
        model(**arguments, return_dict=False)
    assert counts.launches == XDIT_LAUNCHES[ranks]
