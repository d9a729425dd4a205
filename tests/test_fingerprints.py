"""What a class of ComfyUI's is, told by ComfyUI's files: text that does not run changes nothing,
and every change of what a forward may run is seen.
"""

from pathlib import Path

import pytest
from pipemesh.lab.commands.fingerprints import classes, with_host
from pipemesh.launcher.trial.known_hosts import FILE, KnownHosts, known_hosts
from pipemesh.parallel_runtime.watch.fingerprint import HostFiles

from .conftest import COMFYUI

MODEL = '''
import torch
from comfy.ldm.toy import layers
from comfy.ldm.toy.layers import Block as Layer
from .parts import scaled
import comfy.ops

class Model(torch.nn.Module):
    """A model."""
    SIZE = 2
    def forward(self, x):
        """Runs."""
        return scaled(Layer()(x)) + layers.shift(x, self.SIZE)
'''
FILES = {
    "ops.py": "class manual_cast:\n    def cast(self): return 1\n",
    "ldm/toy/__init__.py": "",
    "ldm/toy/model.py": MODEL,
    "ldm/toy/layers.py": (
        "from comfy.ldm.toy.parts import unused\n\n"
        "if True:\n    class Block:\n        def __call__(self, x): return x, 1\n\n\n"
        "def shift(x, by): return x + by\n\n\ndef nobody(): return 0\n"
    ),
    "ldm/toy/parts.py": "FACTOR = 3\n\n\ndef scaled(x): return x * FACTOR\n\n\ndef unused(): pass\n",
}
KIND = "comfy.ldm.toy.model:Model"


@pytest.fixture
def host(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "comfy" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def fingerprint(host):
    return HostFiles(host).fingerprint(KIND)


def test_all_that_a_forward_names_at_any_depth_is_in_it(host):
    assert {*fingerprint(host).functions} == {
        KIND,
        f"{KIND}.forward",
        "comfy.ldm.toy.layers:Block",
        "comfy.ldm.toy.layers:Block.__call__",
        "comfy.ldm.toy.layers:shift",
        "comfy.ldm.toy.parts:scaled",
        "comfy.ldm.toy.parts:FACTOR",
        "comfy.ops:manual_cast",
        "comfy.ops:manual_cast.cast",
    }


@pytest.mark.parametrize(
    ("file", "before", "after", "changes"),
    [
        ("ldm/toy/model.py", '"""Runs."""', '"""Runs well."""', False),
        ("ldm/toy/model.py", "SIZE = 2", "SIZE  =  2  # of a patch", False),
        ("ldm/toy/layers.py", "return 0", "return 1", False),  # nobody names it
        ("ldm/toy/model.py", "SIZE = 2", "SIZE = 3", True),
        ("ldm/toy/layers.py", "return x, 1", "return 1, x", True),
        ("ldm/toy/layers.py", "def shift(x, by)", "def shift(x, by, more=None)", True),
        ("ldm/toy/parts.py", "FACTOR = 3", "FACTOR = 4", True),
        ("ops.py", "return 1", "return 2", True),
    ],
)
def test_it_is_another_where_another_code_runs_and_only_there(host, file, before, after, changes):
    first, path = fingerprint(host), host / "comfy" / file
    assert path.read_text().count(before) == 1
    path.write_text(path.read_text().replace(before, after))
    assert (fingerprint(host).digest != first.digest) == changes


def test_a_class_that_the_files_do_not_have_has_no_functions(host):
    assert not HostFiles(host).fingerprint("comfy.ldm.toy.model:Other").functions
    assert not HostFiles(host).fingerprint("comfy.ldm.other:Model").functions


@pytest.mark.host
def test_the_table_knows_every_class_of_this_comfyui():
    known, files = known_hosts(), HostFiles(Path(COMFYUI))
    found = [one for kind in classes() if (one := files.fingerprint(kind)).functions]
    assert len(found) > 30
    for one in found:
        assert known.has(one), f"{one.kind}: run python3 -m lab fingerprints"
        assert not known.unknown_in(one)


def test_the_table_is_what_the_command_writes_and_names_what_is_unknown(host, monkeypatch):
    assert known_hosts().to_json() == FILE.read_text()
    monkeypatch.setattr("pipemesh.lab.commands.fingerprints.classes", lambda: [KIND])
    known = with_host(KnownHosts((), {}, {}), "1.0", host)
    path = host / "comfy/ldm/toy/layers.py"
    path.write_text(path.read_text().replace("x + by", "x - by"))
    assert known.unknown_in(fingerprint(host)) == ["comfy.ldm.toy.layers:shift"]
    both = with_host(known, "1.1", host)
    assert both.versions == ["1.0", "1.1"] and both.has(fingerprint(host))
