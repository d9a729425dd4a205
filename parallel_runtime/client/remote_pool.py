"""Remote pools: a pool handle with its sessions, runs, models and evaluations."""

from __future__ import annotations

import threading
from collections.abc import Collection

from ..planner.counts import Counts, count_nothing
from ..weights.weight_patches import Digests
from .evaluations import Evaluations
from .memory_needs import MemoryNeeds
from .residency import Residency
from .runs import Runs
from .session import Handle, Sessions
from .shared_evaluation import Admission
from .wait import Wait


class RemotePool:
    """Keeps the UI's side of one pool handle, shared by every model that runs on it."""

    def __init__(
        self,
        handle: Handle,
        turn: threading.Lock | None = None,
        wait: Wait | None = None,
        counts: Counts | None = None,
        admission: Admission | None = None,
        beside_ui: Collection[int] | None = None,
    ):
        """``turn`` is held by a thread that acts on the pool between two runs. ``wait`` begins and
        ends with the wait for a first step. ``counts`` tells the memory that evaluations need
        beside the weights. ``admission`` decides which models ranks may compute; without it, all.
        ``beside_ui``: as ``Runs`` has it.
        """
        self.admission = admission or Admission()
        self.turn = turn or threading.Lock()
        self.wait = wait or Wait()
        self.sessions = Sessions(handle)
        self.layout = handle.layout
        self.runs = Runs(self.sessions, beside_ui)
        self.residency = Residency(self.sessions, self.runs)
        self.evaluations = Evaluations(self.sessions, self.residency)
        self.memory_needs = MemoryNeeds(self.sessions, self.residency, counts or Counts(count_nothing))
        self.digests = Digests()  # of LoRAs under hooks
