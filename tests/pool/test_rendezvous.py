"""Where machines find each other, and the command that starts a leader."""

import re
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from pipemesh.launcher.commands.node import listen, require_torchrun
from pipemesh.launcher.commands.node import main as node_main
from pipemesh.launcher.errors import LaunchError
from pipemesh.parallel_runtime.errors import LayoutError, PipeMeshError
from pipemesh.parallel_runtime.wire.tcp import notice_loss
from pipemesh.pool.rank_setup import rank_setup_from
from pipemesh.pool.rendezvous import (
    NODE_COMMAND,
    MachineMissing,
    check_rendezvous,
    find,
    interface_of,
    node_command,
    register,
)

from ..kit.fake_pools import SECRET, fake_setup

ROOT = Path(__file__).resolve().parents[2]


MET = "Machine far is met at torchrun's rendezvous, and PIPEMESH_RDZV is"
UNREACHABLE = f"""
 | {SECRET} | {MET} not set: start with PIPEMESH_RDZV=ADDRESS:PORT
somewhere | {SECRET} | {MET} somewhere: start with
10.0.0.1:29400 | short | PIPEMESH_SECRET has 5 characters, and machines trust each other by it: set the same one
"""


@pytest.mark.parametrize(
    ("rendezvous", "secret", "sentence"), [line.split(" | ") for line in UNREACHABLE.strip("\n").splitlines()]
)
def test_a_setup_that_cannot_reach_other_machines_is_refused(rendezvous, secret, sentence):
    with pytest.raises(LayoutError, match="^" + re.escape(sentence)):
        check_rendezvous(replace(fake_setup(), rendezvous=rendezvous.strip(), secret=secret), "far")


@pytest.mark.parametrize("value", ["2", "120"])
def test_the_kernel_keeps_every_time_that_is_accepted(value):
    with socket.socket() as sock:
        notice_loss(sock, rank_setup_from({"PIPEMESH_LOST_S": value}, "").lost_s)


def test_machines_may_meet_at_an_ipv6_address_and_their_leaders_be_known_by_one():
    here = replace(fake_setup(), rendezvous="[fd00::1]:29400", secret=SECRET)
    assert check_rendezvous(here, "far") == ("fd00::1", 29400)
    with listen("::1", 0) as leader:
        assert leader.getsockname()[0] == "::1"
    assert interface_of("::1") == interface_of("127.0.0.1") == "lo"
    with pytest.raises(MachineMissing, match=r"^No network interface here has 2001:db8::7: set GLOO_SOCKET_"):
        interface_of("2001:db8::7")


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        named = rf"^Nothing can listen at 127\.0\.0\.1:{port} \(.*in use.*\): give another --port, or none\.$"
        with pytest.raises(LaunchError, match=named):
            listen("127.0.0.1", port)


MANUAL = (ROOT / "docs" / "MULTI_NODE.md").read_text(encoding="utf-8")
KUBERNETES = (ROOT / "docs" / "examples" / "kubernetes.yaml").read_text(encoding="utf-8")


def assert_is_script(text):
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_manual_gives_the_command_that_errors_name():
    """To every machine the same, so none is named in it."""
    manual = " ".join(MANUAL.replace("\\\n", "").split())
    assert NODE_COMMAND.format(nodes=2, rendezvous="$PIPEMESH_RDZV") + " ```" in manual
    of_many = NODE_COMMAND.format(nodes="MACHINES", rendezvous="$PIPEMESH_RDZV")
    assert node_command("$PIPEMESH_RDZV") == of_many
    for flag in re.findall(r"\S+=\w+(?= )", NODE_COMMAND):
        assert manual.count(flag) >= 2, f"{flag} is not in the command for Slurm"


def test_the_manuals_script_for_slurm_is_a_script():
    (script,) = re.findall(r"```\n(#!/bin/bash\n.*?)```", MANUAL, re.DOTALL)
    assert_is_script(script)


def test_the_example_for_kubernetes_has_the_manuals_command_and_needs_a_secret_of_ones_own():
    documents = {one["kind"]: one for one in yaml.safe_load_all(KUBERNETES)}
    (container,) = documents["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    variable, _torchrun, *flags = NODE_COMMAND.format(nodes=2, rendezvous='"$PIPEMESH_RDZV"').split()
    env = {one["name"]: one.get("value", "") for one in container["env"]}
    assert f"torch.distributed.run {' '.join(flags)};" in " ".join(script.replace("\\\n", "").split())
    assert variable.split("=") in [[*one] for one in env.items()]
    assert_is_script(script)
    secret = documents["Secret"]["stringData"]["secret"]
    setup = replace(fake_setup(), rendezvous=env["PIPEMESH_RDZV"], secret=secret)
    with pytest.raises(LayoutError, match=r"^PIPEMESH_SECRET has 9 characters"):
        check_rendezvous(setup, "far")


def test_the_example_for_kubernetes_is_what_kubernetes_takes():
    """By the schemas in the package, strictly: a field that Kubernetes does not know is refused."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for one in yaml.safe_load_all(KUBERNETES):
        validator.validate(one, validator.latest_version(), strict=True)


def test_a_name_stays_with_its_machine():
    """Its leader may come back at another port."""
    # As torchrun keeps one at its endpoint
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert find(store, "taken") == ""
    for known in ("10.0.0.2:1000", "10.0.0.2:2000", "10.0.0.2:2000"):
        register(store, "taken", known)
        assert find(store, "taken") == known
    taken = (
        r"^taken is the machine at 10\.0\.0\.2 already: give this one another --name, or start torchrun anew"
    )
    with pytest.raises(PipeMeshError, match=taken):
        register(store, "taken", "10.0.0.3:2000")
    assert find(store, "taken") == "10.0.0.2:2000"


def test_node_is_started_by_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(LaunchError, match=r"^`node` is started by torchrun: "):
        node_main(["--name", "n"], None)
    with pytest.raises(LaunchError, match=r"^'a/b' cannot be named in a list of devices: give a --name"):
        node_main(["--name", "a/b"], None)
    with pytest.raises(
        LaunchError, match=r"^`node` is started by torchrun: .*10\.0\.0\.1:29400 -m launcher node$"
    ):
        require_torchrun({"PIPEMESH_RDZV": "10.0.0.1:29400"})
    require_torchrun({"TORCHELASTIC_RUN_ID": "none"})
