"""Measure the fixed cost of a run: what four steps through two warm ranks take beyond four of their
own later evaluations.

It is taken apart: ``begin`` until the first evaluation is asked for, ``first`` what that takes
beyond a later one, ``between`` evaluations, and ``end`` from the last output until the sampler
returns. ``stock`` is ComfyUI's own run of the same model. The model has as many blocks as released
ones and comes from a file, so that a cost per module, or of looking at the file, shows.

``again``: what a run costs more in an evaluation for which one rank alone has no memory, from the
failure until fresh ranks, which have started, loaded the demo's model and merged a LoRA, begin it
again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from ...parallel_runtime.families.catalogue import sample_with
from ...parallel_runtime.families.sample import Size
from .figures import CaseFigures, Figure, Options, Round
from .pools import confined, cpu_pool

RANKS, STEPS = 2, 4
WARM_UP = 2
SAMPLE, DEEP = sample_with("deep")
assert SAMPLE.form.file is not None, f"{SAMPLE.name} has no file form"
SIZE = replace(DEEP, head_dim=SAMPLE.form.file.head_dim)
LEAST, TINY = replace(SIZE, blocks=(1, 2)), replace(SIZE, blocks=(1, 1))
LATENT, TEXT = (1, 16, 16, 16), 16  # short evaluations: what they differ by is in what is left of a run
PARTS = ("fixed", "begin", "first", "between", "end")
_, DEMO = sample_with("demo")
FAILURES, ROOM, LARGE = 5, 1 << 20, (1, 16, 128, 128)  # a latent that needs more than such room


def taken_apart(began: float, evaluations: Sequence[tuple[float, float]], ended: float) -> Round:
    """Take a run apart, of the clock at its ends and of each evaluation's beginning and seconds."""
    begin, later = evaluations[0][0], median(seconds for _, seconds in evaluations[1:])
    last = sum(evaluations[-1])
    found = {"begin": begin - began, "first": evaluations[0][1] - later, "end": ended - last}
    fixed = ended - began - len(evaluations) * later
    return {"fixed": fixed, **found, "between": fixed - sum(found.values())}


class Sampling:
    """A MODEL that is sampled, and how it is told when its evaluations were."""

    def __init__(
        self,
        model: Any,
        evaluations: Callable[[], Sequence[tuple[float, float]]] | None = None,
        size: Size = SIZE,
        latent: tuple[int, ...] = LATENT,
    ):
        import torch

        self._model, self._evaluations = model, evaluations
        generator = torch.Generator().manual_seed(1)
        self._latent = torch.zeros(latent)
        extras = {"pooled_output": torch.randn(1, size.pooled_dim, generator=generator)}
        self._prompt = [[torch.randn(1, TEXT, size.text_dim, generator=generator), extras]]

    def __call__(self, seed: int, steps: int = STEPS) -> Round:
        """A run of fewer than two steps is not taken apart."""
        import comfy.sample
        import torch

        noise, seen = comfy.sample.prepare_noise(self._latent, seed), []

        def timed(apply: Callable, given: dict[str, Any]) -> Any:
            began = perf_counter()
            output = apply(given["input"], given["timestep"], **given["c"])
            seen.append((began, perf_counter() - began))
            return output

        model = self._model if self._evaluations is not None else self._model.clone()
        if self._evaluations is None:
            model.set_model_unet_function_wrapper(timed)
        with torch.inference_mode():
            began = perf_counter()
            comfy.sample.sample(
                *(model, noise, steps, 1.0, "euler", "simple", self._prompt, self._prompt, self._latent),
                disable_pbar=True,
                seed=seed,
            )
            ended = perf_counter()
        evaluations = seen if self._evaluations is None else self._evaluations()
        return taken_apart(began, evaluations, ended) if steps > 1 else {}


def begun_again(options: Options, folder: Path) -> list[float]:
    """Measure the seconds from each failure until the run goes on."""
    import comfy.sd
    import comfy.utils

    from ...parallel_runtime.client.first_results import FirstResults
    from ...parallel_runtime.client.remote_patcher import parallelize
    from ...parallel_runtime.client.remote_pool import RemotePool
    from ...parallel_runtime.client.shared_evaluation import Admission
    from ...parallel_runtime.layout import Layout
    from ..random_files import write_lora, write_model

    assert SAMPLE.form.file is not None
    size, failed = options.choose(DEMO, LEAST), []
    handle = cpu_pool(options, Layout(ulysses=RANKS))
    notice = Admission(firsts=FirstResults(notice=lambda _text: failed.append(perf_counter())))
    pool = RemotePool(handle, admission=notice)

    def evaluations() -> list[tuple[float, float]]:
        assert pool.runs.last is not None
        return [(one.began, one.seconds) for one in pool.runs.last.evaluations]

    files = [
        write_model(folder / name, SAMPLE.form, one)
        for name, one in (("demo.safetensors", size), ("other.safetensors", TINY))
    ]
    lora = write_lora(folder / "lora.safetensors", files[0], SAMPLE.form.file.lora_targets)
    model, other = (comfy.sd.load_diffusion_model(str(file)) for file in files)
    model, _ = comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(lora)), 1.0, 0.0)
    ours, other = (parallelize(one, pool, holds_ui_device=False) for one in (model, other))
    found = []
    try:
        for seed in range(min(FAILURES, options.rounds)):
            Sampling(other, evaluations, TINY)(seed, 1)  # its room is the fresh pool's, so the run may go on
            Sampling(ours, evaluations, size)(seed, 1)
            live = handle.live()
            assert live is not None
            with confined(live.ranks.pids[1:], ROOM):
                Sampling(ours, evaluations, size, LARGE)(seed, 1)
            assert len(failed) == len(found) + 1, "an evaluation had memory"
            found.append(min(began for began, _ in evaluations() if began > failed[-1]) - failed[-1])
    finally:
        handle.close()
    return found


def bench(options: Options) -> Iterator[Figure]:
    import comfy.sd

    from ...parallel_runtime.client.remote_patcher import parallelize
    from ...parallel_runtime.client.remote_pool import RemotePool
    from ...parallel_runtime.layout import Layout
    from ..random_files import write_model

    size, warm_up = options.choose((SIZE, WARM_UP), (LEAST, 0))
    handle = cpu_pool(options, Layout(ulysses=RANKS))
    with tempfile.TemporaryDirectory(prefix="pipemesh-bench-") as folder:
        file = write_model(Path(folder, "model.safetensors"), SAMPLE.form, size)
        try:
            pool = RemotePool(handle)
            remote = parallelize(comfy.sd.load_diffusion_model(str(file)), pool, holds_ui_device=False)

            def evaluations() -> list[tuple[float, float]]:
                assert pool.runs.last is not None
                return [(one.began, one.seconds) for one in pool.runs.last.evaluations]

            stock = Sampling(comfy.sd.load_diffusion_model(str(file)))
            sides = {"ulysses2": Sampling(remote, evaluations), "stock": stock}
            rounds = [
                {name: sampling(seed) for name, sampling in sides.items()}
                for seed in range(warm_up + options.rounds)
            ][warm_up:]
        finally:
            handle.close()
        again = begun_again(options, Path(folder))
    yield CaseFigures("run", "ulysses2", again).estimated("again_s", median, "s")
    for name in sides:
        for part in PARTS:
            in_ms = [1e3 * one[name][part] for one in rounds]
            yield CaseFigures("run", name, in_ms).estimated(f"{part}_ms", median, "ms")
