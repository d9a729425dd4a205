"""The table of VAEs tells the truth about this ComfyUI's templates and classes."""

import json
import re
import sys

import comfyui_version
import pytest
from pipemesh.lab.commands import vaes
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.tests.fixtures import COMFYUI, ROOT
from pipemesh.tests.vae.test_bands import BOUND, CASES

RECORD = json.loads(vaes.RECORD.read_text(encoding="utf-8"))


@pytest.mark.host
def test_docs_vaes_is_what_this_comfyui_says():
    """`python3 -m lab vaes --write` brings it up to date, on each host."""
    assert vaes.PAGE.read_text(encoding="utf-8") == vaes.markdown(RECORD)
    host = ComfyInstall(python=sys.executable, comfyui=COMFYUI, version=comfyui_version.__version__, base="")
    assert RECORD["workflows"][host.version] == vaes.counted(host)
    found = {}
    for kind in vaes.KINDS:
        try:
            found[kind.name] = vaes.why_by_comfyui(kind)
        except ImportError:
            continue
    assert len(found) > 10 and found.items() <= RECORD["why"].items()


def test_the_help_page_names_the_vaes_that_ranks_compute_and_those_they_do_not():
    page = (ROOT / "web" / "docs" / "PipeMeshParallelizeVAE.md").read_text()
    computed, _, others = re.search(r"^\| `vae` \| (.*) \|$", page, re.M)[1].partition("Others (")
    unknown = ("pixels", "refiner")  # a user chooses no such VAE
    for kind, why in RECORD["why"].items():
        says, says_not = (others, computed) if why else (computed, others)
        for name in titles(kind):
            if not any(word in name for word in unknown):
                assert re.search(rf"\b{re.escape(name)}(?=[,. )])", says), name
                assert not re.search(rf"\b{re.escape(name)}(?=[,)])(?!\.\d)", says_not), name


def titles(kind):
    """ "LTX 0.9, 2, 2.3" -> LTX 0.9, LTX 2, LTX 2.3; "sound of LTX 2" -> sound."""
    parts = kind.partition(" of ")[0].partition(" (")[0].split(", ")
    return [part if part[0].isalpha() else f"{parts[0].split()[0]} {part}" for part in parts]


def test_every_vae_by_bands_has_figures_within_the_bounds_and_tests_of_its_own():
    assert {case for kind in vaes.KINDS for case in kind.cases} == CASES.keys()
    for kind in vaes.KINDS:
        figures = RECORD["figures"].get(kind.name, {})
        assert bool(figures) == bool(kind.cases) == (RECORD["why"][kind.name] == "")
        if figures:
            assert max(figures["decode"], figures["encode"]) <= BOUND and figures["bf16"] <= 1.1


def test_a_template_whose_vae_is_of_no_kind_is_told(monkeypatch):
    monkeypatch.setattr(vaes, "KINDS", vaes.KINDS[1:])
    host = ComfyInstall(python=sys.executable, comfyui=COMFYUI, version="", base="")
    with pytest.raises(ValueError, match=r"\w+: \S+ is no VAE"):
        vaes.counted(host)
