"""The built-in kinds of devices and the links between them, each figure with its source; and presets.

docs/devices.md has the figures as tables and explains presets.

Peak rates are dense (no sparsity) and those of the fastest unit that multiplies matrices of the type: tensor cores
where the card has them. `float32` is the rate without TF32, as in PyTorch's matrix products by default
(`torch.backends.cuda.matmul.allow_tf32` is false); an op that may use TF32 has the dtype `tf32`. A type that is not in
a table runs at the float32 rate: integers other than int8, booleans, complex numbers, and types that the card emulates.
Memory is the nominal capacity; what the driver keeps of it is a matter of a reserve.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from types import MappingProxyType

from gdp.errors import InputError

MAX_DEVICES = 64
"""A set of devices fits in the bits of one integer."""

GB, TERA, GIB = 10**9, 10**12, 2**30
SOCKET = "upi"

# Asynchronous launches take 3-7 us: V. Volkov, J. Demmel, "Benchmarking GPUs to tune dense linear algebra", SC 2008.
# A. Gray, "Getting Started with CUDA Graphs" (NVIDIA, 2019): 9.6 us for a 2.9 us kernel launched synchronously.
# The host pays it, so it is one figure for all cards.
GPU_LAUNCH_NS = 5_000
# An eager PyTorch 2.13 `add` of one-element tensors takes 0.8-0.9 us on one core of an AMD EPYC (docs/devices.md has
# the command); rounded up for the wake-up of 16 threads, which was not measured.
CPU_LAUNCH_NS = 2_000


@dataclass(frozen=True, slots=True)
class Device:
    """A device; an op of a dtype that `flops_per_second` lacks runs at the "float32" rate, which is always there."""

    name: str
    kind: str
    memory_bytes: int
    flops_per_second: Mapping[str, int]
    memory_bytes_per_second: int
    launch_ns: int


@dataclass(frozen=True, slots=True)
class Route:
    """The way from one device to another; `channels` are names, routes that share one take turns on it."""

    latency_ns: int
    bytes_per_second: int
    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of link, per device and direction. `is_switched`: a device's port is shared by all its routes, else
    each pair of linked devices has wires of its own."""

    name: str
    bytes_per_second: int
    latency_ns: int
    is_switched: bool = True


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What devices of a kind share; `port` names the link of its slot (a CPU: of its socket), `nvlink` may be ""."""

    memory_bytes: int
    flops_per_second: Mapping[str, int]
    memory_bytes_per_second: int
    launch_ns: int
    port: str
    nvlink: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.port == SOCKET


# An assumption, that of the example in docs/machine-model.md, section 6: the host starts a copy like a kernel,
# whatever the wires; so one figure for PCIe and NVLink.
COPY_LATENCY_NS = 10_000

# One NVLink in one direction, by generation, nominal: 20 GB/s (P100 white paper), 25 GB/s (V100, A100, H100 white
# papers), 50 GB/s (Blackwell architecture technical brief: 18 links, 1.8 TB/s in both directions).
NVLINK_BYTES_PER_SECOND: Mapping[int, int] = MappingProxyType(
    {1: 20 * GB, 2: 25 * GB, 3: 25 * GB, 4: 25 * GB, 5: 50 * GB}
)

BY_REFERENCE_BYTES_PER_SECOND = 10**15
"""Of a route on which nothing is copied. A rate has to be finite (docs/machine-model.md, section 2); at this one 1 MB
occupies its route for 1 ns, the least there is, and 10 GB for 10 us, which is less than the latency."""

# PCIe x16 per direction after line coding: 15.75, 31.5, 63.0 GB/s (PCI Express Base Specification 3.0, 4.0, 5.0).
# Large copies reach 76-87 % of that: 12 GB/s on gen 3, 24 GB/s on gen 4 (same share), 55 GB/s on gen 5 (NVIDIA
# nvbandwidth, README: host_to_device_memcpy_ce).
# NVLink per GPU and direction: 4, 6, 12 and 18 links (P100, V100, A100, H100 white papers), nominal. Before NVSwitch a
# pair of P100 has one of the four links to itself (DGX-1 white paper, hybrid cube-mesh).
# UPI: two of 10.4 GT/s x 2 bytes (Intel ARK, Xeon Gold 6242), nominal.
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        link.name: link
        for link in (
            Link("pcie3", 12 * GB, COPY_LATENCY_NS),
            Link("pcie4", 24 * GB, COPY_LATENCY_NS),
            Link("pcie5", 55 * GB, COPY_LATENCY_NS),
            Link("nvlink1", NVLINK_BYTES_PER_SECOND[1], COPY_LATENCY_NS, is_switched=False),
            Link("nvlink2", 6 * NVLINK_BYTES_PER_SECOND[2], COPY_LATENCY_NS),
            Link("nvlink3", 12 * NVLINK_BYTES_PER_SECOND[3], COPY_LATENCY_NS),
            Link("nvlink4", 18 * NVLINK_BYTES_PER_SECOND[4], COPY_LATENCY_NS),
            Link(SOCKET, 41_600_000_000, 1_000),
        )
    }
)

# A message between two hosts of a data centre takes in the order of 10 us, besides the copy to and from the card:
# L. Barroso et al., "Attack of the Killer Microseconds", Communications of the ACM 60(4), 2017.
NETWORK_LATENCY_NS = 10_000


def _rates(**tera_per_second: float) -> Mapping[str, int]:
    return MappingProxyType({dtype: round(value * TERA) for dtype, value in tera_per_second.items()})


def _gpu(gib: int, rates: Mapping[str, int], gb_per_second: int, port: str, nvlink: str = "") -> DeviceKind:
    return DeviceKind(gib * GIB, rates, gb_per_second * GB, GPU_LAUNCH_NS, port, nvlink)


_HOPPER = _rates(
    float64=67, float32=67, tf32=494.5, float16=989.5, bfloat16=989.5, float8_e4m3fn=1979, float8_e5m2=1979, int8=1979
)  # fmt: skip

KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {
        # NVIDIA Tesla P100 PCIe data sheet (2016): 4.7 / 9.3 / 18.7 TFLOP/s, 16 GB at 732 GB/s, PCIe 3.0 x16.
        "p100-pcie-16g": _gpu(16, _rates(float64=4.7, float32=9.3, float16=18.7), 732, "pcie3"),
        # NVIDIA Tesla P100 (SXM2) data sheet (2016): 5.3 / 10.6 / 21.2 TFLOP/s, 16 GB at 732 GB/s, NVLink 160 GB/s.
        "p100-sxm-16g": _gpu(16, _rates(float64=5.3, float32=10.6, float16=21.2), 732, "pcie3", "nvlink1"),
        # NVIDIA V100 data sheet (2020), SXM2: 7.8 / 15.7 / 125 (tensor) TFLOP/s, 32 GB at 900 GB/s, NVLink 300 GB/s.
        "v100-sxm-32g": _gpu(32, _rates(float64=7.8, float32=15.7, float16=125), 900, "pcie3", "nvlink2"),
        # NVIDIA A100 data sheet (2021), 80 GB SXM: FP64 tensor 19.5, FP32 19.5, TF32 156, FP16 and BF16 312 TFLOP/s,
        # INT8 624 TOP/s, 2039 GB/s, NVLink 600 GB/s, PCIe Gen4.
        "a100-sxm-80g": _gpu(
            80,
            _rates(float64=19.5, float32=19.5, tf32=156, float16=312, bfloat16=312, int8=624),
            2039,
            "pcie4",
            "nvlink3",
        ),
        # NVIDIA H100 data sheet (2023), SXM: FP64 tensor 67, FP32 67 TFLOP/s; with sparsity, so halved here: TF32 989,
        # FP16 and BF16 1979, FP8 and INT8 3958; 3.35 TB/s, NVLink 900 GB/s, PCIe Gen5.
        "h100-sxm-80g": _gpu(80, _HOPPER, 3350, "pcie5", "nvlink4"),
        # NVIDIA H200 data sheet (2024), SXM: the rates of the H100, 141 GB at 4.8 TB/s.
        "h200-sxm-141g": _gpu(141, _HOPPER, 4800, "pcie5", "nvlink4"),
        # NVIDIA L4 data sheet (2023): FP32 30.3 TFLOP/s; with sparsity, so halved here: TF32 120, FP16, BF16 242,
        # FP8 and INT8 485; 24 GB at 300 GB/s, PCIe Gen4 x16. FP64 is 1/64 of FP32 (Ada architecture white paper).
        "l4-24g": _gpu(
            24,
            _rates(
                float64=0.473,
                float32=30.3,
                tf32=60,
                float16=121,
                bfloat16=121,
                float8_e4m3fn=242.5,
                float8_e5m2=242.5,
                int8=242.5,
            ),
            300,
            "pcie4",
        ),
        # NVIDIA Ampere GA102 architecture white paper, appendix A: FP32 35.6, TF32 35.6, FP16 and BF16 with FP32
        # accumulation 71 TFLOP/s, INT8 284 TOP/s, FP64 1/64 of FP32, 24 GB at 936 GB/s, PCIe Gen4.
        "rtx3090-24g": _gpu(
            24, _rates(float64=0.556, float32=35.6, tf32=35.6, float16=71, bfloat16=71, int8=284), 936, "pcie4"
        ),
        # NVIDIA Ada architecture white paper, appendix A: FP32 82.6, TF32 82.6, FP16 and BF16 165.2, FP8 330.3 TFLOP/s,
        # each with FP32 accumulation, INT8 660.6 TOP/s, FP64 1/64 of FP32; 24 GB, 1008 GB/s, PCIe Gen4.
        "rtx4090-24g": _gpu(
            24,
            _rates(
                float64=1.29,
                float32=82.6,
                tf32=82.6,
                float16=165.2,
                bfloat16=165.2,
                float8_e4m3fn=330.3,
                float8_e5m2=330.3,
                int8=660.6,
            ),
            1008,
            "pcie4",
        ),
        # Intel ARK, Xeon Gold 6242: 16 cores at 2.8 GHz with two AVX-512 FMA units: 16 x 2 x 16 lanes x 2 x 2.8e9 =
        # 2.867e12 float32, half of it in float64, four times in int8 (VNNI); 6 channels of DDR4-2933: 140.8 GB/s; six
        # modules of 32 GiB are an assumption.
        "cpu-16core": DeviceKind(
            192 * GIB, _rates(float64=1.4336, float32=2.8672, int8=11.4688), 140_800_000_000, CPU_LAUNCH_NS, SOCKET
        ),
    }
)

_GROUP = re.compile(r"(?:([0-9]+)x)?([^:]*)(?::(.*))?")
_HOSTS = re.compile(r"([0-9]+)x\((.*)\)@([0-9]{1,6})gbit")


@dataclass(frozen=True, slots=True)
class _Part:
    """A device of a preset with its links; `host` is "" or "host0." and so on, `index` its number on the host."""

    device: Device
    host: str
    index: int
    port: Link
    nvlink: Link | None

    @property
    def is_cpu(self) -> bool:
        return self.port.name == SOCKET


def preset(text: str) -> tuple[list[Device], dict[tuple[int, int], Route]]:
    """The devices of a preset such as `4xp100-pcie-16g` and the route of every ordered pair of them.

    preset = local | COUNT "x(" local ")@" RATE "gbit"      hosts, each with a network card of RATE in each direction
    local  = group { "+" group }
    group  = [ COUNT "x" ] KIND [ ":" LINK ]                LINK: pcie3-5 or nvlink1-4 instead of the kind's own
    """
    hosts = _HOSTS.fullmatch(text)
    if hosts is None:
        parts = _parts(text, text, "")
        return [part.device for part in parts], _routes(parts, None)
    num_hosts, gbit = int(hosts[1][:6]), int(hosts[3])
    if num_hosts == 0 or gbit == 0:
        raise InputError(f"devices {text!r}: hosts and network rate must be at least 1, as in 2x(4xl4-24g)@10gbit")
    num_local = len(_parts(hosts[2], text, ""))
    _check_count(text, num_hosts * num_local)
    parts = [part for number in range(num_hosts) for part in _parts(hosts[2], text, f"host{number}.")]
    return [part.device for part in parts], _routes(parts, Link("network", gbit * GB // 8, NETWORK_LATENCY_NS))


def suggest(name: str, known: Sequence[str]) -> str:
    """The remedy for an unknown name: near matches, else all known names."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"


