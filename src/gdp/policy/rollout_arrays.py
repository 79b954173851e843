"""The arrays that roll-outs of the default policy read and fill.

S samples, P passes, U units, D devices, K features, B slices of the step, E pairs of units.
"""

from typing import Any, NamedTuple

import numpy as np

from gdp.arrays import I64
from gdp.compiled import allocating_kernel
from gdp.policy.features import NUM_FEATURES
from gdp.policy.unit_graph import UnitGraph
from gdp.simulator.problem import Problem


class Shares(NamedTuple):
    """For each unit, others with a number: units[offsets[u] : offsets[u + 1]] and shares of the same positions."""

    offsets: Any  # int64 [U + 1]
    units: Any  # int64
    shares: Any  # float64


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
        near, second = _nearness(units.sources, units.targets, units.sent_ns, num_units)
        similar = units.similar
        by_target = np.argsort(units.targets, kind="stable")
        between = ~np.eye(num_devices, dtype=np.bool_)
        ns_per_byte, latency_ns = np.zeros((2, num_devices, num_devices))
        ns_per_byte[between] = 1e9 / problem.cluster.bytes_per_second[between]
        latency_ns[between] = problem.cluster.latency_ns[between]
        times = np.where(units.time_ns >= 0, units.time_ns, np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            slowness = np.nansum(np.where(np.isnan(times), 0.0, times) + 1.0, axis=0) / np.maximum(
                np.nansum(np.where(np.isnan(times), 0.0, units.work_ns[:, None]) + 1.0, axis=0), 1.0
            )
        speed = 1.0 / np.maximum(slowness, 1e-9)
        return cls(
            time_ns=units.time_ns,
            work_ns=units.work_ns,
            slices=units.slices,
            slice_ns=np.maximum(units.slices.sum(axis=0), 1e-9),
            total_ns=max(float(units.work_ns.sum()), 1.0),
            near=Shares(*near),
            second=Shares(*second),
            similar=Shares(similar.indptr.astype(np.int64), similar.indices.astype(np.int64), similar.data),
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


@allocating_kernel
def _nearness(sources, targets, sent_ns, num_units):
    """(near, second) of `RolloutArrays`, each (offsets, units, shares)."""
    count = np.zeros(num_units + 1, np.int64)
    for pair in range(len(sources)):
        count[sources[pair] + 1] += 1
        count[targets[pair] + 1] += 1
    begin = np.cumsum(count)
    at = begin[:-1].copy()
    other, amount = np.empty(begin[-1], np.int64), np.empty(begin[-1])
    for pair in range(len(sources)):
        for unit, neighbour in ((sources[pair], targets[pair]), (targets[pair], sources[pair])):
            other[at[unit]] = neighbour
            amount[at[unit]] = sent_ns[pair]
            at[unit] += 1
    sums = np.zeros(num_units)
    near_offsets, second_offsets = np.zeros((2, num_units + 1), np.int64)
    near_units, near_shares = np.empty(begin[-1], np.int64), np.empty(begin[-1])
    for unit in range(num_units):  # two units may send both ways
        end, total = near_offsets[unit], 0.0
        for index in range(begin[unit], begin[unit + 1]):
            if sums[other[index]] == 0.0:
                near_units[end] = other[index]
                end += 1
            sums[other[index]] += max(amount[index], 1e-9)
            total += max(amount[index], 1e-9)
        for index in range(near_offsets[unit], end):
            near_shares[index] = sums[near_units[index]] / total
            sums[near_units[index]] = 0.0
        near_offsets[unit + 1] = end
    bound = 0
    for unit in range(num_units):
        steps = 0
        for index in range(near_offsets[unit], near_offsets[unit + 1]):
            steps += near_offsets[near_units[index] + 1] - near_offsets[near_units[index]]
        bound += min(steps, num_units)
    second_units, second_shares = np.empty(bound, np.int64), np.empty(bound)
    for unit in range(num_units):
        end = second_offsets[unit]
        for index in range(near_offsets[unit], near_offsets[unit + 1]):
            middle = near_units[index]
            for further in range(near_offsets[middle], near_offsets[middle + 1]):
                if near_units[further] == unit:
                    continue
                if sums[near_units[further]] == 0.0:
                    second_units[end] = near_units[further]
                    end += 1
                sums[near_units[further]] += near_shares[index] * near_shares[further]
        total = 0.0
        for index in range(second_offsets[unit], end):
            second_shares[index] = sums[second_units[index]]
            total += second_shares[index]
            sums[second_units[index]] = 0.0
        for index in range(second_offsets[unit], end):
            second_shares[index] /= total
        second_offsets[unit + 1] = end
    end, last = near_offsets[num_units], second_offsets[num_units]
    return (near_offsets, near_units[:end], near_shares[:end]), (
        second_offsets,
        second_units[:last],
        second_shares[:last],
    )
