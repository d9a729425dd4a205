"""Where ComfyUI takes a picture in tiles, each rank computes whole ones, and the picture is
ComfyUI's own, to the bit.
"""

from types import SimpleNamespace

import comfy.model_management as mm
import comfy.utils
import pytest
import torch
from pipemesh.lab.bench.pools import confined
from pipemesh.parallel_runtime.client.lookahead import Lookahead
from pipemesh.parallel_runtime.client.remote_vae import StepsDone
from pipemesh.parallel_runtime.client.tiles import side_by_side
from pipemesh.parallel_runtime.errors import PoolFailed, Refused
from pipemesh.parallel_runtime.layout import ALONE

from ..fixtures import with_ranks_of_its_own
from ..kit.at_once import Once, in_forward, kill
from ..kit.vaes import image_weights, in_pool, loaded, noise, random, video_weights


@pytest.fixture(autouse=True)
def as_nodes_run():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def vaes():
    image = loaded(image_weights())
    random(image.first_stage_model)  # what the file has no weights for, too
    return {"image": image, "video": loaded(video_weights())}


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


TILES = {"tile_x": 4, "tile_y": 4, "overlap": 1}
CASES = {
    "images, with smaller tiles at the edges": ("image", "decode_tiled", (2, 16, 5, 4), {}),
    "an image that is one tile": ("image", "decode_tiled", (1, 16, 4, 4), {"tile_x": 16, "tile_y": 16}),
    "pixels to latents": ("image", "encode_tiled", (1, 40, 32, 3), {}),
    "a video, in time too": ("video", "decode_tiled", (1, 16, 4, 7, 5), {"tile_t": 2, "overlap_t": 1}),
    "frames to latents, in time too": (
        "video", "encode_tiled", (9, 40, 56, 3), {"tile_t": 5, "overlap_t": 1}
    ),
}  # fmt: skip
OF_PIXELS = {"tile_x": 32, "tile_y": 32, "overlap": 8}


@pytest.mark.host
@pytest.mark.parametrize("case", CASES)
def test_whole_tiles_go_to_ranks_as_many_at_once_and_the_picture_is_stocks_to_the_bit(
    case, vaes, client, sets
):
    kind, work, shape, tiles = CASES[case]
    given, tiles = noise(*shape), (TILES if work == "decode_tiled" else OF_PIXELS) | tiles
    given = given if work == "decode_tiled" else given.sigmoid()
    truth, ours = (getattr(vae, work)(given, **tiles) for vae in (vaes[kind], in_pool(vaes[kind], client)))
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
    case, vaes, client, sets, monkeypatch
):
    kind, work, shape = FALLBACKS[case]
    ours, picture = in_pool(vaes[kind], client), noise(*shape).sigmoid()
    ours.first_stage_model.decode = ours.first_stage_model.encode = no_room
    made = getattr(ours, work)(picture)
    assert len(sets) > 1
    model, whole = vaes[kind].first_stage_model, getattr(vaes[kind].first_stage_model, work)
    calls = iter([no_room])
    monkeypatch.setattr(model, work, lambda *args: next(calls, whole)(*args))
    assert torch.equal(made, getattr(vaes[kind], work)(picture))


def test_each_tile_is_computed_once_however_much_larger_than_its_latent_the_picture_is(
    vaes, client, sets, requests, monkeypatch
):
    """A first latent frame makes one frame, each later one four."""
    vae, submit = in_pool(vaes["video"], client), client.evaluations.submit

    def submitted(*args, **kwargs):
        assert requests["Forward"] < 20, "the same tiles again and again"
        return submit(*args, **kwargs)

    monkeypatch.setattr(client.evaluations, "submit", submitted)
    for frames in (1, 2, 1):
        latent = noise(1, 16, frames, 4, 7)
        assert torch.equal(vae.decode_tiled(latent, **TILES), vaes["video"].decode_tiled(latent, **TILES))
    assert requests["Forward"] == sum(map(len, sets))


def test_the_progress_that_comfyui_shows_is_that_of_tiles_that_are_there(vaes, client, sets, monkeypatch):
    shown = []
    hook = lambda value, total, *_args, **_named: shown.append((value, total, len(sets)))  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    in_pool(vaes["image"], client).decode_tiled(noise(1, 16, 9, 4), **TILES)
    assert comfy.utils.PROGRESS_BAR_HOOK is hook
    (first, total, _), *_, (last, _, _) = shown
    assert (first, last) == (1, total) and all(value <= 2 * done for value, _, done in shown)


AMID = {  # what happens to tiles in flight: the error, what it says
    "cancel": (lambda _: mm.interrupt_current_processing(), mm.InterruptProcessingException, None),
    "kill": (lambda pool: kill(pool, 1), PoolFailed, r"^Rank 1 on cpu was killed .* computing: run again"),
}


@with_ranks_of_its_own
@pytest.mark.parametrize("what", AMID)
def test_a_cancel_or_a_killed_rank_amid_tiles_is_named_and_the_next_is_right(vaes, client, what):
    act, error, says = AMID[what]
    vae, latent = in_pool(vaes["video"], client), noise(1, 16, 2, 7, 5)
    truth = vae.decode_tiled(latent, **TILES)
    pool = client.sessions.live.pool
    once = Once(lambda: in_forward(pool, 1, 30), lambda: act(pool))
    with pytest.raises(error, match=says):
        vae.decode_tiled(noise(1, 16, 9, 32, 24), tile_x=16, tile_y=16, overlap=2)
    once.join()
    assert torch.equal(vae.decode_tiled(latent, **TILES), truth)
    assert (client.sessions.live.pool is pool) == (what == "cancel")


@with_ranks_of_its_own
def test_a_tile_out_of_memory_is_named_as_comfyuis_own_and_the_same_pool_goes_on(vaes, client):
    vae, latent = in_pool(vaes["image"], client), noise(1, 16, 9, 4)
    truth = vae.decode_tiled(latent, **TILES)
    pool = client.sessions.live.pool
    named = pytest.raises(torch.OutOfMemoryError, match=r"Rank \d on cpu ran out of memory while computing")
    with confined(pool.ranks.pids, room=4 << 20), named:
        vae.decode_tiled(noise(1, 16, 512, 512), tile_x=256, tile_y=256, overlap=8)
    low = pool.arena.take(8 << 20)  # so that what comes now lies where the ranks had no room
    assert torch.equal(vae.decode_tiled(latent, **TILES), truth) and client.sessions.live.pool is pool
    pool.arena.give(low, 8 << 20)


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

    def made(ask_width, width, times=1):
        return side_by_side(
            lambda on_tile: [on_tile(tile) for tile in picture.split(ask_width)],
            lambda on_tile: torch.cat([on_tile(tile) for _ in range(times) for tile in picture.split(width)]),
            lambda tiles: [tile * 2 for tile in tiles],
            2,
        )

    assert torch.equal(made(2, 2).nan_to_num(), (picture * 2).nan_to_num())
    for otherwise in ((2, 3), (6, 6, 2)):
        with pytest.raises(Refused, match="goes through the tiles of this picture in another way"):
            made(*otherwise)


def test_the_steps_that_are_shown_are_of_this_request_from_its_first_on():
    """Until its rank begins it, the board has those of the request before."""
    progress = (5 << 32) + 7
    done = StepsDone(SimpleNamespace(progress=lambda rank: progress), 0, 9)
    assert done.count() == 0
    progress = (6 << 32) + 3
    assert done.count() == 3
