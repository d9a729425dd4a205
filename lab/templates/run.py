"""A workflow template on a real server, by stock ComfyUI and with PipeMesh Parallelize before each
sampler, and what came of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from safetensors.torch import load_file

from ...pool.trial.rounding import FACTOR, relative_error
from ..comfyui.api import RunError
from ..comfyui.server import ComfyServer
from .cut import Graph
from .surgery import (
    HELD,
    Link,
    exact,
    file_name,
    held,
    key_before,
    made_small,
    model_files,
    parallelized,
    recorded,
    rounded,
    sampled_models,
    samplers,
)

BOUND = 2e-5  # of a latent's scale in fp32, as in parity
FARTHEST = 1.2  # quantised: our distance from the fp32 truth over stock's
NO_PLAN = "has no token plan"

TIMEOUT_S = 150.0

Latents = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Figures:
    evaluations: int = 0
    error: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome(Figures):
    """What a template gave. ``result``: "same", "one GPU", "refused", "different", "error",
    or "other pack": it has a node of a pack that is neither there nor stood in for.

    ``error``: the largest difference of a latent, in units of its scale, held to BOUND, or to what
    one rounding of every evaluation does to stock (``pool/trial/rounding.py``). ``ratio``: of
    the distance from the fp32 truth over stock's, where the weights are quantised and the latents
    not equal.
    ``by_name``: classes of models that only their files' names speak for, since other classes read
    all that the graph's nodes give them too; of the others the graph itself says which they are.
    ``evaluations``: of the pool's last run. ``one_gpu``: models that were left to stock, and why.
    """

    name: str
    result: str
    reason: str = ""
    models: list[str] = field(default_factory=list)
    by_name: list[str] = field(default_factory=list)
    samplers: int = 0
    one_gpu: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Ran:
    """``shown``: what nodes show in the UI."""

    latents: Latents
    shown: Mapping[str, Mapping[str, Any]]


class Failed(Exception):
    """A run that gave no latent: nothing of PipeMesh's."""


class Tries:
    """Tries graphs on one server, whose pool stays up from one to the next."""

    def __init__(self, server: ComfyServer, info: dict[str, Any], pool: Mapping[str, Any]):
        self.server, self.info, self.pool = server, info, pool
        self._runs = count()

    def outcome(self, name: str, graph: Graph) -> Outcome:
        """Raises ServerError if the server is gone."""
        begun = time.perf_counter()
        if foreign := next((key for key, node in graph.items() if "class_type" not in node), None):
            why = f"node {foreign} is of a class that this ComfyUI has only with another pack"
            return Outcome(name=name, result="other pack", reason=why)
        small = made_small(graph, self.info)
        facts: dict[str, Any] = {
            "name": name,
            "models": model_files(small),
            "samplers": len(samplers(small, self.info)),
        }
        try:
            facts |= self._compared(small)
        except Failed as failed:
            one_gpu = NO_PLAN in str(failed)
            facts |= {"result": "one GPU" if one_gpu else "error", "reason": str(failed)}
        return Outcome(**facts, seconds=round(time.perf_counter() - begun, 1))

    def _compared(self, graph: Graph) -> dict[str, Any]:
        first = self._stock(held(graph, self.info))
        stock, by_name = first.latents, named_alone(first.shown)
        left_out: dict[Link, str] = {}
        wanted = {link for _key, _name, link in sampled_models(graph, self.info)}
        while wanted - set(left_out):
            before = {run["began"] for run in self._last_runs()}
            ours = self._run(parallelized(graph, self.info, self.pool, left_out))
            if not isinstance(ours, RunError):
                evaluations = sum(
                    run["evaluations"] for run in self._last_runs() if run["began"] not in before
                )
                judged = (
                    self._judged(graph, ours.latents, stock)
                    if evaluations
                    else {"result": "error", "reason": "the pool did nothing"}
                )
                left = list(left_out.values())
                return {**judged, "by_name": by_name, "one_gpu": left, "evaluations": evaluations}
            link = next((link for link in wanted if ours.node == key_before(link)), None)
            if link is None or NO_PLAN not in ours.message:
                return {
                    "result": "refused" if ours.exception.endswith("Refused") else "error",
                    "reason": str(ours),
                }
            left_out[link] = ours.message
        reason = "; ".join(dict.fromkeys(left_out.values()))
        return {"result": "one GPU", "by_name": by_name, "reason": reason}

    def _judged(self, graph: Graph, ours: Latents, stock: Latents) -> dict[str, Any]:
        errors = {name: relative_error(ours[name], latent) for name, latent in stock.items()}
        worst = max(errors.values())
        facts: dict[str, Any] = {"result": "same", "error": worst}
        if worst <= BOUND:
            return facts
        truth = self._stock(exact(graph)).latents
        ours_off, stock_off = (
            {name: distance(run[name], truth[name]) for name in errors} for run in (ours, stock)
        )
        ratios = [ours_off[name] / (stock_off[name] or 1e-30) for name in errors if errors[name] > BOUND]
        reason = f"{worst:.1e} of the latent's scale"
        if max(stock_off.values()) > BOUND:  # something is quantised
            facts["ratio"] = max(ratios, default=float("inf"))
            reason += f", {facts['ratio']:.2f} x stock's distance"
            is_same = facts["ratio"] <= FARTHEST
        else:
            off = self._stock(rounded(graph, self.info)).latents
            allowed = {name: FACTOR * relative_error(off[name], latent) for name, latent in stock.items()}
            reason += f", stock's own sensitivity to rounding allows {max(allowed.values()):.1e}"
            is_same = all(error <= max(BOUND, allowed[name]) for name, error in errors.items())
        return {
            **facts,
            "result": "same" if is_same else "different",
            "reason": "" if is_same and "ratio" in facts else reason,
        }

    def _last_runs(self) -> list[dict[str, Any]]:
        runs = self.server.get("/pipemesh/status")["last_runs"]
        return [run["figures"] for run in runs if run["figures"] is not None]

    def _stock(self, graph: Graph) -> Ran:
        """Raises Failed."""
        found = self._run(graph)
        if isinstance(found, RunError):
            raise Failed(f"stock: {found}")
        if not all(torch.isfinite(latent).all() for latent in found.latents.values()):
            raise Failed("stock: a latent is not finite")
        return found

    def _run(self, graph: Graph) -> Ran | RunError:
        """Raises Failed if a part of the graph was not run."""
        run = f"run{next(self._runs)}"
        graph = recorded(graph, self.info, run)
        result = self.server.run(graph, timeout_s=TIMEOUT_S)
        if result.error is not None:
            return result.error
        latents = {}
        for key in samplers(graph, self.info):
            file = self.server.output / f"{run}-{file_name(key)}"
            if not file.exists():
                raise Failed(
                    f"nothing was recorded behind node {key}: ComfyUI left its part of the graph out"
                )
            latents |= {f"{key}/{part}": latent for part, latent in load_file(file).items()}
            file.unlink()
        return Ran(latents, result.outputs)


def named_alone(shown: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The classes of models that no conditioning tells from others."""
    told: dict[str, bool] = {}
    for key, ui in shown.items():
        if key.startswith(HELD):
            name, *readers = ui["text"]
            told[name] = told.get(name, False) or readers == [name]
    return sorted(name for name, is_told in told.items() if not is_told)


def distance(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """The root mean square of the difference, in the same units."""
    if ours.shape != truth.shape:
        return float("inf")
    return float((ours - truth).square().mean().sqrt() / truth.std().clamp(min=1e-12))
