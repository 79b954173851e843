"""The benchmark of placers of anybody."""

import csv
from pathlib import Path

import pytest

from benchmarks.placers import PlacersBenchmark, Rank, Score
from gdp.budget import Budget
from gdp.errors import InputError

PROBLEM = "inception-v3-b32 on 2xp100-pcie-16g"
MINE = """
import time

def place(problem, seconds, seed):
    return {op: "gpu0" for op in problem.graph.op_names}

def fast(problem, seconds, seed):
    return [1] * problem.num_ops

def slow(problem, seconds, seed):
    began = time.process_time()
    while time.process_time() - began < 1.6 * seconds + 1:
        pass
    return [0] * problem.num_ops

def wrong(problem, seconds, seed):
    return {"nowhere": "gpu0"}

def broken(problem, seconds, seed):
    raise ValueError("no idea")
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A file with placers."""
    (tmp_path / "mine_placers.py").write_text(MINE)
    return str(tmp_path / "mine_placers.py")


def test_a_placer_of_anybody_is_scored_beside_ours(mine: str, tmp_path: Path) -> None:
    """One device by names or by numbers is as fast as `single`; what is late counts as not solved."""
    names = (f"{mine}:place", f"{mine}:fast", f"{mine}:slow", "single", "m-etf")
    benchmark = PlacersBenchmark(placers=names, problems=(PROBLEM,), seeds=1, budget=Budget(seconds=0.2))
    document = benchmark.run(out=tmp_path / "out")
    ranks = {rank["placer"]: rank for rank in document["ranks"]}
    assert document["ranks"][0]["placer"] == "m-etf"
    assert ranks["m-etf"]["to_best"] == 1.0
    assert ranks[names[0]]["to_bound"] == ranks[names[1]]["to_bound"] == ranks["single"]["to_bound"]
    assert (ranks[names[2]]["num_solved"], ranks[names[2]]["to_bound"]) == (0, None)
    with (tmp_path / "out" / "placers.csv").open() as file:
        scores = list(csv.DictReader(file))
    assert [score["status"] for score in scores] == ["ok", "ok", "late", "ok", "ok"]
    assert "| m-etf | 1 |" in (tmp_path / "out" / "placers.md").read_text()


@pytest.mark.parametrize(
    ("placer", "problem", "message"),
    [
        ("{mine}:wrong", PROBLEM, "has no device; name one for each op"),
        ("{mine}:broken", PROBLEM, r"failed \(ValueError: no idea\)"),
        ("{mine}:missing", PROBLEM, "has no missing"),
        ("{mine}:time", PROBLEM, "is no function"),
        ("metsi", PROBLEM, "did you mean metis"),
        ("single", "gnmt-4", "no problem 'gnmt-4'"),
    ],
)
def test_wrong_placers_are_one_line(mine: str, placer: str, problem: str, message: str, tmp_path: Path) -> None:
    """What is no placer, no placement or no problem is an error that names it."""
    benchmark = PlacersBenchmark(placers=(placer.format(mine=mine),), problems=(problem,), seeds=1)
    with pytest.raises(InputError, match=message) as error:
        benchmark.run(rows=tmp_path / "rows")
    assert "\n" not in str(error.value)


def test_a_rank_is_of_the_problems_that_are_solved() -> None:
    """Medians 4 and 9 over bounds 2 and 3 are ratios 2 and 3, and 4/4 and 9/6 of the best: sqrt(6) and sqrt(1.5)."""
    scores = [
        Score("a", "x", 0, "ok", 4, 2, 1.0),
        Score("a", "x", 1, "ok", 5, 2, 1.0),
        Score("a", "y", 0, "ok", 9, 3, 3.0),
        Score("b", "y", 0, "ok", 6, 3, 1.0),
        Score("b", "x", 0, "infeasible", None, 2, 1.0),
    ]
    rank = Rank.of("a", scores)
    assert (rank.num_solved, rank.cpu_seconds) == (2, pytest.approx(5 / 3))
    assert (rank.to_bound, rank.to_best) == (pytest.approx(6**0.5), pytest.approx(1.5**0.5))
    assert Rank.of("b", scores).num_solved == 1
