"""Roll-outs of the default policy, compiled: units choose devices one after the other, as in list scheduling.

The unit at hand scores each device by `weights . features`, and a device is drawn with probabilities
softmax(scores / temperature). The features say how the device stands to the unit now: what it holds of the unit's
neighbours, when the unit could start there, how loaded it is while the unit runs, what memory is left. They are the
same functions for every device and free of scale, so any number and mix of devices will do, and identical devices are
treated alike; of several that are exchangeable and still empty, only the first may be chosen.

In further passes over the units each chooses again, with all others in place: a greedy pass sees only what comes before
a unit, and repeating it mends much of that (restreaming, J. Nishimura and J. Ugander, KDD 2013). A roll-out that
refines an incumbent begins so: some units stay where the incumbent has them, the others choose again.

S samples, P passes, U units, D devices, K features, B slices of the step."""

from typing import Any, NamedTuple

import numpy as np

from gdp.compiled import allocating_inlined, allocating_kernel
from gdp.policy.features import AT, NUM_FEATURES

_FORGET = 0.8  # of "recent units here", for each further unit; untuned
_CAP = 4.0  # of features without a natural limit, as large as the largest weights; untuned
_FULL, _STEEPNESS = 0.8, 5.0  # share of the memory from which on it is short, and 1 / (1 - that); untuned


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
def roll_out(arrays, weights, options, fixed, was, uniforms, choices, record):
    """Fills `choices` int64 [S, U], and `record` if it has samples.

        for each sample: put the units that stay
            for each pass, for each unit: take it off its device
                may choose: the devices where it fits
                see: the features of each of them in this state
                score: weights . features; draw a device, and put the unit there

    `weights` [2, K] have a row for units that see those before them and one for units that see all others. `uniforms`
    float64 [S, P, U] from 0 to 1 decide. `fixed` int64 [S, U] has the device of a unit that stays, else -1; `was` int64
    [U] that of each unit in the incumbent, -1 without one."""
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
    scale, rows, temperature, slack, most, passes = options
    mask = np.empty(num_devices, np.bool_)
    features = np.empty((num_devices, NUM_FEATURES), np.float32)
    scores, scratch = np.empty(num_devices), np.empty((7, num_devices))
    end_ns = scratch[1]
    records = len(record.devices) > 0
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
            own_weights, own_scale = weights[rows[sample, later]], scale[sample, later]
            state.free_ns[:] = 0.0
            state.recent[:] = 0.0
            before = np.int64(-1)  # not a literal: `_see` would be compiled for both types
            for unit in range(num_units):
                stays = fixed[sample, unit]
                old = was[unit] if state.device[unit] < 0 else state.device[unit]
                if stays < 0 and state.device[unit] >= 0:
                    _take(arrays, state, unit)
                _may_choose(arrays, state, unit, stays, slack[sample], most[sample], mask)
                num_open, only = 0, np.int64(0)
                for device in range(num_devices):
                    if mask[device]:
                        num_open += 1
                        only = device
                if num_open > 1 or records:
                    _see(arrays, state, unit, before, old, most[sample], mask, features, scratch)
                else:  # without a choice the features do not matter
                    end_ns[only] = _end_ns(arrays, state, unit, only)
                scores[:] = 0.0
                best = _score(own_weights, own_scale, features, mask, scores) if num_open > 1 else 0.0
                chosen = _draw(scores, best, mask, temperature[sample], uniforms[sample, turn, unit])
                if records:
                    record.devices[sample, turn, unit] = chosen
                    log_prob = _log_probability(scores, best, mask, chosen, temperature[sample])
                    record.log_prob[sample, turn, unit] = log_prob
                    _copy(features, mask, record.features[sample, turn, unit], record.masks[sample, turn, unit])
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
def _score(weights, scale, features, mask, scores):
    """Fills `scores` [D] of the devices in `mask`, and returns the best."""
    best = -np.inf
    for device in range(len(mask)):
        if mask[device]:
            score = 0.0
            for k in range(NUM_FEATURES):
                score += weights[k] * (features[device, k] * scale[k])
            scores[device] = score
            best = max(best, score)
    return best


@allocating_inlined
def _copy(features, mask, seen, open_to):
    """Copies `mask` [D] to `open_to`, and to `seen` the `features` [D, K] of its devices, 0 elsewhere."""
    for device in range(len(mask)):
        open_to[device] = mask[device]
        for k in range(NUM_FEATURES):
            seen[device, k] = features[device, k] if mask[device] else np.float32(0.0)


