"""What nodes set among a MODEL's options reaches the transformer in the ranks, or is refused."""

import importlib
import re
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import comfy.ldm.flux.model as flux
import comfy.sample
import comfy.samplers
import comfy_extras.nodes_model_patch
import pytest
import torch
from comfy.k_diffusion.sampling import sample_euler
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from pipemesh.lab.commands.parity import Case, sample, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.crossing.options import crossing_options
from pipemesh.parallel_runtime.crossing.readers import OptionReaders, words_of_class
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families.catalogue import SAMPLES
from pipemesh.parallel_runtime.layout import Layout

from ..fixtures import COMFYUI
from ..kit.bounds import assert_honoured, assert_same
from ..kit.in_groups import in_groups
from ..kit.models import conditioning
from ..kit.patched import cloned, with_option

pytestmark = pytest.mark.host


def sampled_by(model, sampler):
    noise = torch.randn(1, 16, 8, 10, generator=torch.Generator().manual_seed(2))
    chosen, sigmas = comfy.samplers.KSAMPLER(sampler), torch.linspace(1, 0, 4)
    prompts = conditioning(1, 13), conditioning(2, 7)
    with torch.inference_mode():
        return comfy.sample.sample_custom(
            model, noise, 4.0, chosen, sigmas, *prompts, torch.zeros_like(noise), disable_pbar=True
        )


def leaving(option):
    """A sampler that leaves an object among the options, which code in the UI reads."""

    def their_sampler(denoise, x, sigmas, extra_args=None, callback=None, disable=None):
        options = extra_args["model_options"]["transformer_options"]
        for step, (sigma, following) in enumerate(pairwise(sigmas)):
            options[option] = {"state": SimpleNamespace(weight=1.0 + step), "of": their_sampler}
            x = x + (x - denoise(x, sigma.expand(len(x)), **extra_args)) * (following - sigma)
        return x

    return their_sampler


def with_wrapper(model, wrapper):
    return cloned(model, "add_wrapper_with_key", WrappersMP.APPLY_MODEL, "theirs", wrapper)


def test_an_object_that_a_sampler_leaves_for_code_in_comfyui_stays_there_and_is_read_there():
    def guided(executor, *args, **kwargs):
        return executor(*args, **kwargs) * args[-1]["ExtraOptions"]["state"].weight

    ours, pool = in_groups(Layout(cfg=2), stock_model(5))
    models = (with_wrapper(model, guided) for model in (ours, stock_model(5)))
    assert_same(partial(sampled_by, sampler=leaving("ExtraOptions")), *models)
    assert len(pool.asked) == 6


def wrapped(model):
    def their_wrapper(executor, *args, **kwargs):
        args[-1]["block_index"] = object()
        return executor(*args, **kwargs)

    return with_wrapper(model, their_wrapper)


def with_block_index(model):
    return with_option(model, block_index=object())


@pytest.mark.parametrize(
    ("sampler", "change", "move"),
    [
        (leaving("block_index"), ModelPatcher.clone, r"take another than the sampler .*their_sampler, which"),
        (
            leaving("theirs"),
            wrapped,
            r"take another than the sampler .*their_sampler or .*their_wrapper, which",
        ),
        (sample_euler, wrapped, r"take another than [^ ]*their_wrapper, which"),
        (leaving("theirs"), with_block_index, "remove the node that sets it"),
    ],
)
def test_an_object_that_a_rank_might_read_is_refused_with_the_name_of_what_has_set_it(sampler, change, move):
    ours, _ = in_groups(Layout(cfg=2), change(stock_model(5)))
    with pytest.raises(Refused, match=rf"The option block_index.*where Flux may read it: {move}"):
        sampled_by(ours, sampler)


@pytest.fixture
def their_patch(tmp_path, monkeypatch):
    """A function of a node pack."""
    (tmp_path / "their_pack.py").write_text("def patch(out, options): return out * options[options['key']]")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("their_pack").patch
    del sys.modules["their_pack"]


def test_code_of_nodes_may_ask_for_an_option_unless_it_is_comfyuis_and_has_not_its_name(their_patch):
    """The first stands in its file, without a number, the second in a file that its file names."""
    options = ("model_patch7", "x_ref_attn_map", "ExtraOptions")
    of_comfyui = comfy_extras.nodes_model_patch.ZImageControlPatch
    for code, may_ask in (
        ([torch.nn.Linear], ()),
        ([of_comfyui, torch.nn.Linear], options[:2]),
        ([of_comfyui, their_patch], options),
    ):
        readers = OptionReaders(flux.Flux, code)
        assert [option for option in options if readers.of(option)] == [*may_ask], code


def test_an_option_whose_name_is_no_text_stays_unless_code_of_nodes_may_ask_for_it(their_patch):
    held = SimpleNamespace(readers=OptionReaders(flux.Flux, []), numbers={}, kept=None)
    assert crossing_options({("a", 1): 2, "plain": 3}, held).items() >= {"plain": 3}.items()
    assert ("a", 1) not in crossing_options({("a", 1): 2}, held)
    held.readers = OptionReaders(flux.Flux, [their_patch])
    with pytest.raises(Refused, match=r"The option a key of the tree .*where their_pack\.patch may read it"):
        crossing_options({("a", 1): 2}, held)


def test_of_a_class_that_comfyuis_files_do_not_have_nothing_is_known():
    kind = type("Theirs", (flux.Flux,), {"__module__": "theirs"})
    assert OptionReaders(kind, []).of("ExtraOptions") == "Theirs"


ASKED_FOR = re.compile(r"transformer_options(?:\[|\.(?:get|pop|setdefault)\()\s*([^'\"\s][^\],)]*)")


def test_comfyuis_transformers_ask_for_options_by_names_that_stand_in_their_code():
    files = Path(COMFYUI, "comfy", "ldm").rglob("*.py")
    found = {(file.name, key) for file in files for key in ASKED_FOR.findall(file.read_text("utf-8"))}
    assert found == {("attention.py", "k")}, "each option that there is"
    words = words_of_class("comfy.ldm.lightricks.av_model:LTXAVModel")
    assert {"patches", "keyframe_idxs"} <= words, "parameters too"


@pytest.mark.parametrize("name", ["uuids", "easycache", "context_window", "prefetch_dynamic_vbars"])
def test_comfyuis_own_objects_that_only_its_process_reads_refuse_nothing(name):
    assert name not in crossing_options({name: object(), "sigmas": 1.0})


def test_ltx_spatio_temporal_guidance_computes_what_stock_computes(client):
    nodes_lt = pytest.importorskip("comfy_extras.nodes_lt")
    if not hasattr(nodes_lt, "LTXVSpatioTemporalGuidance"):
        pytest.skip("this ComfyUI does not have the node")
    with_audio = next(name for name, one in SAMPLES.items() if one.form.config_class == "LTXAV")
    stock = stock_model(4, family=with_audio)
    assert_honoured(
        lambda model: nodes_lt.LTXVSpatioTemporalGuidance.execute(model, 1.0, "0", 0.0, 1.0).result[0],
        partial(sample, case=Case(with_audio, "ulysses2", "odd", 4, 1.0, False, "euler")),
        parallelize(stock, client, holds_ui_device=False),
        stock,
        0.1,
    )
