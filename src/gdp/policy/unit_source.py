"""Units, which the default policy places: a few hundred groups of a problem's ops, in the order of the step.

Drawing a device for every op teaches nothing in short budgets (docs/method/policy.md). Ops first join into units along
heavy edges, as the search groups them, with noise: each drawing sees another grouping.
N ops, D devices, B equal slices of the critical path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64
from gdp.policy.settings import GROUPING
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import evaluate
from gdp.units.forward_units import forward_units
from gdp.units.symmetry import exchange_classes, exchangeable_before
from gdp.units.units import Pairs, Units, group_units

NUM_SLICES = 16


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
            equal_before=exchangeable_before(exchange_classes(problem)),
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
    ) -> Units:
        """Draws about `num_units` units, numbered in the order of their first ops in the step.

        `following`: whether backward ops go with their forward ops (drawn when None). With an `incumbent` [N] to
        refine, each unit is part of one device's share in it.
        """
        follows = bool(rng.random() < 0.5) if following is None else following
        units, pairs = self.following if follows and incumbent is None else self.units
        score = np.exp(rng.normal(0.0, GROUPING.spread, len(pairs.first))) * pairs.transfer_ns.astype(np.float64)
        together = [self.freedom] if incumbent is None else [self.freedom, incumbent]
        groups = group_units(units, pairs, together, num_units, score, GROUPING.slack)
        first_ns = np.full(groups.num_units, np.iinfo(np.int64).max)
        np.minimum.at(first_ns, groups.index, self.head_ns)
        number = np.empty(groups.num_units, np.int64)
        number[np.argsort(first_ns, kind="stable")] = np.arange(groups.num_units)
        return Units(self.problem, number[groups.index])


def _numbered(names: Sequence[str]) -> I64:
    """Returns [N], equal numbers for equal names."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.fromiter((numbers[name] for name in names), np.int64, len(names))


def _alive_share(problem: Problem) -> float:
    """Returns `UnitSource.alive_share`, from one simulation on the device that may run the most ops."""
    one = np.argmax(np.where(problem.allowed, problem.allowed.sum(axis=0), -1), axis=1)
    _, peaks = evaluate(problem, one)
    resident, allocated = problem.graph.resident_bytes.sum(), problem.simulator.arrays.memory.alloc_bytes.sum()
    return float(np.clip((peaks.sum() - resident) / max(allocated, 1), 0.0, 1.0))
