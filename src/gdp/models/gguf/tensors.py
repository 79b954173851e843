"""The bytes of a Transformers model's parameters, from the tensors of a `.gguf` file, or by the mixture of types that
`llama-quantize` would make. Source: ggml-common.h (blocks of a type, with their scales and least values) and
`llama_tensor_get_type` of llama-quant.cpp (types by tensor, without an importance matrix) of
https://github.com/ggml-org/llama.cpp, as of 2025."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from gdp.errors import InputError
from gdp.models.gguf.gguf_file import GgufTensor, gguf_tensors
from gdp.models.stored_weights import StoredWeight

# llama.cpp's names of architectures that Transformers calls otherwise
_ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2"}
_ARCHITECTURES |= {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "mixtral": "llama", "mistral": "llama"}
# fused parameters of experts in Transformers, and the tensors that they are together
_EXPERTS = {
    r"experts\.gate_up_proj$": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    r"experts\.gate_up_proj_bias$": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    r"experts\.down_proj$": ("ffn_down_exps.weight",),
    r"experts\.down_proj_bias$": ("ffn_down_exps.bias",),
    r"(mlp|block_sparse_moe)\.(gate|router)\.weight$": ("ffn_gate_inp.weight",),
    r"(mlp|block_sparse_moe)\.(gate|router)\.bias$": ("ffn_gate_inp.bias",),
    r"self_attn\.sinks$": ("attn_sinks.weight",),
}
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

_MIXED = ("q2_k", "q3_k_m", "q4_0", "q4_k_s", "q4_k_m", "q5_0", "q5_k_s", "q5_k_m", "q6_k", "q8_0")
MIXTURES = {name: name[:4].upper() for name in _MIXED}  # the type of most tensors of a mixture, by name

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


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """The types of a file's tensors, one by one. Products are computed in the model's dtype."""

    path: Path
    arithmetic: str = ""

    @property
    def label(self) -> str:
        """The types of the file by their part of its bytes."""
        bytes_by_kind = Counter[str]()
        for tensor in gguf_tensors(self.path).values():
            bytes_by_kind[tensor.kind] += tensor.num_bytes
        total = sum(bytes_by_kind.values())
        shares = ", ".join(f"{kind} {100 * count / total:.0f} %" for kind, count in bytes_by_kind.most_common(4))
        return f"{total / 1e9:.3g} GB in the file, of these {shares}"

    def stored(self, model: Any) -> dict[str, StoredWeight]:
        """Returns the bytes of every parameter. InputError for a matrix that the file has no tensor for."""
        tensors = gguf_tensors(self.path)
        num_layers = int(model.config.get_text_config().num_hidden_layers)
        names = _Names(str(model.config.model_type), num_layers, tensors, self.path)
        stored: dict[str, StoredWeight] = {}
        memories: dict[int, StoredWeight] = {}  # of tied parameters, by the one that was found
        missing: dict[str, Any] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            found = names.of(name)
            if found and sum(math.prod(tensors[one].shape) for one in found) != parameter.numel():
                shapes = ", ".join(f"{one} {list(tensors[one].shape)}" for one in found)
                raise InputError(
                    f"{self.path}: {name} is {list(parameter.shape)} in Transformers, but {shapes} in the file; "
                    "give the model's config.json as hf:DIR?weights=FORMAT"
                )
            if found:
                memories[id(parameter)] = StoredWeight(sum(tensors[one].num_bytes for one in found))
            elif parameter.dim() > 1:
                missing[name] = parameter
            if id(parameter) in memories:
                stored[name] = memories[id(parameter)]
        for name, parameter in missing.items():
            if id(parameter) not in memories:
                raise InputError(
                    f"{self.path}: has no tensor for {name} {list(parameter.shape)}; "
                    "give the model's config.json as hf:DIR?weights=FORMAT"
                )
            stored[name] = memories[id(parameter)]
        return stored


class _Names:
    """llama.cpp's names of the parameters of one architecture."""

    def __init__(self, model_type: str, num_layers: int, tensors: Mapping[str, GgufTensor], path: Path) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        name = _ARCHITECTURES.get(model_type, model_type)
        architecture = next((key for key, value in MODEL_ARCH_NAMES.items() if value == name), None)
        if architecture is None:
            raise InputError(f"{path}: gguf has no names of tensors for {name!r}; pip install --upgrade gguf")
        self._map = get_tensor_name_map(architecture, num_layers)
        self._tensors = tensors

    def of(self, name: str) -> list[str]:
        """Returns the tensors of the file that make up a parameter; [] if there are none."""
        layer = re.search(r"\.(\d+)\.", name)
        for pattern, parts in _EXPERTS.items():
            if layer and re.search(pattern, name):
                return [one for part in parts for one in self._of_experts(f"blk.{layer[1]}.{part}")]
        stem, dot, kind = name.rpartition(".")
        mapped = self._map.get_name(stem) if dot and kind in ("weight", "bias") else None
        name_of_parameter = f"{mapped}.{kind}" if mapped else self._map.get_name(name) or ""
        return [name_of_parameter] if name_of_parameter in self._tensors else []

    def _of_experts(self, name: str) -> list[str]:
        """Returns the tensor of all experts, or, in files before April 2024, those of each."""
        if name in self._tensors:
            return [name]
        before, after = name.split("_exps.") if "_exps." in name else (name, "")
        each = re.compile(rf"{re.escape(before)}\.\d+\.{re.escape(after)}")
        return [one for one in self._tensors if each.fullmatch(one)]
