"""The end of the server that the files named test_end_to_end share: Ctrl-C while it samples."""

import os
import signal

import psutil

from ..kit.fake_pools import DEADLINE_S
from ..kit.served import LARGE, graph, latent, pids, wait_for_phase


def test_ctrl_c_ends_comfyui_at_once_while_a_rank_is_stuck_in_an_evaluation(server):
    """Nobody is told of a failure, and another prompt that waits in the queue starts no pool."""
    latent(server, graph("last"))
    for name in ("stuck", "next"):
        server.queue(graph(name, pixels=LARGE, steps=400, seed=len(name)))
    wait_for_phase(server, "computing")
    ranks = [psutil.Process(pid) for pid in pids(server)]
    ranks[0].suspend()
    os.kill(server.pid, signal.SIGINT)
    server._running.wait(DEADLINE_S)
    assert not psutil.wait_procs(ranks, DEADLINE_S)[1]
    told = server.log.read_text(encoding="utf-8").rpartition("got prompt")[2]
    assert "Stopped server" in told and "Exception" not in told and "[PipeMesh]" not in told, told
