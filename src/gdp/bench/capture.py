"""`gdp bench capture`: published models captured from their configs, each in a fresh process.

How many ops, seconds of processor time and bytes of memory a capture takes, and which ops have no known cost.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdp import sources
from gdp.bench import model_configs
from gdp.bench.tables import machine, machine_line, markdown_table, verdict, write_figures
from gdp.devices import suggest
from gdp.errors import InputError

WORKLOADS = ("dlrm",)  # built in: plain PyTorch, 26 embedding tables
NAMES = (*model_configs.names(), *WORKLOADS)
LARGEST = "llama-70b"
TARGET_GIB = 4.0  # of memory for the largest
MODES = ("inference", "training")

OnRow = Callable[[str], object]


def measure(text: str, training: bool) -> dict[str, Any]:
    """Capture MODEL in this process: figures of the graph, of the process and of the time that imports took.

    Parameters are counted once each, however many names they have. `seconds` is processor time.
    """
    started = time.process_time()
    import gdp.capture  # noqa: F401

    if text.startswith("hf:"):
        import transformers  # noqa: F401
    imported = time.process_time()
    captured = sources.read_capture(text, sources.Reading(training))
    ended = time.process_time()
    graph, program = captured.graph, captured.program
    tensors = [source.tensor for source in program.sources.values() if source.kind == "parameter"]
    sizes = [program.layouts[program.tensor_values[tensor]].size for tensor in tensors]
    return {
        "num_parameters": sum(_numel(size) for size in sizes),
        "num_ops": graph.num_ops,
        "num_tensors": graph.num_tensors,
        "flops": int(graph.flops.sum()),
        "unknown": dict(captured.coverage.unknown),
        "seconds": ended - imported,
        "import_seconds": imported - started,
        "peak_memory_bytes": _peak_memory_bytes(),
    }


def run(*, names: Sequence[str] | None = None, out: Path | None, on_row: OnRow) -> dict[str, Any]:
    """Capture the models `names` (None: all of NAMES), for inference and training, each in a fresh process.

    Returns the figures with `markdown` made of them, as the other benchmarks do. InputError for an unknown name and
    for a model that cannot be captured.
    """
    for name in names or ():
        if name not in NAMES:
            raise InputError(f"bench capture: no model {name!r}; {suggest(name, NAMES)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gdp-configs-") as directory:
        for name in NAMES if names is None else names:
            text = name if name in WORKLOADS else model_configs.write_model(name, directory)
            for mode in MODES:
                sizes = text.partition("?")[2]
                rows.append({"model": name, "mode": mode, "sizes": sizes, **_in_a_fresh_process(name, text, mode)})
                on_row(_line(rows[-1]))
    figures: dict[str, Any] = {
        "command": "gdp bench capture" + ("" if names is None else f" --models {','.join(names)}"),
        "machine": machine(),
        "rows": rows,
    }
    figures["markdown"] = _markdown(figures)
    if out is not None:
        write_figures(out, "capture", figures)
    return figures


def _in_a_fresh_process(name: str, text: str, mode: str) -> dict[str, Any]:
    code = "import json, sys; from gdp.bench.capture import measure; "
    code += f"print(json.dumps(measure(sys.argv[1], {mode == 'training'})))"
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InputError(f"bench capture: {name}, {mode}: {lines[-1] if lines else done.returncode}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _numel(size: Sequence[int]) -> int:
    count = 1
    for length in size:
        count *= length
    return count


def _peak_memory_bytes() -> int:
    """Of this process alone: after `exec`, `ru_maxrss` still counts what the parent held."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['model']}, {row['mode']}: {row['num_ops']:,} ops in {row['seconds']:.1f} s and "
        f"{row['peak_memory_bytes'] / 2**30:.2f} GiB, {sum(row['unknown'].values())} without a known cost"
    )


def _markdown(figures: Mapping[str, Any]) -> str:
    rows = figures["rows"]
    unknown: dict[str, int] = {}
    for row in rows:
        for kind, count in row["unknown"].items():
            unknown[kind] = unknown.get(kind, 0) + count
    table = markdown_table(
        ("model", "parameters, M", "step", "ops", "TFLOP", "s", "GiB", "ops without a known cost"),
        [
            (
                row["model"], f"{row['num_parameters'] / 1e6:,.1f}", row["mode"], f"{row['num_ops']:,}",
                f"{row['flops'] / 1e12:,.3g}" if row["flops"] < 1e15 else f"{row['flops'] / 1e12:,.0f}",
                f"{row['seconds']:.1f}", f"{row['peak_memory_bytes'] / 2**30:.2f}", str(sum(row["unknown"].values())),
            )
            for row in rows
        ],
    )  # fmt: skip
    imports = max(row["import_seconds"] for row in rows)
    parts = [
        "## Capture",
        f"    {figures['command']}",
        f"{machine_line()}.",
        "Published models from their configs (`gdp.bench.model_configs`), without weights; dlrm is the built-in "
        "workload. A batch of 8 with at most 512 tokens each, mamba's 64, for its scan is a loop over them; training "
        "with Adam. Seconds are processor time of the capture in a fresh process, after the import of PyTorch and "
        f"Transformers (at most {imports:.1f} s); GiB the peak of that process.",
        table,
        "Every op has a known cost."
        if not unknown
        else "Without a known cost: " + ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items())) + ".",
    ]
    largest = [row["peak_memory_bytes"] / 2**30 for row in rows if row["model"] == LARGEST]
    if largest:
        parts.append(
            f"{LARGEST}: at most **{max(largest):.2f} GiB** "
            f"({verdict(max(largest), TARGET_GIB, text=lambda gib: f'{gib:.2f} GiB')})."
        )
    return "\n\n".join(parts) + "\n"
