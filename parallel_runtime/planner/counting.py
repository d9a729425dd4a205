"""Run the process that counts: it takes what ComfyUI's process describes, and answers with counts,
until that closes the channel.
"""

from __future__ import annotations

import msgspec
import torch

from ..wire.channel import Channel, ChannelClosed
from ..wire.messages import Count, Counted, CountLike, Uncounted
from ..wire.segment import TensorRef
from ..wire.tree import decode_tree


def no_tensor(ref: TensorRef) -> torch.Tensor:
    raise msgspec.DecodeError("arguments of ComfyUI hold no tensor")


def run(channel: Channel) -> None:
    torch.set_num_threads(1)  # nothing is computed here
    try:
        like, _ = channel.receive()
        assert isinstance(like, CountLike)
        from ..worker.prepare import prepare

        prepare(like.comfyui, decode_tree(like.comfy_args, no_tensor))
        while True:
            asked, _ = channel.receive()
            assert isinstance(asked, Count)
            channel.send(answer(asked))
    except ChannelClosed:
        return


def answer(asked: Count) -> Counted | Uncounted:
    from .counts import NotCounted
    from .loaded import whole_of  # imports ComfyUI's modules as it runs, so it comes behind ``prepare``

    try:
        return Counted(whole=msgspec.msgpack.encode(whole_of(asked.described)))
    except NotCounted as error:
        return Uncounted(why=str(error))
