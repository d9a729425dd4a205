"""The demo's small trained model: captions, its network and autoencoder against ComfyUI's,
training, and the files in assets.
"""

import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from pipemesh.lab.demo_nodes.captions import COLOURS, PLACES, Scene, Thing, conditioning, parse_caption
from pipemesh.lab.pictures import autoencoder as encoding
from pipemesh.lab.pictures import showcase
from pipemesh.lab.pictures import training as lessons
from pipemesh.lab.pictures.autoencoder import CELL, SCALE, SHIFT, encoder_weights
from pipemesh.lab.pictures.classifier import accuracy, train_classifier
from pipemesh.lab.pictures.files import ASSETS, LARGER_MODEL, MODEL, VAE, trained_files, write_files
from pipemesh.lab.pictures.measures import kernel_distance, psnr, ssim
from pipemesh.lab.pictures.network import Network, Width
from pipemesh.lab.pictures.picture_set import picture_set
from pipemesh.lab.pictures.scenes import CENTRES, LARGER_SIDE, RGB, SIDE, draw, scenes_by_chance
from pipemesh.lab.pictures.training import CHECKPOINT, Recipe, Training, run
from pipemesh.lab.pictures.whole import whole
from pipemesh.launcher.errors import LaunchError
from safetensors import safe_open
from safetensors.torch import load_file

RING = "a red ring at the centre"
SMALL = Width(hidden=128, double_blocks=1, single_blocks=1)
RECIPE = Recipe(iterations=75, batch=8, rate=3e-3, decoder_iterations=4, bfloat16=False)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return picture_set(tmp_path_factory.mktemp("set"), 64, 64)


def test_a_caption_reads_back_as_its_scene_and_is_told_from_others():
    assert all(parse_caption(str(scene)) == scene for scene in scenes_by_chance(1, 200))
    scenes = set(scenes_by_chance(2, 200))
    assert len({tuple(conditioning(scene).flatten().tolist()) for scene in scenes}) == len(scenes)


@pytest.mark.parametrize(
    ("caption", "says"),
    [
        ("a pink circle at the top left on a dark ground", '"pink" is no colour .* choose red, green'),
        ("a red dog at the top left on a dark ground", '"dog" is no shape'),
        ("a red ring at the side on a dark ground", '"side" is no place'),
        (f"{RING} on a wet ground", '"wet" is no ground'),
        (RING, "ends in no ground"),
        ("two rings on a dark ground", "names no object"),
        (f"{RING} and a blue ring at the centre on a dark ground", "two objects at one place"),
        (" and ".join([RING] * 3) + " on a dark ground", "has 3 objects"),
    ],
)
def test_a_caption_that_the_set_does_not_know_is_refused_by_its_word(caption, says):
    with pytest.raises(ValueError, match=says):
        parse_caption(caption)


def test_each_object_is_drawn_in_its_colour_at_its_place_and_nothing_elsewhere():
    chosen = itertools.product(range(len(COLOURS)), range(len(PLACES)))
    scenes = [Scene((Thing(colour, 0, place),), 1) for colour, place in chosen]
    for scene, picture in zip(scenes, draw(scenes, 0), strict=True):
        (thing,) = scene.things
        for place, (x, y) in enumerate(CENTRES.values()):
            seen = (picture[:, y, x] * 255).round().int().tolist()
            assert (tuple(seen) == RGB[COLOURS[thing.colour]]) == (place == thing.place)


@torch.no_grad()
@pytest.mark.parametrize("step", [1.0, 0.25])
def test_the_network_computes_what_comfyui_computes_with_its_weights(step):
    import comfy.sd

    network, generator = Network(Width(step=step)), torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.08
    options = {"dtype": torch.float32}
    host = comfy.sd.load_diffusion_model_state_dict(dict(network.state_dict()), model_options=options)
    latent, tokens = torch.randn(2, 16, 8, 6), torch.rand(2, 3, 19)
    times = torch.tensor([0.3, 0.9])
    options = {"rope_options": {"scale_x": step, "scale_y": step}}
    expected = host.model.diffusion_model(
        latent, times, tokens, y=tokens.flatten(1), transformer_options=options
    )
    torch.testing.assert_close(network(latent, times, tokens), expected, atol=2e-5, rtol=2e-4)


