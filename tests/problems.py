"""Problems that tests of several rooms place: small, and each with a difficulty of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.graphs import lstm_training_graph
from gdp.budget import Clock
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.graph.accumulation import accumulated
from gdp.search.batch_parts import Parts
from gdp.search.batches.place_batches import place_batches
from gdp.search.layouts.choose import choose_layout
from gdp.search.question import BatchQuestion, Solution
from gdp.simulator.constraints import Constraints
from gdp.simulator.problem import Problem


@dataclass(frozen=True, eq=False)
class Case:
    """A graph, the text of a cluster, and constraints of `Problem.build`."""

    graph: Callable[[], Graph]
    devices: str
    constraints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        """The cluster that `devices` names."""
        return Cluster.parse(self.devices)

    def problem(self) -> Problem:
        """Returns the problem."""
        return Problem.build(self.graph(), self.cluster, **self.constraints)


@cache
def recurrent() -> Graph:
    """Returns a training step of an LSTM with two layers and three time steps."""
    return lstm_training_graph(num_steps=3)


@cache
def accumulating() -> Graph:
    """Returns the same step in three micro-batches."""
    return accumulated(recurrent(), 3)


@cache
def two_chains() -> Graph:
    """Returns two chains of three ops that join in a seventh."""
    ops = [Op(f"op{op}", flops=10**10) for op in range(7)]
    edges = ((0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6))
    return Graph.build("two chains", ops, [Tensor(a, (b,), 10**6) for a, b in edges])


@cache
def heavy_layers() -> Graph:
    """Returns a chain of eight layers, each with 1 MiB of parameters."""
    ops = [Op(f"layer{op}", "mm", 10**9, resident_bytes=2**20, module=f"layers.{op}") for op in range(8)]
    return Graph.build("heavy layers", ops, [Tensor(op, (op + 1,), 2**10) for op in range(7)])


CASES: Mapping[str, Case] = {
    "equal cards": Case(recurrent, "2xp100-pcie-16g"),
    "unequal cards, a pin, forbidden kinds": Case(
        recurrent,
        "p100-pcie-16g+a100-sxm-80g",
        {"pins": [("layers.0", "gpu1")], "forbid": [("^(sigmoid|softmax)", "gpu0"), ("tanh", "p100-pcie-16g")]},
    ),
    "little memory": Case(
        heavy_layers, "4xp100-pcie-16g", {"max_memory_bytes": {f"gpu{gpu}": 2 * 2**20 + 2**14 for gpu in range(4)}}
    ),
    "micro-batches": Case(accumulating, "2xl4-24g+cpu-16core"),
    "one device": Case(recurrent, "l4-24g"),
    "seven ops": Case(two_chains, "2xp100-pcie-16g", {"forbid": [("", "gpu0")]}),
}


def choose(
    parts: Parts, cluster: Cluster, constraints: Constraints | None = None, *, budget: Clock | str, **fields: Any
) -> Solution:
    """Returns the best layout of the batch of `parts`; `fields` are those of the question."""
    question = BatchQuestion(parts, cluster, constraints or Constraints(), **fields)
    return choose_layout(question, Clock.of(budget))


def serve(
    graph: Graph, cluster: Cluster, num_batches: int, constraints: Constraints | None = None, *, budget: str
) -> Solution:
    """Returns the best layout for `num_batches` of the forward pass `graph` in flight."""
    parts = Parts(lambda num_parts: graph, 1, graph)
    question = BatchQuestion(parts, cluster, constraints or Constraints(), num_batches=num_batches, num_threads=1)
    return place_batches(question, Clock.of(budget))
