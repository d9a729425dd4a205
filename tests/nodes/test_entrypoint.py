"""What ComfyUI does first with the pack: import it, whatever its folder is called, and ask for its
extension.
"""

import asyncio
import importlib.util
import re
import subprocess
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import comfy.samplers
import pytest
import torch
from aiohttp import web
from pipemesh.nodes import extension
from pipemesh.nodes.routes import add_routes
from pipemesh.parallel_runtime.errors import LayoutError, PipeMeshError
from pipemesh.pool.trial.known_hosts import known_hosts, untested

from ..project.test_architecture import VOCABULARY

ROOT = Path(__file__).resolve().parents[2]


LINUX = (
    "PipeMesh runs on Linux, and this is {}: run ComfyUI on Linux, or remove this folder from custom_nodes."
)
CALL = "PipeMesh needs {}, which this Python {} is built without: run ComfyUI with another Python."
PIP = "PipeMesh needs {}, missing here: run `python -m pip install -r {}` with ComfyUI's python."
OLD = "PipeMesh needs ComfyUI 0.30.0 or newer and this is {}: update ComfyUI."
VERSION, REQUIREMENTS = sys.version.split()[0], str(ROOT / "requirements.txt")
FOLDERS = ["comfyui-pipemesh-main", "pipe mesh", "pipemesh.v0.2"]
# What ComfyUI's start imports of how models are sampled; the rest waits for a MODEL
AT_START = {"comm", "comm.cores", "comm.shares", "errors", "layout", "planner", "planner.ways", "texts"}
AT_START |= {"client", "client.pool_marker", "client.patching", "client.wait"}
AT_START |= {"wire", "wire.arena", "wire.segment", "wire.tree"}


def comfyui(monkeypatch, version):
    module = ModuleType("comfyui_version")
    module.__version__ = version
    module.__spec__ = ModuleSpec("comfyui_version", None)
    monkeypatch.setitem(sys.modules, "comfyui_version", module)


def without(*names):
    """Takes away what the names say: an attribute of a module, or a module."""

    def take(monkeypatch):
        for name in names:
            module, _, attribute = name.partition(".")
            if attribute:
                monkeypatch.delattr(sys.modules[module], attribute)
            else:
                monkeypatch.setitem(sys.modules, module, None)

    return take


def on_system(platform):
    """Another system, without what only Linux has."""

    def take(monkeypatch):
        monkeypatch.setattr(sys, "platform", platform)
        fcntl = ["fcntl"] if platform == "win32" else []
        without("os.memfd_create", "os.posix_fallocate", *fcntl)(monkeypatch)

    return take


NO_GLOO = f"PipeMesh needs torch.distributed with gloo, which torch {torch.__version__} is built without:"
NO_HOST = "PipeMesh runs inside ComfyUI: put this folder into ComfyUI's custom_nodes and start ComfyUI."
LACKING = {
    "Windows": (on_system("win32"), LINUX.format("Windows")),
    "macOS": (on_system("darwin"), LINUX.format("macOS")),
    "memfd_create": (without("os.memfd_create"), CALL.format("os.memfd_create", VERSION)),
    "fcntl": (without("fcntl"), CALL.format("fcntl.ioctl", VERSION)),
    "torch.distributed": (
        lambda patch: patch.setattr("torch.distributed.is_available", lambda: False),
        f"{NO_GLOO} install a torch that has it.",
    ),
    "both requirements": (without("greenlet", "msgspec"), PIP.format("greenlet and msgspec", REQUIREMENTS)),
    **{
        f"ComfyUI {version}": (partial(comfyui, version=version), OLD.format(version))
        for version in ("0.29.9", "0.3.40", "0.4")
    },
    "ComfyUI": (without("comfyui_version"), NO_HOST),
}


