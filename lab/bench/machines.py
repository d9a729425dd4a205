"""Measure pools over two machines: network namespaces of this computer with a core each, joined by
a link of 1 Gbit/s and 1 ms (``slow_link.py``).

``cfg``, ``data`` and ``pipefusion`` send little over it; ``ulysses`` beside ``cfg`` sends most, and
loses. Each is predicted by speeds that the same rounds measured of the same model at smaller sizes,
and by messages over that link.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...parallel_runtime.comm.cores import giving_way, share_of_cores
from ...parallel_runtime.errors import PipeMeshError
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.planner.evaluation_count import Whole
from ...parallel_runtime.planner.job import Job
from ...parallel_runtime.planner.prediction import predict
from ...pool.rendezvous import NODE_COMMAND, open_store, store_key
from .figures import CaseFigures, Figure, Goal, Options, Round, of_phase, ratio, typical
from .groups import LEAST_STEPS, GroupRuns
from .groups import STEPS as FEW
from .groups import figures as of_groups
from .lockstep import Phase, Ranks, merge, run
from .pipefusion import Length, PipelineRuns, figures_of
from .plan import counts_of
from .queue import calibrated, calibration
from .slow_link import enter

NAMES, DEVICES = ("near", "far"), "cpu,far/cpu"
PORT, JOINING_S = 29400, 120.0
BYTES_PER_S, DELAY_S = 1e9 / 8, 1e-3  # of the link, each way
TOKENS, PATCHES = 1024, 4
EFFICIENCY, OF_SCHEDULE, OFF = 0.95, 0.95, 0.15  # goals
STEPS = {"cfg": FEW, "data": FEW, "pipefusion": 28}  # of a run
LEAST = {"cfg": LEAST_STEPS, "data": LEAST_STEPS, "pipefusion": 4}
# What is sampled -> phase -> its layout
PHASES = {
    "cfg": {"parallel": Layout(cfg=2), "beside": Layout(ulysses=2)},
    "data": {"parallel": Layout(data=2)},
    "pipefusion": {"free": Layout(pipefusion=2)},
}


@contextmanager
def two_machines() -> Iterator[dict[str, Any]]:
    """Start a leader on each machine; yield what ``measure`` must know of them."""
    from ...tests.kit.namespaces import Machines, NoNamespaces, ip

    try:
        machines = Machines(*NAMES)
    except NoNamespaces as reason:
        raise PipeMeshError(f"No network namespaces here: {reason}") from reason
    near, far = map(machines.of, NAMES)
    address, root = f"{machines.addresses['near']}:{PORT}", Path(__file__).resolve().parents[2]
    env = {**os.environ, "PIPEMESH_RDZV": address, "PIPEMESH_SECRET": secrets.token_hex(16)}
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        stack.callback(machines.close)

        def start(command: Sequence[str], **how: Any) -> Any:
            process = subprocess.Popen(command, cwd=root, env=env, **how)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process.stdout

        ip("-n", near, "link", "del", "to0")  # the cable between them
        ends = near, "to0", far, "net0", str(BYTES_PER_S), str(DELAY_S)
        link = str(Path(__file__).with_name("slow_link.py"))
        start([sys.executable, link, *ends], stdout=subprocess.PIPE).readline()
        ip("-n", near, "link", "set", "to0", "master", "net0", "up")
        ip("-n", far, "addr", "add", f"{machines.addresses['far']}/24", "dev", "net0")
        ip("-n", far, "link", "set", "net0", "up")
        for index, name in enumerate(NAMES):
            words = NODE_COMMAND.format(nodes=2, rendezvous=address).replace(
                "read_timeout=600", f"read_timeout=600,is_host={int(name == 'near')}"
            )
            variable, _, *words = words.split()
            own = ",".join(map(str, share_of_cores(cores, index, len(NAMES))))
            inside = ["ip", "netns", "exec", machines.of(name), "taskset", "-c", own, "env", variable]
            start(
                [*inside, sys.executable, "-m", "torch.distributed.run", *words, "--name", name],
                stdout=sys.stderr,
            )
        yield {
            "namespaces": [near, far],
            "known": {"rendezvous": address, "secret": env["PIPEMESH_SECRET"]},
        }


def measure(
    ranks: Ranks,
    what: str,
    rounds: int,
    tokens: int,
    steps: int,
    namespaces: Sequence[str],
    known: dict[str, str],
) -> dict[str, Any]:
    """Time runs through pools over both machines; the first process is ComfyUI's, on ``near``."""
    import torch.distributed as dist

    from ...parallel_runtime.comm.exchange import Exchange

    enter(namespaces[ranks.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "net0"
    ranks.all_cores = ranks.own_cores  # a machine has one
    with giving_way():
        group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    link = Exchange(group, ranks.rank, 2, axis="ulysses", via_cpu=False)
    phases, counted = calibration(ranks, tokens, link)
    if ranks.rank == 0:
        host, _, port = known["rendezvous"].rpartition(":")
        store = open_store(host, int(port), JOINING_S)
        store.wait([store_key(name) for name in NAMES], timedelta(seconds=JOINING_S))
    found: dict[str, Any] = {"counted": {count: asdict(whole) for count, whole in counted.items()}}
    if what == "pipefusion":
        length, seen = Length(tokens, steps), {"free": []}
        stages = PipelineRuns(ranks, PATCHES, length, DEVICES, **known)
        try:
            phases["free"] = Phase(lambda: stages.through("free", seen))
            found["rounds"] = ranks.measure(phases, rounds)
        finally:
            if stages.pipeline is not None:
                stages.pipeline.handle.close()
        found["free"] = [figures_of(one, "free") for one in seen["free"][-rounds:]]
        return found
    groups = GroupRuns(ranks, what, tokens, steps, PHASES[what].get("beside"), DEVICES, **known)
    try:
        found["rounds"] = groups.measure(rounds, phases)
    finally:
        groups.close()
    return found


def predicted(
    rounds: Sequence[Round],
    counted: Mapping[int, Whole],
    what: str,
    tokens: int,
    steps: int,
    layout: Layout,
) -> float:
    """Return the seconds of a run in a layout."""
    box = replace(calibrated(rounds, counted, 2), machine=1, overlaps=True)
    job = Job(
        whole=counted[tokens],
        evaluations=steps,
        branches=1 + (what == "cfg"),
        batch=1 + (what == "data"),
        patches=PATCHES if layout.stages > 1 else 0,
    )
    return steps * min(one.seconds for one in predict(job, layout, box))


def bench(options: Options) -> Iterator[Figure]:
    from .forwards import LEAST_TOKENS

    tokens, steps_of = options.choose((TOKENS, STEPS), (LEAST_TOKENS, LEAST))
    with two_machines() as there:
        for what in (one for one in PHASES if one in (options.only or PHASES)):
            asked = {"what": what, "rounds": options.rounds, "tokens": tokens, "steps": steps_of[what]}
            by_rank = run(options, 2, "machines:measure", **asked, **there)
            counted = counts_of(by_rank[0]["counted"])
            rounds = merge([rank["rounds"] for rank in by_rank])
            yield from figures(what, tokens, steps_of[what], rounds, counted, by_rank[0].get("free", ()))


def figures(
    what: str,
    tokens: int,
    steps: int,
    rounds: Sequence[Round],
    counted: Mapping[int, Whole],
    free: Sequence[Round],
) -> Iterator[Figure]:
    made = CaseFigures("machines", f"{what}2_{tokens}", rounds)
    if free:
        kept = replace(made, samples=free)
        yield kept.estimated("of_schedule", of_phase("of_schedule"), "ratio", Goal(at_least=OF_SCHEDULE))
    else:
        yield from of_groups(made, EFFICIENCY)
    if "beside" in PHASES[what]:
        yield made.estimated("ulysses2_over_one", ratio("beside", "alone"), "x", Goal(at_least=1.0))
    for phase, layout in PHASES[what].items():

        def near(some: Sequence[Round], phase: str = phase, layout: Layout = layout) -> float:
            return typical(some, phase) / predicted(some, counted, what, tokens, steps, layout)

        name = f"over_predicted_{layout.product()}".replace(" ", "")
        yield made.estimated(name, near, "ratio", Goal.within(OFF, 1.0))
