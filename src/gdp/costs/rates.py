"""Achieved rates: the time of kernels on a device, from its sheet and from what it reaches of it. On a card a kernel
takes the longer of its FLOPs at the achieved rate and its bytes at the achieved bandwidth, and the device's launch; on
processor cores see `gdp.costs.cores`. K kernels."""

from collections.abc import Mapping

import numpy as np

from gdp.arrays import F64, Bool
from gdp.cluster import Device
from gdp.cluster.achieved import CACHE_SHARE, OF_BYTES, OF_FLOPS, share
from gdp.costs.attention import attention_ns
from gdp.costs.collectives import COLLECTIVE, KINDS, AlikeCards
from gdp.costs.cores import ATTENTION, core_times, launches_on_core
from gdp.costs.kernels import CLASSES, Kernels
from gdp.costs.products import item_bytes, multiprocessors_of, tiled_ns, together_ns

SMALL_FLOATS, HALVES = ("float8", "float4"), ("bfloat16", "float16")
# Classes whose kernels read weights, or products', whose shares are fitted with what caches hold
_OF_OTHERS = [CLASSES.index(name) for name in (*OF_FLOPS, "product_bytes", "gather", "element_gather", "optimizer")]
_BLOCKS_AT_ONCE = 8  # on a multiprocessor: 2,048 threads, in blocks of 256
_SUMS = {name for name in OF_BYTES if "norm" in name or name in ("reduction", "narrow_sum")}
_OF_ELEMENTS = [
    CLASSES.index(name) for name in ("function", "random", "softmax")
]  # what is computed of each bounds them
# What only some devices do: cards that have TF32, and processor cores
_OF_TF32 = CLASSES.index("tf32_transpose")
_OF_CORES = [CLASSES.index(name) for name in ("weight_transpose", "conflicting_read", "core_product")]


def kernel_times(kernels: Kernels, device: Device) -> F64:
    """Returns the ns [K] that kernels take on `device`, each by itself."""
    times_ns = np.add(*times_on_core(kernels, device)) if _is_core(device) else _times_on_card(kernels, device)
    times_ns = times_ns + launch_times(kernels, device)
    times_ns[np.isin(kernels.kinds, _of_others(device))] = 0
    return np.where(is_collective(kernels), collective_times(kernels, device)[1], times_ns)


def times_on_core(kernels: Kernels, device: Device) -> tuple[F64, F64]:
    """Returns the ns [K] that kernels compute on a processor, and that they read and write memory beside it."""
    work_ns, bytes_ns = kernels.flops * 1e9 / _achieved_rates(kernels, device), memory_times(kernels, device)
    return core_times(kernels, work_ns, bytes_ns)


def _is_core(device: Device) -> bool:
    """Returns whether a device is a processor whose shares were measured by what cores do: those that were measured
    before dropout was a class have shares of another form."""
    return device.is_cpu and ("random" in device.achieved or not device.achieved)


def launch_times(kernels: Kernels, device: Device) -> F64:
    """Returns the ns [K] that kernels take to begin on `device`."""
    return gap_ns(device) * (launches_on_core(kernels) if _is_core(device) else kernels.launches)


def _of_others(device: Device) -> list[int]:
    """Returns the classes of what other devices do."""
    if _is_core(device):
        return []
    return _OF_CORES if "tf32" in device.flops_per_second else [*_OF_CORES, _OF_TF32]


def _achieved_rates(kernels: Kernels, device: Device) -> F64:
    """Returns the FLOPs per second [K] that kernels reach."""
    of_flops = np.array([share(device.achieved, name if name in OF_FLOPS else "product") for name in CLASSES])
    rates = np.array([peak_rate(device.flops_per_second, dtype) for dtype in kernels.dtypes] or [1], np.float64)
    return np.asarray(rates[kernels.dtype_codes] * of_flops[kernels.kinds])


