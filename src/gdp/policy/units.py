"""What the default policy decides about: a problem's units, a few hundred groups of ops, in the order of the step.

Drawing a device for every op teaches nothing in short budgets (docs/method.md): ops join into units along heavy edges
first, as the search groups them, with noise, so that each drawing sees another grouping.
N ops, U units, P pairs of units that share tensors, D devices, B equal slices of the critical path, F features.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array

from gdp.forward_units import forward_units
from gdp.graph import I64
from gdp.grouping import Units, group_units
from gdp.levels import longest_paths
from gdp.problem import Placement, Problem
from gdp.simulate import Simulation, evaluate
from gdp.symmetry import exchangeable_before

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

NUM_SLICES = 16
NUM_UNIT_FEATURES = 36
POSITION_FEATURES = (7, 8, 9, 10, 11, 20)  # columns that tell where in the step a unit is
_SLACK = 4.0  # how much heavier than average a unit may be
_SPREAD = 0.5  # standard deviation of the noise on the logarithm of a pair's score


@dataclass(frozen=True, eq=False)
class UnitGraph:
    """The units of a problem, numbered in the order in which they are placed: that of their first ops in the step."""

    unit_of_op: I64  # [N]
    time_ns: F64  # [U, D] -1 where a unit may not go
    work_ns: F64  # [U] mean over the devices where it may go
    resident_bytes: F64  # [U]
    alive_bytes: F64  # [U] what its ops allocate, scaled to what is alive at once when one device runs everything
    slices: F64  # [U, B] share of the unit's work in each slice of the critical path
    similar: F64  # [U, U] 0 to 1, how much two units are parts of the same modules
    sources: I64  # [P] sending unit of each pair
    targets: I64  # [P] receiving unit
    sent_bytes: F64  # [P]
    sent_ns: F64  # [P] at the mean rate and latency
    incumbent: I64  # [U] device of each unit in the placement to refine, -1 without one
    features: F32  # [U, F]

    @property
    def num_units(self) -> int:
        return len(self.work_ns)


@dataclass(frozen=True, eq=False)
class UnitSource:
    """What groupings of one problem have in common, computed once."""

    problem: Problem
    units: Units  # ops and their groups
    following: Units  # with backward ops in the units of their forward ops
    head_ns: I64  # [N] longest path before an op
    freedom: I64  # [N] equal numbers for ops that may go to the same devices: only they join
    alive_share: float  # of all bytes that are allocated in a step, alive at once when one device runs everything
    equal_before: I64  # [D] see `symmetry.exchangeable_before`

    @classmethod
    def of(cls, problem: Problem) -> "UnitSource":
        return cls(
            problem=problem,
            units=Units.of(problem),
            following=Units.of(problem, forward_units(problem)),
            head_ns=longest_paths(problem.graph, problem.mean_op_time_ns, from_sources=True),
            freedom=np.unique(problem.allowed, axis=0, return_inverse=True)[1].reshape(-1),
            alive_share=_alive_share(problem),
            equal_before=exchangeable_before(problem),
        )

    def draw(
        self,
        num_units: int,
        rng: np.random.Generator,
        *,
        following: bool | None = None,
        within: Placement | None = None,
        incumbent: Simulation | None = None,
    ) -> UnitGraph:
        """About `num_units` units. `following`: whether backward ops go with their forward ops (drawn when None).

        Units are parts of what a placement has on one device: `within`, or that of the `incumbent` to refine.
        """
        follows = bool(rng.random() < 0.5) if following is None else following
        if incumbent is not None:
            within = incumbent.placement
        units = self.following if follows and within is None else self.units
        score = np.exp(rng.normal(0.0, _SPREAD, len(units.first))) * units.transfer_ns.astype(np.float64)
        together = [self.freedom] if within is None else [self.freedom, within]
        grouping = group_units(units, together, num_units, score, _SLACK)
        return _unit_graph(self, grouping.group_of_op, incumbent)


def _unit_graph(source: UnitSource, group_of_op: I64, incumbent: Simulation | None) -> UnitGraph:
    problem, head_ns = source.problem, source.head_ns
    graph, num_devices = problem.graph, problem.num_devices
    first_ns = np.full(int(group_of_op.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_ns, group_of_op, head_ns)
    order = np.argsort(first_ns, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    unit_of_op = number[group_of_op]
    num_units = len(order)

    def total(values: npt.NDArray[Any], shape: tuple[int, ...] = ()) -> F64:
        summed = np.zeros((num_units, *shape))
        np.add.at(summed, unit_of_op, values)
        return summed

    may_go = np.ones((num_units, num_devices), np.bool_)
    np.logical_and.at(may_go, unit_of_op, problem.allowed)
    time_ns = total(np.maximum(problem.op_time_ns, 0), (num_devices,))
    work_ns = np.where(may_go, time_ns, 0.0).sum(axis=1) / may_go.sum(axis=1)
    op_work_ns = problem.mean_op_time_ns.astype(np.float64)
    critical_ns = max(float((head_ns + problem.b_level_ns).max()), 1.0)
    slices = np.zeros((num_units, NUM_SLICES))
    middle = (head_ns + op_work_ns / 2) / critical_ns
    np.add.at(slices, (unit_of_op, np.minimum(middle * NUM_SLICES, NUM_SLICES - 1).astype(np.int64)), op_work_ns)
    sources, targets, sent_bytes, sent_ns = _pairs(problem, unit_of_op)
    module = np.unique(np.array(graph.modules), return_inverse=True)[1]
    similar = _similarity(unit_of_op, module, op_work_ns + 1.0)
    partial = UnitGraph(
        unit_of_op=unit_of_op,
        time_ns=np.where(may_go, time_ns, -1.0),
        work_ns=work_ns,
        resident_bytes=total(graph.resident_bytes),
        alive_bytes=total(problem.arrays.memory.alloc_bytes) * source.alive_share,
        slices=slices,
        similar=similar,
        sources=sources,
        targets=targets,
        sent_bytes=sent_bytes,
        sent_ns=sent_ns,
        incumbent=np.full(num_units, -1),
        features=np.zeros((num_units, 0), np.float32),
    )
    if incumbent is not None:
        devices = np.empty(num_units, np.int64)
        devices[unit_of_op] = incumbent.placement
        partial = replace(partial, incumbent=devices)
    alone = _features(problem, partial, head_ns, critical_ns)
    return replace(partial, features=np.concatenate((alone, incumbent_features(partial, incumbent)), axis=1))


def _alive_share(problem: Problem) -> float:
    """From one simulation on the device that may run the most ops."""
    one = np.argmax(np.where(problem.allowed, problem.allowed.sum(axis=0), -1), axis=1)
    _, peaks = evaluate(problem, one)
    resident, allocated = problem.graph.resident_bytes.sum(), problem.arrays.memory.alloc_bytes.sum()
    return float(np.clip((peaks.sum() - resident) / max(allocated, 1), 0.0, 1.0))


def _pairs(problem: Problem, unit_of_op: I64) -> tuple[I64, I64, F64, F64]:
    """(source, target, bytes, time at the mean rate and one mean latency) of each pair [P]; a tensor counts once."""
    graph, cluster = problem.graph, problem.cluster
    num_units = int(unit_of_op.max()) + 1
    sources, targets = unit_of_op[graph.producers[graph.edge_tensors]], unit_of_op[graph.consumers]
    apart = sources != targets
    once = np.unique(np.stack((graph.edge_tensors[apart], sources[apart], targets[apart])), axis=1)
    keys, inverse = np.unique(once[1] * num_units + once[2], return_inverse=True)
    sent_bytes = np.asarray(np.bincount(inverse, graph.tensor_bytes[once[0]], len(keys)), np.float64)
    between = ~np.eye(problem.num_devices, dtype=np.bool_)
    if not between.any():
        return keys // num_units, keys % num_units, sent_bytes, np.zeros(len(keys))
    rate = float(cluster.bytes_per_second[between].mean())
    sent_ns = sent_bytes / rate * 1e9 + float(cluster.latency_ns[between].mean())
    return keys // num_units, keys % num_units, sent_bytes, sent_ns


def _similarity(unit_of_op: I64, module: I64, weight: F64) -> F64:
    """[U, U] cosine of what units spend in each module: parts of one layer at several time steps are alike."""
    spent = coo_array((weight, (unit_of_op, module))).tocsr()
    norm = np.sqrt(spent.multiply(spent).sum(axis=1))
    scaled = spent.multiply(1.0 / norm[:, None]).tocsr()
    return np.asarray((scaled @ scaled.T).todense(), np.float64)


def _features(problem: Problem, units: UnitGraph, head_ns: I64, critical_ns: float) -> F32:
    """[U, F] what the network sees of each unit, free of scale: shares, ratios and logarithms of ratios."""
    num_units, graph = units.num_units, problem.graph
    work, total_ns = units.work_ns, max(float(units.work_ns.sum()), 1.0)
    sent = np.bincount(units.sources, units.sent_ns, num_units)
    received = np.bincount(units.targets, units.sent_ns, num_units)
    degree = np.bincount(units.sources, minlength=num_units) + np.bincount(units.targets, minlength=num_units)
    op_work = problem.mean_op_time_ns + 1.0
    weight = np.bincount(units.unit_of_op, op_work, num_units)

    def mean(values: npt.NDArray[Any]) -> F64:
        return np.bincount(units.unit_of_op, values * op_work, num_units) / weight

    first, last = np.full(num_units, np.inf), np.zeros(num_units)
    np.minimum.at(first, units.unit_of_op, head_ns)
    np.maximum.at(last, units.unit_of_op, head_ns)
    phases = np.array(graph.phases)
    limit = float(problem.memory_limit_bytes.sum())
    held = units.resident_bytes + units.alive_bytes
    fastest = np.where(units.time_ns >= 0, units.time_ns, np.inf).min(axis=1)
    slowest = units.time_ns.max(axis=1)
    tail_ns = problem.b_level_ns
    per_unit = [
        np.log1p(work / total_ns * num_units),
        work / total_ns,
        np.log1p(sent / (work + 1.0)),
        np.log1p(received / (work + 1.0)),
        sent / (sent + work + 1.0),
        received / (received + work + 1.0),
        np.log1p(degree),
        mean(head_ns) / critical_ns,
        mean(tail_ns) / critical_ns,
        first / critical_ns,
        last / critical_ns,
        (last - first) / critical_ns,
        mean(phases == "forward"),
        mean(phases == "backward"),
        mean(phases == "update"),
        np.log1p(np.bincount(units.unit_of_op, minlength=num_units)),
        units.resident_bytes / limit * problem.num_devices,
        held / limit * problem.num_devices,
        np.log1p(slowest / (fastest + 1.0)),
        units.similar.sum(axis=1) / num_units,
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
        float((units.similar > 0.5).mean()),
        float(degree.mean()) / 10.0,
        np.log(float(problem.memory_limit_bytes.max()) / max(float(problem.memory_limit_bytes.min()), 1.0)),
        np.log1p(problem.num_ops / num_units),
        float((last - first).mean()) / critical_ns,
    ]
    columns = [*per_unit, *(np.full(num_units, value) for value in whole)]
    return np.stack(columns, axis=1).astype(np.float32)


def incumbent_features(units: UnitGraph, incumbent: Simulation | None) -> F32:
    """[U, 4] how units fare in the placement to refine: whether there is one, how near to critical the unit is, how
    busy its device is, and what share of its transfers is made. Zeros without one."""
    if incumbent is None:
        return np.zeros((units.num_units, 4), np.float32)
    problem, step_ns = incumbent.problem, max(incumbent.step_time_ns, 1)
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