@torch.no_grad()
def test_comfyui_detects_the_autoencoder_and_computes_what_it_computes(pictures):
    import comfy.latent_formats
    import comfy.sd

    shown = pictures.pictures[:3].float() / 255
    near = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    projection, decoder = encoding.fit_projection(shown), encoding.Decoder()
    decoder_weights = {f"taesd_decoder.{name}": tensor for name, tensor in decoder.state_dict().items()}
    scales = {"vae_scale": torch.tensor(SCALE), "vae_shift": torch.tensor(SHIFT)}
    vae = comfy.sd.VAE(sd={**encoder_weights(projection), **decoder_weights, **scales}, dtype=torch.float32)
    assert vae.latent_channels == 16
    read = encoding.projection_of(encoder_weights(projection))
    assert read.weight.equal(projection.weight) and read.bias.equal(projection.bias)
    latent = vae.encode(shown.movedim(1, -1))
    expected = projection.encode(shown)
    near(comfy.latent_formats.Flux().process_in(latent), expected)
    near(vae.decode(latent).movedim(-1, 1), decoder(expected).clamp(0, 1))


def test_a_short_training_run_learns_and_goes_on_where_it_stopped(pictures, tmp_path):
    def trained(folder, recipe, stops=()):
        folder.mkdir(exist_ok=True)
        training = Training(pictures, SMALL, recipe)
        if (folder / CHECKPOINT).exists():
            training.load(folder / CHECKPOINT)
        return training, list(run(training, folder, 3600, iter([*stops, *[False] * 10_000]).__next__))

    straight, records = trained(tmp_path, RECIPE)
    assert records[-1]["transformer_loss"] < 0.85 * records[0]["transformer_loss"]
    # Neither ends before its iterations
    assert (straight.transformer.iteration, straight.decoder.iteration) == (75, 4)
    files = write_files(straight, tmp_path, tmp_path / "out")
    assert [file.name for file in files] == [MODEL, VAE, "loss.png"]
    assert sorted((tmp_path / "out").iterdir()) == sorted(files)
    cut = replace(RECIPE, decoder_iterations=0, iterations=6)
    whole, _ = trained(tmp_path / "whole", cut)
    trained(tmp_path / "parts", cut, stops=[False, False, False, True])
    parts, _ = trained(tmp_path / "parts", cut)
    assert parts.transformer.iteration == whole.transformer.iteration == 6
    for name, tensor in whole.transformer.averaged_weights().items():
        torch.testing.assert_close(parts.transformer.averaged_weights()[name], tensor, atol=1e-6, rtol=1e-5)


def test_threads_share_a_batch_out_whatever_their_number():
    values = torch.randn(12, requires_grad=True)
    for threads in (1, 2, 5, 12, 16, 64):
        shares = lessons.shared_out(lambda part: values[part].square().mean(), len(values), threads)
        assert len(shares) == min(threads, 12)
        torch.testing.assert_close(torch.stack([loss() for loss in shares]).mean(), values.square().mean())


def test_a_checkpoint_is_gone_on_with_under_its_own_seed_only_and_records_behind_it_are_not_drawn(
    pictures, tmp_path
):
    """A crash left them there."""
    training = Training(pictures, SMALL, RECIPE, seed=3)
    training.save(tmp_path / CHECKPOINT)
    training.load(tmp_path / CHECKPOINT)
    with pytest.raises(LaunchError, match=r"begun with seed 3, not 0: give that one, or another folder\.$"):
        Training(pictures, SMALL, RECIPE).load(tmp_path / CHECKPOINT)
    training.transformer.iteration = training.decoder.iteration = 50
    records = [{"iteration": at, "decoder_iteration": at, "transformer_loss": 1.0} for at in (25, 50, 75)]
    lines = [*map(json.dumps, records), '{"iteration": 100, "dec']
    (tmp_path / lessons.LOG).write_text("\n".join(lines))
    assert not list(run(training, tmp_path, 3600, lambda: True))
    assert lessons.read_log(tmp_path) == records[:2]


