"""MPT under FSDP: training runs that llm-foundry publishes, on hosts of eight A100.

The model is a GPT of the same sizes; in `mixed` rows weights are gathered in bfloat16, and masters and moments stay in
float32. As `scripts/train/benchmarking/submit_benchmarks.py` and the YAML files say, attention is FlashAttention in
Triton (PyTorch 1.13), autocast computes the loss in float32, and the optimizer, Composer's DecoupledAdamW, updates one
tensor after the other. On one host all replicas are simulated, with three micro-batches at most: further ones take as
long as the third. On several hosts the step is the estimate of the layout search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

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
from gdp.costs.ranges import StepKind
from gdp.graph import Graph
from gdp.parallel.layout import Layout
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Arrangement
from gdp.search.layouts.estimate import Estimator
from gdp.search.rivals.rivals import simulate_layout
from gdp.simulator.constraints import Constraints

CARD, CARDS_OF_HOST = "a100-sxm-80g", 8
SIZES = {  # layers, hidden, heads: llm-foundry, scripts/train/yamls/pretrain
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
VOCABULARY = 50_368
_MOST_SIMULATED = 3  # micro-batches
# FlashAttention-2 is 1.3 to 2.5 times as fast as FlashAttention in Triton (T. Dao, arXiv 2307.08691, section 4.1)
_TRITON = 1 / 1.9
_NUMBERS = "sequence", "cards", "micro_batch", "accumulation"


@dataclass(frozen=True, slots=True)
class MPTStep:
    """A training step as it was run."""

    model: str
    sequence: int  # tokens
    cards: int
    micro_batch: int  # samples
    accumulation: int  # micro-batches
    precision: str
    recompute: str

    def layout(self, num_microbatches: int) -> Layout:
        """Returns a replica a card, fully sharded."""
        return Layout((num_microbatches,) * self.cards, zero=3, recompute=self.recompute)

    def captured(self, samples: int) -> str:
        """Returns a name for the step of `samples` on one card."""
        return f"mpt-{self.model}-{self.sequence}tokens-b{samples}-{self.precision}"


class MPTSteps(MeasuredSource):
    """All runs; a row's time is that of its global batch."""

    name = "mpt"
    about = "MPT training under FSDP of llm-foundry"

    def rows(self) -> Sequence[MeasuredRow]:
        """Returns the runs."""
        columns = "model", *_NUMBERS, "precision", "recompute", "tokens_per_s"
        rows = []
        for line in read_table(DATA / "mpt-fsdp-a100-80g.csv", columns):
            counts = {name: int(line[name]) for name in _NUMBERS}
            step = MPTStep(line["model"], precision=line["precision"], recompute=line["recompute"], **counts)
            tokens = step.sequence * step.cards * step.micro_batch * step.accumulation
            key = "-".join(line[name] for name in columns[:-1])
            time_ms = tokens / float(line["tokens_per_s"]) * 1e3
            rows.append(MeasuredRow(key, time_ms, CARD, step, ranked_with=step.model, amount=tokens))
        return rows

    def predict(self, row: MeasuredRow, graphs: CapturedGraphs) -> PredictedRow:
        """Simulates the step on one host, estimates it on several."""
        step: MPTStep = row.case
        kind = f"{step.model}, {'recomputed' if step.recompute == 'blocks' else 'all held'}"
        if step.cards > CARDS_OF_HOST:
            time_ns, fits, step_kind = _estimated(step, graphs)
        else:
            graph = graphs.read(step.captured(step.micro_batch), lambda: capture(step, step.micro_batch))
            time_ns, fits, step_kind = _simulated(step, graph)
        return PredictedRow(row, time_ns / 1e6, kind, fits, step_kind=step_kind)


def _simulated(step: MPTStep, graph: Graph) -> tuple[float, bool, StepKind | None]:
    """Returns the time in ns, and whether the step fits."""
    cluster, grid = _in_triton(f"{step.cards}x{CARD}"), np.arange(step.cards)[:, None]
    stage = np.zeros(graph.num_ops, np.int64)
    counts = [step.accumulation] if step.accumulation < _MOST_SIMULATED else [_MOST_SIMULATED - 1, _MOST_SIMULATED]
    times_ns = []
    for count in counts:
        _, simulation = simulate_layout(graph, step.layout(count), cluster, stage, grid, in_program_order=True)
        times_ns.append(simulation.step_time_ns)
    each_ns = times_ns[-1] - times_ns[0]
    return (
        times_ns[-1] + (step.accumulation - counts[-1]) * each_ns,
        not simulation.missing_bytes.any(),
        simulation.step_kind,
    )


def _estimated(step: MPTStep, graphs: CapturedGraphs) -> tuple[float, bool, StepKind | None]:
    hosts = step.cards // CARDS_OF_HOST
    cluster, samples = _in_triton(f"{hosts}xdgx-a100"), step.cards * step.accumulation * step.micro_batch

    def read(num_parts: int) -> Graph:
        count = samples // num_parts
        return graphs.read(step.captured(count), lambda: capture(step, count))

    graph = graphs.read(step.captured(step.micro_batch), lambda: capture(step, step.micro_batch))

    estimator = Estimator(Parts(read, samples), cluster, Constraints())
    devices = tuple((device,) for device in range(step.cards))
    candidate = estimator.estimate(Arrangement(step.layout(step.accumulation), devices))
    placement = np.arange(graph.num_ops) % step.cards  # that there are other hosts is what counts
    return candidate.step_time_ns, candidate.fits, StepKind.of(graph, cluster, placement)


@cache
def _in_triton(devices: str) -> Cluster:
    """Returns the cluster with the rate of that attention."""
    cluster = cluster_of(devices)
    slower = {name: share * _TRITON for name, share in cluster.devices[0].achieved.items() if "attention" in name}
    cards = [replace(device, achieved={**device.achieved, **slower}) for device in cluster.devices]
    return replace(cluster, devices=tuple(cards))


def capture(step: MPTStep, samples: int) -> Graph:
    """Returns the step of `samples`, without dropout, as llm-foundry trains."""
    import torch

    from benchmarks.models.gpt2 import GPT2, GPT2Config, build
    from gdp.models.pytorch import capture_fn

    layers, hidden, heads = SIZES[step.model]
    config = GPT2Config(
        batch_size=samples,
        num_layers=layers,
        num_steps=step.sequence,
        hidden=hidden,
        num_heads=heads,
        vocabulary=VOCABULARY,
        dropout=0.0,
    )

    class WithLoss(GPT2):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.scores(tokens).float(), targets.flatten())

    def build_in_halves() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[str, object]]:
        _, tokens, others = build(config)
        return WithLoss(config).bfloat16(), tokens, dict(others)

    optimizer = "adamw,for-loop"
    captured = capture_fn(build_in_halves, name=step.captured(samples), optimizer=optimizer, precision=step.precision)
    return captured.graph
