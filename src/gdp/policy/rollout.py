"""Roll-outs of the default policy, compiled: units choose devices one after the other, as in list scheduling.

The unit at hand scores each device by `weights[unit] @ features`, and a device is drawn with probabilities
softmax(scores / temperature). The features say how the device stands to the unit now: what it holds of the unit's
neighbours, when the unit could start there, how loaded it is while the unit runs, what memory is left. They are the
same functions for every device and free of scale, so any number and mix of devices will do, and identical devices are
treated alike; of several that are exchangeable and still empty, only the first may be chosen.

A roll-out can also refine: some units stay where an incumbent has them, and the others choose again, each in turn, with
all others in place. Then "neighbours placed" are all neighbours, and loads are those without the units to come.

S samples, U units, D devices, K features, B slices of the critical path, P pairs of units.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from gdp.graph import I64
from gdp.policy.units import UnitGraph
from gdp.problem import Problem

F32 = npt.NDArray[np.float32]

FEATURES = (
    "neighbours here, of all",
    "neighbours here, of those placed",
    "neighbours' neighbours here",
    "like units here, of those placed",
    "start later than elsewhere",
    "end later than elsewhere",
    "load",
    "load after, of the highest",
    "load meanwhile",
    "load meanwhile above the lowest",
    "memory",
    "memory short",
    "empty",
    "empty, by how many are not",
    "unit before is here",
    "recent units here",
    "slower than the fastest",
    "inputs to send",
    "inputs to send above the lowest",
    "like units here, by load meanwhile",
    "was here",
    "load after, above a fair share",
    "unit before is here, within a fair share",
    "most of like units are here",
)
NUM_FEATURES = len(FEATURES)
DEVICE_FEATURES = (4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 21, 22)  # those that know costs, loads, links or memory
_FORGET = 0.8  # of "recent units here", for each further unit


class RolloutArrays(NamedTuple):
    """What roll-outs of a unit graph on a cluster share."""

    time_ns: Any  # float64 [U, D] -1 where a unit may not go
    work_ns: Any  # float64 [U]
    slices: Any  # float64 [U, B]
    near: Any  # float64 [U, U] share of a unit's transfers that are with each other unit
    second: Any  # float64 [U, U] the same over two steps
    similar: Any  # float64 [U, U]
    offsets: Any  # int64 [U + 1] senders to unit u are senders[offsets[u]:offsets[u + 1]], placed before it or not
    senders: Any  # int64 [P]
    sent_bytes: Any  # float64 [P]
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
            near=near,
            second=second,
            similar=units.similar - np.eye(num_units),
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


@njit(cache=True, nogil=True)
def _nearness(sources, targets, sent_ns, num_units):
    """(shares of each unit's transfers that are with each other unit [U, U], the same over two steps, not back)."""
    near, second = np.zeros((2, num_units, num_units))
    count = np.zeros(num_units + 1, np.int64)
    for pair in range(len(sources)):
        near[sources[pair], targets[pair]] += sent_ns[pair]
        near[targets[pair], sources[pair]] += sent_ns[pair]
        count[sources[pair] + 1] += 1
        count[targets[pair] + 1] += 1
    offsets = np.cumsum(count)
    others = np.empty(offsets[-1], np.int64)
    at = offsets[:-1].copy()
    for pair in range(len(sources)):
        for unit, other in ((sources[pair], targets[pair]), (targets[pair], sources[pair])):
            others[at[unit]] = other
            at[unit] += 1
    for unit in range(num_units):
        near[unit] /= max(near[unit].sum(), 1e-9)
    for unit in range(num_units):
        steps = np.unique(others[offsets[unit] : offsets[unit + 1]])
        for middle in steps:
            for other in np.unique(others[offsets[middle] : offsets[middle + 1]]):
                if other != unit:
                    second[unit, other] += near[unit, middle] * near[middle, other]
        second[unit] /= max(second[unit].sum(), 1e-9)
    return near, second


@njit(cache=True, nogil=True)
def roll_out(arrays, weights, temperature, uniforms, slack, most, fixed, forced, was, choices, features, masks, end):
    """Fill `choices` int64 [S, U], `features` float32 [S, U, D, K] and `masks` bool [S, U, D] (what may be chosen).

    `weights` float32 [U, K]; `uniforms` float64 [S, U] from 0 to 1 decide; temperature 0 takes the best, the lowest
    device of several. A unit only goes where memory is filled to at most `slack` float64 [S] times the limit, if there
    is such a device; the estimate counts what is alive at different times together. `fixed` int64 [S, U] has the device
    of a unit that stays, else -1; `forced` int64 [S, U] that which a unit takes in its turn whatever it would choose,
    else -1 (to learn from an example); `was` int64 [U] that of each unit in the incumbent, -1 without one.
    """
    num_samples, num_units = choices.shape
    num_devices = len(arrays.speed)
    num_slices = arrays.slices.shape[1]
    time_ns, work_ns, slices, near, second, similar = arrays[:6]
    offsets, senders, sent_bytes, ns_per_byte, latency_ns, resident_bytes, held_bytes, limit_bytes = arrays[6:14]
    speed, equal_before = arrays[14:]
    total_ns = max(work_ns.sum(), 1.0)
    slice_ns = np.zeros(num_slices)
    for unit in range(num_units):
        for at in range(num_slices):
            slice_ns[at] += slices[unit, at]
    near_here, second_here, similar_here = np.empty((3, num_units, num_devices))
    load_ns, free_ns, resident, held, recent, start_ns, end_ns, meanwhile, sending = np.empty((9, num_devices))
    slice_load = np.empty((num_devices, num_slices))
    finish_ns = np.empty(num_units)
    scores = np.empty(num_devices)
    count = np.empty(num_devices, np.int64)
    for sample in range(num_samples):
        near_here[:] = 0.0
        second_here[:] = 0.0
        similar_here[:] = 0.0
        load_ns[:] = 0.0
        free_ns[:] = 0.0
        resident[:] = 0.0
        held[:] = 0.0
        recent[:] = 0.0
        slice_load[:] = 0.0
        count[:] = 0
        num_used = 0
        end[sample] = 0.0
        before = -1
        for unit in range(num_units):
            device = fixed[sample, unit]
            if device < 0:
                continue
            choices[sample, unit] = device
            load_ns[device] += time_ns[unit, device]
            resident[device] += resident_bytes[unit]
            held[device] += held_bytes[unit]
            num_used += count[device] == 0
            count[device] += 1
            for at in range(num_slices):
                slice_load[device, at] += slices[unit, at]
            for other in range(num_units):
                near_here[other, device] += near[other, unit]
                second_here[other, device] += second[other, unit]
                similar_here[other, device] += similar[other, unit]
        for unit in range(num_units):
            mask = masks[sample, unit]
            stays = fixed[sample, unit] >= 0
            num_fitting, num_roomy, num_enough = 0, 0, 0
            for device in range(num_devices):
                twin = equal_before[device]
                mask[device] = time_ns[unit, device] >= 0.0 and not (
                    twin >= 0 and count[device] == 0 and count[twin] == 0
                )
                if stays:
                    mask[device] = device == fixed[sample, unit]
                if mask[device]:
                    num_fitting += resident[device] + resident_bytes[unit] <= limit_bytes[device]
                    is_roomy = held[device] + held_bytes[unit] <= slack[sample] * limit_bytes[device]
                    num_roomy += is_roomy
                    num_enough += is_roomy and count[device] > 0
            if not stays:  # what must be in memory has to fit, and what may be alive as well, where that is possible
                for device in range(num_devices):
                    if num_roomy > 0:
                        mask[device] &= held[device] + held_bytes[unit] <= slack[sample] * limit_bytes[device]
                    elif num_fitting > 0:
                        mask[device] &= resident[device] + resident_bytes[unit] <= limit_bytes[device]
                    if num_used >= most[sample] and num_enough > 0:
                        mask[device] &= count[device] > 0

            if forced[sample, unit] >= 0:
                mask[forced[sample, unit]] = True
            highest, lowest_start, lowest_end, lowest_meanwhile, lowest_sending = 0.0, np.inf, np.inf, np.inf, np.inf
            fastest_ns = np.inf
            near_placed, similar_placed = 0.0, 0.0
            for device in range(num_devices):
                near_placed += near_here[unit, device]
                similar_placed += similar_here[unit, device]
                highest = max(highest, load_ns[device])
                if not mask[device]:
                    continue
                ready = 0.0
                send = 0.0
                for index in range(offsets[unit], offsets[unit + 1]):
                    sender = senders[index]
                    if sender > unit and fixed[sample, sender] < 0:
                        continue
                    home = choices[sample, sender]
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
                    if slices[unit, at] > 0.0:
                        crowd += slices[unit, at] * slice_load[device, at] / (slice_ns[at] * speed[device])
                meanwhile[device] = crowd / max(work_ns[unit], 1.0)
                lowest_start = min(lowest_start, start_ns[device])
                lowest_end = min(lowest_end, end_ns[device])
                lowest_meanwhile = min(lowest_meanwhile, meanwhile[device])
                lowest_sending = min(lowest_sending, sending[device])
                fastest_ns = min(fastest_ns, time_ns[unit, device])

            best = -np.inf
            for device in range(num_devices):
                if not mask[device]:
                    features[sample, unit, device] = 0.0
                    continue
                phi = features[sample, unit, device]
                own_ns = max(work_ns[unit], 1.0)
                share = speed[device] * total_ns
                after = load_ns[device] + time_ns[unit, device]
                memory = (held[device] + held_bytes[unit]) / limit_bytes[device]
                late = (end_ns[device] - lowest_end) / own_ns
                phi[0] = near_here[unit, device]
                phi[1] = near_here[unit, device] / max(near_placed, 1e-9)
                phi[2] = second_here[unit, device]
                phi[3] = similar_here[unit, device] / max(similar_placed, 1e-9)
                phi[4] = min((start_ns[device] - lowest_start) / share, 4.0)
                phi[5] = late / (1.0 + late)
                phi[6] = min(load_ns[device] / share, 4.0)
                phi[7] = after / max(highest, after, 1.0)
                phi[8] = min(meanwhile[device], 4.0)
                phi[9] = min(meanwhile[device] - lowest_meanwhile, 4.0)
                phi[10] = min(memory, 4.0)
                phi[11] = min(max(memory - 0.8, 0.0) * 5.0, 4.0)
                phi[12] = 1.0 if count[device] == 0 else 0.0
                phi[13] = num_used / num_devices if count[device] == 0 else 0.0
                phi[14] = 1.0 if device == before else 0.0
                phi[15] = recent[device]
                phi[16] = np.log((time_ns[unit, device] + 1.0) / (fastest_ns + 1.0))
                phi[17] = sending[device] / (sending[device] + own_ns)
                more = (sending[device] - lowest_sending) / own_ns
                phi[18] = more / (1.0 + more)
                phi[19] = min(similar_here[unit, device] * meanwhile[device] / max(similar_placed, 1e-9), 4.0)
                phi[20] = 1.0 if was[unit] == device else 0.0
                fair = share * max(num_devices / max(most[sample], 1), 1.0)
                phi[21] = min(max(after / fair - 1.0, 0.0) * 4.0, 4.0)
                phi[22] = 1.0 if device == before and after <= fair else 0.0
                phi[23] = 1.0 if similar_here[unit, device] > 0.5 * similar_placed else 0.0
                score = 0.0
                for k in range(len(phi)):
                    score += weights[unit, k] * phi[k]
                scores[device] = score
                best = max(best, score)

            chosen = forced[sample, unit]
            if chosen >= 0:
                pass
            elif temperature > 0.0:
                total = 0.0
                for device in range(num_devices):
                    if mask[device]:
                        total += np.exp((scores[device] - best) / temperature)
                target = uniforms[sample, unit] * total
                for device in range(num_devices):
                    if mask[device]:
                        chosen = device
                        target -= np.exp((scores[device] - best) / temperature)
                        if target < 0.0:
                            break
            else:
                for device in range(num_devices):
                    if mask[device] and scores[device] == best:
                        chosen = device
                        break

            choices[sample, unit] = chosen
            finish_ns[unit] = end_ns[chosen]
            free_ns[chosen] = end_ns[chosen]
            end[sample] = max(end[sample], end_ns[chosen])
            before = chosen
            for device in range(num_devices):
                recent[device] *= _FORGET
            recent[chosen] += 1.0 - _FORGET
            if stays:
                continue
            load_ns[chosen] += time_ns[unit, chosen]
            resident[chosen] += resident_bytes[unit]
            held[chosen] += held_bytes[unit]
            num_used += count[chosen] == 0
            count[chosen] += 1
            for at in range(num_slices):
                slice_load[chosen, at] += slices[unit, at]
            for other in range(num_units):
                near_here[other, chosen] += near[other, unit]
                second_here[other, chosen] += second[other, unit]
                similar_here[other, chosen] += similar[other, unit]