def _times_on_card(kernels: Kernels, device: Device) -> F64:
    achieved, bytes_ns = _achieved_rates(kernels, device), memory_times(kernels, device)
    work_ns = kernels.flops * 1e9 / achieved
    is_sized = (kernels.sizes > 0).any(axis=1) & (kernels.flops > 0)
    is_attention = np.isin(kernels.kinds, ATTENTION)
    cut = np.flatnonzero(is_sized & ~is_attention & (kernels.kinds < len(OF_FLOPS)))
    fused = np.flatnonzero(is_sized & is_attention)
    figures, sizes = device.achieved, kernels.sizes
    times_ns = np.maximum(np.maximum(work_ns, bytes_ns), _block_times(kernels, device))
    if figures.get("multiprocessors"):
        item = np.array([item_bytes(dtype) for dtype in kernels.dtypes])[kernels.dtype_codes[cut]]
        cut_ns = tiled_ns(sizes[cut, :4], item, multiprocessors_of(device, achieved[cut]))
        fused_ns = attention_ns(
            sizes[fused],
            kernels.flops[fused],
            kernels.kinds[fused] == ATTENTION[0],
            multiprocessors_of(device, achieved[fused]),
        )
        times_ns[cut] = together_ns(cut_ns * kernels.launches[cut], bytes_ns[cut])
        times_ns[fused] = together_ns(fused_ns, bytes_ns[fused])
    floors_ns = [figures.get(f"{name}_floor_ns", 0) for name in ("product", "decode", "prefill")]
    passes = OF_BYTES.keys() - {"product_bytes"}  # classes that move memory alone
    passes_ns = [figures.get(f"{'sum' if x in _SUMS else 'pass'}_floor_ns", 0) * (x in passes) for x in CLASSES]
    times_ns += np.array(passes_ns)[kernels.kinds] * np.minimum(kernels.launches, 1)
    times_ns[cut] += floors_ns[0] * kernels.launches[cut]
    times_ns[fused] += np.where(sizes[fused, 2] == 1, *floors_ns[1:])
    return times_ns


def _block_times(kernels: Kernels, device: Device) -> F64:
    """Returns the ns [K] that passes take whose thread blocks, of a known number, take a known time each."""
    at_once = _BLOCKS_AT_ONCE * device.achieved.get("multiprocessors", 0)
    blocks, ns = kernels.sizes[:, 0] * (kernels.kinds >= len(OF_FLOPS)) * ~is_collective(kernels), kernels.sizes[:, 1]
    return np.asarray(np.maximum(blocks / at_once, np.minimum(blocks, 1)) * ns if at_once else np.zeros(len(blocks)))


def is_collective(kernels: Kernels) -> Bool:
    """Returns [K] the exchanges of the ranks of a group."""
    return np.asarray(kernels.kinds == CLASSES.index(COLLECTIVE))


def collective_times(kernels: Kernels, device: Device) -> tuple[F64, F64]:
    """Returns the ns [K] that exchanges in a group take to begin, and in all; 0 for other kernels and devices."""
    begin_ns, times_ns = np.zeros((2, len(kernels.kinds)))
    if device.group:
        for place in np.flatnonzero(is_collective(kernels)).tolist():
            cards = AlikeCards.of_group(device, int(kernels.sizes[place, 1]))
            what = KINDS[int(kernels.sizes[place, 0])], int(kernels.bytes[place])
            begin_ns[place], times_ns[place] = cards.begin_ns(*what), cards.time_ns(*what)
    return begin_ns, times_ns


def gap_ns(device: Device) -> float:
    """Returns the ns that pass on `device` between two kernels."""
    return device.achieved.get("gap_ns", device.launch_ns)


def memory_times(kernels: Kernels, device: Device) -> F64:
    """Returns the ns [K] that kernels take to read and write memory alone. Those that multiply nothing read half of
    their bytes, of which the cache still has what the kernel before wrote last."""
    shares = np.array([share(device.achieved, name if name in OF_BYTES else "product_bytes") for name in CLASSES])
    of_wide = np.minimum(2 * shares, shares[CLASSES.index("pointwise")])  # elements bound it, of any size
    is_wide = np.array([item_bytes(dtype) >= 4 for dtype in kernels.dtypes] or [False])[kernels.dtype_codes]
    is_wide &= not device.is_cpu
    of_kernels = np.where(is_wide & np.isin(kernels.kinds, _OF_ELEMENTS), of_wide[kernels.kinds], shares[kernels.kinds])
    cache_bytes = device.achieved.get("cache_share", CACHE_SHARE) * device.achieved.get("cache_bytes", 0)
    held = cache_bytes * ~np.isin(kernels.kinds, _OF_OTHERS)
    moved = kernels.bytes - np.minimum(kernels.bytes / 2, held)
    return np.asarray(moved * 1e9 / (device.memory_bytes_per_second * of_kernels))


def peak_rate(rates: Mapping[str, int], dtype: str) -> int:
    """Returns the FLOPs per second of a type, or of the type that is computed in in its place."""
    substitutes = HALVES if dtype.startswith(SMALL_FLOATS) else ()
    if dtype.startswith("float8"):  # AMD's variants have the rate of the others
        substitutes = ("float8_e4m3fn", *substitutes)
    return next(rates[name] for name in (dtype, *substitutes, "float32") if name in rates)
