"""The built-in kinds of devices, the links between them, and machines: `catalogue.toml` has the figures and sources. A
type without a rate runs at the float32 rate: integers but int8, booleans, complex numbers, and emulated types. Memory
of GPUs is what a program can use: the total that CUDA reports less CONTEXT_GIB for the program's own context."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import numpy as np

from gdp.cluster.achieved import figures_of_kind
from gdp.cluster.device import Device

GB, TERA, MIB, GIB = 10**9, 10**12, 2**20, 2**30
SOCKET, NETWORK = "upi", "network"

# An estimate of a CUDA context: second processes on a card, which seem to hold little else, have "470.64 MiB memory
# in use", "502.71 MiB" (github.com/3DTopia/Phidias-Diffusion/issues/8, RTX 4090;
# github.com/Ksuriuri/index-tts-vllm/issues/91, RTX 5090).
CONTEXT_GIB = 0.5
# The total over the nominal capacity, for cards without a source of their own (RTX 4090 0.985, RTX 5090 0.980, RTX 3080
# 0.978, A30 0.980).
TOTAL_SHARE = 0.978
# Metal's recommendedMaxWorkingSetSize by default, of unified memory: three quarters (github.com/ggml-org/llama.cpp
# prints it when it starts; `sysctl iogpu.wired_limit_mb` raises it).
APPLE_SHARE = 0.75

# Asynchronous launches take 3-7 us: V. Volkov, J. Demmel, "Benchmarking GPUs to tune dense linear algebra", SC 2008.
# A. Gray, "Getting Started with CUDA Graphs" (NVIDIA, 2019): 9.6 us for a 2.9 us kernel launched synchronously.
# The host pays it, so it is one figure for all cards.
GPU_LAUNCH_NS = 5_000
# An eager PyTorch 2.13 `add` of one-element tensors takes 0.8-0.9 us on one core of an AMD EPYC (docs/devices.md has
# the command); rounded up for the wake-up of 16 threads, which was not measured.
CPU_LAUNCH_NS = 2_000

# An assumption, that of the example in docs/machine-model.md, section 6: the host starts a copy like a kernel,
# over any wires; so one figure for PCIe and NVLink.
COPY_LATENCY_NS = 10_000
# A message between two hosts of a data centre takes in the order of 10 us, besides the copy to and from the card:
# L. Barroso et al., "Attack of the Killer Microseconds", Communications of the ACM 60(4), 2017.
NETWORK_LATENCY_NS = 10_000

# One NVLink in one direction, by generation, nominal: 20 GB/s (P100 white paper), 25 GB/s (V100, A100, H100 white
# papers), 50 GB/s (Blackwell architecture technical brief: 18 links, 1.8 TB/s in both directions).
NVLINK_BYTES_PER_SECOND = MappingProxyType({1: 20 * GB, 2: 25 * GB, 3: 25 * GB, 4: 25 * GB, 5: 50 * GB})

BY_REFERENCE_BYTES_PER_SECOND = 10**15
"""The rate of a route on which nothing is copied.