def _check_count(text: str, num_devices: int) -> None:
    if not 1 <= num_devices <= MAX_DEVICES:
        raise InputError(f"devices {text!r}: these are {num_devices} devices; 1 to {MAX_DEVICES} are expected")


def _parts(local: str, text: str, host: str) -> list[_Part]:
    parts: list[_Part] = []
    counts = {"gpu": 0, "cpu": 0}
    for group in local.split("+"):
        match = _GROUP.fullmatch(group.strip())
        if match is None or match[2] not in KINDS:
            name = match[2] if match else group
            raise InputError(f"devices {text!r}: no kind {name!r} is built in; {suggest(name, list(KINDS))}")
        kind, count = KINDS[match[2]], int((match[1] or "1")[:6])
        _check_count(text, count and len(parts) + count)
        override = match[3]
        if override is not None and (override not in LINKS or override == SOCKET or kind.is_cpu):
            links = [name for name in LINKS if name != SOCKET]
            raise InputError(f"devices {text!r}: no link {override!r} for {match[2]}; {suggest(override, links)}")
        is_pcie = override is not None and override.startswith("pcie")
        port = LINKS[override if override and is_pcie else kind.port]
        nvlink = LINKS.get(override or kind.nvlink) if not is_pcie else None
        for _ in range(count):
            family = "cpu" if kind.is_cpu else "gpu"
            device = Device(
                f"{host}{family}{counts[family]}", match[2], kind.memory_bytes, kind.flops_per_second,
                kind.memory_bytes_per_second, kind.launch_ns,
            )  # fmt: skip
            parts.append(_Part(device, host, counts[family], port, nvlink))
            counts[family] += 1
    return parts


