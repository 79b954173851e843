"""Roll-outs of the default policy, compiled: units choose devices one after the other, as in list scheduling.

The unit at hand scores each device by `weights[unit] . features`, and a device is drawn with probabilities
softmax(scores / temperature). The features say how the device stands to the unit now: what it holds of the unit's
neighbours, when the unit could start there, how loaded it is while the unit runs, what memory is left. They are the
same functions for every device and free of scale, so any number and mix of devices will do, and identical devices are
treated alike; of several that are exchangeable and still empty, only the first may be chosen.

In further passes over the units each chooses again, with all others in place: a greedy pass sees only what comes before
a unit, and repeating it mends much of that (restreaming, J. Nishimura and J. Ugander, KDD 2013). A roll-out that
refines an incumbent begins so: some units stay where the incumbent has them, the others choose again.

S samples, P passes, U units, D devices, K features, B slices of the step, E pairs of units.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64
from gdp.compiled import allocating_inlined, allocating_kernel
from gdp.policy.features import NUM_FEATURES
from gdp.policy.units import UnitGraph
from gdp.simulator.problem import Problem

F32 = npt.NDArray[np.float32]

_FORGET = 0.8  # of "recent units here", for each further unit


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
    features: Any  # float32 [S, P, U, D, K] scaled
    masks: Any  # bool [S, P, U, D] what could be chosen; one device where there was no choice

    @classmethod
    def empty(cls, num_samples: int, num_passes: int, num_units: int, num_devices: int) -> "RolloutRecord":
        """For `roll_out` to fill."""
        shape = num_samples, num_passes, num_units
        masks = np.zeros((*shape, num_devices), np.bool_)
        masks[..., 0] = True  # of passes that a sample does not make
        return cls(np.zeros(shape, np.int64), np.zeros((*shape, num_devices, NUM_FEATURES), np.float32), masks)


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


class _State(NamedTuple):
    """The devices of units, and the contents of devices."""

    device: Any  # int64 [U] -1: nowhere yet
    finish_ns: Any  # float64 [U]
    slices: Any  # float64 [D, B]
    count: Any  # int64 [D] units
    load_ns: Any  # float64 [D]
    resident: Any  # float64 [D] bytes
    held: Any  # float64 [D] bytes
    free_ns: Any  # float64 [D] end of the last unit of this pass
    recent: Any  # float64 [D]


@allocating_kernel
def roll_out(arrays, weights, orders, fixed, was, uniforms, choices, record):
    """Fill `choices` int64 [S, U], and `record` if it has samples.

    `weights` float32 [2, U, K], of units that see what came before them, and of units that see all others; `uniforms`
    float64 [S, P, U] from 0 to 1 decide. `fixed` int64 [S, U] has the device of a unit that stays, else -1; `was` int64
    [U] that of each unit in the incumbent, -1 without one.
    """
    num_samples, num_units = choices.shape
    num_devices, num_slices = len(arrays.speed), arrays.slices.shape[1]
    by_device = np.empty((5, num_devices))
    state = _State(
        np.empty(num_units, np.int64),
        np.empty(num_units),
        np.empty((num_devices, num_slices)),
        np.empty(num_devices, np.int64),
        by_device[0],
        by_device[1],
        by_device[2],
        by_device[3],
        by_device[4],
    )
    scale, rows, temperature, slack, most, passes = orders
    mask = np.empty(num_devices, np.bool_)
    features = np.empty((num_devices, NUM_FEATURES), np.float32)
    scores, scratch = np.empty(num_devices), np.empty((7, num_devices))
    for sample in range(num_samples):
        state.device[:] = -1
        state.slices[:] = 0.0
        state.count[:] = 0
        by_device[:] = 0.0
        for unit in range(num_units):
            if fixed[sample, unit] >= 0:
                _put(arrays, state, unit, fixed[sample, unit])
        for turn in range(passes[sample]):
            later = min(turn, 1)
            row = rows[sample, later]
            state.free_ns[:] = 0.0
            state.recent[:] = 0.0
            before = -1
            for unit in range(num_units):
                stays = fixed[sample, unit]
                old = was[unit] if state.device[unit] < 0 else state.device[unit]
                if stays < 0 and state.device[unit] >= 0:
                    _take(arrays, state, unit)
                _may_choose(arrays, state, unit, stays, slack[sample], most[sample], mask)
                _see(arrays, state, unit, before, old, most[sample], mask, features, scratch)
                end_ns = scratch[1]
                best = -np.inf
                for device in range(num_devices):
                    if mask[device]:
                        score = 0.0
                        for k in range(NUM_FEATURES):
                            features[device, k] *= scale[sample, later, k]
                            score += weights[row, unit, k] * features[device, k]
                        scores[device] = score
                        best = max(best, score)
                chosen = _draw(scores, best, mask, temperature[sample], uniforms[sample, turn, unit])
                if len(record.devices) > 0:
                    record.devices[sample, turn, unit] = chosen
                    for device in range(num_devices):
                        record.masks[sample, turn, unit, device] = mask[device]
                        for k in range(NUM_FEATURES):
                            value = features[device, k] if mask[device] else np.float32(0.0)
                            record.features[sample, turn, unit, device, k] = value
                if stays < 0:
                    _put(arrays, state, unit, chosen)
                state.finish_ns[unit] = end_ns[chosen]
                state.free_ns[chosen] = end_ns[chosen]
                before = chosen
                for device in range(num_devices):
                    state.recent[device] *= _FORGET
                state.recent[chosen] += 1.0 - _FORGET
        for unit in range(num_units):
            choices[sample, unit] = state.device[unit]


@allocating_inlined
def _put(arrays, state, unit, device):
    """Place a unit."""
    state.device[unit] = device
    state.count[device] += 1
    state.load_ns[device] += arrays.time_ns[unit, device]
    state.resident[device] += arrays.resident_bytes[unit]
    state.held[device] += arrays.held_bytes[unit]
    for at in range(arrays.slices.shape[1]):
        state.slices[device, at] += arrays.slices[unit, at]


@allocating_inlined
def _take(arrays, state, unit):
    """Undo `_put`."""
    device = state.device[unit]
    state.device[unit] = -1
    state.count[device] -= 1
    state.load_ns[device] -= arrays.time_ns[unit, device]
    state.resident[device] -= arrays.resident_bytes[unit]
    state.held[device] -= arrays.held_bytes[unit]
    for at in range(arrays.slices.shape[1]):
        state.slices[device, at] -= arrays.slices[unit, at]


@allocating_inlined
def _may_choose(arrays, state, unit, stays, slack, most, mask):
    """Fill `mask` [D]: what must be in memory has to fit, and what may be alive as well, where that is possible."""
    num_devices = len(mask)
    time_ns, limit_bytes, equal_before = arrays.time_ns, arrays.limit_bytes, arrays.equal_before
    count, resident, held = state.count, state.resident, state.held
    own_resident, own_held = arrays.resident_bytes[unit], arrays.held_bytes[unit]
    num_used, num_fitting, num_roomy, num_roomy_used = 0, 0, 0, 0
    for device in range(num_devices):
        num_used += count[device] > 0
        twin = equal_before[device]
        is_further = twin >= 0 and count[device] == 0 and count[twin] == 0
        mask[device] = time_ns[unit, device] >= 0.0 and not is_further
        if stays >= 0:
            mask[device] = device == stays
        if mask[device]:
            is_fitting = resident[device] + own_resident <= limit_bytes[device]
            is_roomy = is_fitting and held[device] + own_held <= slack * limit_bytes[device]
            num_fitting += is_fitting
            num_roomy += is_roomy
            num_roomy_used += is_roomy and count[device] > 0
    if stays < 0 and num_fitting > 0:
        for device in range(num_devices):
            mask[device] &= resident[device] + own_resident <= limit_bytes[device]
            if num_roomy > 0:
                mask[device] &= held[device] + own_held <= slack * limit_bytes[device]
            if num_used >= most and num_roomy_used > 0:
                mask[device] &= count[device] > 0


@allocating_inlined
def _see(arrays, state, unit, before, old, most, mask, features, scratch):
    """Fill `features` [D, K] of the devices in `mask`, by `features.FEATURES`, and `scratch[1]` [D] with the ends."""
    # each access to a field of a record counts references, which in the loops would take most of the time
    time_ns, work_ns, work_slices, slice_ns = arrays.time_ns, arrays.work_ns, arrays.slices, arrays.slice_ns
    offsets, senders, sent_bytes = arrays.offsets, arrays.senders, arrays.sent_bytes
    ns_per_byte, latency_ns, speed = arrays.ns_per_byte, arrays.latency_ns, arrays.speed
    held_bytes, limit_bytes = arrays.held_bytes, arrays.limit_bytes
    home_of, finish_ns, free_ns, load_ns = state.device, state.finish_ns, state.free_ns, state.load_ns
    count, held, recent, load_slices = state.count, state.held, state.recent, state.slices
    num_devices, num_slices = len(mask), work_slices.shape[1]
    start_ns, end_ns, meanwhile, sending, near, second, similar = scratch
    _gather(arrays.near, home_of, unit, near)
    _gather(arrays.second, home_of, unit, second)
    _gather(arrays.similar, home_of, unit, similar)
    total_ns, own_ns = arrays.total_ns, max(work_ns[unit], 1.0)
    highest, lowest_start, lowest_end, lowest_meanwhile, lowest_sending = 0.0, np.inf, np.inf, np.inf, np.inf
    fastest_ns = np.inf
    near_placed, similar_placed = 0.0, 0.0
    num_used = 0
    for device in range(num_devices):
        near_placed += near[device]
        similar_placed += similar[device]
        highest = max(highest, load_ns[device])
        num_used += count[device] > 0
        if not mask[device]:
            continue
        ready, send = 0.0, 0.0
        for index in range(offsets[unit], offsets[unit + 1]):
            sender = senders[index]
            home = home_of[sender]
            if home < 0:
                continue
            transfer = 0.0
            if home != device:
                transfer = sent_bytes[index] * ns_per_byte[home, device] + latency_ns[home, device]
            send += transfer
            if sender < unit:
                ready = max(ready, finish_ns[sender] + transfer)
        sending[device] = send
        start_ns[device] = max(ready, free_ns[device])
        end_ns[device] = start_ns[device] + time_ns[unit, device]
        crowd = 0.0
        for at in range(num_slices):
            if work_slices[unit, at] > 0.0:
                crowd += work_slices[unit, at] * load_slices[device, at] / (slice_ns[at] * speed[device])
        meanwhile[device] = crowd / own_ns
        lowest_start = min(lowest_start, start_ns[device])
        lowest_end = min(lowest_end, end_ns[device])
        lowest_meanwhile = min(lowest_meanwhile, meanwhile[device])
        lowest_sending = min(lowest_sending, sending[device])
        fastest_ns = min(fastest_ns, time_ns[unit, device])
    near_placed, similar_placed = max(near_placed, 1e-9), max(similar_placed, 1e-9)
    for device in range(num_devices):
        if not mask[device]:
            continue
        share = speed[device] * total_ns
        fair = share * max(num_devices / max(most, 1), 1.0)
        after = load_ns[device] + time_ns[unit, device]
        memory = (held[device] + held_bytes[unit]) / limit_bytes[device]
        late = (end_ns[device] - lowest_end) / own_ns
        more = (sending[device] - lowest_sending) / own_ns
        like = similar[device]
        seen = features[device]
        seen[0] = near[device]
        seen[1] = near[device] / near_placed
        seen[2] = second[device]
        seen[3] = like / similar_placed
        seen[4] = min((start_ns[device] - lowest_start) / share, 4.0)
        seen[5] = late / (1.0 + late)
        seen[6] = min(load_ns[device] / share, 4.0)
        seen[7] = after / max(highest, after, 1.0)
        seen[8] = min(meanwhile[device], 4.0)
        seen[9] = min(meanwhile[device] - lowest_meanwhile, 4.0)
        seen[10] = min(memory, 4.0)
        seen[11] = min(max(memory - 0.8, 0.0) * 5.0, 4.0)
        seen[12] = 1.0 if count[device] == 0 else 0.0
        seen[13] = num_used / num_devices if count[device] == 0 else 0.0
        seen[14] = 1.0 if device == before else 0.0
        seen[15] = recent[device]
        seen[16] = np.log((time_ns[unit, device] + 1.0) / (fastest_ns + 1.0))
        seen[17] = sending[device] / (sending[device] + own_ns)
        seen[18] = more / (1.0 + more)
        seen[19] = min(like * meanwhile[device] / similar_placed, 4.0)
        seen[20] = 1.0 if device == old else 0.0
        seen[21] = min(max(after / fair - 1.0, 0.0) * 4.0, 4.0)
        seen[22] = 1.0 if device == before and after <= fair else 0.0
        seen[23] = 1.0 if like > 0.5 * similar_placed else 0.0


@allocating_inlined
def _gather(those, home_of, unit, on_device):
    """Fill `on_device` [D] with the sum of the unit's shares with units there."""
    offsets, units, shares = those
    on_device[:] = 0.0
    for index in range(offsets[unit], offsets[unit + 1]):
        device = home_of[units[index]]
        if device >= 0:
            on_device[device] += shares[index]


@allocating_inlined
def _draw(scores, best, mask, temperature, uniform):
    """A device of `mask` [D]."""
    chosen = -1
    for device in range(len(mask) - 1, -1, -1):  # the first device, unless scores, of whatever weights, say better
        if mask[device]:
            chosen = device
    if temperature <= 0.0:
        for device in range(len(mask) - 1, -1, -1):
            if mask[device] and scores[device] == best:
                chosen = device
        return chosen
    total = 0.0
    for device in range(len(mask)):
        if mask[device]:
            total += np.exp((scores[device] - best) / temperature)
    target = uniform * total
    for device in range(len(mask)):
        if mask[device]:
            chosen = device
            target -= np.exp((scores[device] - best) / temperature)
            if target < 0.0:
                break
    return chosen
