"""The features of units that a policy's network sees, free of scale: shares, ratios and logarithms of ratios.

One row each: a name, and the computation from the quantities of a problem's units.
U units, F features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gdp.arrays import F32, F64
from gdp.policy.units import COLUMNS, UnitGraph
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate


@dataclass(frozen=True, eq=False)
class _Quantities:
    """The quantities that features are computed from; arrays are float64 [U]."""

    problem: Problem
    units: UnitGraph
    work: F64  # ns
    total_ns: float
    sent: F64  # ns
    received: F64  # ns
    degree: F64
    first: F64  # lowest head, as a share of the critical path
    last: F64  # highest head, likewise
    resident: F64  # bytes
    held: F64  # bytes
    limit: float  # bytes of all devices

    @classmethod
    def of(cls, problem: Problem, units: UnitGraph) -> "_Quantities":
        num_units, work = units.num_units, units.work_ns
        senders, receivers = (np.bincount(ends, minlength=num_units) for ends in (units.sources, units.targets))
        sent, received = (np.bincount(ends, units.sent_ns, num_units) for ends in (units.sources, units.targets))
        return cls(
            problem=problem,
            units=units,
            work=work,
            total_ns=max(float(work.sum()), 1.0),
            sent=np.asarray(sent, np.float64),
            received=np.asarray(received, np.float64),
            degree=np.asarray(senders + receivers, np.float64),
            first=units.first_ns / units.critical_ns,
            last=units.last_ns / units.critical_ns,
            resident=units.resident_bytes,
            held=units.resident_bytes + units.alive_bytes,
            limit=max(float(problem.memory_limit_bytes.sum()), 1.0),  # no device may have memory
        )

    @cached_property
    def incumbent(self) -> F64:
        """[U, 4], from a simulation of the placement to refine."""
        return _incumbent(self.problem, self.units)

    @property
    def num_units(self) -> int:
        return self.units.num_units

    def mean(self, column: str) -> F64:
        """[U] mean of one of `COLUMNS` over the unit's ops, weighted by their work."""
        sums = self.units.sums
        mean: F64 = sums[:, COLUMNS.index(column)] / sums[:, COLUMNS.index("weight")]
        return mean

    def slowness(self) -> F64:
        """[U] time on the slowest device over that on the fastest one."""
        times = self.units.time_ns
        slowness: F64 = times.max(axis=1) / (np.where(times >= 0, times, np.inf).min(axis=1) + 1.0)
        return slowness


@dataclass(frozen=True, slots=True)
class UnitFeature:
    """A number of each unit, or one of the problem that all its units share."""

    name: str
    compute: Callable[[_Quantities], F64 | float]
    tells_position: bool = False  # where in the step a unit is


