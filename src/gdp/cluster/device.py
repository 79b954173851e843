"""Devices and routes, the records that clusters are made of."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from gdp.cluster.achieved import check_achieved
from gdp.errors import InputError, suggest

MAX_DEVICES = 1024  # a cluster has a route for each pair of devices: a million
WORD_DEVICES = 64  # sets of up to as many devices are the bits of one integer; a cluster of more is large


EAGER, COMPILE, CUDA_GRAPHS = RUNTIMES = "eager", "compile", "cuda-graphs"
"""The ways in which a step is run: op by op, by torch.compile, or replayed from a CUDA graph."""


@dataclass(frozen=True, slots=True)
class Route:
    """The route from one device to another; routes that share one of their `channels` (names) take turns on it."""

    latency_ns: int
    bytes_per_second: int
    channels: tuple[str, ...]
    exchange: str = ""  # of its link, in `catalogue.EXCHANGES`: what exchanges over it take; "": nothing is known


@dataclass(frozen=True, slots=True)
class Device:
    """A device; ops of a dtype that `flops_per_second` lacks run at its "float32" rate, which is required
    (float8 types at that of a half type)."""

    name: str
    kind: str
    memory_bytes: int
    flops_per_second: Mapping[str, int]
    memory_bytes_per_second: int
    launch_ns: int
    issue_ns: int = 0  # of its host, for each kernel
    # by class of kernel, as `gdp.cluster.achieved` has them
    achieved: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    runtime: str = EAGER
    group: tuple[str, ...] = ()  # the equal cards that it stands for, each with these figures; (): a device
    link: Route | None = None  # from each card of a group to the next one, while other groups exchange
    # by kind of step, as `gdp.costs.ranges` names it: measured over predicted times of steps on this machine
    measured_steps: Mapping[str, Sequence[float]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def num_cards(self) -> int:
        return max(len(self.group), 1)

    @property
    def is_cpu(self) -> bool:
        """True for a CPU, which its kind or its name says: `cpu` or `host0.cpu1`."""
        return is_cpu_kind(self.kind) or re.fullmatch(r"(.*\.)?cpu\d*", self.name.lower()) is not None


def host_of(name: str) -> str:
    """Returns `host0` of a device's name `host0.gpu1`, and of `host0-cuda1` as `gdp devices measure` has it; "" of
    `gpu1`."""
    found = re.match(r"(.*host\d+)[.-]", name)
    return found[1] if found else name.rpartition(".")[0]


def is_cpu_kind(kind: str) -> bool:
    """Returns whether devices of a kind are CPUs: cpu-16core, or amd-epyc-1core of `gdp devices detect`."""
    return "cpu" in kind.lower() or kind.endswith("core")


def split_runtime(text: str) -> tuple[str, str | None]:
    """Returns DEVICES, and the runtime behind them if one is named: `4xa100-sxm-80g:compile`."""
    devices, _, runtime = text.rpartition(":")
    return (devices, runtime) if devices and runtime in RUNTIMES else (text, None)


def check_devices(devices: Sequence[Device]) -> None:
    """Raises InputError for too many devices, unusable names and figures out of range."""
    if not 1 <= len(devices) <= MAX_DEVICES:
        raise InputError(f"devices: there are {len(devices)}; 1 to {MAX_DEVICES:,} are expected")
    numbers: dict[str, int] = {}
    members = Counter(name for device in devices for name in device.group)
    members.update(device.name for device in devices if members)
    for number, device in enumerate(devices):
        label = f"device {number} {device.name!r}"
        if not device.name or not device.name.isprintable() or device.name == "*" or "->" in device.name:
            raise InputError(
                f"{label}: name is not usable; printable text that is neither '*' nor contains '->' is expected"
            )
        if device.name in numbers:
            raise InputError(f"{label}: name is also that of device {numbers[device.name]}; names must be unique")
        numbers[device.name] = number
        if not device.kind or not device.kind.isprintable():
            raise InputError(f"{label}: kind is {device.kind!r}; printable text is expected")
        if "float32" not in device.flops_per_second:
            raise InputError(f"{label}: flops has no float32; add it, other dtypes fall back to it")
        rates = {f"flops {dtype}": rate for dtype, rate in device.flops_per_second.items()}
        for name, value in {**rates, "memory_bandwidth": device.memory_bytes_per_second}.items():
            if not name.isprintable() or not 1 <= value < 2**63:
                raise InputError(f"{label}: {name!r} is {value}; more than 0 and less than 2^63 is expected")
        check_achieved(device.achieved, label)
        if device.runtime not in RUNTIMES:
            raise InputError(f"{label}: runtime is {device.runtime!r}; {suggest(device.runtime, RUNTIMES)}")
        if (device.group or device.link) and (len(device.group) < 2 or device.link is None):
            raise InputError(f"{label}: group is {list(device.group)}; give two cards or more, and their link")
        for name in device.group:
            if not name or not name.isprintable() or members[name] > 1:
                raise InputError(f"{label}: group has {name!r}; printable names of cards are expected, each once")
        for step, ratios in device.measured_steps.items():
            if not all(0 < ratio < inf for ratio in ratios):
                raise InputError(f"{label}: measured_steps {step!r} has {list(ratios)}; more than 0 is expected")
        times_ns = {"launch": device.launch_ns, "issue": device.issue_ns}
        for name, value in {"memory": device.memory_bytes, **times_ns}.items():
            if not 0 <= value < 2**63:
                raise InputError(f"{label}: {name} is {value}; an integer from 0 to 2^63 - 1 is expected")
