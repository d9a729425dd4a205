"""The workflow templates are tried with stand-ins: small by one rule, of the shapes that the files
have, parallel before each sampler.
"""

from functools import partial

import pytest
import torch
from pipemesh.lab.commands.templates import line_of, pool_inputs
from pipemesh.lab.templates import cut, files, surgery
from pipemesh.lab.templates.run import Outcome
from pipemesh.launcher.errors import LaunchError
from pipemesh.parallel_runtime.families.catalogue import NOT_HERE
from pipemesh.pool.trial.rounding import relative_error

INFO = {
    "Loader": {"input": {"required": {"unet_name": ["COMBO", {}]}}, "output": ["MODEL"]},
    "Patch": {"input": {"required": {"model": ["MODEL", {}]}}, "output": ["MODEL"]},
    "Scheduler": {
        "input": {"required": {"model": ["MODEL", {}], "steps": ["INT", {}]}},
        "output": ["SIGMAS"],
    },
    "Guider": {"input": {"required": {"model": ["MODEL", {}]}}, "output": ["GUIDER"]},
    "Custom": {
        "input": {"required": {"guider": ["GUIDER", {}], "sigmas": ["SIGMAS", {}]}},
        "output": ["STRING", "LATENT"],
    },
    "KSampler": {
        "input": {"required": {"model": ["MODEL", {}], "latent": ["LATENT", {}]}},
        "output": ["LATENT"],
    },
    "TwoModels": {
        "input": {
            "required": {"model": ["MODEL", {}], "positive": ["CONDITIONING", {}]},
            "optional": {"model_negative": ["MODEL", {}], "negative": ["CONDITIONING", {}]},
        },
        "output": ["GUIDER"],
    },
    "Guide": {"input": {"required": {"frame_idx": ["INT", {"min": -9999}]}}, "output": ["LATENT"]},
    "Empty": {
        "input": {"required": {"width": ["INT", {}]}, "optional": {"size": ["STRING", {}]}},
        "output": ["LATENT"],
    },
    "Number": {"input": {"required": {"value": ["INT", {}]}}, "output": ["INT"]},
    "Decode": {"input": {"required": {"samples": ["LATENT", {}]}}, "output": ["IMAGE"]},
}


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


GRAPH = {
    "model": node("Loader", unet_name="a.safetensors"),
    "patch": node("Patch", model=["model", 0]),
    "sigmas": node("Scheduler", model=["patch", 0], steps=20),
    "guider": node("Guider", model=["patch", 0]),
    "first": node("Custom", guider=["guider", 0], sigmas=["sigmas", 0]),
    "second": node("KSampler", model=["model", 0], latent=["first", 1]),
    "decode": node("Decode", samples=["second", 0]),
}


def test_sizes_that_are_cut_stay_as_they_are_and_landscapes_stay_landscapes():
    for rule, most in ((cut.cut_side, 10000), (cut.cut_frames, 500)):
        assert all(rule(rule(value)) == rule(value) for value in range(most))
    assert cut.cut_side(1280) > cut.cut_side(720) and cut.cut_side(1024) == cut.cut_side(1328)


def test_steps_cut_in_two_parts_keep_both_and_their_order():
    cuts = [cut.cut_steps(steps) for steps in range(10001)]
    assert cuts == sorted(cuts) and all(
        0 < cut.cut_steps(steps // 2) < cut.cut_steps(steps) for steps in range(2, 10001)
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("width", "side"),
        ("resize_type.longer_size", "side"),
        ("length", "frames"),
        ("start_at_step", "steps"),
        ("seed", ""),
        ("strength", ""),
    ],
)
def test_an_input_is_cut_by_its_name(name, kind):
    assert cut.kind_of(name) == kind


def test_a_size_that_another_node_computes_is_cut_on_its_way_and_text_is_not():
    graph = {
        "number": node("Number", value=4096),
        "empty": node("Empty", width=["number", 0], size=["number", 0]),
    }
    small = cut.cut(graph, partial(surgery.takes_number, INFO), partial(surgery.least, INFO))
    (between,) = set(small) - set(graph)
    assert small["empty"]["inputs"] == {"width": [between, 0], "size": ["number", 0]}
    assert small[between] == node(cut.CUT_NODE, value=["number", 0], kind="side", frames=cut.FRAMES)


def small_of(graph):
    return cut.cut(graph, partial(surgery.takes_number, INFO), partial(surgery.least, INFO))


