"""Kernels as processor cores run them: a core multiplies and waits for memory in turn, so both times add up. Its
libraries copy what they multiply into layouts of their own, and go through attention in blocks of queries."""

import numpy as np

from gdp.arrays import F64, I64
from gdp.cluster.achieved import OF_FLOPS
from gdp.costs.attention import core_block, keys_seen
from gdp.costs.kernels import CLASSES, Kernels

ATTENTION = [CLASSES.index(name) for name in ("attention", "attention_backward")]
# Attention in FLOPs that take as long as the rest of it: an exponential of each pair of query and key, and the products
# and sums that begin for each block of queries. Fitted on the attention of
# five models on one core (Xeon with AVX-512, PyTorch 2.13); a core's share scales all of it.
_PAIR_FLOPS, _BLOCK_FLOPS = 110.0, np.array([540e3, 1050e3])
UPDATE_LAUNCHES = 6  # that the update of a parameter takes at least; read off nets of small layers


def core_times(kernels: Kernels, work_ns: F64, bytes_ns: F64) -> tuple[F64, F64]:
    """Returns the ns [K] that kernels compute on a core, and that they read and write memory beside it; what their
    FLOPs and bytes take, `work_ns` and `bytes_ns`, overlaps in passes alone."""
    is_product = kernels.kinds < len(OF_FLOPS)
    fused = np.flatnonzero(np.isin(kernels.kinds, ATTENTION) & (kernels.sizes > 0).any(axis=1))
    work_ns = work_ns.copy()
    work_ns[fused] *= _attention_work(kernels, fused)
    return np.where(is_product, work_ns, 0.0), np.where(is_product, bytes_ns, np.maximum(work_ns, bytes_ns))


def launches_on_core(kernels: Kernels) -> F64:
    """Returns the tiny ops [K] that kernels take as long to begin as: parameters are updated one by one."""
    least = np.where(kernels.kinds == CLASSES.index("optimizer"), UPDATE_LAUNCHES, 0)
    return np.maximum(kernels.launches, least)


def _attention_work(kernels: Kernels, fused: I64) -> F64:
    """Returns the work of attention as a multiple of its FLOPs. Keys that a query does not see are multiplied too."""
    size, flops = kernels.sizes[fused], np.maximum(kernels.flops[fused], 1)
    parts, group, queries, keys = size.T[:4]
    block = np.array([core_block(int(each)) for each in queries])
    whole = keys / np.maximum(keys_seen(size, 1), 1)
    heads, is_backward = parts * group, kernels.kinds[fused] == ATTENTION[1]
    more = _PAIR_FLOPS * heads * queries * keys + _BLOCK_FLOPS[is_backward.astype(int)] * heads * np.ceil(
        queries / block
    )
    return np.asarray(whole + more / flops)
