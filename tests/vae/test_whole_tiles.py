"""Where ComfyUI takes a picture in tiles, each rank computes whole ones, and the picture is
ComfyUI's own, to the bit.
"""

from types import SimpleNamespace

import comfy.utils
import pytest
import torch
from pipemesh.lab.bench.pools import confined
from pipemesh.parallel_runtime.client.lookahead import Lookahead
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.client.remote_vae import StepsDone, parallelize_vae
from pipemesh.parallel_runtime.client.tiles import side_by_side
from pipemesh.parallel_runtime.errors import PoolFailed, Refused
from pipemesh.parallel_runtime.layout import ALONE
from pipemesh.pool.handle import PoolHandle

from ..fixtures import with_ranks_of_its_own
from ..kit.fake_pools import cpus
from ..kit.vaes import image_weights, loaded, noise, random, video_weights
from ..pool.test_pool_faults import Once, in_forward, kill


@pytest.fixture(autouse=True)
def as_nodes_run():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def stock():
    image = loaded(image_weights())
    random(image.first_stage_model)  # what the file has no weights for, too
    return {"image": image, "video": loaded(video_weights())}


def parallel(vae, client):
    return parallelize_vae(vae, lambda: client, holds_ui_device=False)


@pytest.fixture
def sets(client, monkeypatch):
    """The ranks of all that is submitted together, of each such set."""
    seen, dispatch = [], client.evaluations.dispatch

    def noted(run, works, interrupted):
        assert {work.width for work in works} == {ALONE}
        seen.append([work.ranks for work in works])
        return dispatch(run, works, interrupted)

    monkeypatch.setattr(client.evaluations, "dispatch", noted)
    return seen


CASES = {
    "images, with smaller tiles at the edges": (
        "image",
        lambda vae: vae.decode_tiled(noise(2, 16, 8, 7), tile_x=6, tile_y=4, overlap=1),
    ),
    "an image that is one tile": (
        "image",
        lambda vae: vae.decode_tiled(noise(1, 16, 4, 4), tile_x=16, tile_y=16, overlap=2),
    ),
    "pixels to latents": (
        "image",
        lambda vae: vae.encode_tiled(noise(1, 56, 40, 3).sigmoid(), tile_x=32, tile_y=32, overlap=8),
    ),
    "a video, in time too": (
        "video",
        lambda vae: vae.decode_tiled(
            noise(1, 16, 4, 7, 5), tile_x=4, tile_y=4, overlap=1, tile_t=2, overlap_t=1
        ),
    ),
    "frames to latents, in time too": (
        "video",
        lambda vae: vae.encode_tiled(
            noise(9, 40, 56, 3).sigmoid(), tile_x=32, tile_y=32, overlap=8, tile_t=5, overlap_t=1
        ),
    ),
}


@pytest.mark.host
@pytest.mark.parametrize("case", CASES)
def test_whole_tiles_go_to_ranks_as_many_at_once_and_the_picture_is_stocks_to_the_bit(
    case, stock, client, sets
):
    kind, use = CASES[case]
    truth = use(stock[kind])
    ours = use(parallel(stock[kind], client))
    assert truth.dtype == ours.dtype and torch.equal(ours, truth)
    *full, last = sets
    assert all(ranks == [(0,), (1,)] for ranks in full) and last in ([(0,)], [(0,), (1,)])


def no_room(*_args, **_options):
    raise torch.OutOfMemoryError("no room")


