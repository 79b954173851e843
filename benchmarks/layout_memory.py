"""Benchmark `layout-memory`: the largest Llama that trains on a set of cards, under our choice and as users run it.

Layers are those of Llama 7B, and there are more or fewer of them. Steps are in bfloat16 with Adam and float32 master
weights; memory is enforced by the simulator, and every plan that fits is saved, read back and replayed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import model_configs
from benchmarks.benchmark import Benchmark, Say
from benchmarks.parallel import AUTO, Attempt, ask, choose, made_row
from benchmarks.rows import Rows
from gdp import files
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.planning.warm_up import warm_up
from gdp.search.batch_parts import Parts
from gdp.search.question import BatchQuestion
from gdp.search.rivals.rivals import RIVALS

MODEL = "llama-7b"
DTYPE = "bfloat16"
METHODS = (*RIVALS, AUTO)
_READING = Reading(dtype=DTYPE, precision="mixed")


@dataclass(frozen=True, slots=True)
class LargestModel:
    """The most layers that a method trains with on a set of devices, and why one more is too many."""

    num_layers: int  # 0: not even one
    num_parameters: int
    layout: str
    step_time_ns: int | None
    larger: int  # layers of the smallest model that was tried and does not fit; 0: none was
    reason: str  # why it does not fit


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The largest model of each method on one set of devices."""

    devices: str
    memory_bytes: int
    largest: Mapping[str, LargestModel]

    @property
    def is_best(self) -> bool:
        """True if our choice trains a model at least as large as every other method does."""
        return self.largest[AUTO].num_layers == max(found.num_layers for found in self.largest.values())

    def cell(self, method: str) -> str:
        """Returns the layers of a method, and its parameters."""
        found = self.largest[method]
        return f"{found.num_layers} ({found.num_parameters / 1e9:.1f}e9)" if found.num_layers else "none"


@dataclass(frozen=True, kw_only=True)
class LayoutMemoryBenchmark(Benchmark):
    """Each method on each set of devices; `budget` is that of our choice for one model."""

    name = "layout-memory"
    budget: Budget = field(default_factory=lambda: Budget(seconds=10.0))
    devices: tuple[str, ...] = ("8xl4-24g", "8xrtx4090-24g", "8xa100-pcie-40g", "8xa100-sxm-40g")
    batch: int = 8
    sequence: int = 2048
    most_layers: int = 127

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.devices:
            Cluster.parse(text)

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        warm_up()
        placed: list[DeviceRow] = []
        models = _Models(rows.directory / "models", f"?batch={self.batch}&sequence={self.sequence}")
        for devices in self.devices:
            cluster = Cluster.parse(devices)
            largest = {}
            for method in METHODS:
                fits = partial(self._attempt, method, devices, models=models, rows=rows, say=say)
                largest[method] = _largest(fits, self.most_layers, models)
            placed.append(DeviceRow(devices, sum(device.memory_bytes for device in cluster.devices), largest))
        return {"rows": placed, "methods": METHODS, "dtype": DTYPE, "num_best": sum(row.is_best for row in placed)}

    def _attempt(
        self, method: str, devices: str, num_layers: int, *, models: "_Models", rows: Rows, say: Say
    ) -> dict[str, Any]:
        """Returns the row of `method` for the model with so many layers."""
        question = BatchQuestion(models.parts(num_layers), Cluster.parse(devices))
        make: Callable[[], Attempt] = partial(ask, method, question) if method in RIVALS else self._chooser(question)
        name = f"{devices}-{method}-{num_layers}"
        settings = {
            "cluster": question.cluster.fingerprint,
            "batch": self.batch,
            "sequence": self.sequence,
            "budget": "" if method in RIVALS else str(self.budget),
            "gdp_version": version("gdp-placement"),
        }
        path = rows.directory / f"{name}.plan.json.gz"
        row = rows.row(name, settings, partial(made_row, make, path, question))
        say(f"{name}: {row['layout'] if row['status'] == 'ok' else row['reason']}")
        return row

    def _chooser(self, question: BatchQuestion) -> Callable[[], Attempt]:
        return partial(choose, question, self.budget)


def _largest(attempt: Callable[[int], Mapping[str, Any]], most_layers: int, models: "_Models") -> LargestModel:
    """Returns the largest model of those that fit: halves, quarters, ... are added to the layers as long as they fit.

    So each number that is tried has many divisors first: pipelines need layers that are a multiple of their stages.
    """
    num_layers, best, larger, reason = 0, None, 0, ""
    step = 1 << (most_layers.bit_length() - 1)
    while step:
        if num_layers + step <= most_layers:
            row = attempt(num_layers + step)
            if row["status"] == "ok":
                num_layers += step
                best = row
            else:
                larger, reason = num_layers + step, row["reason"]
        step //= 2
    if best is None:
        return LargestModel(0, 0, "", None, larger, reason)
    count = models.num_parameters(num_layers)
    return LargestModel(num_layers, count, best["layout"], best["step_time_ns"], larger, reason)


class _Models:
    """Llamas by their number of layers, their parts captured once."""

    def __init__(self, directory: Path, sizes: str) -> None:
        self._directory = directory
        self._sizes = sizes
        self._parts: dict[int, Parts] = {}

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return model_configs.get(MODEL).config

    def parts(self, num_layers: int) -> Parts:
        """Returns the parts of the batch of the model with so many layers."""
        if num_layers not in self._parts:
            path = self._directory / str(num_layers)
            path.mkdir(parents=True, exist_ok=True)
            files.write_json(path / "config.json", {**self._config, "num_hidden_layers": num_layers})
            self._parts[num_layers] = Parts.of(ModelSource(f"hf:{path}{self._sizes}", _READING))
        return self._parts[num_layers]

    def num_parameters(self, num_layers: int) -> int:
        """Returns the parameters of the model with so many layers."""
        hidden, wide = self._config["hidden_size"], self._config["intermediate_size"]
        layer = 4 * hidden * hidden + 3 * hidden * wide + 2 * hidden
        return int(num_layers * layer + 2 * self._config["vocab_size"] * hidden + hidden)
