"""Auto mode decodes and encodes in the pool that is up where that was seen to be worth it, and by
stock, with a notice, what the pool cannot.
"""

import gc
import weakref

import comfy.sd
import pytest
import torch
from comfy_execution.utils import CurrentNodeContext
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.nodes.auto.decoding import TRIES, WORTH_S, VAETimes
from pipemesh.nodes.auto.seam import OF_VAES, HostChanged, VAESeam
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.errors import Refused

from ..kit.shared_runtime import settings, switched
from ..kit.vaes import image_weights, in_pool, loaded, noise, video_weights

__all__ = ["settings", "switched"]  # fixtures
KIND = (torch.nn.Module, 10**6, torch.float32, "decode")
LATENT, PIXELS = noise(1, 16, 1, 7, 4), noise(1, 57, 40, 3).sigmoid()
USES = {
    "decode": lambda vae: vae.decode(samples_in=LATENT),
    "tiles": lambda vae: vae.decode_tiled(LATENT, tile_x=4, tile_y=4, overlap=1),
    "encode": lambda vae: vae.encode(PIXELS),
}
decode = USES["decode"]


def in_pool_by_now():
    """A VAE of which ranks have made the third picture, and stock's picture."""
    vae = loaded(video_weights())
    truth, *_ = (decode(vae) for _ in range(3))
    return vae, truth


@pytest.mark.host
@pytest.mark.parametrize("use", USES)
def test_the_third_picture_of_a_kind_is_made_in_the_pool_and_is_the_same(switched, requests, use):
    vae = loaded(video_weights())
    truth, _ = (USES[use](vae) for _ in range(TRIES))
    assert not requests["Forward"]
    ours = USES[use](vae)
    assert requests["Forward"] and ours.shape == truth.shape and relative_error(ours, truth) <= BOUND
    assert not switched.said()


def test_switched_off_or_while_a_sampler_runs_a_vae_is_stocks_and_ranks_free_it(switched, requests, client):
    vae, truth = in_pool_by_now()
    before = len(client.sessions.live.models)
    requests.clear()
    sampled = PooledModel("sampled", "sampled")
    client.runs.begin(sampled)
    assert torch.equal(decode(vae), truth) and not requests["Forward"]
    client.runs.end(sampled)
    decode(vae)
    assert requests["Forward"]
    requests.clear()
    switched(False)
    assert torch.equal(decode(vae), truth) and not requests["Forward"]
    assert len(client.sessions.live.models) == before - 1


def test_a_vae_that_nobody_holds_any_more_goes_and_ranks_free_it(switched, client):
    vae, _ = in_pool_by_now()
    gone, before = weakref.ref(vae), len(client.sessions.live.models)
    del vae
    gc.collect()
    assert gone() is None
    decode(loaded(video_weights()))
    client.residency._release_unused(client.sessions.live)
    assert len(client.sessions.live.models) < before


def test_what_the_pool_refuses_is_made_by_stock_with_one_notice(switched, requests):
    changed = loaded(video_weights())
    truth = decode(changed)
    changed.first_stage_model.decoder.conv1.forward = changed.first_stage_model.decoder.conv1.forward
    for _ in range(3):
        assert torch.equal(decode(changed), truth)
    assert not requests["Forward"]
    (said,) = switched.said()
    assert said.startswith("This VAE is decoded and encoded by ComfyUI on one device: a node has put code")


def test_a_cut_that_computes_something_else_is_stocks_picture_with_the_figure(switched, broken):
    switched.runtime._client = pool = broken("a_vae_sees_no_rows_beside_its_band", 2)
    vae, pictures = loaded(video_weights()), []
    for prompt in "abcde":
        with CurrentNodeContext(prompt, "7"):
            pictures.append(decode(vae))
    assert all(torch.equal(pictures[0], one) for one in pictures)
    assert not pool.sessions.live.models, "ranks free it"
    (notice,) = switched.notices.latest()
    assert "by bands of rows is" in notice.text and "% off from what one device makes" in notice.text
    assert notice.count == 1, "it is tried once"
    with pytest.raises(Refused, match=r"^WanVAE by bands of rows is [\d.]+% off from what one device"):
        in_pool(vae, pool).decode(LATENT)  # there is no stock to go to in a pool that a user made


def test_a_pool_that_is_slower_twice_is_left_and_a_notice_says_so(switched, requests, monkeypatch):
    monkeypatch.setattr(VAETimes, "is_slower", lambda self, kind, ranks: bool(requests["Forward"]))
    vae, _ = in_pool_by_now()
    made = requests["Forward"]
    assert made and switched.said() == [
        "This VAE is decoded and encoded by ComfyUI on one device from now on: 2 workers were slower, 2 times."
    ]
    decode(vae)
    assert requests["Forward"] == made


def test_a_node_that_wants_gradients_gets_them(switched, requests):
    with torch.inference_mode(False), torch.enable_grad():
        in_pool_by_now()
    assert not requests["Forward"]


@given(st.integers(2, 8), st.floats(1e-6, 1e-2), st.integers(1, 10**6))
def test_a_pool_is_tried_where_it_may_save_enough_and_left_where_it_was_slower(ranks, rate, numbers):
    times = VAETimes()
    share = 1 / ranks
    assert not times.is_worth(KIND, ranks, numbers, share), "one device was never timed"
    times.note(KIND, 1, 10, 20 * rate)  # with something beside it
    assert not times.is_worth(KIND, ranks, 10**9, share), "the VAE was loaded then"
    times.note(KIND, 1, 10, 10 * rate)
    assert times.is_worth(KIND, ranks, numbers, share) == (
        times._least[KIND, 1][0] * numbers * (1 - 1 / ranks) >= WORTH_S
    )
    assert not times.is_worth(KIND, ranks, numbers, 1.0), "one rank that computes all saves nothing"
    large = round(10 / rate)
    for tried in range(TRIES):
        assert times.is_worth(KIND, ranks, large, share), tried
        times.note(KIND, ranks, 10, 11 * rate)
    assert not times.is_worth(KIND, ranks, large, share)
    times.note(KIND, ranks, 10, 9 * rate)
    assert times.is_worth(KIND, ranks, large, share)


def test_a_host_whose_vae_looks_otherwise_is_left_alone(monkeypatch):
    own = {name: vars(comfy.sd.VAE)[name] for name in OF_VAES}
    noted = []
    seam = VAESeam(lambda vae, work, given, call: call(vae), lambda *what: noted.append(what))
    seam.install()
    loaded(image_weights()).decode_tiled(noise(1, 16, 8, 8))
    ((work, seconds, in_pool),) = noted
    assert (work, seconds > 0, in_pool) == ("decode", True, False)
    assert all(vars(comfy.sd.VAE)[name] is not own[name] for name in OF_VAES)
    seam.remove()
    assert {name: vars(comfy.sd.VAE)[name] for name in OF_VAES} == own
    monkeypatch.delattr(comfy.sd.VAE, "encode_tiled")
    with pytest.raises(HostChanged, match=r"has no comfy\.sd\.VAE\.encode_tiled: update PipeMesh"):
        seam.install()
    assert vars(comfy.sd.VAE)["decode"] is own["decode"]
