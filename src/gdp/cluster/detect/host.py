"""The host: cores, memory, and estimates of the rates of its processor."""

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gdp.cluster.catalogue import KINDS

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Rates:
    """Estimates of the rates of several cores together, and their derivation."""

    flops_per_second: Mapping[str, int]
    memory_bytes_per_second: int
    basis: str  # for example: 2 cores x 2.60 GHz x 64 FLOP per cycle (avx512f)


def available_cores() -> tuple[int, ...]:
    """Returns the processor cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def longest_run(cores: Sequence[int]) -> tuple[int, int]:
    """Returns the first and last of the most consecutive numbers: the cores of a target are a range."""
    runs: list[tuple[int, int]] = []
    for core in cores:
        runs = [*runs[:-1], (runs[-1][0], core)] if runs and runs[-1][1] == core - 1 else [*runs, (core, core)]
    return max(runs, key=lambda run: run[1] - run[0])


def run_place(cores: Sequence[int]) -> str:
    """Returns the place of the one CPU device beside GPUs, as --on takes it: `cpu:0-15`."""
    first, last = longest_run(cores)
    return f"cpu:{first}-{last}" if last > first else f"cpu:{first}"


def all_cores() -> tuple[int, ...]:
    """Returns the cores that this process may use, or all cores if the system does not tell."""
    return available_cores() or tuple(range(os.cpu_count() or 1))


def slug(name: str) -> str:
    """Turns `Intel(R) Xeon(R) Gold 6242 CPU @ 2.80GHz` into `intel-xeon-gold-6242-cpu`."""
    plain = re.sub(r"\((r|tm|c)\)|@.*", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def cpu_kind(num_cores: int, root: Path = ROOT) -> str:
    """Returns the kind of a device of `num_cores` cores of this machine's processor."""
    name = next((block["model name"] for block in _cpuinfo(root).values() if "model name" in block), "")
    processor = slug(name or platform.processor()) or slug(platform.machine()) or "processor"
    return f"{processor}-{num_cores}core"


# Memory


def memory_bytes(root: Path = ROOT) -> int:
    """Returns the memory of this machine, or the limit of this process's control groups (Linux) if that is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits(root)])


def memory_limits(root: Path) -> Iterator[int]:
    """Yields the limit of every control group of this process, version 1 and 2, and of those that contain it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(top):
                    yield from _limit(folder / ("memory.limit_in_bytes" if controllers else "memory.max"))


def _limit(file: Path) -> Iterator[int]:
    text = _read(file).strip()  # the root has none, and in a container the groups around it are hidden
    if text.isdecimal() and text != "0":  # "max" is no limit
        yield int(text)


# Rates

# float32 operations of a core in a cycle, a fused multiply-add counts as two; the first whose flags are all there:
#   two 512-bit units for fused multiply-adds, 2 x 16 x 2 (Intel 64 and IA-32 Architectures Optimization Reference
#     Manual, Skylake Server; some processors have one)
#   two 256-bit units, 2 x 8 x 2 (the same, Haswell)
#   two 128-bit units, 2 x 4 x 2 (Arm Neoverse N1 Software Optimization Guide: pipelines V0 and V1)
#   else a multiplication and an addition of 128 bits (Intel's manual, Nehalem)
_FLOPS_PER_CYCLE: Sequence[tuple[frozenset[str], int]] = (
    (frozenset({"avx512f"}), 64),
    (frozenset({"avx2", "fma"}), 32),
    (frozenset({"asimd"}), 16),
    (frozenset(), 8),
)

# An assumption for processors that do not tell: about the base clock of server processors (cpu-16core has 2.8 GHz).
_UNKNOWN_HZ = 2_500_000_000

# The number of memory channels is not visible to a user. An assumption: as many bytes per second for each core as the
# built-in cpu-16core has (six channels of DDR4-2933 for 16 cores: Intel ARK, Xeon Gold 6242).
_CORE_MEMORY_BYTES_PER_SECOND = KINDS["cpu-16core"].memory_bytes_per_second // 16


def cpu_rates(cores: Sequence[int], root: Path = ROOT) -> Rates:
    """Estimates the rates of these cores together. Two threads of one physical core count as one core."""
    blocks = _cpuinfo(root)
    own = [blocks.get(core, {}) for core in cores]
    num_cores = len(
        {
            (block["physical id"], block["core id"]) if {"physical id", "core id"} <= block.keys() else core
            for core, block in zip(cores, own, strict=True)
        }
    )
    flags = frozenset(f"{own[0].get('flags', '')} {own[0].get('Features', '')}".split())  # on x86, on Arm
    extensions, flops_per_cycle = next(item for item in _FLOPS_PER_CYCLE if item[0] <= flags)
    hz = _clock_hz(cores[0], own[0], root)
    float32 = num_cores * hz * flops_per_cycle
    names = ", ".join(sorted(extensions)) or "no wide vectors known"
    plural = "" if num_cores == 1 else "s"
    return Rates(
        {"float32": float32, "float64": float32 // 2},  # half as many fit in a vector
        num_cores * _CORE_MEMORY_BYTES_PER_SECOND,
        f"{num_cores} core{plural} x {hz / 1e9:.2f} GHz x {flops_per_cycle} FLOP per cycle ({names})",
    )


def _clock_hz(core: int, block: Mapping[str, str], root: Path) -> int:
    """Returns a clock that stays the same between calls: nominal, else highest, else the one the kernel found."""
    if match := re.search(r"@ *([0-9.]+) *GHz", block.get("model name", "")):
        return round(float(match[1]) * 1e9)
    for name in ("base_frequency", "cpuinfo_max_freq"):
        text = _read(root / f"sys/devices/system/cpu/cpu{core}/cpufreq/{name}").strip()
        if text.isdecimal() and int(text):
            return int(text) * 1000  # kHz
    try:
        return round(float(block["cpu MHz"]) / 100) * 10**8 or _UNKNOWN_HZ  # to 100 MHz: it varies a little
    except (KeyError, ValueError, OverflowError):
        return _UNKNOWN_HZ


def _cpuinfo(root: Path) -> dict[int, dict[str, str]]:
    """Reads the entries of /proc/cpuinfo by the number of the processor; none if there is no such file."""
    blocks = {}
    for text in re.split(r"\n\s*\n", _read(root / "proc/cpuinfo")):
        pairs = (line.partition(":") for line in text.splitlines())
        block = {key.strip(): value.strip() for key, colon, value in pairs if colon}
        if block.get("processor", "").isdecimal():
            blocks[int(block["processor"])] = block
    return blocks


def _read(file: Path) -> str:
    """Returns the text of a file; "" if it is missing or not readable."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
