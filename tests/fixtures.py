"""ComfyUI on the CPU, and pools that are started once and shared by the whole run."""

import gc
import json
import os
import select
import signal
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
ALL = "PIPEMESH_TEST_ALL" in os.environ  # else what takes long is a cover of what it is by command
PACKS = Path(os.environ.get("PIPEMESH_TEST_PACKS", "/nowhere"))  # a folder with other node packs
COMFYUI = json.loads(os.environ.get("PIPEMESH_HOST", "{}")).get("comfyui", "")

gc.disable()  # until all is collected: next to nothing that is imported is garbage
if COMFYUI and COMFYUI not in sys.path:
    sys.path.insert(0, COMFYUI)

import torch  # noqa: E402

torch.set_num_threads(1)

ON_A_GPU = ROOT / "tests" / "cuda"


def pytest_addoption(parser):
    parser.addoption("--forked-from", help="where to ask for the process that ranks are forked from")
    parser.addoption("--screens", help="a folder for the pictures that tests take of pages")
    parser.addoption(
        "--browser", action="store_true", help="also the tests that open ComfyUI's page in a Chromium"
    )
    parser.addoption("--clients", help="a Python that has clients of ComfyUI's API, to run them")
    parser.addoption("--cuda", action="store_true", help="only the checks on a GPU, and a report of them")
    parser.addoption(
        "--cuda-as",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: to work on these checks without a GPU",
    )


def pytest_ignore_collect(collection_path, config):
    is_check = ON_A_GPU in (collection_path, *collection_path.parents)
    if config.getoption("--cuda"):
        return None if is_check or collection_path.is_dir() else True
    return True if is_check else None


def pytest_collection_modifyitems(config, items):
    may_take_long = ALL or config.getoption("--browser") or config.getoption("--cuda")
    for item in items:
        if item.get_closest_marker("browser") and (why := why_no_browser(config, item)):
            item.add_marker(pytest.mark.skip(reason=why))
        if may_take_long:
            item.add_marker(pytest.mark.timeout(1500))
    if not ALL and (left_out := set(left_out_of_covers(items))):
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def left_out_of_covers(items):
    """The cases of tests marked `cover(share)` that run only with PIPEMESH_TEST_ALL."""
    from .kit.cover import chosen

    tests = {}
    for item in items:
        if item.get_closest_marker("cover"):
            tests.setdefault((item.path, item.function), []).append(item)
    for cases in tests.values():
        taken = chosen(
            [case.callspec.indices for case in cases], cases[0].get_closest_marker("cover").args[0]
        )
        yield from (case for number, case in enumerate(cases) if number not in taken)


