"""Two models in one run of a pool, as the stock Dual Model CFG Guider has them: each keeps its
weights in a way of its own, so their evaluations meet other ranks.
"""

import threading
from contextlib import contextmanager
from itertools import product

import comfy.model_management as mm
import comfy.samplers
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error
from pipemesh.parallel_runtime.client.remote_patcher import parallelize

from ..fixtures import ALL
from ..kit.models import load
from ..kit.patched import custom
from ..weights.test_kept_weights import release_all

WAYS = ("whole", "sharded", "offloaded")
LAYOUTS = {
    "ulysses 2": {"ulysses": 2},
    "cfg 2": {"ulysses": 1, "cfg": 2},
    "ulysses 2 x cfg 2": {"ulysses": 2, "cfg": 2},
    "ring 2 x data 2": {"ulysses": 1, "ring": 2, "data": 2},
}
COVER = [("ulysses 2 x cfg 2", ("whole", "sharded")), ("ulysses 2", ("sharded", "offloaded"))]
CASES = list(product(LAYOUTS, product(WAYS, WAYS))) if ALL else COVER
DEADLINE_S = 60.0  # only ever reached by a test that fails


@contextmanager
def deadline(client):
    """Ranks that wait for each other for ever are cancelled, and end."""
    timer = threading.Timer(DEADLINE_S, mm.interrupt_current_processing)
    timer.start()
    try:
        yield
    except BaseException:
        if not timer.is_alive():
            client.sessions._handle.close()
        raise
    finally:
        timer.cancel()


def guided(positive, negative, size=(8, 10), callback=None):
    guider = custom("DualModelGuider", positive, conditioning(1, 13), 3.0, negative, conditioning(2, 7))
    noise = torch.randn(1, 16, *size, generator=torch.Generator().manual_seed(2))
    sigmas = comfy.samplers.calculate_sigmas(positive.get_model_object("model_sampling"), "simple", 3)
    given = noise, torch.zeros_like(noise), comfy.samplers.sampler_object("euler"), sigmas
    with torch.inference_mode():
        return guider.sample(*given, callback=callback, disable_pbar=True, seed=2)


@pytest.mark.parametrize(("layout", "ways"), CASES, ids=str)
def test_two_models_at_once_are_stocks_however_each_keeps_its_weights(files, clients, layout, ways):
    """Twice, a cancel between, then at another size."""
    client, names, degrees = clients(**LAYOUTS[layout]), ("model", "other"), LAYOUTS[layout]
    release_all(client)
    stock = [load(files[name]) for name in names]
    given = zip(names, ways, strict=True)
    ours = [parallelize(load(files[name]), client, True, weights=way) for name, way in given]
    truth, wider = guided(*stock), guided(*stock, size=(10, 10))
    with deadline(client):
        assert relative_error(guided(*ours), truth) <= BOUND
        loads = client.sessions.live.loads
        pids = client.sessions.live.pool.ranks.pids
        with pytest.raises(mm.InterruptProcessingException):
            guided(*ours, callback=lambda *_: mm.interrupt_current_processing())
        assert not mm.processing_interrupted() and client.sessions.live.pool.ranks.pids == pids
        assert relative_error(guided(*ours), truth) <= BOUND
        assert relative_error(guided(*ours, size=(10, 10)), wider) <= BOUND
    assert client.sessions.live.loads == loads, "both stay, whichever is at work"
    kept = [client.sessions.live.models[model.remote.model].weights.kept for model in ours]
    shared = degrees.get("ring", 1) * degrees["ulysses"] > 1
    assert kept == ["whole" if way == "sharded" and not shared else way for way in ways]
