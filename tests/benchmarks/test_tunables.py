"""The benchmark of the numbers that tune a search."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import model_configs
from benchmarks.tunables import DOUBLE, HALF, HF, PROBLEMS, TunablesBenchmark, all_numbers, scaled, traced
from benchmarks.workloads import model_of
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.search.settings import DEFAULTS

PROBLEM = "inception-v3-b32 on 2xp100-pcie-16g (ops)"


def test_numbers_are_halved_and_doubled() -> None:
    """A share stays at most 1, a count at least 1, a tuple changes as a whole, and no other number changes."""
    assert DEFAULTS.layouts.late_share == 0.7
    doubled = scaled(["layouts.late_share"], DOUBLE)
    assert doubled == replace(DEFAULTS, layouts=replace(DEFAULTS.layouts, late_share=1.0))
    halved = scaled(["local_search.levels"], HALF)
    assert halved is not None
    assert halved.local_search.levels == (15, 50, 150)
    assert scaled(["local_search.num_islands"], HALF) == DEFAULTS  # None: by the number of threads
    assert scaled(["local_search.guided", "local_search.cold"], 100.0) is None  # hotter at the end than at the start
    assert "layouts.late_share" in set(all_numbers())


def test_reads_are_noticed() -> None:
    """Traced settings are equal to others and know which of their numbers were read."""
    reads: set[str] = set()
    settings = traced(DEFAULTS, reads)
    assert reads == set()
    assert settings.ops.slow_share == DEFAULTS.ops.slow_share
    assert reads == {"ops.slow_share"}


def test_problems_can_be_asked() -> None:
    """Each problem has a model that there is, on devices that there are."""
    for problem in PROBLEMS:
        assert Cluster.parse(problem.devices).num_devices > 1
        if problem.model.startswith(HF):
            assert model_configs.get(problem.model.removeprefix(HF)).config
        else:
            assert model_of(problem.model)


def test_numbers_on_a_problem(tmp_path: Path) -> None:
    """Each number that the search reads has figures; runs are found again; a budget in seconds is refused."""
    benchmark = TunablesBenchmark(problems=(PROBLEM,), numbers=("ops.slow_share",), budget=Budget(simulations=3))
    figures = benchmark.run(out=tmp_path)
    (number,) = figures["numbers"]
    assert (number["name"], number["num_read"]) == ("ops.slow_share", 1)
    assert number["best"] <= number["half"] <= number["worst"]
    assert benchmark.run(out=tmp_path) == figures
    with pytest.raises(InputError, match="such as 100sims"):
        TunablesBenchmark(budget=Budget(seconds=1.0))
