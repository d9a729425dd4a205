"""A rank without a pool: ``rank_main.py ROOT COMFYUI STORE RANK ULYSSES RING TASK`` joins the
others over gloo, prints what it saw.
"""

import json
import os
import sys

_, root, comfyui, store, rank, ulysses, ring, task = sys.argv
sys.path[0] = root + "/pool"
from package import register_package  # noqa: E402

register_package(root)
sys.path[0] = comfyui

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from pipemesh.lab.bench.forwards import Forwards, StandinRing, standin  # noqa: E402
from pipemesh.parallel_runtime.comm.exchange import Exchange  # noqa: E402
from pipemesh.parallel_runtime.comm.link_speed import link_speeds  # noqa: E402
from pipemesh.parallel_runtime.comm.mesh import connect  # noqa: E402
from pipemesh.parallel_runtime.comm.ring import Ring  # noqa: E402
from pipemesh.parallel_runtime.comm.shares import Shares  # noqa: E402
from pipemesh.parallel_runtime.comm.traffic import Unlike  # noqa: E402
from pipemesh.parallel_runtime.families.plan import Blocks, Leave, TokenPlan  # noqa: E402
from pipemesh.parallel_runtime.layout import Layout  # noqa: E402
from pipemesh.parallel_runtime.methods.usp import SequenceParallel  # noqa: E402
from pipemesh.parallel_runtime.patches import Part  # noqa: E402

torch.set_num_threads(1)


def calls(layout, comm):
    """The collective calls and bytes of one evaluation, by the real groups and by their
    stand-ins.
    """
    seen = []

    def watch(cls, name, describe):
        real = getattr(cls, name)

        def call(self, *args):
            seen.append([name, *describe(*args)])
            return real(self, *args)

        setattr(cls, name, call)

    watch(
        Exchange,
        "_pass",
        lambda places, _wish: (
            places.come.buffer.numel(),
            places.to.buffer.numel(),
            places.come.sizes,
            places.to.sizes,
        ),
    )
    for cls in (Ring, StandinRing):
        watch(cls, "_pass_on", lambda current, arriving: (current.numel(), arriving.numel()))
    forwards, made = Forwards(192), {}
    for name, groups in (("real", comm), ("standin", standin(layout, comm.world.rank))):
        forwards.through(groups)
        made[name] = {"calls": list(seen), "sent_bytes": groups.traffic.sent_bytes.total()}
        seen.clear()
    return made


class Grouped(torch.nn.Module):
    """A block whose queries share keys and values: 6 heads of queries, 2 of keys and values."""

    def forward(self, x, transformer_options):
        from comfy.ldm.modules.attention import optimized_attention

        return x + optimized_attention(
            x, x[..., :32], x[..., 32:64], 6, enable_gqa=True, transformer_options=transformer_options
        )


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Grouped(), Grouped()])
        self.last = torch.nn.Linear(96, 8)

    def forward(self, x, transformer_options):
        for block in self.blocks:
            x = block(x, transformer_options=transformer_options)
        return self.last(x)


PLAN = TokenPlan(
    streams=("x",),
    blocks=(Blocks(path="blocks", tokens={"x": ("x",)}),),
    leave=Leave(path="last", stream="x"),
)


def unlike(layout, comm):
    """What comes of evaluations, in some of which the last rank has other tokens or shares: how far
    from the whole the output is, or the error.
    """
    torch.manual_seed(1)
    model, x = Model(), torch.randn(2, 15, 96)
    alone = model(x[:, :13], {})
    method = SequenceParallel(model, PLAN, comm)
    method.attach()
    is_last, own, said = comm.world.rank == layout.world_size - 1, comm.shares, []
    others = Shares((*[1] * (layout.world_size - 1), 3))
    asked = [9, 15, others, 13, 13, 9, 13, 13, 15, 13]
    for number, one in enumerate(asked):
        tokens, shares = (13, one) if one is others else (one, own)
        comm.join(1, comm.ulysses, comm.ring, comm.world, shares if is_last else own)
        comm.use(1)
        method.begin(Part(1, number))
        try:
            arguments = {"x": x[:, : tokens if is_last else 13], "transformer_options": {}}
            together = method.forward(model, arguments, number + 1)
            said.append(float((together - alone).abs().max()) if comm.world.rank == 0 else 0.0)
        except Unlike as unlike:
            said.append(str(unlike.error))
    return said


def links(_layout, comm):
    """What comes of rows for each neighbour of a pair, and the speeds of links."""
    own = 10 * int(rank) + torch.arange(2)
    came = comm.world.swap(own[:, None].expand(2, 3).contiguous())
    return {"came": came.tolist(), "links": link_speeds(mesh, long=1 << 12)}


layout = Layout(ulysses=int(ulysses), ring=int(ring))
dist.init_process_group(
    "gloo", store=dist.FileStore(store, layout.world_size), rank=int(rank), world_size=layout.world_size
)
mesh = connect(layout, int(rank), via_cpu=False, wants_stop=lambda: False)
tasks = {"calls": calls, "unlike": unlike, "links": links}
with torch.inference_mode():
    print(json.dumps(tasks[task](layout, mesh.sequence)), flush=True)
dist.barrier()
os._exit(0)  # as ranks do
