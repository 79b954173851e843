"""This machine: its devices by the names that `gdp run` uses, and the cluster of them. Cards are those that PyTorch
calls cuda0, cuda1, ...: it knows CUDA_VISIBLE_DEVICES, CUDA's order and AMD's cards."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from gdp.cluster.catalogue import CPU_LAUNCH_NS, GIB, KINDS
from gdp.cluster.detect import host
from gdp.cluster.detect.gpu_figures import gpu_device, kind_of, memory_of, slot_of
from gdp.cluster.detect.nvml import Gpu, read_cards
from gdp.cluster.detect.topology import Link, Links
from gdp.cluster.device import Device, Route

MAX_CPU_DEVICES = 16  # an assumption: with more cores, most would wait for memory

# A tiny op on each of two cores at once takes 2.7 us in forked processes (docs/notes/execution.md).
_CORES_LAUNCH_NS = 2_700

_IDLE_BYTES = GIB // 16  # an assumption: an idle card has a few MiB in use, one with a process on it hundreds
_DEVICES, _DRIVERS = Path("/dev"), ("nvidiactl", "nvhost-gpu", "dxg", "kfd")
"""The files of drivers of NVIDIA's cards, of those in Jetsons and behind WSL, and of AMD's."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

Visible = tuple[dict[str, Gpu], list[str]]
"""The cards by their names in PyTorch, in that order, and notes on omitted ones."""


