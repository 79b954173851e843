"""The GPUs of this machine and the links between them, from the driver's management library (NVML). Every query may
fail, where a card, a driver or a container knows no answer: it is None. NVML numbers cards by their PCI address."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import combinations
from typing import Any

from gdp.cluster.catalogue import GB, NVLINK_BYTES_PER_SECOND

SWITCH, UNKNOWN = -1, -2  # in place of a card's number: an NVLink switch, a card that NVML does not know

# Values of nvmlGpuTopologyLevel_t (nvml.h), the nearest common ancestor of two cards.
BOARD, ONE_SWITCH, SWITCHES, HOST_BRIDGE, NODE, SYSTEM = 0, 10, 20, 30, 40, 50

# Values of nvmlEnableState_t, nvmlIntNvLinkDeviceType_t, nvmlClockType_t and of nvmlGpuP2PStatus_t for reads, which are
# what NCCL asks for, and nvml.h's values for not available.
_ENABLED, _GPU, _NPU, _SM, _MEMORY, _READS, _ALLOWED = 1, 0, 1, 1, 2, 0, 0
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
    """A card; fields that are not known are None."""

    name: str  # the driver's, such as NVIDIA H100 80GB HBM3
    number: int = UNKNOWN  # NVML's
    uuid: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None  # not used by others; memory of this process counts as free
    others_bytes: int | None = None  # used by others
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
        """The rate of one link in one direction."""
        if self.compute_capability == _GA102:
            return _GA102_BYTES_PER_SECOND
        return NVLINK_BYTES_PER_SECOND.get(self.nvlink_generation, 25 * GB)

    @property
    def pcie(self) -> str:
        """The slot as text: `PCIe 4 x16`; "" if nothing is known."""
        parts = {"": self.pcie_generation, "x": self.pcie_width}
        words = [f"{letter}{number}" for letter, number in parts.items() if number]
        return " ".join(["PCIe", *words]) if words else ""


@dataclass(frozen=True, slots=True)
class Cards:
    """All cards that NVML knows, and, by pairs of their numbers, smaller first, their nearest common ancestor and those
    between which the driver refuses peer-to-peer copies."""

    gpus: tuple[Gpu, ...] = ()
    ancestors: Mapping[tuple[int, int], int] = field(default_factory=dict)
    refused: frozenset[tuple[int, int]] = frozenset()
    notes: tuple[str, ...] = ()


def read_cards(library: Any = None) -> Cards:
    """Returns the cards of this machine, none without a driver; `library` replaces the module pynvml."""
    try:
        library = import_module("pynvml") if library is None else library
    except Exception as error:  # a broken library must not hide the other devices
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
    """The library, with None in place of every error."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._library, name)(*args)
        except Exception:  # NVMLError, functions that older bindings lack, text that is no UTF-8: there is no answer
            return None

    def number(self, name: str, *args: Any) -> int | None:
        """Returns the answer if it is a known number."""
        return _known(self(name, *args))

    def text(self, name: str, *args: Any) -> str:
        """Returns the answer as text; older bindings give bytes."""
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
    notes = [f"GPU {number} does not answer and is left out" for number, handle in handles.items() if handle is None]
    handles = {number: handle for number, handle in handles.items() if handle is not None}
    addresses = {_address(ask("nvmlDeviceGetPciInfo", handle)): number for number, handle in handles.items()}
    gpus = tuple(_gpu(ask, number, handle, addresses) for number, handle in handles.items())
    ancestors, refused = {}, set()
    for (a, first), (b, second) in combinations(handles.items(), 2):
        if ask.number("nvmlDeviceGetP2PStatus", first, second, _READS) not in (_ALLOWED, None):
            refused.add((a, b))
        level = ask.number("nvmlDeviceGetTopologyCommonAncestor", first, second)
        if level is not None:
            ancestors[a, b] = level
    return Cards(gpus, ancestors, frozenset(refused), tuple(notes))


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
    """Returns (total, not used by others, used by others) in bytes; only the first includes the part of the driver."""
    plain = ask("nvmlDeviceGetMemoryInfo", handle)
    total_bytes, free_bytes, used_bytes = (_known(getattr(plain, name, None)) for name in ("total", "free", "used"))
    # the second version tells the driver's own part, which the first counts as used
    second = ask("nvmlDeviceGetMemoryInfo", handle, ask.constant("nvmlMemory_v2", 0x02000028))
    reserved_bytes = _known(getattr(second, "reserved", None))
    if reserved_bytes is not None:
        used_bytes = _known(getattr(second, "used", None))
    if free_bytes is None or total_bytes is None:
        return total_bytes, None, None
    # in a container process numbers differ from NVML's; this process's memory then counts as others'
    processes = ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
    own = (each for each in processes if getattr(each, "pid", None) == os.getpid())
    own_bytes = sum(_known(getattr(each, "usedGpuMemory", None)) or 0 for each in own)
    others_bytes = None if used_bytes is None else max(used_bytes - own_bytes, 0)
    return total_bytes, min(free_bytes + own_bytes, total_bytes), others_bytes


def _nvlinks(
    ask: _Asked, handle: Any, addresses: Mapping[tuple[int, int, int] | None, int]
) -> tuple[dict[int, int], int | None]:
    """Returns the number of active links to each other end, and the version of one link. An end that is neither one of
    our cards nor known to be a card or a processor is a switch: a virtual machine hides its address and its type (as
    NCCL assumes: src/graph/xml.cc)."""
    counts: dict[int, int] = {}
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
        counts[end] = counts.get(end, 0) + 1
        version = version or ask.number("nvmlDeviceGetNvLinkVersion", handle, link)
    return counts, version


def _address(info: Any) -> tuple[int, int, int] | None:
    """Returns (domain, bus, device) of a PCI device."""
    parts = [_known(getattr(info, name, None)) for name in ("domain", "bus", "device")]
    return None if parts[0] is None or parts[1] is None or parts[2] is None else (parts[0], parts[1], parts[2])


def _known(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 and value not in _UNAVAILABLE else None


def ancestor_of(ancestors: Mapping[tuple[int, int], int], a: Gpu, b: Gpu) -> int | None:
    """Returns the nearest common ancestor of two cards; None if NVML does not tell."""
    first, second = sorted((a.number, b.number))
    return ancestors.get((first, second))


def groups_below(gpus: Sequence[Gpu], ancestors: Mapping[tuple[int, int], int], level: int) -> list[int]:
    """[number of cards] the group of each card: cards with a common ancestor of at most `level` share a group."""
    groups = list(range(len(gpus)))
    for a, b in combinations(range(len(gpus)), 2):
        ancestor = ancestor_of(ancestors, gpus[a], gpus[b])
        if ancestor is not None and ancestor <= level:
            groups = [groups[a] if group == groups[b] else group for group in groups]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return [numbers[group] for group in groups]
