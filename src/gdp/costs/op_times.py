"""Costs: the time of each op on each device, and how long a tensor occupies a route. Exact integers, rounded up once.

docs/machine-model.md, sections 1 to 3, is the definition. N ops, D devices, T tensors.

An op's time on a device is its `time_ns` for the device's name, else for the device's kind, else the roofline
(S. Williams, A. Waterman, D. Patterson, "Roofline", Communications of the ACM 52(4), 2009) and the launch:

    launch_ns + max(ceil(flops * 1e9 / peak), ceil(bytes_accessed * 1e9 / memory_bandwidth))

with the device's peak rate for the op's dtype. If it has none, float8 types run at the bfloat16 rate, else at that of
float16: without units for them, kernels unpack such weights and multiply halves. All others run at the float32 rate. An
op without flops and bytes launches nothing and takes 0."""

from collections import Counter
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, Bool, wide
from gdp.cluster import Cluster, Device
from gdp.cluster.catalogue import KINDS
from gdp.cluster.device import CUDA_GRAPHS
from gdp.costs.collectives import COLLECTIVE
from gdp.costs.collectives import KINDS as EXCHANGES
from gdp.costs.fusion import fused, joins_ops
from gdp.costs.kernels import Kernels, kernels_of
from gdp.costs.overlap import exposed
from gdp.costs.rates import HALVES, SMALL_FLOATS, kernel_times, peak_rate
from gdp.costs.table import class_of, rule_of
from gdp.errors import InputError, suggest
from gdp.graph import Graph
from gdp.graph.fingerprint import numbered
from gdp.graph.shapes import parsed_calls

