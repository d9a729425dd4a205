"""Who may act on pools over the routes: ComfyUI's own page and scripts, on whatever address ComfyUI
listens; no page of another origin.
"""

import asyncio
import json
import re
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from pipemesh.nodes.notices import KEPT, Notices
from pipemesh.nodes.routes import STATUS, add_routes, answer
from pipemesh.nodes.status.collection import pool_id
from pipemesh.nodes.status.control import Busy, PoolControl
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.errors import PipeMeshError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.pool.devices import place
from pipemesh.pool.handle import PoolHandle

from ..kit.at_once import at_once

JSON = {"Content-Type": "application/json"}


def posted(setup, headers):
    """The answer to a POST, and whether it has done anything."""
    asked = []
    handle = PoolHandle(place(Layout(ulysses=2), "cpu", "gloo", ()), setup)

    def act(identity):
        asked.append(identity)
        return handle, RemotePool(handle)

    request = make_mocked_request("POST", "/", headers, match_info={"id": "5f0c2a91"})
    return asyncio.run(answer(act, request)), bool(asked)


def test_nothing_is_done_to_a_pool_amid_a_run_and_the_answer_says_so(setup):
    handle = PoolHandle(place(Layout(ulysses=2), "cpu", "gloo", ()), setup)
    pool, identity, executing = RemotePool(handle), pool_id(handle.placement), [True]
    runtime = SimpleNamespace(pools=lambda: [(handle, pool)], turn=threading.Lock())
    control = PoolControl(runtime, executing.pop)
    pool.runs.recent.append(SimpleNamespace(is_sampled=True, ended_s=0.0))
    with pytest.raises(Busy, match="samples now"):
        control.release(identity)
    executing.append(False)
    assert control.release(identity) == (handle, pool)


def test_the_last_twenty_notices_are_kept(caplog):
    notices = Notices()
    for number in range(KEPT + 2):
        notices.tell(f"notice {number}")
    assert [one.text for one in notices.latest()] == [f"notice {number}" for number in range(KEPT + 1, 1, -1)]


def test_what_two_threads_tell_at_once_is_kept():
    for _ in range(100):
        notices = Notices()
        at_once(*(partial(notices.tell, f"notice {number}") for number in range(4)))
        assert len(notices.latest()) == 4


LAN = "192.168.1.5:8188"
FOREIGN = ("https://example.org", "null", "http://192.168.1.5:9999", "http://[", "file://", "")
FORMS = ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data")
POSTED = [  # headers -> the answer's code
    *(
        ({"Host": host, "Origin": origin, **JSON}, 403)
        for host in ("127.0.0.1:8188", LAN, "comfy.lan")
        for origin in FOREIGN
    ),
    *(
        ({"Host": host, "Origin": f"http://{host}"}, 200)
        for host in ("127.0.0.1:8188", LAN, "[fe80::1]:8188")
    ),
    *(({"Host": host, "Origin": "https://comfy.lan"}, 200) for host in ("Comfy.lan", "comfy.lan:443")),
    # Without an origin what a form of another page cannot send
    ({"Host": LAN, "Content-Type": "application/json; charset=utf-8"}, 200),
    *(({"Host": LAN, "Content-Type": kind}, 415) for kind in FORMS),
    ({"Host": LAN}, 415),
]


@pytest.mark.parametrize(("headers", "status"), POSTED, ids=str)
def test_comfyuis_own_page_may_act_and_no_page_of_another_origin_on_any_address(setup, headers, status):
    answered, has_acted = posted(setup, headers)
    assert (answered.status, has_acted) == (status, status == 200)


def test_a_page_behind_a_proxy_that_hides_the_host_is_told_what_to_change(setup):
    answered, _ = posted(setup, {"Host": "127.0.0.1:8188", "Origin": "https://studio.lan", **JSON})
    sentence = (
        "is from https://studio.lan, but ComfyUI is at 127.0.0.1:8188: open 127.0.0.1:8188, or let the proxy "
    )
    assert json.loads(answered.body)["error"].startswith(f"This page {sentence}")


@pytest.mark.parametrize("document", ["SECURITY.md", "docs/REFERENCE.md"])
def test_the_documents_list_every_route_and_its_method(document):
    routes = web.RouteTableDef()
    add_routes(routes, None, None, None)
    added = {f"{route.method} {route.path.replace('{id}', 'ID')}" for route in routes}
    text = (Path(__file__).resolve().parents[2] / document).read_text(encoding="utf-8")
    assert set(re.findall(r"`((?:GET|POST) /pipemesh/[\w./]+)`", text)) == added


@pytest.mark.parametrize("origin", ["http://{}", "http://other.example", "null", "https://{}"])
@pytest.mark.parametrize("host", ["127.0.0.1:8188", "localhost:8188", "stranger.example:8188"])
def test_what_comfyui_itself_refuses_to_a_page_is_refused_and_a_name_of_a_strangers_is_no_worse(
    setup, monkeypatch, host, origin
):
    """A stranger's name that leads to loopback, as by DNS rebinding, passes for both."""
    import server

    async def through(_request):
        return web.Response()

    monkeypatch.setattr(server, "is_loopback", lambda host: True)
    headers = {"Host": host, "Origin": origin.format(host)}
    asks = server.create_origin_only_middleware()(make_mocked_request("POST", "/prompt", headers), through)
    theirs = asyncio.run(asks).status
    answered, has_acted = posted(setup, {**headers, **JSON})
    ours = answered.status
    assert has_acted == (ours == 200)
    assert ours == theirs or (ours, theirs) == (403, 200)
    assert origin.format(host) != f"http://{host}" or (ours, theirs) == (200, 200)


def test_the_server_goes_on_while_the_runtime_is_made_for_a_page():
    """It imports what takes seconds, and another thread may be making it."""
    routes, making, made = web.RouteTableDef(), threading.Event(), threading.Event()

    def runtime():
        making.set()
        assert threading.current_thread() is not threading.main_thread()
        made.wait()
        raise PipeMeshError("made")

    add_routes(routes, runtime, None, None)
    handler = next(route.handler for route in routes if route.path == STATUS)

    async def asked():
        answer = asyncio.ensure_future(handler(make_mocked_request("GET", STATUS)))
        await asyncio.to_thread(making.wait)
        made.set()
        with pytest.raises(PipeMeshError, match="made"):
            await answer

    asyncio.run(asked())