def pytest_collection_finish():
    gc.enable()
    gc.collect()
    gc.freeze()  # torch's and ComfyUI's own objects: a collection in a test would look at each of them again


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Workers take file after file, and one of them all files that share a server."""
    from xdist.scheduler import LoadFileScheduling

    class ByFiles(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "server" if "/test_end_to_end" in file else file

    gc.enable()  # this process collects nothing
    return ByFiles(config, log)


@pytest.fixture(scope="module", autouse=True)
def those_before_frozen():
    """Nor at what is left of the modules before."""
    gc.collect()
    gc.freeze()


def why_no_browser(config, item):
    """Why a test that opens a page is left out; empty where it is not."""
    from pipemesh.lab.comfyui.page import lack

    if not (config.getoption("--browser") or item.get_closest_marker("quick")):
        return "opens a page: run with --browser"
    return lack()


def pytest_configure(config):
    config.addinivalue_line("markers", "browser: opens ComfyUI's page in a Chromium, with --browser")
    config.addinivalue_line(
        "markers", "host: faces ComfyUI's own code, so .ci/run runs it on every ComfyUI of PIPEMESH_HOSTS"
    )
    config.addinivalue_line(
        "markers", "quick: of those, runs without --browser too, where there is a Chromium"
    )
    config.addinivalue_line(
        "markers", "cover(share): one of so many cases runs; PIPEMESH_TEST_ALL runs them all"
    )
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
    is_on_gpu = config.getoption("--cuda") and config.getoption("--cuda-as") == "cuda"
    if is_on_gpu and (sentence := cuda_report().without_a_gpu()):
        raise pytest.UsageError(sentence)
    import comfy.cli_args

    comfy.cli_args.args.cpu = not is_on_gpu


def cuda_report():
    from .cuda import report

    return report


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--cuda"):
        return
    from datetime import date

    import comfyui_version

    made, stats = cuda_report(), terminalreporter.stats
    ran = [
        (one, "failed" if outcome == "error" else outcome)
        for outcome in (*made.MARKS, "error")
        for one in stats.get(outcome, ())
    ]
    checks = [made.check_of(one, outcome) for one, outcome in sorted(ran, key=lambda pair: pair[0].start)]
    facts = made.facts_of(
        config.getoption("--cuda-as"), comfyui_version.__version__, date.today().isoformat()
    )
    terminalreporter.write_line(made.text(facts, checks))


@pytest.fixture(scope="session")
def setup_as_users():
    """Ranks import ComfyUI for themselves."""
    from pipemesh.pool.rank_setup import RankSetup

    return RankSetup(comfyui=COMFYUI, comfy_args={"cpu": True})


@pytest.fixture(scope="session")
def setup(setup_as_users, pytestconfig):
    """Ranks are forked with ComfyUI imported: a second less for each."""
    from pipemesh.lab.bench.forked import above
    from pipemesh.lab.forks import AT_HAND, handed_out
    from pipemesh.pool.fork_server import ForkServer
    from pipemesh.pool.rank_setup import KEEP_MEMORY

    if path := pytestconfig.getoption("--forked-from"):
        yield replace(setup_as_users, start=above(*handed_out(path)).fork)
        return
    server = ForkServer(tuple(KEEP_MEMORY), (AT_HAND,))
    yield replace(setup_as_users, start=server.start)
    server.close()


@pytest.fixture
def started():
    """Starts pools of fake ranks."""
    from .kit.fake_pools import Pools

    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def clients(setup):
    """(ulysses, ring, pipefusion, cfg, data) -> a Client of a running CPU pool of that layout."""
    with running_clients(setup) as client:
        yield client


@contextmanager
def running_clients(setup):
    """As ``clients``, with pools of their own that end here."""
    from pipemesh.parallel_runtime.client.remote_pool import RemotePool
    from pipemesh.parallel_runtime.layout import Layout
    from pipemesh.pool.devices import place
    from pipemesh.pool.handle import PoolHandle

    made = {}

    def client(ulysses: int, ring: int = 1, pipefusion: int = 1, cfg: int = 1, data: int = 1) -> RemotePool:
        layout = Layout(ulysses=ulysses, ring=ring, pipefusion=pipefusion, cfg=cfg, data=data)
        if layout not in made:
            handle = PoolHandle(place(layout, "cpu", "gloo", ()), setup)
            made[layout] = (RemotePool(handle), handle)
        return made[layout][0]

    try:
        yield client
    finally:
        for _client, handle in made.values():
            handle.close()


@pytest.fixture(scope="module")
def broken(setup, tmp_path_factory):
    """(mutation, ulysses, ring, pipefusion) -> a Client of a running CPU pool of that layout whose
    ranks have it.
    """
    from pipemesh.parallel_runtime.client.remote_pool import RemotePool

    mutation_file = tmp_path_factory.mktemp("mutation") / "name"
    argv = (
        sys.executable,
        str(ROOT / "tests" / "kit" / "mutant_worker.py"),
        str(mutation_file),
        "{fd}",
        "{parent}",
    )
    made = {}

    def client(mutation: str, *degrees: int) -> RemotePool:
        mutation_file.write_text(mutation)
        if degrees in made and made[degrees].sessions.live is not None:
            for model in list(made[degrees].sessions.live.models):  # ranks break when they load
                made[degrees].residency.release(model)
        pool = pools(*degrees)
        made[degrees] = RemotePool(pool.sessions._handle)
        return made[degrees]

    with running_clients(replace(setup, argv=argv)) as pools:
        yield client


@pytest.fixture(scope="module")
def truths():
    from .kit.pipelines import Truths

    return Truths()


@pytest.fixture(scope="module")
def pipeline(clients, truths):
    from .kit.pipelines import pipelines

    return pipelines(clients, truths)


@pytest.fixture
def broken_pipeline(broken, truths):
    from .kit.pipelines import broken_pipelines

    return broken_pipelines(broken, truths)


@pytest.fixture
def ranks(tmp_path, setup):
    """layout, task of rank_main.py -> what each of that many real ranks says."""
    from pipemesh.pool.crew import rank_environment
    from pipemesh.pool.devices import Device
    from pipemesh.pool.supervisor import Command

    def ask(layout, task: str) -> list:
        command = (
            sys.executable,
            str(ROOT / "tests" / "kit" / "rank_main.py"),
            str(ROOT),
            COMFYUI,
            str(tmp_path / "store"),
        )
        degrees = [str(degree) for degree in (layout.ulysses, layout.ring)]
        env = rank_environment(Device("cpu"), "gloo", dict(os.environ))
        with ExitStack() as stack:
            made = []
            for rank in range(layout.world_size):
                made.append(setup.start(Command((*command, str(rank), *degrees, task), env, 0)))
                stack.callback(made[-1].wait)
                stack.callback(made[-1].kill)
            return [json.loads(all_said_by(process).splitlines()[-1]) for process in made]

    return ask


def all_said_by(process):
    """Its output, once it has ended."""
    said = b""
    while select.select([process.stdout], [], [], 120)[0]:
        if not (more := process.stdout.read(1 << 16)):
            return said.decode()
        said += more
    raise TimeoutError(said)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Paths of small checkpoints, and of a LoRA of the first."""
    from .kit.models import write_lora, write_model

    folder = tmp_path_factory.mktemp("models")
    model = write_model(folder / "model.safetensors", blocks=(2, 2))
    other = write_model(folder / "other.safetensors", blocks=(1, 1), seed=5)
    return {
        "model": str(model),
        "other": str(other),
        "lora": str(write_lora(folder / "lora.safetensors", model, rank=4)),
    }


