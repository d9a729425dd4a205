"""What a class of ComfyUI's is, told by ComfyUI's files: text that does not run changes nothing,
and every change of what a forward may run is seen.
"""

import sys
from pathlib import Path

import pytest
from pipemesh.lab.commands.fingerprints import as_file, classes, classes_in, with_host
from pipemesh.parallel_runtime.watch.fingerprint import HostFiles
from pipemesh.pool.trial.comparisons import samples_of
from pipemesh.pool.trial.known_hosts import FILE, OF_TYPES, KnownHosts, known_hosts
from pipemesh.pool.trial.tiny_samples import sampled

from ..fixtures import COMFYUI

MODEL = '''
import torch
from comfy.ldm.toy import layers
from comfy.ldm.toy.layers import Block as Layer
from .parts import scaled
import comfy.ops
import comfy.utils
from comfy.ldm.toy.star import *
from einops import rearrange

class Model(torch.nn.Module):
    """A model."""
    SIZE = 2
    def forward(self, x):
        """Runs."""
        from comfy.ldm.toy.late import inside
        return inside(scaled(Layer()(x)) + layers.shift(starred(x), self.SIZE) + comfy.utils.helper(rearrange(x)))

for name in ("forward",):
    setattr(Model, name, getattr(Model, name))
'''
FILES = {
    "ops.py": "class manual_cast:\n    def cast(self): return 1\n",
    "ldm/toy/__init__.py": "",
    "ldm/toy/late.py": "def inside(x): return x\n",
    "ldm/toy/star.py": "def starred(x): return x\n",
    "utils.py": "def helper(x): return deeper(x)\n\n\ndef deeper(x): return x\n",
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
        "comfy.ldm.toy.late:inside",
        "comfy.ldm.toy.star:starred",
        "comfy.utils:helper",
        "comfy.ldm.toy.model:",
        "comfy.ldm.toy.layers:",  # what a module runs beside: a condition here, a loop there
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
        ("ldm/toy/late.py", "return x", "return -x", True),
        ("ldm/toy/star.py", "return x", "return -x", True),
        ("utils.py", "return deeper(x)", "return x", True),
        ("ldm/toy/model.py", "from einops import", "from other import", True),
        ("ldm/toy/model.py", 'in ("forward",)', 'in ("forward", "extra")', True),
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


KINDS = (  # of one kind of block, of two, of a text encoder's, and one that imports in a function
    "comfy.ldm.wan.model:WanModel",
    "comfy.ldm.flux.model:Flux",
    "comfy.ldm.hidream_o1.model:HiDreamO1Transformer",
    "comfy.ldm.hunyuan_video.model:HunyuanVideo",
)
TRACED = ("comfy.ldm.", "comfy.ops", "comfy.quant_ops", "comfy.text_encoders.", "comfy.patcher_extension")


@pytest.mark.host
@pytest.mark.parametrize("kind", KINDS)
def test_each_function_that_a_forward_runs_is_in_it(kind):
    facts = samples_of(kind)[0]
    stock, ran = facts.form.random_model(facts.tiny.size(facts.heads[-1])), set()
    transformer = stock.model.diffusion_model

    def saw(frame, event, _arg):
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if event == "call" and module.startswith(TRACED) and "<" not in function:
            ran.add(f"{module}:{function}")

    own = transformer.forward

    def forward(*args, **kwargs):
        sys.setprofile(saw)
        try:
            return own(*args, **kwargs)
        finally:
            sys.setprofile(None)

    transformer.forward = forward
    sampled(stock, facts, "odd", 1.0, facts.masks is not None, "euler", seed=1, steps=1)
    found = HostFiles(Path(COMFYUI)).fingerprint(kind).functions
    assert len(ran) > 10
    assert {one for one in ran if one not in found and one.split(".")[0] not in found} == set()


@pytest.mark.host
def test_the_table_knows_every_class_of_this_comfyui_and_each_has_a_sample_to_try_it_by():
    known, files = known_hosts(), HostFiles(Path(COMFYUI))
    found = [one for kind in classes() if (one := files.fingerprint(kind)).functions]
    assert len(found) > 30
    for one in found:
        assert known.has(one), f"{one.kind}: run python3 -m lab fingerprints"
        assert samples_of(one.kind)
    assert {name for module in OF_TYPES for name in classes_in(Path(COMFYUI), module)} <= {*known.types}


def test_the_table_is_what_the_command_writes_and_has_several_versions_of_a_class(host, monkeypatch):
    assert as_file(known_hosts()) == FILE.read_text()
    monkeypatch.setattr("pipemesh.lab.commands.fingerprints.classes", lambda: [KIND])
    known = with_host(KnownHosts((), {}), "1.0", host)
    path = host / "comfy/ldm/toy/layers.py"
    path.write_text(path.read_text().replace("x + by", "x - by"))
    assert not known.has(fingerprint(host))
    both = with_host(known, "1.1", host)
    assert both.versions == ["1.0", "1.1"] and both.has(fingerprint(host))
