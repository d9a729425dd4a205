"""Count what one evaluation of a loaded MODEL costs at a request's true size, without computing it:
its twin runs dry. In the process that counts, never in one that serves.
"""

from __future__ import annotations

import torch

from ..families import plan_or_whole
from .counts import NotCounted
from .dry_device import DEVICE, dry_device
from .dry_run import counted
from .figures import Whole
from .quick_fake import QuickFakeMode
from .released_model import called_with, conds_of, forget_tensors, kernels_that_count
from .twin import rebuilt


def whole_of(described: bytes) -> Whole:
    """Count one evaluation of the model, cond and latent that ``twin.described`` has described.
    Raises NotCounted.
    """
    mode = QuickFakeMode()
    try:
        with kernels_that_count() as attention:
            with dry_device(mode):
                twin = rebuilt(described, torch.bfloat16, DEVICE)
                conds = conds_of(twin.model, twin.cond, [twin.shape], DEVICE)
                arguments = called_with(twin.model, conds, [twin.shape], DEVICE)
            plan = plan_or_whole(type(twin.model.diffusion_model))
            assert plan is not None, "the UI asks for models that have one"
            return counted(twin.model, plan, arguments, mode, attention=attention)
    except (
        Exception
    ) as error:  # whatever a model does with tensors that have no content, its run goes on without counts
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotCounted(f"its twin without weights does not run: {reason}") from error
    finally:
        forget_tensors()
