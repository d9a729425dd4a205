"""Which functions of the pack one evaluation calls, in order: in this process by ``traced``, in a
rank by running this file in a worker's place: ``traces.py FILE SOCKET_FD PARENT_PID``.

A rank writes a line into FILE.PID for each request, before it sends the answer: its number, and the
functions called since the answer before.
"""

import gc
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(f"{ROOT / room}{os.sep}" for room in ("nodes", "pool", "launcher", "parallel_runtime"))
INLINE = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>")


def function_of(code):
    """Returns such as ``parallel_runtime/layout.py:Layout.group``; None for code outside the pack,
    and for a lambda or a comprehension, which stands within another function.
    """
    if not code.co_filename.startswith(ROOMS) or code.co_name in INLINE:
        return None
    name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
    return f"{Path(code.co_filename).relative_to(ROOT)}:{name.replace('<locals>.', '')}"


@contextmanager
def traced():
    """Gives the functions that this thread calls inside, each call of each, and the number of each
    request that the pool is given. No garbage is looked for meanwhile: that calls finalizers.
    """
    from pipemesh.pool.pool import WorkerPool

    calls, requests = [], []

    def look(frame, event, _argument):
        if event != "call":
            return
        if name := function_of(frame.f_code):
            calls.append(name)
        if frame.f_code is WorkerPool.submit.__code__:
            requests.append(frame.f_locals["request"].request)

    gc.disable()
    sys.setprofile(look)
    try:
        yield calls, requests
    finally:
        sys.setprofile(None)
        gc.enable()


def trace_every_request(file):
    """Has the rank write down what it calls for each request, before it answers. How much memory is
    free it asks once: a slow machine would ask again amid a run.
    """
    from pipemesh.parallel_runtime.wire.channel import Channel
    from pipemesh.parallel_runtime.worker import device_memory

    device_memory.MEMORY_KEPT_S = 600.0
    calls = []

    def look(frame, event, _argument):
        if event == "call" and (name := function_of(frame.f_code)):
            calls.append(name)
        if event == "call" and frame.f_code is Channel.send.__code__:
            with open(file, "a", encoding="utf-8") as out:
                print(json.dumps([getattr(frame.f_locals["message"], "request", 0), calls]), file=out)
            calls.clear()

    sys.setprofile(look)


if __name__ == "__main__":
    trace = sys.argv.pop(1)
    from as_worker import register, run_worker

    register()
    trace_every_request(f"{trace}.{os.getpid()}")
    run_worker()
