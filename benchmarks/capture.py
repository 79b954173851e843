"""Benchmark `capture`: published models captured from their configs, each step in a fresh process.

The page has the ops, processor time and memory of each capture, and the share of the step's time that is spent in ops
without a known cost. A model without a cache has no prefill and no decode: its row says why.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import model_configs
from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.rows import Rows
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.model import HUGGING_FACE, Reading
from gdp.models.serving import Serving
from gdp.models.source import ModelSource
from gdp.simulator.problem import Problem

WORKLOADS = ("dlrm",)  # plain PyTorch, 26 embedding tables
NAMES = (*model_configs.names(), *WORKLOADS)
STEPS = ("training", "inference", "prefill", "decode")
DEVICE = "h100-sxm-80g"  # of the times that shares are of
_NO_CACHE = "leave out --phase"  # the remedy where a model keeps no cache


@dataclass(frozen=True, kw_only=True)
class CaptureBenchmark(Benchmark):
    """The steps of each model, each in a fresh process: of training, and of prefill and decode or plain inference."""

    name = "capture"
    models: tuple[str, ...] = NAMES

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "model", self.models, NAMES)

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        measured: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="gdp-configs-") as directory:
            for name in self.models:
                text = model_configs.asked_model(name, directory)
                decodes = False
                for step in ("training", "decode", "prefill", "inference"):
                    if step == "inference" and decodes:
                        continue  # a prefill is that, with a cache
                    sized = _one_token(text) if step == "decode" else text
                    facts = {"model": name, "step": step, "sizes": sized.partition("?")[2]}
                    row = rows.row(f"{name}-{step}", facts, partial(_in_a_fresh_process, name, sized, step))
                    decodes |= step == "decode" and not row["reason"]
                    measured.append(facts | row)
                    say(_sentence(measured[-1]))
        measured.sort(key=lambda row: (self.models.index(row["model"]), STEPS.index(row["step"])))
        captured = [row for row in measured if not row["reason"]]
        unknown: Counter[str] = sum((Counter(row["unknown"]) for row in captured), Counter())
        return {"rows": measured, "captured": captured, "device": DEVICE, "unknown": dict(sorted(unknown.items()))}


def _one_token(text: str) -> str:
    """Returns MODEL without the length of its text: a decode step feeds one token."""
    directory, _, query = text.partition("?")
    kept = "&".join(part for part in query.split("&") if not part.startswith("sequence="))
    return f"{directory}?{kept}" if kept else directory


def _sentence(row: dict[str, Any]) -> str:
    if row["reason"]:
        return f"{row['model']}, {row['step']}: {row['reason']}"
    size = row["peak_memory_bytes"] / 2**30
    return (
        f"{row['model']}, {row['step']}: {row['num_ops']:,} ops in {row['seconds']:.1f} s and {size:.2f} GiB, "
        f"{row['unknown_share']:.2%} of the time in ops of unknown cost"
    )


def measure(text: str, step: str) -> dict[str, Any]:
    """Captures a step of MODEL in this process; returns figures of the graph, of the process and of its imports.

    Parameters are counted once each, however many names they have. `seconds` is processor time. `unknown_share` is of
    the time of all ops on DEVICE, one after the other. `reason` is "", or why there is no such step.
    """
    started = time.process_time()
    import gdp.models.pytorch  # noqa: F401

    if text.startswith(HUGGING_FACE):
        import transformers  # noqa: F401
    imported = time.process_time()
    serving = Serving(step) if step in ("prefill", "decode") else Serving()
    reading = Reading(training=step == "training", serving=serving)
    try:
        captured = ModelSource(text, reading).capture()
    except InputError as error:
        if not serving.has_cache or not (str(error).endswith(_NO_CACHE) or not text.startswith(HUGGING_FACE)):
            raise
        return {"reason": "no cache", "error": str(error)}
    ended = time.process_time()
    graph, program = captured.graph, captured.program
    tensors = [source.tensor for source in program.sources.values() if source.kind == "parameter"]
    sizes = [program.layouts[program.tensor_values[tensor]].size for tensor in tensors]
    unknown = dict(captured.coverage.unknown)
    return {
        "reason": "",
        "num_parameters": sum(int(np.prod(size)) for size in sizes),
        "num_ops": graph.num_ops,
        "num_tensors": graph.num_tensors,
        "flops": int(graph.flops.sum()),
        "unknown": unknown,
        "unknown_share": share_of_time(graph, unknown),
        "seconds": ended - imported,
        "import_seconds": imported - started,
        "peak_memory_bytes": _peak_memory_bytes(),
    }


def share_of_time(graph: Graph, kinds: Collection[str]) -> float:
    """Returns the share of the time of all ops on DEVICE that ops of these kinds take; 0 for no kinds."""
    times_ns = Problem.build(graph, Cluster.parse(DEVICE)).op_time_ns[:, 0]
    return float(times_ns[np.isin(graph.kinds, list(kinds))].sum() / max(times_ns.sum(), 1))


def _in_a_fresh_process(name: str, text: str, step: str) -> dict[str, Any]:
    code = "import json, sys; from benchmarks.capture import measure; "
    code += "print(json.dumps(measure(*sys.argv[1:])))"
    done = subprocess.run([sys.executable, "-c", code, text, step], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InputError(f"capture: {name}, {step}: {lines[-1] if lines else done.returncode}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _peak_memory_bytes() -> int:
    """Returns the peak of this process alone: after `exec`, `ru_maxrss` still counts memory of the parent."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
