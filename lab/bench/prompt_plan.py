"""Predict the prompts of ``prompts`` as ``python3 -m launcher plan`` does: the steps of a sampler
and the decoding of its latent, each counted by its dry run, by speeds of this machine that are
measured with the same models at smaller sizes, by one process and by two at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import msgspec

from ...parallel_runtime.families.sample import Released, Size
from ...parallel_runtime.planner.box import Box
from ...parallel_runtime.planner.choice import plan
from ...parallel_runtime.planner.evaluation_count import Whole
from ...parallel_runtime.planner.job import Job
from ..commands.plan import prompt_s
from ..dry_run.decoding import Decoding
from .figures import Options, Round, typical
from .lockstep import Phase, Ranks, attend_with_sdpa, merge, run, timed
from .plan import ITEM_BYTES, Forwards, Timed, measured, of_link

RANKS, ROUNDS = 2, 5
SMALLER = (0.25, 0.5, 0.75)  # sides, in parts of the prompt's
DECODED = 0.75  # below, all of a decoder's tensors come from memory that the process keeps


@dataclass(frozen=True)
class Asked:
    """What a prompt asks for: a model, its VAE by the name of its latents and its width, a square
    picture or video, several at once.
    """

    sample: str
    size: Size
    text: int
    frames: int
    latents: str
    width: int
    side: int
    batch: int = 1

    @property
    def released(self) -> Released:
        return Released(
            name=self.sample, size=self.size, text=self.text, extent=(self.side, self.side, self.frames)
        )

    def at(self, share: float) -> Asked:
        return replace(self, side=round(self.side * share / 16) * 16)


@dataclass(frozen=True)
class Counted:
    """One evaluation of one picture, and its decoding."""

    whole: Whole
    decoding: Decoding


@dataclass(frozen=True)
class Known:
    """What was counted, by parts of the side, and measured: phases of rounds."""

    counted: Mapping[float, Counted]
    rounds: Sequence[Round]

    def box(self, phase: str, ranks: int) -> Box:
        """Return devices that compute as processes did that were ``alone``, or ``both`` at once."""
        timed = [
            Timed.of(self.counted[share].whole, typical(self.rounds, f"{share} {phase}")) for share in SMALLER
        ]
        return measured(timed, self.rounds).box(ranks, ITEM_BYTES)

    def decoding_box(self, phase: str, ranks: int) -> Box:
        """Likewise, of devices that decode: the whole picture, or each a band of it."""
        seconds = typical(self.rounds, f"decoding {phase}")
        speed = self.counted[DECODED].decoding.flops / ranks / seconds
        box = self.box(phase, ranks)
        return replace(box, devices=tuple(replace(one, matmul_flops_per_s=speed) for one in box.devices))

    def predicted(self, evaluations: int, batch: int) -> dict[str, float]:
        """Return the seconds of sampling and decoding, by one process and by two."""
        one = self.counted[1.0]
        job, found = Job(whole=one.whole, evaluations=evaluations, batch=batch), {}
        for name, row, phase, ranks in (("stock", "one_gpu", "alone", 1), ("auto", "pool", "both", RANKS)):
            planned = plan(job, self.box(phase, ranks))
            parts = prompt_s(planned, job, one.decoding, self.decoding_box(phase, ranks))[row]
            found[name] = sum(parts.values())
        return found


def measure(ranks: Ranks, asked: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Time forwards and a decoding at smaller sizes in each round; return the rounds and counts."""
    import torch

    from ...parallel_runtime.families.catalogue import SAMPLES
    from ...parallel_runtime.layout import Layout
    from ..dry_run.decoding import counted_of, vae_of
    from ..dry_run.released_model import latent_shapes
    from .vae import by_bands, random_weights

    torch.set_num_threads(1)
    attend_with_sdpa()
    comm = ranks.connect(Layout(ulysses=RANKS)).sequence
    prompt = msgspec.convert(asked, Asked)
    sample = SAMPLES[prompt.sample]
    model = sample.form.random_model(prompt.size).model
    make = partial(vae_of, prompt.latents, prompt.width)
    vae, counts, phases = random_weights(make()), {}, of_link(comm.ulysses)
    for share in (*SMALLER, 1.0):
        smaller = prompt.at(share)
        forwards = Forwards(model, sample, smaller.released, smaller.released.extent)
        shape = tuple(latent_shapes(model, smaller.released, smaller.released.extent)[0])
        decoding = counted_of(make, shape, torch.float32)
        assert decoding is not None
        counts[share] = {"whole": asdict(forwards.whole), "decoding": asdict(decoding)}
        if share < 1:
            phases[f"{share} alone"] = Phase(forwards.alone, alone=True)
            phases[f"{share} both"] = Phase(forwards.alone)
        if share == DECODED:
            latent = torch.randn(shape)

            def decode(latent: torch.Tensor = latent) -> float:
                with torch.inference_mode():
                    return timed(lambda: vae.decode(latent))

            phases["decoding alone"] = Phase(decode, alone=True)
            phases["decoding both"] = Phase(partial(by_bands, vae, latent, comm))
    return {"rounds": ranks.measure(phases, rounds), "counted": counts}


def known(options: Options, asked: Asked) -> Known:
    rounds = options.choose(ROUNDS, 1)
    by_rank = run(options, RANKS, "prompt_plan:measure", asked=asdict(asked), rounds=rounds)
    counted = {
        float(share): msgspec.convert(found, Counted) for share, found in by_rank[0]["counted"].items()
    }
    return Known(counted, merge([rank["rounds"] for rank in by_rank]))


def together(before: Known, after: Known) -> Known:
    """Return what was measured before and after prompts: a machine's speed wavers meanwhile."""
    return replace(before, rounds=[*before.rounds, *after.rounds])
