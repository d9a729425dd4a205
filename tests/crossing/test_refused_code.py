"""Code that a rank does not run, whoever names it, and that is not sent to one."""

import pytest
import torch
from pipemesh.parallel_runtime.crossing.code import imported
from pipemesh.parallel_runtime.crossing.source import call_factory
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.watch.python_file import file_hash
from pipemesh.parallel_runtime.weights.weight_patches import known_functions, pack_patches


def test_a_loader_that_is_not_comfyuis_is_not_called(tmp_path):
    with pytest.raises(Refused, match=r"^The model's loader os:mkdir is not ComfyUI's own: use a stock"):
        call_factory("os:mkdir", (str(tmp_path / "made"),), None)
    assert not (tmp_path / "made").exists()


def test_a_pack_that_this_machine_does_not_trust_is_not_imported(tmp_path):
    """Although the file is the one that ComfyUI runs."""
    file = tmp_path / "inner.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(Refused, match=r"^A rank may not import the node pack at .*PIPEMESH_PATCH_PACKS"):
        imported((str(tmp_path), "inner.py", file_hash(file)))
    assert not (tmp_path / "ran").exists()


def test_a_weight_patch_with_a_function_of_a_nodes_is_refused_by_the_functions_name():
    def doubled(weight):
        return 2 * weight

    (known,) = known_functions().values()
    key, patch = "diffusion_model.a", ("diff", (torch.ones(2),))
    assert pack_patches({key: [(1.0, patch, 1.0, None, known)]})
    with pytest.raises(Refused, match=rf"^The weight patch of {key} carries the function .*doubled"):
        pack_patches({key: [(1.0, patch, 1.0, None, doubled)]})
