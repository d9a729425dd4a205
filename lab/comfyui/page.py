"""ComfyUI's page in a headless Chromium, driven by playwright."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...launcher.errors import LaunchError

if TYPE_CHECKING:
    from typing_extensions import Self

PLAYWRIGHT = "playwright>=1.50,<2"  # pyproject's extra `browser`
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--disable-gpu",
    # A page does not wait for what it asks of other machines
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
LOADED_S, ANSWERED_S, ENDED_S = 120, 60, 600  # the longest that a page, an answer and a prompt may take

HOLDS = "() => { try { return %s } catch { return false } }"  # what is looked at may not be there yet
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
    window.comfyAPI.api.api.addEventListener(name, ({ detail }) => {
      window.ends[detail.prompt_id] = [name, detail.exception_message ?? '']
    })
})()"""
LOAD = """(async () => {
  const host = app.extensionManager.workflow, nodes = %s, name = '%s'
  app.loadApiJson(nodes, name)
  const count = Object.keys(nodes).length
  const isOpen = () => host.activeWorkflow?.path?.includes(name) && app.rootGraph.nodes.length == count
  // The page goes on to open it, and may open one of its own before
  while (!isOpen()) await new Promise(requestAnimationFrame)
})()"""
QUEUE = """(async () => {
  const api = window.comfyAPI.api.api, send = api.queuePrompt
  let answer
  api.queuePrompt = async function (...args) { return (answer = await send.apply(this, args)) }
  try { await app.queuePrompt(0) } finally { api.queuePrompt = send }
  return answer?.prompt_id
})()"""
PROMPT = """(async () => {
  const frame = () => new Promise(requestAnimationFrame), draw = Math.random
  Math.random = () => 0  // the first choice of each dynamic prompt
  try {
    await app.loadGraphData(%s)
    await frame()
    await frame()  // types that follow from links are settled in the next frame
    return JSON.stringify((await app.graphToPrompt()).output)
  } finally { Math.random = draw }
})()"""

Answer = TypeVar("Answer")


def lack() -> str:
    """Returns what is missing to open a page here, with the next move; empty where nothing is."""
    if importlib.util.find_spec("playwright") is None:
        command = shlex.join([sys.executable, "-m", "pip", "install", PLAYWRIGHT])
        return f"{sys.executable} has no playwright, which opens ComfyUI's page: run {command}"
    if chromium() is None:
        return "There is no Chromium, in which ComfyUI's page opens: apt install chromium."
    return ""


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page at `address`, loaded. What passes between it and here is JSON.

    Its event loop runs only during its calls, so that a caller may run loops of its own between
    them. Raises LaunchError if the page cannot be opened here, TimeoutError if it does not
    answer, and playwright's Error if a script fails or the page crashes.
    """

    first = ""  # a script that runs before those of the page

    def __init__(self, address: str):
        self._url = f"http://{address}"

    def __enter__(self) -> Self:
        if lacking := lack():
            raise LaunchError(lacking)
        self._loop = asyncio.new_event_loop()
        try:
            self._within(LOADED_S, self._open(), f"{self._url} is loaded")
            self.make_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if hasattr(self, "_playwright"):
                self._within(ANSWERED_S, self._playwright.stop(), "Chromium ends")
        finally:
            self._loop.close()

    async def _open(self) -> None:
        from playwright.async_api import async_playwright

        self._playwright = await async_playwright().start()
        browser = await self._playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        self._page = await browser.new_page()
        self._page.set_default_timeout(0)  # `_within` ends what takes too long
        await self._page.add_init_script(self.first)
        await self._page.goto(self._url)

    def _within(self, seconds: float, answer: Awaitable[Answer], what: str) -> Answer:
        try:
            return self._loop.run_until_complete(asyncio.wait_for(answer, seconds))
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"not within {seconds} s: {what}") from error

    def make_ready(self) -> None:
        """Runs whenever the page has loaded."""

    def evaluate(self, expression: str) -> Any:
        """Returns the value of the expression, or of the promise that it is."""
        return self._within(LOADED_S, self._page.evaluate(expression), expression)

    def until(self, condition: str, timeout_s: float = ANSWERED_S) -> None:
        """Waits until a condition holds."""
        self._within(timeout_s, self._page.wait_for_function(HOLDS % condition), condition)

    def reload(self) -> None:
        self._within(LOADED_S, self._page.reload(), f"{self._url} is loaded again")
        self.make_ready()

    def leave(self) -> None:
        """Shows nothing until it is loaded again: an open page draws all that a server tells."""
        self._within(ANSWERED_S, self._page.goto("about:blank"), f"{self._url} is left")

    def resize(self, width: int, height: int) -> None:
        size = self._page.set_viewport_size({"width": width, "height": height})
        self._within(ANSWERED_S, size, "the page has another size")

    def click(self, x: float, y: float) -> None:
        """Clicks at a place of the window."""
        self._within(ANSWERED_S, self._page.mouse.click(x, y), f"a click at {x}, {y}")

    def press(self, key: str) -> None:
        """Presses a key, as a keyboard does: Tab or Enter."""
        self._within(ANSWERED_S, self._page.keyboard.press(key), f"the key {key}")

    def screenshot(self, file: Path, box: Sequence[float]) -> None:
        """Saves a box of what is seen (left, top, width, height) as a PNG."""
        left, top, width, height = box
        taken = self._page.screenshot(path=file, clip={"x": left, "y": top, "width": width, "height": height})
        self._within(ANSWERED_S, taken, f"a picture for {file}")


class ComfyPage(Page):
    """The page of ComfyUI: `with ComfyPage(server.address) as page: page.prompt(workflow)`."""

    first = WATCHED

    def make_ready(self) -> None:
        self.until(READY)
        self.until(SETTLED)
        self.evaluate(ENDS)

    def set(self, setting: str, value: Any) -> None:
        """Sets one of ComfyUI's settings as its dialog does; it is on the server afterwards."""
        self.until(SETTLED)
        self.evaluate(f"app.extensionManager.setting.set({json.dumps(setting)}, {json.dumps(value)})")

    def load(self, nodes: Mapping[str, Any], name: str) -> None:
        """Opens a prompt of the API's in a tab of its own; no other has this `name`."""
        self.evaluate(LOAD % (json.dumps(nodes), name))

    def queue(self) -> str:
        """Queues the workflow that is open; returns the id of its prompt."""
        prompt = self.evaluate(QUEUE)
        assert prompt, f"the server took no prompt: {self.evaluate('document.body.innerText')}"
        return prompt

    def end(self, prompt: str) -> list[str]:
        """Waits for the end of a prompt; returns the event that told of it, and an error's text."""
        end = f"window.ends[{json.dumps(prompt)}]"
        self.until(end, ENDED_S)
        return self.evaluate(end)

    def run(self) -> list[str]:
        return self.end(self.queue())

    def prompt(self, workflow: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns what the page would send for the workflow: id of a node -> its class and inputs.
        A node whose class the server does not have has no ``class_type``.
        """
        return json.loads(self.evaluate(PROMPT % json.dumps(workflow)))
