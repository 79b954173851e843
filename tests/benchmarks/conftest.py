"""Small workloads for the benchmarks."""

import pytest

from benchmarks import graphs
from benchmarks.graphs import Inputs
from gdp.cluster import Cluster
from gdp.graph import Graph


@pytest.fixture
def small_inputs(monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """Returns the inputs of workloads that are unrolled LSTMs of two layers here, on two devices: `lstm-K` has K steps,
    any other name two or three.
    """

    def inputs(name: str) -> tuple[Graph, Cluster]:
        steps = int(name.removeprefix("lstm-")) if name.startswith("lstm-") else 2 + (len(name) + 1) % 2
        return graphs.lstm_training_graph(steps, num_layers=2), Cluster.parse("2xp100-pcie-16g")

    monkeypatch.setattr(graphs, "workload_inputs", inputs)
    return inputs
