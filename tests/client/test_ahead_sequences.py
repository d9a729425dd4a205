"""Whatever happens to a queue, each prompt's image is stock's, and nothing is left of what was
sampled ahead.
"""

import gc
from functools import cache

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pipemesh.lab.commands.parity import conditioning
from pipemesh.parallel_runtime.errors import OutOfMemory, PoolFailed
from pipemesh.parallel_runtime.layout import Layout

from ..fixtures import ALL
from ..kit.in_groups import in_groups
from ..kit.queues import Line, Workflow, node, stock_model, tensors_of, unload_all_models
from .test_ahead import Ahead, Failing, assert_alike, cancelled, suspended, with_lora

SIZES = (6, 8)
ERRORS = {"out of memory": OutOfMemory("No room."), "a rank dies": PoolFailed("A worker died.")}


class Varied(Workflow):
    """``text``, ``size`` and the strength of a ``lora`` are literals before the sampler."""

    def __init__(self, text, size, lora):
        super().__init__("euler_ancestral", steps=2, cfg=1.0)
        self.text, self.size, self.lora = text, size, lora
        self.latent = {"samples": torch.zeros(1, 16, size, 6)}

    def graph(self, seed):
        changed = {"text": node("Text", number=self.text), "latent": node("Empty", size=self.size)}
        return super().graph(seed) | changed | {"model": node("Lora", strength=self.lora)}

    def run(self, models, seed, at):
        return super().run(models[self.lora], seed, at, positive=conditioning(self.text, 13))


def plain_and_patched(model):
    """By the strength of a LoRA: what a graph's cache keeps of the MODEL."""
    return [model, with_lora(model)["model"]]


@cache
def stocks_own(seed, *varied):
    line = Line()
    line.put(("", seed, Varied(*varied)))
    return tensors_of(line.run(plain_and_patched(stock_model(5))))


class Queue(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ours = Ahead(Layout(data=3), made=Failing)
        self.models = plain_and_patched(self.ours.model)
        self.count = 0

    @property
    def waiting(self):
        return self.ours.line.waiting

    def made(self, seed, *varied):
        self.count += 1
        return f"prompt {self.count}", seed, Varied(*varied)

    @initialize()
    def begin(self):
        """With prompts of which two wait for what is sampled beside the first."""
        self.queue([1, 2, 3], 1, SIZES[0], 0, False)
        self.run()

    @rule(
        seeds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        text=st.integers(1, 2),
        size=st.sampled_from(SIZES),
        lora=st.integers(0, 1),
        at_front=st.booleans(),
    )
    def queue(self, seeds, text, size, lora, at_front):
        prompts = [self.made(seed, text, size, lora) for seed in seeds]
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
    @rule(text=st.integers(1, 2), lora=st.integers(0, 1), data=st.data())
    def change(self, text, lora, data):
        """Deletes a prompt and queues it with another text or LoRA in its place."""
        at = data.draw(st.integers(0, len(self.waiting) - 1))
        _, seed, workflow = self.waiting[at]
        self.waiting[at] = self.made(seed, text, workflow.size, lora)

    @precondition(lambda self: self.waiting)
    @rule()
    def run(self):
        _, seed, workflow = self.waiting[0]
        expected = stocks_own(seed, workflow.text, workflow.size, workflow.lora)
        assert_alike(self.ours.line.run(self.models), expected)

    @precondition(lambda self: self.waiting)
    @rule(step=st.integers(1, 2))
    def cancel(self, step):
        cancelled(self.ours.line, self.models, step)

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
        """ComfyUI's Unload Models and Execution Cache."""
        unload_all_models()
        self.load_anew()
        gc.collect()
        assert not self.ours.ahead._kept

    @rule()
    def load_anew(self):
        """Another MODEL of the same weights, in place of the first."""
        self.ours.stock = stock_model(5)
        self.ours.model, self.ours.pool = in_groups(
            Layout(data=3), self.ours.stock, made=Failing, ahead=self.ours.ahead
        )
        self.models = plain_and_patched(self.ours.model)

    @invariant()
    def no_more_is_kept_than_there_are_other_groups_and_none_is_suspended(self):
        assert len(self.ours.ahead._kept) <= 2 and not suspended()

    def teardown(self):
        while self.waiting:
            self.run()
        self.queue([1], 1, SIZES[0], 0, False)
        self.run()
        assert not self.ours.ahead._kept
        self.free()


Queue.TestCase.settings = settings(max_examples=50 if ALL else 5, stateful_step_count=10, deadline=None)
TestSequences = Queue.TestCase
