"""Pools that a lack of memory ends, counted over several prompts: on the edge of memory a user pays
one start, not one for each prompt.
"""

from functools import partial
from types import SimpleNamespace

import comfy.model_management
import pytest
import torch
from comfy_execution.utils import CurrentNodeContext
from pipemesh.lab.commands.parity import BOUND, relative_error, stock_model
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.sampling import NO_ROOM
from pipemesh.nodes.auto.switch import Switch
from pipemesh.nodes.extension import show_notice
from pipemesh.nodes.notices import Notices
from pipemesh.nodes.runtime import Runtime
from pipemesh.nodes.screen import SHOWS_TEXT
from pipemesh.nodes.settings import Choice
from pipemesh.nodes.timing import StepTimes
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.errors import PoolSpent
from pipemesh.parallel_runtime.wire.messages import Load
from pipemesh.pool.conversation import stop_if
from pipemesh.pool.devices import place

from ..kit.fake_pools import fake_setup
from ..kit.in_groups import in_groups
from ..kit.models import run
from ..kit.queues import Workflow, in_line, seeds_of
from ..kit.shared_runtime import SharedRuntime, settings
from ..nodes.test_auto import notices, said
from ..nodes.test_screen import server
from ..pool.test_pool_leaks import KEY
from .test_ahead import TWO, Ahead, assert_alike, stocks
from .test_edge_of_memory import GIB, PAIR, OnGPUs, uncounted
from .test_first_evaluation import trial, trials, watched

__all__ = ["notices", "server", "settings", "trial", "trials"]  # fixtures


class NoRoomInFp32(OnGPUs):
    """What ranks share in fp32, for a comparison, has no room on one of them."""

    def submit(self, request, group):
        if request.in_fp32 and len(group) > 1:
            self.run_out(1)
        super().submit(request, group)


def test_a_comparison_that_has_no_room_ends_one_pool_and_is_not_tried_again(trial, trials):
    trial.ends.set()
    told, numbers = [], torch.bfloat16
    known = watched(trials(notice=told.append))
    model, ranks = in_groups(PAIR, stock_model(5, numbers), made=NoRoomInFp32, **known)
    ranks.gpus.nbytes = 1 << 40
    ranks.tell()
    starts = []
    for _prompt in range(3):
        assert run(model).isfinite().all()
        starts.append(ranks.gpus.starts)
    assert starts == [1, 1, 1]
    (notice,) = [one for one in told if "could not be compared" in one]
    assert "(Rank 1 on cuda:1 ran out of memory)" in notice
    assert "PipeMesh does not try it again until" in notice


# -- Stop


class Stopped(OnGPUs):
    """Ranks that run out of memory once. Stop is pressed at a ``moment`` of the restart, and heard
    as a pool hears it: before it starts, and while it works, which it goes on with.
    """

    moment = ""

    def at(self, moment, interrupted):
        if moment == self.moment:
            comfy.model_management.interrupt_current_processing()
        stop_if(interrupted)

    def ensure(self, interrupted):
        if self.gpus.pool is None:
            self.at("starting", interrupted)
        return super().ensure(interrupted)

    def submit(self, request, group):
        if self.gpus.takes:
            self.gpus.takes = 0
            self.at("failing", lambda: False)
            self.run_out(0)
        super().submit(request, group)

    def ask(self, request, fds=(), interrupted=lambda: False):
        self.settle(interrupted)
        answers, self.idle = super().ask(request, fds, interrupted), False
        if self.gpus.starts:
            self.at(type(request).__name__, interrupted)
        self.idle = True
        return answers

    def settle(self, interrupted):
        self.idle = True


@pytest.mark.parametrize(
    ("moment", "starts"), [("failing", 0), ("starting", 0), ("Load", 1), ("SetWeightPatches", 1)]
)
def test_stop_in_a_restart_is_heard_and_the_next_prompt_needs_no_other(monkeypatch, moment, starts):
    prompts = uncounted(made=Stopped)
    remote, gpus = prompts.remote, prompts.gpus
    prompts.model.add_patches({KEY: ("diff", (torch.ones(1),))}, 0.0)
    monkeypatch.setattr(Stopped, "moment", moment)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        prompts()
    assert gpus.starts == starts
    model = prompts.model.remote.model
    assert not remote.sessions.latest.tickets and model.run is None and model.check is None
    monkeypatch.setattr(Stopped, "moment", "")
    assert prompts()[Load] == (moment != "SetWeightPatches") and gpus.starts == 1


