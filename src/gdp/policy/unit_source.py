"""Units, which the default policy places: a few hundred groups of a problem's ops, in the order of the step. Drawing a
device for every op teaches nothing in short budgets (docs/method/policy.md). Ops first join into units along heavy
edges, as the search groups them, with noise: each drawing sees another grouping. Features of a problem as a whole, free
of scale, tell the style scorer problems apart. N ops, D devices, B equal slices of the critical path, M features."""

from dataclasses import dataclass

import numpy as np

from gdp.arrays import F32, I64, combined, position_in
from gdp.graph.fingerprint import numbered
from gdp.policy.settings import GROUPING, SCORER
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import evaluate
from gdp.units.symmetry import exchange_classes, exchangeable_before
from gdp.units.units import Pairs, Units, forward_units, group_units

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
            module=numbered(problem.graph.modules)[1],
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
        """Draws about `num_units` units, numbered in the order of their first ops in the step. `following`: whether
        backward ops go with their forward ops (drawn when None). With an `incumbent` [N] to refine, each unit is part
        of one device's share in it."""
        follows = bool(rng.random() < 0.5) if following is None else following
        units, pairs = self.following if follows and incumbent is None else self.units
        score = np.exp(rng.normal(0.0, GROUPING.spread, len(pairs.first))) * pairs.transfer_ns.astype(np.float64)
        together = [self.freedom] if incumbent is None else [self.freedom, incumbent]
        groups = group_units(units, pairs, together, num_units, score, GROUPING.slack)
        first_ns = combined(np.minimum, groups.index, self.head_ns, groups.num_units, np.iinfo(np.int64).max)
        number = position_in(np.argsort(first_ns, kind="stable"), groups.num_units)
        return Units(self.problem, number[groups.index])


def _alive_share(problem: Problem) -> float:
    """Returns `UnitSource.alive_share`, from one simulation on the device that may run the most ops."""
    one = np.argmax(np.where(problem.allowed, problem.allowed.sum(axis=0), -1), axis=1)
    _, peaks = evaluate(problem, one)
    resident, allocated = problem.graph.resident_bytes.sum(), problem.simulator.arrays.memory.alloc_bytes.sum()
    return float(np.clip((peaks.sum() - resident) / max(allocated, 1), 0.0, 1.0))


NUM_PROBLEM_FEATURES = 21


def problem_features(source: UnitSource) -> F32:
    """Returns [M]; ratios are logarithms, shares are from 0 to 1."""
    problem, graph, cluster = source.problem, source.problem.graph, source.problem.cluster
    num_devices, phases = problem.num_devices, np.array(graph.phases)
    work_ns = problem.mean_op_time_ns.astype(np.float64)
    total_ns = max(float(work_ns.sum()), 1.0)
    device_ns = np.where(problem.allowed, problem.op_time_ns, 0).sum(axis=0).astype(np.float64)
    device_ns = device_ns[device_ns > 0]
    between = ~np.eye(num_devices, dtype=np.bool_)
    rates = cluster.bytes_per_second[between].astype(np.float64) if num_devices > 1 else np.ones(1)
    limits = np.maximum(problem.memory_limit_bytes.astype(np.float64), 1.0)
    resident_bytes = float(graph.resident_bytes.sum())
    alive_bytes = resident_bytes + source.alive_share * float(problem.simulator.arrays.memory.alloc_bytes.sum())
    num_consumers = np.diff(graph.consumer_offsets)
    sent_bytes = np.repeat(graph.tensor_bytes, num_consumers).astype(np.float64)
    senders = np.repeat(graph.producers, num_consumers)
    spans = np.abs(source.op_slice[graph.consumers] - source.op_slice[senders])
    all_bytes = max(float(sent_bytes.sum()), 1.0)
    in_slices = np.bincount(source.op_slice, work_ns, NUM_SLICES) / total_ns
    quarter = NUM_SLICES // 4
    features = {
        "ops": _log(problem.num_ops, largest=2 * SCORER.largest_log) - SCORER.usual_log_ops,
        "devices": _log(num_devices),
        "work over critical path": _log(total_ns / source.critical_ns),
        "work over critical path, a device": _log(total_ns / source.critical_ns / num_devices),
        "bytes sent if no two ops share a device, in time, over work": _log(all_bytes * source.ns_per_byte / total_ns),
        "latencies likewise, over work": _log(source.latency_ns * len(senders) / total_ns),
        "slowest over fastest device": _log(device_ns.max() / device_ns.min()) if len(device_ns) else 0.0,
        "memory alive over memory": _log(alive_bytes / limits.sum()),
        "memory alive over memory of the largest device": _log(alive_bytes / limits.max()),
        "resident bytes over memory": _log(resident_bytes / limits.sum()),
        "longest op over work": _log(work_ns.max() / total_ns),
        "modules over ops": _log(len(set(graph.modules)) / problem.num_ops),
        "fastest over slowest link": _log(rates.max() / rates.min()),
        "work of the forward pass": work_ns[phases == "forward"].sum() / total_ns,
        "work of updates": work_ns[phases == "update"].sum() / total_ns,
        "entropy of work along the critical path": -(in_slices * np.log(in_slices + 1e-9)).sum(),
        "work in its first quarter": in_slices[:quarter].sum(),
        "work in its last quarter": in_slices[-quarter:].sum(),
        "bytes that skip two slices or more": (sent_bytes * (spans > 2)).sum() / all_bytes,
        "slices that a byte spans": (sent_bytes * spans).sum() / all_bytes,
        "consumers of a tensor": _log(len(senders) / max(graph.num_tensors, 1)),
    }
    return np.array(list(features.values()), np.float32)


def _log(ratio: float, largest: float = SCORER.largest_log) -> float:
    return float(np.clip(np.log(max(float(ratio), 1e-9)), -SCORER.largest_log, largest))
