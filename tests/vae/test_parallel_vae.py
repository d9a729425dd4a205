"""A stock VAE in, a stock VAE out: what ComfyUI's VAE does, and what comes of it, is as ever, and
real ranks compute it.
"""

import logging
import os
import re
from copy import deepcopy
from types import SimpleNamespace

import comfy.model_management as mm
import comfy.sd
import comfy.utils
import numpy as np
import pytest
import torch
from pipemesh.lab.bench.pools import confined
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.nodes.runtime import Runtime
from pipemesh.nodes.settings import Choice
from pipemesh.nodes.vaes import parallelized
from pipemesh.parallel_runtime.client import remote_vae
from pipemesh.parallel_runtime.client.first_results import FirstResults
from pipemesh.parallel_runtime.client.remote_vae import FirstStage
from pipemesh.parallel_runtime.client.shared_evaluation import Admission
from pipemesh.parallel_runtime.crossing.source import numbers_id
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.pool import conversation
from pipemesh.pool.devices import place
from safetensors.torch import save_file

from ..fixtures import with_ranks_of_its_own
from ..kit.fake_pools import fake_setup
from ..kit.models import run
from ..kit.vaes import image_weights, in_pool, loaded, noise, video_by_pixels, video_weights
from ..pool.test_pool_faults import Once, in_forward

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stock():
    noisy = video_by_pixels(2, decode_timestep=0.1)
    made = {"image": loaded(image_weights()), "video": loaded(video_weights())}
    made["noisy"] = loaded(noisy.state_dict(), noisy.config)
    made["noisy"].first_stage_model.decode_timestep = 0.9  # a node may change what its file says
    return made


CASES = {
    "images": ("image", "decode", (3, 16, 9, 6)),
    "a video": ("video", "decode", (1, 16, 3, 7, 4)),
    "one row, which one rank has": ("video", "decode", (1, 16, 1, 1, 4)),
    "tiles": ("image", "decode_tiled", (1, 16, 12, 8), {"tile_x": 8, "tile_y": 8, "overlap": 2}),
    "frames to a latent": ("video", "encode", (5, 57, 40, 3)),
    "a noisy video, in rows of its own": ("noisy", "decode", (1, 128, 2, 7, 4)),
    "its tiles": ("noisy", "decode_tiled", (1, 128, 2, 7, 4), {"tile_x": 4, "tile_y": 4, "overlap": 1}),
    "frames to a latent of it": ("noisy", "encode", (9, 160, 64, 3)),
    "one picture to a latent": ("video", "encode", (1, 48, 32, 3)),
}


@pytest.mark.host
@pytest.mark.parametrize("case", CASES)
def test_a_vae_in_a_pool_gives_what_stock_gives(case, stock, client, requests):
    kind, work, shape, *tiles = CASES[case]
    given = noise(*shape).sigmoid() if work == "encode" else noise(*shape)
    made = []
    for vae in (stock[kind], in_pool(stock[kind], client)):
        torch.manual_seed(1)
        with torch.inference_mode():
            made.append(getattr(vae, work)(given, **(tiles[0] if tiles else {})))
    truth, ours = made
    assert requests["Forward"] and truth.shape == ours.shape and truth.dtype == ours.dtype
    assert relative_error(ours, truth) <= BOUND


@pytest.mark.host
@pytest.mark.parametrize("of_ours", [False, True])
def test_numbers_that_a_node_changes_after_the_load_never_go_unnoticed_and_comfyuis_own_are_none(
    client, requests, of_ours
):
    noisy = video_by_pixels(2, decode_timestep=0.1)
    vae = loaded(noisy.state_dict(), noisy.config)
    ours, named = in_pool(vae, client), numbers_id(vae)
    ours.decode(noise(1, 128, 2, 7, 4))
    for room in (1, 1 << 40):  # as if a stock node uses it too, on a device that is full or is not
        vae.patcher.load(CPU, lowvram_model_memory=room)
        assert numbers_id(vae) == named
    ours.decode(noise(1, 128, 2, 7, 4))
    (ours if of_ours else vae).first_stage_model.decode_timestep = 0.9
    requests.clear()
    with pytest.raises(Refused, match=r"has changed this VAE's numbers .* free the node cache"):
        ours.decode(noise(1, 128, 2, 7, 4))
    assert not requests["Forward"]


WEIGHT = "decoder.conv1.weight"


def weight_of(vae):
    return vae.first_stage_model.get_parameter(WEIGHT)


def one_element(vae):
    """In a row and a column of which other elements are looked at, and past torch's count."""
    weight_of(vae).data[3, 9, 2, 1, 1] += 50


def another_parameter(vae):
    layer = vae.first_stage_model.decoder.conv1
    layer.weight = torch.nn.Parameter(2 * layer.weight.data, requires_grad=False)


def another_module(vae):
    vae.first_stage_model = loaded({key: 1.1 * one for key, one in video_weights().items()}).first_stage_model


