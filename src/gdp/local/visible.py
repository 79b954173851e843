"""Which cards CUDA, and so PyTorch, calls cuda0, cuda1, ...: CUDA_VISIBLE_DEVICES and the order of numbers.

CUDA Programming Guide, "CUDA Environment Variables". NVML's numbers are those of CUDA_DEVICE_ORDER=PCI_BUS_ID. CUDA's
own default puts the fastest card first; among equal cards that is taken to be the order of their addresses too. For
unequal ones, and where a card is split into instances (MIG), the CUDA driver is asked; if it does not answer, NVML's
order is assumed.
"""

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from gdp.local.nvml import Gpu

Visible = tuple[dict[str, Gpu], list[str]]
"""The cards by their names in CUDA, in that order, and notes on those that are left out."""


def visible_cards(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Those of `gpus` that PyTorch would see, without importing it."""
    if gpus and (pytorch := pytorch_version()).endswith("+cpu"):  # the builds without CUDA are called so
        return {}, [f"{len(gpus)} GPUs are left out: PyTorch {pytorch} has no CUDA; install a build that has"]
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = _chosen(gpus, listed)
    notes = []
    if listed is not None and "MIG-" in listed:
        notes.append("CUDA_VISIBLE_DEVICES names MIG instances, which are left out; name whole cards")
    by_uuid = listed is not None and listed.startswith("GPU-")
    is_unordered = len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    mig = [gpu for gpu in chosen if gpu.is_mig]
    if chosen and (mig or (is_unordered and not by_uuid)):
        uuids = driver_uuids()
        known = {gpu.uuid: gpu for gpu in gpus if not gpu.is_mig}
        if uuids is not None:
            found = {f"cuda{number}": known[uuid] for number, uuid in enumerate(uuids) if uuid in known}
            return found, notes + _mig_notes(mig)
        if mig:  # beside an instance CUDA shows no whole card (NVIDIA MIG User Guide, "CUDA Device Enumeration")
            return {}, notes + _mig_notes(mig)
        notes.append("unequal GPUs, and the CUDA driver does not tell their order; set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return {f"cuda{number}": gpu for number, gpu in enumerate(chosen)}, notes


def _mig_notes(gpus: Sequence[Gpu]) -> list[str]:
    return [
        f"GPU {gpu.number} ({gpu.name}) is split into MIG instances, which are left out; name whole cards in "
        "CUDA_VISIBLE_DEVICES"
        for gpu in gpus
    ]


def _chosen(gpus: Sequence[Gpu], listed: str | None) -> list[Gpu]:
    """The cards that CUDA_VISIBLE_DEVICES lists: up to the first that is not there, none if one is listed twice."""
    if listed is None:
        return list(gpus)
    found: list[Gpu] = []
    by_uuid = listed.startswith("GPU-")
    for item in listed.split(","):
        if by_uuid:
            matches = [gpu for gpu in gpus if item.startswith("GPU-") and gpu.uuid.startswith(item)]
        else:  # like strtoul: `1gpu` is 1, as in torch.cuda.device_count
            number = re.match(r"\+?[0-9]{1,9}", item.strip())
            matches = [gpu for gpu in gpus if number and gpu.number == int(number[0])]
        if len(matches) != 1:
            break
        if matches[0] in found:
            return []
        found += matches
    return found


def driver_uuids(driver: Any = None) -> list[str] | None:
    """The UUIDs of CUDA's devices in its own order; None where the driver does not answer.

    CUDA Driver API, "Initialization" and "Device Management". Nothing is allocated on a device, but children that this
    process forks from then on cannot use CUDA, so it is asked only where there is no other way. `driver` stands for
    the library.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        count, device, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return None
        found = []
        for number in range(count.value):
            if driver.cuDeviceGet(ctypes.byref(device), number) or driver.cuDeviceGetUuid(ctypes.byref(uuid), device):
                return None
            found.append(f"GPU-{UUID(bytes=bytes(uuid))}")
    except (OSError, AttributeError):
        return None
    return found


def pytorch_version() -> str:
    """Of the PyTorch that is installed, such as 2.13.0+cpu, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
