"""``saved/counts.json`` has what the dry run counts of released models today.

To write it anew: PIPEMESH_TEST_ALL=1 python3 -m lab test lab/tests/test_saved_counts.py, and
take the file that the failure names.
"""

import json
import sys
from dataclasses import fields, replace
from itertools import groupby

import pytest
from pipemesh.lab.dry_run.released_model import DryModel
from pipemesh.parallel_runtime.families.catalogue import RELEASED
from pipemesh.tests.fixtures import ALL
from pipemesh.tests.kit.planned import LISTS, saved


def in_a_row(values):
    return [[len(list(same)), one] for one, same in groupby(values)]


def as_saved(whole, like):
    """Return a Whole with the keys of an entry that was saved, as JSON has it."""
    made = {field.name: getattr(whole, field.name) for field in fields(whole)}
    shareable = {**whole.shareable._asdict(), "blocks": in_a_row(whole.shareable.blocks)}
    made |= {key: in_a_row(made[key]) for key in LISTS}
    made |= {
        "shareable": {key: shareable[key] for key in like["shareable"]},
        "activations": {key: getattr(whole.activations, key) for key in like["activations"]},
    }
    return json.loads(json.dumps({key: made[key] for key in like}))


@pytest.mark.skipif(not ALL, reason="takes 10 s, and changes with ComfyUI alone")
def test_the_counts_that_predictions_are_tested_with_are_what_the_dry_run_counts(monkeypatch, tmp_path):
    from comfy.ldm.modules.attention import attention_pytorch

    for name, module in list(sys.modules.items()):  # what ComfyUI chooses on a GPU
        if name.startswith("comfy.ldm") and hasattr(module, "optimized_attention"):
            monkeypatch.setattr(module, "optimized_attention", attention_pytorch)
    today = {}
    for name, entry in saved().items():
        sample, released = RELEASED[entry["model"]]
        asked = replace(released, text=entry["whole"]["tokens"].get("txt", released.text))
        whole = DryModel(sample, asked, tuple(entry["extent"])).whole()
        today[name] = {**entry, "whole": as_saved(whole, entry["whole"])}
    file = tmp_path / "counts.json"
    file.write_text(
        "{\n"
        + ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in today.items())
        + "\n}\n"
    )
    assert today == saved(), f"today's counts are in {file}"
