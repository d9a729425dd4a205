"""ComfyUI's page in a headless Chromium, spoken to over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio", "--no-first-run")
PORT_FILE = "DevToolsActivePort"  # Chromium writes its port there once it listens

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
  const host = app.extensionManager.workflow, before = host.activeWorkflow
  app.loadApiJson(%s, '%s')
  while (host.activeWorkflow === before) await new Promise(requestAnimationFrame)  // the page goes on to open it
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
        command = [installed(), *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._loop.run_until_complete(self._connect(self._port()))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self._session is not None:
            self._loop.run_until_complete(self._session.close())
        self._process.terminate()
        self._process.wait()
        self._loop.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _port(self):
        """Waits until Chromium listens, or has ended."""
        file = self._profile / PORT_FILE
        while not (file.exists() and file.read_text()):
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
        await self._ask("Page.enable")
        await self._ask("Page.addScriptToEvaluateOnNewDocument", source=self.first)
        await self._ask("Page.navigate", url=self._url)
        await self._receive(lambda message: message.get("method") == "Page.loadEventFired")

    def evaluate(self, expression, timeout_s=120):
        """The value of the expression, or of the promise that it is."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._evaluate(expression), timeout_s))
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"not within {timeout_s} s: {expression}") from error

    def until(self, condition, timeout_s=60):
        """Waits until a condition holds."""
        self.evaluate(UNTIL % condition, timeout_s)

    def resize(self, width, height):
        self._loop.run_until_complete(
            self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        )

    def screenshot(self, file, box=None):
        """Saves what is seen, or a box of it (left, top, width, height), as a PNG."""
        clip = {"clip": {**dict(zip(("x", "y", "width", "height"), box, strict=True)), "scale": 1}} if box else {}
        answer = self._loop.run_until_complete(self._ask("Page.captureScreenshot", format="png", **clip))
        Path(file).write_bytes(base64.b64decode(answer["data"]))

    async def _evaluate(self, expression):
        answer = await self._ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    async def _ask(self, method, **params):
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await self._receive(lambda message: message.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def _receive(self, is_meant):
        while True:
            message = json.loads(await self._socket.receive_str())
            if is_meant(message):
                return message


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
        self._loop.run_until_complete(self._reload())
        self._make_ready()

    async def _reload(self):
        await self._ask("Page.reload")
        await self._receive(lambda message: message.get("method") == "Page.loadEventFired")

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
        return self.evaluate(QUEUE)

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
        common = {"display_name": "", "category": "", "description": "", "python_module": "tests", "output_node": True}
        self.evaluate(REGISTER % json.dumps([{**common, **info, "name": name} for name, info in object_info.items()]))