CHANGES = {
    "one element": one_element,
    "a row by numpy": lambda vae: np.add.at(weight_of(vae).numpy(), 3, 1),
    "all of it": lambda vae: weight_of(vae).data.mul_(2),
    "another parameter": another_parameter,
    "another module": another_module,
}


def load_a_patched_clone(vae):
    """As by a node that decodes with it; the VAE itself has no patches."""
    clone = vae.patcher.clone()
    assert clone.add_patches({WEIGHT: (torch.full_like(weight_of(vae), 0.1),)})
    own = weight_of(vae).clone()
    mm.load_models_gpu([clone])
    assert not torch.equal(weight_of(vae), own)


@torch.inference_mode()
def test_weights_that_are_written_to_after_the_load_are_the_ranks_own_or_end_the_decode(client, requests):
    vae, latent = loaded(video_weights()), noise(1, 16, 1, 6, 2)
    ours, before = in_pool(vae, client), vae.decode(latent)
    for _ in range(2):
        assert relative_error(ours.decode(latent), before) <= BOUND
    load_a_patched_clone(vae)
    assert relative_error(ours.decode(latent), before) <= BOUND
    assert requests["Load"] == 1, "no weight is another"
    says = f"to the weight {WEIGHT} of WanVAE .*: run again, and they get the new one"
    for loads, (name, change) in enumerate(CHANGES.items()):
        change(vae)
        if name == "one element":
            with pytest.raises(Refused, match=says):
                ours.decode(latent)
        made, truth = ours.decode(latent), vae.decode(latent)
        assert relative_error(truth, before) > 100 * BOUND, "the write does nothing"
        assert relative_error(made, truth) <= BOUND, name
        assert requests["Load"] == 2 + loads
        before = truth


def test_a_vae_whose_file_is_another_by_now_stays_what_was_loaded(client, tmp_path):
    def written(name, weights):
        save_file(weights, tmp_path / name)
        return tmp_path / name

    file = written("vae.safetensors", video_weights())
    vae, latent = loaded(comfy.utils.load_torch_file(str(file))), noise(1, 16, 1, 6, 4)
    truth = vae.decode(latent)
    os.replace(written("other", {key: 2 * one for key, one in video_weights().items()}), file)
    assert relative_error(in_pool(vae, client).decode(latent), truth) <= BOUND
    again = loaded(comfy.utils.load_torch_file(str(file)))
    assert relative_error(in_pool(again, client).decode(latent), truth) > BOUND


def test_a_notice_says_that_a_picture_could_not_be_compared_and_the_next_one_is(stock, client, monkeypatch):
    told = []
    monkeypatch.setattr(client, "admission", Admission(firsts=FirstResults(notice=told.append)))
    ours, latent = in_pool(stock["image"], client), noise(1, 16, 24, 6)
    none = latent.clone()
    none[0, 0, 0, 0] = torch.nan
    assert not ours.decode(none).isfinite().all() and not ours.first_stage_model.remote.firsts.right
    (notice,) = told
    assert "by bands of rows could not be compared with what one worker makes" in notice
    assert ours.decode(latent).isfinite().all() and ours.first_stage_model.remote.firsts.right
    assert told == [notice]


def test_ranks_in_groups_are_one_sequence_for_a_vae_and_a_pipeline_leaves_it_to_one(stock, clients, caplog):
    caplog.set_level(logging.INFO)
    latent, video = noise(1, 16, 1, 6, 4), stock["video"]
    with torch.inference_mode():
        truth = video.decode(latent)
    for layout, ranks in (((1, 1, 1, 2), 2), ((1, 1, 2), 1)):
        ours = in_pool(video, clients(*layout))
        used = ranks * ours.memory_used_decode(latent.shape, torch.float32)
        assert used == pytest.approx(video.memory_used_decode(latent.shape, torch.float32))
        assert relative_error(ours.decode(latent), truth) <= BOUND
        says = "[PipeMesh] One worker alone will decode this picture: the pool is a pipeline."
        assert (says in caplog.messages) == (ranks == 1)


def test_a_vae_beside_a_sampled_model_is_loaded_once_and_no_report_takes_it_for_the_last_run(
    stock, pair, client, requests
):
    _, model = pair
    vae = in_pool(stock["video"], client)
    run(model)
    last = client.runs.last
    vae.decode(noise(1, 16, 1, 6, 4))
    requests.clear()
    run(model, callback=lambda *_: vae.decode(noise(1, 16, 1, 6, 4)))
    assert requests["Load"] == requests["Release"] == 0
    assert client.runs.last is not last and len(client.runs.last.evaluations) == 3


def test_free_memory_reaches_the_pool_and_a_vae_that_is_gone_is_freed(stock, client):
    vae = in_pool(stock["video"], client)
    vae.decode(noise(1, 16, 1, 6, 4))
    assert vae.patcher.current_loaded_device() == vae.patcher.load_device
    model = vae.first_stage_model.remote.bring_up()[1]
    assert client.residency.held(model)
    mm.unload_all_models()
    assert not client.residency.held(model)