def _routes(parts: Sequence[_Part], network: Link | None) -> dict[tuple[int, int], Route]:
    routes = {}
    for source, target in permutations(range(len(parts)), 2):
        a, b = parts[source], parts[target]
        if a.host != b.host:
            routes[source, target] = _slot_route(a, b, network)
        elif a.is_cpu and b.is_cpu:
            channels = (f"{a.device.name}.{SOCKET}.out", f"{b.device.name}.{SOCKET}.in")
            routes[source, target] = Route(a.port.latency_ns, a.port.bytes_per_second, channels)
        else:
            routes[source, target] = _nvlink_route(a, b) or _slot_route(a, b, None)
    return routes


def _nvlink_route(a: _Part, b: _Part) -> Route | None:
    if a.nvlink is None or a.nvlink != b.nvlink:
        return None
    link, names = a.nvlink, (a.device.name, b.device.name)
    if link.is_switched:
        return Route(link.latency_ns, link.bytes_per_second, (f"{names[0]}.nvlink.out", f"{names[1]}.nvlink.in"))
    # The hybrid cube-mesh: two fully connected quads, each card wired to its counterpart in the other quad.
    is_wired = a.index // 4 == b.index // 4 or (a.index // 8 == b.index // 8 and a.index % 4 == b.index % 4)
    return Route(link.latency_ns, link.bytes_per_second, ("->".join(names),)) if is_wired else None


def _slot_route(a: _Part, b: _Part, network: Link | None) -> Route:
    """Out of a's slot, over the network if any, into b's slot, at the pace of the slowest; a CPU has no slot."""
    slots = [part.port for part in (a, b) if not part.is_cpu]
    up = () if a.is_cpu else (f"{a.device.name}.pcie.up",)
    between = () if network is None else (f"{a.host}net.out", f"{b.host}net.in")
    down = () if b.is_cpu else (f"{b.device.name}.pcie.down",)
    copy_ns = max((slot.latency_ns for slot in slots), default=0)  # one copy, whatever it passes
    network_ns = 0 if network is None else network.latency_ns
    rates = [link.bytes_per_second for link in (*slots, network) if link is not None]
    return Route(copy_ns + network_ns, min(rates), (*up, *between, *down))