@pytest.fixture
def client(request, clients, setup):
    if not hasattr(request, "param"):
        yield clients(2)
        return
    with running_clients(setup) as alone:
        yield alone(2)


# A rank that had no memory for oneDNN's code once cannot convolve tensors of another shape later
with_ranks_of_its_own = pytest.mark.parametrize("client", ["alone"], indirect=True)


@pytest.fixture
def requests(client, monkeypatch):
    """Counts what is asked of the pool, by message type."""
    client.sessions.open(lambda: False)
    pool = client.sessions.live.pool
    seen = Counter()
    real = pool.submit

    def submit(request, *args, **kwargs):
        seen[type(request).__name__] += 1
        return real(request, *args, **kwargs)

    monkeypatch.setattr(pool, "submit", submit)
    return seen


@pytest.fixture
def pair(files, client):
    """The stock MODEL of a file, and a parallel MODEL of another stock object, as in a graph
    with two loaders.
    """
    from pipemesh.parallel_runtime.client.remote_patcher import parallelize

    from .kit.models import load

    return load(files["model"]), parallelize(load(files["model"]), client, holds_ui_device=True)


# -- a real ComfyUI


@pytest.fixture(scope="session")
def host():
    from pipemesh.launcher.comfyui.host_record import ComfyInstall

    return ComfyInstall.from_json(os.environ["PIPEMESH_HOST"])


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with a model and a LoRA of it."""
    from .kit.models import write_lora, write_model

    folder = tmp_path_factory.mktemp("models")
    model = write_model(folder / "model.safetensors", blocks=(2, 4))
    write_lora(folder / "lora.safetensors", model)
    return folder


@pytest.fixture(scope="session")
def server(host, models):
    """A server that all files named test_end_to_end share, in the order of their names."""
    from .kit.served import start

    # A server ignores what a test in the background does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with start(host, models) as running:
        yield running


@pytest.fixture(scope="session")
def opened_page(server):
    """Its page, opened in a Chromium once: to load it takes five seconds of a CPU."""
    from pipemesh.lab.comfyui.page import ComfyPage

    server.post("/settings/Comfy.TutorialCompleted", True)
    with ComfyPage(server.address) as opened:
        yield opened


@pytest.fixture(scope="session")
def truth(server):
    from .kit.served import graph, latent

    return latent(server, graph("truth", parallel=False))[0]


@pytest.fixture(scope="session")
def screens(request, tmp_path_factory):
    """The folder for pictures of pages, put together at the end."""
    from .kit.screens import put_together

    folder = request.config.getoption("--screens")
    folder = Path(folder) if folder else tmp_path_factory.mktemp("screens")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    put_together(folder)
