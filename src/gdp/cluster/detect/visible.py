"""The cards that CUDA, and so PyTorch, calls cuda0, cuda1, ...: CUDA_VISIBLE_DEVICES and the order of numbers.

CUDA Programming Guide, "CUDA Environment Variables". NVML's numbers are those of CUDA_DEVICE_ORDER=PCI_BUS_ID. CUDA's
own default puts the fastest card first; equal cards are assumed to be in the order of their addresses too. The order of
unequal cards, and of cards that are split into instances (MIG), comes from the CUDA driver; if it does not answer,
NVML's order is assumed.
"""

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from gdp.cluster.detect.nvml import Gpu

Visible = tuple[dict[str, Gpu], list[str]]
"""The cards by their names in CUDA, in that order, and notes on omitted ones."""


def visible_cards(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Returns the cards of `gpus` that PyTorch would see, without importing it."""
    if gpus and (pytorch := pytorch_version()).endswith("+cpu"):  # the builds without CUDA are called so
        return {}, [f"{len(gpus)} GPUs are left out: PyTorch {pytorch} has no CUDA; install a build that has"]
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    selection = _chosen(gpus, listed)
    notes = []
    if listed is not None and "MIG-" in listed:
        notes.append("CUDA_VISIBLE_DEVICES names MIG instances, which are left out; name whole cards")
    by_uuid = listed is not None and listed.startswith("GPU-")
    is_unordered = len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    mig = [gpu for gpu in selection if gpu.is_mig]
    if selection and (mig or (is_unordered and not by_uuid)):
        uuids = driver_uuids()
        cards_by_uuid = {gpu.uuid: gpu for gpu in gpus if not gpu.is_mig}
        if uuids is not None:
            cards = {f"cuda{number}": cards_by_uuid[uuid] for number, uuid in enumerate(uuids) if uuid in cards_by_uuid}
            return cards, notes + _mig_notes(mig)
        if mig:  # beside an instance CUDA shows no whole card (NVIDIA MIG User Guide, "CUDA Device Enumeration")
            return {}, notes + _mig_notes(mig)
        notes.append("unequal GPUs, and the CUDA driver does not tell their order; set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return {f"cuda{number}": gpu for number, gpu in enumerate(selection)}, notes


def _mig_notes(gpus: Sequence[Gpu]) -> list[str]:
    return [
        f"GPU {gpu.number} ({gpu.name}) is split into MIG instances, which are left out; name whole cards in "
        "CUDA_VISIBLE_DEVICES"
        for gpu in gpus
    ]


def _chosen(gpus: Sequence[Gpu], listed: str | None) -> list[Gpu]:
    """Returns the cards that CUDA_VISIBLE_DEVICES lists: up to the first unknown one, none if one is listed twice."""
    if listed is None:
        return list(gpus)
    cards: list[Gpu] = []
    by_uuid = listed.startswith("GPU-")
    for item in listed.split(","):
        if by_uuid:
            matches = [gpu for gpu in gpus if item.startswith("GPU-") and gpu.uuid.startswith(item)]
        else:  # like strtoul: `1gpu` is 1, as in torch.cuda.device_count
            number = re.match(r"\+?[0-9]{1,9}", item.strip())
            matches = [gpu for gpu in gpus if number and gpu.number == int(number[0])]
        if len(matches) != 1:
            break
        if matches[0] in cards:
            return []
        cards += matches
    return cards


def driver_uuids(driver: Any = None) -> list[str] | None:
    """Returns the UUIDs of CUDA's devices in its own order; None if the driver does not answer.

    CUDA Driver API, "Initialization" and "Device Management". Nothing is allocated on a device, but child processes
    that are forked later cannot use CUDA, so the driver is the last resort. `driver` replaces the library.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        count, device, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return None
        uuids = []
        for number in range(count.value):
            if driver.cuDeviceGet(ctypes.byref(device), number) or driver.cuDeviceGetUuid(ctypes.byref(uuid), device):
                return None
            uuids.append(f"GPU-{UUID(bytes=bytes(uuid))}")
    except (OSError, AttributeError):
        return None
    return uuids


def pytorch_version() -> str:
    """Returns the version of the installed PyTorch, such as 2.13.0+cpu, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
