"""Choices: measured rows that a user chooses between, as layouts of one batch, with what is known before a measurement.

vTrain's rows of one model, number of cards and batch; MPT's rows of one model, by time per token and card; timm's
inference of one model, by card, memory format and runtime, by time per image.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log, log2
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.benchmark import Say
from benchmarks.measured_sources.gpt import VOCABULARY, GPTStep, GPTSteps
from benchmarks.measured_sources.image_models import ImageInference, ImageStep
from benchmarks.measured_sources.mpt import SIZES, MPTStep, MPTSteps
from benchmarks.measured_sources.mpt import VOCABULARY as MPT_VOCABULARY
from benchmarks.measured_sources.source import CapturedGraphs, MeasuredRow, MeasuredSource
from benchmarks.rows import PREDICTION, Rows, code_of
from gdp.cluster import Cluster
from gdp.costs.ranges import StepKind, range_on
from gdp.errors import InputError

_EIGHTY = 2.563  # deviations of a normal distribution between its 10th and 90th percentile
SPREAD = 0.15  # of predictions without a range
_TOGETHER = 8  # predictions of a row of the benchmark
PREDICTED_BY = (*PREDICTION, "gdp/search", "benchmarks/measured_sources", "benchmarks/data/measured")
_F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Choice:
    """Candidates between which a user chooses; N candidates."""

    name: str
    is_set: bool  # costs may be fitted to some of its rows
    measured: _F64  # [N] times, of any unit that all have
    predicted: _F64  # [N] in the same unit
    naive: _F64  # [N] by the peak of the sheet alone, in any unit
    traits: _F64  # [N, T]
    preference: Sequence[tuple[float, ...]]  # [N] of an expert, the least first
    spreads: _F64  # [N] relative deviations of predictions that their ranges tell
    names: tuple[str, ...]  # [T] of traits
    table: str = ""
    machine: str = ""  # that it was measured on
    model: str = ""

    @property
    def spread(self) -> float:
        """The relative deviation of the least certain prediction."""
        return float(self.spreads.max())


@dataclass(frozen=True)
class ChoiceTable:
    """A source whose rows are choices, and what is known of a row: traits, an expert's preference, a naive time."""

    name: str
    about: str
    source: MeasuredSource
    group_of: Callable[[MeasuredRow], str]
    machine_of: Callable[[MeasuredRow], str]
    model_of: Callable[[MeasuredRow], str]
    amount_of: Callable[[MeasuredRow], float]
    traits_of: Callable[[MeasuredRow], dict[str, float]]
    preference_of: Callable[[MeasuredRow], tuple[float, ...]]
    naive_of: Callable[[MeasuredRow], float]

    def choices(self, rows: Rows, graphs: CapturedGraphs, say: Say) -> list[Choice]:
        """Returns the choices with two candidates or more that can be predicted. Predictions are rows of the
        benchmark."""
        table = self.source.rows()
        made, settings = dict[str, Any](), {"num_rows": len(table), "code": code_of(*PREDICTED_BY)}
        for first in range(0, len(table), _TOGETHER):
            part = partial(self._predict, table[first : first + _TOGETHER], graphs, say)
            made |= rows.row(f"{self.name}-predictions-{first}", settings, part)
        groups = defaultdict[str, list[MeasuredRow]](list)
        for row in table:
            if row.key in made:
                groups[self.group_of(row)].append(row)
        return [self._choice(name, group, made) for name, group in groups.items() if len(group) > 1]

    def _predict(self, table: Sequence[MeasuredRow], graphs: CapturedGraphs, say: Say) -> dict[str, Any]:
        made = {}
        for row in table:
            try:
                found = self.source.predict(row, graphs)
            except InputError as error:
                say(f"{row.key}: {error}")
                continue
            say(f"{row.key}: {found.predicted_ms:.1f} ms, measured {row.measured_ms:.1f} ms")
            made[row.key] = [found.predicted_ms, None if found.step_kind is None else list(found.step_kind)]
        return made

    def _choice(self, name: str, group: Sequence[MeasuredRow], made: Mapping[str, Any]) -> Choice:
        amounts = np.array([self.amount_of(row) for row in group])
        traits = [self.traits_of(row) for row in group]
        return Choice(
            name,
            any(self.source.is_set(row) for row in group),
            np.array([row.measured_ms for row in group]) / amounts,
            np.array([made[row.key][0] for row in group]) / amounts,
            np.array([self.naive_of(row) for row in group]) / amounts,
            np.array([list(each.values()) for each in traits]),
            [self.preference_of(row) for row in group],
            np.array([spread_of(made[row.key][1], row.card) for row in group]),
            tuple(traits[0]),
            self.name,
            self.machine_of(group[0]),
            self.model_of(group[0]),
        )


