"""A rank with one thing broken: ``mutant_worker.py MUTATION SOCKET_FD PARENT_PID``. Shows that the parity suite can go red."""

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
    """Tokens are split as if they divided: parts begin where even ones would, though the first are longer."""
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
    """Blocks of two ranks that have as many tokens are taken for each other's: the mask's columns no longer fit the keys."""
    from pipemesh.parallel_runtime.comm import ring

    real = ring.Block
    ring.Block = lambda source, kv, flag: real({1: 2, 2: 1}.get(source, source), kv, flag)


if __name__ == "__main__":
    mutation = sys.argv.pop(1)
    sys.path.insert(0, str(LAUNCHER))
    from package import register_package

    register_package(LAUNCHER.parent)
    import pipemesh.parallel_runtime.methods.usp as usp_module

    globals()[mutation](usp_module)
    sys.argv[0] = str(LAUNCHER / "worker_main.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
