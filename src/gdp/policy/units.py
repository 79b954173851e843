"""Units, which the default policy places: a few hundred groups of a problem's ops, in the order of the step.

Drawing a device for every op teaches nothing in short budgets (docs/method/policy.md). Ops first join into units along
heavy edges, as the search groups them, with noise: each drawing sees another grouping.
N ops, U units, P pairs of units that share tensors, D devices, B equal slices of the critical path, C columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array, csr_array

from gdp.arrays import F64, I64
from gdp.compiled import allocating_kernel
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import evaluate
from gdp.units.forward_units import forward_units
from gdp.units.grouping import Units, group_units
from gdp.units.symmetry import exchangeable_before

NUM_SLICES = 16
_SLACK = 4.0  # how much heavier than average a unit may be
_SPREAD = 0.5  # standard deviation of the noise on the logarithm of a pair's score


@dataclass(frozen=True, eq=False)
class UnitGraph:
    """The units of a problem, numbered in the order in which they are placed: that of their first ops in the step."""

    unit_of_op: I64  # [N]
    time_ns: F64  # [U, D] -1 where a unit may not go
    work_ns: F64  # [U] mean over the devices where it may go
    resident_bytes: F64  # [U]
    alive_bytes: F64  # [U] allocations of its ops, scaled to the part that is alive at once on one device
    slices: F64  # [U, B] share of the unit's work in each slice of the critical path
    similar: csr_array  # float64 [U, U] 0 to 1, how much two units are parts of the same modules; 0 with itself
    sources: I64  # [P] sending unit of each pair
    targets: I64  # [P] receiving unit
    sent_bytes: F64  # [P]
    sent_ns: F64  # [P] at the mean rate and latency
    incumbent: I64  # [U] device of each unit in the placement to refine, -1 without one
    sums: F64  # [U, C] over the unit's ops, by `COLUMNS`
    first_ns: I64  # [U] lowest head of the unit's ops
    last_ns: F64  # [U] highest
    critical_ns: float  # longest path of the problem

    @property
    def num_units(self) -> int:
        return len(self.work_ns)


@dataclass(frozen=True, eq=False)
class UnitSource:
    """The part that all groupings of one problem have in common, computed once."""

    problem: Problem
    units: Units  # ops and their groups
    following: Units  # with backward ops in the units of their forward ops
    head_ns: I64  # [N] longest path before an op
    critical_ns: float  # longest path
    freedom: I64  # [N] equal numbers for ops that may go to the same devices: only they join
    alive_share: float  # of the bytes allocated in a step, alive at once when one device runs everything
    equal_before: I64  # [D] see `symmetry.exchangeable_before`
    sums: F64  # [N, C] the terms of a unit's sums, by `COLUMNS`
    op_time_ns: F64  # [N, D] at least 0
    module: I64  # [N] number of each op's module
    op_slice: I64  # [N] the slice of the critical path in which an op's middle is
    latency_ns: float  # mean over pairs of devices
    ns_per_byte: float  # at the mean rate; 0 on one device

    @classmethod
    def of(cls, problem: Problem) -> "UnitSource":
        head_ns = longest_paths(problem.graph, problem.mean_op_time_ns, from_sources=True)
        critical_ns = max(float((head_ns + problem.b_level_ns).max()), 1.0)
        middle = (head_ns + problem.mean_op_time_ns / 2) / critical_ns
        between = ~np.eye(problem.num_devices, dtype=np.bool_)
        is_alone = not between.any()
        return cls(
            problem=problem,
            units=Units.of(problem),
            following=Units.of(problem, forward_units(problem)),
            head_ns=head_ns,
            critical_ns=critical_ns,
            freedom=np.unique(problem.allowed, axis=0, return_inverse=True)[1].reshape(-1),
            alive_share=_alive_share(problem),
            equal_before=exchangeable_before(problem),
            sums=_sums(problem, head_ns),
            op_time_ns=np.maximum(problem.op_time_ns, 0).astype(np.float64),
            module=_numbered(problem.graph.modules),
            op_slice=np.minimum(middle * NUM_SLICES, NUM_SLICES - 1).astype(np.int64),
            latency_ns=0.0 if is_alone else float(problem.cluster.latency_ns[between].mean()),
            ns_per_byte=0.0 if is_alone else 1e9 / float(problem.cluster.bytes_per_second[between].mean()),
        )

    def draw(
        self,
        num_units: int,
        rng: np.random.Generator,
        *,
        following: bool | None = None,
        incumbent: Placement | None = None,
    ) -> UnitGraph:
        """Draws about `num_units` units. `following`: whether backward ops go with their forward ops (drawn when None).

        With an `incumbent` [N] to refine, each unit is part of one device's share in it.
        """
        follows = bool(rng.random() < 0.5) if following is None else following
        units = self.following if follows and incumbent is None else self.units
        score = np.exp(rng.normal(0.0, _SPREAD, len(units.first))) * units.transfer_ns.astype(np.float64)
        together = [self.freedom] if incumbent is None else [self.freedom, incumbent]
        grouping = group_units(units, together, num_units, score, _SLACK)
        return _unit_graph(self, grouping.group_of_op, incumbent)


COLUMNS = ("work", "weight", "head", "tail", "forward", "backward", "update", "ops", "resident", "allocated")


def _sums(problem: Problem, head_ns: I64) -> F64:
    """Returns [N, C], the columns of `UnitSource.sums`."""
    phases = np.array(problem.graph.phases)
    work = problem.mean_op_time_ns.astype(np.float64)
    weight = work + 1.0
    return np.stack(
        [
            work,
            weight,
            head_ns * weight,
            problem.b_level_ns * weight,
            *((phases == name) * weight for name in ("forward", "backward", "update")),
            np.ones(problem.num_ops),
            problem.graph.resident_bytes,
            problem.arrays.memory.alloc_bytes,
        ],
        axis=1,
    )


def _numbered(names: Sequence[str]) -> I64:
    """Returns [N], equal numbers for equal names."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.fromiter((numbers[name] for name in names), np.int64, len(names))


