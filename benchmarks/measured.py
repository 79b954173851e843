"""Benchmark `measured`: predicted times of steps, ops and exchanges against those that others measured.

Each source has rows with a measured time, and says how gdp predicts them; see `measured_sources`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.measured_sources.ablation import TERMS, without
from benchmarks.measured_sources.exchanges import ExchangeTable
from benchmarks.measured_sources.gpt import GPTSteps, GPTTensorSteps
from benchmarks.measured_sources.image_models import ImageInference, ImageTraining
from benchmarks.measured_sources.mpt import MPTSteps
from benchmarks.measured_sources.op_tables import AttentionTable, ProductTable
from benchmarks.measured_sources.own_card import H100Steps, H200Steps
from benchmarks.measured_sources.ranges import coverage, table_of, text_of
from benchmarks.measured_sources.source import CapturedGraphs, MeasuredRow, MeasuredSource, PredictedRow
from benchmarks.measured_sources.statistics import by_factor, by_part, figures, speed_ups
from benchmarks.rows import Rows
from gdp import files
from gdp.errors import InputError

_OF_STEPS = GPTSteps, GPTTensorSteps, MPTSteps, ImageTraining, ImageInference, H200Steps, H100Steps
_KINDS = ProductTable, AttentionTable, ExchangeTable, *_OF_STEPS
_ABLATED = ProductTable.name, GPTSteps.name, ImageTraining.name, ImageInference.name
SOURCES = tuple(kind.name for kind in _KINDS)


@dataclass(frozen=True, kw_only=True)
class MeasuredBenchmark(Benchmark):
    """The rows of `sources`, of each file of timm a sample; or those of `runs` alone, on cards of kind `card`."""

    name = "measured"
    sources: tuple[str, ...] = SOURCES
    sample: int = 60
    all: bool = False
    runs: Path | None = None
    card: str = "a100-sxm-40g"
    ranges: Path | None = None
    ablation: bool = False

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        graphs, steps = CapturedGraphs(rows), dict[str, list[PredictedRow]]()
        tables = [_table(source, graphs, say, steps) for source in self._chosen()]
        degrees = _by_degree([*steps.get(GPTSteps.name, ()), *steps.get(GPTTensorSteps.name, ())])
        steps = {name: kept for name, of in steps.items() if (kept := [row for row in of if row.step_kind is not None])}
        terms = self._terms(graphs, say) if self.ablation else {}
        if self.ranges is None:
            return {"tables": tables, "degrees": degrees, "coverage": coverage(steps), "terms": terms}
        if not any(not row.is_set for of in steps.values() for row in of):
            raise InputError("measured: ranges are made from judged steps; no source of --sources has them")
        table = table_of(steps)
        files.write_bytes(self.ranges, text_of(table, self.command).encode())
        return {"tables": tables, "degrees": degrees, "coverage": coverage(steps, table), "terms": terms}

    def _terms(self, graphs: CapturedGraphs, say: Say) -> dict[str, dict[str, float]]:
        """Returns the median errors of judged rows, and of tables, without each term, by source."""
        found: dict[str, dict[str, float]] = {}
        for term in ("", *TERMS):
            with without(term):
                for source in self._chosen():
                    if source.name in _ABLATED:
                        predictions, _ = predicted(source, source.rows(), graphs)
                        rows = [each for each in predictions if source.sets_all or not each.is_set]
                        found.setdefault(term or "nothing", {})[source.name] = float(np.median([e.error for e in rows]))
            say(f"without {term or 'nothing'}: {found[term or 'nothing']}")
        return found

    def _chosen(self) -> list[MeasuredSource]:
        if self.runs is not None:
            return [UserSteps(self.runs, self.card)]
        most = None if self.all else self.sample
        known: list[MeasuredSource] = [ProductTable(), AttentionTable(), ExchangeTable(), GPTSteps(), GPTTensorSteps()]
        known += [MPTSteps(), ImageTraining(most), ImageInference(most), H200Steps(), H100Steps()]
        chosen = pick(self.name, "source", self.sources, SOURCES)
        return [source for source in known if source.name in chosen]


@dataclass(frozen=True)
class UserSteps(GPTSteps):
    """The rows of a user's file."""

    name, about = "runs", "your steps of GPT"

    degrees: tuple[int, ...] = ()
    are_sums: bool = False


def _by_degree(predictions: Sequence[PredictedRow]) -> dict[str, dict[str, Any]]:
    """Returns figures of steps by their degree of tensor parallelism, and of all; {} where they have one degree."""
    degrees = sorted({each.row.case.tensor_parallel for each in predictions})
    if len(degrees) < 2:
        return {}
    of_degree = {
        str(degree): figures([each for each in predictions if each.row.case.tensor_parallel == degree])
        for degree in degrees
    }
    return of_degree | {"any": figures(predictions)}


def _table(
    source: MeasuredSource, graphs: CapturedGraphs, say: Say, steps: dict[str, list[PredictedRow]]
) -> dict[str, Any]:
    predictions, left_out = predicted(source, source.rows(), graphs, say)
    steps[source.name] = predictions
    of_memory = [each.fits for each in predictions if each.fits is not None]
    return {
        "source": source.name,
        "about": source.about,
        "num_fitting": sum(of_memory),
        "num_held": len(of_memory),
        "left_out": left_out,
        "parts": by_part(predictions),
        "speed_ups": speed_ups(predictions),
        "factors": by_factor(predictions),  # all rows
        "predictions": [_document(each) for each in predictions],
    }


def predicted(
    source: MeasuredSource, rows: Sequence[MeasuredRow], graphs: CapturedGraphs, say: Say = lambda _: None
) -> tuple[list[PredictedRow], list[dict[str, str]]]:
    """Returns the predictions of `rows`, and the keys of those that have none with the reason."""
    predictions, left_out = list[PredictedRow](), list[dict[str, str]]()
    for row in rows:
        try:
            prediction = source.predict(row, graphs)
        except InputError as error:
            left_out.append({"key": row.key, "reason": str(error)})
            say(f"{source.name} {row.key}: {error}")
            continue
        predictions.append(replace(prediction, is_set=source.is_set(row)))
        if not source.sets_all:  # thousands of ops are a second's work
            say(f"{source.name} {row.key}: {prediction.predicted_ms:.1f} ms, measured {row.measured_ms:.1f} ms")
    return predictions, left_out


def _document(prediction: PredictedRow) -> dict[str, Any]:
    row = prediction.row
    return {
        "key": row.key,
        "card": row.card,
        "runtime": row.runtime,
        "kind": prediction.kind,
        "measured_ms": row.measured_ms,
        "predicted_ms": prediction.predicted_ms,
        "fits": prediction.fits,
        "is_set": prediction.is_set,
        "step_kind": None if prediction.step_kind is None else str(prediction.step_kind),
    }
