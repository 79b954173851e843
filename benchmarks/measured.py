"""Benchmark `measured`: predicted step times of GPT in given layouts, against step times that others measured.

Each row of the file is a training step with its numbers of replicas, stages and micro-batches. The GPT of that size is
captured as Megatron computes it, in float16 with float32 master weights and Adam; the layout is the row's, with equal
layers a stage, the 1F1B schedule and all layers recomputed. Nothing is fitted: devices and links are the built-in ones.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.benchmark import Benchmark, Say
from benchmarks.rows import Rows
from gdp import files
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.layout import BLOCKS, Layout
from gdp.search.rivals.equal_stages import equal_stages
from gdp.search.rivals.rivals import simulate_layout
from gdp.simulator.problem import Problem

VOCABULARY = 50_257  # of GPT-2's tokenizer: the files do not have it
DTYPE = "float16"
_COUNTS = (
    "gpus",
    "global_batch",
    "micro_batch",
    "hidden",
    "heads",
    "layers",
    "sequence",
    "tensor_parallel",
    "data_parallel",
    "pipeline_parallel",
)
_TIME = "iteration_ms"
_FACTORS = ("micro_batch", "pipeline_parallel", "data_parallel", "gpus", "layers")  # what errors are told apart by


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A step that was measured: a row of the file."""

    gpus: int
    global_batch: int  # samples
    micro_batch: int  # samples
    hidden: int
    heads: int
    layers: int
    sequence: int  # tokens
    tensor_parallel: int
    data_parallel: int
    pipeline_parallel: int
    iteration_ms: float

    @property
    def layout(self) -> Layout:
        """The layout that was measured."""
        count = self.global_batch // (self.data_parallel * self.micro_batch)
        return Layout((count,) * self.data_parallel, recompute=BLOCKS, stages=self.pipeline_parallel)

    @property
    def group(self) -> tuple[int, ...]:
        """The cards, the model and the batch, for which a user chooses a layout."""
        return self.gpus, self.hidden, self.heads, self.layers, self.sequence, self.global_batch

    @property
    def name(self) -> str:
        """A name for the row."""
        return "-".join(str(getattr(self, name)) for name in _COUNTS)


def read_runs(path: Path) -> list[MeasuredRun]:
    """Reads the rows of a CSV file; InputError names the line of what is no measured step."""
    text = files.read_bytes(path).decode("utf-8", "replace")
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in (*_COUNTS, _TIME) if name not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"{path}: no column {', '.join(missing)}; a CSV file of measured steps has it")
    runs = []
    for row in reader:
        try:
            values: dict[str, Any] = {name: int(row[name]) for name in _COUNTS}
            run = MeasuredRun(**values, iteration_ms=float(row[_TIME]))
        except (TypeError, ValueError):
            raise InputError(f"{path}: line {reader.line_num}: whole numbers and a time in ms are expected") from None
        _check(run, f"{path}: line {reader.line_num}")
        runs.append(run)
    return runs


def _check(run: MeasuredRun, where: str) -> None:
    if min(getattr(run, name) for name in _COUNTS) < 1 or not 0 < run.iteration_ms < np.inf:
        raise InputError(f"{where}: has a number that is not above 0")
    if run.gpus != run.data_parallel * run.pipeline_parallel * run.tensor_parallel:
        raise InputError(f"{where}: gpus is {run.gpus}, not the product of the three ways to be parallel")
    if run.global_batch % (run.data_parallel * run.micro_batch) or run.layers % run.pipeline_parallel:
        raise InputError(f"{where}: the batch has no equal micro-batches, or the layers no equal stages")


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """A measured step and its simulation."""

    run: MeasuredRun
    predicted_ms: float
    missing_bytes: int  # on the fullest device; 0: it fits

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one."""
        return self.predicted_ms / self.run.iteration_ms


@dataclass(frozen=True, kw_only=True)
class MeasuredBenchmark(Benchmark):
    """All rows of `runs` without tensor parallelism, on devices of kind `card`."""

    name = "measured"
    runs: Path
    card: str = "a100-sxm-40g"

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        everything = read_runs(self.runs)
        runs = [run for run in everything if run.tensor_parallel == 1]
        if not runs:
            raise InputError(f"{self.runs}: no row has tensor_parallel 1; others are not modelled")
        runs.sort(key=lambda run: (run.hidden, run.layers, run.micro_batch, run.global_batch))
        predictions = []
        graphs = _Captures()
        for run in runs:
            predictions.append(self._predict(run, graphs, rows))
            say(f"{run.name}: {predictions[-1].predicted_ms:.1f} ms, measured {run.iteration_ms:.1f} ms")
        return {"num_left_out": len(everything) - len(runs), **statistics(predictions), "predictions": predictions}

    def _predict(self, run: MeasuredRun, graphs: "_Captures", rows: Rows) -> PredictedRun:
        facts = asdict(run) | {"card": self.card, "gdp_version": version("gdp-placement")}

        def make() -> dict[str, Any]:
            cluster, graph = Cluster.parse(f"{run.gpus}x{self.card}"), graphs.of(run)
            stage = equal_stages(Problem.build(graph, cluster), run.pipeline_parallel)
            assert stage is not None, "the layers are a multiple of the stages"
            grid = np.arange(run.gpus).reshape(run.data_parallel, run.pipeline_parallel)
            _, simulation = simulate_layout(graph, run.layout, cluster, stage, grid, in_program_order=True)
            return {"predicted_ms": simulation.step_time_ns / 1e6, "missing_bytes": int(simulation.missing_bytes.max())}

        return PredictedRun(run, **rows.row(run.name, facts, make))


class _Captures:
    """Graphs of one micro-batch, each captured once."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, ...], Graph] = {}

    def of(self, run: MeasuredRun) -> Graph:
        key = run.hidden, run.heads, run.layers, run.sequence, run.micro_batch
        if key not in self._graphs:
            self._graphs.clear()  # rows are sorted: none is asked for twice
            self._graphs[key] = _capture(run)
        return self._graphs[key]


