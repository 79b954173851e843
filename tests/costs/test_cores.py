"""Times of kernels on processor cores, by hand."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from gdp.cluster import Device
from gdp.costs.kernels import CLASSES, SIZES, Kernels
from gdp.costs.rates import kernel_times

# of a FLOP and of a byte a ns; products reach half of it, passes a quarter
CORE = Device(
    "cpu0",
    "some-processor-1core",
    memory_bytes=2**30,
    flops_per_second=MappingProxyType({"float32": 10**9}),
    memory_bytes_per_second=10**9,
    launch_ns=100,
    achieved=MappingProxyType({"product": 0.5, "copy": 0.25, "random": 0.1}),
)


def time_ns(
    kind: str, flops: int, num_bytes: int, size: tuple[int, ...] = (), launches: int = 1, on: Device = CORE
) -> float:
    """Returns what one kernel takes."""
    sizes = np.zeros((1, SIZES))
    sizes[0, : len(size)] = size
    one, kinds, ends = np.zeros(1, np.int64), np.array([CLASSES.index(kind)]), np.array([0, 1])
    figures = (np.array([float(x)]) for x in (flops, num_bytes))
    row = Kernels(one, ends, kinds, *figures, sizes, np.array([float(launches)]), ("float32",), one, (), one)
    return float(kernel_times(row, on)[0])


def test_products_and_memory_take_turns() -> None:
    """A core multiplies and reads in turn; a pass takes the longer of both."""
    assert time_ns("product", 1000, 300) == 1000 / 0.5 + 300 + 100
    assert time_ns("copy", 0, 300) == 300 / 0.25 + 100


def test_parameters_are_updated_one_by_one() -> None:
    """An update takes as long to begin as six tiny ops, however many parameters share a kernel on a card."""
    assert time_ns("optimizer", 0, 0, launches=0) == 6 * 100


def test_shares_of_another_form_are_used_as_they_were_measured() -> None:
    """A file of cores that were measured before has no share of random numbers: the longer of work and bytes counts."""
    before = replace(CORE, achieved=MappingProxyType({"product": 0.5}))
    assert time_ns("product", 1000, 300, on=before) == 1000 / 0.5 + 100
    assert time_ns("weight_transpose", 0, 300, launches=0, on=before) == 0


def test_weights_and_images_of_convolutions_are_copied() -> None:
    """What is of other devices' libraries takes no time on cards, and its bytes on a core."""
    assert time_ns("weight_transpose", 0, 300, launches=0) == time_ns("tf32_transpose", 0, 300, launches=0) == 1200


@pytest.mark.parametrize(("queries", "blocks"), [(32, 1), (33, 2), (192, 3), (768, 3)])
def test_attention_goes_through_blocks_of_queries(queries: int, blocks: int) -> None:
    """6 heads, 64 keys: FLOPs, 110 for each pair, and 540,000 for each block of 32, 64 or 256 queries."""
    flops = 4 * 6 * queries * 64 * 16
    work = flops + 110 * 6 * queries * 64 + 540_000 * 6 * blocks
    assert time_ns("attention", flops, 0, (6, 1, queries, 64, 16, 0)) == pytest.approx(work / 0.5 + 100)


def test_unseen_keys_are_multiplied() -> None:
    """Of causal attention of 32 queries to 32 keys little more than half is counted, and all is computed."""
    whole, causal = (
        time_ns("attention", flops, 0, (1, 1, 32, 32, 8, is_causal)) for flops, is_causal in ((32_768, 0), (16_896, 1))
    )
    assert causal == pytest.approx(whole)
