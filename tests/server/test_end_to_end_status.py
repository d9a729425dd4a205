"""The status API of a real server: what it says, to whom, and what it changes."""

import json
import re
import threading
from itertools import count
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import psutil
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.nodes.status.figures import PoolStatus, Status

from ..fixtures import ALL
from ..kit.served import LARGE, graph, latent, once_it_samples, pids, wait_for_phase

MANY = 10_000 if ALL else 60
LEAK = 4096  # bytes of one request, as a leak of which all of them would be seen
SCRIPT = {"Content-Type": "application/json"}


def status(server):
    """Checked against its types: no field is missing, none is of another kind."""
    return msgspec.convert(server.get("/pipemesh/status"), Status)


def ready_pool(server):
    (pool,) = (pool for pool in status(server).pools if pool.state == "ready")
    return pool


def ask(server, method, path, headers=SCRIPT):
    """Code and JSON of the answer."""
    request = Request(
        f"http://{server.address}{path}", b"" if method == "POST" else None, headers, method=method
    )
    try:
        answer = urlopen(request)
    except HTTPError as error:
        answer = error
    with answer:
        text = answer.read()
    return answer.status, json.loads(text) if text[:1] == b"{" else text


def test_the_status_has_devices_pools_models_and_runs_and_every_name_is_in_the_reference(server):
    latent(server, graph("status", seed=81))
    said = server.get("/pipemesh/status")
    now = msgspec.convert(said, Status)
    pool, run = ready_pool(server), now.last_runs[0]
    assert (run.pool, run.title, run.ended is not None) == (pool.id, "model.safetensors", True)
    (model,) = (model for model in pool.models if model.model == run.model)
    assert (model.title, model.state) == ("model.safetensors", "ready")
    assert now.devices[0].name == "cpu" and 0 < now.devices[0].free < now.devices[0].total
    assert now.current_run is None and not now.auto.on and not now.auto.unavailable
    known = (*fields(example()), *fields(example(), of_blanks=True))
    new = [name for name in fields(said) if not any(f"{name}/".startswith(f"{one}/") for one in known)]
    # Of earlier runs, in pools of another layout
    axes = {axis for name in new for axis in re.findall("/exchange_by_axis/(.*)", name)}
    assert len(new) == len(axes) and all(f"`{axis}`" in reference() for axis in axes), new


def reference():
    from ..project.test_docs import REFERENCE

    return REFERENCE.read_text(encoding="utf-8")


def example():
    return json.loads(reference().partition("```json")[2].partition("```")[0])


def fields(tree, of_blanks=False):
    """Every path in it, of all members of a list together; ``of_blanks``: under which there is
    nothing, as earlier runs of this server may have something.
    """
    if isinstance(tree, dict):
        return {f"/{name}{path}" for name, branch in tree.items() for path in fields(branch, of_blanks)}
    if isinstance(tree, list) and (tree or not of_blanks):
        return {path for one in tree for path in fields(one, of_blanks)}
    return {""} if (tree in (None, [])) == of_blanks else set()


def test_the_example_of_the_reference_is_a_whole_status():
    assert json.loads(msgspec.json.encode(msgspec.convert(example(), Status))) == example()


def test_unload_frees_the_models_and_keeps_the_ranks_and_the_next_run_is_right(server, truth):
    latent(server, graph("to_unload", seed=82))
    before, ranks = ready_pool(server), pids(server)
    assert before.models
    code, said = ask(server, "POST", f"/pipemesh/pools/{before.id}/unload")
    assert (code, msgspec.convert(said, PoolStatus).models) == (200, ())
    assert relative_error(latent(server, graph("unloaded"))[0], truth) <= BOUND
    assert pids(server) == ranks


def test_amid_a_run_nothing_is_restarted_or_unloaded_and_the_status_tells_the_run(server):
    latent(server, graph("warm_status", seed=84))
    pool, ranks, answers, runs = ready_pool(server), pids(server), [], []

    def look():
        wait_for_phase(server, "computing")
        runs.append(status(server).current_run)
        path = f"/pipemesh/pools/{pool.id}"
        answers.extend(ask(server, "POST", f"{path}/{act}") for act in ("restart", "unload"))
        server.interrupt()

    server.run(graph("asked_amid", pixels=LARGE, steps=20), on_event=once_it_samples(look))
    assert [code for code, _ in answers] == [409, 409]
    assert all("press Stop first" in said["error"] for _, said in answers)
    (run,) = runs
    assert (run.pool, run.ended) == (pool.id, None)
    assert pids(server) == ranks


def test_looking_changes_nothing_and_a_pool_that_is_not_there_is_said_to_be(server):
    before = pids(server)
    for act in ("restart", "unload"):
        assert ask(server, "GET", f"/pipemesh/pools/{ready_pool(server).id}/{act}")[0] in (404, 405)
    assert ask(server, "POST", "/pipemesh/status")[0] == 405
    code, said = ask(server, "POST", "/pipemesh/pools/0123abcd/restart")
    assert code == 404 and said["error"].startswith("No pool has the id 0123abcd")
    assert pids(server) == before and ready_pool(server).models


def test_a_restart_starts_fresh_ranks_and_many_requests_meanwhile_are_answered_and_leave_nothing(
    server, truth
):
    latent(server, graph("before_many", seed=85))
    process, codes = psutil.Process(server.pid), []
    before = process.num_fds(), process.num_threads(), process.memory_full_info().uss

    def asks():
        for _ in range(MANY):
            codes.append(ask(server, "GET", "/pipemesh/status")[0])

    asking = threading.Thread(target=asks)
    asking.start()
    for runs in count(1):
        assert server.run(graph("many", seed=100 + runs)).error is None
        if runs % 20 == 1:
            before_it, pool = pids(server), ready_pool(server)
            code, said = ask(server, "POST", f"/pipemesh/pools/{pool.id}/restart")
            assert (code, msgspec.convert(said, PoolStatus).state) == (200, "ready")
            assert not set(before_it) & set(pids(server))
            assert not any(psutil.pid_exists(pid) for pid in before_it)
        if not asking.is_alive():
            break
    asking.join()
    assert relative_error(latent(server, graph("restarted"))[0], truth) <= BOUND
    assert codes == [200] * MANY
    assert process.num_threads() <= before[1] + 2
    assert process.num_fds() <= before[0] + 4
    if ALL:  # of few requests the runs beside them have more
        assert process.memory_full_info().uss <= before[2] + MANY * LEAK
