"""START HERE: the loop of `gdp tune`, and the log that it goes on from.

    candidates --the first ones, then by expected improvement--> measure --> log --> residual --.
        ^----------------------------------------------------------------------------------------'

The log has a line for each measurement, written and flushed before the next begins: a run that was killed goes on from
there and loses the measurement that ran."""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from gdp import files
from gdp.errors import InputError
from gdp.tune.measuring import OK, Measured
from gdp.tune.residual import Residual

FORMAT, VERSION = "gdp-tune", 1
LOG = "log.jsonl"
# relative: runs of one plan, one after the other, differ by more than the steps of a run; and on a busy machine the
# times of steps say nothing of others. Untuned
_LEAST_NOISE, _MOST_NOISE = 0.02, 0.1
# the fastest ones are measured again in turn before one is the answer: a machine's pace drifts, and of many noisy times
# the shortest is a lucky one. Untuned
_LEADERS, _ROUNDS = 3, 3


@dataclass(frozen=True, slots=True)
class LoggedCandidate:
    """A candidate in the head of a log; its plan is in the directory of its number."""

    name: str
    predicted_ns: int
    spread: float
    comes_first: bool
    traits: list[float]


@dataclass(frozen=True, slots=True)
class LoggedMeasurement:
    """A line of the log."""

    candidate: int
    before_ns: int  # predicted with the residual before it was measured
    after_ns: int  # and with it
    status: str
    step_ns: int | None
    noise: float | None
    reason: str
    seconds: float


@dataclass(eq=False)
class Tuning:
    """A run of `gdp tune` in a directory."""

    directory: Path
    question: Mapping[str, Any]  # by which a log is known again
    candidates: Sequence[LoggedCandidate]
    measurements: list[LoggedMeasurement] = field(default_factory=list)
    ended: str = ""  # why it ended, in words

    @classmethod
    def begin(cls, directory: Path, question: Mapping[str, Any], candidates: Sequence[LoggedCandidate]) -> "Tuning":
        """Writes the head of a log."""
        head = {"format": FORMAT, "version": VERSION, "question": question}
        head |= {"candidates": [asdict(each) for each in candidates]}
        files.write_bytes(directory / LOG, json.dumps(head).encode() + b"\n")
        return cls(directory, question, candidates)

    @classmethod
    def resume(cls, directory: Path, question: Mapping[str, Any]) -> "Tuning":
        """Reads a log, and cuts off a line that is not whole. InputError for one of another question."""
        path = directory / LOG
        lines = files.read_bytes(path).split(b"\n")
        try:
            head, *others = [json.loads(line) for line in lines[:-1]]
            files.require_header(head, FORMAT, VERSION)
            candidates = [LoggedCandidate(**each) for each in head["candidates"]]
            measurements = [LoggedMeasurement(**each) for each in others]
        except (ValueError, TypeError, KeyError, InputError) as error:
            raise InputError(f"{path}: is not a log of gdp tune ({error}); leave --resume out, or name --out") from None
        for name in sorted({*question, *head["question"]}):
            if head["question"].get(name) != question.get(name):
                raise InputError(f"{path}: was begun with another {name}; leave --resume out, or name another --out")
        files.write_bytes(path, b"\n".join([*lines[:-1], b""]))
        return cls(directory, question, candidates, measurements)

    @property
    def measured_ns(self) -> dict[int, float]:
        """The median of the measured times of each candidate; infinite of one that failed."""
        times_ns = defaultdict[int, list[float]](list)
        for each in self.measurements:
            times_ns[each.candidate].append(inf if each.step_ns is None else each.step_ns)
        return {number: float(np.median(times)) for number, times in times_ns.items()}

    @property
    def noise(self) -> float:
        """The relative deviation of a measurement."""
        known = [each.noise for each in self.measurements if each.noise is not None]
        return min(max(_LEAST_NOISE, float(np.median(known)) if known else 0.0), _MOST_NOISE)

    @property
    def residual(self) -> Residual:
        """The errors of predictions, by the measurements so far."""
        rows = self.candidates
        spread = max(each.spread for each in rows)
        return Residual.of([row.predicted_ns for row in rows], [row.traits for row in rows], spread, self.noise)

    @property
    def answer(self) -> int | None:
        """The fastest measured candidate; None where none ran."""
        ran = {number: time_ns for number, time_ns in self.measured_ns.items() if time_ns < inf}
        return min(ran, key=ran.__getitem__, default=None)

    def run(
        self,
        measure: Callable[[Path], Measured],
        *,
        most: int,
        ends_s: float,
        on_measured: Callable[[LoggedMeasurement], None],
    ) -> None:
        """Measures until no candidate is likely to be faster, `most` are measured, or it is `ends_s` by
        `time.monotonic`. An interrupt ends the measurement that runs."""
        while True:
            chosen = self._next()
            if chosen is None:
                self.ended = self.ended or "all candidates are measured"
            elif len(self.measurements) >= most:
                self.ended = f"{most} are measured"
            elif time.monotonic() >= ends_s:
                self.ended = "time is up"
            if chosen is None or self.ended:
                return
            before_ns, began = self._expected_ns(chosen), time.monotonic()
            found = measure(self.directory / str(chosen))
            seconds = time.monotonic() - began
            step_ns = round(found.step_ns) if found.status == OK else None
            line = LoggedMeasurement(
                chosen, before_ns, before_ns, found.status, step_ns, found.noise, found.reason, seconds
            )
            self.measurements.append(line)
            after_ns = self._expected_ns(chosen)
            self.measurements[-1] = LoggedMeasurement(**{**asdict(line), "after_ns": after_ns})
            self._append(self.measurements[-1])
            on_measured(self.measurements[-1])

    def _next(self) -> int | None:
        """Returns the candidate to measure; None, with the reason in `ended`, where there is none."""
        measured = self.measured_ns
        first = [number for number, each in enumerate(self.candidates) if each.comes_first and number not in measured]
        if first:
            return first[0]
        proposal = self.residual.proposal(measured)
        if proposal is not None and proposal.is_likely:
            return proposal.candidate
        if (leader := self._leader()) is None and proposal is not None:
            self.ended = f"no other is likely to be faster by more than {self.noise:.0%}"
        return leader

    def _leader(self) -> int | None:
        """Returns the one of the fastest candidates that was measured least; None where that was enough, or noise does
        not hide which is the fastest."""
        measured, counts = self.measured_ns, Counter(each.candidate for each in self.measurements)
        limit_ns = (1 + 2 * self.noise) * min(measured.values(), default=inf)
        leaders = [number for number, time_ns in measured.items() if time_ns <= limit_ns < inf]
        leaders = sorted(leaders, key=measured.__getitem__)[:_LEADERS]
        waiting = [number for number in leaders if counts[number] < _ROUNDS]
        return min(waiting, key=counts.__getitem__) if len(leaders) > 1 and waiting else None

    def _expected_ns(self, candidate: int) -> int:
        means, _ = self.residual.after(self.measured_ns)
        return round(float(np.exp(means[candidate])))

    def _append(self, line: LoggedMeasurement) -> None:
        path = self.directory / LOG
        try:
            with open(path, "ab") as file:
                file.write(json.dumps(asdict(line)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); --resume goes on from there") from None
