"""Budgets of a search: seconds, or a number of simulations, which makes an answer reproducible; what work takes."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from math import inf

from gdp.errors import InputError

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Budget:
    """Exactly one of `seconds` and `simulations`."""

    seconds: float | None = None
    simulations: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.simulations is None):
            raise InputError("budget: give either seconds or simulations")
        if self.seconds is not None and not 0 <= self.seconds < 1e9:
            raise InputError(f"budget is {self.seconds} seconds; a time from 0 to 10^9 s is expected")
        if self.simulations is not None and self.simulations < 0:
            raise InputError(f"budget is {self.simulations} simulations; at least 0 is expected")

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Reads `30s`, `2m`, `1.5h`, `500ms` or `20000sims`."""
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|min|m|h|sims)", text.strip())
        if match is None:
            raise InputError(f"budget is {text!r}; a time such as 30s or 2m, or a count such as 20000sims, is expected")
        number, unit = match.groups()
        if unit == "sims":
            if "." in number:
                raise InputError(f"budget is {text!r}; simulations come in whole numbers, such as 20000sims")
            return cls(simulations=int(number))
        return cls(seconds=float(number) * _SECONDS[unit])

    @classmethod
    def parse_time(cls, text: str) -> "Budget":
        """Reads a time as `parse` does; refuses a number of simulations."""
        if re.fullmatch(r"[0-9.]+(ms|s|min|m|h)", text.strip()) is None:
            raise InputError(f"budget is {text!r}; a time such as 30s or 2m is expected")
        return cls.parse(text)

    @classmethod
    def of(cls, value: "Budget | str | float") -> "Budget":
        """Returns `value`; text is parsed, and a number is seconds."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(seconds=float(value))
        raise InputError(f"budget is {value!r}; seconds such as 30, or text such as 30s or 20000sims, are expected")

    def part(self, share: float) -> "Budget":
        """Returns a `share` of the budget."""
        if self.simulations is not None:
            return Budget(simulations=int(self.simulations * share))
        return Budget(seconds=(self.seconds or 0.0) * share)

    def __str__(self) -> str:
        return f"{self.simulations}sims" if self.seconds is None else f"{self.seconds:g}s"


@dataclass(slots=True)
class Pace:
    """The time that one kind of work takes for each op of a step, as it was for the largest step so far."""

    op_us: float  # at first a guess
    num_ops: int = 0  # of the step that it was measured on; 0: none was

    def seconds(self, num_ops: int) -> float:
        """Returns about how long the work takes for a step of `num_ops`."""
        return 1e-6 * self.op_us * num_ops

    @contextlib.contextmanager
    def measured(self, num_ops: int, clock: "Clock | None") -> Iterator[None]:
        """Measures the work of the block, on a step of `num_ops`, by `clock`; without a clock, by that of the wall."""
        timer = time.monotonic if clock is None else lambda: clock.seconds
        began = timer()
        yield
        if num_ops >= self.num_ops:
            self.num_ops, self.op_us = num_ops, 1e6 * (timer() - began) / num_ops


@dataclass(slots=True, eq=False)
class Effort:
    """The time that work takes on this machine, learned as it goes: an estimate for each op of a step. First guesses,
    in us an op, are of one core of a Xeon at 2.5 GHz (`python -m benchmarks scale`)."""

    read_kept: Pace = field(default_factory=lambda: Pace(10.0))  # a step from the cache
    estimate: Pace = field(default_factory=lambda: Pace(15.0))  # a replica's step
    simulate: Pace = field(default_factory=lambda: Pace(15.0))  # a step is cut, and simulated in several orders
    close: Pace = field(default_factory=lambda: Pace(8.0))  # bound, fingerprint and replay of the answer, plan file
    write_plan: Pace = field(default_factory=lambda: Pace(3.0))  # replay of a plan, and its file
    write_graph: Pace = field(default_factory=lambda: Pace(1.0))
    write_report: Pace = field(default_factory=lambda: Pace(8.0))

    def written_s(self, num_ops: int, *, has_graph: bool = False, has_report: bool = False) -> float:
        """Returns about how long it takes to write the plan of a step of `num_ops`, with its graph and its report."""
        paces = [self.write_plan, *([self.write_graph] * has_graph), *([self.write_report] * has_report)]
        return sum(pace.seconds(num_ops) for pace in paces)


PREPARED, REPLAYED = 20, 4  # simulations that take as long as to prepare a search, and to replay its answer
PLACERS_LATE_S = 0.5  # that placers may take after the time, all together: those that take milliseconds run always
REPLAYS_LATE_S = 0.2  # the same for replays of the answer under noise
ORDERS_LATE_S = 0.1  # the same for further priorities of a search's cycle
_LATE_SHARE, _LATE_S = 0.1, 0.5  # that a command may take longer than its budget


def search_s(total_s: float, spent_s: float, last_s: float) -> float:
    """Returns the seconds of `total_s` for a search after `spent_s`, before `last_s`: half of it at least."""
    return max(total_s - spent_s - last_s, total_s / 2)


def latest_s(total_s: float) -> float:
    """Returns the seconds after the begin of a budget of `total_s` by which all files are to be written."""
    return (1 + _LATE_SHARE) * total_s + _LATE_S


@dataclass(slots=True, eq=False)
class _Meter:
    """The total that all parts of a clock have spent."""

    timer: Callable[[], float]
    started: float
    simulations: int = 0
    effort: Effort = field(default_factory=Effort)


class Clock:
    """Spends a budget: seconds pass by themselves, simulations are counted by `spend`. A clock splits itself: `part`
    and `until` return clocks that end earlier. All of them count together, and share `stop`, an event that ends them at
    once (Ctrl-C) and may be set from another thread."""

    def __init__(
        self, budget: Budget | None, *, stop: threading.Event | None = None, timer: Callable[[], float] = time.monotonic
    ) -> None:
        """None never ends. `timer` returns seconds: of the wall by default, of the processor with `process_time`."""
        self.stop = stop or threading.Event()
        self._meter = _Meter(timer, timer())
        simulations, seconds = (None, inf) if budget is None else (budget.simulations, budget.seconds)
        self._counts = simulations is not None
        self._begin, self._end = 0.0, float((seconds if simulations is None else simulations) or 0.0)

    @classmethod
    def of(cls, value: "Clock | Budget | str | float", *, stop: threading.Event | None = None) -> "Clock":
        """Returns `value` if it is a clock, else one that begins now with the budget `value`."""
        return value if isinstance(value, Clock) else cls(Budget.of(value), stop=stop)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the whole clock."""
        return self._meter.timer() - self._meter.started

    @property
    def simulations(self) -> int:
        """Simulations spent by all parts of the clock."""
        return self._meter.simulations

    @property
    def effort(self) -> Effort:
        """The time that work takes, as all parts of the clock have learned it."""
        return self._meter.effort

    @property
    def seconds_left(self) -> float | None:
        """Seconds left; None when the budget counts simulations."""
        return None if self._counts else max(self._end - self.seconds, 0.0)

    @property
    def simulations_left(self) -> int | None:
        """Simulations left; None when the budget is a time."""
        return max(int(self._end) - self.simulations, 0) if self._counts else None

    @property
    def rest(self) -> Budget:
        """The budget that is left."""
        return Budget(seconds=self.seconds_left, simulations=self.simulations_left)

    @property
    def share_spent(self) -> float:
        """Share of this clock's own budget that is spent."""
        return min((self._spent - self._begin) / max(self._end - self._begin, 1e-9), 1.0)

    @property
    def is_up(self) -> bool:
        """True when nothing is left, or after `stop`."""
        return self.stop.is_set() or self._spent >= self._end

    def has(self, seconds: float) -> bool:
        """Returns whether `seconds` are left; always, when the budget counts simulations."""
        return not self.stop.is_set() and (self._counts or self._end - self.seconds >= seconds)

    def before(self, seconds: float) -> "Clock":
        """Returns a clock that ends `seconds` earlier; the same, when the budget counts simulations."""
        return self if self._counts else self._between(self._begin, max(self._end - seconds, self._begin))

    def at_least(self, seconds: float) -> "Clock":
        """Returns a clock that ends with this one, but not before `seconds` from now; `stop` ends it, too."""
        return self if self._counts else self._between(self._begin, max(self._end, self._spent + seconds))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the whole clock in the block: what it does comes on top."""
        began = self.seconds
        try:
            yield
        finally:
            self._meter.started += self.seconds - began

    def spend(self, num_simulations: int) -> None:
        """Counts simulations that were made."""
        self._meter.simulations += num_simulations

    def at_most(self, num_simulations: int) -> int:
        """Returns `num_simulations`, or the number that is left if that is lower."""
        left = self.simulations_left
        return num_simulations if left is None else min(num_simulations, left)

    def part(self, share: float = 1.0) -> "Clock":
        """Returns a clock that begins now and may spend `share` of what is left."""
        left = max(self._end - self._spent, 0.0)
        return self._between(self._spent, self._spent + share * left)

    def until(self, share: float) -> "Clock":
        """Returns a clock with the same beginning that ends when `share` of this clock's budget is spent."""
        return self._between(self._begin, self._begin + share * (self._end - self._begin))

    @property
    def _spent(self) -> float:
        return float(self.simulations) if self._counts else self.seconds

    def _between(self, begin: float, end: float) -> "Clock":
        clock = copy(self)
        clock._begin, clock._end = begin, end
        return clock


def has_time(clock: Clock | None, seconds: float = 0.0) -> bool:
    """Returns whether `clock` has `seconds` left; always, without a clock."""
    return clock is None or clock.has(seconds)