@pytest.fixture
def loaded(monkeypatch, tmp_path, caplog):
    """Has ComfyUI's own loader load the pack from a folder of this name; returns whether it has
    got nodes, and what it has changed in ComfyUI.
    """
    import nodes

    kept = (nodes.EXTENSION_WEB_DIRS, nodes.NODE_CLASS_MAPPINGS, nodes.NODE_DISPLAY_NAME_MAPPINGS)
    for names in kept:
        for name in [name for name in names if "pipe" in name.lower()]:
            monkeypatch.delitem(names, name)

    def load(folder):
        link = tmp_path / folder
        link.symlink_to(ROOT, target_is_directory=True)
        caplog.clear()
        before, modules = [dict(one) for one in kept], set(sys.modules)
        caplog.set_level("WARNING")
        succeeded = asyncio.run(nodes.load_custom_node(str(link)))
        return succeeded, [dict(one) for one in kept] != before, sys.modules.keys() - modules

    return load


def imported(monkeypatch, name):
    """The pack by another name, and so with modules of its own."""
    init = ROOT / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(ROOT)])
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def modules(monkeypatch):
    """A function that names the modules in a folder of a pack that a ComfyUI has just started
    with, and imports one.
    """
    name = "pipemesh_once_more"
    host = SimpleNamespace(routes=web.RouteTableDef(), prompt_queue=SimpleNamespace(currently_running={}))
    monkeypatch.setattr("server.PromptServer.instance", host, raising=False)

    async def start():
        extension = await imported(monkeypatch, name).comfy_entrypoint()
        await extension.on_load()
        for node in await extension.get_node_list():
            node.GET_SCHEMA()
        return extension

    def within(folder, wanted=None):
        folder = f"{name}.{folder}."
        if wanted is not None:
            return importlib.import_module(folder + wanted)
        return {one.removeprefix(folder) for one in sys.modules if one.startswith(folder)}

    extension = asyncio.run(start())
    yield within
    extension._auto.remove()
    for one in [one for one in sys.modules if one.startswith(f"{name}.")]:
        del sys.modules[one]


@pytest.mark.parametrize("lacking", LACKING)
def test_what_is_missing_is_one_sentence_in_the_log_and_nothing_of_comfyui_changes(
    loaded, monkeypatch, caplog, lacking, tmp_path
):
    take, sentence = LACKING[lacking]
    with monkeypatch.context() as there:
        take(there)
        succeeded, has_changed, modules = loaded("pipemesh")
    pack = str(tmp_path / "pipemesh")
    told = f"Error while calling comfy_entrypoint in {pack}: {sentence.replace(str(ROOT), pack)}"
    assert [line for line in caplog.messages if "pipemesh" in line.lower()] == [told]
    assert not succeeded and not has_changed, "a page of its own, or nodes"
    assert {name.rpartition(".")[2] for name in modules if "pipemesh" in name} == {pack, "needs"}


def test_a_comfyui_that_knows_no_extensions_is_told_in_its_log_all_the_same(loaded, monkeypatch, caplog):
    comfyui(monkeypatch, "0.3.40")
    monkeypatch.setitem(sys.modules, "comfy_api", None)
    loaded("pipemesh")
    assert f"[PipeMesh] {OLD.format('0.3.40')}" in caplog.messages


@pytest.mark.parametrize(("version", "folder"), list(zip(["0.30.0", "0.31", "1.0.0"], FOLDERS, strict=True)))
def test_a_newer_comfyui_is_welcome_whatever_the_folder_is_called(monkeypatch, version, folder):
    comfyui(monkeypatch, version)
    name = f"/some where/custom_nodes/{folder}".replace(".", "_x_")
    module = imported(monkeypatch, name)
    assert (module.LACK, module.WEB_DIRECTORY) == ("", "./web")


STALL = "PIPEMESH_STALL_S is {}: set it to a number of seconds from 1 to 86400."
LOST = "PIPEMESH_LOST_S is {}: set it to a number of seconds from 2 to 120."
UNREADABLE = [
    ("PIPEMESH_STALL_S", "0", STALL),
    ("PIPEMESH_STALL_S", "nan", STALL),
    ("PIPEMESH_LOST_S", "a minute", LOST),
]


@pytest.mark.parametrize(("variable", "value", "says"), UNREADABLE)
def test_a_variable_that_cannot_be_read_is_told_when_a_pool_is_to_start_and_the_nodes_load(
    monkeypatch, caplog, variable, value, says
):
    sentence = says.format(value)
    monkeypatch.setenv(variable, value)
    made = asyncio.run(extension.PipeMeshExtension().get_node_list())
    nodes = {node.GET_SCHEMA().node_id: node for node in made}
    assert caplog.messages == [f"[PipeMesh] {sentence}"]
    (choice,) = nodes["PipeMeshPool"].execute(devices="cpu,far/cpu", layout="by hand", ulysses=2).result
    assert "has sampled nothing" in nodes["PipeMeshReport"].execute(pool=choice).result[1]
    for _ in range(2):
        with pytest.raises(LayoutError) as caught:
            nodes["PipeMeshParallelize"].execute(model=None, pool=choice)
        assert str(caught.value) == sentence