FALLBACKS = {
    "an image": ("image", "decode", (1, 16, 4, 72)),
    "a video": ("video", "decode", (1, 16, 2, 4, 60)),
    "frames": ("video", "encode", (1, 32, 464, 3)),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_tiles_that_comfyui_takes_where_memory_ran_out_are_stocks_to_the_bit(
    case, stock, client, sets, monkeypatch
):
    kind, work, shape = FALLBACKS[case]
    ours, picture = parallel(stock[kind], client), noise(*shape).sigmoid()
    ours.first_stage_model.decode = ours.first_stage_model.encode = no_room
    made = getattr(ours, work)(picture)
    assert len(sets) > 1
    model, whole = stock[kind].first_stage_model, getattr(stock[kind].first_stage_model, work)
    calls = iter([no_room])
    monkeypatch.setattr(model, work, lambda *args: next(calls, whole)(*args))
    assert torch.equal(made, getattr(stock[kind], work)(picture))


def test_each_tile_is_computed_once_however_much_larger_than_its_latent_the_picture_is(
    stock, client, sets, requests, monkeypatch
):
    """A first latent frame makes one frame, each later one four."""
    vae, submit = parallel(stock["video"], client), client.evaluations.submit

    def submitted(*args, **kwargs):
        assert requests["Forward"] < 20, "the same tiles again and again"
        return submit(*args, **kwargs)

    monkeypatch.setattr(client.evaluations, "submit", submitted)
    for frames in (1, 2, 1):
        latent, tiles = noise(1, 16, frames, 4, 7), {"tile_x": 4, "tile_y": 4, "overlap": 1}
        assert torch.equal(vae.decode_tiled(latent, **tiles), stock["video"].decode_tiled(latent, **tiles))
    assert requests["Forward"] == sum(map(len, sets))


def test_the_progress_that_comfyui_shows_is_that_of_tiles_that_are_there(stock, client, sets, monkeypatch):
    shown = []
    monkeypatch.setattr(
        comfy.utils,
        "PROGRESS_BAR_HOOK",
        lambda value, total, *_args, **_named: shown.append((value, total, len(sets))),
    )
    hook = comfy.utils.PROGRESS_BAR_HOOK
    parallel(stock["image"], client).decode_tiled(noise(1, 16, 9, 4), tile_x=4, tile_y=4, overlap=1)
    assert comfy.utils.PROGRESS_BAR_HOOK is hook
    (first, total, _), *_, (last, _, _) = shown
    assert (first, last) == (1, total) and all(value <= 2 * done for value, _, done in shown)


@with_ranks_of_its_own
def test_a_tile_out_of_memory_is_named_as_comfyuis_own_and_the_same_pool_goes_on(stock, client):
    vae, latent = parallel(stock["image"], client), noise(1, 16, 9, 4)
    small = {"tile_x": 4, "tile_y": 4, "overlap": 1}
    truth = vae.decode_tiled(latent, **small)
    pool = client.sessions.live.pool
    named = pytest.raises(torch.OutOfMemoryError, match=r"Rank \d on cpu ran out of memory while computing")
    with confined(pool.ranks.pids, room=4 << 20), named:
        vae.decode_tiled(noise(1, 16, 512, 512), tile_x=256, tile_y=256, overlap=8)
    low = pool.arena.take(8 << 20)  # so that what comes now lies where the ranks had no room
    assert torch.equal(vae.decode_tiled(latent, **small), truth) and client.sessions.live.pool is pool
    pool.arena.give(low, 8 << 20)


def test_a_cancel_amid_tiles_is_the_hosts_interrupt_and_the_next_is_right(stock, client):
    import comfy.model_management as mm

    vae, tiles = parallel(stock["video"], client), {"tile_x": 4, "tile_y": 4, "overlap": 1}
    truth = vae.decode_tiled(noise(1, 16, 2, 7, 5), **tiles)
    pool = client.sessions.live.pool
    once = Once(lambda: in_forward(pool, 1, 30), mm.interrupt_current_processing)
    with pytest.raises(mm.InterruptProcessingException):
        vae.decode_tiled(noise(1, 16, 9, 32, 24), tile_x=16, tile_y=16, overlap=2)
    once.join()
    assert torch.equal(vae.decode_tiled(noise(1, 16, 2, 7, 5), **tiles), truth)
    assert client.sessions.live.pool is pool


def test_a_rank_killed_amid_tiles_is_named_and_the_next_is_right(stock, setup):
    handle = PoolHandle(cpus(2), setup)
    try:
        vae = parallel(stock["video"], RemotePool(handle))
        tiles = {"tile_x": 4, "tile_y": 4, "overlap": 1}
        truth = vae.decode_tiled(noise(1, 16, 2, 7, 5), **tiles)
        pool = handle.live()
        once = Once(lambda: in_forward(pool, 1, 30), lambda: kill(pool, 1))
        with pytest.raises(PoolFailed, match=r"^Rank 1 on cpu was killed .* while computing: run again"):
            vae.decode_tiled(noise(1, 16, 9, 32, 24), tile_x=16, tile_y=16, overlap=2)
        once.join()
        assert torch.equal(vae.decode_tiled(noise(1, 16, 2, 7, 5), **tiles), truth)
    finally:
        handle.close()


# -- the loop that runs twice


def test_no_more_is_computed_or_kept_at_once_than_is_to_be():
    now = []

    def together(asked):
        now.append(len(asked))
        return [one * 10 for one in asked]

    ahead = Lookahead(together, 3, "another way")
    for one in range(8):
        ahead.ask(one)
    for one in range(8):
        assert ahead.answer() == one * 10 and len(ahead._answers) < 3
    with pytest.raises(Refused, match="another way"):
        ahead.answer()
    assert now == [3, 3, 2]


def test_a_loop_that_asks_for_another_tile_than_at_first_is_refused():
    """Of two tiles with the same numbers, some of which are none, either will do."""
    picture = torch.tensor([1.0, torch.nan, torch.inf, 3.0, 4.0, 5.0])

    def made(ask_width, width):
        return side_by_side(
            lambda on_tile: [on_tile(tile) for tile in picture.split(ask_width)],
            lambda on_tile: torch.cat([on_tile(tile) for tile in picture.split(width)]),
            lambda tiles: [tile * 2 for tile in tiles],
            2,
        )

    assert torch.equal(made(2, 2).nan_to_num(), (picture * 2).nan_to_num())
    with pytest.raises(Refused, match="goes through the tiles of this picture in another way"):
        made(2, 3)
    with pytest.raises(Refused, match="goes through the tiles of this picture in another way"):
        side_by_side(lambda one: one(picture), lambda one: [one(picture) for _ in "ab"], list, 1)


def test_the_steps_that_are_shown_are_of_this_request_from_its_first_on():
    """Until its rank begins it, the board has those of the request before."""
    progress = (5 << 32) + 7
    done = StepsDone(SimpleNamespace(progress=lambda rank: progress), 0, 9)
    assert done.count() == 0
    progress = (6 << 32) + 3
    assert done.count() == 3