# -- the page


@pytest.mark.parametrize(("flag", "frames"), [(SHOWS_TEXT, 2), ("said_nothing_of_it", 0)])
def test_a_run_that_goes_on_in_fresh_workers_says_so_on_its_node_and_to_a_page_alone(server, flag, frames):
    prompts = uncounted(made=Stopped)
    waiting = SimpleNamespace(end=lambda: pytest.fail("the run waits on"))
    told = Notices(partial(show_notice, waiting))
    choice = Choice(place(PAIR, "cpu", "auto", ()))
    prompts.remote.admission = Runtime(fake_setup(), notices=told).pool_for(choice).admission
    sent_by = server("a client", **{flag: True})
    for number in ("1", "2"):
        with CurrentNodeContext(number, "3"):
            prompts()
    (notice,) = told.latest()
    assert (notice.prompt, notice.node) == ("1", "3")
    assert notice.text == (
        "Rank 0 on cuda:0 ran out of memory. This run goes on in fresh workers, which load its model again."
    )
    sent = [(f"PipeMesh: {notice.text}", "a client"), ("pipemesh.notice", "a client")]
    assert sent_by.sent == sent[:frames]


# -- auto mode


class OfOneModel(SharedRuntime):
    def parallelize(self, model, choice, left_open=None):
        return parallelize(model, self._client, 1.0, weights="offloaded")


def test_auto_mode_tries_a_kind_without_room_in_two_prompts_and_then_leaves_it_to_one_gpu(settings, notices):
    prompts = uncounted(weights="whole")
    gpus, runtime = prompts.gpus, OfOneModel(prompts.remote)
    auto = Auto(lambda: runtime, Switch({}, lambda: settings.file), notices, StepTimes())
    settings(True)

    def starts(*numbers):
        """How many pools have been started when each of these prompts is done."""
        counted = []
        for number in numbers:
            with CurrentNodeContext(number, "3"):
                assert relative_error(run(prompts.stock, cfg=2.0), prompts.truth) <= BOUND
            counted.append(gpus.starts)
        return counted

    auto.install()
    try:
        gpus.takes = 0
        assert starts("0") == [0]
        gpus.takes = 100 * GIB
        assert starts("1", "1", "2") == [1, 1, 2], "a repeat in the first, and one for the second"
        gpus.takes = 0
        assert starts("3") == [2] and said(notices)[0] == NO_ROOM.format(2)
        settings(False)
        starts("4")
        settings(True)
        gpus.takes = 100 * GIB
        assert starts("5") == [3], "it is tried again once auto mode was off"
    finally:
        auto.remove()


# -- prompts that are sampled together


class FullTogether(OnGPUs):
    """What a second image takes beside the first has no room."""

    def submit(self, request, group):
        if self.answers:
            self.run_out(1)
        super().submit(request, group)


def test_prompts_without_room_together_cost_one_start_for_a_queue_and_no_image():
    ours = Ahead(TWO, made=FullTogether)
    starts = []
    for seeds in ((11, 12, 13, 14), (15, 16)):
        prompts = seeds_of(Workflow(cfg=1.0), *seeds)
        assert_alike(in_line(ours.model, ours.line, *prompts), stocks(*prompts))
        starts.append(ours.pool.gpus.starts)
    assert starts == [1, 2] and ours.images == (0, 0)


def test_an_image_that_has_no_room_alone_either_gets_no_second_pool(monkeypatch):
    ours = Ahead(TWO, made=OnGPUs)
    ours.pool.gpus.takes = 1
    monkeypatch.setattr(ours.model.remote.pool.memory_needs, "leave_more", lambda _model: True)
    with pytest.raises(PoolSpent):
        in_line(ours.model, ours.line, *seeds_of(Workflow(cfg=1.0), 11, 12))
    assert ours.pool.gpus.starts == 1
