"""GPT in layouts of data, tensor and pipeline parallelism: the steps that vTrain measured, or those of a user's file.

The GPT of a row is captured as Megatron computes it, in float16 with float32 master weights and Adam; the layout is the
row's, with equal layers a stage, the 1F1B schedule and all layers recomputed. Tensor parallelism is that of Megatron
before 2022, without sequence parallelism and without exchanges beside products: the local program of one rank on
groups of cards.

The rows are sums of parts. One card's 12 to 24 layers and 2 to 16 micro-batches of a sample fit m (n 2.998 + 6.84) + C
ms to a microsecond, and two stages add up to one: so the host waits where a part ends, which are the layers, what is
before and what is behind them, forward and backward. (Megatron's timers of each pass wait, too.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured_sources.source import (
    DATA,
    CapturedGraphs,
    MeasuredRow,
    MeasuredSource,
    PredictedRow,
    cluster_of,
    read_table,
)
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.shards import Shards
from gdp.parallel.layout import BLOCKS, Layout
from gdp.search.rivals.rivals import equal_stages, simulate_layout
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation

VTRAIN = DATA / "gpt-a100.csv"
VOCABULARY = 50_257  # of GPT-2's tokenizer: the files do not have it
# Rows of a rank's part of the table are a multiple of it (Megatron's --make-vocab-size-divisible-by). A whole table is
# left unfilled, as it was when costs were set: measured heads take longer than filled ones are predicted to.
_FILLED = 128
DTYPE = "float16"
_ONE_BUCKET = 2**62  # bytes: Megatron's own data parallelism sums all gradients when the last backward pass is done
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
PASSES = "forward", "backward"
_ORDER = "hidden", "layers", "micro_batch", "tensor_parallel", "global_batch"
_TIME = "iteration_ms"


@dataclass(frozen=True, slots=True)
class GPTStep:
    """A training step as it was run."""

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

    @property
    def layout(self) -> Layout:
        """The layout that was measured, over groups of cards."""
        count = self.global_batch // (self.data_parallel * self.micro_batch)
        return Layout((count,) * self.data_parallel, recompute=BLOCKS, stages=self.pipeline_parallel)

    @property
    def shards(self) -> Shards:
        """The cut of each replica's ops."""
        return Shards(self.tensor_parallel, sequence=False)

    @property
    def choice(self) -> str:
        """The cards, the model and the batch, for which a user chooses a layout."""
        sizes = self.gpus, self.hidden, self.heads, self.layers, self.sequence, self.global_batch
        return "-".join(map(str, sizes))

    @property
    def graph_name(self) -> str:
        """The name of the graph of one micro-batch."""
        of_rank = f"-tensor{self.tensor_parallel}" * (self.tensor_parallel > 1)
        sizes = f"{self.layers}x{self.hidden}-{self.heads}heads-{self.sequence}tokens-b{self.micro_batch}"
        return f"gpt-{sizes}{of_rank}"

    @property
    def name(self) -> str:
        """A name for the row."""
        return "-".join(str(getattr(self, name)) for name in _COUNTS)


@dataclass(frozen=True)
class GPTSteps(MeasuredSource):
    """The rows of a file with one of `degrees` of tensor parallelism, on devices of kind `card`; (): with any."""

    name = "gpt"
    about = "GPT training of vTrain, all layers recomputed, without tensor parallelism"

    path: Path = VTRAIN
    card: str = "a100-sxm-40g"
    degrees: tuple[int, ...] = (1,)
    are_sums: bool = True  # of parts, each timed with a host of its own

    def rows(self) -> Sequence[MeasuredRow]:
        """Returns the rows; InputError names the line of what is no measured step, or a file that has none."""
        steps = read_steps(self.path)
        kept = [(step, time_ms) for step, time_ms in steps if step.tensor_parallel in self.degrees or not self.degrees]
        if not kept:
            raise InputError(f"{self.path}: has no rows; one step a line is expected")
        kept.sort(key=lambda pair: tuple(getattr(pair[0], name) for name in _ORDER))
        return [
            MeasuredRow(step.name, time_ms, self.card, step, ranked_with=step.choice, chosen_from=step.choice)
            for step, time_ms in kept
        ]

    def predict(self, row: MeasuredRow, graphs: CapturedGraphs) -> PredictedRow:
        """Simulates the step in its layout."""
        step: GPTStep = row.case
        graph = graphs.read(step.graph_name, lambda: capture(step))
        graph = _in_parts(graph) if self.are_sums else graph
        simulation = simulated(step, graph, cluster_of(f"{step.gpus}x{row.card}"))
        of_rank = f"tensor={step.tensor_parallel}, " * (step.tensor_parallel > 1)
        fits = not simulation.missing_bytes.any()
        return PredictedRow(
            row,
            simulation.step_time_ns / 1e6,
            f"{of_rank}micro-batch of {step.micro_batch}",
            fits,
            step_kind=simulation.step_kind,
        )