def among_visible(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment whose cards are numbered among those that are visible here."""
    here, chosen = os.environ.get(VISIBLE, ""), environment.get(VISIBLE, "")
    cards = [card.strip() for card in here.split(",") if card.strip()]
    numbers = [int(number) for number in chosen.split(",") if number]
    is_known = bool(numbers) and max(numbers) < len(cards)
    return {**environment, VISIBLE: ",".join(cards[number] for number in numbers)} if is_known else {**environment}


def visible_cards(cards: Sequence[Gpu]) -> Visible:
    """Returns PyTorch's cards in its order, each with the facts that NVML has of the card with its UUID."""
    if not cards and not any((_DEVICES / name).exists() for name in _DRIVERS):
        return {}, []
    import torch  # a second or two, which machines without cards never need

    by_uuid = {card.uuid: card for card in cards if card.uuid and not card.is_mig}
    visible = {}
    try:
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            card = by_uuid.get(f"GPU-{getattr(properties, 'uuid', '')}") or Gpu(torch.cuda.get_device_name(number))
            if card.total_bytes is None:
                card = replace(card, total_bytes=properties.total_memory)
            visible[f"cuda{number}"] = card
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, a card that has failed
        reason = str(error).strip().partition("\n")[0][:200]
        return {}, [f"PyTorch cannot use the GPUs here ({reason})"]
    if cards and torch.version.cuda is None:
        text = f"{len(cards)} GPUs are left out: PyTorch {torch.__version__} has no CUDA; install a build that has"
        return visible, [text]
    return visible, []


@dataclass(frozen=True, slots=True)
class Detected:
    """A device of this machine."""

    name: str  # such as cpu0, cuda0
    kind: str  # such as h100-sxm-80g, nvidia-h100-pcie, intel-xeon-processor-1core
    memory_bytes: int  # that a plan may use
    place: str  # as `gdp run --on` takes it: cpu:0, cpu:0-15, cuda:0


@dataclass(frozen=True, slots=True)
class Machine:
    """The detected machine; GPUs by name in CUDA's order."""

    gpus: Mapping[str, Gpu]
    ancestors: Mapping[tuple[int, int], int]  # by pairs of NVML's numbers
    cores: tuple[int, ...]
    memory_bytes: int
    found_notes: tuple[str, ...] = ()
    refused: frozenset[tuple[int, int]] = frozenset()  # pairs of NVML's numbers without peer-to-peer copies

    @property
    def devices(self) -> tuple[Detected, ...]:
        """The GPUs and one CPU device of all cores, `cpu0`; without GPUs a CPU device for each core, at most 16. A
        core's device has the number of the core in its name, so that plans for cores need no --on. Only cores that this
        process may use count; their devices share its memory equally."""
        known = ((name, f"cuda:{name.removeprefix('cuda')}", gpu) for name, gpu in self.gpus.items())
        gpus = tuple(Detected(name, kind_of(gpu), memory_of(gpu) or 0, place) for name, place, gpu in known)
        return (*gpus, *self._cpus(beside_gpus=bool(gpus)))

    @property
    def links(self) -> dict[tuple[str, str], Link]:
        """The link of each pair of GPUs."""
        links = Links(self.gpus, self.ancestors, self.refused)
        return {(a, b): links.link(a, b) for a, b in combinations(self.gpus, 2)}

    def cluster(self) -> tuple[list[Device], dict[tuple[int, int], Route]]:
        """Returns the devices and the route of every ordered pair of them, for `Cluster.build`. GPUs with too few known
        figures are left out. Figures are those of the built-in kind, else estimates."""
        gpus = {name: device for name, gpu in self.gpus.items() if (device := gpu_device(name, gpu)) is not None}
        devices = [*gpus.values(), *_cpu_devices(self._cpus(beside_gpus=bool(gpus)))]
        links = Links({name: self.gpus[name] for name in gpus}, self.ancestors, self.refused)
        return devices, links.routes([device.name for device in devices])

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts about the machine that a user should know, a line each."""
        notes = list(self.found_notes)
        for name, gpu in self.gpus.items():
            if (gpu.others_bytes or 0) > _IDLE_BYTES:
                others = (gpu.others_bytes or 0) / GIB
                notes.append(f"{name}: others use {others:.1f} GiB of its memory now; plans may use the rest")
            if gpu_device(name, gpu) is None:
                notes.append(f"{name}: too little is known of {gpu.name}, so `local` is without it; measure it")
                continue
            if kind_of(gpu) not in KINDS:
                notes.append(
                    f"{name}: figures are estimates: {gpu.num_cores} CUDA cores x {gpu.sm_mhz} MHz x 2, halves "
                    f"as on like cards; memory 2 x {gpu.memory_mhz} MHz x {gpu.bus_width_bits} bits"
                )
            if not (gpu.pcie_generation and gpu.pcie_width):
                generation, width = slot_of(gpu)
                notes.append(f"{name}: PCIe {generation} x{width} is assumed, the driver does not tell")
        has_modelled = any(gpu_device(name, gpu) is not None for name, gpu in self.gpus.items())
        basis = host.cpu_rates(_cores_of(self._cpus(beside_gpus=has_modelled))).basis
        notes.append(f"processor: figures are estimates: {basis}; memory bandwidth for each as cpu-16core has it")
        return (*notes, "gdp devices measure --out local.yaml gives measured figures")

    def _cpus(self, *, beside_gpus: bool) -> tuple[Detected, ...]:
        if beside_gpus:
            first, last = host.longest_run(self.cores)
            return (Detected("cpu0", host.cpu_kind(last - first + 1), self.memory_bytes, host.run_place(self.cores)),)
        cores = self.cores[:MAX_CPU_DEVICES]
        kind, memory_bytes = host.cpu_kind(1), self.memory_bytes // len(cores)
        return tuple(Detected(f"cpu{core}", kind, memory_bytes, f"cpu:{core}") for core in cores)


def _cores_of(cpus: Sequence[Detected]) -> list[int]:
    """Returns all cores of these devices."""
    cores: list[int] = []
    for cpu in cpus:
        first, _, last = cpu.place.removeprefix("cpu:").partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def _cpu_devices(cpus: Sequence[Detected]) -> list[Device]:
    """Returns the devices, each with an equal share of the rates of all their cores together."""
    rates, launch_ns = host.cpu_rates(_cores_of(cpus)), CPU_LAUNCH_NS if len(cpus) == 1 else _CORES_LAUNCH_NS
    flops_per_second = {dtype: rate // len(cpus) for dtype, rate in rates.flops_per_second.items()}
    bytes_per_second = rates.memory_bytes_per_second // len(cpus)
    return [Device(cpu.name, cpu.kind, cpu.memory_bytes, flops_per_second, bytes_per_second, launch_ns) for cpu in cpus]


def detect(choose: Callable[[Sequence[Gpu]], Visible] = visible_cards, *, nvml: Any = None) -> Machine:
    """Returns this machine; `choose` selects the cards that are cuda0, cuda1, ..., `nvml` replaces the module pynvml.
    Raises nothing: a device that does not answer is left out, with a note."""
    cards = read_cards(nvml)  # before anything of this process takes memory of a card
    gpus, notes = choose(cards.gpus)
    notes = [*cards.notes, *notes]
    return Machine(gpus, cards.ancestors, host.all_cores(), host.memory_bytes(), tuple(notes), cards.refused)
