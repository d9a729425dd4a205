"""The workflow templates are tried with stand-ins: small by one rule, of the shapes that the files
have, parallel before each sampler.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.comfyui.api import node
from pipemesh.lab.commands.templates import line_of, pool_inputs
from pipemesh.lab.templates import cut, files, surgery
from pipemesh.lab.templates.run import Outcome
from pipemesh.launcher.errors import LaunchError
from pipemesh.parallel_runtime.families.catalogue import NOT_HERE
from pipemesh.pool.trial.rounding import relative_error


def takes(outputs, optional=None, **required):
    """What ComfyUI says of a node with such inputs and outputs."""
    groups = {"required": required} | ({"optional": optional} if optional else {})
    inputs = {group: {name: [kind, {}] for name, kind in of.items()} for group, of in groups.items()}
    return {"input": inputs, "output": outputs.split()}


INFO = {
    "Loader": takes("MODEL", unet_name="COMBO"),
    "Patch": takes("MODEL", model="MODEL"),
    "Scheduler": takes("SIGMAS", model="MODEL", steps="INT"),
    "Guider": takes("GUIDER", model="MODEL"),
    "Custom": takes("STRING LATENT", guider="GUIDER", sigmas="SIGMAS"),
    "KSampler": takes("LATENT", model="MODEL", latent="LATENT"),
    "TwoModels": takes(
        "GUIDER",
        {"model_negative": "MODEL", "negative": "CONDITIONING"},
        model="MODEL",
        positive="CONDITIONING",
    ),
    "Guide": {"input": {"required": {"frame_idx": ["INT", {"min": -9999}]}}, "output": ["LATENT"]},
    "Empty": takes("LATENT", {"size": "STRING"}, width="INT"),
    "Number": takes("INT", value="INT"),
    "Decode": takes("IMAGE", samples="LATENT"),
}
GRAPH = {
    "model": node("Loader", unet_name="a.safetensors"),
    "patch": node("Patch", model=["model", 0]),
    "sigmas": node("Scheduler", model=["patch", 0], steps=20),
    "guider": node("Guider", model=["patch", 0]),
    "first": node("Custom", guider=["guider", 0], sigmas=["sigmas", 0]),
    "second": node("KSampler", model=["model", 0], latent=["first", 1]),
    "decode": node("Decode", samples=["second", 0]),
}


@pytest.fixture(scope="module")
def stand_ins():
    """Its modules, which import ComfyUI."""
    from pipemesh.lab.templates.stand_ins import classes, media, models, names, nodes

    return SimpleNamespace(classes=classes, media=media, models=models, names=names, nodes=nodes)


def test_what_is_cut_stays_as_it_is_landscapes_stay_landscapes_and_two_parts_of_steps_keep_their_order():
    for rule, most in ((cut.cut_side, 10000), (cut.cut_frames, 500)):
        assert all(rule(rule(value)) == rule(value) for value in range(most))
    assert cut.cut_side(1280) > cut.cut_side(720) and cut.cut_side(1024) == cut.cut_side(1328)
    cuts = [cut.cut_steps(steps) for steps in range(10001)]
    assert cuts == sorted(cuts)
    assert all(0 < cuts[steps // 2] < cuts[steps] for steps in range(2, 10001))


def test_an_input_is_cut_by_its_name():
    kinds = {"width": "side", "resize_type.longer_size": "side", "length": "frames", "start_at_step": "steps"}
    for name, kind in (kinds | {"seed": "", "strength": ""}).items():
        assert cut.kind_of(name) == kind, name


def small_of(graph):
    return cut.cut(graph, partial(surgery.takes_number, INFO), partial(surgery.least, INFO))


def test_what_another_node_computes_is_cut_on_its_way_and_text_is_not():
    """A size; a frame becomes one of the cut video, its last the last."""
    graph = {
        "number": node("Number", value=4096),
        "empty": node("Empty", width=["number", 0], size=["number", 0]),
    }
    small = small_of(graph)
    (between,) = set(small) - set(graph)
    assert small["empty"]["inputs"] == {"width": [between, 0], "size": ["number", 0]}
    assert small[between] == node(cut.CUT_NODE, value=["number", 0], kind="side", frames=cut.FRAMES)
    small = small_of({"number": node("Number", value=240), "guide": node("Guide", frame_idx=["number", 0])})
    (between,) = set(small) - {"number", "guide"}
    assert small[between]["inputs"]["kind"] == "point"
    assert [cut.KINDS["point"](value, 17) for value in (240, 8, -1)] == [16, 8, -1]


@pytest.mark.parametrize(("point", "frames"), [(0, 17), (16, 17), (36, 57), (-36, 57), (96, 113)])
def test_a_video_is_never_cut_shorter_than_the_frame_that_an_input_of_the_graph_points_at(point, frames):
    small = small_of(
        {"empty": node("Empty", length=241, video_frames=49), "guide": node("Guide", frame_idx=point)}
    )
    assert small["empty"]["inputs"] == {"length": frames, "video_frames": min(frames, 49)}
    assert small["guide"]["inputs"] == {"frame_idx": point} and abs(point) < frames


def test_a_video_that_is_given_is_as_long_as_the_frame_that_is_sought_in_it_needs_and_its_sound_too(
    stand_ins,
):
    graph = {
        "video": node("LoadVideo", file="a.mp4"),
        "sound": node("LoadAudio", audio="a.mp3"),
        "seek": node("Animate", video_frame_offset=76, duration=9),
    }
    small, media = small_of(graph), stand_ins.media
    images = media.video(small["video"]["inputs"]["file"]).get_components().images
    assert len(images) > 76 and small["seek"]["inputs"]["duration"] >= len(images) / media.FPS
    heard = media.sound(small["sound"]["inputs"]["audio"])["waveform"].shape[-1]
    assert heard == round(len(images) / media.FPS * media.RATE)
    graph["seek"] = node("Guide", frame_idx=76)
    assert small_of(graph)["video"] == graph["video"]


def test_parallelize_stands_before_what_samples_and_nothing_else_and_can_be_left_out():
    small = surgery.made_small(GRAPH, INFO)
    assert "decode" not in small and small["sigmas"]["inputs"]["steps"] < 20

    def models_of(ours):
        return [ours[key]["inputs"]["model"][0] for key in ("sigmas", "guider", "second")]

    patch, model = (f"{surgery.PARALLEL} {name} 0" for name in ("patch", "model"))
    assert models_of(surgery.parallelized(small, INFO, {"ulysses": 2}, {})) == ["patch", patch, model]
    left_out = surgery.parallelized(small, INFO, {}, {("model", 0): "a UNet"})
    assert models_of(left_out) == ["patch", patch, "model"]


def test_a_prompt_counts_if_it_samples_a_model_that_is_no_unet_into_a_picture():
    without = {key: one for key, one in GRAPH.items() if key != "decode"}
    unet = {**GRAPH, "model": node("Loader", unet_name="SD1/v1-5-pruned.safetensors")}
    sampling = [files.samples_transformer(one, INFO) for one in (GRAPH, without, unet)]
    assert sampling == [True, False, False]


def test_conditioning_is_held_to_the_class_of_the_model_that_it_is_sampled_with():
    models, conditionings = {"model": "a", "model_negative": "b"}, {"positive": "p", "negative": "n"}
    inputs = {name: [of, 0] for name, of in (models | conditionings).items()}
    held = surgery.held({"guider": node("TwoModels", **inputs)}, INFO)
    assert {key: one["inputs"] for key, one in held.items() if one["class_type"] == cut.HELD_NODE} == {
        "pipemesh held guider positive": {"model": ["a", 0], "conditioning": ["p", 0]},
        "pipemesh held guider negative": {"model": ["b", 0], "conditioning": ["n", 0]},
    }
    assert held["guider"]["inputs"]["negative"] == ["pipemesh held guider negative", 0]


def test_the_latent_of_every_sampler_is_recorded():
    made = surgery.recorded(GRAPH, INFO, "run1").values()
    assert [one["inputs"] for one in made if one["class_type"] == cut.RECORD_NODE] == [
        {"samples": ["first", 1], "name": "run1-first"},
        {"samples": ["second", 0], "name": "run1-second"},
    ]


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


def test_templates_are_found_as_comfyui_finds_them_or_it_is_said_that_there_are_none(
    host, tmp_path, monkeypatch
):
    """In whatever folders their packages lie."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    package = tmp_path / "comfyui_workflow_templates.py"
    package.write_text(PACKAGE.replace("{folder!r}", repr(str(tmp_path))))
    found = [files.Template(name, tmp_path / name / f"{name}.json") for name in ("a", "b")]
    assert files.installed(host) == found
    package.write_text("raise ImportError('no core')")
    with pytest.raises(LaunchError, match=r"no core.*requirements.txt"):
        files.installed(host)


