"""`gdp bench capture`: published models captured from their configs, each in a fresh process.

The page has the ops, processor time and memory of each capture, and the ops without a known cost.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gdp.bench import model_configs
from gdp.bench.benchmark import Benchmark, Say, pick
from gdp.bench.rows import Rows
from gdp.errors import InputError
from gdp.models import read
from gdp.models.model import Reading

WORKLOADS = ("dlrm",)  # built in: plain PyTorch, 26 embedding tables
NAMES = (*model_configs.names(), *WORKLOADS)
MODES = ("inference", "training")


@dataclass(frozen=True, kw_only=True)
class CaptureBenchmark(Benchmark):
    """Each model for inference and training, each in a fresh process."""

    name = "capture"
    models: tuple[str, ...] = NAMES

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "model", self.models, NAMES)

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        measured: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="gdp-configs-") as directory:
            for name in self.models:
                text = name if name in WORKLOADS else model_configs.write_model(name, directory)
                for mode in MODES:
                    facts = {"model": name, "mode": mode, "sizes": text.partition("?")[2]}
                    row = rows.row(f"{name}-{mode}", facts, partial(_in_a_fresh_process, name, text, mode))
                    measured.append(facts | row)
                    size = row["peak_memory_bytes"] / 2**30
                    say(f"{name}, {mode}: {row['num_ops']:,} ops in {row['seconds']:.1f} s and {size:.2f} GiB")
        unknown: Counter[str] = sum((Counter(row["unknown"]) for row in measured), Counter())
        return {"rows": measured, "unknown": dict(sorted(unknown.items()))}


def measure(text: str, training: bool) -> dict[str, Any]:
    """Captures MODEL in this process; returns figures of the graph, of the process and of its imports.

    Parameters are counted once each, however many names they have. `seconds` is processor time.
    """
    started = time.process_time()
    import gdp.models.pytorch  # noqa: F401

    if text.startswith("hf:"):
        import transformers  # noqa: F401
    imported = time.process_time()
    captured = read.read_capture(text, Reading(training))
    ended = time.process_time()
    graph, program = captured.graph, captured.program
    tensors = [source.tensor for source in program.sources.values() if source.kind == "parameter"]
    sizes = [program.layouts[program.tensor_values[tensor]].size for tensor in tensors]
    return {
        "num_parameters": sum(int(np.prod(size)) for size in sizes),
        "num_ops": graph.num_ops,
        "num_tensors": graph.num_tensors,
        "flops": int(graph.flops.sum()),
        "unknown": dict(captured.coverage.unknown),
        "seconds": ended - imported,
        "import_seconds": imported - started,
        "peak_memory_bytes": _peak_memory_bytes(),
    }


def _in_a_fresh_process(name: str, text: str, mode: str) -> dict[str, Any]:
    code = "import json, sys; from gdp.bench.capture import measure; "
    code += f"print(json.dumps(measure(sys.argv[1], {mode == 'training'})))"
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InputError(f"bench capture: {name}, {mode}: {lines[-1] if lines else done.returncode}")
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
