"""The figures of a GPU: those of its built-in kind, else estimates from its clocks."""

from collections.abc import Mapping

from gdp.cluster.achieved import figures_of_kind
from gdp.cluster.catalogue import CONTEXT_GIB, GIB, GPU_LAUNCH_NS, KINDS
from gdp.cluster.detect import host
from gdp.cluster.detect.nvml import Gpu
from gdp.cluster.device import Device

# An assumption: a desktop's windows change free memory by less, so `local` mostly stays the same cluster.
_MEMORY_STEP_BYTES = GIB // 4
_CONTEXT_BYTES = int(CONTEXT_GIB * GIB)

KIND_BY_NAME: Mapping[str, str] = {kind.driver: name for name, kind in KINDS.items() if kind.driver}


def kind_of(gpu: Gpu) -> str:
    """Returns the built-in kind, else a name of its own: `nvidia-h100-pcie`."""
    return KIND_BY_NAME.get(gpu.name.removeprefix("NVIDIA ")) or host.slug(gpu.name) or "cuda"


def slot_of(gpu: Gpu) -> tuple[int, int]:
    """Returns (generation, lanes) of the card's PCIe link, from the driver, else from its kind, else assumed. The third
    generation is the slowest of the built-in kinds, and slots for cards have 16 lanes."""
    kind = KINDS.get(kind_of(gpu))
    port = kind.port if kind and kind.port.startswith("pcie") else "pcie3"
    generation = gpu.pcie_generation or int(port.removeprefix("pcie"))
    return generation, gpu.pcie_width or 16


def memory_of(gpu: Gpu) -> int | None:
    """Returns the memory that a plan may use: the part that others leave free, else all, less the context of CUDA; None
    if neither is known."""
    if gpu.free_bytes is not None:
        return max(gpu.free_bytes - _CONTEXT_BYTES, 0) // _MEMORY_STEP_BYTES * _MEMORY_STEP_BYTES
    if gpu.total_bytes is not None:
        return max(gpu.total_bytes - _CONTEXT_BYTES, 0)
    kind = KINDS.get(kind_of(gpu))
    return None if kind is None else kind.memory_bytes


# Products of halves over those of float32 by compute capability, from the built-in kinds; 2 is GeForce's
_HALVES = {(7, 0): 8, (7, 5): 4, (8, 0): 16, (9, 0): 14, (10, 0): 28}


def _rates_of_halves(float32: int, capability: tuple[int, int]) -> dict[str, int]:
    """Returns the FLOPs per second of the types that tensor cores multiply."""
    if capability < (7, 0):
        return {}
    halves = _HALVES.get(capability, 2) * float32
    return {"float16": halves} if capability < (8, 0) else {"tf32": halves // 2, "float16": halves, "bfloat16": halves}


def gpu_device(name: str, gpu: Gpu) -> Device | None:
    """Returns the device with the figures of its kind, else with estimates; None if too little is known."""
    memory_bytes, kind = memory_of(gpu), kind_of(gpu)
    if memory_bytes is None:
        return None
    if (built_in := KINDS.get(kind)) is not None:
        return built_in.device(name, kind, memory_bytes)
    if not (gpu.num_cores and gpu.sm_mhz and gpu.memory_mhz and gpu.bus_width_bits):
        return None
    # A CUDA core does a fused multiply-add in a cycle (CUDA Programming Guide, throughput of arithmetic instructions);
    # memory moves two bits on each wire in a cycle of the clock that NVML tells: 2 x 2619 MHz x 5120 bits is 3.35 TB/s,
    # the H100's data sheet, and 2 x 715 MHz x 4096 bits 732 GB/s, the P100's.
    float32 = 2 * gpu.num_cores * gpu.sm_mhz * 10**6
    bandwidth = 2 * gpu.memory_mhz * 10**6 * gpu.bus_width_bits // 8
    figures = figures_of_kind(kind)
    rates = {"float32": float32} | _rates_of_halves(float32, gpu.compute_capability or (0, 0))
    return Device(name, kind, memory_bytes, rates, bandwidth, GPU_LAUNCH_NS, figures.issue_ns, figures.achieved)