@pytest.mark.host
def test_the_templates_of_this_comfyui_are_found_and_can_be_read(host):
    found = files.installed(host)
    assert sum(files.may_sample(template.workflow()) for template in found) > 100
    assert len({template.name for template in found}) == len(found)


def test_latents_of_other_shapes_or_without_numbers_are_never_the_same():
    latent = torch.randn(1, 4, 2, 2)
    others = [relative_error(one, latent) for one in (latent, latent[:, :2], latent * float("nan"))]
    assert others == [0, float("inf"), float("inf")]


def test_a_line_says_the_result_and_its_reason():
    assert line_of(Outcome(name="a", result="refused", reason="why", seconds=2.0)) == "refused    a  2 s  why"
    by_name = line_of(Outcome(name="a", result="same", by_name=["Net"], seconds=2.0))
    assert by_name == "same       a  2 s  known by its name alone: Net"
    assert pool_inputs("ring", 3)["ring"] == 3 and pool_inputs("ring", 3)["ulysses"] == 1


def test_every_stand_in_of_a_model_is_one_that_comfyui_builds_or_says_why_it_is_none(stand_ins):
    for _pattern, shape in stand_ins.names.MODELS:
        try:
            form, size = stand_ins.models.form_of(shape)
        except stand_ins.names.NotStoodFor as why:
            assert "has no token plan" in str(why) or str(why) in NOT_HERE.values()
        else:
            form.base_model(form.config(size), torch.float32, torch.device("meta"))


