"""Plans for a range of machines, batches or micro-batches: `--sweep devices=1..8`, `batch=1..256`, `machines=A,B`.

values --> the question of `place` for each --answer--> plan --'
                                                                '--> the better one is the row
rows before whose devices a machine has, too  --replay there--> plan --'"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gdp.bounds.layout_bound import layout_bound
from gdp.budget import Clock
from gdp.cluster import Cluster
from gdp.cluster.prices import UNKNOWN, Price
from gdp.errors import InputError
from gdp.graph.microbatches import MAX_MICROBATCHES
from gdp.parallel.layout import Layout
from gdp.planning.advice import carried, plan_on
from gdp.search.place import answer
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import Solution
from gdp.simulator.plan import Plan

DEVICES, BATCH, MACHINES, MICROBATCHES = "devices", "batch", "machines", "microbatches"
_MOST_VALUES = 64
_MOST = {MICROBATCHES: MAX_MICROBATCHES, BATCH: 2**31 - 1}
_EXAMPLES = f"{DEVICES}=1..8, {BATCH}=1..256, {MACHINES}=2xl40s-48g,4xrtx5090-32g or {MICROBATCHES}=1,2,4,8"


@dataclass(frozen=True, slots=True)
class Sweep:
    """The quantity that is varied, and its values: numbers in ascending order, machines as they are given."""

    what: str  # devices, batch, machines, microbatches
    values: tuple[int, ...] | tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """`devices=1..8`, `batch=1..256` in powers of two, `machines=A,B`. InputError says what is expected."""
        what, _, listed = (part.strip() for part in text.partition("="))
        values: list[int] | list[str]
        if what == MACHINES and listed:
            values = [name.strip() for name in listed.split(",")]
            if "" in values:
                raise InputError(f"--sweep {text}: a name between commas is missing; name each machine as in --devices")
        elif what in (DEVICES, BATCH, MICROBATCHES) and (match := re.fullmatch(r"([0-9]+)\.\.([0-9]+)", listed)):
            low, high = (int(number[:10]) for number in match.groups())
            if low > high:
                raise InputError(f"--sweep {text}: {low} is more than {high}; give the smaller number first")
            if what == BATCH:
                values = [low, *(2**power for power in range(low.bit_length(), high.bit_length()) if 2**power > low)]
            elif high - low >= _MOST_VALUES:
                raise InputError(
                    f"--sweep {text}: these are {high - low + 1} values; at most {_MOST_VALUES} are placed"
                )
            else:
                values = list(range(low, high + 1))
        elif what in (DEVICES, BATCH, MICROBATCHES) and re.fullmatch(r"[0-9]+(?:,[0-9]+)*", listed):
            values = sorted(int(value[:10]) for value in listed.split(","))
        else:
            raise InputError(f"--sweep is {text!r}; {_EXAMPLES}, for instance, is expected")
        if len(set(values)) < len(values):
            raise InputError(f"--sweep {text}: a value is there twice; name each once")
        numbers = [value for value in values if isinstance(value, int)]
        most = _MOST.get(what)
        if numbers and (numbers[0] < 1 or (most is not None and numbers[-1] > most)):
            raise InputError(f"--sweep {text}: at least 1{'' if most is None else f' and at most {most}'} is expected")
        return cls(what, tuple(values))  # type: ignore[arg-type]  # all are of one type

    def check(self, cluster: Cluster) -> None:
        """InputError if more devices are asked for than there are."""
        if self.what == DEVICES and (most := int(self.values[-1])) > cluster.num_devices:
            raise InputError(
                f"--sweep {DEVICES}: {most} are asked for, {cluster.name!r} has {cluster.num_devices}; "
                f"name {most} in --devices"
            )


@dataclass(frozen=True, eq=False)
class SweepRow:
    """The plan of one value."""

    value: int | str
    plan: Plan | None = None
    bound_ns: int = 0  # no plan of this row takes less
    note: str = ""  # why there is no plan
    same_as: int | str | None = None  # the value whose plan was better here than what was found
    price: Price = UNKNOWN
    first_token_ns: int | None = None  # of one prompt, with layers where the plan of a decoder has them
    work: int = 0  # the samples or tokens of a step; 0: not known
    graph: str = ""  # the fingerprint of the whole step
    num_devices: int = 0  # that there are
    is_written: bool = True  # where there is a plan that fits

    @property
    def is_ok(self) -> bool:
        """True if there is a plan that fits."""
        return self.plan is not None and self.plan.status == "ok"

    @property
    def step_time_ns(self) -> int | None:
        """The step time; None where nothing fits."""
        return self.plan.step_time_ns if self.plan is not None and self.is_ok else None

    @property
    def per_second(self) -> float | None:
        """The samples or tokens per second, or steps where a step's are not known."""
        return (self.work or 1) * 1e9 / max(self.step_time_ns, 1) if self.step_time_ns is not None else None

    @property
    def layout(self) -> str:
        """The layout as `--parallel` takes it; "" for op placement."""
        return "" if self.plan is None or self.plan.layout is None else str(Layout.of_document(self.plan.layout))


def place_row(
    value: int | str,
    question: PlaceQuestion,
    earlier: Sequence[SweepRow],
    clock: Clock,
    find: Callable[[PlaceQuestion, Clock], Solution] = answer,
) -> SweepRow:
    """Returns the answer of `place` to `question`, or the plan of one of the rows `earlier` where that is better.
    `find` finds the answer of a tool in place of that of `place`."""
    solution = find(question, clock)
    plan = solution.plan
    assert plan is not None
    bound_ns, graph = plan.lower_bound_ns if question.parts is None else solution.bound_ns, question.graph.fingerprint
    if question.parts is None and question.degrees:  # plans of ops and of groups were looked at
        bound_ns = layout_bound({1: question.graph}, question.cluster)
    row = SweepRow(value, plan, bound_ns, graph=graph)
    for other in earlier:
        is_faster = other.is_ok and not (row.is_ok and (other.step_time_ns or 0) >= plan.step_time_ns)
        if other.plan is None or not is_faster or other.graph != graph:
            continue
        step = carried(other.plan, question.cluster, question.constraints)
        if step is not None and step.feasible and not (row.is_ok and step.step_time_ns >= plan.step_time_ns):
            plan = plan_on(step, other.plan)
            row = replace(row, plan=plan, same_as=other.value)
    return row
