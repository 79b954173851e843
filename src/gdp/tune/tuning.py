"""START HERE: the loop of `gdp tune`, and the log that it goes on from.

    candidates --the first ones, then by expected improvement--> measure --> log --> machine and residual --.
        ^---------------------------- placed anew where none is likely to be faster -----------------------'

The log has a line for each measurement, and for candidates that were placed anew, written and flushed before the next
measurement begins: a run that was killed goes on from there and loses the measurement that ran. M measurements, P
numbers of the machine."""

import contextlib
import fcntl
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdp import files
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.planning.machine_fit import MachineFit, Number, fit_slopes, priors_of
from gdp.tune.measuring import FAILED, NO_TIME, OK, TIMED_OUT, Measured
from gdp.tune.residual import Residual

if TYPE_CHECKING:
    from gdp.tune.placing import Placing

FORMAT, VERSION = "gdp-tune", 3
LOG = "log.jsonl"
# relative: runs of one plan, one after the other, differ by more than the steps of a run; and on a busy machine the
# times of steps say nothing of others. Untuned
_LEAST_NOISE, _MOST_NOISE = 0.02, 0.1
# the fastest ones are measured again in turn before one is the answer: a machine's pace drifts, and of many noisy times
# the shortest is a lucky one. In a simulated loop of 30 candidates with a noise of 3 % and a drift of 5 % the regret is
# 1.3 % in place of 2.0 %, after 10 measurements in place of 7; with 4 leaders, or 5 rounds, about the same
_LEADERS, _ROUNDS = 3, 3
_SAID = {"model": "MODEL", "graph": "content of MODEL", "machine": "content of DEVICES"}  # what a log is known by
_ALIKE = 5  # first plans that fail in one way, and no other is tried. Untuned
_DRIFTS = 4  # deviations of noise by which two times of one plan differ where the machine's pace changed. Untuned


@dataclass(frozen=True, slots=True)
class LoggedCandidate:
    """A candidate in the head of a log; its plan is in the directory of its number."""

    name: str
    predicted_ns: int
    spread: float
    comes_first: bool
    traits: list[float]
    key: str = ""  # by which it is known again
    slopes: list[float] = field(default_factory=list)  # [P] of the logarithm of its time in those of the numbers
    environment: dict[str, str] = field(default_factory=dict)  # of the command
    placed: str = ""  # equal for those that differ in the order of ops alone
    step_kind: str = ""  # whose range its time narrows
    files: list[str] = field(default_factory=list)  # in its directory, but for what a command writes


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


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Measures inside, and no other run does in this directory. InputError where one does."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror}); name another --out") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise InputError(
            f"{directory}: another gdp tune measures there; wait for its end, or name another --out"
        ) from None
    try:
        yield
    finally:
        os.close(held)


