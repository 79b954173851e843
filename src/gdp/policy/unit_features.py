"""What a policy's network sees of each unit, free of scale: shares, ratios and logarithms of ratios.

U units, F features.
"""

import numpy as np
import numpy.typing as npt

from gdp.policy.units import COLUMNS, WEIGHTED, UnitGraph
from gdp.problem import Problem
from gdp.simulate import simulate

F32 = npt.NDArray[np.float32]

NUM_UNIT_FEATURES = 36
POSITION_FEATURES = (7, 8, 9, 10, 11, 20)  # columns that tell where in the step a unit is


def unit_features(problem: Problem, units: UnitGraph) -> F32:
    """[U, F] of `units` of `problem`."""
    return np.concatenate((_alone(problem, units), incumbent_features(problem, units)), axis=1)


def _alone(problem: Problem, units: UnitGraph) -> F32:
    """[U, F - 4] what does not depend on a placement."""
    num_units, critical_ns, sums = units.num_units, units.critical_ns, units.sums
    work, total_ns = units.work_ns, max(float(units.work_ns.sum()), 1.0)
    sent = np.bincount(units.sources, units.sent_ns, num_units)
    received = np.bincount(units.targets, units.sent_ns, num_units)
    degree = np.bincount(units.sources, minlength=num_units) + np.bincount(units.targets, minlength=num_units)
    head, tail, forward, backward, update = (sums[:, WEIGHTED] / sums[:, 1:2]).T
    num_ops = sums[:, COLUMNS.index("ops")]
    first, last = units.first_ns / critical_ns, units.last_ns / critical_ns
    limit = max(float(problem.memory_limit_bytes.sum()), 1.0)  # no device may have memory
    held = units.resident_bytes + units.alive_bytes
    fastest = np.where(units.time_ns >= 0, units.time_ns, np.inf).min(axis=1)
    slowest = units.time_ns.max(axis=1)
    per_unit = [
        np.log1p(work / total_ns * num_units),
        work / total_ns,
        np.log1p(sent / (work + 1.0)),
        np.log1p(received / (work + 1.0)),
        sent / (sent + work + 1.0),
        received / (received + work + 1.0),
        np.log1p(degree),
        head / critical_ns,
        tail / critical_ns,
        first,
        last,
        last - first,
        forward,
        backward,
        update,
        np.log1p(num_ops),
        units.resident_bytes / limit * problem.num_devices,
        held / limit * problem.num_devices,
        np.log1p(slowest / (fastest + 1.0)),
        (units.similar.sum(axis=1) + 1.0) / num_units,
        np.arange(num_units) / num_units,
    ]
    parallelism = total_ns / critical_ns
    whole = [
        np.log2(problem.num_devices),
        np.log(parallelism),
        np.log1p(units.sent_ns.sum() / total_ns),
        min(held.sum() / limit, 4.0),
        units.resident_bytes.sum() / limit,
        np.log(num_units) / 5.0,
        float((units.similar.data > 0.5).sum() + num_units) / num_units**2,
        float(degree.mean()) / 10.0,
        np.log(max(float(problem.memory_limit_bytes.max()), 1.0) / max(float(problem.memory_limit_bytes.min()), 1.0)),
        np.log1p(problem.num_ops / num_units),
        float((last - first).mean()),
    ]
    columns = [*per_unit, *(np.full(num_units, value) for value in whole)]
    return np.stack(columns, axis=1).astype(np.float32)


def incumbent_features(problem: Problem, units: UnitGraph) -> F32:
    """[U, 4] how units fare in the placement to refine: whether there is one, how near to critical the unit is, how
    busy its device is, and what share of its transfers is made. Zeros without one."""
    if units.incumbent[0] < 0:
        return np.zeros((units.num_units, 4), np.float32)
    incumbent = simulate(problem, units.incumbent[units.unit_of_op])
    step_ns = max(incumbent.step_time_ns, 1)
    op_work = problem.mean_op_time_ns + 1.0
    critical = (incumbent.op_start_ns + problem.b_level_ns) / step_ns
    weighted = np.bincount(units.unit_of_op, critical * op_work, units.num_units)
    apart = units.incumbent[units.sources] != units.incumbent[units.targets]
    both = np.concatenate((units.sources, units.targets))
    made = np.bincount(both, np.tile(units.sent_ns * apart, 2), units.num_units)
    every = np.bincount(both, np.tile(units.sent_ns, 2), units.num_units)
    columns = [
        np.ones(units.num_units),
        weighted / np.bincount(units.unit_of_op, op_work, units.num_units),
        incumbent.busy_fraction[units.incumbent],
        made / np.maximum(every, 1.0),
    ]
    return np.stack(columns, axis=1).astype(np.float32)
