"""The GPUs of this machine and the links between them, as the driver's management library (NVML) knows them.

Every question may fail: a card, a driver or a container need not know the answer. It is then None, and whoever reads it
does without. NVML numbers cards by their PCI address.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import combinations
from typing import Any

from gdp.devices import GB, NVLINK_BYTES_PER_SECOND

SWITCH = -1
"""In place of a card's number: an NVLink switch."""

# Values of nvmlGpuTopologyLevel_t (nvml.h), the nearest thing that two cards are both below.
BOARD, ONE_SWITCH, SWITCHES, HOST_BRIDGE, NODE, SYSTEM = 0, 10, 20, 30, 40, 50

# Values of nvmlEnableState_t, nvmlIntNvLinkDeviceType_t and nvmlClockType_t, and what nvml.h calls not available.
_ENABLED, _GPU, _NPU, _SM, _MEMORY = 1, 0, 1, 1, 2
_UNAVAILABLE = (2**32 - 1, 2**64 - 1)

# NVLink generation by the first figure of the compute capability (the architectures' white papers: Pascal, Volta and
# Turing, Ampere, Hopper, Blackwell), which is safer than the version that NVML tells: nvml.h has 4 for 3.0, 6 for 4.0
# and 7 for 5.0, but drivers answer 5 for 3.0 and 7 for 4.0 (TensorRT-LLM, auto_parallel/cluster_info.py).
_NVLINK_GENERATIONS = {6: 1, 7: 2, 8: 3, 9: 4, 10: 5}
_NVLINK_GENERATIONS_BY_VERSION = {1: 1, 2: 2, 3: 2}  # the others: 3, whose rate is that of all but the first and fifth

# Links of the GA102 are narrower (NVIDIA Ampere GA102 architecture white paper: four links, 14.0625 GB/s each way).
_GA102, _GA102_BYTES_PER_SECOND = (8, 6), 14_062_500_000


@dataclass(frozen=True, slots=True)
class Gpu:
    """What is known of a card; None is not known."""

    name: str  # the driver's, such as NVIDIA H100 80GB HBM3
    number: int = -2  # NVML's; -2: NVML does not know this card
    uuid: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None  # of others' use; what this process holds counts as free
    others_bytes: int | None = None  # what others use
    pcie_generation: int | None = None  # the most that card and slot can do together
    pcie_width: int | None = None
    compute_capability: tuple[int, int] | None = None
    num_cores: int | None = None  # CUDA cores
    sm_mhz: int | None = None  # highest clocks
    memory_mhz: int | None = None
    bus_width_bits: int | None = None
    is_mig: bool = False  # split into instances
    nvlinks: Mapping[int, int] = field(default_factory=dict)  # active ones, by the card at the other end or SWITCH
    nvlink_generation: int = 0

    @property
    def nvlink_bytes_per_second(self) -> int:
        """Of one link in one direction."""
        if self.compute_capability == _GA102:
            return _GA102_BYTES_PER_SECOND
        return NVLINK_BYTES_PER_SECOND.get(self.nvlink_generation, 25 * GB)

    @property
    def pcie(self) -> str:
        """In words: `PCIe 4 x16`; "" if nothing is known."""
        parts = {"": self.pcie_generation, "x": self.pcie_width}
        known = [f"{letter}{number}" for letter, number in parts.items() if number]
        return " ".join(["PCIe", *known]) if known else ""


