"""Local devices: what this machine has to run a plan on."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gdp.execute.targets import Target, available_cores, find_targets

MAX_CPU_DEVICES = 16
"""An assumption: with more worker threads, most would wait for Python's global lock."""


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """A device of this machine."""

    name: str  # such as cpu0, cuda0
    kind: str  # such as intel-xeon-processor-1core, nvidia-h100-80gb-hbm3
    memory_bytes: int
    place: str  # as `find_targets` and --on take it: cpu:0, cpu:0-15, cuda:0

    @property
    def target(self) -> Target:
        """Where it runs. InputError if it has gone away."""
        return find_targets([self.name], [self.place])[0]


def detect_local() -> tuple[LocalDevice, ...]:
    """The CUDA devices and `cpu0`, all cores at once; without CUDA a device for each core, at most 16.

    A core's device is named after it, so that plans for these find their targets without --on. The cores are those that
    this process may use; their devices share its memory equally.
    """
    cores, memory_bytes = available_cores() or tuple(range(os.cpu_count() or 1)), host_memory_bytes()
    gpus = tuple(_gpu(number) for number in range(torch.cuda.device_count()))
    if gpus:
        first, last = _longest_run(cores)
        place = f"cpu:{first}-{last}" if last > first else f"cpu:{first}"
        return (*gpus, LocalDevice("cpu0", cpu_kind(last - first + 1), memory_bytes, place))
    used = cores[:MAX_CPU_DEVICES]
    return tuple(LocalDevice(f"cpu{core}", cpu_kind(1), memory_bytes // len(used), f"cpu:{core}") for core in used)


def cpu_kind(num_cores: int) -> str:
    """The kind of a device of that many cores of this machine's processor."""
    try:
        found = re.search(r"^model name\s*:(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    name = found[1] if found else platform.processor()
    return f"{_slug(name) or _slug(platform.machine()) or 'processor'}-{num_cores}core"


def host_memory_bytes() -> int:
    """The memory of this machine, or what this process's control groups (Linux) allow, if that is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_memory_limits(Path("/"))])


def _memory_limits(root: Path) -> Iterator[int]:
    """Of every control group that this process is in, version 1 and 2, and of those around it."""
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
    try:
        text = file.read_text().strip()
    except OSError:
        return  # the root has none, and in a container the groups around it are hidden
    if text.isdecimal() and text != "0":  # "max" is no limit
        yield int(text)


def _gpu(number: int) -> LocalDevice:
    memory_bytes = torch.cuda.get_device_properties(number).total_memory
    return LocalDevice(
        f"cuda{number}", _slug(torch.cuda.get_device_name(number)) or "cuda", memory_bytes, f"cuda:{number}"
    )


def _slug(name: str) -> str:
    """`Intel(R) Xeon(R) Gold 6242 CPU @ 2.80GHz` -> `intel-xeon-gold-6242-cpu`."""
    plain = re.sub(r"\((r|tm|c)\)|@.*", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def _longest_run(cores: Sequence[int]) -> tuple[int, int]:
    """The first and last of the most consecutive numbers: a target's cores are a range."""
    runs: list[tuple[int, int]] = []
    for core in cores:
        runs = [*runs[:-1], (runs[-1][0], core)] if runs and runs[-1][1] == core - 1 else [*runs, (core, core)]
    return max(runs, key=lambda run: run[1] - run[0])
