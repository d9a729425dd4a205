"""ComfyUI's page in a headless Chromium, spoken to over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--mute-audio",
        "--no-first-run",
    ),
    "--disable-background-networking",
    # A page does not wait for what it asks of other machines
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
PORT_FILE = "DevToolsActivePort"  # Chromium writes its port there once it listens
LOADED_S, ANSWERED_S, ENDED_S = 120, 60, 10  # the longest that a page, an answer and Chromium's end may take

UNTIL = """new Promise(done => {
  const holds = () => { try { return %s } catch { return false } }  // what is looked at may not be there yet
  const look = () => holds() ? done(true) : requestAnimationFrame(look)
  look()
})"""
READY = """(() => {
  const host = window.app?.extensionManager
  return host?.workflow?.activeWorkflow && !host.spinner && window.comfyAPI.api.api.clientId
})()"""  # its first workflow is open, all of it is loaded, and the server knows whom to send events to
WATCHED = """(() => {
  const send = window.fetch
  window.settingsOnTheirWay = 0
  window.fetch = async (url, ...rest) => {
    const isSetting = String(url).includes('/settings')
    window.settingsOnTheirWay += isSetting
    try { return await send(url, ...rest) } finally { window.settingsOnTheirWay -= isSetting }
  }
})()"""
SETTLED = "window.settingsOnTheirWay == 0"  # of two settings that ComfyUI writes at once, one may be lost
ENDS = """(() => {
  window.ends = {}
  for (const name of ['execution_success', 'execution_error', 'execution_interrupted'])
    window.comfyAPI.api.api.addEventListener(name, ({ detail }) => (window.ends[detail.prompt_id] = [name, detail.exception_message ?? '']))
})()"""
LOAD = """(async () => {
  const host = app.extensionManager.workflow, nodes = %s, name = '%s'
  app.loadApiJson(nodes, name)
  const isOpen = () => host.activeWorkflow?.path?.includes(name) && app.rootGraph.nodes.length == Object.keys(nodes).length
  while (!isOpen()) await new Promise(requestAnimationFrame)  // the page goes on to open it, and may open one of its own before
})()"""
QUEUE = """(async () => {
  const api = window.comfyAPI.api.api, send = api.queuePrompt
  let answer
  api.queuePrompt = async function (...args) { return (answer = await send.apply(this, args)) }
  try { await app.queuePrompt(0) } finally { api.queuePrompt = send }
  return answer?.prompt_id
})()"""
FIRST_CHOICE = "Math.random = () => 0"  # of dynamic prompts
PROMPT = """(async () => {
  const frame = () => new Promise(requestAnimationFrame)
  await app.loadGraphData(%s)
  await frame()
  await frame()  // types that follow from links are settled in the next frame
  return JSON.stringify((await app.graphToPrompt()).output)
})()"""
REGISTER = """(async () => {
  for (const definition of %s) await app.registerNodeDef(definition.name, definition)
})()"""


def installed():
    """Its path, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """``with Page(url) as page: page.evaluate("app.graph.nodes.length")``. Only JSON passes.
    ``first``: a script that runs before those of the page.
    """

    first = ""

    def __init__(self, url):
        self._url = url
        self._profile = Path(tempfile.mkdtemp(prefix="pipemesh-chromium-"))
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)
        self._session = None

    def __enter__(self):
        command = [
            installed(),
            *FLAGS,
            "--remote-debugging-port=0",
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._within(LOADED_S, self._connect(self._port()), f"{self._url} is not loaded")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self._session is not None:
            self._loop.run_until_complete(self._session.close())
        self._process.terminate()
        try:
            self._process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.forget()

    def forget(self):
        """Leaves nothing behind of a page whose Chromium has ended, or was never started."""
        self._loop.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _port(self):
        """Waits until Chromium listens, or has ended."""
        file, until = self._profile / PORT_FILE, time.monotonic() + ANSWERED_S
        while not (file.exists() and file.read_text()):
            if time.monotonic() > until:
                raise TimeoutError(f"not within {ANSWERED_S} s: Chromium listens")
            try:
                raise RuntimeError(f"Chromium ended with {self._process.wait(0.1)}")
            except subprocess.TimeoutExpired:
                continue
        return int(file.read_text().split()[0])

    async def _connect(self, port):
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            page = next(target for target in await answer.json() if target["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        await self._ask("Inspector.enable")
        await self._ask("Page.enable")
        await self._ask("Page.addScriptToEvaluateOnNewDocument", source=self.first)
        await self._load("Page.navigate", url=self._url)

    def evaluate(self, expression, timeout_s=120):
        """The value of the expression, or of the promise that it is."""
        return self._within(timeout_s, self._evaluate(expression), expression)

    def _within(self, seconds, coroutine, what):
        try:
            return self._loop.run_until_complete(asyncio.wait_for(coroutine, seconds))
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"not within {seconds} s: {what}") from error

    def until(self, condition, timeout_s=60):
        """Waits until a condition holds."""
        self.evaluate(UNTIL % condition, timeout_s)

    def resize(self, width, height):
        size = self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._within(ANSWERED_S, size, "the page has another size")

    def press(self, key):
        """Presses a key, as a keyboard does: Tab or Enter."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        for kind in ("keyDown", "keyUp"):
            sent = self._ask(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text
            )
            self._within(ANSWERED_S, sent, f"the key {key}")

    def screenshot(self, file, box=None):
        """Saves what is seen, or a box of it (left, top, width, height), as a PNG."""
        clip = (
            {"clip": {**dict(zip(("x", "y", "width", "height"), box, strict=True)), "scale": 1}}
            if box
            else {}
        )
        answer = self._within(
            ANSWERED_S, self._ask("Page.captureScreenshot", format="png", **clip), f"a picture for {file}"
        )
        Path(file).write_bytes(base64.b64decode(answer["data"]))

    async def _evaluate(self, expression):
        answer = await self._ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    async def _ask(self, method, is_enough=lambda messages: True, **params):
        """The answer, once what has come meanwhile is enough."""
        number, messages, answer = next(self._numbers), [], None
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while answer is None or not is_enough(messages):
            message = json.loads(await self._socket.receive_str())
            messages.append(message)
            if message.get("method") == "Inspector.targetCrashed":
                raise RuntimeError(f"{method}: the page has crashed")  # and would answer nothing
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                answer = message["result"]
        return answer

    async def _load(self, method, **params):
        """Asks for another page and waits until it has loaded."""
        answer = await self._ask(method, is_loaded, **params)
        # Then the page that says so has loaded
        assert "errorText" not in answer, f"{method}: {answer['errorText']}"


def is_loaded(messages):
    """Whether another page has come and loaded. Chromium may tell of both before it answers, so
    that whatever looks for them from its answer on may wait for ever.
    """
    told = [
        message.get("method")
        for message in messages
        if "parentId" not in message.get("params", {}).get("frame", {})
    ]
    return (
        "Page.frameNavigated" in told and "Page.loadEventFired" in told[told.index("Page.frameNavigated") :]
    )


class ComfyPage(Page):
    """The page of a server of ComfyUI's, loaded and ready."""

    first = WATCHED

    def __enter__(self):
        super().__enter__()
        self._make_ready()
        return self

    def _make_ready(self):
        self.until(READY)
        self.until(SETTLED)
        self.evaluate(ENDS)

    def reload(self):
        self._within(LOADED_S, self._load("Page.reload"), f"{self._url} is not loaded again")
        self._make_ready()

    def choose_first(self):
        """Makes dynamic prompts, and whatever else is drawn by lot, the same each time."""
        self.evaluate(FIRST_CHOICE)

    def set(self, setting, value):
        """Sets one of ComfyUI's settings as its dialog does; it is on the server afterwards."""
        self.until(SETTLED)
        self.evaluate(f"app.extensionManager.setting.set({json.dumps(setting)}, {json.dumps(value)})")

    def load(self, nodes, name):
        """Opens a prompt of the API's in a tab of its own; no other has this ``name``."""
        self.evaluate(LOAD % (json.dumps(nodes), name))

    def queue(self):
        """Queues the workflow that is open; returns the id of its prompt."""
        prompt = self.evaluate(QUEUE)
        assert prompt, f"the server took no prompt: {self.evaluate('document.body.innerText')}"
        return prompt

    def end(self, prompt):
        """Waits for the end of a prompt; returns the event that told of it, and an error's text."""
        self.until(f"window.ends[{json.dumps(prompt)}]", timeout_s=180)
        return self.evaluate(f"window.ends[{json.dumps(prompt)}]")

    def run(self):
        return self.end(self.queue())

    def prompt(self, workflow):
        """What the page would send for the workflow: id of a node -> its class and inputs."""
        return json.loads(self.evaluate(PROMPT % json.dumps(workflow)))

    def register(self, object_info):
        """Adds classes of nodes, as if the server had them."""
        common = {
            "display_name": "",
            "category": "",
            "description": "",
            "python_module": "tests",
            "output_node": True,
        }
        self.evaluate(
            REGISTER % json.dumps([{**common, **info, "name": name} for name, info in object_info.items()])
        )
