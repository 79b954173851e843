"""The arrays that roll-outs of the default policy read and fill. N ops, S samples, P passes, U units, D devices, K
features, B equal slices of the critical path, E pairs of units that share tensors."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gdp.arrays import F64, I64, unique
from gdp.policy.features import NUM_FEATURES
from gdp.policy.unit_source import NUM_SLICES, UnitSource
from gdp.simulator.problem import Problem
from gdp.units.units import Units

if TYPE_CHECKING:  # a quarter of a second to import
    from scipy.sparse import csr_array


class Shares(NamedTuple):
    """For each unit, others with a number: units[offsets[u] : offsets[u + 1]] and shares of the same positions."""

    offsets: Any  # int64 [U + 1]
    units: Any  # int64
    shares: Any  # float64

    @classmethod
    def of(cls, matrix: "csr_array") -> "Shares":
        """Returns the entries of a matrix [U, U], by row."""
        return cls(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64), matrix.data)


class RolloutArrays(NamedTuple):
    """The arrays that all roll-outs of the units of a problem share."""

    time_ns: Any  # float64 [U, D] -1 where a unit may not go
    work_ns: Any  # float64 [U] mean over the devices where it may go
    slices: Any  # float64 [U, B] share of the unit's work in each slice
    slice_ns: Any  # float64 [B] work of all units
    total_ns: float
    near: Shares  # of a unit's transfers, with each neighbour
    second: Shares  # the same over two steps
    similar: Shares  # 0 to 1, how much two units are parts of the same modules
    offsets: Any  # int64 [U + 1] senders to unit u are senders[offsets[u]:offsets[u + 1]], placed before it or not
    senders: Any  # int64 [E]
    sent_bytes: Any  # float64 [E]
    ns_per_byte: Any  # float64 [D, D]
    latency_ns: Any  # float64 [D, D]
    resident_bytes: Any  # float64 [U]
    held_bytes: Any  # float64 [U] resident, and its share of what is alive at once
    limit_bytes: Any  # float64 [D]
    speed: Any  # float64 [D] share of the cluster's
    equal_before: Any  # int64 [D] an exchangeable device of lower number, the nearest one, or -1

    @classmethod
    def of(cls, source: UnitSource, units: Units) -> "RolloutArrays":
        """The arrays of `units`, which `source` drew."""
        problem, num_units = source.problem, units.num_units
        keys, sent_bytes = _pairs(problem, units.index, num_units)
        senders, targets = keys // num_units, keys % num_units
        near, second = _nearness(senders, targets, sent_bytes * source.ns_per_byte + source.latency_ns, num_units)
        by_target = np.argsort(targets, kind="stable")
        between = ~np.eye(problem.num_devices, dtype=np.bool_)
        ns_per_byte, latency_ns = np.zeros((2, problem.num_devices, problem.num_devices))
        ns_per_byte[between] = 1e9 / problem.cluster.bytes_per_second[between]
        latency_ns[between] = problem.cluster.latency_ns[between]
        allowed, time_ns = units.allowed, units.time_ns.astype(np.float64)
        work_ns = np.where(allowed, time_ns, 0.0).sum(axis=1) / allowed.sum(axis=1)
        own_ns, mean_ns = ((np.where(allowed, times, 0.0) + 1.0).sum(axis=0) for times in (time_ns, work_ns[:, None]))
        speed = 1.0 / np.maximum(own_ns / np.maximum(mean_ns, 1.0), 1e-9)
        op_ns = problem.mean_op_time_ns.astype(np.float64)
        worked_ns = np.bincount(units.index * NUM_SLICES + source.op_slice, op_ns, num_units * NUM_SLICES)
        slices = worked_ns.astype(np.float64).reshape(num_units, NUM_SLICES)
        resident_bytes = units.resident_bytes.astype(np.float64)
        return cls(
            time_ns=np.where(allowed, time_ns, -1.0),
            work_ns=work_ns,
            slices=slices,
            slice_ns=np.maximum(slices.sum(axis=0), 1e-9),
            total_ns=max(float(work_ns.sum()), 1.0),
            near=Shares.of(near),
            second=Shares.of(second),
            similar=Shares.of(_similarity(units.index, source.module, op_ns + 1.0, num_units)),
            offsets=np.concatenate(([0], np.cumsum(np.bincount(targets, minlength=num_units)))),
            senders=senders[by_target],
            sent_bytes=sent_bytes[by_target],
            ns_per_byte=ns_per_byte,
            latency_ns=latency_ns,
            resident_bytes=resident_bytes,
            # allocations of its ops, scaled to the part that is alive at once on one device
            held_bytes=resident_bytes + units.tensor_bytes.astype(np.float64) * source.alive_share,
            limit_bytes=np.maximum(problem.memory_limit_bytes.astype(np.float64), 1.0),
            speed=speed / speed.sum(),
            equal_before=source.equal_before,
        )


class RolloutOptions(NamedTuple):
    """The options of each sample; see `sampling.Style`."""

    scale: Any  # float32 [S, 2, K] what features are multiplied by, in the first pass and in later ones
    row: Any  # int64 [S, 2] which weights both have
    temperature: Any  # float64 [S] 0 takes the best device, the lowest of several
    slack: Any  # float64 [S] a device is full at so many times its memory; the estimate counts all that is ever alive
    most: Any  # int64 [S] devices to use, more only where memory asks for it
    passes: Any  # int64 [S]


class RolloutRecord(NamedTuple):
    """Features and choices of each turn, to score them again; without samples nothing is recorded."""

    devices: Any  # int64 [S, P, U]
    features: Any  # float32 [S, P, U, D, K]
    masks: Any  # bool [S, P, U, D] what could be chosen; one device where there was no choice
    log_prob: Any  # float32 [S, P, U] of the choice, at its temperature; at 1 where the best device was taken

    @classmethod
    def empty(cls, num_samples: int, num_passes: int, num_units: int, num_devices: int) -> "RolloutRecord":
        """For `roll_out` to fill."""
        shape = num_samples, num_passes, num_units
        masks = np.zeros((*shape, num_devices), np.bool_)
        masks[..., 0] = True  # of passes that a sample does not make
        features = np.zeros((*shape, num_devices, NUM_FEATURES), np.float32)
        return cls(np.zeros(shape, np.int64), features, masks, np.zeros(shape, np.float32))


def _pairs(problem: Problem, unit_of_op: I64, num_units: int) -> tuple[I64, F64]:
    """Returns (sender * U + receiver, bytes) of each pair [E] in order; a tensor counts once."""
    graph = problem.graph
    targets, makers = unit_of_op[graph.consumers], unit_of_op[graph.producers]
    is_apart = makers[graph.edge_tensors] != targets
    taken = unique(graph.edge_tensors[is_apart] * num_units + targets[is_apart])  # once by each unit
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


def _nearness(senders: I64, targets: I64, sent_ns: F64, num_units: int) -> tuple["csr_array", "csr_array"]:
    """Returns `near` and `second` of `RolloutArrays` [U, U]; two units may send both ways."""
    from scipy.sparse import csr_array  # a quarter of a second, which most commands never need

    rows, columns = np.concatenate((senders, targets)), np.concatenate((targets, senders))
    amounts = np.tile(np.maximum(sent_ns, 1e-9), 2)
    near = _by_row(csr_array((amounts, (rows, columns)), shape=(num_units, num_units)))
    return near, _by_row(near @ near)


def _by_row(amounts: "csr_array") -> "csr_array":
    """Returns the shares of each row that its entries have; 0 on the diagonal."""
    row = np.repeat(np.arange(amounts.shape[0]), np.diff(amounts.indptr))
    amounts.data[row == amounts.indices] = 0.0
    sums = np.bincount(row, amounts.data, amounts.shape[0])
    amounts.data /= np.maximum(sums, 1e-300)[row]
    return amounts
