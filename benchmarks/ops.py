"""Benchmark `ops`: the rule that prices each kind of operator, over the architectures that people run.

A kind without a rule is estimated at one FLOP for each element of its result. The page has these first, with the
largest share of a step that they take, then all others with their rule.
"""

import contextlib
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.benchmark import Benchmark, Say
from benchmarks.capture import DEVICE
from benchmarks.rows import Rows
from benchmarks.small_models import DIFFUSERS, SIZES, TIMM, TRANSFORMERS, transformers_config
from benchmarks.torchvision_stand_in import torchvision_stand_in
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.model import Reading
from gdp.models.papers import PAPERS
from gdp.models.pytorch.flops import UNKNOWN, classify
from gdp.models.source import ModelSource
from gdp.simulator.problem import Problem

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "built-in": PAPERS.names(),
    "Transformers": TRANSFORMERS,
    "Diffusers": tuple(DIFFUSERS),
    "timm": TIMM,
}
STEPS = ("training", "inference")


@dataclass(frozen=True, kw_only=True)
class OpsBenchmark(Benchmark):
    """The kinds of operators of each model, of a training step and of inference."""

    name = "ops"
    models: tuple[str, ...] = tuple(name for names in LIBRARIES.values() for name in names)

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        chosen = [(library, name) for library, names in LIBRARIES.items() for name in names if name in self.models]
        if unknown := set(self.models) - {name for _, name in chosen}:
            raise InputError(f"ops: no model {min(unknown)!r}; they are in benchmarks/small_models.py")
        if any(library == "timm" for library, _ in chosen):
            with torchvision_stand_in(), contextlib.suppress(ImportError):
                import timm  # noqa: F401
        measured = []
        for library, name in chosen:
            row = rows.row(name, {"model": name}, partial(_shares, library, name))
            measured.append({"library": library, "model": name, **row})
            say(f"{name}: {row['reason'] or ', '.join(f'{len(row[step])} kinds in {step}' for step in STEPS)}")
        done = [row for row in measured if not row["reason"]]
        kinds: dict[str, list[float]] = defaultdict(list)
        for row in done:
            for kind in row["training"].keys() | row["inference"].keys():
                kinds[kind].append(max(row[step].get(kind, 0.0) for step in STEPS))
        table = [
            {"kind": kind, "rule": rule_of_kind(kind), "models": len(shares), "share": max(shares)}
            for kind, shares in sorted(kinds.items(), key=lambda item: (-max(item[1]), item[0]))
        ]
        return {
            "unruled": [line for line in table if line["rule"] == UNKNOWN],
            "ruled": [line for line in table if line["rule"] != UNKNOWN],
            "counts": dict(Counter(row["library"] for row in done)),
            "refused": [row for row in measured if row["reason"]],
            "device": DEVICE,
        }


def rule_of_kind(kind: str) -> str:
    """Returns how FLOPs of ops of a kind are found, such as "formula"; of other kinds than operators: "none".

    The update of a parameter is one op, which the rule of its optimizer prices.
    """
    namespace, _, name = kind.partition(".")
    if name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return "optimizer"
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    return "none" if packet is None else classify(getattr(packet, packet.overloads()[0]))[0]


def _shares(library: str, name: str) -> dict[str, Any]:
    """Returns the share of time that each kind of operator has in each step of a model; or why it is not captured."""
    with tempfile.TemporaryDirectory(prefix="gdp-small-") as directory:
        text = {"built-in": name, "timm": f"timm:{name}?batch=8"}.get(library, f"hf:{directory}?{SIZES}")
        try:
            if library in ("Transformers", "Diffusers"):
                is_diffusers = library == "Diffusers"
                config = {"_class_name": name, **DIFFUSERS[name]} if is_diffusers else transformers_config(name)
                (Path(directory) / "config.json").write_text(json.dumps(config))
            shares = {step: shares_of(ModelSource(text, Reading(step == "training")).whole().graph) for step in STEPS}
        except InputError as error:
            return {"reason": str(error).replace(directory, "DIR")}
    return {"reason": "", **shares}


def shares_of(graph: Graph) -> dict[str, float]:
    """Returns the share of the time of all ops on DEVICE that each kind of operator takes."""
    times_ns = Problem.build(graph, Cluster.parse(DEVICE)).op_time_ns[:, 0]
    kinds = np.asarray(graph.kinds)
    return {str(kind): float(times_ns[kinds == kind].sum() / max(times_ns.sum(), 1)) for kind in np.unique(kinds)}