A rate has to be finite (docs/machine-model.md, section 2); at this one 1 MB occupies its route for 1 ns, the least
there is, and 10 GB for 10 us, which is less than the latency."""


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A kind of link, per device and direction. `is_switched`: all routes of a device share its port."""

    name: str
    bytes_per_second: int
    latency_ns: int
    is_switched: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeFigures:
    """Figures of exchanges over a kind of link; `network`, between hosts, has a share of the rate of a route."""

    rates: Mapping[int, float]  # bytes per second of a card in each direction, by the number of cards: `is_switched`
    share: float  # of the rate of a route, in place of `rates`
    local_rate: float  # bytes per second of the pass over a card's own part
    protocols: Mapping[str, tuple[int, int, float]]  # ns to begin, ns a step, share of the rate
    nvls: tuple[int, float] | None  # sums in the switch: ns, bytes per second
    tree_ns: Mapping[str, int]  # a step of a tree between hosts, by protocol
    # sums of servers by one kernel a card: ns, bytes per second, by the number of passes
    one_kernel: Mapping[int, tuple[int, float]] = field(default_factory=lambda: MappingProxyType({}))
    # the cards are all that exchange at once; else those of one exchange, and a route between two has the rate of two
    is_switched: bool = True

    @property
    def latency_ns(self) -> int:
        """The least time of a message."""
        return sum(self.protocols["ll"][:2])

    def over(self, bytes_per_second: int, latency_ns: int, num_cards: int) -> "ExchangeFigures":
        """Returns the figures in proportion to a route between two of `num_cards`, where it has others than these."""
        num_cards, most = (num_cards, max(num_cards, 8)) if self.is_switched else (2, 2)
        is_known = any(bytes_per_second == self.rate(count) for count in range(2, most + 1))
        return self._scaled(1.0 if is_known else bytes_per_second / self.rate(num_cards), latency_ns)

    def with_latency(self, latency_ns: int) -> "ExchangeFigures":
        """Returns the figures in proportion to a route with another latency."""
        return self._scaled(1.0, latency_ns)

    def _scaled(self, rate: float, latency_ns: int) -> "ExchangeFigures":
        latency = latency_ns / self.latency_ns
        if rate == latency == 1.0:
            return self
        rates = {count: known * rate for count, known in self.rates.items()}
        parts = self.protocols.items()
        protocols = {name: (round(begin * latency), round(step * latency), part) for name, (begin, step, part) in parts}
        nvls = None if self.nvls is None else (round(self.nvls[0] * latency), self.nvls[1] * rate)
        own = {passes: (round(begin * latency), own * rate) for passes, (begin, own) in self.one_kernel.items()}
        tree_ns = {name: round(step * latency) for name, step in self.tree_ns.items()}
        return replace(self, rates=rates, protocols=protocols, nvls=nvls, tree_ns=tree_ns, one_kernel=own)

    def rate(self, num_cards: int) -> int:
        """Returns bytes per second for `num_cards`: on a line in logarithms between those that are known."""
        counts, rates = (np.log(list(numbers)) for numbers in (self.rates.keys(), self.rates.values()))
        return round(float(np.exp(np.interp(math.log(num_cards), counts, rates))))


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A host as it is sold or rented: its devices, and its network cards for them."""

    local: str
    network: str  # the number of cards and the rate of one
    source: str


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """The figures that devices of a kind share; `port` names the link of its slot (a CPU's socket)."""

    memory_bytes: int  # that a program can use
    flops_per_second: Mapping[str, int]
    memory_bytes_per_second: int
    launch_ns: int
    port: str
    nvlink: str = ""
    driver: str = ""  # its name there, without NVIDIA in front
    watts: float | None = None  # at most; None: not known
    dollars_per_hour: float | None = None  # of a cloud, on demand, with its share of the host; None: not known
    issue_ns: int = 0
    achieved: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # by class of kernel

    @property
    def is_cpu(self) -> bool:
        return self.port == SOCKET

    def device(self, name: str, kind: str, memory_bytes: int | None = None) -> Device:
        """Returns the device `name` of this kind, which is called `kind`, with other memory if it is given."""
        memory_bytes = self.memory_bytes if memory_bytes is None else memory_bytes
        rates = self.flops_per_second, self.memory_bytes_per_second
        return Device(name, kind, memory_bytes, *rates, self.launch_ns, self.issue_ns, self.achieved)


_TABLES = tomllib.loads((files("gdp.cluster") / "catalogue.toml").read_text(encoding="utf-8"))


def _link(name: str, row: Mapping[str, Any]) -> LinkKind:
    rate, latency_ns = round(row["rate"] * GB), row.get("latency_ns", COPY_LATENCY_NS)
    return LinkKind(name, rate, latency_ns, row.get("is_switched", True))


def _exchange(name: str, row: Mapping[str, Any]) -> ExchangeFigures:
    known = [name for name in ("ll", "ll128", "simple") if name in row]
    protocols = {x: (round(row[x][0] * 1000), round(row[x][1] * 1000), float(row[x][2])) for x in known}
    nvls = (row["nvls"][0] * 1000, row["nvls"][1] * float(GB)) if "nvls" in row else None
    tree_ns = {name: round(us * 1000) for name, us in zip(protocols, row.get("tree", ()), strict=False)}
    rates = {int(count): rate * float(GB) for count, rate in row.get("rates", {}).items()}
    own = {
        passes: (round(us * 1000), rate * float(GB)) for passes, (us, rate) in enumerate(row.get("one_kernel", ()), 1)
    }
    is_switched = _TABLES["links"].get(name, {}).get("is_switched", True)
    local_rate = row.get("local", math.inf) * GB
    return ExchangeFigures(rates, row.get("share", 1.0), local_rate, protocols, nvls, tree_ns, own, is_switched)


def _kind(name: str, row: Mapping[str, Any]) -> DeviceKind:
    card, memory = row["card"], row["memory"]
    is_cpu, gib = card["port"] == SOCKET, memory["gib"]
    if is_cpu or "usable_gib" in memory:
        usable_bytes = gib * GIB
    elif "apple" in row["tera"]:
        usable_bytes = int(gib * APPLE_SHARE * GIB)
    else:
        usable_bytes = int((memory.get("total_gib", gib * TOTAL_SHARE) - CONTEXT_GIB) * 1024) * MIB
    flops = MappingProxyType({dtype: round(value * TERA) for dtype, value in _tera_rates(row["tera"]).items()})
    launch_ns, own = CPU_LAUNCH_NS if is_cpu else GPU_LAUNCH_NS, () if is_cpu else figures_of_kind(name)
    links = card["port"], card.get("nvlink", ""), card.get("driver", "")
    costs = card.get("watts"), card.get("dollars_per_hour")
    return DeviceKind(usable_bytes, flops, round(memory["gb_per_s"] * GB), launch_ns, *links, *costs, *own)


_SMALL_FLOATS = {
    "float8": ("float8_e4m3fn", "float8_e5m2"),
    "float4": ("float4_e2m1fn", "float4_e2m1fn_x2"),  # the second as PyTorch stores two
}


def _tera_rates(tera: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns the rates of a kind by dtype, which may follow from its float32 rate. The ratios of GeForce cards are
    those of the RTX 3090, 4090 and 5090 in NVIDIA's white papers (GA102, Ada, RTX Blackwell; each in appendix A):
    float64 1/64, TF32 1, float16 and bfloat16 2, int8 8, since Ada float8 4 and on Blackwell float4 16, accumulated in
    float32. Apple's chips run 16 bit types at the float32 rate."""
    if "as" in tera:
        return _tera_rates(_TABLES["kinds"][tera["as"]]["tera"])
    if "apple" in tera:
        return dict.fromkeys(("float32", "float16", "bfloat16"), tera["apple"])
    rates = dict(tera)
    if "geforce" in tera:
        ratios = {"float64": 1 / 64, "float32": 1, "tf32": 1, "float16": 2, "bfloat16": 2, "int8": 8}
        ratios |= {"float8": 4} if tera.get("has_float8") else {}
        ratios |= {"float4": 16} if tera.get("has_float4") else {}
        rates = {dtype: ratio * tera["geforce"] for dtype, ratio in ratios.items()}
    for kind, names in _SMALL_FLOATS.items():
        rates |= dict.fromkeys(names, rates.pop(kind)) if kind in rates else {}
    return rates


LINKS: Mapping[str, LinkKind] = MappingProxyType({name: _link(name, row) for name, row in _TABLES["links"].items()})
EXCHANGES = MappingProxyType({name: _exchange(name, row) for name, row in _TABLES["exchanges"].items()})
MACHINES = MappingProxyType({name: MachineKind(*row) for name, row in _TABLES["machines"].items()})
KINDS: Mapping[str, DeviceKind] = MappingProxyType({name: _kind(name, row) for name, row in _TABLES["kinds"].items()})