@dataclass(eq=False)
class Tuning:
    """A run of `gdp tune` in a directory."""

    directory: Path
    question: Mapping[str, Any]  # by which a log is known again
    candidates: list[LoggedCandidate]
    numbers: Sequence[Number] = ()  # of the machine
    measurements: list[LoggedMeasurement] = field(default_factory=list)
    placed_after: int = 0  # measurements, when candidates were placed last
    ended: str = ""  # why it ended, in words

    @classmethod
    def begin(
        cls,
        directory: Path,
        question: Mapping[str, Any],
        candidates: Sequence[LoggedCandidate],
        numbers: Sequence[Number] = (),
    ) -> "Tuning":
        """Writes the head of a log."""
        head = {"format": FORMAT, "version": VERSION, "question": question, "numbers": numbers}
        head |= {"candidates": [asdict(each) for each in candidates]}
        files.write_bytes(directory / LOG, json.dumps(head).encode() + b"\n")
        return cls(directory, question, [*candidates], numbers)

    @classmethod
    def resume(cls, directory: Path, question: Mapping[str, Any], most_s: float = 0) -> "Tuning":
        """Reads a log, and cuts off a line that is not whole. Plans that were ended sooner than after `most_s` may be
        measured again. InputError for one of another question."""
        path = directory / LOG
        lines = files.read_bytes(path).split(b"\n")
        try:
            head, *others = [json.loads(line) for line in lines[:-1]]
            files.require_header(head, FORMAT, VERSION)
            rows = [LoggedCandidate(**each) for each in head["candidates"]]
            tuning = cls(directory, question, rows, [(kind, what) for kind, what in head["numbers"]])
            for line in others:
                if "candidates" in line:
                    tuning.candidates += [LoggedCandidate(**each) for each in line["candidates"]]
                    tuning.placed_after = line["placed_after"]
                elif line["status"] != TIMED_OUT or line["seconds"] >= most_s:
                    tuning.measurements.append(LoggedMeasurement(**line))
        except (ValueError, TypeError, KeyError, InputError) as error:
            raise InputError(f"{path}: is not a log of gdp tune ({error}); name another --out") from None
        now, then = ({**each, **each.get("options", {}), "options": None} for each in (question, head["question"]))
        for name in sorted({*now, *then}):
            if then.get(name) != now.get(name):
                option = _SAID.get(name, f"--{name.replace('_', '-')}")
                raise InputError(f"{path}: was begun with another {option}; take that again, or name another --out")
        files.write_bytes(path, b"\n".join([*lines[:-1], b""]))
        return tuning

    @property
    def measured_ns(self) -> dict[int, float]:
        """The median of the measured times of each candidate; infinite of one that failed more often than not."""
        medians = dict[int, float]()
        for number, times_ns in self._times_ns().items():
            ran = [time_ns for time_ns in times_ns if time_ns < inf]
            medians[number] = float(np.median(ran)) if 2 * len(ran) >= len(times_ns) else inf
        return medians

    def _times_ns(self, after: int | None = None) -> dict[int, list[float]]:
        times_ns = defaultdict[int, list[float]](list)
        for each in self.measurements[:after]:
            times_ns[each.candidate].append(inf if each.step_ns is None else each.step_ns)
        return times_ns

    @property
    def noise(self) -> float:
        """The relative deviation of a measurement."""
        known = [each.noise for each in self.measurements if each.noise is not None]
        return min(max(_LEAST_NOISE, float(np.median(known)) if known else 0.0), _MOST_NOISE)

    @property
    def residual(self) -> Residual:
        """The errors of predictions, by the measurements so far, those of the machine's numbers among them."""
        rows = self.candidates
        spread = max(each.spread for each in rows)
        moves = self._slopes(range(len(rows))) * priors_of(self.numbers)
        times_ns, traits, placed = zip(*((row.predicted_ns, row.traits, row.placed) for row in rows), strict=True)
        return Residual.of(times_ns, traits, spread, self.noise, moves, placed)

    def machine(self, cluster: Cluster, after: int | None = None) -> MachineFit:
        """Returns what the first measurements, `after` as many or all, say of the numbers of `cluster`."""
        ran = {number: float(np.median(times)) for number, times in self._times_ns(after).items() if max(times) < inf}
        ratios = np.log([self.candidates[number].predicted_ns / time_ns for number, time_ns in ran.items()])
        kinds = [self.candidates[number].step_kind for number in ran]
        return fit_slopes(cluster, self.numbers, ratios, self._slopes([*ran]), kinds)

    def _slopes(self, candidates: Sequence[int]) -> npt.NDArray[np.float64]:
        """[N, P] Returns how the times of these candidates follow the numbers."""
        rows = [self.candidates[number].slopes for number in candidates]
        return np.array(rows, float).reshape(len(rows), len(self.numbers))

    @property
    def answer(self) -> int | None:
        """The fastest measured candidate, where noise hides which the one that is also predicted to be; None where none
        ran."""
        ran = {number: time_ns for number, time_ns in self.measured_ns.items() if time_ns < inf}
        return self.residual.answer(ran) if ran else None

    def copy_answer(self) -> None:
        """Copies the files of the answer, if there is one, to where users look for it."""
        if (best := self.answer) is not None:
            for name in self.candidates[best].files:
                files.write_bytes(self.directory / name, files.read_bytes(self.directory / str(best) / name))

    def run(
        self,
        measure: Callable[[Path], Measured],
        *,
        most: int,
        ends_s: float,
        on_measured: Callable[[LoggedMeasurement], None],
        placing: "Placing | None" = None,
    ) -> None:
        """Measures until no candidate is likely to be faster, not of those either that `placing` finds on the machine
        as it is known then, `most` are measured, or it is `ends_s` by `time.monotonic`. An interrupt ends the
        measurement that runs."""
        while True:
            chosen = self._next()
            if chosen is None:
                self.ended = self.ended or "all candidates are measured"
            elif self._fails_alike:
                self.ended = f"the first {_ALIKE} failed alike; mend that, and name another --out"
            elif len(self.measurements) >= most:
                self.ended = f"{most} are measured"
            elif time.monotonic() >= ends_s:
                self.ended = "time is up"
            may_go_on = chosen is None and len(self.measurements) < most and time.monotonic() < ends_s
            if may_go_on and placing is not None and self._is_placed_anew(placing):
                self.ended = ""
                continue
            if chosen is None or self.ended:
                if self.drift > 1:
                    self.ended += f"; one plan took up to {self.drift:.2f} times as long as before: the pace changes"
                return
            before_ns, began = self._expected_ns(chosen), time.monotonic()
            found = measure(self.directory / str(chosen))
            seconds = time.monotonic() - began
            step_ns = round(found.step_ns) if found.status == OK else None
            line = LoggedMeasurement(chosen, before_ns, 0, found.status, step_ns, found.noise, found.reason, seconds)
            with_it = replace(self, measurements=[*self.measurements, line])
            line = replace(line, after_ns=with_it._expected_ns(chosen))
            self._append(asdict(line))
            self.measurements.append(line)
            on_measured(line)

    @property
    def _fails_alike(self) -> bool:
        """True where the first plans failed in one way: that is the command, and not a plan."""
        first = self.measurements[:_ALIKE]
        ends = {(each.status, each.reason if each.status == FAILED else "") for each in first}
        return len(first) == _ALIKE and len(ends) == 1 and first[0].status in (FAILED, NO_TIME)

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
        """Returns the one of the fastest candidates that was measured least; None where that was enough, or neither
        noise nor a machine whose pace changes hides which is the fastest. A single one is measured again at the end,
        which tells whether it changed."""
        measured, counts = self.measured_ns, Counter(each.candidate for each in self.measurements)
        limit_ns = (1 + 2 * self.noise) * self.drift * min(measured.values(), default=inf)
        leaders = [number for number, time_ns in measured.items() if time_ns <= limit_ns < inf]
        leaders = sorted(leaders, key=measured.__getitem__)[:_LEADERS]
        is_sure = len(leaders) == 1 and (counts[leaders[0]] > 1 or self.measurements[-1].candidate == leaders[0])
        waiting = [] if is_sure else [number for number in leaders if counts[number] < _ROUNDS]
        return min(waiting, key=counts.__getitem__, default=None)

    @property
    def drift(self) -> float:
        """The largest ratio of two times of one candidate; 1 where they differ by no more than noise makes likely."""
        ratio = max((max(times) / min(times) for times in self._times_ns().values() if max(times) < inf), default=1.0)
        return ratio if ratio > 1 + _DRIFTS * self.noise else 1.0

    def _is_placed_anew(self, placing: "Placing") -> bool:
        """Places candidates on the machine as it is known now, where that changes the order of those there are; returns
        whether there are more."""
        count = len(self.measurements)
        if not self.numbers or count == self.placed_after:
            return False
        predicted = np.log([row.predicted_ns for row in self.candidates])
        slopes = self._slopes(range(len(self.candidates)))
        fit, last = (self.machine(placing.cluster, after) for after in (count, self.placed_after))
        now, then = (np.argsort(predicted + slopes @ each.logs, kind="stable") for each in (fit, last))
        if np.array_equal(now, then):
            return False
        try:
            rows = placing.candidates(fit.factors, self.candidates)
        except InputError as error:  # the answer stands
            self.ended = f"{self.ended}; none were placed anew: {error}"
            return False
        self._append({"placed_after": count, "candidates": [asdict(row) for row in rows]})
        self.candidates, self.placed_after = [*self.candidates, *rows], count
        return bool(rows)

    def _expected_ns(self, candidate: int) -> int:
        means, _ = self.residual.after(self.measured_ns)
        return round(float(np.exp(means[candidate])))

    def _append(self, line: Mapping[str, Any]) -> None:
        path = self.directory / LOG
        try:
            with open(path, "ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); --resume goes on from there") from None
