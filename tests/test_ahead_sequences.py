"""Whatever happens to a queue, each prompt's image is stock's, and nothing is left of what was
sampled ahead.
"""

from functools import cache

import comfy.model_management
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error, stock_model
from pipemesh.parallel_runtime.errors import OutOfMemory, PoolFailed
from pipemesh.parallel_runtime.layout import Layout

import nodes

from .queues import Line, Workflow, node, tensors_of
from .test_ahead import Ahead, Failing, cancelled, suspended

SIZES = (6, 8)
ERRORS = {"out of memory": OutOfMemory("No room."), "a rank dies": PoolFailed("A worker died.")}


class Varied(Workflow):
    """``text`` and ``size`` are literals of nodes before the sampler; ``loads``: how often its
    loader is to make another MODEL of the same file.
    """

    def __init__(self, text, size):
        super().__init__("euler_ancestral", steps=2, cfg=1.0)
        self.text, self.size = text, size

    def graph(self, seed):
        changed = {"text": node("Text", number=self.text), "latent": node("Empty", size=self.size)}
        return super().graph(seed) | changed

    def run(self, model, seed, at):
        latent = {"samples": torch.zeros(1, 16, self.size, 6)}
        given = conditioning(self.text, 13), conditioning(2, 7), latent
        with at("1"):
            return nodes.KSampler().sample(model, seed, 2, 1.0, self.sampler, "simple", *given)


@cache
def stocks_own(seed, text, size):
    line = Line()
    line.put(("", seed, Varied(text, size)))
    return tensors_of(line.run(stock_model(5)))


class Queue(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ours = Ahead(Layout(data=3), made=Failing)
        self.count = 0
        self.is_loaded = False  # the MODEL, in ComfyUI's list

    @property
    def waiting(self):
        return self.ours.line.waiting

    def made(self, seed, text, size):
        self.count += 1
        return f"prompt {self.count}", seed, Varied(text, size)

    @rule(
        seeds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        text=st.integers(1, 2),
        size=st.sampled_from(SIZES),
        at_front=st.booleans(),
    )
    def queue(self, seeds, text, size, at_front):
        prompts = [self.made(seed, text, size) for seed in seeds]
        self.waiting[:] = prompts + self.waiting if at_front else self.waiting + prompts

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def delete(self, data):
        del self.waiting[data.draw(st.integers(0, len(self.waiting) - 1))]

    @precondition(lambda self: self.waiting)
    @rule()
    def clear(self):
        self.waiting.clear()

    @precondition(lambda self: self.waiting)
    @rule(text=st.integers(1, 2), data=st.data())
    def change(self, text, data):
        """Deletes a prompt and queues it with another text in its place."""
        at = data.draw(st.integers(0, len(self.waiting) - 1))
        _, seed, workflow = self.waiting[at]
        self.waiting[at] = self.made(seed, text, workflow.size)

    @precondition(lambda self: self.waiting)
    @rule()
    def run(self):
        _, seed, workflow = self.waiting[0]
        got, self.is_loaded = tensors_of(self.ours.line.run(self.ours.model)), True
        for one, other in zip(got, stocks_own(seed, workflow.text, workflow.size), strict=True):
            assert relative_error(one, other) <= BOUND

    @precondition(lambda self: self.waiting)
    @rule(step=st.integers(1, 2))
    def cancel(self, step):
        cancelled(self.ours.line, self.ours.model, step)

    @precondition(lambda self: self.waiting)
    @rule(what=st.sampled_from(sorted(ERRORS)), after=st.integers(0, 5))
    def fail(self, what, after):
        self.ours.pool.error, self.ours.pool.at = ERRORS[what], len(self.ours.pool.asked) + after
        try:
            self.run()
        except (OutOfMemory, PoolFailed) as error:
            assert error is ERRORS[what]
        finally:
            self.ours.pool.error = None

    @rule()
    def free(self):
        """ComfyUI frees what it has loaded; what waits for another MODEL goes at the next run."""
        comfy.model_management.unload_all_models()
        assert not self.is_loaded or not self.ours.ahead._kept
        self.is_loaded = False

    @rule()
    def load_anew(self):
        """Another MODEL of the same weights, as after a restart of the graph's cache."""
        fresh, self.is_loaded = Ahead(Layout(data=3), made=Failing), False
        fresh.line.waiting[:] = self.waiting
        self.ours.model, self.ours.pool, self.ours.line = fresh.model, fresh.pool, fresh.line
        self.ours.ahead._moment = fresh.line
        self.ours.ahead, fresh.ahead._kept = fresh.ahead, self.ours.ahead._kept

    @invariant()
    def no_more_is_kept_than_there_are_other_groups(self):
        assert len(self.ours.ahead._kept) <= 2

    def teardown(self):
        assert not suspended()
        while self.waiting:
            self.run()
        self.queue([1], 1, SIZES[0], False)
        self.run()
        assert not self.ours.ahead._kept
        self.free()


Queue.TestCase.settings = settings(max_examples=10, stateful_step_count=10, deadline=None)
TestSequences = Queue.TestCase
