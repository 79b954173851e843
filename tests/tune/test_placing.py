"""The numbers of the machine in a tuning: how times follow them, what is learned, and candidates placed anew."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.models.source import ModelSource
from gdp.planning.machine_fit import Number, with_factors
from gdp.search.place import place
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Asked, Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from gdp.tune.candidates import PlannedCandidate
from gdp.tune.measuring import OK, Measured
from gdp.tune.placing import RANKS, RUNTIME, Placing
from gdp.tune.tuning import LoggedCandidate, Tuning

CARDS = "2xl4-24g"
QUESTION = {"model": "net", "devices": CARDS, "options": {}}
RATE = ("pcie4", "rate")


@cache
def branches() -> Graph:
    """Returns two chains of small products, which a host is slow to issue, and of large ones."""
    ops, tensors = list[Op](), list[Tensor]()
    for first in (0, 40):
        for number in range(40):
            size = 64 if number < 30 else 1024
            array, num_bytes = f"bfloat16[{size},{size}]", 2 * size * size
            ops.append(
                Op(
                    f"mm{first + number}",
                    "aten.mm",
                    2 * size**3,
                    3 * num_bytes,
                    "bfloat16",
                    shapes=f"aten.mm {array} {array} > {array}",
                )
            )
            tensors += [Tensor(first + number - 1, (first + number,), num_bytes)] * (number > 0)
    return Graph.build("branches", ops, tensors)


def placing(directory: Path, **others: Any) -> Placing:
    """Returns what places the branches on two cards."""
    graph = directory / "graph.json"
    branches().save(graph)
    source = ModelSource(str(graph))

    def ask(cluster: Cluster) -> PlaceQuestion:
        return PlaceQuestion.of(source, cluster, Constraints(), None, None, SearchOptions(num_threads=1))

    fields = {"question": ask, "cluster": Cluster.parse(CARDS), "source": source, "asked": Asked(str(graph))}
    return Placing(**fields | {"directory": directory, "budget": Budget.parse("30sims")} | others)


def time_ns(directory: Path, factors: Mapping[Number, float]) -> int:
    """Returns the step time of the plan in `directory` on its machine with numbers multiplied by `factors`."""
    plan, cluster = Plan.load(directory / "plan.json"), Cluster.load(directory / "cluster.json")
    problem = Problem.build(branches(), with_factors(cluster, factors))
    return simulate(problem, plan.placement, order=plan.order).step_time_ns


def test_times_follow_the_numbers(tmp_path: Path) -> None:
    """The slope of a plan says its time on a machine with another number, within 1 %; on one device links are 0."""
    place = placing(tmp_path)
    rows = place.candidates({})
    for number, row in enumerate(rows):
        for key, slope in zip(place.numbers, row.slopes, strict=True):
            other_ns = row.predicted_ns * exp(slope * np.log(1.05))
            assert time_ns(tmp_path / str(number), {key: 1.05}) == pytest.approx(other_ns, rel=0.01), (row.name, key)
    single = next(row for row in rows if row.name == "single")
    assert [slope for (_, what), slope in zip(place.numbers, single.slopes, strict=True) if what == "rate"] == [0.0]
    assert len({row.key for row in rows}) == len(rows) > 2


def test_a_machine_is_learned(tmp_path: Path) -> None:
    """Hosts that take 1.3 times as long are found from measured steps, and are in the cluster for the next model."""
    place = placing(tmp_path)
    tuning = Tuning.begin(tmp_path, QUESTION, place.candidates({}), place.numbers)
    truth = {("l4-24g", "issue"): 1.3}

    def measure(directory: Path) -> Measured:
        return Measured(OK, time_ns(directory, truth), 0.01)

    tuning.run(measure, most=50, ends_s=inf, on_measured=lambda _: None, placing=place)
    fit = tuning.machine(place.cluster)
    assert 1.15 < fit.factors["l4-24g", "issue"] < 1.35
    assert np.abs(fit.after).mean() < 0.5 * np.abs(fit.before).mean()
    assert fit.fitted.devices[0].issue_ns > 1.15 * place.cluster.devices[0].issue_ns


class OneMore:
    """Finds one more candidate when it is asked, and says so."""

    cluster = Cluster.parse(CARDS)

    def __init__(self, predicted_ns: int) -> None:
        self.predicted_ns, self.asked_with = predicted_ns, list[Mapping[Number, float]]()

    def candidates(
        self, factors: Mapping[Number, float], known: Sequence[LoggedCandidate] = ()
    ) -> list[LoggedCandidate]:
        """Returns one candidate the first time."""
        self.asked_with.append(factors)
        more = [LoggedCandidate("more", self.predicted_ns, 0.15, False, [9.0], "more", [0.0])]
        return more if len(self.asked_with) == 1 else []


def test_placed_anew_where_the_order_changes(tmp_path: Path) -> None:
    """By hand: of 100 and 104 ns the first follows the links and takes 130. So they are slower, the order changes, and
    candidates are placed on that machine; the new one is measured, is the answer, and a resumed run knows it."""
    rows = [
        LoggedCandidate("a", 100, 0.15, True, [0.0], "a", [-1.0]),
        LoggedCandidate("b", 104, 0.15, True, [1.0], "b", [0.0]),
    ]
    times_ns = {0: 130.0, 1: 104.0, 2: 90.0}

    def run(tuning: Tuning, more: OneMore, most: int = 9) -> list[int]:
        def measure(directory: Path) -> Measured:
            return Measured(OK, times_ns[int(directory.name)], 0.01)

        tuning.run(measure, most=most, ends_s=inf, on_measured=lambda _: None, placing=more)  # type: ignore[arg-type]
        return [line.candidate for line in tuning.measurements]

    more = OneMore(95)
    assert run(Tuning.begin(tmp_path / "most", QUESTION, rows, [RATE]), more, most=2) == [0, 1]
    assert more.asked_with == []
    tuning = Tuning.begin(tmp_path, QUESTION, rows, [RATE])
    assert run(tuning, more) == [0, 1, 2]
    assert (tuning.answer, len(tuning.candidates)) == (2, 3)
    assert more.asked_with[0][RATE] < 0.98
    resumed = Tuning.resume(tmp_path, QUESTION)
    assert (resumed.candidates, resumed.placed_after) == (tuning.candidates, tuning.placed_after)
    assert run(resumed, OneMore(1)) == [0, 1, 2]


def test_runtimes_are_candidates(tmp_path: Path) -> None:
    """Each plan comes in each runtime, with its own prediction, the environment that says so, and a plan of its own."""
    rows = placing(tmp_path, cluster=Cluster.parse(f"{CARDS}:eager"), runtimes=["eager", "cuda-graphs"]).candidates({})
    single = {row.environment[RUNTIME]: number for number, row in enumerate(rows) if row.name.startswith("single,")}
    assert [rows[number].name for number in single.values()] == ["single, eager", "single, cuda-graphs"]
    assert rows[single["cuda-graphs"]].predicted_ns < rows[single["eager"]].predicted_ns
    assert rows[single["eager"]].environment[RANKS] == "2"
    assert [rows[number].comes_first for number in single.values()] == [True, False]
    plan = Plan.load(tmp_path / str(single["cuda-graphs"]) / "plan.json")
    assert plan.step_time_ns == rows[single["cuda-graphs"]].predicted_ns
    assert plan.question.cluster.endswith(":cuda-graphs")


def test_another_runtime_has_peaks_of_its_own() -> None:
    """A card sends 3 MB away while a chain of small products runs, then makes 3 MB: its host is so slow to issue the
    chain that the first tensor is gone by then, and a CUDA graph is not."""
    array = "bfloat16[64,64]"
    names = ["sent", *(f"small{number}" for number in range(20)), "made", "read", "far"]
    ops = [Op(name, "aten.mm", 2 * 64**3, 3 * 2**13, shapes=f"aten.mm {array} {array} > {array}") for name in names]
    chain = [Tensor(number, (number + 1,), 3_000_000 if number == 21 else 1) for number in range(22)]
    graph = Graph.build("sending", ops, [Tensor(0, (23,), 3_000_000), *chain])
    pins = [("far", "gpu1"), ("sent|small.*|made|read", "gpu0")]
    plan = place(graph, Cluster.parse(f"{CARDS}:eager"), pins=pins, budget="5sims", max_memory={"gpu0": "4MB"})
    eager = PlannedCandidate("pinned", plan)
    assert plan.peak_memory_bytes[0] == 3_000_002  # and what two small products make
    graphed = eager.run_by("cuda-graphs").plan
    assert graphed.peak_memory_bytes[0] == 6_000_001
    assert (plan.status, graphed.status) == ("ok", "infeasible")
    assert graphed.search is not None
    assert graphed.search.missing_bytes.tolist() == [2_000_001, 0]


def test_orders_are_candidates(tmp_path: Path) -> None:
    """Where plans are run in their order, placements come in others too, each a plan with its own prediction."""
    (tmp_path / "plain").mkdir()
    rows, known = placing(tmp_path, has_orders=True).candidates({}), placing(tmp_path / "plain").candidates({})
    assert not any(", " in row.name for row in known)
    ordered = {number: row for number, row in enumerate(rows) if ", " in row.name}
    assert len(rows) == len(known) + len(ordered) > len(known)
    for number, row in ordered.items():
        (sibling,) = (other for other in rows if other.placed == row.placed and other.name == row.name.split(", ")[0])
        assert sibling.key != row.key
        plan, other = (Plan.load(tmp_path / str(each) / "plan.json") for each in (number, rows.index(sibling)))
        assert np.array_equal(plan.placement, other.placement)
        assert any(map(np.any, map(np.not_equal, plan.order, other.order)))
        assert row.predicted_ns == plan.step_time_ns == time_ns(tmp_path / str(number), {})