def _unit_graph(source: UnitSource, group_of_op: I64, incumbent: Placement | None) -> UnitGraph:
    problem = source.problem
    num_units = int(group_of_op.max()) + 1
    first_ns = _first(group_of_op, source.head_ns, num_units)
    number = np.empty(num_units, np.int64)
    number[np.argsort(first_ns, kind="stable")] = np.arange(num_units)
    unit_of_op = number[group_of_op]

    sums, time_ns, may_go, slices, last_ns = _accumulate(
        unit_of_op, source.sums, source.op_time_ns, problem.allowed, source.op_slice, source.head_ns, num_units
    )
    work_ns = np.where(may_go, time_ns, 0.0).sum(axis=1) / may_go.sum(axis=1)
    keys, sent_bytes = _pairs(problem, unit_of_op, num_units)
    devices = np.full(num_units, -1)
    if incumbent is not None:
        devices[unit_of_op] = incumbent
    return UnitGraph(
        unit_of_op=unit_of_op,
        time_ns=np.where(may_go, time_ns, -1.0),
        work_ns=work_ns,
        resident_bytes=sums[:, COLUMNS.index("resident")].copy(),
        alive_bytes=sums[:, COLUMNS.index("allocated")] * source.alive_share,
        slices=slices,
        similar=_similarity(unit_of_op, source.module, source.sums[:, 1], num_units),
        sources=keys // num_units,
        targets=keys % num_units,
        sent_bytes=sent_bytes,
        sent_ns=sent_bytes * source.ns_per_byte + source.latency_ns,
        incumbent=devices,
        sums=sums,
        first_ns=np.sort(first_ns),
        last_ns=last_ns,
        critical_ns=source.critical_ns,
    )


@allocating_kernel
def _first(unit_of_op, head_ns, num_units):
    """[U] lowest head of each unit's ops."""
    first_ns = np.full(num_units, np.iinfo(np.int64).max)
    for op in range(len(unit_of_op)):
        first_ns[unit_of_op[op]] = min(first_ns[unit_of_op[op]], head_ns[op])
    return first_ns


@allocating_kernel
def _accumulate(unit_of_op, columns, op_time_ns, allowed, op_slice, head_ns, num_units):
    """(sums of the columns [U, C], times [U, D], what all ops allow [U, D], work in slices [U, B], last heads [U])."""
    num_ops, num_columns = columns.shape
    num_devices = op_time_ns.shape[1]
    sums = np.zeros((num_units, num_columns))
    time_ns = np.zeros((num_units, num_devices))
    may_go = np.ones((num_units, num_devices), np.bool_)
    slices = np.zeros((num_units, NUM_SLICES))
    last_ns = np.zeros(num_units)
    for op in range(num_ops):
        unit = unit_of_op[op]
        for column in range(num_columns):
            sums[unit, column] += columns[op, column]
        for device in range(num_devices):
            time_ns[unit, device] += op_time_ns[op, device]
            may_go[unit, device] &= allowed[op, device]
        slices[unit, op_slice[op]] += columns[op, 0]
        last_ns[unit] = max(last_ns[unit], head_ns[op])
    return sums, time_ns, may_go, slices, last_ns


def _alive_share(problem: Problem) -> float:
    """Returns `UnitSource.alive_share`, from one simulation on the device that may run the most ops."""
    one = np.argmax(np.where(problem.allowed, problem.allowed.sum(axis=0), -1), axis=1)
    _, peaks = evaluate(problem, one)
    resident, allocated = problem.graph.resident_bytes.sum(), problem.arrays.memory.alloc_bytes.sum()
    return float(np.clip((peaks.sum() - resident) / max(allocated, 1), 0.0, 1.0))


def _pairs(problem: Problem, unit_of_op: I64, num_units: int) -> tuple[I64, F64]:
    """Returns (source * U + target, bytes) of each pair [P] in order; a tensor counts once."""
    graph = problem.graph
    sent, tensors = _sent(unit_of_op, graph.producers, graph.consumer_offsets, graph.consumers, num_units)
    keys, inverse = np.unique(sent, return_inverse=True)
    return keys, np.asarray(np.bincount(inverse, graph.tensor_bytes[tensors], len(keys)), np.float64)


@allocating_kernel
def _sent(unit_of_op, producers, consumer_offsets, consumers, num_units):
    """(source * U + target, tensor) of each tensor and each other unit that takes it."""
    keys, tensors = np.empty((2, len(consumers)), np.int64)
    taken = np.full(num_units, -1)
    count = 0
    for tensor in range(len(producers)):
        source = unit_of_op[producers[tensor]]
        for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
            target = unit_of_op[consumers[index]]
            if target != source and taken[target] != tensor:
                taken[target] = tensor
                keys[count], tensors[count] = source * num_units + target, tensor
                count += 1
    return keys[:count], tensors[:count]


def _similarity(unit_of_op: I64, module: I64, weight: F64, num_units: int) -> csr_array:
    """Returns [U, U], the cosine of the units' work by module: parts of one layer at several time steps are alike."""
    spent = coo_array((weight, (unit_of_op, module)), shape=(num_units, int(module.max()) + 1)).tocsr()
    spent.data /= np.repeat(np.sqrt(np.add.reduceat(spent.data**2, spent.indptr[:-1])), np.diff(spent.indptr))
    similar = (spent @ spent.T).tocsr()
    similar.data[similar.indices == np.repeat(np.arange(num_units), np.diff(similar.indptr))] = 0.0
    return similar
