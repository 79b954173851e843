"""Shares of the work for devices that compute with streamed weights, by a linear programme.

A step is taken for a chain of equal parts, each with its part of the weights. A device keeps the weights of some of its
parts, and gets those of the others from the host during the step. T is the step time, w the bytes of all weights:

    minimise T    kept + streamed parts = 1 in all                 every part is computed somewhere
                  sum of parts x time of all work there <= T       one after the other
                  w x streamed parts / rate <= T                   for each channel out of the host
                  w x kept parts <= memory                         for each device; the host keeps what it sends, too

It leaves out latencies, buffers and what runs at once: simulations decide. D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gdp.arrays import F64, I64
from gdp.cluster import Cluster

_NOTHING = 1e-3  # shares below this are left out


@dataclass(frozen=True, eq=False)
class Demand:
    """The figures of a step that the programme needs."""

    weight_bytes: int  # of all weights that may be on any device
    work_ns: I64  # [D] of all parts on one device
    room_bytes: I64  # [D] for weights, beside what else is in memory
    buffer_bytes: int = 0  # of it on each device that weights are sent to


@dataclass(frozen=True, slots=True)
class StreamShares:
    """The devices that compute, their shares of the parts, which sum to 1, and the time that the programme expects."""

    devices: tuple[int, ...]
    parts: tuple[float, ...]
    expected_ns: float
    streams: bool = True


def best_shares(
    cluster: Cluster, demand: Demand, host: int, devices: Sequence[int], *, streams: bool = True
) -> StreamShares | None:
    """Returns the best shares of `devices`, the host among them if it may compute; None if nothing fits.

    Without `streams` all weights are kept where they are used.
    """
    from scipy.optimize import linprog  # half a second, which steps that stream nothing never need

    count, weight = len(devices), max(demand.weight_bytes, 1)
    work = demand.work_ns[list(devices)] / 1e9
    taken = [demand.buffer_bytes if streams and device != host else 0 for device in range(len(demand.room_bytes))]
    may_receive = streams & (demand.room_bytes >= taken)
    room = np.maximum(np.where(may_receive, demand.room_bytes - taken, demand.room_bytes), 0) / weight
    channels: dict[str, F64] = {}  # [count] seconds of each for all weights, by the device that they go to
    for number, device in enumerate(devices):
        if device != host:
            route = cluster.route(host, device)
            for channel in route.channels or (f"to {device}",):
                channels.setdefault(channel, np.zeros(count))[number] = weight / route.bytes_per_second
    kept, streamed, zeros = np.eye(count), np.eye(count), np.zeros(count)
    rows = [np.concatenate((work, work, [-1.0]))]
    limits = [0.0]
    for seconds in channels.values():
        rows.append(np.concatenate((zeros, seconds, [-1.0])))
        limits.append(0.0)
    on_host = np.array([float(device != host) for device in devices])
    for number, device in enumerate(devices):
        if device != host:
            rows.append(np.concatenate((kept[number], zeros, [0.0])))
            limits.append(float(room[device]))
    rows.append(np.concatenate((1.0 - on_host, on_host, [0.0])))
    limits.append(float(room[host]))
    most = [None if device != host and may_receive[device] else 0.0 for device in devices]
    bounds = [(0.0, None)] * count + [(0.0, share) for share in most] + [(0.0, None)]
    answer = linprog(
        np.concatenate((zeros, zeros, [1.0])),
        A_ub=np.array(rows),
        b_ub=np.array(limits),
        A_eq=np.concatenate((kept.sum(axis=0), streamed.sum(axis=0), [0.0]))[None],
        b_eq=[1.0],
        bounds=bounds,
    )
    if answer.status != 0:
        return None
    parts = answer.x[:count] + answer.x[count : 2 * count]
    used = [number for number in range(count) if parts[number] > _NOTHING]
    total = sum(float(parts[number]) for number in used)
    return StreamShares(
        tuple(int(devices[number]) for number in used),
        tuple(float(parts[number]) / total for number in used),
        float(answer.fun) * 1e9,
        streams,
    )
