"""A pool whose groups are all in this process: each computes what it is asked for at once, with
the stock model's own forward.
"""

from contextlib import nullcontext
from functools import partial
from itertools import count

import torch
from pipemesh.lab.bench.forwards import standin
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.crossing.kept_tokens import KeptTokens, Sharers
from pipemesh.parallel_runtime.crossing.named_code import options_made
from pipemesh.parallel_runtime.crossing.rows import latents_of
from pipemesh.parallel_runtime.families import plan_or_whole
from pipemesh.parallel_runtime.forward import forward_name
from pipemesh.parallel_runtime.layout import ALONE, Layout
from pipemesh.parallel_runtime.methods.usp import SequenceParallel
from pipemesh.parallel_runtime.methods.whole_forward import WholeForward
from pipemesh.parallel_runtime.weights.fp32_forward import arguments_in_fp32, computing_in_fp32
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.messages import Done, Forward, Memory
from pipemesh.parallel_runtime.wire.segment import TensorRef, aligned, dtype_name
from pipemesh.parallel_runtime.wire.tree import decode_tree, encode_tree
from pipemesh.pool.verdict import Facts


class GroupsHere:
    """``asked``: of every Forward, its ranks, the rows of its latent and of its prompt's tokens."""

    def __init__(self, layout, stock):
        self.layout, self.model = layout, stock.model.diffusion_model
        self.arena, self.idle = Arena(), True
        self.memory = [Memory(1 << 40, 1 << 40, 0)] * layout.world_size
        self.facts = Facts(("cpu",) * layout.world_size, stages=layout.pipefusion)
        self.next_request = partial(next, count(1))
        self.asked, self.answers, self.kept = [], {}, {}

    def live(self):
        return self

    def ensure(self, interrupted):
        return self

    def settle(self, interrupted):
        pass

    def abandon(self):
        self.answers.clear()

    def call_back(self):
        pass

    def ask(self, request, fds=(), interrupted=lambda: False):
        return [Done(request=request.request, memory=self.memory[0]) for _ in self.facts.everyone]

    def submit(self, request, group):
        assert group == (
            (0,)
            if request.width == ALONE
            else self.layout.members(
                group[0] * self.layout.groups // self.layout.world_size // request.width, request.width
            )
        )
        replies = {rank: Done(request=request.request, memory=self.memory[0]) for rank in group}
        if isinstance(request, Forward):
            arguments = decode_tree(request.arguments, lambda ref: self.arena.segment.tensor(ref).clone())
            options = options_made(arguments["transformer_options"], [])
            if (kept := plan_or_whole(type(self.model)).kept) is not None:
                sharers = Sharers(lambda: 1, lambda wish: wish, 1, 1)
                own = KeptTokens(kept, torch.device("cpu"), sharers)
                options = self.kept.setdefault((request.part.run, group), own).put(options, request.part.run)
            arguments["transformer_options"] = options
            if request.in_fp32:
                arguments = arguments_in_fp32(arguments, ())
            prefix = plan_or_whole(type(self.model)).prefix
            forget = "" if prefix is None else prefix.forget
            with computing_in_fp32(self.model, forget) if request.in_fp32 else nullcontext():
                output = self._computed(arguments, request.part, group)
            text = arguments.get("context")
            tokens = text.shape[1] if isinstance(text, torch.Tensor) and text.ndim > 1 else 0
            self.asked.append((group, latents_of(arguments)[0].shape[0], tokens))
            offset = request.out.offset

            def put(_path, tensor):
                nonlocal offset
                ref = TensorRef(offset, tuple(tensor.shape), dtype_name(tensor.dtype))
                offset += aligned(ref.nbytes)
                self.arena.segment.put(ref.offset, tensor)
                return ref

            replies[group[0]] = Done(
                request=request.request, memory=self.memory[0], output=encode_tree(output, put)
            )
        self.answers[request.request] = replies

    def _computed(self, arguments, part, _group):
        plan, comm = plan_or_whole(type(self.model)), standin(Layout(), 0)
        method = (
            SequenceParallel(self.model, plan, comm)
            if plan.blocks
            else WholeForward(self.model, comm, is_tried=plan.is_tried)
        )
        method.attach()
        method.begin(part)
        try:
            with torch.inference_mode():
                return method.forward(
                    partial(getattr(type(self.model), forward_name(self.model)), self.model), arguments, 1
                )
        finally:
            method.detach()

    def collect(self, number, interrupted):
        return self.answers.pop(number)


def in_groups(layout, stock, patching=None, made=GroupsHere, ahead=None, **options):
    """The MODEL on such a pool, and the pool."""
    pool = made(layout, stock)
    remote = RemotePool(pool, **options)
    return parallelize(stock, remote, 0.0, patching, ahead=ahead), pool


def beside_stock(make, layout, **options):
    """A stock MODEL, another on such a pool, and the pool."""
    return make(), *in_groups(layout, make(), **options)
