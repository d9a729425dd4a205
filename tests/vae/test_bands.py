"""A VAE by bands of rows is the whole VAE: the arithmetic of rows, and ComfyUI's own classes on all
ranks of a sequence in one process.
"""

import math
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.commands.parity import relative_error
from pipemesh.lab.dry_run.device import dry_device
from pipemesh.lab.dry_run.ranks import TURN, joined
from pipemesh.parallel_runtime.comm.bands import Bands, Window
from pipemesh.parallel_runtime.comm.exchange import Stopped
from pipemesh.parallel_runtime.comm.rows import RowExchange
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods import vae_bands
from pipemesh.parallel_runtime.methods.vae_bands import BandsOfRows
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.planner.dry_device import DEVICE
from pipemesh.parallel_runtime.planner.fake_mode import QuickFakeMode
from pipemesh.parallel_runtime.vae_modules import why_not_in_bands
from torch import nn

from ..fixtures import ALL
from ..kit.collectives import World, disagreements, has_an_order
from ..kit.vaes import (
    engine,
    image,
    image_in_windows,
    noise,
    video,
    video_2_2,
    video_by_norms,
    video_by_pixels,
)

BOUND = 1e-5
CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([1, 2])), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 6),
    st.lists(st.integers(1, 9), max_size=4),
)
def test_convolutions_of_bands_with_the_rows_beside_them_are_those_of_all_rows(layers, ranks, more, speeds):
    """Kernels of any width, strides 1 and 2, one after another; ranks of unlike speeds."""
    unit = math.prod(stride for _, stride in layers)
    least = max(1, max(kernel // 2 for kernel, _ in layers))  # a band has what its neighbours ask for
    rows = unit * (ranks * least + more)
    weights = tuple(speeds[:ranks]) if len(speeds) >= ranks and least == 1 else ()
    cut = Bands.of(rows, unit, ranks, weights)
    assert cut is not None and sum(cut.rows) == rows and all(one >= unit for one in cut.rows)
    whole = noise(1, 1, rows).double()
    bands = list(whole.split(cut.rows, -1))
    for kernel, stride in layers:
        window, weight = Window(kernel, stride, kernel // 2), noise(1, 1, kernel).double()
        edges = [0, *accumulate(one.shape[-1] for one in bands)]
        padded = F.pad(whole, (window.padding, window.padding))
        bands = []
        for first, end in pairwise(edges):  # the place of a row in ``padded`` is later by the padding
            below = window.below if end < edges[-1] else window.padding
            given = padded[..., first : end + window.padding + below]
            bands.append(F.conv1d(given, weight, stride=stride))
        whole = F.conv1d(padded, weight, stride=stride)
        assert torch.allclose(torch.cat(bands, -1), whole)
        assert [one.shape[-1] for one in bands] == [*cut.scaled(0, bands[0].shape[-1])]


def test_rows_are_cut_at_whole_units_or_not_at_all_and_none_is_asked_for_that_no_output_reads():
    assert Bands.of(17, 8, 2) is None and Bands.of(8, 8, 2) is None
    assert Bands.of(24, 8, 2) == Bands((16, 8))
    windows = (Window(3, 1, 1), Window(3, 2, 1), Window(3, 2, 0), Window(1))
    assert [one.below for one in windows] == [1, 0, 1, 0]


class Ranks:
    """``model`` on all ranks of a sequence; ``compute`` as the requests ask in turn."""

    def __init__(self, model, ranks, monkeypatch, backend="gloo", speeds=()):
        self.model, self.monkeypatch, self.backend, self.speeds = model, monkeypatch, backend, speeds
        self.layout = Layout(ulysses=ranks)

    def compute(self, asked, prepare=lambda mesh, run, at: None):
        """(rank, place) -> what came of each of ``asked``: (work, samples, unit)."""
        world, outputs = World(self.layout, self.backend, self.monkeypatch, self.speeds), {}

        def work(mesh, run):
            model = deepcopy(self.model)
            method = BandsOfRows(model, mesh.sequence, CPU)
            method.attach()
            for at, (name, samples, unit) in enumerate(asked):
                prepare(mesh, run, at)
                method.begin(Part(1, at))
                arguments = {"samples": samples, "work": name, "unit": unit, "options": {}}
                try:
                    outputs[mesh.rank, at] = method.forward(getattr(model, name), arguments, at + 1)
                except (Stopped, ZeroDivisionError) as error:
                    outputs[mesh.rank, at] = type(error)
            method.end_run()
            method.detach()
            assert not [one for one in model.modules() if {"forward", "_conv_forward"} & vars(one).keys()]

        with torch.inference_mode():
            traces = world.run(work, Random(7).choice)
        assert disagreements(traces, world.members) == []
        assert has_an_order(traces, in_order=self.backend == "nccl")
        return outputs


CARRIED = partial(image, conv3d=True, time_compress=2)
SHUFFLED = partial(engine, "comfy.ldm.hunyuan_video.vae")
REFINED, UNREFINED = (
    partial(engine, "comfy.ldm.hunyuan_video.vae_refiner", refiner_vae=refined) for refined in (True, False)
)
PIXELS, PIXELS_0 = (partial(video_by_pixels, version, timestep_conditioning=False) for version in (2, 0))
CASES = {
    "image": (image, "decode", (2, 4, 13, 9), 1),
    "image to latent": (image, "encode", (1, 3, 28, 20), 4),
    "image in pairs of rows": (lambda: image(batch_norm_latent=True), "decode", (1, 16, 5, 4), 1),
    "image in pairs of rows to latent": (lambda: image(batch_norm_latent=True), "encode", (1, 3, 40, 16), 8),
    "one frame": (video, "decode", (1, 4, 1, 7, 5), 1),
    "video": (video, "decode", (1, 4, 4, 5, 4), 1),
    "one frame to latent": (video, "encode", (1, 3, 1, 40, 24), 8),
    "video to latent": (video, "encode", (1, 3, 9, 40, 24), 8),
    "carried video": (CARRIED, "decode", (1, 4, 3, 7, 5), 1),
    "carried video to latent": (CARRIED, "encode", (1, 3, 5, 28, 12), 4),
    "shuffled image": (SHUFFLED, "decode", (1, 4, 7, 5), 1),
    "shuffled image to latent": (SHUFFLED, "encode", (1, 3, 28, 12), 4),
    "refined video": (REFINED, "decode", (1, 4, 3, 7, 5), 1),
    "refined video to latent": (REFINED, "encode", (1, 3, 5, 28, 12), 4),
    "unrefined frame": (UNREFINED, "decode", (1, 4, 1, 7, 5), 1),
    "unrefined frame to latent": (UNREFINED, "encode", (1, 3, 1, 28, 12), 4),
    "video by norms": (video_by_norms, "decode", (1, 4, 3, 5, 4), 1),
    "frame by norms": (video_by_norms, "decode", (1, 4, 1, 5, 4), 1),
    "video by norms to latent": (video_by_norms, "encode", (1, 3, 9, 40, 16), 8),
    "video by pixels": (PIXELS, "decode", (2, 128, 3, 5, 3), 1),
    "frame by pixels": (PIXELS, "decode", (1, 128, 1, 13, 3), 1),
    "video by pixels to latent": (PIXELS, "encode", (1, 3, 17, 160, 64), 32),
    "frame by pixels to latent": (PIXELS, "encode", (2, 3, 1, 96, 64), 32),
    "first video by pixels": (PIXELS_0, "decode", (1, 128, 2, 7, 3), 1),
    "first video by pixels to latent": (PIXELS_0, "encode", (1, 3, 9, 160, 64), 32),
    "image in windows": (image_in_windows, "decode", (2, 128, 13, 6), 1),
    "image in few windows": (partial(image_in_windows, 32), "decode", (1, 128, 21, 6), 1),
    "image in windows to latent": (image_in_windows, "encode", (2, 3, 80, 48), 16),
    "video 2.2": (video_2_2, "decode", (1, 4, 2, 5, 3), 1),
    "video 2.2 to latent": (video_2_2, "encode", (1, 3, 5, 80, 32), 16),
}


@pytest.mark.parametrize("ranks", [2, 3] if ALL else [3])
@pytest.mark.parametrize("case", CASES)
def test_bands_are_the_whole_picture(case, ranks, monkeypatch):
    make, work, shape, unit = CASES[case]
    model, samples = make(), noise(*shape)
    with torch.inference_mode():
        truth = getattr(model, work)(samples)
    speeds, backend = ((), "gloo") if ranks == 2 else ((100, 40, 70), "nccl")
    asked = [(work, samples, unit)] * 2  # the second time ranks have compared what they compute
    outputs = Ranks(model, ranks, monkeypatch, backend, speeds).compute(asked)
    assert outputs[0, 0].shape == truth.shape
    assert relative_error(outputs[0, 0], truth) <= BOUND and torch.equal(outputs[0, 0], outputs[0, 1])
    assert outputs[1, 0].shape[-2] < truth.shape[-2]


@pytest.mark.parametrize(
    ("work", "shape", "unit"), [("decode", (1, 128, 5, 7, 3), 1), ("encode", (1, 3, 33, 160, 64), 32)]
)
def test_chunks_of_frames_are_as_many_on_ranks_with_unlike_bands(work, shape, unit, monkeypatch):
    model, samples = PIXELS(), noise(*shape)
    with torch.inference_mode():
        truth = getattr(model, work)(samples)
    monkeypatch.setattr(vae_bands, "CHUNK", 2**17)
    outputs = Ranks(model, 3, monkeypatch, speeds=(100, 40, 70)).compute([(work, samples, unit)] * 2)
    assert relative_error(outputs[0, 1], truth) <= BOUND


def test_half_numbers_are_as_near_to_the_truth_as_those_of_one_device(monkeypatch):
    model, samples = image(), noise(1, 4, 12, 8)
    with torch.inference_mode():
        truth = model.decode(samples)
        model, half = model.bfloat16(), samples.bfloat16()
        stock = relative_error(model.decode(half).float(), truth)
    ours = Ranks(model, 2, monkeypatch).compute([("decode", half, 1)])[0, 0]
    assert ours.dtype == torch.bfloat16 and relative_error(ours.float(), truth) <= 1.1 * stock


def test_ranks_that_fail_at_one_place_or_of_which_one_wishes_to_stop_go_on_and_the_next_is_right(monkeypatch):
    model, samples, own = video(), noise(1, 4, 2, 6, 4), RowExchange.beside
    with torch.inference_mode():
        truth = model.decode(samples)

    def fails_once(self, x, window):
        if self._comm.fails:
            self._comm.fails = False
            raise ZeroDivisionError
        return own(self, x, window)

    def prepare(mesh, run, at):
        mesh.sequence.fails = at == 1
        run.wants_stop = lambda: at == 3 and mesh.rank == 0

    monkeypatch.setattr(RowExchange, "beside", fails_once)
    outputs = Ranks(model, 2, monkeypatch).compute([("decode", samples, 1)] * 5, prepare)
    assert outputs[0, 1] is outputs[1, 1] is ZeroDivisionError
    assert outputs[0, 3] is outputs[1, 3] is Stopped
    assert all(relative_error(outputs[0, at], truth) <= BOUND for at in (0, 2, 4))


@pytest.mark.host
def test_what_nobody_has_tried_or_a_node_has_changed_is_not_cut():
    assert {why_not_in_bands(make()) for make, *_ in CASES.values()} == {""}
    circular, patched = image(), image()
    circular.decoder.mid.block_1.conv1.padding_mode = "circular"
    patched.decoder.conv_in.forward = lambda x: x
    for model, why in (
        (circular, "its edges are circular (decoder.mid.block_1.conv1)"),
        (patched, "a node has put code of its own into it (decoder.conv_in.forward)"),
        (nn.Sequential(nn.Linear(1, 1)), "its Linear"),
    ):
        assert why in why_not_in_bands(model)


# -- on a GPU that is not there


def dry(make, shape, dtype, ranks):
    """What a device would be asked for by one decoding of a picture of that size: by stock, or by
    the first of so many ranks.
    """
    from comfy.ldm.modules.diffusionmodules.model import pytorch_attention

    mode = QuickFakeMode()
    with joined(Layout(ulysses=ranks), 0) as mesh:
        with dry_device(mode), DEVICE:
            torch.set_default_dtype(dtype)
            try:
                model, samples = make(), torch.empty(shape)
            finally:
                torch.set_default_dtype(torch.float32)
        for module in model.modules():
            if hasattr(module, "optimized_attention"):
                module.optimized_attention = pytorch_attention  # as on GPUs
        with dry_device(mode) as counts, torch.inference_mode():
            counts.memory.leave_out((*model.parameters(), *model.buffers()))
            if ranks == 1:
                model.decode(samples)
                return counts
            mesh.sequence.device = DEVICE
            method = BandsOfRows(model, mesh.sequence, DEVICE)
            method.attach()
            for number in (1, 2):  # the second time ranks have compared what they compute
                counts.waits.clear()
                counts.flops = 0
                method.begin(Part(1, 0))
                arguments = {"samples": samples, "unit": 1, "options": {}}
                method.forward(model.decode, arguments, TURN * number)
        return counts


def image_in_windows_of_full_size():
    from comfy.ldm.mage_flow.vae import MageVAE

    return MageVAE().eval()


LARGE_IMAGE = {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 1}
LARGE_VIDEO = {"dim": 96, "z_dim": 16, "num_res_blocks": 1}
FULL = {
    "image in windows": (image_in_windows_of_full_size, (1, 128, 64, 64), torch.bfloat16),
    "image": (partial(image, nn.Module.eval, **LARGE_IMAGE), (1, 4, 128, 128), torch.bfloat16),
    "video": (partial(video, nn.Module.eval, **LARGE_VIDEO), (1, 16, 2, 90, 160), torch.float32),
}


@pytest.mark.parametrize("case", FULL)
def test_a_rank_takes_its_part_of_memory_and_work_and_waits_for_no_device(case):
    alone, ours = (dry(*FULL[case], ranks) for ranks in (1, 2))
    assert ours.memory.peak <= 0.6 * alone.memory.peak and ours.flops <= 0.52 * alone.flops
    assert all(count <= alone.waits.get(wait, 0) for wait, count in ours.waits.items())
