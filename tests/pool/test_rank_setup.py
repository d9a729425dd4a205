"""What the environment says of ranks, read once; what cannot be read is refused by its name."""

import pytest
from pipemesh.parallel_runtime.errors import LayoutError
from pipemesh.pool.rank_setup import rank_setup_from, tries_hosts
from pipemesh.pool.supervisor import process_of_its_own

DEFAULTS = {"stall_s": 300.0, "rendezvous": "", "secret": "", "lost_s": 5.0}


@pytest.mark.parametrize(
    ("environ", "fields"),
    [
        ({}, DEFAULTS),
        ({"PIPEMESH_STALL_S": "", "PIPEMESH_LOST_S": ""}, DEFAULTS),
        ({"PIPEMESH_STALL_S": "7", "PIPEMESH_LOST_S": "2.5"}, {"stall_s": 7.0, "lost_s": 2.5}),
        ({"PIPEMESH_RDZV": "10.0.0.1:29400"}, {"rendezvous": "10.0.0.1:29400"}),
        ({"PIPEMESH_SECRET": "correct horse"}, {"secret": "correct horse"}),
        ({"PIPEMESH_FORK": "0"}, {"start": process_of_its_own}),
    ],
)
def test_every_variable_has_its_place_and_its_default(environ, fields):
    setup = rank_setup_from(environ, "/opt/ComfyUI", {"cpu": True})
    assert (setup.comfyui, setup.comfy_args) == ("/opt/ComfyUI", {"cpu": True})
    assert {name: getattr(setup, name) for name in fields} == fields
    assert "correct horse" not in repr(setup)


def test_only_a_zero_leaves_the_trial_of_a_host_out():
    assert [tries_hosts({"PIPEMESH_TRIAL": value}) for value in ("0", "1", "")] == [False, True, True]
    assert tries_hosts({})


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        *(("PIPEMESH_STALL_S", value, "1 to 86400") for value in ("abc", "0", "-3", "nan", "inf", "5s")),
        *(("PIPEMESH_LOST_S", value, "2 to 120") for value in ("130", "1", "-5", "nan", "a minute")),
    ],
)
def test_a_number_of_seconds_that_cannot_be_kept_is_refused(variable, value, allowed):
    sentence = rf"^{variable} is {value}: set it to a number of seconds from {allowed}\.$"
    with pytest.raises(LayoutError, match=sentence):
        rank_setup_from({variable: value}, "")
