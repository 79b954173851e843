"""A stand-in for the module pynvml: a machine with the cards of a test."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 2**20
H100, P100, L4 = "NVIDIA H100 80GB HBM3", "Tesla P100-PCIE-16GB", "NVIDIA L4"

CALLS = (
    "nvmlInit",
    "nvmlShutdown",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetMemoryBusWidth",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkVersion",
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetP2PStatus",
)


@dataclass(frozen=True)
class Card:
    name: str
    uuid: str = ""
    total_mib: int = 81559
    reserved_mib: int = 559
    others_mib: int = 0
    own_mib: int = 0
    pcie: tuple[int, int] = (5, 16)
    capability: tuple[int, int] = (9, 0)
    num_cores: int = 16896
    mhz: tuple[int, int] = (1980, 2619)  # SM, memory
    bus_width: int = 5120
    is_mig: bool = False
    ends: Sequence[int | str] = ()  # of each NVLink: a card's number, "switch", "hidden", "elsewhere" or "off"


class FakeNvml:
    """`refused` calls raise NVMLError, as all do that a card does not know."""

    NVML_NVLINK_MAX_LINKS = 18
    nvmlMemory_v2 = 1  # noqa: N815

    def __init__(
        self,
        cards: Sequence[Card],
        ancestors: Mapping[tuple[int, int], int] | None = None,
        refused: Collection[str] = (),
        without_copies: Collection[tuple[int, int]] = (),
    ) -> None:
        self.cards, self.ancestors, self.refused = cards, ancestors or {}, refused
        self.without_copies = without_copies
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CALLS:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.asked.add(name)
            if name in self.refused:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return self._answer(name.removeprefix("nvmlDeviceGet"), args)

        return call

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        if name in ("nvmlInit", "nvmlShutdown"):
            return None
        if name == "Count":
            return len(self.cards)
        if name == "HandleByIndex":
            return f"handle {args[0]}"
        number = int(args[0].removeprefix("handle "))
        card = self.cards[number]
        if name == "TopologyCommonAncestor":
            return self.ancestors[number, int(args[1].removeprefix("handle "))]
        if name == "P2PStatus":
            return 2 * ((number, int(args[1].removeprefix("handle "))) in self.without_copies)
        if name == "MemoryInfo":
            used = card.others_mib + card.own_mib
            free = card.total_mib - card.reserved_mib - used
            sizes = {"total": card.total_mib, "free": free, "used": used + (0 if args[1:] else card.reserved_mib)}
            sizes |= {"reserved": card.reserved_mib} if args[1:] else {}
            return SimpleNamespace(**{what: size * MIB for what, size in sizes.items()})
        if name.startswith("NvLink"):
            return self._nvlink(name, card, args[1])
        return {
            "Name": card.name,
            "UUID": card.uuid or f"GPU-{number}0000000-0000-0000-0000-000000000000",
            "ComputeRunningProcesses": [
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=card.own_mib * MIB),
                SimpleNamespace(pid=1, usedGpuMemory=None),
            ],
            "PciInfo": SimpleNamespace(domain=0, bus=number, device=0),
            "MaxPcieLinkGeneration": card.pcie[0],
            "MaxPcieLinkWidth": card.pcie[1],
            "CudaComputeCapability": card.capability,
            "NumGpuCores": card.num_cores,
            "MaxClockInfo": dict(enumerate(card.mhz, 1)).get(args[-1]),
            "MemoryBusWidth": card.bus_width,
            "MigMode": [int(card.is_mig), 0],
        }[name]

    def _nvlink(self, name: str, card: Card, link: int) -> Any:
        if link >= len(card.ends):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        end = card.ends[link]
        if name == "NvLinkState":
            return int(end != "off")
        if name == "NvLinkVersion":
            return 7
        if name == "NvLinkRemoteDeviceType":
            return {"switch": 2, "hidden": 255}.get(str(end), 0)
        if end == "hidden":
            return SimpleNamespace(domain=2**32 - 1, bus=2**32 - 1, device=2**32 - 1)
        return SimpleNamespace(domain=0, bus=end if isinstance(end, int) else 99, device=0)
