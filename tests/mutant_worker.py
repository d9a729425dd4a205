"""A rank with one thing broken: ``mutant_worker.py MUTATION SOCKET_FD PARENT_PID``. Shows that the parity suite can go red."""

import runpy
import sys
from pathlib import Path

LAUNCHER = Path(__file__).resolve().parent.parent / "launcher"


def gather_order(usp):
    """Rank 0 puts the other ranks' rows before its own."""
    real = usp.Ulysses._gather

    def gather(self, module, args, out):
        result = real(self, module, args, out)
        own = self._shards.splits["img"].sizes[0]
        return result.roll(-own, dims=1)

    usp.Ulysses._gather = gather


def token_order(usp):
    """Tokens are handed back to the wrong ranks' heads: the heads of two ranks change places."""
    real = usp.Ulysses._heads_for_tokens
    usp.Ulysses._heads_for_tokens = lambda self, out, heads: real(self, out, heads).roll(1, dims=2)


def mask_permutation(usp):
    """The mask stays in the host's token order."""
    real = usp.permute_mask

    def unpermuted(mask, shards, heads):
        shards._order = usp.torch.arange(shards.total)
        return real(mask, shards, heads)

    usp.permute_mask = unpermuted


def mask_dropped(usp):
    """As peers do it."""
    usp.permute_mask = lambda mask, shards, heads: None


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
    """Heads are split as if they divided: the last ones are computed by nobody."""
    real = usp.Ulysses._heads_for_tokens

    def without_the_rest(self, out, heads):
        result = real(self, out, heads)
        even = heads.total // len(heads.sizes) * len(heads.sizes)
        result[:, :, even:] = 0
        return result

    usp.Ulysses._heads_for_tokens = without_the_rest


if __name__ == "__main__":
    mutation = sys.argv.pop(1)
    sys.path.insert(0, str(LAUNCHER))
    from package import register_package

    register_package(LAUNCHER.parent)
    import pipemesh.parallel_runtime.methods.usp as usp_module

    globals()[mutation](usp_module)
    sys.argv[0] = str(LAUNCHER / "worker_main.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