@dataclass(frozen=True)
class GPTTensorSteps(GPTSteps):
    """The rows with tensor parallelism, to none of which costs may be fitted."""

    name = "gpt-tensor"
    about = "the same with tensor parallelism over 2, 4 and 8 cards, which nothing is set on"

    degrees: tuple[int, ...] = (2, 4, 8)


def simulated(step: GPTStep, graph: Graph, cluster: Cluster) -> Simulation:
    """Simulates a step in its layout over groups of the cards of `cluster`."""
    cluster = cluster.grouped(step.tensor_parallel)
    stage = equal_stages(Problem.build(graph, cluster), step.pipeline_parallel)
    assert stage is not None, "the layers are a multiple of the stages"
    grid = np.arange(step.data_parallel * step.pipeline_parallel).reshape(step.data_parallel, step.pipeline_parallel)
    return simulate_layout(graph, step.layout, cluster, stage, grid, in_program_order=True, bucket_bytes=_ONE_BUCKET)[1]


def read_steps(path: Path) -> list[tuple[GPTStep, float]]:
    """Reads steps and their times in ms; InputError names the line of what is no measured step."""
    steps = []
    for line, row in enumerate(read_table(path, (*_COUNTS, _TIME)), 2):
        try:
            values: dict[str, Any] = {name: int(row[name]) for name in _COUNTS}
            step, time_ms = GPTStep(**values), float(row[_TIME])
        except (TypeError, ValueError):
            raise InputError(f"{path}: line {line}: whole numbers and a time in ms are expected") from None
        _check(step, time_ms, f"{path}: line {line}")
        steps.append((step, time_ms))
    return steps


def _check(step: GPTStep, time_ms: float, where: str) -> None:
    if min(getattr(step, name) for name in _COUNTS) < 1 or not 0 < time_ms < np.inf:
        raise InputError(f"{where}: has a number that is not above 0")
    if step.gpus != step.data_parallel * step.pipeline_parallel * step.tensor_parallel:
        raise InputError(f"{where}: gpus is {step.gpus}, not the product of the three ways to be parallel")
    if step.global_batch % (step.data_parallel * step.micro_batch) or step.layers % step.pipeline_parallel:
        raise InputError(f"{where}: the batch has no equal micro-batches, or the layers no equal stages")


def _in_parts(graph: Graph) -> Graph:
    """Returns the step with a host that waits at the end of the layers and of what is beside them, in both passes."""
    passes = np.flatnonzero(np.isin(graph.phases, PASSES) & (graph.bytes_accessed > 0)).tolist()
    is_layer = [graph.modules[op].startswith("layers.") for op in passes]
    waits = graph.host_waits.copy()
    waits[passes[-1]] = True
    for place, (op, after) in enumerate(pairwise(passes)):
        if graph.phases[op] != graph.phases[after]:
            waits[op] = True
        elif is_layer[place] != is_layer[place + 1]:
            waits[after if is_layer[place] else op] = True  # ops of layers run again, without a wait
    return replace(graph, host_waits=waits)


def capture(step: GPTStep) -> Graph:
    """Returns the step of one micro-batch on one rank, as Megatron computes it."""
    import torch

    from benchmarks.megatron_gpt import build
    from benchmarks.models.gpt2 import GPT2Config
    from gdp.models.pytorch.capture_step import Built, StepOptions

    multiple = _FILLED * step.tensor_parallel if step.tensor_parallel > 1 else 1
    config = GPT2Config(
        batch_size=step.micro_batch,
        num_layers=step.layers,
        num_steps=step.sequence,
        hidden=step.hidden,
        num_heads=step.heads,
        vocabulary=-(-VOCABULARY // multiple) * multiple,
    )
    # Megatron's optimizer is that of Apex
    options = StepOptions(optimizer="adam,fused", precision="mixed", shards=step.shards)
    built = Built.by(lambda: build(config, getattr(torch, DTYPE)), step.graph_name)
    graph: Graph = built.capture(step.graph_name, options).graph
    return graph