@pytest.mark.parametrize(
    "name",
    [
        "brand_new_model",
        "flux3-klein-4b-fp8",
        "flux-3-klein-4b",
        "qwen_image_2.1_bf16",
        "qwen_image21_int8_convrot",
        "wan2.2_animate2_14B_bf16",
        "wan_animate_3_bf16",
        "z_image_omni_bf16",
        "ltx-2.6-22b-distilled-transformer-comfy-int8-convrot",
        "kandinsky6lite_t2v_5s",
        "qwen_image_21_vae",
        "wan2.3_vae",
        "ltx-2.6-audio-vae-bf16",
    ],
)
def test_a_model_that_nobody_knows_is_an_error_that_names_it_and_never_another_model(stand_ins, name):
    names, file, is_vae = stand_ins.names, f"{name}.safetensors", "vae" in name
    with pytest.raises(names.UnknownName, match=f"{file} is no {'audio VAE' if is_vae else 'model'} that"):
        stand_ins.nodes.vae(file) if is_vae else names.known_whole(names.MODELS, file, "model")


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
def test_a_known_model_stands_for_its_own_class_however_it_is_stored(stand_ins, name, config_class):
    shape = stand_ins.names.known_whole(stand_ins.names.MODELS, name, "model")
    assert stand_ins.models.form_of(shape)[0].config_class == config_class