def _capture(run: MeasuredRun) -> Graph:
    """Returns the step of one micro-batch, as Megatron computes it."""
    import torch

    from benchmarks.megatron_gpt import build
    from benchmarks.models.gpt2 import GPT2Config
    from gdp.models.pytorch import capture_fn

    config = GPT2Config(
        batch_size=run.micro_batch,
        num_layers=run.layers,
        num_steps=run.sequence,
        hidden=run.hidden,
        num_heads=run.heads,
        vocabulary=VOCABULARY,
    )
    name = f"gpt-{run.layers}x{run.hidden}-b{run.micro_batch}"
    return capture_fn(lambda: build(config, getattr(torch, DTYPE)), name=name, precision="mixed").graph


def statistics(predictions: Sequence[PredictedRun]) -> dict[str, Any]:
    """Returns errors, rank correlations and regrets of predictions, by name.

    Groups are rows that a user chooses between; those of one row have no correlation and no regret, those of two no
    correlation of their own.
    """
    errors = np.array([abs(each.ratio - 1) for each in predictions])
    by_group = _grouped(predictions, lambda each: each.run.group)
    choices = [group for group in by_group.values() if len(group) > 1]
    correlations = [_spearman(group) for group in choices if len(group) > 2]
    regrets = [_regret(group) for group in choices]
    return {
        "num_fitting": sum(not each.missing_bytes for each in predictions),
        "errors": {
            "median": float(np.median(errors)),
            "mean": float(errors.mean()),
            "ninetieth": float(np.percentile(errors, 90)),
        },
        "median_ratio": float(np.median([each.ratio for each in predictions])),
        "num_choices": len(choices),
        "num_correlations": len(correlations),
        "correlation": float(np.median(correlations)) if correlations else None,
        "pooled_correlation": _pooled(choices) if correlations else None,
        "regret": {"mean": float(np.mean(regrets)), "worst": max(regrets)} if regrets else None,
        "factors": {name: _by_factor(predictions, name) for name in _FACTORS},
    }


def _by_factor(predictions: Sequence[PredictedRun], name: str) -> dict[str, dict[str, Any]]:
    """Returns predicted over measured times by the value of one of the rows' columns."""
    groups = _grouped(predictions, lambda each: getattr(each.run, name))
    return {str(value): _of_part(groups[value]) for value in sorted(groups)}


def _of_part(group: Sequence[PredictedRun]) -> dict[str, Any]:
    ratios = [each.ratio for each in group]
    return {
        "num_rows": len(group),
        "median_ratio": float(np.median(ratios)),
        "low": float(np.percentile(ratios, 10)),
        "high": float(np.percentile(ratios, 90)),
    }


def _grouped(
    predictions: Iterable[PredictedRun], key: Callable[[PredictedRun], Any]
) -> Mapping[Any, list[PredictedRun]]:
    groups = defaultdict[Any, list[PredictedRun]](list)
    for prediction in predictions:
        groups[key(prediction)].append(prediction)
    return groups


def _spearman(group: Sequence[PredictedRun]) -> float:
    """Returns Spearman's rank correlation of predicted and measured times."""
    from scipy.stats import spearmanr

    return float(spearmanr([each.predicted_ms for each in group], [each.run.iteration_ms for each in group]).statistic)


def _pooled(groups: Iterable[Sequence[PredictedRun]]) -> float:
    """Returns the correlation of ranks within groups, each counted from its group's middle, over all rows."""
    from scipy.stats import rankdata

    predicted, measured = [], []
    for group in groups:
        middle = (len(group) + 1) / 2
        predicted += (rankdata([each.predicted_ms for each in group]) - middle).tolist()
        measured += (rankdata([each.run.iteration_ms for each in group]) - middle).tolist()
    return float(np.corrcoef(predicted, measured)[0, 1])


def _regret(group: Sequence[PredictedRun]) -> float:
    """Returns how much slower, as measured, the layout of the shortest prediction is than the best one."""
    chosen = min(group, key=lambda each: each.predicted_ms)
    return chosen.run.iteration_ms / min(each.run.iteration_ms for each in group) - 1