def test_a_cancel_while_decoding_is_the_hosts_interrupt_and_the_next_is_right(stock, client):
    vae, latent = in_pool(stock["video"], client), noise(1, 16, 3, 8, 6)
    truth = vae.decode(latent)
    pool = client.sessions.live.pool
    once = Once(lambda: in_forward(pool, 1, 30), mm.interrupt_current_processing)
    with pytest.raises(mm.InterruptProcessingException):
        vae.decode(noise(1, 16, 9, 32, 24))
    once.join()
    assert torch.equal(vae.decode(latent), truth) and client.sessions.live.pool is pool


def test_a_long_work_shows_a_page_how_far_it_is_once_its_steps_were_counted(stock, client, monkeypatch):
    """A script is shown nothing: it takes frames that stock does not send for other ones."""
    told, is_page = [], True
    hook = lambda done, total, *_, **__: told.append((done, total))  # noqa: E731
    monkeypatch.setattr(client, "wait", SimpleNamespace(is_seen=lambda: is_page))
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    for module, name, value in (
        (remote_vae, "SHOWN_AFTER_S", 0.0), (remote_vae, "FRAMES", 2), (conversation, "POLL_S", 0.001)
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    video, latent = in_pool(stock["video"], client), noise(1, 16, 3, 8, 4)
    video.decode(latent)
    assert not told, "more frames than were compared"
    video.decode(latent)
    assert len({total for _, total in told}) == 1 and told == sorted(told)
    assert told[0][0] < told[0][1]
    told.clear()
    in_pool(stock["image"], client).decode(noise(1, 16, 32, 32))
    assert told[0][0] < told[0][1], "as many as in the part that was compared"
    told.clear()
    is_page = False
    video.decode(latent)
    assert not told


@with_ranks_of_its_own
def test_a_rank_out_of_memory_is_named_where_comfyui_takes_tiles_and_the_next_is_right(
    stock, client, caplog, requests
):
    """Ranks may not map what the arena has grown by. The next such picture is taken in tiles, and
    no rank fails.
    """
    vae, latent = in_pool(stock["image"], client), noise(1, 16, 8, 6)
    truth = vae.decode(latent)
    pool, tiles = client.sessions.live.pool, []
    vae.decode_tiled_ = lambda samples: tiles.append(samples.shape) or truth.movedim(-1, 1)
    with caplog.at_level(logging.WARNING), confined(pool.ranks.pids, room=4 << 20):
        vae.decode(noise(1, 16, 512, 512))
    assert tiles == [(1, 16, 512, 512)]
    assert any(re.search(r"Rank \d on cpu ran out of memory while computing", one) for one in caplog.messages)
    requests.clear()
    vae.decode(noise(1, 16, 512, 512))
    assert len(tiles) == 2 and not requests["Forward"]
    assert torch.equal(vae.decode(latent), truth)


def two(axis="ulysses", ranks=2):
    return Choice(place(Layout(**{axis: ranks}), "cpu", "auto", ()))


def test_a_vae_that_cannot_be_cut_is_itself_and_a_notice_says_why(stock):
    patched = loaded(video_weights())
    patched.patcher.patches = {"conv1.weight": [1]}
    tiny = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
    for vae, choice, why in (
        (tiny, two(), "This VAE is decoded and encoded by ComfyUI on one device: it computes nothing"),
        (stock["video"], two("pipefusion"), ": stages of a pipeline hold parts of models."),
        (patched, two(), ": it has weight patches."),
    ):
        runtime = Runtime(fake_setup())
        assert parallelized(runtime, vae, choice) is vae
        assert why in runtime.notices.latest()[0].text


def test_a_vae_in_a_pool_is_parallelized_anew_from_the_stock_one_and_stands_for_it(stock):
    runtime = Runtime(fake_setup())
    made = parallelized(runtime, stock["video"], two())
    again = parallelized(runtime, made, two(ranks=3))
    assert isinstance(made.first_stage_model, FirstStage) and made is not stock["video"]
    assert again.first_stage_model.remote.vae is stock["video"]
    assert made.get_sd().keys() == stock["video"].get_sd().keys()


def test_a_vae_that_a_node_changes_behind_the_pool_is_refused_and_the_node_is_told_where_it_belongs(client):
    changed = loaded(video_weights())
    made = in_pool(changed, client)
    for change in (
        made.patcher.deepclone_multigpu,
        lambda: deepcopy(made),
        lambda: made.patcher.add_patches({}),
        lambda: made.patcher.add_object_patch("conv1", None),
    ):
        with pytest.raises(Refused, match="put the node that copies it, changes it or"):
            change()
    next(made.first_stage_model.modules()).forward = None
    with pytest.raises(Refused, match="What was changed: a node has put code of its own into it"):
        made.decode(noise(1, 16, 1, 6, 4))
