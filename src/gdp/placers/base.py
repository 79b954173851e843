"""The common ground of classical placers: the contract, the choice of units, comparison of candidates, repair. N ops, T
tensors, U units (groups of ops that share a device, and each other op for itself), D devices."""

import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, narrow
from gdp.budget import Clock, has_time
from gdp.compiled import kernel
from gdp.graph.copies import HOST_COPY
from gdp.placers.memory_repair import excess_bytes, fit_memory
from gdp.placers.settings import TRIED
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import default_threads, evaluate_many
from gdp.units.units import Units, forward_units


class NoTimeError(Exception):
    """Says that a placer has no time for a placement."""


class Placer(Protocol):
    """From a problem and a seed to a placement int64 [N] that obeys groups and allowed devices; None if there is none.
    The same problem and seed give the same answer, without a clock or with one that counts simulations. Once a clock
    that counts seconds is up, the answer is the best placement so far; NoTimeError before the first one. A placement
    that does not fit in memory is returned only if the placer found none that fits."""

    def __call__(self, problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None: ...


def unit_choices(problem: Problem) -> list[Units]:
    """The problem's units and, first, if they are others, those in which backward ops follow."""
    choices = [Units.of(problem)]
    following = forward_units(problem)
    if int(following.max()) + 1 < choices[0].num_units:
        choices.insert(0, Units.of(problem, following))
    return choices


def columns_of(problem: Problem, devices: I64) -> tuple[I64, I64]:
    """Returns ([C] devices with different op times, [D] which of them each of `devices` is like)."""
    if problem.simulator.time_table_ns.shape[1] == 1:
        return devices[:1], np.zeros(len(devices), np.int64)
    _, first, inverse = np.unique(devices, return_index=True, return_inverse=True)
    return devices[first], inverse


def devices_by_speed(problem: Problem) -> I64:
    """[D] the devices that may run the most ops first, then the faster ones, then by number."""
    work_ns, num_allowed = allowed_work(problem)
    return np.lexsort((np.arange(problem.num_devices), work_ns, -num_allowed))


def allowed_work(problem: Problem) -> tuple[I64, I64]:
    """Returns ([D] the time of all ops that may go to each device, [D] their number)."""
    allowed = narrow(problem.allowed)
    sums = np.where(allowed, narrow(problem.op_time_ns), 0).sum(axis=0), allowed.sum(axis=0)
    work_ns, num_allowed = np.broadcast_arrays(*sums, np.zeros(problem.num_devices, np.int64))[:2]
    return work_ns, num_allowed


def device_subsets(problem: Problem, smallest: int) -> list[I64]:
    """The best k devices in ascending order, for k from all down to `smallest`: each k up to 8, then powers of two."""
    num_devices, by_speed = problem.num_devices, devices_by_speed(problem)
    counts = {num_devices, *(k for k in range(smallest, num_devices) if k <= 8 or k & (k - 1) == 0)}
    return [np.sort(by_speed[:count]) for count in sorted(counts, reverse=True)]


class TriedPlacements:
    """Simulates placements, and keeps their figures; after the first one only while there is time."""

    def __init__(self, problem: Problem, clock: Clock | None = None) -> None:
        self.problem, self.clock = problem, clock
        self._figures: dict[bytes, tuple[int, int]] = {}  # (bytes over the limits, step time) by placement
        self._slowest_s = 0.0  # to make a placement and to simulate it

    def run(self, candidates: Iterable[Placement]) -> list[tuple[int, int]]:
        """Returns (bytes over the limits, step time) of each of `candidates` [N] that there was time for."""
        iterator, done = iter(candidates), list[tuple[int, int]]()
        size = max(TRIED.ops_at_once // self.problem.num_ops, default_threads())
        while not self._figures or has_time(self.clock, self._slowest_s):
            began = time.perf_counter()
            keys = [np.asarray(each).astype(np.uint16).tobytes() for each in islice(iterator, size)]
            if not keys:
                break
            new = [key for key in dict.fromkeys(keys) if key not in self._figures]
            if new:
                times, peaks = evaluate_many(self.problem, [_placement(key) for key in new])
                figures = zip(excess_bytes(self.problem, peaks).tolist(), times.tolist(), strict=True)
                self._figures.update(zip(new, figures, strict=True))
            self._slowest_s = max(self._slowest_s, time.perf_counter() - began)
            done += [self._figures[key] for key in keys]
        return done

    @property
    def fits(self) -> bool:
        """True if one of the placements fits in memory."""
        return any(excess == 0 for excess, _ in self._figures.values())

    def nearest(self) -> Placement:
        """Returns the fastest placement that fits; if none does, that with the fewest bytes over the limits."""
        return _placement(min(self._figures, key=lambda key: self._figures[key]))

    def best(self) -> Placement:
        """Returns the fastest placement that fits; if none does, the nearest ones are repaired first."""
        figures = self._figures
        if not self.fits:
            by_excess = sorted(figures, key=lambda key: figures[key])
            fastest = min(figures, key=lambda key: figures[key][::-1])
            for key in list(dict.fromkeys([by_excess[0], fastest, *by_excess[1:]]))[: TRIED.num_repairs]:
                if has_time(self.clock):
                    self.run([fit_memory(self.problem, _placement(key), self.clock)])
        return self.nearest()


def best_of(
    problem: Problem,
    candidates: Iterable[Placement],
    smaller: Callable[[], Iterable[Placement]] | None = None,
    clock: Clock | None = None,
) -> Placement:
    """Returns the fastest of `candidates` [N] that fits in memory, of those that there is time for. If none fits,
    `smaller` makes further candidates; if none of those fits either, the nearest ones are repaired."""
    tried = TriedPlacements(problem, clock)
    tried.run(candidates)
    if smaller is not None and not tried.fits:
        tried.run(smaller())
    return tried.best()


def _placement(key: bytes) -> Placement:
    return np.frombuffer(key, np.uint16).astype(np.int64)


def inherit(problem: Problem, labels: npt.ArrayLike) -> I64:
    """[N] `labels` with each -1 replaced: a source takes its consumers' lowest label, another op that of the producer
    of its largest input (the highest, if several are), and the rest that of a consumer; 0 if nothing is labelled."""
    filled = np.array(labels, np.int64)
    _inherit(problem.simulator.arrays, filled)
    return np.maximum(filled, 0)


@kernel
def _inherit(arrays, labels):
    tensor_offsets, consumer_offsets, consumers = arrays[2:5]
    tensor_bytes, _, input_offsets, inputs, input_producers = arrays[11][4:9]
    num_ops = len(labels)
    for sweep in range(3):
        for step in range(num_ops):
            op = step if sweep == 1 else num_ops - 1 - step
            if labels[op] >= 0:
                continue
            if sweep == 1:
                largest = np.int64(-1)
                for index in range(input_offsets[op], input_offsets[op + 1]):
                    label = labels[input_producers[index]]
                    size = np.int64(tensor_bytes[inputs[index]])
                    if label >= 0 and (size > largest or (size == largest and label > labels[op])):
                        largest, labels[op] = size, label
            elif sweep == 2 or input_offsets[op] == input_offsets[op + 1]:
                for tensor in range(tensor_offsets[op], tensor_offsets[op + 1]):
                    for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
                        label = labels[consumers[index]]
                        if label >= 0 and (labels[op] < 0 or label < labels[op]):
                            labels[op] = label


def single(problem: Problem, seed: int = 0, clock: Clock | None = None) -> Placement | None:
    """Places all ops on the fastest device where they fit; None if no device may run all ops."""
    is_host_copy = problem.graph.is_in_role(HOST_COPY)
    is_anywhere = narrow(problem.allowed)[~is_host_copy].all(axis=0)
    devices = np.flatnonzero(np.broadcast_to(is_anywhere, problem.num_devices))
    if not len(devices):
        return None
    tables = problem.simulator.time_table_ns, narrow(problem.host_time_ns)
    alike: dict[tuple[bytes, int], int] = {}  # the first device of each kind and memory
    for device in devices.tolist():
        times = b"".join(table[:, device].tobytes() for table in tables if table.shape[1] > 1)
        alike.setdefault((times, int(problem.memory_limit_bytes[device])), device)
    tried = TriedPlacements(problem, clock)
    elsewhere = np.argmax(problem.allowed, axis=1)  # of copies on the host
    tried.run(np.where(is_host_copy & ~problem.allowed[:, one], elsewhere, one) for one in alike.values())
    return tried.nearest()