UNIT_FEATURES = (
    UnitFeature("work, of the mean", lambda q: np.log1p(q.work / q.total_ns * q.num_units)),
    UnitFeature("work, of all", lambda q: q.work / q.total_ns),
    UnitFeature("sent by work", lambda q: np.log1p(q.sent / (q.work + 1.0))),
    UnitFeature("received by work", lambda q: np.log1p(q.received / (q.work + 1.0))),
    UnitFeature("share of sending", lambda q: q.sent / (q.sent + q.work + 1.0)),
    UnitFeature("share of receiving", lambda q: q.received / (q.received + q.work + 1.0)),
    UnitFeature("neighbours", lambda q: np.log1p(q.degree)),
    UnitFeature("mean head", lambda q: q.mean("head") / q.units.critical_ns, tells_position=True),
    UnitFeature("mean tail", lambda q: q.mean("tail") / q.units.critical_ns, tells_position=True),
    UnitFeature("lowest head", lambda q: q.first, tells_position=True),
    UnitFeature("highest head", lambda q: q.last, tells_position=True),
    UnitFeature("span of heads", lambda q: q.last - q.first, tells_position=True),
    UnitFeature("forward", lambda q: q.mean("forward")),
    UnitFeature("backward", lambda q: q.mean("backward")),
    UnitFeature("update", lambda q: q.mean("update")),
    UnitFeature("ops", lambda q: np.log1p(q.units.sums[:, COLUMNS.index("ops")])),
    UnitFeature("resident", lambda q: q.resident / q.limit * q.problem.num_devices),
    UnitFeature("held", lambda q: q.held / q.limit * q.problem.num_devices),
    UnitFeature("slowest by fastest device", lambda q: np.log1p(q.slowness())),
    UnitFeature("like units", lambda q: (q.units.similar.sum(axis=1) + 1.0) / q.num_units),
    UnitFeature("number", lambda q: np.arange(q.num_units) / q.num_units, tells_position=True),
    UnitFeature("devices", lambda q: np.log2(q.problem.num_devices)),
    UnitFeature("parallelism", lambda q: np.log(q.total_ns / q.units.critical_ns)),
    UnitFeature("all sent by all work", lambda q: np.log1p(q.units.sent_ns.sum() / q.total_ns)),
    UnitFeature("all held", lambda q: min(q.held.sum() / q.limit, 4.0)),
    UnitFeature("all resident", lambda q: q.resident.sum() / q.limit),
    UnitFeature("units", lambda q: np.log(q.num_units) / 5.0),
    UnitFeature("pairs alike", lambda q: ((q.units.similar.data > 0.5).sum() + q.num_units) / q.num_units**2),
    UnitFeature("mean neighbours", lambda q: q.degree.mean() / 10.0),
    UnitFeature("largest by smallest memory", lambda q: _log_ratio(q.problem.memory_limit_bytes)),
    UnitFeature("ops by units", lambda q: np.log1p(q.problem.num_ops / q.num_units)),
    UnitFeature("mean span of heads", lambda q: (q.last - q.first).mean()),
    UnitFeature("has an incumbent", lambda q: q.incumbent[:, 0]),
    UnitFeature("critical in the incumbent", lambda q: q.incumbent[:, 1]),
    UnitFeature("its device's busy share", lambda q: q.incumbent[:, 2]),
    UnitFeature("transfers made", lambda q: q.incumbent[:, 3]),
)


def unit_features(problem: Problem, units: UnitGraph) -> F32:
    """[U, F] the features of `units` of `problem`, by `UNIT_FEATURES`."""
    quantities = _Quantities.of(problem, units)
    features = np.empty((units.num_units, len(UNIT_FEATURES)), np.float32)
    for column, feature in enumerate(UNIT_FEATURES):
        features[:, column] = feature.compute(quantities)
    return features


def _log_ratio(amounts: npt.NDArray[np.int64]) -> float:
    """Logarithm of the largest over the smallest of `amounts`, each at least 1."""
    return float(np.log(max(float(amounts.max()), 1.0) / max(float(amounts.min()), 1.0)))


def _incumbent(problem: Problem, units: UnitGraph) -> F64:
    """[U, 4] how units fare in the placement to refine: 1, the distance to critical, the busy share of the unit's
    device, the share of its transfers that is made. Zeros without a placement to refine."""
    if units.incumbent[0] < 0:
        return np.zeros((units.num_units, 4))
    incumbent = simulate(problem, units.incumbent[units.units.index])
    step_ns = max(incumbent.step_time_ns, 1)
    op_work = problem.mean_op_time_ns + 1.0
    critical = (incumbent.op_start_ns + problem.b_level_ns) / step_ns
    weighted = np.bincount(units.units.index, critical * op_work, units.num_units)
    apart = units.incumbent[units.sources] != units.incumbent[units.targets]
    both = np.concatenate((units.sources, units.targets))
    made = np.bincount(both, np.tile(units.sent_ns * apart, 2), units.num_units)
    every = np.bincount(both, np.tile(units.sent_ns, 2), units.num_units)
    columns = [
        np.ones(units.num_units),
        weighted / np.bincount(units.units.index, op_work, units.num_units),
        incumbent.busy_fraction[units.incumbent],
        made / np.maximum(every, 1.0),
    ]
    return np.stack(columns, axis=1)
