"""The process that counts: ComfyUI's process describes a loaded MODEL, and here its meta model
runs, by shapes alone, at the request's true size. No process that serves imports this.
"""

from __future__ import annotations

import msgspec
import torch

from ..families import plan_or_whole
from ..wire.channel import Channel, ChannelClosed
from ..wire.messages import Count, Counted, CountLike, Uncounted
from ..wire.tree import decode_plain
from .counts import NotCounted
from .dry_device import DEVICE, DeviceCounts, computing_dry
from .dry_run import count_evaluation
from .evaluation_count import Whole
from .fake_mode import QuickFakeMode
from .host_call import called_with, forget_tensors, kernels_that_count, transformer_conds
from .meta_model import rebuilt


def answer_all(channel: Channel) -> None:
    """Answer the requests of ComfyUI's process until it closes the channel."""
    torch.set_num_threads(1)  # nothing is computed here
    try:
        like, _ = channel.receive()
        assert isinstance(like, CountLike)
        from ..worker.preparation import prepare

        prepare(like.comfyui, decode_plain(like.comfy_args))
        while True:
            asked, _ = channel.receive()
            assert isinstance(asked, Count)
            channel.send(answer_count(asked))
    except ChannelClosed:
        return


def answer_count(asked: Count) -> Counted | Uncounted:
    try:
        return Counted(whole=msgspec.msgpack.encode(whole_of(asked.described)))
    except NotCounted as error:
        return Uncounted(why=str(error))


def whole_of(described: bytes) -> Whole:
    """Count one evaluation of the model, cond and latent that ``meta_model.model_description``
    describes. Raises NotCounted.
    """
    mode = QuickFakeMode()
    try:
        with kernels_that_count() as attention:
            with computing_dry(mode, DeviceCounts()):
                meta = rebuilt(described, torch.bfloat16, DEVICE)
                conds = transformer_conds(meta.model, meta.cond, [meta.shape], DEVICE)
                arguments = called_with(meta.model, conds, [meta.shape], DEVICE)
            plan = plan_or_whole(type(meta.model.diffusion_model))
            assert plan is not None, "the UI asks for models that have one"
            return count_evaluation(meta.model, plan, arguments, mode, attention=attention)
    # Whatever a model does with tensors that have no content, its run goes on without counts
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotCounted(f"its copy without weights does not run: {reason}") from error
    finally:
        forget_tensors()