NS_PER_SECOND = 10**9
# what PyTorch calls types that devices have no rate of their own for; they take float32's as a matter of course
_PLAIN_DTYPES = {"bool", "tf32", "complex32", "complex64", "complex128"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
ANY_RANKS = -1  # of a collective whose shapes are not known: it runs on groups of any size
_MAX = 2**63 - 1
_MOST_TIMES = 2**28  # of ops on unlike devices, 2 GB


def op_times(graph: Graph, cluster: Cluster) -> I64:
    """int64[N, D]: ns of each op on each device, -1 where it cannot run. InputError names an op that overflows. The
    table of devices that are all alike is broadcast from one column; that of many unlike ones takes some GB."""
    times_ns, device_class = op_time_classes(graph, cluster)
    if times_ns.shape[1] == 1:
        return wide(times_ns, cluster.num_devices)
    if cluster.is_large and graph.num_ops * cluster.num_devices > _MOST_TIMES:
        most = _MOST_TIMES // cluster.num_devices
        raise InputError(
            f"graph {graph.name!r} has {graph.num_ops:,} ops, and {cluster.name!r} has {cluster.num_devices} "
            f"devices of {times_ns.shape[1]} kinds; take devices of one kind, or a graph of up to {most:,} ops"
        )
    return np.take(times_ns, device_class, axis=1)


def op_time_classes(graph: Graph, cluster: Cluster) -> tuple[I64, I64]:
    """Returns the times [N, C] of `op_times` on each class of devices that are alike, and the class [D] of each."""
    measured, rows_by_dtype, num_ranks = _measured_times(graph), _rows_by_dtype(graph), ranks_of(graph)
    columns: dict[object, I64] = {}  # [N] by figures: most devices are like others
    classes = []
    for device in cluster.devices:
        names = [name for name in (device.kind, device.name) if name in measured]
        rates = tuple(sorted(device.flops_per_second.items()))
        rest = device.memory_bytes_per_second, device.launch_ns, tuple(device.achieved.items()), device.runtime
        figures = rates, *rest, device.issue_ns, device.num_cards, device.link, *names
        if figures not in columns:
            times_ns, is_measured = _times_on(device, measured, graph.num_ops)
            modelled_ns = (
                _by_kernels(graph, device)
                if has_kernels(graph, device)
                else _roofline(graph, device, rows_by_dtype, ~is_measured)
            )
            if num_ranks.any():
                modelled_ns = np.where(num_ranks, _by_kernels(graph, device), modelled_ns)
            known_ns = np.where(is_measured, times_ns, modelled_ns)
            known_ns = np.where(is_measured, known_ns, exposed(graph, known_ns))
            columns[figures] = np.where(_can_exchange(num_ranks, device), known_ns, -1)
        classes.append(list(columns).index(figures))
    return np.stack(list(columns.values()), axis=1), np.array(classes, np.int64)


def ranks_of(graph: Graph) -> I64:
    """Returns the ranks [N] that each op exchanges between: 0 for other ops, ANY_RANKS where its shapes tell nothing.
    InputError names an op of an unknown kind."""
    num_ranks = np.zeros(graph.num_ops, np.int64)
    if kinds := {kind for kind in set(graph.kinds) if class_of(kind) == COLLECTIVE}:
        known: dict[tuple[str, str], int] = {}
        for op in (op for op, kind in enumerate(graph.kinds) if kind in kinds):
            call = graph.kinds[op], graph.shapes[op]
            if call not in known:
                known[call] = _ranks_of_call(*call, f"op {op} {graph.op_names[op]!r}")
            num_ranks[op] = known[call]
    return num_ranks


def _ranks_of_call(kind: str, shapes: str, where: str) -> int:
    if (exchange := kind.removeprefix(f"{COLLECTIVE}.")) not in EXCHANGES:
        raise InputError(f"{where}: {exchange!r} is no kind of collective; {suggest(exchange, EXCHANGES)}")
    calls = parsed_calls(shapes)
    count = next(iter(calls[0].arguments[1:]), None) if calls else ANY_RANKS
    if not isinstance(count, int) or (calls and count < 2):
        raise InputError(f"{where}: has {count!r} ranks; a number of 2 or more is expected behind the tensor")
    return count


def _can_exchange(num_ranks: I64, device: Device) -> Bool:
    """Returns [N] the ops but collectives of ranks that are no parts of its cards."""
    fits = (num_ranks == ANY_RANKS) | (device.num_cards % np.maximum(num_ranks, 1) == 0)
    return np.asarray((num_ranks == 0) | (fits & bool(device.group)))


def has_shares(graph: Graph, device: Device) -> bool:
    """Returns whether `device` is a group of unequal shares, whose members' times the graph has."""
    return bool(device.group) and any(device.name in table for table in graph.times_ns[:1])


def count_time_sources(graph: Graph, cluster: Cluster) -> dict[str, dict[str, int]]:
    """By device name, how many of the N ops have which source: `measured`, `cannot_run`, `roofline` or `free`."""
    measured, num_ranks = _measured_times(graph), ranks_of(graph)
    is_free = (graph.flops == 0) & (graph.bytes_accessed == 0)
    counts = {}
    for device in cluster.devices:
        times_ns, is_measured = _times_on(device, measured, graph.num_ops)
        cannot = ~_can_exchange(num_ranks, device)
        times_ns, is_measured = np.where(cannot, -1, times_ns), is_measured & (not has_shares(graph, device)) | cannot
        counts[device.name] = {
            "measured": int((is_measured & (times_ns >= 0)).sum()),
            "cannot_run": int((is_measured & (times_ns < 0)).sum()),
            "roofline": int((~is_measured & ~is_free).sum()),
            "free": int((~is_measured & is_free).sum()),
        }
    return counts


def transfer_occupancy_ns(tensor_bytes: I64, bytes_per_second: int) -> I64:
    """int64[T]: `ceil(bytes * 1e9 / bytes_per_second)`, exactly. InputError names a tensor that overflows int64."""
    if len(tensor_bytes) and int(tensor_bytes.max()) > _largest_amount(_MAX, bytes_per_second):
        tensor = int(np.argmax(tensor_bytes))
        raise InputError(
            f"tensor {tensor}: {tensor_bytes[tensor]} bytes at {bytes_per_second} bytes per second take 2^63 ns or more"
            "; check its bytes and the link's bandwidth"
        )
    return _ceil_ns(tensor_bytes, bytes_per_second)


def unused_names(graph: Graph, cluster: Cluster) -> list[str]:
    """One sentence for each dtype that a kind of device has no rate of, such as bfloat16 on a V100, and for each name
    in `time_ns` that is no device or kind: typing errors would change costs silently."""
    rates = {device.kind: device.flops_per_second for device in cluster.devices}
    dtypes = Counter(dtype for dtype, flops in zip(graph.dtypes, graph.flops.tolist(), strict=True) if flops)
    places = Counter(where for table in graph.times_ns for where in table)
    known = {device.name for device in cluster.devices} | {device.kind for device in cluster.devices} | set(KINDS)
    sentences: list[str] = []
    for dtype, count in dtypes.items():
        has_half = dtype.startswith(SMALL_FLOATS)
        lacking = [
            kind
            for kind, known_rates in rates.items()
            if dtype not in known_rates and not (has_half and any(half in known_rates for half in HALVES))
        ]
        if lacking and dtype not in _PLAIN_DTYPES:
            is_nowhere = len(lacking) == len(rates)
            where = "no device has a rate" if is_nowhere else f"{', '.join(lacking)} has no rate"
            sentences.append(f"{count} ops compute in {dtype!r}, for which {where}: that of float32 is taken")
    return sentences + [
        f"{count} ops have a time on {where!r}, which is no device of {cluster.name!r} and no built-in kind"
        for where, count in places.items()
        if where not in known
    ]


def _measured_times(graph: Graph) -> Mapping[str, tuple[list[int], list[int]]]:
    """Returns the ops that the graph gives a time, and these times, by the name or kind of devices."""
    entries: dict[str, tuple[list[int], list[int]]] = {}
    for op, table in enumerate(graph.times_ns if any(graph.times_ns) else ()):
        for where, time_ns in table.items():
            ops, times = entries.setdefault(where, ([], []))
            ops.append(op)
            times.append(time_ns)
    return entries


def times_given(graph: Graph, device: Device) -> tuple[I64, Bool]:
    """Returns the times [N] that the graph gives on `device`, 0 where it gives none, and where it gives one."""
    return _times_on(device, _measured_times(graph), graph.num_ops)


def _times_on(device: Device, measured: Mapping[str, tuple[list[int], list[int]]], num_ops: int) -> tuple[I64, Bool]:
    """Returns the times [N] that the graph gives on `device`, 0 where it gives none, and where it gives one."""
    times_ns, is_measured = np.zeros(num_ops, np.int64), np.zeros(num_ops, np.bool_)
    for where in (device.kind, device.name):  # the name last: it overrides the kind
        if where in measured:
            ops, times = measured[where]
            times_ns[ops], is_measured[ops] = times, True
    return times_ns, is_measured


def _rows_by_dtype(graph: Graph) -> Mapping[str, npt.NDArray[np.intp]]:
    dtypes, code = numbered(graph.dtypes)
    return {dtype: np.flatnonzero(code == number) for number, dtype in enumerate(dtypes)}


_KNOWN: WeakKeyDictionary[Graph, dict[str, Kernels]] = WeakKeyDictionary()  # as long as their graphs are there


def has_kernels(graph: Graph, device: Device) -> bool:
    """Returns whether ops are priced by their kernels: `device` tells what it achieves, and the graph has shapes."""
    return bool(device.achieved) and any(graph.shapes)


def step_kernels(graph: Graph, runtime: str) -> Kernels:
    """Returns the kernels of a step as it is run, which are made once for several devices and their hosts. Servers
    replay forward passes from CUDA graphs; they have fused them, and joined products that read one tensor."""
    known = _KNOWN.setdefault(graph, {})
    if runtime not in known:
        is_fused = joins_ops(runtime, is_trained=bool(graph.is_in_phase("backward").any()))
        fusion = fused(graph, with_siblings=runtime == CUDA_GRAPHS) if is_fused else None
        known[runtime] = kernels_of(graph, rule_of, fusion)
    return known[runtime]


def _by_kernels(graph: Graph, device: Device) -> I64:
    """[N] the modelled time on a `device` that says what it achieves: of an op's kernels together, rounded up."""
    kernels = step_kernels(graph, device.runtime)
    times_ns = np.ceil(kernels.summed(kernel_times(kernels, device)))
    if times_ns.max() >= 2.0**62:
        op = int(np.argmax(times_ns))
        raise InputError(
            f"op {op} {graph.op_names[op]!r} takes 2^62 ns or more on device {device.name!r}; check the op and the "
            "device's figures"
        )
    return times_ns.astype(np.int64)


def _roofline(graph: Graph, device: Device, rows_by_dtype: Mapping[str, npt.NDArray[np.intp]], is_needed: Bool) -> I64:
    """[N] the modelled time on `device`; 0 where it is not needed."""
    rates = device.flops_per_second
    flops, bytes_accessed = np.where(is_needed, graph.flops, 0), np.where(is_needed, graph.bytes_accessed, 0)
    longest_ns = _MAX - device.launch_ns
    result = np.zeros(graph.num_ops, np.int64)
    for dtype, rows in rows_by_dtype.items():
        rate = peak_rate(rates, dtype)
        _check_amounts(graph, device, flops[rows], rows, rate, longest_ns, "flops")
        result[rows] = _ceil_ns(flops[rows], rate)
    rate = device.memory_bytes_per_second
    _check_amounts(graph, device, bytes_accessed, np.arange(graph.num_ops), rate, longest_ns, "bytes_accessed")
    np.maximum(result, _ceil_ns(bytes_accessed, rate), out=result)
    result[(flops > 0) | (bytes_accessed > 0)] += device.launch_ns
    return result


def _check_amounts(
    graph: Graph, device: Device, amounts: I64, rows: npt.NDArray[np.intp], rate: int, longest_ns: int, what: str
) -> None:
    worst = int(np.argmax(amounts))
    if int(amounts[worst]) > _largest_amount(longest_ns, rate):
        op = int(rows[worst])
        raise InputError(
            f"op {op} {graph.op_names[op]!r}: {what} {amounts[worst]} at {rate} per second take 2^63 ns or more "
            f"on device {device.name!r}; check the op and the device's figures"
        )


def _largest_amount(longest_ns: int, per_second: int) -> int:
    """The largest amount that takes at most `longest_ns`: ceil(x * 1e9 / r) <= t exactly if x * 1e9 <= t * r."""
    return longest_ns * per_second // NS_PER_SECOND


def _ceil_ns(amounts: I64, per_second: int) -> I64:
    """`ceil(amounts * 1e9 / per_second)` exactly, where it fits: long division, three decimal digits at a time."""
    if per_second > _MAX // 1000:  # a remainder times 1000 would overflow
        return np.array([-(-amount * NS_PER_SECOND // per_second) for amount in amounts.tolist()], np.int64)
    quotient, remainder = np.divmod(amounts, per_second)
    for _ in range(3):
        digits, remainder = np.divmod(remainder * 1000, per_second)
        quotient = quotient * 1000 + digits
    result: I64 = quotient + (remainder > 0)
    return result