def test_a_second_copy_of_the_pack_is_refused_with_both_folders_and_replaces_nothing(monkeypatch):
    server = SimpleNamespace(routes=web.RouteTableDef())
    monkeypatch.setattr(extension.PromptServer, "instance", server, raising=False)
    assert extension.folder_with_routes(server.routes) is None
    add_routes(server.routes, None, None, None)
    monkeypatch.setattr(extension, "PACK", ROOT.with_name("pipemesh-main"))
    before = len(server.routes), dict(vars(comfy.samplers.CFGGuider))
    both = f"twice, in {ROOT} and in {extension.PACK}: remove one of the two folders."
    with pytest.raises(PipeMeshError, match=re.escape(both)):
        asyncio.run(extension.PipeMeshExtension().on_load())
    assert (len(server.routes), dict(vars(comfy.samplers.CFGGuider))) == before


def test_importing_the_pack_alone_touches_neither_torch_nor_comfyui(tmp_path):
    script = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1]); importlib.import_module(sys.argv[2]);"
        " sys.exit(any(name in sys.modules for name in ('torch', 'comfy', 'aiohttp')))"
    )
    command = [sys.executable, "-c", script, str(ROOT.parent), ROOT.name]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0


def test_comfyuis_start_imports_nothing_that_only_a_model_needs(modules):
    """No family, no planner, nothing of ranks and of the status."""
    assert modules("parallel_runtime") <= AT_START
    nodes = modules("nodes")
    assert not nodes & {"runtime", "planning", "auto.sampling", "status", "report.text"}
    assert len(nodes | modules("launcher") | modules("pool") | modules("parallel_runtime")) <= 50


def test_a_comfyui_that_pipemesh_was_not_tested_with_is_told_of():
    tested = known_hosts().versions[0]
    for is_tried, what in ((True, "are compared with stock"), (False, "PIPEMESH_TRIAL=0")):
        said = untested("99.0.0", is_tried=is_tried)
        assert said.startswith(f"ComfyUI 99.0.0 is not one that PipeMesh was tested with ({tested}")
        assert what in said and untested(tested, is_tried=is_tried) == ""


def test_the_log_says_so_when_comfyui_starts_and_also_with_cuda_graphs(monkeypatch, caplog, request):
    caplog.set_level("INFO", "pipemesh")
    monkeypatch.setenv("PIPEMESH_GRAPHS", "all")
    monkeypatch.setattr("comfyui_version.__version__", "99.0.0")
    tell_of_graphs = request.getfixturevalue("modules")("nodes", "extension").tell_of_graphs
    assert any("ComfyUI 99.0.0 is not one that PipeMesh was tested with" in one for one in caplog.messages)
    for value in ("", "0", "1", "yes"):
        tell_of_graphs(value)
    recorded = "workers on NVIDIA GPUs record CUDA graphs of what they compute between messages"
    recorded += ". No GPU has replayed these yet."
    assert [line for line in caplog.messages if "PIPEMESH_GRAPHS" in line] == [
        *(f"[PipeMesh] PIPEMESH_GRAPHS={one}: {recorded}" for one in ("all", "1")),
        "[PipeMesh] PIPEMESH_GRAPHS is yes, and counts as 0: set it to 1 or 0.",
    ]


def test_a_model_that_is_looked_at_imports_the_file_of_its_own_family_alone(modules):
    class Flux:
        """Named as ComfyUI's."""

    Flux.__module__, Flux.__qualname__ = "comfy.ldm.flux.model", "Flux"
    registry = modules("parallel_runtime", "families")
    assert registry.plan_for(Flux) is not None
    file = registry.file_of(f"{Flux.__module__}:{Flux.__qualname__}")
    assert modules("parallel_runtime.families") - VOCABULARY == {file}
