"""What ComfyUI does first with the pack: import it, whatever its folder is called, and ask for its
extension.
"""

import asyncio
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(params=["comfyui-pipemesh-main", "pipe mesh", "pipemesh.v0.2"])
def pack(monkeypatch, request):
    """The root package under a name like the one ComfyUI makes of a path."""
    name = f"/some where/custom_nodes/{request.param}".replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def comfyui(monkeypatch, version):
    module = ModuleType("comfyui_version")
    module.__version__ = version
    module.__spec__ = ModuleSpec("comfyui_version", None)
    monkeypatch.setitem(sys.modules, "comfyui_version", module)


@pytest.mark.parametrize("version", ["0.29.9", "0.3.40", "0.4"])
def test_a_comfyui_that_is_too_old_is_named_with_both_versions(pack, monkeypatch, version):
    comfyui(monkeypatch, version)
    with pytest.raises(ImportError, match=rf"PipeMesh needs ComfyUI 0\.30\.0 or newer and this is {version}: update ComfyUI"):
        asyncio.run(pack.comfy_entrypoint())


@pytest.mark.parametrize("version", ["0.30.0", "0.31", "1.0.0", "0.30.1rc2"])
def test_a_newer_comfyui_is_welcome(pack, monkeypatch, version):
    comfyui(monkeypatch, version)
    pack.check_host()


def test_outside_comfyui_the_sentence_says_where_the_folder_belongs(pack, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="put this folder into ComfyUI's custom_nodes"):
        pack.check_host()


@pytest.mark.parametrize("package", ["greenlet", "msgspec"])
def test_a_missing_dependency_is_named_with_the_command_that_installs_it(pack, monkeypatch, package):
    comfyui(monkeypatch, "0.30.0")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(ImportError, match=rf"needs {package}, missing.*pip install -r .*requirements\.txt"):
        pack.check_host()


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("PIPEMESH_STALL_S", "abc", "PIPEMESH_STALL_S is abc: set it to a number of seconds from 1 to 86400."),
        ("PIPEMESH_STALL_S", "0", "PIPEMESH_STALL_S is 0: set it to a number of seconds from 1 to 86400."),
        ("PIPEMESH_STALL_S", "nan", "PIPEMESH_STALL_S is nan: set it to a number of seconds from 1 to 86400."),
        ("PIPEMESH_LOST_S", "a minute", "PIPEMESH_LOST_S is a minute: set it to a number of seconds from 2 to 120."),
    ],
)
def test_a_variable_that_cannot_be_read_is_told_when_a_pool_is_to_start_and_the_nodes_load(monkeypatch, caplog, variable, value, sentence):
    from pipemesh.nodes.extension import PipeMeshExtension
    from pipemesh.parallel_runtime.errors import LayoutError

    monkeypatch.setenv(variable, value)
    nodes = {node.GET_SCHEMA().node_id: node for node in asyncio.run(PipeMeshExtension().get_node_list())}
    assert caplog.messages == [f"[PipeMesh] {sentence}"]
    (choice,) = nodes["PipeMeshPool"].execute(devices="cpu,far/cpu", ulysses=2, backend="auto").result
    assert "has sampled nothing" in nodes["PipeMeshReport"].execute(pool=choice).result[1]
    for _ in range(2):
        with pytest.raises(LayoutError) as caught:
            nodes["PipeMeshParallelize"].execute(model=None, pool=choice)
        assert str(caught.value) == sentence


def test_a_second_copy_of_the_pack_is_refused_with_both_folders_and_replaces_nothing(monkeypatch):
    import comfy.samplers
    from aiohttp import web
    from pipemesh.nodes import extension
    from pipemesh.nodes.routes import add_routes
    from pipemesh.parallel_runtime.errors import PipeMeshError

    class Server:
        routes = web.RouteTableDef()

    monkeypatch.setattr(extension.PromptServer, "instance", Server, raising=False)
    assert extension.folder_with_routes(Server.routes) is None
    add_routes(Server.routes, None, None, None)
    monkeypatch.setattr(extension, "PACK", ROOT.with_name("pipemesh-main"))
    before = len(Server.routes), dict(vars(comfy.samplers.CFGGuider))
    both = f"twice, in {ROOT} and in {extension.PACK}: remove one of the two folders."
    with pytest.raises(PipeMeshError, match=re.escape(both)):
        asyncio.run(extension.PipeMeshExtension().on_load())
    assert (len(Server.routes), dict(vars(comfy.samplers.CFGGuider))) == before


def test_importing_the_pack_alone_touches_neither_torch_nor_comfyui(tmp_path):
    import subprocess

    script = f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); import importlib; importlib.import_module({ROOT.name!r}); "
    script += "print([name for name in ('torch', 'comfy', 'aiohttp') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.strip() == "[]"