@allocating_inlined
def _put(arrays, state, unit, device):
    """Places a unit."""
    state.device[unit] = device
    state.count[device] += 1
    state.load_ns[device] += arrays.time_ns[unit, device]
    state.resident[device] += arrays.resident_bytes[unit]
    state.held[device] += arrays.held_bytes[unit]
    for at in range(arrays.slices.shape[1]):
        state.slices[device, at] += arrays.slices[unit, at]


@allocating_inlined
def _take(arrays, state, unit):
    """Undoes `_put`."""
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
    """Masks devices without room for resident bytes, and, if any device is left, for live bytes."""
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
    """Fills `features` [D, K] of the devices in `mask`, by `features.FEATURES`, and `scratch[1]` [D] with the ends."""
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
        seen[AT.near] = near[device]
        seen[AT.near_placed] = near[device] / near_placed
        seen[AT.second] = second[device]
        seen[AT.like] = like / similar_placed
        seen[AT.start_later] = min((start_ns[device] - lowest_start) / share, _CAP)
        seen[AT.end_later] = late / (1.0 + late)
        seen[AT.load] = min(load_ns[device] / share, _CAP)
        seen[AT.load_after] = after / max(highest, after, 1.0)
        seen[AT.meanwhile] = min(meanwhile[device], _CAP)
        seen[AT.meanwhile_above] = min(meanwhile[device] - lowest_meanwhile, _CAP)
        seen[AT.memory] = min(memory, _CAP)
        seen[AT.memory_short] = min(max(memory - _FULL, 0.0) * _STEEPNESS, _CAP)
        seen[AT.empty] = 1.0 if count[device] == 0 else 0.0
        seen[AT.empty_others] = num_used / num_devices if count[device] == 0 else 0.0
        seen[AT.before] = 1.0 if device == before else 0.0
        seen[AT.recent] = recent[device]
        seen[AT.slower] = np.log((time_ns[unit, device] + 1.0) / (fastest_ns + 1.0))
        seen[AT.sending] = sending[device] / (sending[device] + own_ns)
        seen[AT.sending_above] = more / (1.0 + more)
        seen[AT.like_meanwhile] = min(like * meanwhile[device] / similar_placed, _CAP)
        seen[AT.old] = 1.0 if device == old else 0.0
        seen[AT.above_fair] = min(max(after / fair - 1.0, 0.0) * 4.0, _CAP)
        seen[AT.before_fair] = 1.0 if device == before and after <= fair else 0.0
        seen[AT.most_like] = 1.0 if like > 0.5 * similar_placed else 0.0


@allocating_inlined
def _end_ns(arrays, state, unit, device):
    """Returns the end of the unit on the device, as `_see` has it."""
    offsets, senders, sent_bytes = arrays.offsets, arrays.senders, arrays.sent_bytes
    ns_per_byte, latency_ns = arrays.ns_per_byte, arrays.latency_ns
    home_of, finish_ns = state.device, state.finish_ns
    ready = 0.0
    for index in range(offsets[unit], offsets[unit + 1]):
        sender = senders[index]
        home = home_of[sender]
        if home >= 0 and sender < unit:
            transfer = 0.0
            if home != device:
                transfer = sent_bytes[index] * ns_per_byte[home, device] + latency_ns[home, device]
            ready = max(ready, finish_ns[sender] + transfer)
    return max(ready, state.free_ns[device]) + arrays.time_ns[unit, device]


@allocating_inlined
def _gather(neighbours, home_of, unit, on_device):
    """Fills `on_device` [D] with the sum of the unit's shares with units there."""
    offsets, units, shares = neighbours
    on_device[:] = 0.0
    for index in range(offsets[unit], offsets[unit + 1]):
        device = home_of[units[index]]
        if device >= 0:
            on_device[device] += shares[index]


@allocating_inlined
def _draw(scores, best, mask, temperature, uniform):
    """Draws a device of `mask` [D]."""
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


@allocating_inlined
def _log_probability(scores, best, mask, chosen, temperature):
    """Of `chosen` among the devices of `mask` [D], at temperature 1 where the best device is taken."""
    sharpness = 1.0 / temperature if temperature > 0.0 else 1.0
    total = 0.0
    for device in range(len(mask)):
        if mask[device]:
            total += np.exp((scores[device] - best) * sharpness)
    return (scores[chosen] - best) * sharpness - np.log(total)