@pytest.mark.parametrize(("point", "frames"), [(0, 17), (16, 17), (36, 57), (-36, 57), (96, 113)])
def test_a_video_is_never_cut_shorter_than_the_frame_that_an_input_of_the_graph_points_at(point, frames):
    small = small_of(
        {"empty": node("Empty", length=241, video_frames=49), "guide": node("Guide", frame_idx=point)}
    )
    assert small["empty"]["inputs"] == {"length": frames, "video_frames": min(frames, 49)}
    assert small["guide"]["inputs"] == {"frame_idx": point} and abs(point) < frames


def test_a_frame_that_another_node_computes_is_one_of_the_cut_video_its_last_the_last():
    small = small_of({"number": node("Number", value=240), "guide": node("Guide", frame_idx=["number", 0])})
    (between,) = set(small) - {"number", "guide"}
    assert small[between]["inputs"]["kind"] == "point"
    assert [cut.KINDS["point"](value, 17) for value in (240, 8, -1)] == [16, 8, -1]


def test_a_video_that_is_given_is_as_long_as_the_frame_that_is_sought_in_it_needs_and_its_sound_too():
    from pipemesh.lab.templates.stand_ins import media

    graph = {
        "video": node("LoadVideo", file="a.mp4"),
        "sound": node("LoadAudio", audio="a.mp3"),
        "seek": node("Animate", video_frame_offset=76, duration=9),
    }
    small = small_of(graph)
    images = media.video(small["video"]["inputs"]["file"]).get_components().images
    assert len(images) > 76 and small["seek"]["inputs"]["duration"] >= len(images) / media.FPS
    heard = media.sound(small["sound"]["inputs"]["audio"])["waveform"].shape[-1]
    assert heard == round(len(images) / media.FPS * media.RATE)
    graph["seek"] = node("Guide", frame_idx=76)
    assert small_of(graph)["video"] == graph["video"]


def test_parallelize_stands_before_what_samples_and_nothing_else_and_can_be_left_out():
    small = surgery.made_small(GRAPH, INFO)
    assert "decode" not in small and small["sigmas"]["inputs"]["steps"] < 20
    parallel = surgery.parallelized(small, INFO, {"ulysses": 2}, {})
    before = {key: parallel[key]["inputs"]["model"] for key in ("sigmas", "guider", "second")}
    assert before == {
        "sigmas": ["patch", 0],
        "guider": ["pipemesh parallelize patch 0", 0],
        "second": ["pipemesh parallelize model 0", 0],
    }
    left_out = surgery.parallelized(small, INFO, {}, {("model", 0): "a UNet"})
    assert left_out["second"]["inputs"]["model"] == ["model", 0] and left_out["guider"]["inputs"][
        "model"
    ] != ["patch", 0]


def test_a_prompt_counts_if_it_samples_a_model_that_is_no_unet_into_a_picture():
    without = {key: one for key, one in GRAPH.items() if key != "decode"}
    unet = {**GRAPH, "model": node("Loader", unet_name="SD1/v1-5-pruned.safetensors")}
    sampling = [files.samples_transformer(one, INFO) for one in (GRAPH, without, unet)]
    assert sampling == [True, False, False]


def test_conditioning_is_held_to_the_class_of_the_model_that_it_is_sampled_with():
    graph = {
        "guider": node(
            "TwoModels", model=["a", 0], model_negative=["b", 0], positive=["p", 0], negative=["n", 0]
        )
    }
    held = surgery.held(graph, INFO)
    assert {key: one["inputs"] for key, one in held.items() if one["class_type"] == cut.HELD_NODE} == {
        "pipemesh held guider positive": {"model": ["a", 0], "conditioning": ["p", 0]},
        "pipemesh held guider negative": {"model": ["b", 0], "conditioning": ["n", 0]},
    }
    assert held["guider"]["inputs"]["negative"] == ["pipemesh held guider negative", 0]


PACKAGE = """
from collections import namedtuple
Template, Asset = namedtuple("Template", "template_id assets"), namedtuple("Asset", "filename")
def iter_templates():
    yield Template("b", [Asset("b.json"), Asset("b-1.webp")])
    yield Template("a", [Asset("a.json")])
def get_asset_path(template_id, filename):
    assert filename.endswith(".json")
    return {folder!r} + "/" + template_id + "/" + filename
"""


