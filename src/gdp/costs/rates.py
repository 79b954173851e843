"""Achieved rates: the time of kernels on a device, from its sheet and from what it reaches of it.

A kernel takes the longer of its FLOPs at the achieved rate and its bytes at the achieved bandwidth, and the device's
launch. K kernels.
"""

from collections.abc import Mapping

import numpy as np

from gdp.arrays import F64
from gdp.cluster import Device
from gdp.cluster.achieved import OF_BYTES, OF_FLOPS, share
from gdp.costs.kernels import CLASSES, Kernels

SMALL_FLOATS, HALVES = ("float8", "float4"), ("bfloat16", "float16")


def kernel_times(kernels: Kernels, device: Device) -> F64:
    """Returns the ns [K] that kernels take on `device`, each by itself."""
    of_flops = np.array([share(device.achieved, name if name in OF_FLOPS else "product") for name in CLASSES])
    of_bytes = np.array([share(device.achieved, name if name in OF_BYTES else "pointwise") for name in CLASSES])
    rates = np.array([peak_rate(device.flops_per_second, dtype) for dtype in kernels.dtypes] or [1], np.float64)
    work_ns = kernels.flops * 1e9 / (rates[kernels.dtype_codes] * of_flops[kernels.kinds])
    bytes_ns = kernels.bytes * 1e9 / (device.memory_bytes_per_second * of_bytes[kernels.kinds])
    return np.asarray(np.maximum(work_ns, bytes_ns) + device.launch_ns * kernels.launches)


def peak_rate(rates: Mapping[str, int], dtype: str) -> int:
    """Returns the FLOPs per second of a type, or of the type that is computed in in its place."""
    substitutes = HALVES if dtype.startswith(SMALL_FLOATS) else ()
    if dtype.startswith("float8"):  # AMD's variants have the rate of the others
        substitutes = ("float8_e4m3fn", *substitutes)
    return next(rates[name] for name in (dtype, *substitutes, "float32") if name in rates)
