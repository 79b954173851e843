"""Benchmark `tunables`: what each number that tunes a search is good for.

A problem is placed with the settings as they are, which says the numbers that its search reads; then with these halved
and doubled. Several that move no plan together are taken to move none alone; else each half of them is tried (group
testing: Dorfman, 1943). A number that has moved enough plans is not tried on further problems; one that moves none of
any problem is not worth a name.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import model_configs
from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.rows import Rows
from benchmarks.workloads import model_of, workloads
from gdp.budget import Budget
from gdp.errors import InputError
from gdp.models.papers import PAPERS
from gdp.models.source import ModelSource
from gdp.planning.warm_up import warm_up
from gdp.search.place import place
from gdp.search.settings import DEFAULTS, Settings

HF = "hf:"  # prefix of published configs
LAYOUT_MODELS = (
    *("rnnlm-2", "gnmt-4", "transformer-xl-2", "inception-v3-b64", "wavenet-2x9", "moe", "resnet-101", "unet-256"),
    *("bert-large", "clip-b16", "deepspeech2", "hf:gpt2", "hf:vit-base", "hf:t5-base", "hf:deepseek-v2-lite"),
)
LAYOUT_MACHINES = ("4xa100-sxm-40g", "rtx4090-24g+2xl4-24g")
OTHERS = (  # models and machines on which no number was chosen
    ("llama-1b", "2xrtx3090-24g+cpu-16core"),
    ("tree-lstm", "3xl4-24g"),
    ("elmo", "rtx4090-24g+l4-24g"),
    ("dlrm", "2xrtx3090-24g+cpu-16core"),
    ("nasnet-a", "2x(2xl4-24g)@25gbit"),
    ("efficientnet-b4", "8xp100-pcie-16g"),
    ("retinanet-50", "3xv100-sxm-32g"),
    ("densenet-121", "rtx4090-24g+3xrtx3090-24g"),
    ("hf:bert-base", "6xl4-24g"),
    ("hf:sd-1.5-unet", "2xrtx4090-24g+l4-24g"),
)
HALF, DOUBLE = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class TunedProblem:
    """A model on devices, whose ops are placed, or whose batch is cut too."""

    model: str
    devices: str
    parallel: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.model} on {self.devices}" + (" (ops)" if self.parallel == "none" else "")


PROBLEMS = (
    *(TunedProblem(name, workloads.get(name).cluster, "none") for name in PAPERS.names()),
    *(TunedProblem(model, devices) for model in LAYOUT_MODELS for devices in LAYOUT_MACHINES),
    *(TunedProblem(model, devices) for model, devices in OTHERS),
)


@dataclass(frozen=True, kw_only=True)
class TunablesBenchmark(Benchmark):
    """Each problem with its numbers, and with each of those that it reads halved and doubled; equal simulations."""

    name = "tunables"
    budget: Budget = field(default_factory=lambda: Budget(simulations=100))
    problems: tuple[str, ...] = tuple(problem.name for problem in PROBLEMS)
    numbers: tuple[str, ...] = ("all",)  # beginnings of their names, such as layouts.
    enough: int = 1  # plans that a number moves, after which it is not tried on further problems

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "problem", self.problems, [problem.name for problem in PROBLEMS])
        if self.budget.seconds is not None:
            raise InputError(f"{self.name}: budget is {self.budget}; a number such as 100sims is expected")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        warm_up()
        ratios: dict[tuple[str, float], list[float]] = defaultdict(list)
        moved: dict[str, set[str]] = defaultdict(set)
        readers: dict[str, set[str]] = defaultdict(set)
        tried: dict[str, set[str]] = defaultdict(set)
        for problem in [problem for problem in PROBLEMS if problem.name in self.problems]:
            usual = self._row(rows, problem, "usual", partial(self._traced, problem, rows))
            for number in usual["reads"]:
                readers[number].add(problem.name)
            numbers = [
                number for number in usual["reads"] if self._is_asked(number) and len(moved[number]) < self.enough
            ]
            for factor in (HALF, DOUBLE):
                for number, made in self._made(rows, problem, usual, numbers, factor):
                    tried[number].add(problem.name)
                    if made["plan"] != usual["plan"]:
                        moved[number].add(problem.name)
                    if made["status"] == usual["status"] == "ok":
                        ratios[number, factor].append(made["step_time_ns"] / usual["step_time_ns"])
            say(f"{problem.name}: {usual['step_time_ns'] / 1e6:.1f} ms, {len(usual['reads'])} numbers read")
        numbers = [
            {
                "name": number,
                "value": _shown(_value(DEFAULTS, number)),
                "num_read": len(readers[number]),
                "num_tried": len(tried[number]),
                "num_moved": len(moved[number]),
                "half": _mean(ratios[number, HALF]),
                "double": _mean(ratios[number, DOUBLE]),
                "best": min([*ratios[number, HALF], *ratios[number, DOUBLE]], default=None),
                "worst": max([*ratios[number, HALF], *ratios[number, DOUBLE]], default=None),
            }
            for number in all_numbers()
            if self._is_asked(number)
        ]
        return {"numbers": numbers, "num_problems": len(self.problems), "enough": self.enough}

    def _made(
        self, rows: Rows, problem: TunedProblem, usual: dict[str, Any], numbers: Sequence[str], factor: float
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields each of `numbers` that can be scaled, and the row of the plan with it."""
        changed = scaled(numbers, factor)
        if changed == DEFAULTS or (changed is None and len(numbers) == 1):
            return
        row = usual
        if changed is not None:
            name = numbers[0] if len(numbers) == 1 else sha256(" ".join(numbers).encode()).hexdigest()[:16]
            row = self._row(rows, problem, f"{name}-{factor:g}", partial(self._placed, problem, changed, rows))
        if changed is not None and (len(numbers) == 1 or row["plan"] == usual["plan"]):
            yield from ((number, row) for number in numbers if scaled([number], factor) not in (None, DEFAULTS))
            return
        middle = len(numbers) // 2
        yield from self._made(rows, problem, usual, numbers[:middle], factor)
        yield from self._made(rows, problem, usual, numbers[middle:], factor)

    def _is_asked(self, number: str) -> bool:
        return self.numbers == ("all",) or number.startswith(self.numbers)

    def _row(self, rows: Rows, problem: TunedProblem, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return rows.row(f"{problem.name}-{what}", {"budget": str(self.budget)}, make)

    def _traced(self, problem: TunedProblem, rows: Rows) -> dict[str, Any]:
        reads: set[str] = set()
        return {**self._placed(problem, traced(DEFAULTS, reads), rows), "reads": sorted(reads)}

    def _placed(self, problem: TunedProblem, settings: Settings, rows: Rows) -> dict[str, Any]:
        plan = place(
            source_of(problem.model, rows.directory / "configs"),
            problem.devices,
            parallel=problem.parallel,
            budget=self.budget,
            num_threads=1,
            settings=settings,
        )
        digest = sha256(plan.graph.encode() + plan.placement.tobytes())
        for ops in plan.order:
            digest.update(ops.tobytes())
        return {"status": plan.status, "step_time_ns": plan.step_time_ns, "plan": digest.hexdigest()}


@cache
def source_of(model: str, directory: Path) -> ModelSource:
    """Returns the model; a published config is written to `directory`."""
    if model.startswith(HF):
        return ModelSource(model_configs.write_model(model.removeprefix(HF), directory))
    return ModelSource(model_of(model))


def all_numbers() -> Iterator[str]:
    """Yields the names of all numbers in the settings, such as `ops.slow_share`."""
    for room in fields(DEFAULTS):
        for item in fields(getattr(DEFAULTS, room.name)):
            yield f"{room.name}.{item.name}"


def scaled(numbers: Iterable[str], factor: float) -> Settings | None:
    """Returns the settings with `numbers`, of tuples all items, times `factor`; None where they do not allow that.

    Counts stay at least 1, and what is at most 1, a share or a probability, stays so.
    """
    changes: dict[str, dict[str, Any]] = defaultdict(dict)
    for number in numbers:
        room, _, name = number.partition(".")
        value = _value(DEFAULTS, number)
        changes[room][name] = (
            tuple(_scaled(item, factor) for item in value) if isinstance(value, tuple) else _scaled(value, factor)
        )
    try:
        return replace(
            DEFAULTS, **{room: replace(getattr(DEFAULTS, room), **values) for room, values in changes.items()}
        )
    except ValueError:  # a record knows better
        return None


def traced(settings: Settings, reads: set[str]) -> Settings:
    """Returns equal settings that add the name of each number that is read to `reads`."""

    def watched(record: Any, room: str) -> Any:
        names = {item.name for item in fields(record)}
        kind = type(record)

        def read(self: Any, name: str) -> Any:
            if name in names:
                reads.add(f"{room}.{name}")
            return object.__getattribute__(self, name)

        values = {name: getattr(record, name) for name in names}
        spy = type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": read})
        other = spy(**values)
        reads.clear()  # of checks of the record
        return other

    rooms = {item.name: getattr(settings, item.name) for item in fields(settings)}
    watching = {room: watched(record, room) for room, record in rooms.items() if is_dataclass(record)}
    return replace(settings, **watching)


def _scaled(value: Any, factor: float) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, tuple):
        return tuple(_scaled(item, factor) for item in value)
    if isinstance(value, int):
        return max(1, round(value * factor))
    return min(1.0, value * factor) if value <= 1 else value * factor


def _value(settings: Settings, number: str) -> Any:
    room, _, name = number.partition(".")
    return getattr(getattr(settings, room), name)


def _shown(value: Any) -> str:
    return ", ".join(map(_shown, value)) if isinstance(value, tuple) else f"{value:g}" if value is not None else "-"


def _mean(ratios: list[float]) -> float | None:
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None