def test_a_model_without_a_plan_is_said_to_be_one_and_not_stood_for_by_its_relative(stand_ins):
    with pytest.raises(stand_ins.names.NotStoodFor, match="NaDiT has no token plan"):
        stand_ins.models.make_model("seedvr2_3b_fp16.safetensors")


@pytest.mark.host
def test_a_model_of_a_newer_comfyui_is_stood_for_there_alone(stand_ins):
    names = stand_ins.names
    shape = names.known_whole(names.MODELS, "wan_animate_2_distill_int8_convrot", "model")
    if shape.sample in NOT_HERE:
        with pytest.raises(names.NotStoodFor, match=r"needs ComfyUI 0\.33\.0"):
            stand_ins.models.form_of(shape)
    else:
        assert stand_ins.models.form_of(shape)[0].config_class == "WAN_Animate2"


# What WAN21_Vace alone reads, and what more classes than one do
OF_VACE = {"vace_frames": [0], "concat_latent_image": 0, "attention_mask": 0, "pooled_output": 0}


@pytest.mark.host
def test_a_stand_in_that_does_not_read_what_the_graph_gives_it_is_an_error_that_names_a_class_that_does(
    stand_ins,
):
    from comfy import model_base

    classes = stand_ins.classes
    for right in (model_base.WAN21_Vace, model_base.WAN22_Animate, model_base.LTXAV):
        classes.require_reader(right, {"pooled_output", "attention_mask", "guess"})
    classes.require_reader(model_base.WAN21_Vace, OF_VACE.keys())
    with pytest.raises(classes.WrongClass, match=r"vace_frames, which WAN22_Animate .* WAN21_Vace does"):
        classes.require_reader(model_base.WAN22_Animate, OF_VACE.keys())
    if hasattr(model_base, "WAN_Animate2"):
        given = {"pose_video_latent", "clip_vision_output_pose", "cross_attn_pose"}
        classes.require_reader(model_base.WAN_Animate2, given)
        with pytest.raises(classes.WrongClass, match="WAN22_Animate does not read and WAN_Animate2 does"):
            classes.require_reader(model_base.WAN22_Animate, given)


def test_the_graph_says_which_class_it_is_for_where_one_alone_reads_all_that_its_nodes_give(stand_ins):
    from comfy import model_base

    classes = stand_ins.classes
    assert classes.alike(OF_VACE.keys()) == {model_base.WAN21_Vace}
    assert model_base.WAN21 in classes.alike({"clip_vision_output", "pooled_output", "attention_mask"})
    assert len(classes.alike(set())) == len(classes.model_classes()) > 50
    held, conditioning = stand_ins.nodes.Held(), [(None, OF_VACE)]
    vace, plain = (
        SimpleNamespace(model=object.__new__(one)) for one in (model_base.WAN21_Vace, model_base.WAN21)
    )
    shown = {"ui": {"text": ["WAN21_Vace", "WAN21_Vace"]}, "result": (conditioning,)}
    assert held.run(vace, conditioning) == shown, "the node before a sampler hands it on"
    with pytest.raises(classes.WrongClass):
        held.run(plain, conditioning)


def test_the_audio_vae_of_ltx_2_5_stands_for_as_many_latents_as_comfyui_counts(stand_ins):
    from comfy.ldm.lightricks.vae.audio_vae import AudioVAE

    (vae,) = stand_ins.nodes.vae("ltx-2.5-audio-vae-bf16.safetensors")
    codec = vae.first_stage_model
    assert vae.latent_channels == 8 and codec.latent_frequency_bins == 16
    count = codec.num_of_latents_from_frames(49, 24)
    assert count == AudioVAE.num_of_latents_from_frames(codec, 49, 24) and abs(count - 49 / 24 * 25) <= 1
    (video,) = stand_ins.nodes.vae("ltx-2.5-video-vae-bf16.safetensors")
    assert video.latent_channels == 128 and video.downscale_ratio[1:] == (32, 32)