def spread_of(kind: Sequence[Any] | None, card: str) -> float:
    """Returns the relative deviation of predictions of steps of a kind; None: without a range."""
    if kind is None:
        return SPREAD
    told = range_on(StepKind(*kind), [card])
    return log(told.high / told.low) / _EIGHTY


def _peak(card: str) -> float:
    """Returns the FLOP/s in half precision that the sheet of a card promises."""
    return float(Cluster.parse(card).devices[0].flops_per_second["float16"])


def _gpt_flops(layers: int, hidden: int, sequence: int, vocabulary: int, *, recomputed: bool) -> float:
    """Returns the FLOPs of a training step of one sample (D. Narayanan et al., SC 2021, equation 3)."""
    passes = 4 if recomputed else 3
    own = 24 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden))
    return passes * own + 6 * sequence * hidden * vocabulary


def _naive_gpt(row: MeasuredRow) -> float:
    """Returns the time of the products at the peak of all cards, and of stages that wait."""
    step: GPTStep = row.case
    flops = _gpt_flops(step.layers, step.hidden, step.sequence, VOCABULARY, recomputed=True) * step.global_batch
    count = step.global_batch / (step.data_parallel * step.micro_batch)
    return flops / step.gpus / _peak(row.card) * (1 + (step.pipeline_parallel - 1) / count)


def _naive_mpt(row: MeasuredRow) -> float:
    step: MPTStep = row.case
    layers, hidden, _ = SIZES[step.model]
    flops = _gpt_flops(layers, hidden, step.sequence, MPT_VOCABULARY, recomputed=step.recompute == "blocks")
    return flops * step.micro_batch * step.accumulation / _peak(row.card)  # of a card


def gpt_traits(step: GPTStep) -> dict[str, float]:
    """Returns the logarithms of what a layout of GPT has."""
    names = "micro_batch", "tensor_parallel", "data_parallel", "pipeline_parallel"
    return {name: log2(getattr(step, name)) for name in names}


def _mpt_traits(row: MeasuredRow) -> dict[str, float]:
    step: MPTStep = row.case
    numbers = {name: log2(getattr(step, name)) for name in ("sequence", "micro_batch", "cards")}
    return numbers | {"recomputed": float(step.recompute == "blocks"), "mixed": float(step.precision == "mixed")}


def _image_traits(row: MeasuredRow) -> dict[str, float]:
    step: ImageStep = row.case
    facts = {"newer_card": "4090" in row.card, "compiled": row.runtime != "eager"}
    facts |= {"channels_last": step.channels_last, "newer_software": "pt29" in row.key}
    return {name: float(fact) for name, fact in facts.items()}


NAMES = (
    *("micro_batch", "tensor_parallel", "data_parallel", "pipeline_parallel", "sequence", "cards", "recomputed"),
    *("mixed", "newer_card", "compiled", "channels_last", "newer_software"),
)
"""Traits of the tables."""

TABLES = (
    ChoiceTable(
        "gpt",
        "layouts of GPT on 2 to 8 A100, by model and batch (vTrain)",
        GPTSteps(degrees=()),
        lambda row: row.chosen_from,
        lambda row: f"{row.case.gpus}x{row.card}",
        lambda row: f"{row.case.layers} layers",
        lambda row: 1.0,
        lambda row: gpt_traits(row.case),
        # as few shards and stages as there can be, within a host shards first, and large micro-batches (the same paper)
        lambda row: (
            row.case.tensor_parallel * row.case.pipeline_parallel,
            -row.case.tensor_parallel,
            -row.case.micro_batch,
        ),
        _naive_gpt,
    ),
    ChoiceTable(
        "mpt",
        "sequences and micro-batches of MPT under FSDP, by model and time per token and card (llm-foundry)",
        MPTSteps(),
        lambda row: row.case.model,
        lambda row: row.card,
        lambda row: row.case.model,
        lambda row: row.amount / row.case.cards,
        _mpt_traits,
        lambda row: (row.case.recompute == "blocks", -row.case.micro_batch * row.case.sequence),
        _naive_mpt,
    ),
    ChoiceTable(
        "timm",
        "cards, memory formats and runtimes for inference of an image model, by time per image (timm)",
        ImageInference(60),
        lambda row: f"{row.model}-{row.case.image}",
        lambda row: "a host of a choice of cards",
        lambda row: row.model,
        lambda row: row.amount,
        _image_traits,
        lambda row: ("4090" not in row.card, row.runtime == "eager", not row.case.channels_last),
        lambda row: row.amount / _peak(row.card),
    ),
)
