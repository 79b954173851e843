"""The arrays that roll-outs of the default policy read and fill.

S samples, P passes, U units, D devices, K features, B slices of the step, E pairs of units.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gdp.arrays import I64
from gdp.policy.features import NUM_FEATURES
from gdp.policy.unit_graph import UnitGraph
from gdp.simulator.problem import Problem

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
    """The arrays that all roll-outs of a unit graph on a cluster share."""

    time_ns: Any  # float64 [U, D] -1 where a unit may not go
    work_ns: Any  # float64 [U]
    slices: Any  # float64 [U, B]
    slice_ns: Any  # float64 [B] work of all units
    total_ns: float
    near: Shares  # of a unit's transfers, with each neighbour
    second: Shares  # the same over two steps
    similar: Shares  # 0 to 1, how much alike units are
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
    def of(cls, problem: Problem, units: UnitGraph, equal_before: I64) -> "RolloutArrays":
        """The arrays of `units` of `problem`."""
        num_units, num_devices = units.num_units, problem.num_devices
        near, second = _nearness(units)
        by_target = np.argsort(units.targets, kind="stable")
        between = ~np.eye(num_devices, dtype=np.bool_)
        ns_per_byte, latency_ns = np.zeros((2, num_devices, num_devices))
        ns_per_byte[between] = 1e9 / problem.cluster.bytes_per_second[between]
        latency_ns[between] = problem.cluster.latency_ns[between]
        own_ns, mean_ns = (
            (np.where(units.time_ns >= 0, times, 0.0) + 1.0).sum(axis=0)
            for times in (units.time_ns, units.work_ns[:, None])
        )
        speed = 1.0 / np.maximum(own_ns / np.maximum(mean_ns, 1.0), 1e-9)
        return cls(
            time_ns=units.time_ns,
            work_ns=units.work_ns,
            slices=units.slices,
            slice_ns=np.maximum(units.slices.sum(axis=0), 1e-9),
            total_ns=max(float(units.work_ns.sum()), 1.0),
            near=Shares.of(near),
            second=Shares.of(second),
            similar=Shares.of(units.similar),
            offsets=np.concatenate(([0], np.cumsum(np.bincount(units.targets, minlength=num_units)))),
            senders=units.sources[by_target],
            sent_bytes=units.sent_bytes[by_target],
            ns_per_byte=ns_per_byte,
            latency_ns=latency_ns,
            resident_bytes=units.resident_bytes,
            held_bytes=units.resident_bytes + units.alive_bytes,
            limit_bytes=np.maximum(problem.memory_limit_bytes.astype(np.float64), 1.0),
            speed=speed / speed.sum(),
            equal_before=equal_before,
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


def _nearness(units: UnitGraph) -> tuple["csr_array", "csr_array"]:
    """Returns `near` and `second` of `RolloutArrays` [U, U]; two units may send both ways."""
    from scipy.sparse import csr_array  # a quarter of a second, which most commands never need

    rows, columns = np.concatenate((units.sources, units.targets)), np.concatenate((units.targets, units.sources))
    amounts = np.tile(np.maximum(units.sent_ns, 1e-9), 2)
    near = _by_row(csr_array((amounts, (rows, columns)), shape=(units.num_units, units.num_units)))
    return near, _by_row(near @ near)


def _by_row(amounts: "csr_array") -> "csr_array":
    """Returns the shares of each row that its entries have; 0 on the diagonal."""
    row = np.repeat(np.arange(amounts.shape[0]), np.diff(amounts.indptr))
    amounts.data[row == amounts.indices] = 0.0
    sums = np.bincount(row, amounts.data, amounts.shape[0])
    amounts.data /= np.maximum(sums, 1e-300)[row]
    return amounts