@dataclass(frozen=True, slots=True)
class Cards:
    """All cards that NVML knows, and for pairs of their numbers, smaller first, what both are below."""

    gpus: tuple[Gpu, ...] = ()
    ancestors: Mapping[tuple[int, int], int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_cards(library: Any = None) -> Cards:
    """The cards of this machine, none where there is no driver; `library` stands for the module pynvml."""
    try:
        library = import_module("pynvml") if library is None else library
    except Exception as error:  # whatever is wrong with it, there are other devices
        return Cards(notes=(f"GPUs: nvidia-ml-py cannot be imported ({type(error).__name__}); install it to see them",))
    try:
        library.nvmlInit()
    except Exception as error:
        reason = type(error).__name__.removeprefix("NVMLError_")
        if reason in ("LibraryNotFound", "DriverNotLoaded"):  # no NVIDIA card here
            return Cards()
        return Cards(notes=(f"GPUs: the driver does not answer ({reason}); nvidia-smi says more",))
    try:
        return _read(_Asked(library))
    finally:
        _Asked(library)("nvmlShutdown")


class _Asked:
    """The library, with None for every answer that it does not have."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._library, name)(*args)
        except Exception:  # NVMLError, functions that older bindings lack, text that is no UTF-8: there is no answer
            return None

    def number(self, name: str, *args: Any) -> int | None:
        """An answer that is a number and known."""
        return _known(self(name, *args))

    def text(self, name: str, *args: Any) -> str:
        """An answer in words; older bindings give bytes."""
        answer = self(name, *args)
        if isinstance(answer, bytes):
            return answer.decode(errors="replace")
        return answer if isinstance(answer, str) else ""

    def constant(self, name: str, default: int) -> int:
        value = getattr(self._library, name, default)
        return value if isinstance(value, int) else default


def _read(ask: _Asked) -> Cards:
    count = ask.number("nvmlDeviceGetCount")
    if count is None:
        return Cards(notes=("GPUs: the driver does not say how many there are; nvidia-smi says more",))
    handles = {number: ask("nvmlDeviceGetHandleByIndex", number) for number in range(count)}
    lost = [f"GPU {number} does not answer and is left out" for number, handle in handles.items() if handle is None]
    handles = {number: handle for number, handle in handles.items() if handle is not None}
    addresses = {_address(ask("nvmlDeviceGetPciInfo", handle)): number for number, handle in handles.items()}
    gpus = tuple(_gpu(ask, number, handle, addresses) for number, handle in handles.items())
    ancestors = {}
    for (a, first), (b, second) in combinations(handles.items(), 2):
        level = ask.number("nvmlDeviceGetTopologyCommonAncestor", first, second)
        if level is not None:
            ancestors[a, b] = level
    return Cards(gpus, ancestors, tuple(lost))


def _gpu(ask: _Asked, number: int, handle: Any, addresses: Mapping[tuple[int, int, int] | None, int]) -> Gpu:
    total_bytes, free_bytes, others_bytes = _memory(ask, handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    mode = ask("nvmlDeviceGetMigMode", handle)
    nvlinks, version = _nvlinks(ask, handle, addresses)
    compute_capability = None
    if isinstance(capability, tuple | list) and len(capability) == 2:
        compute_capability = int(capability[0]), int(capability[1])
    generation = _NVLINK_GENERATIONS.get((compute_capability or (0, 0))[0])
    return Gpu(
        name=ask.text("nvmlDeviceGetName", handle) or "GPU",
        number=number,
        uuid=ask.text("nvmlDeviceGetUUID", handle),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        others_bytes=others_bytes,
        pcie_generation=ask.number("nvmlDeviceGetMaxPcieLinkGeneration", handle) or None,
        pcie_width=ask.number("nvmlDeviceGetMaxPcieLinkWidth", handle) or None,
        compute_capability=compute_capability,
        num_cores=ask.number("nvmlDeviceGetNumGpuCores", handle) or None,
        sm_mhz=ask.number("nvmlDeviceGetMaxClockInfo", handle, _SM) or None,
        memory_mhz=ask.number("nvmlDeviceGetMaxClockInfo", handle, _MEMORY) or None,
        bus_width_bits=ask.number("nvmlDeviceGetMemoryBusWidth", handle) or None,
        is_mig=isinstance(mode, tuple | list) and list(mode[:1]) == [_ENABLED],
        nvlinks=nvlinks,
        nvlink_generation=(generation or _NVLINK_GENERATIONS_BY_VERSION.get(version or 0, 3)) if nvlinks else 0,
    )


def _memory(ask: _Asked, handle: Any) -> tuple[int | None, int | None, int | None]:
    """(total, free of others' use, used by others) in bytes; what the driver keeps for itself is only in the first."""
    plain = ask("nvmlDeviceGetMemoryInfo", handle)
    total_bytes, free_bytes, used_bytes = (_known(getattr(plain, name, None)) for name in ("total", "free", "used"))
    # the second version sets apart what the driver keeps, which the first counts as used
    second = ask("nvmlDeviceGetMemoryInfo", handle, ask.constant("nvmlMemory_v2", 0x02000028))
    reserved_bytes = _known(getattr(second, "reserved", None))
    if reserved_bytes is not None:
        used_bytes = _known(getattr(second, "used", None))
    if free_bytes is None or total_bytes is None:
        return total_bytes, None, None
    # in a container the process has other numbers than NVML's; what it holds then counts as others'
    own_bytes = sum(
        _known(getattr(process, "usedGpuMemory", None)) or 0
        for process in ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        if getattr(process, "pid", None) == os.getpid()
    )
    others_bytes = None if used_bytes is None else max(used_bytes - own_bytes, 0)
    return total_bytes, min(free_bytes + own_bytes, total_bytes), others_bytes


def _nvlinks(
    ask: _Asked, handle: Any, addresses: Mapping[tuple[int, int, int] | None, int]
) -> tuple[dict[int, int], int | None]:
    """How many links are active by what is at their other end, and the version of one.

    An end that is no card of ours, nor known to be a card or a processor, is a switch: a virtual machine hides its
    address and its type (as NCCL takes it: src/graph/xml.cc).
    """
    found: dict[int, int] = {}
    version = None
    for link in range(ask.constant("NVML_NVLINK_MAX_LINKS", 18)):
        if ask.number("nvmlDeviceGetNvLinkState", handle, link) != _ENABLED:
            continue
        address = _address(ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
        end = addresses.get(address) if address is not None else None
        if end is None:
            if ask.number("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) in (_GPU, _NPU):
                continue
            end = SWITCH
        found[end] = found.get(end, 0) + 1
        version = version or ask.number("nvmlDeviceGetNvLinkVersion", handle, link)
    return found, version


def _address(info: Any) -> tuple[int, int, int] | None:
    """(domain, bus, device) of a PCI device."""
    parts = [_known(getattr(info, name, None)) for name in ("domain", "bus", "device")]
    return None if parts[0] is None or parts[1] is None or parts[2] is None else (parts[0], parts[1], parts[2])


def _known(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 and value not in _UNAVAILABLE else None


def ancestor_of(ancestors: Mapping[tuple[int, int], int], a: Gpu, b: Gpu) -> int | None:
    """What both cards are below; None where NVML does not tell."""
    first, second = sorted((a.number, b.number))
    return ancestors.get((first, second))


def linked(gpus: Sequence[Gpu], ancestors: Mapping[tuple[int, int], int], level: int) -> list[int]:
    """[number of cards] the group of each card: those that are below one thing of at most that level are in one."""
    groups = list(range(len(gpus)))
    for a, b in combinations(range(len(gpus)), 2):
        found = ancestor_of(ancestors, gpus[a], gpus[b])
        if found is not None and found <= level:
            groups = [groups[a] if group == groups[b] else group for group in groups]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return [numbers[group] for group in groups]
