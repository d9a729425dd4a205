"""The manual's script for Slurm, by a Slurm of two machines, which are network namespaces here: its
ComfyUI, on the first of them, samples on both.
"""

import os
import re
import shutil
import signal
import stat
import subprocess
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from pipemesh.lab.comfyui.api import ComfyApi
from pipemesh.lab.comfyui.server import CUSTOM_NODES
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.pool.rendezvous import open_store, store_key

from ..fixtures import ALL
from ..kit.namespaces import Machines, machines_here
from ..kit.served import graph

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("node1", "node2")
NEEDED = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "unshare", "openssl")
DEADLINE_S, STOP_S = 120.0, 20.0
CONF = """ClusterName=pipemesh
SlurmctldHost=node1({node1})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
NodeName=node1 NodeAddr={node1} CPUs=16 Gres=gpu:4
NodeName=node2 NodeAddr={node2} CPUs=16 Gres=gpu:4
PartitionName=all Nodes=node1,node2 Default=YES State=UP
"""


class Slurm:
    """The daemons, each on its machine, under its name, with the files of ``folder``."""

    def __init__(self, machines: Machines, folder: Path):
        self.machines, self.folder = machines, folder
        own = {name: value for name, value in os.environ.items() if not name.startswith("PIPEMESH_")}
        self.env = {**own, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen] = []
        addresses = machines.addresses
        names = "".join(f"{addresses[name]} {name}\n" for name in NAMES)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        for spool in ("state", *NAMES):
            (folder / spool).mkdir()
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, **addresses))
        for gpu in range(4):  # devices that stand for GPUs
            os.mknod(folder / f"gpu{gpu}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"NodeName=node1,node2 Name=gpu File={folder}/gpu[0-3]\n")
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)

    def start(self) -> None:
        files = [f"--{name}-file={self.folder / name}" for name in ("key", "pid", "log", "seed")]
        self._run(
            "node1", "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files
        )
        self._run("node1", "slurmctld", "-D", "-c")
        for name in NAMES:
            self._run(name, "slurmd", "-D")

    def _run(self, name: str, *command: str) -> None:
        with (self.folder / f"{command[0]}-{name}.out").open("w") as output:
            self._daemons.append(
                subprocess.Popen(self.on(name, *command), env=self.env, stdout=output, stderr=output)
            )

    def on(self, name: str, *command: str) -> list[str]:
        """A command on that machine, which is called so there. Not by `ip netns exec`, which hides
        the control groups that slurmd asks for.
        """
        there = ["nsenter", f"--net=/run/netns/{self.machines.of(name)}", "unshare", "--uts", "--mount"]
        named = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        return [*there, "sh", "-c", named, name, str(self.folder / "hosts"), *command]

    def ask(self, *command: str, **env: str) -> str:
        asked = self.on("node1", *command)
        return subprocess.run(
            asked, env={**self.env, **env}, capture_output=True, text=True, check=True
        ).stdout

    def close(self) -> None:
        for one in reversed(self._daemons):  # they speak with each other by munged until they end
            one.terminate()
            try:
                one.wait(STOP_S)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        for name in NAMES:
            for pid in self.machines.pids(name):
                os.kill(pid, signal.SIGKILL)
        for out in sorted(self.folder.glob("*.out")):
            print(out.name, out.read_text()[-3000:], sep="\n")


@pytest.fixture
def slurm(tmp_path):
    lacking = [name for name in NEEDED if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"no {', '.join(lacking)} here: apt-get install slurm-wlm")
    with machines_here(*NAMES) as machines:
        made = Slurm(machines, tmp_path)
        try:
            made.start()
            yield made
        finally:
            made.close()


def home_with_comfyui(home: Path, host: ComfyInstall, model: Path) -> None:
    """As the script has it: ComfyUI, its Python's environment within, PipeMesh among its packs."""
    there = home / "ComfyUI"
    own = {"models", "output", "input", "user", "custom_nodes", ".git"}
    shutil.copytree(
        host.comfyui, there, ignore=lambda folder, names: own & {*names} if folder == host.comfyui else ()
    )
    (there / "venv").symlink_to(Path(host.python).parents[1])
    (there / "custom_nodes").mkdir()
    for name, target in CUSTOM_NODES.items():
        (there / "custom_nodes" / name).symlink_to(target)
    (there / "models" / "diffusion_models").mkdir(parents=True)
    (there / "models" / "diffusion_models" / "model.safetensors").symlink_to(model)


def answers(api: ComfyApi) -> bool:
    with suppress(OSError):
        return bool(api.get("/system_stats"))
    return False


def wait_until(happens) -> None:
    until = time.monotonic() + DEADLINE_S
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.5)


@pytest.mark.skipif(not ALL, reason="starts Slurm, torchrun on two machines and ComfyUI")
def test_the_manuals_script_samples_on_both_nodes_of_a_slurm(slurm, tmp_path, files):
    host = ComfyInstall.from_json(os.environ["PIPEMESH_HOST"])
    home_with_comfyui(tmp_path / "home", host, files["model"])
    manual = (ROOT / "docs" / "MULTI_NODE.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```\n(#!/bin/bash\n.*?)```", manual, re.DOTALL)
    cpu = "main.py --listen --cpu --disable-api-nodes --database-url sqlite:///:memory:"
    (tmp_path / "job").write_text(script.replace("main.py --listen", cpu))
    wait_until(lambda: slurm.ask("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"])
    output = tmp_path / "job.out"
    home = {"HOME": str(tmp_path / "home"), "PIPEMESH_TRIAL": "0", "OMP_NUM_THREADS": "1"}
    job = slurm.ask("sbatch", "--parsable", f"--output={output}", str(tmp_path / "job"), **home).strip()
    address = slurm.machines.addresses["node1"]
    with slurm.machines.inside("node1"):
        store = open_store(address, 29400, DEADLINE_S)
        store.wait([store_key(name) for name in NAMES], timedelta(seconds=DEADLINE_S))
        api = ComfyApi()
        api.address = f"{address}:8188"
        wait_until(lambda: answers(api))
        nodes = graph("slurm")
        nodes["pool"]["inputs"] |= {"devices": "cpu,node2/cpu", "ulysses": 1, "cfg": 2}
        assert api.run(nodes).error is None
        (pool,) = api.get("/pipemesh/status")["pools"]
        assert len(pool["ranks"]) == 2
    slurm.ask("scancel", job)
    wait_until(lambda: not slurm.ask("squeue", "-h"))
