"""The bytes of a Transformers model's parameters, from the tensors of a `.gguf` file."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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
