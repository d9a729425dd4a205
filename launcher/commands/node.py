"""The leader of a machine: `torchrun ... -m launcher node`, run once on every machine
(docs/MULTI_NODE.md). It lends the machine to a ComfyUI elsewhere that holds the same secret; every
connection is one pool's.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Mapping

from ...pool.devices import ELSEWHERE, visible_gpus
from ...pool.listener import accept
from ...pool.rank_setup import RENDEZVOUS_VARIABLE, rank_setup_from
from ...pool.rendezvous import check_rendezvous, node_command, open_store, own_hello, register
from ...pool.worker_main import die_with_parent
from ..comfyui.host_record import ComfyInstall
from ..errors import LaunchError

STORE_TIMEOUT_S = 30.0
log = logging.getLogger("pipemesh")


def main(argv: list[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m launcher node",
        description=("Lends this machine to a ComfyUI on another machine."),
    )
    parser.add_argument(
        "--name",
        default=socket.gethostname(),
        help="the machine's name in the pool's devices, as in NAME/cuda:0 (default: its host name)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help=("the port to listen on, if a firewall needs a fixed one (default: any free port)"),
    )
    options = parser.parse_args(argv)
    if not ELSEWHERE.fullmatch(f"{options.name}/cpu"):
        raise LaunchError(
            f"{options.name!r} cannot be named in a list of devices: give a --name of letters, digits, dots"
            " and dashes."
        )
    require_torchrun(os.environ)
    die_with_parent(os.getppid())  # torchrun, which may be killed
    setup = rank_setup_from(os.environ, host.comfyui)
    address, port = check_rendezvous(setup, options.name)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        store = open_store(address, port, STORE_TIMEOUT_S)
        with socket.create_connection((address, port), STORE_TIMEOUT_S) as sock:
            own = sock.getsockname()[0]  # by which this machine speaks to that one
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"Nothing answers at the rendezvous {setup.rendezvous} ({error}): check that this is the"
            " --rdzv-endpoint of torchrun."
        ) from error
    visible_gpus(cpu_only=False)  # a driver's first answer takes long, and no thread beats meanwhile
    listener = listen(own, options.port)
    known = f"[{own}]" if ":" in own else own
    known += f":{listener.getsockname()[1]}"
    register(store, options.name, known)
    log.info(
        "[PipeMesh] %s at %s waits for a ComfyUI with the rendezvous %s",
        options.name,
        known,
        setup.rendezvous,
    )
    accept(listener, own_hello(options.name), setup)
    return 0


def require_torchrun(environ: Mapping[str, str]) -> None:
    """Raises LaunchError with the command that starts it."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        raise LaunchError(
            "`node` is started by torchrun:"
            f" {node_command(environ.get(RENDEZVOUS_VARIABLE) or 'ADDRESS:PORT')}"
        )


def listen(address: str, port: int) -> socket.socket:
    """Raises LaunchError."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise LaunchError(
            f"Nothing can listen at {address}:{port} ({error.strerror}): give another --port, or none."
        ) from error
