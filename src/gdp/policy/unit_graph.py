"""Units, which the default policy places: a few hundred groups of a problem's ops, in the order of the step.

Drawing a device for every op teaches nothing in short budgets (docs/method/policy.md). Ops first join into units along
heavy edges, as the search groups them, with noise: each drawing sees another grouping.
N ops, U units, P pairs of units that share tensors, D devices, B equal slices of the critical path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gdp.arrays import F64, I64
from gdp.policy.settings import GROUPING
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import evaluate
from gdp.units.forward_units import forward_units
from gdp.units.grouping import group_units
from gdp.units.symmetry import exchangeable_before
from gdp.units.units import Pairs, Units

if TYPE_CHECKING:  # a quarter of a second to import
    from scipy.sparse import csr_array

NUM_SLICES = 16


@dataclass(frozen=True, eq=False)
class UnitGraph:
    """The view that the policy has of units, which are numbered in the order of their first ops in the step."""

    units: Units
    time_ns: F64  # [U, D] -1 where a unit may not go
    work_ns: F64  # [U] mean over the devices where it may go
    resident_bytes: F64  # [U]
    alive_bytes: F64  # [U] allocations of its ops, scaled to the part that is alive at once on one device
    slices: F64  # [U, B] share of the unit's work in each slice of the critical path
    similar: "csr_array"  # float64 [U, U] 0 to 1, how much two units are parts of the same modules; 0 with itself
    sources: I64  # [P] sending unit of each pair
    targets: I64  # [P] receiving unit
    sent_bytes: F64  # [P]
    sent_ns: F64  # [P] at the mean rate and latency
    incumbent: I64  # [U] device of each unit in the placement to refine, -1 without one

    @property
    def num_units(self) -> int:
        return self.units.num_units


@dataclass(frozen=True, eq=False)
class UnitSource:
    """The part that all groupings of one problem have in common, computed once."""

    problem: Problem
    units: tuple[Units, Pairs]  # ops and their groups
    following: tuple[Units, Pairs]  # with backward ops in the units of their forward ops
    head_ns: I64  # [N] longest path before an op
    critical_ns: float  # longest path
    freedom: I64  # [N] equal numbers for ops that may go to the same devices: only they join
    alive_share: float  # of the bytes allocated in a step, alive at once when one device runs everything
    equal_before: I64  # [D] see `symmetry.exchangeable_before`
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
            units=(units := Units.of(problem), units.pairs()),
            following=(following := Units.of(problem, forward_units(problem)), following.pairs()),
            head_ns=head_ns,
            critical_ns=critical_ns,
            freedom=np.unique(problem.allowed, axis=0, return_inverse=True)[1].reshape(-1),
            alive_share=_alive_share(problem),
            equal_before=exchangeable_before(problem),
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
        units, pairs = self.following if follows and incumbent is None else self.units
        score = np.exp(rng.normal(0.0, GROUPING.spread, len(pairs.first))) * pairs.transfer_ns.astype(np.float64)
        together = [self.freedom] if incumbent is None else [self.freedom, incumbent]
        return _unit_graph(self, group_units(units, pairs, together, num_units, score, GROUPING.slack), incumbent)


def _numbered(names: Sequence[str]) -> I64:
    """Returns [N], equal numbers for equal names."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.fromiter((numbers[name] for name in names), np.int64, len(names))


def _unit_graph(source: UnitSource, groups: Units, incumbent: Placement | None) -> UnitGraph:
    problem, num_units = source.problem, groups.num_units
    first_ns = np.full(num_units, np.iinfo(np.int64).max)
    np.minimum.at(first_ns, groups.index, source.head_ns)
    number = np.empty(num_units, np.int64)
    number[np.argsort(first_ns, kind="stable")] = np.arange(num_units)
    units = Units(problem, number[groups.index])

    work_ns = problem.mean_op_time_ns.astype(np.float64)
    allowed, time_ns = units.allowed, units.time_ns.astype(np.float64)
    keys, sent_bytes = _pairs(problem, units.index, num_units)
    slices = np.bincount(units.index * NUM_SLICES + source.op_slice, work_ns, num_units * NUM_SLICES)
    return UnitGraph(
        units=units,
        time_ns=np.where(allowed, time_ns, -1.0),
        work_ns=np.where(allowed, time_ns, 0.0).sum(axis=1) / allowed.sum(axis=1),
        resident_bytes=units.resident_bytes.astype(np.float64),
        alive_bytes=units.tensor_bytes.astype(np.float64) * source.alive_share,
        slices=slices.astype(np.float64).reshape(num_units, NUM_SLICES),
        similar=_similarity(units.index, source.module, work_ns + 1.0, num_units),
        sources=keys // num_units,
        targets=keys % num_units,
        sent_bytes=sent_bytes,
        sent_ns=sent_bytes * source.ns_per_byte + source.latency_ns,
        incumbent=np.full(num_units, -1) if incumbent is None else incumbent[units.first_op],
    )


def _alive_share(problem: Problem) -> float:
    """Returns `UnitSource.alive_share`, from one simulation on the device that may run the most ops."""
    one = np.argmax(np.where(problem.allowed, problem.allowed.sum(axis=0), -1), axis=1)
    _, peaks = evaluate(problem, one)
    resident, allocated = problem.graph.resident_bytes.sum(), problem.simulator.arrays.memory.alloc_bytes.sum()
    return float(np.clip((peaks.sum() - resident) / max(allocated, 1), 0.0, 1.0))


def _pairs(problem: Problem, unit_of_op: I64, num_units: int) -> tuple[I64, F64]:
    """Returns (source * U + target, bytes) of each pair [P] in order; a tensor counts once."""
    graph = problem.graph
    targets, makers = unit_of_op[graph.consumers], unit_of_op[graph.producers]
    is_apart = makers[graph.edge_tensors] != targets
    taken = np.unique(graph.edge_tensors[is_apart] * num_units + targets[is_apart])  # once by each unit
    tensors = taken // num_units
    keys, inverse = np.unique(makers[tensors] * num_units + taken % num_units, return_inverse=True)
    return keys, np.asarray(np.bincount(inverse, graph.tensor_bytes[tensors], len(keys)), np.float64)


def _similarity(unit_of_op: I64, module: I64, weight: F64, num_units: int) -> "csr_array":
    """Returns [U, U], the cosine of the units' work by module: parts of one layer at several time steps are alike."""
    from scipy.sparse import coo_array

    spent = coo_array((weight, (unit_of_op, module)), shape=(num_units, int(module.max()) + 1)).tocsr()
    spent.data /= np.repeat(np.sqrt(np.add.reduceat(spent.data**2, spent.indptr[:-1])), np.diff(spent.indptr))
    similar = (spent @ spent.T).tocsr()
    similar.data[similar.indices == np.repeat(np.arange(num_units), np.diff(similar.indptr))] = 0.0
    return similar
