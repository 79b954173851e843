"""Benchmark `cores`: what a row says."""

import pytest

from benchmarks.cores import CoresBenchmark, predicted_and_measured
from benchmarks.execution_against import two_cores
from gdp.cluster import Cluster, Device, Route
from gdp.errors import InputError
from gdp.execute.backends import target_of


def test_a_row_is_of_the_whole_step() -> None:
    """The predicted time is that of all ops, and the classes that are off the most are told with both times."""
    detected = two_cores("cores")
    shares = {"product": 0.5, "pointwise": 0.5}
    devices = [
        Device(each.name, each.kind, each.memory_bytes, {"float32": 10**11}, 10**10, 3000, achieved=shares)
        for each in detected
    ]
    routes = {pair: Route(1000, 10**10, ()) for pair in ((0, 1), (1, 0))}
    row = predicted_and_measured(
        "recommender", Cluster.build("two", devices, routes), list(map(target_of, detected)), 1
    )
    assert row["num_ops"] > 50
    assert min(row["predicted_ns"], row["measured_ns"]) > 0
    assert len(row["classes"]) == 3
    assert sum(each["predicted_ns"] for each in row["classes"]) <= row["predicted_ns"]


def test_unknown_models_are_refused() -> None:
    with pytest.raises(InputError, match=r"cores: .*grru"):
        CoresBenchmark(models=("grru",))