def test_a_file_that_is_not_written_whole_leaves_the_one_before_it(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("before")
    with pytest.raises(OSError, match="full"), whole(file) as part:
        part.write_text("half")
        raise OSError("full")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["before"]
    with whole(file) as part:
        part.write_text("after")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["after"]


def test_the_decoders_order_of_memory_changes_no_step_of_it_nor_of_one_that_goes_on():
    """The fused optimiser reads gradients and moments in the parameter's own order."""
    before = torch.nn.Conv2d(3, 8, 3).state_dict()
    gradients = [[torch.randn(8, 3, 3, 3) * factor, torch.randn(8)] for factor in (1.0, 3.0)]

    def stepped(ordered):
        networks = [torch.nn.Conv2d(3, 8, 3) for _ in range(2)]
        for network in networks:
            network.load_state_dict(before)
        first, second = (lessons.Trainee(ordered(network), 1e-2, 0.9) for network in networks)
        first.step(gradients, 1.0)
        second.restore({name: tensor.contiguous() for name, tensor in first.tensors().items()})
        second.step([[-part for part in parts] for parts in gradients[:1]], 1.0)
        return second.network.weight

    torch.testing.assert_close(stepped(lessons.channels_last), stepped(lambda network: network))


@pytest.fixture(scope="module")
def vae():
    import comfy.sd
    import comfy.utils

    weights, metadata = comfy.utils.load_torch_file(str(ASSETS / VAE), return_metadata=True)
    return comfy.sd.VAE(sd=weights, metadata=metadata)


def sampled_by_host(model, scene, noise, steps):
    import comfy.sample

    tokens = conditioning(scene)[None]
    both = ([[each, {"pooled_output": each.flatten(1)}]] for each in (tokens, torch.zeros_like(tokens)))
    empty = torch.zeros_like(noise)
    return comfy.sample.sample(model, noise, steps, 3.0, "euler", "simple", *both, empty, disable_pbar=True)


def assert_shows(picture, scene):
    """Objects stand in their colour at their place."""
    scale = picture.shape[0] // SIDE
    for thing in scene.things:
        x, y = (scale * centre for centre in CENTRES[PLACES[thing.place]])
        seen = picture[y - 4 : y + 4, x - 4 : x + 4].mean((0, 1)) * 255
        nearest = min(RGB, key=lambda name: (seen - torch.tensor(RGB[name])).norm().item())
        assert nearest == COLOURS[thing.colour], str(scene)


@torch.no_grad()
def test_stock_comfyui_draws_the_captions_with_the_trained_files(vae):
    """Its euler on its simple schedule is the plain network's own sampling."""
    import comfy.sd

    model = comfy.sd.load_diffusion_model(str(ASSETS / MODEL))
    scenes = [Scene((Thing(0, 1, 0), Thing(2, 0, 3)), 0), Scene((Thing(3, 0, 4),), 1)]
    network = Network(Width())
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(ASSETS / MODEL).items()})
    for seed, scene in enumerate(scenes):
        noise = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(seed))
        latent = sampled_by_host(model, scene, noise, steps=10)
        mine = lessons.sampled(network, conditioning(scene)[None], 16, seed, steps=10)
        torch.testing.assert_close((latent - SHIFT) * SCALE, mine, atol=2e-2, rtol=2e-2)
        picture = vae.decode(latent)[0]
        assert picture.shape == (SIDE, SIDE, 3)
        assert_shows(picture, scene)


