"""A stock transformer with what nodes attached to it, evaluated by all ranks of a sequence in one
process: everything crosses the border's trees, and each rank has a model and patches of its own.
"""

from copy import deepcopy
from random import Random
from types import SimpleNamespace

import torch
from pipemesh.parallel_runtime.crossing.block_code import IN_BLOCK, InBlockPatches, put_patches
from pipemesh.parallel_runtime.crossing.named_code import options_made
from pipemesh.parallel_runtime.crossing.options import crossing_options
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.forward import forward_name
from pipemesh.parallel_runtime.methods.usp import SequenceParallel
from pipemesh.parallel_runtime.weights.weight_patches import put_object
from pipemesh.parallel_runtime.wire.segment import TensorRef, dtype_name
from pipemesh.parallel_runtime.wire.tree import decode_tree, encode_tree

from .collectives import World

CPU = torch.device("cpu")


def across(tree):
    """What of a tree a rank gets."""
    tensors = []

    def put(_path, tensor):
        tensors.append(tensor.detach().clone())
        return TensorRef(len(tensors) - 1, tuple(tensor.shape), dtype_name(tensor.dtype))

    data = encode_tree(tree, put)
    return decode_tree(data, lambda ref: tensors[ref.offset])


class Crossed:
    """The patches of a MODEL as one rank gets them; ``arguments`` of an evaluation likewise."""

    def __init__(self, patcher, transformer=None):
        self.model = patcher.model
        own = patcher.model.diffusion_model
        self.sent = InBlockPatches(
            own, plan_for(type(own)), patcher.model_options["transformer_options"], patcher.object_patches
        )
        objects = across(self.sent.objects)
        holder = patcher.model if transformer is None else SimpleNamespace(diffusion_model=transformer)
        self.patches, self.methods, self.state = (
            put_patches(holder, objects[IN_BLOCK], CPU) if objects else ([], {}, [])
        )

    def arguments(self, asked):
        options = across(crossing_options(asked["transformer_options"], self.sent))
        return {**asked, "transformer_options": options_made(options, self.patches)}


def evaluated_in_ranks(layout, patcher, asked, monkeypatch, speeds=()):
    """Returns the first rank's outputs of the evaluations ``asked``. ``speeds`` of the ranks, as a
    mesh has them.
    """
    world, outputs = World(layout, "gloo", monkeypatch, speeds), []

    def work(mesh, _run):
        transformer = deepcopy(patcher.model.diffusion_model)
        crossed = Crossed(patcher, transformer)
        for key, method in crossed.methods.items():
            put_object(SimpleNamespace(diffusion_model=transformer), key, method, CPU)
        method = SequenceParallel(transformer, plan_for(type(transformer)), mesh.sequence)
        method.attach()
        for number, one in enumerate(asked):
            out = method.forward(
                getattr(transformer, forward_name(transformer)), crossed.arguments(one), number + 1
            )
            if mesh.rank == 0:
                outputs.append(out)
        method.end_run()

    with torch.inference_mode():
        world.run(work, Random(7).choice)
    return outputs