def test_templates_are_found_as_comfyui_finds_them_in_whatever_folders_their_packages_lie(
    host, tmp_path, monkeypatch
):
    (tmp_path / "comfyui_workflow_templates.py").write_text(
        PACKAGE.replace("{folder!r}", repr(str(tmp_path)))
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert files.installed(host) == [
        files.Template(name, tmp_path / name / f"{name}.json") for name in ("a", "b")
    ]


def test_a_python_without_templates_is_said_to_have_none(host, tmp_path, monkeypatch):
    (tmp_path / "comfyui_workflow_templates.py").write_text("raise ImportError('no core')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"no core.*requirements.txt"):
        files.installed(host)


@pytest.mark.host
def test_the_templates_of_this_comfyui_are_found_and_can_be_read(host):
    found = files.installed(host)
    assert sum(files.may_sample(template.workflow()) for template in found) > 100
    assert len({template.name for template in found}) == len(found)


def test_the_latent_of_every_sampler_is_recorded():
    records = [
        one for one in surgery.recorded(GRAPH, INFO, "run1").values() if one["class_type"] == cut.RECORD_NODE
    ]
    assert [one["inputs"] for one in records] == [
        {"samples": ["first", 1], "name": "run1-first"},
        {"samples": ["second", 0], "name": "run1-second"},
    ]


def test_latents_of_other_shapes_or_without_numbers_are_never_the_same():
    latent = torch.randn(1, 4, 2, 2)
    assert relative_error(latent, latent) == 0
    assert (
        relative_error(latent[:, :2], latent) == relative_error(latent * float("nan"), latent) == float("inf")
    )


def test_a_line_says_the_result_and_its_reason():
    assert line_of(Outcome(name="a", result="refused", reason="why", seconds=2.0)) == "refused    a  2 s  why"
    by_name = line_of(Outcome(name="a", result="same", by_name=["Net"], seconds=2.0))
    assert by_name == "same       a  2 s  known by its name alone: Net"
    assert pool_inputs("ring", 3)["ring"] == 3 and pool_inputs("ring", 3)["ulysses"] == 1


def test_every_stand_in_of_a_model_is_one_that_comfyui_builds_or_says_why_it_is_none():
    from pipemesh.lab.templates.stand_ins import models, names

    for _pattern, shape in names.MODELS:
        try:
            form, size = models.form_of(shape)
        except names.NotStoodFor as why:
            assert "has no token plan" in str(why) or str(why) in NOT_HERE.values()
        else:
            form.base_model(form.config(size), torch.float32, torch.device("meta"))


@pytest.mark.parametrize(
    "name",
    [
        "brand_new_model.safetensors",
        "flux3-klein-4b-fp8.safetensors",
        "flux-3-klein-4b.safetensors",
        "qwen_image_2.1_bf16.safetensors",
        "qwen_image21_int8_convrot.safetensors",
        "wan2.2_animate2_14B_bf16.safetensors",
        "wan_animate_3_bf16.safetensors",
        "z_image_omni_bf16.safetensors",
        "ltx-2.6-22b-distilled-transformer-comfy-int8-convrot.safetensors",
        "kandinsky6lite_t2v_5s.safetensors",
    ],
)
def test_a_model_that_nobody_knows_is_an_error_that_names_it_and_never_another_model(name):
    from pipemesh.lab.templates.stand_ins import names

    with pytest.raises(names.UnknownName, match=f"{name} is no model that"):
        names.known_whole(names.MODELS, name, "model")


@pytest.mark.parametrize(
    "name", ["qwen_image_21_vae.safetensors", "wan2.3_vae.safetensors", "ltx-2.6-audio-vae-bf16.safetensors"]
)
def test_a_vae_that_nobody_knows_is_an_error_that_names_it(name):
    from pipemesh.lab.templates.stand_ins import names, nodes

    with pytest.raises(names.UnknownName, match=f"{name} is no audio VAE that"):
        nodes.vae(name)


@pytest.mark.parametrize(
    ("name", "config_class"),
    [
        ("hunyuan_video_t2v_720p_bf16.safetensors", "HunyuanVideo"),
        ("split_files/hunyuanvideo1.5_720p_t2v_fp16.safetensors", "HunyuanVideo15"),
        ("kandinsky5lite_t2v_sft_5s.safetensors", "Kandinsky5"),
        ("wan2.2_animate_14B_bf16.safetensors", "WAN22_Animate"),
        ("Z_Image_Turbo_NVFP4.safetensors", "ZImage"),
        ("flux-2-klein-9b-kv-fp8.safetensors", "Flux2"),
        ("ltx-2.5-22b-distilled-transformer-comfy-int8-convrot.safetensors", "LTXAV"),
    ],
)
def test_a_known_model_stands_for_its_own_class_however_it_is_stored(name, config_class):
    from pipemesh.lab.templates.stand_ins import models, names

    assert models.form_of(names.known_whole(names.MODELS, name, "model"))[0].config_class == config_class


def test_a_model_without_a_plan_is_said_to_be_one_and_not_stood_for_by_its_relative():
    from pipemesh.lab.templates.stand_ins import models, names

    with pytest.raises(names.NotStoodFor, match="NaDiT has no token plan"):
        models.make_model("seedvr2_3b_fp16.safetensors")


@pytest.mark.host
def test_a_model_of_a_newer_comfyui_is_stood_for_there_alone():
    from pipemesh.lab.templates.stand_ins import models, names

    shape = names.known_whole(names.MODELS, "wan_animate_2_distill_int8_convrot", "model")
    if shape.sample in NOT_HERE:
        with pytest.raises(names.NotStoodFor, match=r"needs ComfyUI 0\.33\.0"):
            models.form_of(shape)
    else:
        assert models.form_of(shape)[0].config_class == "WAN_Animate2"


# What WAN21_Vace alone reads, and what more classes than one do
OF_VACE = {"vace_frames": [0], "concat_latent_image": 0, "attention_mask": 0, "pooled_output": 0}


@pytest.mark.host
def test_a_stand_in_that_does_not_read_what_the_graph_gives_it_is_an_error_that_names_a_class_that_does():
    from comfy import model_base
    from pipemesh.lab.templates.stand_ins import classes

    for right in (model_base.WAN21_Vace, model_base.WAN22_Animate, model_base.LTXAV):
        classes.require_reader(right, {"pooled_output", "attention_mask", "guess"})
    classes.require_reader(model_base.WAN21_Vace, OF_VACE.keys())
    with pytest.raises(classes.WrongClass, match=r"vace_frames, which WAN22_Animate .* WAN21_Vace does"):
        classes.require_reader(model_base.WAN22_Animate, OF_VACE.keys())


@pytest.mark.host
def test_wan_animate_2_is_never_stood_for_by_wan_2_2_animate():
    from comfy import model_base
    from pipemesh.lab.templates.stand_ins import classes

    if not hasattr(model_base, "WAN_Animate2"):
        pytest.skip("this ComfyUI has no Wan Animate 2")
    given = {"pose_video_latent", "clip_vision_output_pose", "cross_attn_pose"}
    classes.require_reader(model_base.WAN_Animate2, given)
    with pytest.raises(classes.WrongClass, match="WAN22_Animate does not read and WAN_Animate2 does"):
        classes.require_reader(model_base.WAN22_Animate, given)


def test_the_graph_says_which_class_it_is_for_where_one_alone_reads_all_that_its_nodes_give():
    from comfy import model_base
    from pipemesh.lab.templates.stand_ins import classes

    assert classes.alike(OF_VACE.keys()) == {model_base.WAN21_Vace}
    assert model_base.WAN21 in classes.alike({"clip_vision_output", "pooled_output", "attention_mask"})
    assert len(classes.alike(set())) == len(classes.model_classes()) > 50


def test_the_node_before_a_sampler_hands_conditioning_on_and_shows_which_classes_read_all_of_it():
    from types import SimpleNamespace

    from comfy import model_base
    from pipemesh.lab.templates.stand_ins import classes, nodes

    model = SimpleNamespace(model=object.__new__(model_base.WAN21_Vace))
    held = nodes.Held().run(model, conditioning := [(None, OF_VACE)])
    assert held == {"ui": {"text": ["WAN21_Vace", "WAN21_Vace"]}, "result": (conditioning,)}
    with pytest.raises(classes.WrongClass):
        nodes.Held().run(SimpleNamespace(model=object.__new__(model_base.WAN21)), conditioning)


def test_the_audio_vae_of_ltx_2_5_stands_for_as_many_latents_as_comfyui_counts():
    from comfy.ldm.lightricks.vae.audio_vae import AudioVAE
    from pipemesh.lab.templates.stand_ins import nodes

    (vae,) = nodes.vae("ltx-2.5-audio-vae-bf16.safetensors")
    codec = vae.first_stage_model
    assert vae.latent_channels == 8 and codec.latent_frequency_bins == 16
    count = codec.num_of_latents_from_frames(49, 24)
    assert count == AudioVAE.num_of_latents_from_frames(codec, 49, 24) and abs(count - 49 / 24 * 25) <= 1
    (video,) = nodes.vae("ltx-2.5-video-vae-bf16.safetensors")
    assert video.latent_channels == 128 and video.downscale_ratio[1:] == (32, 32)