@torch.no_grad()
def test_the_larger_model_draws_a_caption_where_its_tokens_stand_as_in_the_demos_graph(vae):
    import comfy.sd

    caption, steps = showcase.CAPTIONS[0], 4
    nodes = showcase.graph(caption, None, LARGER_SIDE, steps)
    model = comfy.sd.load_diffusion_model(str(ASSETS / nodes["model"]["inputs"]["unet_name"]))
    axes = [nodes["scaled"]["inputs"][f"{word}_{axis}"] for axis in "xyt" for word in ("scale", "shift")]
    model.set_model_rope_options(*axes)
    side = LARGER_SIDE // CELL
    noise = torch.randn(1, 16, side, side, generator=torch.Generator().manual_seed(0))
    scene = parse_caption(caption)
    assert_shows(vae.decode(sampled_by_host(model, scene, noise, steps))[0], scene)


def test_distances_of_pictures_are_what_their_names_say():
    generator = torch.Generator().manual_seed(0)
    shown = torch.rand(4, 3, 32, 32, generator=generator)
    torch.testing.assert_close(psnr(shown + 0.1, shown), torch.full((4,), 20.0))
    assert psnr(shown, shown).isinf().all()
    torch.testing.assert_close(ssim(shown, shown), torch.ones(4, dtype=torch.float64))
    assert (ssim(shown.flip(0), shown) < 0.2).all()
    same, other = (torch.randn(300, 8, generator=generator) for _ in range(2))
    assert abs(kernel_distance(same, other)) < 0.1 * kernel_distance(same, other + 1)


def test_a_sheet_has_a_row_for_each_method_and_a_column_for_each_caption():
    plain = [Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "blue")]
    stock = [showcase.Drawn(one, (0.2, 0.4, 0.4)) for one in plain]
    ours = [showcase.Drawn(one.picture, (0.1, 0.2, 0.2)) for one in stock[::-1]]
    assert showcase.decibels(stock, stock) == [99, 99] and showcase.largest_difference(stock, stock) == 0
    assert max(showcase.decibels(ours, stock)) < 10
    one, two = (showcase.sheet({"stock": stock, **more}) for more in ({}, {"other": ours}))
    pen = ImageDraw.Draw(one)
    pen.font = ImageFont.load_default(showcase.FONT)
    lines = [showcase.lines_of(pen, caption, showcase.THUMBNAIL) for caption in showcase.CAPTIONS]
    assert [" ".join(each.split()) for each in lines] == list(showcase.CAPTIONS), "a word is lost"
    assert all(pen.multiline_textbbox((0, 4), each)[3] <= showcase.HEADER for each in lines)
    side = showcase.THUMBNAIL
    assert two.width == one.width > 2 * side and two.height > one.height + side
    assert showcase.label("stock", stock, stock) == "stock: 0.400 s per step"
    said = showcase.label("2 stages of PipeFusion, approximate", ours, stock)
    assert " 0.200 s per step, 2.00 times as fast, differs by at most 255 of 255 (PSNR " in said
    assert pen.textlength(said) < len(showcase.CAPTIONS) * side


def test_the_classifier_counts_the_words_of_captions_that_are_drawn():
    scenes = scenes_by_chance(3, 256)
    net = train_classifier((draw(scenes, 3) * 255).to(torch.uint8), scenes, steps=40)
    drawn, found = draw(scenes, 4), accuracy(net, draw(scenes, 4), scenes)
    assert found["place"] > 0.95 and found["colour"] > 0.8
    assert accuracy(net, drawn.flip(0), scenes)["all"] < found["all"] - 0.2


def test_the_trained_files_are_small_and_what_their_card_says():
    card = (ASSETS / "README.md").read_text()
    assert sum(file.stat().st_size for file in ASSETS.glob("*") if file.is_file()) <= 42e6
    for file in {*trained_files(), *trained_files(LARGER_MODEL)}:
        with safe_open(file, framework="pt") as stored:
            about, weights = stored.metadata(), [stored.get_tensor(name) for name in stored.keys()]
        size = file.stat().st_size / 1e6
        assert f"`{file.name}`" in card and f"| {size:.1f} MB |" in card
        assert f"{int(about['iterations']):,} iterations" in card
        if file.name != LARGER_MODEL:
            assert f"{about['decoder_iterations']} of 12 crops" in card
        if file.name != VAE:
            assert f"{sum(weight.numel() for weight in weights) / 1e6:.2f} M parameters" in card
