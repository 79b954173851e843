"""Achieved rates of devices, as shares of their data sheets by class of kernel. A device without any runs at the rates
of its sheet, and an op of its own is one kernel. See docs/machine-model.md, section 2."""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import NamedTuple

from gdp.errors import InputError, suggest

OF_FLOPS: Mapping[str, str] = MappingProxyType(
    {
        "product": "",
        "core_product": "product",  # of gradients of recurrent layers, step by step, on processor cores
        "attention": "product",
        "attention_backward": "attention",
        "convolution": "product",
        "first_convolution": "convolution",  # of few input channels
        "grouped_convolution": "convolution",
        "grouped_convolution_backward": "grouped_convolution",  # in channels_last
        "depthwise_convolution": "product",  # of the rate of float32
        "depthwise_weight_gradient": "depthwise_convolution",
        "depthwise_wide_weight_gradient": "depthwise_weight_gradient",  # of more than 3 in height or width
        # the same in channels_last
        "depthwise_convolution_last": "depthwise_convolution",
        "depthwise_weight_gradient_last": "depthwise_weight_gradient",
        "depthwise_wide_weight_gradient_last": "depthwise_wide_weight_gradient",
    }
)
OF_BYTES: Mapping[str, str] = MappingProxyType(
    {
        "pointwise": "",
        "product_bytes": "pointwise",  # of kernels whose share of the peak rate counts too
        "copy": "pointwise",  # to another type, or into a part: element by element
        "widening_copy": "copy",  # from halves to float32, and sums and products of both
        "strided_copy": "pointwise",  # of rows that lie apart, or that are repeated: an offset for each element
        "interleaved_copy": "copy",  # parts that alternate in the result, such as channels in channels_last
        "permuted_copy": "copy",  # parts whose dimensions are in another order than the result's
        "transpose": "copy",
        "inference_transpose": "transpose",  # beside convolutions, where some read other layouts as they are
        "tf32_transpose": "transpose",  # beside convolutions in TF32, on cards that have it
        "weight_transpose": "transposed_copy",  # beside convolutions on processor cores
        "conflicting_read": "transposed_copy",  # of attention there, in rows that are 4 KiB apart
        "transposed_copy": "transpose",  # by PyTorch, not by a library of convolutions
        "gather": "pointwise",
        "element_gather": "gather",  # an index for each element
        "reduction": "pointwise",
        "narrow_sum": "reduction",  # beside a norm of narrow rows: gradients of its weights
        "function": "pointwise",  # exponentials and the like, which processor cores compute for long
        "random": "function",  # numbers, one after the other on processor cores
        "masked": "pointwise",  # by booleans, which these convert
        "norm": "pointwise",
        "narrow_norm": "norm",  # of rows of up to 1,024 elements
        "evaluated_batch_norm": "norm",  # of known statistics, but in channels_last
        "batch_norm": "norm",  # with statistics
        # PyTorch's own, which it takes in bfloat16; in channels_last
        "native_batch_norm": "batch_norm",
        "native_batch_norm_last": "native_batch_norm",
        "native_batch_norm_backward": "norm",
        "native_batch_norm_backward_last": "native_batch_norm_backward",
        "softmax": "pointwise",
        "pool": "pointwise",
        "optimizer": "pointwise",
    }
)
"""Classes of kernels by what bounds them, and the class whose share one takes that a device tells nothing of: shares of
the peak rate, and of the memory bandwidth. The first of each is 1 where a device does not tell it."""
NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "multiprocessors": "of the card; 0: products are not cut into tiles",
        "gap_ns": "between kernels on the device; else its launch",
        "cache_bytes": "of the cache that all multiprocessors share",
        "cache_share": "of it, in which a kernel finds what the one before has written; else CACHE_SHARE",
        "operand_bytes_per_second": "that one multiprocessor reads of operands, in the cache; 0: without delay",
        "product_floor_ns": "of a product, besides the launch and its work: until operands come and sums are written",
        "odd_pace": "of products of halves whose rows are no multiple of 16 bytes, beside others; 0: as on an A100",
        "pass_floor_ns": "of a kernel that memory bounds, in the same way",
        "sum_floor_ns": "of one that adds up, such as a norm, in its place",
        "decode_floor_ns": "of attention of one token to a cache, in the same way",
        "prefill_floor_ns": "of other fused attention, in the same way",
    }
)  # further numbers, 0 where a device does not tell them and nothing else is said


CACHE_SHARE = 0.5  # fitted on the 24 set rows of GPT on A100, where 0.25 and 1 are worse


class CardFigures(NamedTuple):
    """Figures of a kind of card."""

    issue_ns: int  # of the host, for a kernel
    achieved: Mapping[str, float]


GPU = "gpu"  # the family of cards that are in no other


def figures_of_kind(kind: str) -> CardFigures:
    """Returns the figures of a kind of GPU: its own, else those of its family, else those of any."""
    row = dict(_TABLES["kinds"].get(kind, {}))
    families = _TABLES["families"]
    figures = families[GPU] | families[row.pop("family", GPU)] | row
    figures["cache_bytes"] = figures.pop("cache_mib", 0) * 2**20
    return CardFigures(figures.pop("issue_ns"), MappingProxyType(figures))


def family_of(kind: str) -> str:
    """Returns the family of a kind of GPU; GPU where it is not known."""
    return str(_TABLES["kinds"].get(kind, {}).get("family", GPU))


_TABLES = tomllib.loads((files("gdp.cluster") / "achieved.toml").read_text(encoding="utf-8"))


def check_achieved(achieved: Mapping[str, float], where: str) -> None:
    """Raises InputError, which begins with `where`, for an unknown name or a number that is out of range."""
    for name, value in achieved.items():
        if name not in (known := {**OF_FLOPS, **OF_BYTES, **NUMBERS}):
            raise InputError(f"{where}: achieved has no {name!r}; {suggest(name, list(known))}")
        most, least = (1e15, 0.0) if name in NUMBERS else (100.0, 1e-6)
        if not least <= value <= most:
            raise InputError(f"{where}: achieved {name!r} is {value:g}; {least:g} to {most:g} is expected")


def scaled(achieved: Mapping[str, float], product: float, bandwidth: float) -> Mapping[str, float]:
    """Returns all shares, those of peak rates times `product` and those of the memory bandwidth times `bandwidth`."""
    shares = {"product": 1.0, "pointwise": 1.0} | dict(achieved)
    of = {**dict.fromkeys(OF_FLOPS, product), **dict.fromkeys(OF_BYTES, bandwidth)}
    return MappingProxyType({name: of.get(name, 1) * shares[name] for name in shares})


def share(achieved: Mapping[str, float], name: str) -> float:
    """Returns the share of a class of kernels: its own, else that of the class that stands for it, else 1."""
    bases = OF_FLOPS if name in OF_FLOPS else OF_BYTES
    while name and name not in achieved:
        name = bases[name]
    return achieved.get(name, 1.0)
