"""What the environment says of ranks, read once; what cannot be read is refused by its name."""

import pytest
from pipemesh.parallel_runtime.errors import LayoutError
from pipemesh.pool.rank_setup import rank_setup_from
from pipemesh.pool.supervisor import process_of_its_own


def test_every_variable_has_its_place():
    environ = {
        "PIPEMESH_STALL_S": "7",
        "PIPEMESH_RDZV": "10.0.0.1:29400",
        "PIPEMESH_SECRET": "correct horse",
        "PIPEMESH_LOST_S": "2.5",
        "PIPEMESH_FORK": "0",
    }
    setup = rank_setup_from(environ, "/opt/ComfyUI", {"cpu": True})
    assert (setup.comfyui, setup.comfy_args, setup.stall_s, setup.lost_s) == (
        "/opt/ComfyUI",
        {"cpu": True},
        7.0,
        2.5,
    )
    assert (setup.rendezvous, setup.secret, setup.start) == (
        "10.0.0.1:29400",
        "correct horse",
        process_of_its_own,
    )
    assert "correct horse" not in repr(setup)


@pytest.mark.parametrize("environ", [{}, {"PIPEMESH_STALL_S": "", "PIPEMESH_LOST_S": ""}])
def test_without_them_there_are_defaults(environ):
    setup = rank_setup_from(environ, "")
    assert (setup.stall_s, setup.rendezvous, setup.secret, setup.lost_s) == (300.0, "", "", 5.0)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        *(("PIPEMESH_STALL_S", value, "1 to 86400") for value in ("abc", "0", "-3", "nan", "inf", "5s")),
        *(("PIPEMESH_LOST_S", value, "2 to 120") for value in ("130", "1", "-5", "nan", "a minute")),
    ],
)
def test_a_number_of_seconds_that_cannot_be_kept_is_refused(variable, value, allowed):
    with pytest.raises(
        LayoutError, match=rf"^{variable} is {value}: set it to a number of seconds from {allowed}\.$"
    ):
        rank_setup_from({variable: value}, "")
