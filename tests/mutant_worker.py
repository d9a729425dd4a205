"""A rank with one thing broken, whatever FILE names when a model is loaded: ``mutant_worker.py FILE
SOCKET_FD PARENT_PID``.

Shows that the parity suite can go red.
"""

import runpy
import sys
from pathlib import Path

LAUNCHER = Path(__file__).resolve().parent.parent / "launcher"


def gather_order(usp):
    """Rank 0 puts the other ranks' rows before its own."""
    real = usp.SequenceParallel._left

    def gather(self, out):
        result = real(self, out)
        own = self._rows.splits["img"].sizes[0]
        return result.roll(-own, dims=1)

    usp.SequenceParallel._left = gather


def token_order(usp):
    """Tokens are handed back to the wrong ranks' heads: the heads of two ranks change places."""
    real = usp.SequenceParallel._tokens_for_heads
    usp.SequenceParallel._tokens_for_heads = lambda self, out, heads, joint: real(self, out, heads, joint).roll(1, dims=2)


def mask_permutation(usp):
    """The mask stays in the host's token order."""
    real = usp.permute_mask

    def unpermuted(mask, joint):
        joint._order = usp.torch.arange(joint.total)
        return real(mask, joint)

    usp.permute_mask = unpermuted


def mask_dropped(usp):
    """As peers do it."""
    usp.permute_mask = lambda mask, joint: None


def pe_slice(usp):
    """Every rank takes rank 0's positions."""
    real = usp.Shards.slice

    def slice_(self, tensor, dim, streams):
        if len(streams) == 1:
            return real(self, tensor, dim, streams)
        carried, self.carried = self.carried, {name: (0, size) for name, (_start, size) in self.carried.items()}
        try:
            return real(self, tensor, dim, streams)
        finally:
            self.carried = carried

    usp.Shards.slice = slice_


