"""Small steps whose times and peaks were worked out by hand, for any implementation of the machine model.

Each case names the rule of docs/machine-model.md, sections 3 and 4, that it would catch a mistake in. `HandCase.graph`
carries the op times by device name, so that costs derived from graph and cluster equal `op_time_ns`.

How to read the drawings: one column is 1 ns; op 3 running for 2 ns is `33`, a zero-time op is `(3)`; `a` is tensor 0,
`b` tensor 1, ... in transfer over a route (its channel occupied); `~` is its latency; `h0` is what the host of d0
issues, `:` a device that is held by an op not yet issued. Unless said otherwise a route
moves 1 byte per ns without latency over a channel of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

from gdp.cluster import Cluster, Device, Route
from gdp.graph import Graph, Op, Tensor

ONE_BYTE_PER_NS = 10**9


@dataclass(frozen=True)
class HandCase:
    name: str
    graph: Graph
    cluster: Cluster
    op_time_ns: tuple[tuple[int, ...], ...]  # [N][D]
    host_time_ns: tuple[tuple[int, ...], ...]  # [N][D]
    placement: tuple[int, ...]  # [N]
    priority: tuple[int, ...] | None  # [N], None: the b-levels
    op_start_ns: tuple[int, ...]  # [N]
    transfers: tuple[tuple[int, int, int, int, int], ...]  # tensor, destination, start, end of occupancy, arrival
    order: tuple[tuple[int, ...], ...]  # [D]
    step_time_ns: int
    peak_memory_bytes: tuple[int, ...]  # [D]

    op_begin_ns: tuple[int, ...]  # [N]

    @property
    def op_finish_ns(self) -> tuple[int, ...]:
        pairs = zip(self.op_begin_ns, self.op_time_ns, self.placement, strict=True)
        return tuple(begin + times[device] for begin, times, device in pairs)


def make_cluster(num_devices: int, routes: Mapping[tuple[int, int], Route], memory_bytes: int = 2**50) -> Cluster:
    """Devices d0, d1, ... and these routes; any other pair has 1 byte per ns, no latency, a channel of its own."""
    devices = [
        Device(f"d{number}", "test-device", memory_bytes, {"float32": 10**9}, 10**9, 0) for number in range(num_devices)
    ]
    pairs = permutations(range(num_devices), 2)
    return Cluster.build("test", devices, {(a, b): routes.get((a, b), _route(f"d{a}-d{b}")) for a, b in pairs})


def _route(*channels: str, latency_ns: int = 0, bytes_per_second: int = ONE_BYTE_PER_NS) -> Route:
    return Route(latency_ns, bytes_per_second, channels)


def _case(
    name: str,
    *,
    placement: tuple[int, ...],
    times: tuple[int | tuple[int, ...], ...],  # an integer: on every device
    start: tuple[int, ...],
    order: tuple[tuple[int, ...], ...],  # its length is the number of devices
    step: int,
    peak: tuple[int, ...],
    tensors: tuple[Tensor, ...] = (),
    resident: tuple[int, ...] | None = None,
    priority: tuple[int, ...] | None = None,
    routes: Mapping[tuple[int, int], Route] | None = None,
    transfers: tuple[tuple[int, int, int, int, int], ...] = (),
    hosts: tuple[int, ...] | None = None,
    waits: tuple[int, ...] = (),  # ops that the host waits for
    begin: tuple[int, ...] | None = None,  # None: as they start
) -> HandCase:
    op_time_ns = tuple((time,) * len(order) if isinstance(time, int) else time for time in times)
    ops = [
        Op(
            name=f"op{number}",
            resident_bytes=resident[number] if resident else 0,
            time_ns={f"d{device}": time for device, time in enumerate(row)},
            host_ns=hosts[number] if hosts else 0,
            host_waits=number in waits,
        )
        for number, row in enumerate(op_time_ns)
    ]
    return HandCase(
        name=name,
        graph=Graph.build("test", ops, tensors),
        cluster=make_cluster(len(order), routes or {}),
        op_time_ns=op_time_ns,
        host_time_ns=tuple((op.host_ns,) * len(order) for op in ops),
        placement=placement,
        priority=priority,
        op_start_ns=start,
        transfers=transfers,
        order=order,
        step_time_ns=step,
        peak_memory_bytes=peak,
        op_begin_ns=begin or start,
    )


DISPATCH = (
    # d0 |1222 00|
    _case(
        "the ready op of highest priority starts first",
        placement=(0, 0, 0), times=(2, 1, 3), priority=(0, 5, 1),
        start=(4, 0, 1), order=((1, 2, 0),), step=6, peak=(0,),
    ),
    # d0 |1 00 222|
    _case(
        "equal priorities go to the smaller op number",
        placement=(0, 0, 0), times=(2, 1, 3), priority=(1, 2, 1),
        start=(1, 0, 3), order=((1, 0, 2),), step=6, peak=(0,),
    ),
    # b(2) = 4, b(1) = 2 + 4 = 6, b(0) = 1:   d0 |11 2222 0|
    _case(
        "the default priority is the longest way to the end",
        placement=(0, 0, 0), times=(1, 2, 4), tensors=(Tensor(1, (2,)),),
        start=(6, 0, 2), order=((1, 2, 0),), step=7, peak=(0,),
    ),
    # b(0) = 4, b(1) = floor((3 + 6) / 2) = 4, b(2) = floor((3 + 2) / 2) = 2:   d0 |0000 111 222|
    _case(
        "the default priority averages over the devices that can run the op and rounds down",
        placement=(0, 0, 0), times=((4, -1), (3, 6), (3, 2)),
        start=(0, 4, 7), order=((0, 1, 2), ()), step=10, peak=(0, 0),
    ),
    # d0    |00000 22|   op 2 is there at 1
    # d1    |1       |
    _case(
        "an op runs to its end, whatever becomes ready meanwhile",
        placement=(0, 1, 0), times=(5, 1, 2), priority=(0, 0, 9), tensors=(Tensor(1, (2,)),),
        start=(0, 0, 5), transfers=((0, 0, 1, 1, 1),), order=((0, 2), (1,)), step=7, peak=(0, 0),
    ),
    # d0 |111 (2)(0)|
    _case(
        "zero-time ops take their turn",
        placement=(0, 0, 0), times=(0, 3, 0), priority=(1, 5, 5),
        start=(3, 0, 3), order=((1, 2, 0),), step=3, peak=(0,),
    ),
    # d0 |(0)33   |   first pass at 0: d0 starts 0 and d1 starts 1; only then does 0 end and feed 2
    # d1 |1111 2  |
    _case(
        "every idle device starts one op before a zero-time op ends",
        placement=(0, 1, 1, 0), times=(0, 4, 1, 2), priority=(0, 0, 9, 0), tensors=(Tensor(0, (2,)),),
        start=(0, 0, 4, 0), transfers=((0, 1, 0, 0, 0),), order=((0, 3), (1, 2)), step=5, peak=(0, 0),
    ),
    # d0 |(0)3 (2)|   passes at 0: start 0; then 3 on d0 and 1 on d1; then 2 is ready, too late for d0
    # d1 |(1)     |
    _case(
        "zero-time ops on several devices go pass by pass",
        placement=(0, 1, 0, 0), times=(0, 0, 0, 1), priority=(9, 9, 9, 0), tensors=(Tensor(0, (1,)), Tensor(1, (2,))),
        start=(0, 0, 1, 0), transfers=((0, 1, 0, 0, 0), (1, 0, 0, 0, 0)), order=((0, 3, 2), (1,)), step=1, peak=(0, 0),
    ),
    # d0 |00    |   at 2: 0 and 1 end, tensor 0 arrives, and only then d1 chooses, 2 before 3
    # d1 |11 2 3|
    _case(
        "completions and arrivals come before starts",
        placement=(0, 1, 1, 1), times=(2, 2, 1, 1), priority=(0, 5, 9, 0), tensors=(Tensor(0, (2,)),),
        start=(0, 0, 2, 3), transfers=((0, 1, 2, 2, 2),), order=((0,), (1, 2, 3)), step=4, peak=(0, 0),
    ),
)  # fmt: skip

_SHARED = {(0, 1): _route("c", latency_ns=2), (0, 2): _route("c", latency_ns=2)}
_CROSSING = {(0, 1): _route("a"), (1, 0): _route("b"), (0, 2): _route("a", "b")}

TRANSFERS = (
    # d0    |0          |
    # c     | aaaabbb   |
    # d1    |     ~~1   |   a: 1 + 4 + 2 = 7
    # d2    |        ~~2|   b: 5 + 3 + 2 = 10
    _case(
        "a shared channel takes one transfer at a time and is free during the latency",
        placement=(0, 1, 2), times=(1, 1, 1), tensors=(Tensor(0, (1,), 4), Tensor(0, (2,), 3)), routes=_SHARED,
        start=(0, 7, 10), transfers=((0, 1, 1, 5, 7), (1, 2, 5, 8, 10)),
        order=((0,), (1,), (2,)), step=11, peak=(7, 4, 3),
    ),
    # d0 -> d1 | aaaa~~1|
    # d0 -> d2 | bbb~~2 |
    _case(
        "routes without a common channel run at once",
        placement=(0, 1, 2), times=(1, 1, 1), tensors=(Tensor(0, (1,), 4), Tensor(0, (2,), 3)),
        routes={(0, 1): _route("a", latency_ns=2), (0, 2): _route("b", latency_ns=2)},
        start=(0, 7, 6), transfers=((0, 1, 1, 5, 7), (1, 2, 1, 4, 6)),
        order=((0,), (1,), (2,)), step=8, peak=(7, 4, 3),
    ),
    # d0 |022 5     7|   sends a at 1 and c at 3
    # d1 |11333 4    |   sends b at 2 and d at 5
    # d2 |         6 |
    # a  | aaaaaccc  |   c waits for both its channels: max(3, 6, 4) = 6
    # b  |  bb  cccd |   d waits for c, although channel b does nothing from 4 to 6
    # Peaks: d0 at 2: a 5 + c 3 + copy of b 2 = 10; d1 at 2: b 2 + d 1 + copy of a 5 = 8.
    _case(
        "a transfer waits for all its channels, and a later one never overtakes it",
        placement=(0, 1, 0, 1, 1, 0, 2, 0), times=(1, 2, 2, 3, 1, 1, 1, 1), priority=(9, 9, 8, 8, 0, 0, 0, 0),
        tensors=(Tensor(0, (4,), 5), Tensor(1, (5,), 2), Tensor(2, (6,), 3), Tensor(3, (7,), 1)), routes=_CROSSING,
        start=(0, 0, 1, 2, 6, 4, 9, 10),
        transfers=((0, 1, 1, 6, 6), (1, 0, 2, 4, 4), (2, 2, 6, 9, 9), (3, 0, 9, 10, 10)),
        order=((0, 2, 5, 7), (1, 3, 4), (6,)), step=11, peak=(10, 8, 3),
    ),
    # The same with a tensor c of no bytes: it starts and ends at 6, and d (asked for at 5) still waits for it.
    # Peaks: d0 at 2: a 5 + copy of b 2 = 7; d1 at 2: b 2 + d 1 + copy of a 5 = 8.
    _case(
        "a zero-byte tensor queues on all its channels like any other",
        placement=(0, 1, 0, 1, 1, 0, 2, 0), times=(1, 2, 2, 3, 1, 1, 1, 1), priority=(9, 9, 8, 8, 0, 0, 0, 0),
        tensors=(Tensor(0, (4,), 5), Tensor(1, (5,), 2), Tensor(2, (6,), 0), Tensor(3, (7,), 1)), routes=_CROSSING,
        start=(0, 0, 1, 2, 6, 4, 6, 7),
        transfers=((0, 1, 1, 6, 6), (1, 0, 2, 4, 4), (2, 2, 6, 6, 6), (3, 0, 6, 7, 7)),
        order=((0, 2, 5, 7), (1, 3, 4), (6,)), step=8, peak=(7, 8, 0),
    ),
    # d0 -> d1 | a: 1 to 1, there at 6; b: 1 to 5, there at 10; c: 5 to 5, there at 10
    # d1       |      1   2 3|
    _case(
        "a zero-byte tensor pays the latency",
        placement=(0, 1, 1, 1), times=(1, 1, 1, 1), routes={(0, 1): _route("c", latency_ns=5)},
        tensors=(Tensor(0, (1,)), Tensor(0, (2,), 4), Tensor(0, (3,))),
        start=(0, 6, 10, 11), transfers=((0, 1, 1, 1, 6), (1, 1, 1, 5, 10), (2, 1, 5, 5, 10)),
        order=((0,), (1, 2, 3)), step=12, peak=(4, 4),
    ),
    # d0 -> d1 | aaaa~1|
    #          | bbb~2 |
    _case(
        "transfers over a route without channels never wait",
        placement=(0, 1, 1), times=(1, 1, 1), tensors=(Tensor(0, (1,), 4), Tensor(0, (2,), 3)),
        routes={(0, 1): _route(latency_ns=1)},
        start=(0, 6, 5), transfers=((0, 1, 1, 5, 6), (1, 1, 1, 4, 5)), order=((0,), (2, 1)), step=7, peak=(7, 7),
    ),
    # c  | aabbbaa |   a to d1, b to d1, a to d2
    # d1 |   2  3  |   peak at 3: a 2 (freed at 4) + b 3
    # d2 |        1|
    _case(
        "an op asks for its transfers by destination, then by tensor",
        placement=(0, 2, 1, 1), times=(1, 1, 1, 1), tensors=(Tensor(0, (1, 2), 2), Tensor(0, (3,), 3)),
        routes={(0, 1): _route("c"), (0, 2): _route("c")},
        start=(0, 8, 3, 6), transfers=((0, 1, 1, 3, 3), (1, 1, 3, 6, 6), (0, 2, 6, 8, 8)),
        order=((0,), (2, 3), (1,)), step=9, peak=(5, 5, 2),
    ),
    # d0 |1      |
    # d1 |0      |
    # c  | bbbaa |   op 0 made b, op 1 made a
    # d2 |    3 2|   peak at 4: b 3 (freed at 5) + a 2
    _case(
        "ops that end together ask in the order of their numbers",
        placement=(1, 0, 2, 2), times=(1, 1, 1, 1), tensors=(Tensor(1, (2,), 2), Tensor(0, (3,), 3)),
        routes={(0, 2): _route("c"), (1, 2): _route("c")},
        start=(0, 0, 6, 4), transfers=((1, 2, 1, 4, 4), (0, 2, 4, 6, 6)),
        order=((1,), (0,), (3, 2)), step=7, peak=(2, 3, 5),
    ),
    # d0 -> d1 | aaaa     |   held on d1 over [1, 8)
    # d1       |     1223 |   b 3 over [5, 9), c 8 over [6, 8), d 10 over [8, 9)
    # Peak of d1: at 6, a 4 + b 3 + c 8 = 15; at 8, b 3 + d 10 = 13 (17 if a stayed).
    _case(
        "a tensor is sent once to a device and stays until its last consumer there ends",
        placement=(0, 1, 1, 1), times=(1, 1, 2, 1),
        tensors=(Tensor(0, (1, 2), 4), Tensor(1, (2, 3), 3), Tensor(2, (), 8), Tensor(3, (), 10)),
        start=(0, 5, 6, 8), transfers=((0, 1, 1, 5, 5),), order=((0,), (1, 2, 3)), step=9, peak=(4, 15),
    ),
    # a: 10 * 1e9 / 3000 = 3333333.3;  b: 1e12 * 1e9 / (1e9 - 63) = 1e12 + 63000 + 63^2 / 1e6 + ... = 1000000063000.004
    _case(
        "occupancy is rounded up from the exact quotient",
        placement=(0, 1, 2), times=(1, 1, 1), tensors=(Tensor(0, (1,), 10), Tensor(0, (2,), 10**12)),
        routes={(0, 1): _route("a", bytes_per_second=3000), (0, 2): _route("b", bytes_per_second=999_999_937)},
        start=(0, 3_333_335, 1_000_000_063_002),
        transfers=((0, 1, 1, 3_333_335, 3_333_335), (1, 2, 1, 1_000_000_063_002, 1_000_000_063_002)),
        order=((0,), (1,), (2,)), step=1_000_000_063_003, peak=(10 + 10**12, 10, 10**12),
    ),
    # d0 -> d1 | aaa~~~~(1)|   1 + 3 + 4 = 8
    _case(
        "the step lasts until the latest arrival",
        placement=(0, 1), times=(1, 0), tensors=(Tensor(0, (1,), 3),), routes={(0, 1): _route("c", latency_ns=4)},
        start=(0, 8), transfers=((0, 1, 1, 4, 8),), order=((0,), (1,)), step=8, peak=(3, 3),
    ),
)  # fmt: skip

MEMORY = (
    # d0 |0 222 11 3|   a 10 [0, 6), b 5 [1, 7), d 4 [4, 6), c 8 [6, 7)
    # At 1: 15; at 4: a 10 + b 5 + d 4 = 19; at 6: b 5 + c 8 = 13 (23 if a stayed).
    _case(
        "a tensor is held from its op's start to its last consumer's end",
        placement=(0, 0, 0, 0), times=(1, 2, 3, 1),
        tensors=(Tensor(0, (1, 2), 10), Tensor(2, (3,), 5), Tensor(3, (), 8), Tensor(1, (), 4)),
        start=(0, 4, 1, 6), order=((0, 2, 1, 3),), step=7, peak=(19,),
    ),
    # d0       |0 2222222222 3|   a 10 [0, 11), b 5 [1, 11), c 12 [11, 12)
    # d0 -> d1 | aaaaaaaaaa~~~~~1|
    # d0 at 1: a 10 + b 5 = 15; at 11: c 12 (22 if a stayed to its arrival, 27 if allocated before freed).
    _case(
        "a sent tensor is held to the end of its transfer's occupancy; frees come before allocations",
        placement=(0, 1, 0, 0), times=(1, 1, 10, 1), priority=(9, 9, 5, 1), routes={(0, 1): _route("c", latency_ns=5)},
        tensors=(Tensor(0, (1,), 10), Tensor(2, (), 5), Tensor(3, (), 12)),
        start=(0, 16, 1, 11), transfers=((0, 1, 1, 11, 16),), order=((0, 2, 3), (1,)), step=17, peak=(15, 10),
    ),
    # d0       |0 222222222222 3 4|   a 10 [0, 14), b 12 [13, 14), c 15 [14, 15)
    # d0 -> d1 | aaaaaaaaaa1      |
    # d0 at 13: a 10 + b 12 = 22; at 14: c 15 (25 if a stayed).
    _case(
        "a sent tensor is held for a consumer that ends after the transfer",
        placement=(0, 1, 0, 0, 0), times=(1, 1, 12, 1, 1), priority=(9, 9, 5, 3, 1),
        tensors=(Tensor(0, (1, 3), 10), Tensor(3, (), 12), Tensor(4, (), 15)),
        start=(0, 11, 1, 13, 14), transfers=((0, 1, 1, 11, 11),), order=((0, 2, 3, 4), (1,)), step=15, peak=(22, 10),
    ),
    # d0 -> d1 | aaaabbb ... b  |   both asked for at 1; b starts at 5, there at 105
    # d1       |333331       2  |   c 50 [0, 5), copy of a 4 [1, 6), copy of b 100 [5, 106)
    # d1 at 1: 54 (154 if b's copy came with its request); at 5: 104 (100 if copies came with their arrival).
    _case(
        "a copy is allocated when its transfer starts",
        placement=(0, 1, 1, 1), times=(1, 1, 1, 5),
        tensors=(Tensor(0, (1,), 4), Tensor(0, (2,), 100), Tensor(3, (), 50)),
        start=(0, 5, 105, 0), transfers=((0, 1, 1, 5, 5), (1, 1, 5, 105, 105)),
        order=((0,), (3, 1, 2)), step=106, peak=(104, 104),
    ),
    # d0 |0 1 2 3|   a 10 [0, 3), its view b nothing, c 5 [1, 2), d 8 [2, 3), e 15 [3, 4)
    # At 1: 15; at 2: 18 (22 if the view took memory); at 3: 15 (25 if a stayed).
    _case(
        "a view takes no memory and keeps its base until its own consumers end",
        placement=(0, 0, 0, 0), times=(1, 1, 1, 1), priority=(9, 8, 7, 6),
        tensors=(
            Tensor(0, (1,), 10), Tensor(0, (2,), 4, view_of=0), Tensor(1, (), 5), Tensor(2, (), 8), Tensor(3, (), 15),
        ),
        start=(0, 1, 2, 3), order=((0, 1, 2, 3),), step=4, peak=(18,),
    ),
    # d0       |0 22 333 4|   a 10 [0, 5), c 7 [1, 3), d 9 [3, 6), e 15 [6, 7)
    # d0 -> d1 | bbbb1    |   b, a view of a
    # d0 at 1: 17; at 3: a 10 + d 9 = 19; at 6: 15 (25 if a stayed).
    _case(
        "a view in transfer keeps its base; its copy takes the view's bytes",
        placement=(0, 1, 0, 0, 0), times=(1, 1, 2, 3, 1), priority=(9, 9, 8, 7, 6),
        tensors=(
            Tensor(0, (), 10), Tensor(0, (1,), 4, view_of=0), Tensor(2, (), 7), Tensor(3, (), 9), Tensor(4, (), 15),
        ),
        start=(0, 5, 1, 3, 6), transfers=((1, 1, 1, 5, 5),), order=((0, 2, 3, 4), (1,)), step=7, peak=(19, 4),
    ),
    # d0 -> d1 | bbbbaaaaaaaaaa|   the view is tensor 0 here and goes first
    # d1       |     1         2|   copies: b's 4 [1, 6), a's 10 [5, 16)
    _case(
        "a base and its view are sent as two tensors",
        placement=(0, 1, 1), times=(1, 1, 1), tensors=(Tensor(0, (1,), 4, view_of=1), Tensor(0, (2,), 10)),
        start=(0, 5, 15), transfers=((0, 1, 1, 5, 5), (1, 1, 5, 15, 15)), order=((0,), (1, 2)), step=16, peak=(10, 14),
    ),
    # d0 |0 1 2|   a 10 to the end, b 5 [1, 2), c 7 [2, 3): 10, 15, 17
    _case(
        "a kept view keeps its base to the end",
        placement=(0, 0, 0), times=(1, 1, 1), priority=(9, 8, 7),
        tensors=(Tensor(0, (1,), 10), Tensor(0, (), 4, keep=True, view_of=0), Tensor(1, (), 5), Tensor(2, (), 7)),
        start=(0, 1, 2), order=((0, 1, 2),), step=3, peak=(17,),
    ),
    # d0       |0            3|   a 10 to the end, e 5 [13, 14): 15
    # d0 -> d1 | aaaaaaaaaa   |
    # d1       |           12 |   a's copy 10 [1, 12), b 3 [11, 13), c 12 [12, 13): 13 at 11, 15 at 12 (25 if it stayed)
    _case(
        "a kept tensor is never freed where it was made, its copies are",
        placement=(0, 1, 1, 0), times=(1, 1, 1, 1),
        tensors=(
            Tensor(0, (1,), 10, keep=True), Tensor(1, (2,), 3), Tensor(2, (), 12), Tensor(2, (3,)), Tensor(3, (), 5),
        ),
        start=(0, 11, 12, 13), transfers=((0, 1, 1, 11, 11), (3, 0, 13, 13, 13)),
        order=((0, 3), (1, 2)), step=14, peak=(15, 15),
    ),
    # d0       |01|   100 to the end, of which a is 60 and its view b 20; c 5 [1, 2)
    # d0 -> d1 | a: 1 to 61, b: 61 to 81
    # d1       | 2: 61 to 62, 3: 81 to 82 |   7 from the start, copies: a's 60 [1, 62), b's 20 [61, 82): 87 at 61
    _case(
        "resident tensors cost nothing more at home; their copies, and those of their views, do",
        placement=(0, 0, 1, 1), times=(1, 1, 1, 1), resident=(100, 0, 0, 7),
        tensors=(Tensor(0, (1, 2), 60, resident=True), Tensor(0, (3,), 20, view_of=0), Tensor(1, (), 5)),
        start=(0, 1, 61, 81), transfers=((0, 1, 1, 61, 61), (1, 1, 61, 81, 81)),
        order=((0, 1), (2, 3)), step=82, peak=(105, 87),
    ),
    # d0 |(0)(1)2|   a 10 and d 50 over [0, 0), b 10 and c 3 over [0, 1)
    _case(
        "what is freed at the moment of its allocation never counts",
        placement=(0, 0, 0), times=(0, 0, 1),
        tensors=(Tensor(0, (1,), 10), Tensor(1, (2,), 10), Tensor(2, (), 3), Tensor(0, (), 50)),
        start=(0, 0, 0), order=((0, 1, 2),), step=1, peak=(13,),
    ),
    # d0 |0(1)|   a 4 [0, 1), b 9 from 1 to the end
    _case(
        "a kept result of a zero-time op at the very end counts",
        placement=(0, 0), times=(1, 0), tensors=(Tensor(0, (1,), 4), Tensor(1, (), 9, keep=True)),
        start=(0, 1), order=((0, 1),), step=1, peak=(9,),
    ),
)  # fmt: skip

HOSTS = (
    # h0 |000111222 |
    # d0 |:::0::1::2|   each op of 1 ns waits for its host, 3 ns: 3 * 3 + 1
    _case(
        "a chain of small ops is bound by its host",
        placement=(0, 0, 0), times=(1, 1, 1), hosts=(3, 3, 3), tensors=(Tensor(0, (1,), 2), Tensor(1, (2,), 5)),
        start=(0, 4, 7), begin=(3, 6, 9), order=((0, 1, 2),), step=10, peak=(7,),
    ),
    # h0 |00112233    |
    # d0 |::0000000123|   while op 0 computes, from 2 to 9, the host issues 1, 2, 3 until 8
    _case(
        "the host runs ahead behind a large kernel",
        placement=(0, 0, 0, 0), times=(7, 1, 1, 1), hosts=(2, 2, 2, 2),
        start=(0, 9, 10, 11), begin=(2, 9, 10, 11), order=((0, 1, 2, 3),), step=12, peak=(0,),
    ),
    # h0 |00.......1122|
    # d0 |::0000000::1:2|   the host issues op 1 when 0 has ended, at 9: 9 + 2; op 2 starts at 12, issued at 13
    _case(
        "a host that waits for an op issues the next one after its end",
        placement=(0, 0, 0), times=(7, 1, 1), hosts=(2, 2, 2), waits=(0,),
        start=(0, 9, 12), begin=(2, 11, 13), order=((0, 1, 2),), step=14, peak=(0,),
    ),
    # h0 |000 |
    # d0 |:::0|    a 4 arrives at d1 at 3 + 4 = 7: a zero-time op ends at 3, not at the 0 at which it starts
    # d1 |.......11|
    _case(
        "an op of no time ends when its host has issued it",
        placement=(0, 1), times=(0, 2), hosts=(3, 0), tensors=(Tensor(0, (1,), 4),),
        start=(0, 7), begin=(3, 7), transfers=((0, 1, 3, 7, 7),), order=((0,), (1,)), step=9, peak=(4, 4),
    ),
    # h0 |0022 |        h1 |111|
    # d0 |::0:2|   a host issues for its own device alone: 2 starts at 3, and is issued at 4
    # d1 |:::1 |
    _case(
        "each device has a host of its own",
        placement=(0, 1, 0), times=(1, 1, 1), hosts=(2, 3, 2),
        start=(0, 0, 3), begin=(2, 3, 4), order=((0, 2), (1,)), step=5, peak=(0, 0),
    ),
    # h0 |0001111 |
    # d0 |:::0aa:1|   a 2 is sent until 6, b 3 is held from 4, though op 1 computes from 7: 2 + 3
    # d1 |      2 |
    _case(
        "an op holds its memory from its start",
        placement=(0, 0, 1), times=(1, 1, 1), hosts=(3, 4, 0), tensors=(Tensor(0, (2,), 2), Tensor(1, (), 3)),
        start=(0, 4, 6), begin=(3, 7, 6), transfers=((0, 1, 4, 6, 6),), order=((0, 1), (2,)), step=8, peak=(5, 2),
    ),
)  # fmt: skip

HAND_CASES = (*DISPATCH, *TRANSFERS, *MEMORY, *HOSTS)
