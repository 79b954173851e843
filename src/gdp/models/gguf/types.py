"""The types that llama.cpp stores weights in, and the mixtures of them that its `llama-quantize` makes. Source:
ggml-common.h (blocks of a type, with their scales and least values) and `llama_tensor_get_type` of llama-quant.cpp
(types by tensor, without an importance matrix) of https://github.com/ggml-org/llama.cpp, as of 2025."""

import math
from dataclasses import dataclass
from fractions import Fraction

BITS: dict[str, Fraction] = {
    # bytes of a block * 8 / weights of a block
    "F16": Fraction(16),
    "IQ4_NL": Fraction(18 * 8, 32),
    "Q4_0": Fraction(18 * 8, 32),
    "Q5_0": Fraction(22 * 8, 32),
    "Q5_1": Fraction(24 * 8, 32),
    "Q8_0": Fraction(34 * 8, 32),
    "Q2_K": Fraction(84 * 8, 256),
    "Q3_K": Fraction(110 * 8, 256),
    "Q4_K": Fraction(144 * 8, 256),
    "Q5_K": Fraction(176 * 8, 256),
    "Q6_K": Fraction(210 * 8, 256),
}  # bits of a weight, scales and least values included

MIXTURES: dict[str, str] = {
    "q2_k": "Q2_K",
    "q3_k_m": "Q3_K",
    "q4_0": "Q4_0",
    "q4_k_s": "Q4_K",
    "q4_k_m": "Q4_K",
    "q5_0": "Q5_0",
    "q5_k_s": "Q5_K",
    "q5_k_m": "Q5_K",
    "q6_k": "Q6_K",
    "q8_0": "Q8_0",
}  # the type of most tensors of a mixture, by name

_NARROW = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""The types of tensors with rows that are no multiple of 256, the weights of a block of the types with K."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as the mixtures distinguish them."""

    role: str  # `output` (of tokens), `query`, `key`, `value`, `fused` (all three), `merge` (of heads), `down` or ""
    row: int  # the weights of a row
    layer: int = 0
    num_layers: int = 1
    num_experts: int = 0
    heads_per_key: int = 1


def type_in(mixture: str, matrix: Matrix) -> str:
    """Returns the type of a matrix in a mixture."""
    name = _exact_type(mixture, matrix)
    if matrix.row % 256 and name in _NARROW:
        name = _NARROW[name]
    return "F16" if matrix.row % 32 else name


def num_bytes(count: int, name: str) -> int:
    """Returns the bytes of `count` weights of that type."""
    return math.ceil(count * BITS[name] / 8)


def _exact_type(mixture: str, matrix: Matrix) -> str:
    """Returns the type of a matrix with rows of any length."""
    base, role, layer, num_layers = MIXTURES[mixture], matrix.role, matrix.layer, matrix.num_layers
    of_eight = matrix.num_experts == 8  # of Mixtral, whose attention is small beside its experts
    if role == "output":
        return "Q8_0" if base == "Q8_0" or matrix.row % 32 else "Q6_K"
    if role in ("value", "key") and of_eight:
        return "Q8_0"
    if role == "value":
        name = {
            "q2_k": "Q4_K" if matrix.heads_per_key >= 4 else "Q3_K",
            "q3_k_m": "Q5_K" if layer < 2 else "Q4_K",
            "q4_k_s": "Q5_K" if layer < 4 else base,
        }.get(mixture, base)
        if mixture in ("q4_k_m", "q5_k_m") and _has_more_bits(layer, num_layers):
            name = "Q6_K"
        is_70b = num_layers == 80 and matrix.heads_per_key == 8
        return "Q5_K" if is_70b and name in ("Q3_K", "Q4_K") else name
    if role == "down":
        if mixture in ("q4_k_m", "q5_k_m"):
            return "Q6_K" if _has_more_bits(layer, num_layers) else base
        if mixture == "q4_k_s":
            return "Q5_K" if layer < num_layers // 8 else base
        return {"q2_k": "Q3_K", "q3_k_m": "Q5_K" if layer < num_layers // 16 else "Q4_K"}.get(mixture, base)
    if role == "merge":
        if of_eight:
            return "Q5_K" if mixture in ("q2_k", "q3_k_m", "q4_k_s", "q4_k_m") else base
        return {"q2_k": "Q3_K", "q3_k_m": "Q4_K"}.get(mixture, base)
    if role == "fused":
        return {"q3_k_m": "Q4_K", "q4_k_m": "Q5_K", "q5_k_m": "Q6_K"}.get(mixture, base)
    return base


def _has_more_bits(layer: int, num_layers: int) -> bool:
    """Returns whether a layer is in the first or last eighth, or every third in between (`use_more_bits`)."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
