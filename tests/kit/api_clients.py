"""Runs a graph by a client of ComfyUI's API, in a Python that has it: ``NAME HOST:PORT GRAPH
PICTURE EXAMPLES``. Writes the picture that the client returns, and says what it was told meanwhile.
"""

import asyncio
import json
import sys
from pathlib import Path


def simplified(address, graph, _examples):
    from comfy_api_simplified import ComfyApiWrapper

    return [*ComfyApiWrapper(f"http://{address}").queue_and_wait_images(graph, "Save Image").values()], []


def utils(address, graph, _examples):
    from comfyui_utils.comfy import Callbacks, ComfyAPI

    pictures, told, api = [], [], ComfyAPI(address)

    class Told(Callbacks):
        async def queue_position(self, position):
            pass  # who is faster, the queue or the client?

        async def in_progress(self, node_id, progress, total):
            told.append([node_id, progress, total])

        async def completed(self, outputs, cached):
            async def keep(file):
                pictures.append(file.read())

            await api.fetch(outputs["images"][0], keep)

    asyncio.run(api.submit(graph, Told()))
    return pictures, told


def script(address, graph, _examples):
    from io import BytesIO

    from comfy_script import runtime

    runtime.load(f"http://{address}", save_script_source=False)
    from comfy_script.runtime import nodes

    made, told = {}, []

    def value(one):
        return made[one[0]] if isinstance(one, list) else one

    for name in sorted(graph, key=lambda name: len([*needed(graph, name)])):
        inputs = {key: value(one) for key, one in graph[name]["inputs"].items()}
        made[name] = getattr(nodes, graph[name]["class_type"])(**inputs)
        saved = made[name]
    with runtime.Workflow() as flow:
        flow += saved
    flow.task.add_progress_callback(lambda one: told.append([one.value, one.max]))
    (images,) = flow.task.wait()
    kept = BytesIO()
    images.wait()[0].save(kept, "PNG")
    return [kept.getvalue()], told


def needed(graph, name):
    for one in graph[name]["inputs"].values():
        if isinstance(one, list):
            yield one[0]
            yield from needed(graph, one[0])


def example(address, graph, examples):
    """ComfyUI's own, without the graph that it ends with."""
    import websocket

    text, _, _ = (Path(examples) / "websockets_api_example.py").read_text().partition("prompt_text =")
    here = {}
    exec(text, here)
    here["server_address"] = address
    socket = websocket.WebSocket()
    socket.connect(f"ws://{address}/ws?clientId={here['client_id']}")
    return [picture for several in here["get_images"](socket, graph).values() for picture in several], []


CLIENTS = {one.__name__: one for one in (simplified, utils, script, example)}


def main(name, address, graph, picture, examples):
    pictures, told = CLIENTS[name](address, json.loads(Path(graph).read_text()), examples)
    assert len(pictures) == 1
    Path(picture).write_bytes(pictures[0])
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
