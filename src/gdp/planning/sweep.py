"""Plans for a range of machines or of micro-batches: `--sweep devices=1..8`, `--sweep microbatches=1..16`."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gdp.budget import Budget, Clock
from gdp.cluster import Cluster, changes
from gdp.errors import InputError, UnevenBatchError
from gdp.graph import Graph
from gdp.graph.microbatches import MAX_MICROBATCHES
from gdp.parallel.layout import NONE
from gdp.search.candidate import Candidate
from gdp.search.place import answer
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import replay

DEVICES, MICROBATCHES = "devices", "microbatches"
_MOST_VALUES = 64


@dataclass(frozen=True, slots=True)
class Sweep:
    """The quantity that is varied, and its values in ascending order."""

    what: str  # devices, microbatches
    values: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """`devices=1..8` or `microbatches=1,2,4`. InputError says what is expected."""
        match = re.fullmatch(rf"({DEVICES}|{MICROBATCHES})=([0-9]+)\.\.([0-9]+)", text.strip())
        listed = re.fullmatch(rf"({DEVICES}|{MICROBATCHES})=([0-9]+(?:,[0-9]+)*)", text.strip())
        if match is None and listed is None:
            raise InputError(f"--sweep is {text!r}; devices=1..8 or microbatches=1,2,4,8, for instance, is expected")
        if match is not None:
            what, low, high = match[1], int(match[2][:9]), int(match[3][:9])
            if low > high:
                raise InputError(f"--sweep {text}: {low} is more than {high}; give the smaller number first")
            if high - low >= _MOST_VALUES:
                raise InputError(
                    f"--sweep {text}: these are {high - low + 1} values; at most {_MOST_VALUES} are placed"
                )
            values: Sequence[int] = range(low, high + 1)
        else:
            assert listed is not None
            what, values = listed[1], [int(value[:9]) for value in listed[2].split(",")]
            if len(set(values)) < len(values):
                raise InputError(f"--sweep {text}: a value is there twice; name each once")
        most = MAX_MICROBATCHES if what == MICROBATCHES else None
        if min(values) < 1 or (most is not None and max(values) > most):
            raise InputError(f"--sweep {text}: at least 1{'' if most is None else f' and at most {most}'} is expected")
        return cls(what, tuple(sorted(values)))

    def check(self, cluster: Cluster) -> None:
        """InputError if more devices are asked for than there are."""
        if self.what == DEVICES and self.values[-1] > cluster.num_devices:
            raise InputError(
                f"--sweep {DEVICES}: {self.values[-1]} are asked for, {cluster.name!r} has {cluster.num_devices}; "
                f"name {self.values[-1]} in --devices"
            )


@dataclass(frozen=True, eq=False)
class SweepRow:
    """The plan of one value."""

    value: int
    graph: Graph | None
    cluster: Cluster | None
    plan: Plan | None
    note: str = ""  # why there is no plan

    @property
    def is_ok(self) -> bool:
        """True if there is a plan that fits."""
        return self.plan is not None and self.plan.status == "ok"


def sweep_devices(
    graph: Graph,
    cluster: Cluster,
    counts: Sequence[int],
    constraints: Constraints,
    *,
    budget: Budget,
    options: SearchOptions | None = None,
    stop: threading.Event | None = None,
) -> Iterator[SweepRow]:
    """Yields a plan for the first 1, 2, ... of the cluster's devices, for each of ascending `counts`.

    Each search has the whole `budget`, and begins from the plan before it too.
    """
    options, stop = options or SearchOptions(), stop or threading.Event()  # which Ctrl-C sets, too
    Sweep(DEVICES, tuple(counts)).check(cluster)
    Problem.build(graph, cluster, constraints)  # what is wrong with constraints is wrong for all values
    starts: list[Candidate] = []
    for count in counts:
        part = changes.first(cluster, count)
        within = constraints.within(part)
        if gone := sorted({device for _, device in constraints.pins} - {device.name for device in part.devices}):
            yield SweepRow(count, graph, part, None, f"a pin asks for {', '.join(gone)}")
            continue
        question = PlaceQuestion.of(graph, part, within, NONE, None, replace(options, starts=starts))
        plan = answer(question, Clock(budget, stop=stop)).plan
        assert plan is not None
        starts = [Candidate.start(replay(question.problem, plan))]
        yield SweepRow(count, graph, part, plan)
        if stop.is_set():
            return


def sweep_microbatches(
    read: Callable[[int], Graph],
    cluster: Cluster,
    counts: Sequence[int],
    constraints: Constraints,
    *,
    budget: Budget,
    options: SearchOptions | None = None,
    stop: threading.Event | None = None,
) -> Iterator[SweepRow]:
    """Yields a plan for the graph that `read` gives for each of `counts` micro-batches, found in the whole `budget`.

    Numbers into which the batch cannot be split have a note in place of a plan.
    """
    options, stop = options or SearchOptions(), stop or threading.Event()  # which Ctrl-C sets, too
    for count in counts:
        try:
            graph = read(count)
        except UnevenBatchError as error:
            yield SweepRow(count, None, cluster, None, str(error))
            continue
        question = PlaceQuestion.of(graph, cluster, constraints, NONE, None, options)
        yield SweepRow(count, graph, cluster, answer(question, Clock(budget, stop=stop)).plan)
        if stop.is_set():
            return