def uneven_split(usp):
    """Tokens are split as if they divided: parts begin where even ones would, though the first are
    longer.
    """
    from pipemesh.parallel_runtime.methods import shards

    class AsIfEven(shards.Split):
        @property
        def starts(self):
            return tuple(part * (self.total // len(self.sizes)) for part in range(len(self.sizes)))

    shards.Split = AsIfEven


def lse_merge(usp):
    """Partial outputs are merged as if every key weighed the same, whatever its score."""
    real = usp.merge
    usp.merge = lambda a, b: real(*(part._replace(level=part.level * 0) for part in (a, b)))


def ring_order(usp):
    """Blocks of two ranks that have as many tokens are taken for each other's: the mask's columns
    no longer fit the keys.
    """
    from pipemesh.parallel_runtime.comm import ring

    real = ring.Block
    ring.Block = lambda source, kv, flag: real({1: 2, 2: 1}.get(source, source), kv, flag)


def slow_stage(_usp):
    """The second stage takes a good deal longer than the first."""
    import time

    pipefusion, real = stage_module(), stage_module().StageForward._attended

    def attended(self, *args):
        if not self._stage.opens:
            time.sleep(0.1)
        return real(self, *args)

    pipefusion.StageForward._attended = attended


def dear_first_blocks(_usp):
    """The model's first two blocks take longer than all the others."""
    import time

    pipefusion, real = stage_module(), stage_module().StageForward._attended

    def attended(self, *args):
        if self._stage.first + self._layer < 2:
            time.sleep(0.1)
        return real(self, *args)

    pipefusion.StageForward._attended = attended


def falls_over(_usp, error=ZeroDivisionError):
    """The last stage fails before it has taken what was sent to it."""
    pipefusion, real = stage_module(), stage_module().StageForward.begin

    def begin(self, arguments):
        if self._stage.closes and self._patch is not None:
            raise error("made")
        return real(self, arguments)

    pipefusion.StageForward.begin = begin


def hangs_at_its_door(_usp):
    """Rank 0, all its blocks behind it, does not hand on the first patch."""
    from threading import Event

    pipefusion, real = stage_module(), stage_module().StageForward._go_out

    def go_out(self, out):
        if self._comm.rank == 0 and self._patch is not None:
            Event().wait()
        real(self, out)

    pipefusion.StageForward._go_out = go_out


def has_no_memory_left(usp):
    falls_over(usp, MemoryError)


def cannot_read_its_input(_usp):
    """The last stage, of the second patch."""
    from pipemesh.parallel_runtime.worker import rank_loop as engine

    real = engine.Engine._input
    patches = set()

    def input_(self, ref):
        part = self._part_at_hand
        if part is not None and part.patch is not None:
            patches.add(part.patch)
        if self._rank == 1 and len(patches) == 2:
            raise MemoryError("made")
        return real(self, ref)

    forward = engine.Engine._forward

    def noted_forward(self, message):
        self._part_at_hand = message.part
        return forward(self, message)

    engine.Engine._input, engine.Engine._forward = input_, noted_forward


def must_receive_ahead(usp):
    """Nothing is broken: a second stage that the first is far ahead of falls over if it had not
    posted a receive it could have.
    """
    slow_stage(usp)
    forward, real = stage_module().StageForward, stage_module().StageForward._come_in
    seen = set()

    def come_in(self, tokens):
        assert self._part not in seen or len(self._link._posted) == 1, "received late"
        seen.add(self._part)
        return real(self, tokens)

    forward._come_in = come_in


def receives_late(usp):
    """The receive of a patch is posted when it is wanted."""
    must_receive_ahead(usp)
    stage_module().StageForward._expect_next = lambda self: None


def patches_its_own_weights(_usp):
    """Nothing is broken: a stage falls over if it patches weights of other stages' blocks, or
    leaves out its own.
    """
    from pipemesh.parallel_runtime.worker.resident import ResidentModel

    real = ResidentModel.patch

    def patch(self, patches_id, patches, *rest):
        real(self, patches_id, patches, *rest)
        own = set(patches) & {name for name, _ in self.patcher.model.named_parameters()}
        assert set(self._unpatched) == own and 0 < len(own) < len(patches), (len(self._unpatched), len(own), len(patches))

    ResidentModel.patch = patch


def no_memory(_usp):
    no_memory_on_ranks(range(99))


def no_memory_on_rank_1(_usp):
    no_memory_on_ranks([1])


def no_memory_before_a_slow_stage(usp):
    slow_stage(usp)
    no_memory_on_ranks([0])


def no_memory_beside_another_model(_usp):
    no_memory_on_ranks(range(99), lambda engine: len(engine._models) > 1)


def no_memory_on_ranks(ranks, when=lambda engine: True):
    from pipemesh.parallel_runtime.wire.messages import Memory
    from pipemesh.parallel_runtime.worker import rank_loop as engine

    real = engine.Engine._ask_memory
    engine.Engine._ask_memory = lambda self: Memory(0, 1 << 30, 0) if self._rank in ranks and when(self) else real(self)


def counts_what_it_keeps(_usp):
    """Nothing is broken: a stage falls over if its keys and values are not what it reserved, not of
    this run, or not where they were.
    """
    from pipemesh.parallel_runtime.worker import rank_loop as engine

    forward, reserve, run = stage_module().StageForward, engine.Engine.reserve, stage_module().StageForward.run
    reserved, places = {}, {}

    def counted_reserve(self, nbytes):
        method = self._models[self._model].method
        reserved.setdefault(method._part.run, {})[method._part.branch] = nbytes
        reserve(self, nbytes)

    def counted_run(self, call, arguments, number, part):
        assert part.run == self._part.run or not self._buffers, "kept beyond its run"
        out = run(self, call, arguments, number, part)
        kept = {}
        for (branch, layer), buffer in self._buffers.items():
            kept[branch] = kept.get(branch, 0) + buffer.numel() * buffer.element_size()
            assert places.setdefault((part.run, branch, layer), buffer.data_ptr()) == buffer.data_ptr(), "made anew within a run"
        assert kept == reserved[part.run], (kept, reserved)
        return out

    engine.Engine.reserve, forward.run = counted_reserve, counted_run


def rows_of_the_buffer(_usp):
    """A patch's keys and values are written one row too far."""
    pipefusion, real = stage_module(), stage_module().Joint.ranges

    def ranges(self):
        of_a_patch = self.total < self.whole
        return [(begin + (1 if begin + size < self.whole else -1) * of_a_patch, size) for begin, size in real(self)]

    pipefusion.Joint.ranges = ranges


def anchors_are_kept(_usp):
    """The keys of the one text token that a patch carries for the host's sake are taken for the
    text's first.
    """
    pipefusion, real = stage_module(), stage_module().StageForward._choose_rows

    def choose_rows(self, totals):
        rows = real(self, totals)
        for stream, (_start, count) in rows.parts.items():
            if count == 0:
                rows.parts[stream] = (0, 1)
                rows.splits[stream] = pipefusion.Split.even(1, self._comm.size)
        return rows

    pipefusion.StageForward._choose_rows = choose_rows


def text_is_dropped(_usp):
    """The first patch comes without its text, whose keys and values stay those of the warm-up."""
    pipefusion, real = stage_module(), stage_module().StageForward._choose_rows

    def choose_rows(self, totals):
        patch = self._patch
        self._patch = patch and type("Other", (), {"start": patch.start, "size": patch.size, "last": patch.last, "first": False})
        return real(self, totals)

    pipefusion.StageForward._choose_rows = choose_rows


def stale_message(_usp):
    """The second stage computes with what came in before."""
    pipefusion, real = stage_module(), stage_module().StageForward._come_in
    last = {}

    def come_in(self, tokens):
        new = real(self, tokens)
        sizes = tuple(t.shape for t in new)
        last[sizes], old = [t.clone() for t in new], last.get(sizes, new)
        return old

    pipefusion.StageForward._come_in = come_in


def mask_of_all_queries(_usp):
    """Every patch takes the mask's first rows."""
    stage_module().StageForward._own_queries = lambda self, mask, heads, joint: mask[..., : joint.total, :]


def stage_module():
    import pipemesh.parallel_runtime.methods.pipefusion as module

    return module


def break_at_every_load(named_in):
    """What was broken for the model before is whole again."""
    from pipemesh.parallel_runtime.comm import ring
    from pipemesh.parallel_runtime.methods import shards, usp
    from pipemesh.parallel_runtime.methods.pipefusion import stage as pipefusion
    from pipemesh.parallel_runtime.worker import rank_loop as engine
    from pipemesh.parallel_runtime.worker import resident

    real = engine.Engine._load

    def load(self, message, segments):
        for owner, was in whole:
            for name in vars(owner).keys() - was.keys():
                delattr(owner, name)
            for name, value in was.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)
        globals()[named_in.read_text()](usp)
        real(self, message, segments)

    engine.Engine._load = load
    classes = (usp.SequenceParallel, shards.Shards, shards.Joint, pipefusion.StageForward, engine.Engine, resident.ResidentModel)
    owners = (usp, shards, ring, pipefusion, *classes)
    whole = [(owner, dict(vars(owner))) for owner in owners]


if __name__ == "__main__":
    mutation_file = Path(sys.argv.pop(1))
    sys.path.insert(0, str(LAUNCHER))
    from package import register_package

    register_package(LAUNCHER.parent)
    break_at_every_load(mutation_file)
    sys.argv[0] = str(LAUNCHER / "pool" / "worker_main.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
