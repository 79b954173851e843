"""Benchmark `compilation`: the kernels that the first `gdp place` on a machine compiles, and their times.

A fresh process with an empty cache compiles what `auto` runs; another one loads what the first has left. Seconds are
processor time, and mean little without the speed of the machine: simulations per second are measured beside them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from numba.core import event

from benchmarks import graphs
from benchmarks.benchmark import Benchmark, Say
from benchmarks.rows import Rows
from benchmarks.simulator import SimulatorBenchmark, placement_families, simulation_rates
from gdp.planning.warm_up import warm_up
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many
from gdp.units.reduction import reduce


@dataclass(frozen=True, kw_only=True)
class CompilationBenchmark(SimulatorBenchmark):
    """Measures what compilation takes; its settings are those of the yardstick, the simulator's speed."""

    name: ClassVar[str] = "compilation"

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        """Returns the seconds of each kernel, with an empty and with a full cache, and simulations per second."""
        measured: dict[str, Any] = {}
        code = "import json; from benchmarks.compilation import compile_kernels; print(json.dumps(compile_kernels()))"
        with tempfile.TemporaryDirectory(prefix="gdp-numba-") as cache:
            for name in ("cold", "warm"):
                done = subprocess.run(
                    [sys.executable, "-c", code],
                    env={**os.environ, "NUMBA_CACHE_DIR": cache},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                measured[name] = json.loads(done.stdout.splitlines()[-1])
                say(f"{name}: {measured[name]['seconds']:.1f} s, {len(measured[name]['kernels'])} kernels compiled")
        graph, cluster = graphs.workload_inputs(self.workload)
        problem = reduce(Problem.build(graph, cluster)).problem
        classical = placement_families(problem, self.placements_per_family, seed=0)["classical"]
        simulate = partial(evaluate_many, problem, classical, num_threads=1)
        return {**measured, "per_second": sorted(simulation_rates(simulate, len(classical), self))}

    draw = Benchmark.draw  # the page has no drawing


def compile_kernels() -> dict[str, Any]:
    """Returns the processor seconds that `warm_up` takes, and those of each kernel that is compiled in it by itself."""
    times = _CompileTimes()
    began = time.process_time()
    with event.install_listener("numba:compile", times):
        warm_up()
    return {"seconds": time.process_time() - began, "kernels": times.rows}


class _CompileTimes(event.Listener):
    """Adds up the processor seconds of each kernel, without those of the kernels that it calls."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._signatures: dict[str, int] = defaultdict(int)
        self._under_way: list[float] = []  # for each kernel that waits for another: where its clock stands
        self._last = 0.0

    def on_start(self, event: event.Event) -> None:
        now = time.process_time()
        if self._under_way:
            self._under_way[-1] += now - self._last
        self._under_way.append(0.0)
        self._last = now

    def on_end(self, event: event.Event) -> None:
        now, function = time.process_time(), event.data["dispatcher"].py_func
        name = f"{function.__module__}.{function.__qualname__}"
        self._seconds[name] += self._under_way.pop() + now - self._last
        self._signatures[name] += 1
        self._last = now

    @property
    def rows(self) -> list[tuple[str, int, float]]:
        """(kernel, signatures, seconds), the slowest first."""
        rows = [(name, self._signatures[name], seconds) for name, seconds in self._seconds.items()]
        return sorted(rows, key=lambda row: -row[2])
