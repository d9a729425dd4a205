"""What nodes set among a MODEL's options reaches the transformer in the ranks, or is refused."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import comfy.ldm.flux.model as flux
import comfy.sample
import comfy.samplers
import comfy_extras.nodes_model_patch
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.crossing.options import crossing_options
from pipemesh.parallel_runtime.crossing.readers import OptionReaders, words_of_class
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families.catalogue import SAMPLES
from pipemesh.parallel_runtime.layout import Layout

from ..fixtures import COMFYUI
from ..kit.bounds import assert_same
from ..kit.in_groups import in_groups
from ..kit.models import conditioning, run

pytestmark = pytest.mark.host


def with_option(model, **options):
    clone = model.clone()
    clone.model_options["transformer_options"].update(options)
    return clone


def their_function(*_args):
    raise AssertionError("nobody calls it")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            object(),
            (
                r"The option img_slice \(builtins\.object\) of this MODEL is no plain data and cannot be sent"
                r" to the pool, where Flux may read it: remove the node"
            ),
        ),
        ({"of": [1, torch.device("cpu")]}, r"The option img_slice/of/1 \(torch\.device\) of this MODEL"),
        (their_function, r"The option img_slice \(.*\.their_function\) of this MODEL"),
        (
            frozenset((1, their_function)),
            r"The option an item of img_slice \(.*\.their_function\) of this MODEL",
        ),
    ],
)
def test_an_option_that_no_rank_can_read_is_refused_by_name_and_the_pool_goes_on(pair, value, says):
    stock, parallel = pair
    with pytest.raises(Refused, match=says):
        run(with_option(parallel, img_slice=value))
    plain = {"plain": [1, 2.0, torch.zeros(1)], "blocks": frozenset((3, 1)), "names": {"a", "b"}}
    assert relative_error(run(with_option(parallel, **plain)), run(stock)) <= BOUND


# -- objects that samplers leave


class TheirState:
    """What a sampler hands to its own code in the UI."""

    def __init__(self, weight):
        self.weight = weight


def sampled(model, sampler):
    noise = torch.randn(1, 16, 8, 10, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        return comfy.sample.sample_custom(
            model,
            noise,
            4.0,
            comfy.samplers.KSAMPLER(sampler),
            torch.linspace(1, 0, 4),
            conditioning(1, 13),
            conditioning(2, 7),
            torch.zeros_like(noise),
            disable_pbar=True,
        )


def leaving(option):
    """A sampler that leaves an object among the options, which code in the UI reads."""

    def their_sampler(denoise, x, sigmas, extra_args=None, callback=None, disable=None):
        options = extra_args["model_options"]["transformer_options"]
        for step in range(len(sigmas) - 1):
            options[option] = {"state": TheirState(1.0 + step), "of": their_sampler}
            x = x + (x - denoise(x, sigmas[step].expand(len(x)), **extra_args)) * (
                sigmas[step + 1] - sigmas[step]
            )
        return x

    return their_sampler


def guided_by(option):
    """A wrapper around the transformer that goes by what the sampler has left."""

    def wrapper(executor, *args, **kwargs):
        state = args[-1][option]["state"]
        return executor(*args, **kwargs) * state.weight

    return wrapper


def test_an_object_that_a_sampler_leaves_for_code_in_comfyui_stays_there_and_is_read_there():
    stock, other = stock_model(5), stock_model(5)
    for model in (stock, other):
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "theirs", guided_by("ExtraOptions"))
    ours, pool = in_groups(Layout(cfg=2), other)
    assert_same(lambda model: sampled(model, leaving("ExtraOptions")), ours, stock)
    assert len(pool.asked) == 6


def wrapped(model):
    def their_wrapper(executor, *args, **kwargs):
        args[-1]["block_index"] = TheirState(1.0)
        return executor(*args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "theirs", their_wrapper)
    return model


@pytest.mark.parametrize(
    ("sampler", "change", "move"),
    [
        (leaving("block_index"), lambda model: model, r"take another than the sampler .*their_sampler, which set it"),
        (leaving("of_theirs"), wrapped, r"take another than the sampler .*their_sampler or .*their_wrapper, which set it"),
        (comfy.samplers.k_diffusion_sampling.sample_euler, wrapped, r"take another than [^ ]*their_wrapper, which"),
        (leaving("of_theirs"), lambda model: with_option(model, block_index=TheirState(1.0)), "remove the node that sets it"),
    ],
)  # fmt: skip
def test_an_object_that_a_rank_might_read_is_refused_with_the_name_of_what_has_set_it(sampler, change, move):
    ours, _ = in_groups(Layout(cfg=2), change(stock_model(5)))
    with pytest.raises(Refused, match=rf"The option block_index.*where Flux may read it: {move}"):
        sampled(ours, sampler)


@pytest.fixture
def their_patch(tmp_path, monkeypatch):
    """A function of a node pack."""
    (tmp_path / "their_pack.py").write_text("def patch(out, options): return out * options[options['key']]")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("their_pack").patch
    del sys.modules["their_pack"]


def test_code_of_nodes_that_ranks_run_may_ask_for_an_option_unless_it_is_comfyuis_and_has_not_its_name(
    their_patch,
):
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
    found = {
        (file.name, key) for file in files for key in ASKED_FOR.findall(file.read_text(encoding="utf-8"))
    }
    assert found == {("attention.py", "k")}, "each option that there is"
    assert {"patches", "keyframe_idxs"} <= words_of_class("comfy.ldm.lightricks.av_model:LTXAVModel"), (
        "parameters too"
    )


@pytest.mark.parametrize("name", ["uuids", "easycache", "context_window", "prefetch_dynamic_vbars"])
def test_comfyuis_own_objects_that_only_its_process_reads_refuse_nothing(name):
    assert name not in crossing_options({name: object(), "sigmas": 1.0})


def test_ltx_spatio_temporal_guidance_computes_what_stock_computes(client):
    from comfy_extras import nodes_lt

    if not hasattr(nodes_lt, "LTXVSpatioTemporalGuidance"):
        pytest.skip("this ComfyUI does not have the node")
    with_audio = next(name for name, one in SAMPLES.items() if one.form.config_class == "LTXAV")
    case = Case(with_audio, "ulysses2", "odd", 4, 1.0, False, "euler")

    def guided(model):
        return nodes_lt.LTXVSpatioTemporalGuidance.execute(model, 1.0, "0", 0.0, 1.0).result[0]

    stock = stock_model(case.heads, family=case.family)
    truth = sample(guided(stock), case)
    assert relative_error(truth, sample(stock, case)) > 0.1, "the node does nothing"
    assert (
        relative_error(sample(guided(parallelize(stock, client, holds_ui_device=False)), case), truth)
        <= BOUND
    )
