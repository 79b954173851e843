"""Quantised weights of Transformers models: from the `quantization_config` of a config, or as `?weights=FORMAT` asks. A
format says which parameters are stored in fewer bits, how many these are with scales and zero points, and in which type
products with them are computed. Weight-only formats compute in the model's dtype: their kernels unpack the weights
while they read them, which is not counted. Embeddings, norms, biases and routers keep the model's dtype, and so does
the output layer, unless the format says otherwise. docs/models-transformers.md has the table."""

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdp.errors import InputError, suggest
from gdp.models.gguf.gguf_file import GGUF_FILE
from gdp.models.gguf.tensors import MIXTURES, GgufFormat, Matrix, num_bytes, type_in
from gdp.models.stored_weights import StoredWeight

NONE = "none"  # in place of the format of a config: its dtype
FLOAT8 = "float8_e4m3fn"
_INT8 = "int8"


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """Weights of `bits` bits, and `scale_bits` of scale and zero point for each group of weights. group: weights that
    share a scale; 0: those of an output channel; -1: all of a tensor. arithmetic: the type of products; "": the
    model's. skipped: names or patterns of modules that keep the model's dtype."""

    label: str
    bits: int
    scale_bits: int
    group: int
    arithmetic: str = ""
    skipped: tuple[str, ...] = ()
    has_output: bool = False  # whether the output layer is quantised too
    experts_only: bool = False

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a weight of this shape, rounded up."""
        count = math.prod(shape)
        group = {0: shape[-1], -1: count}.get(self.group, self.group)
        return -(-(count * self.bits + -(-count // max(1, group)) * self.scale_bits) // 8)

    def stored(self, model: Any) -> dict[str, StoredWeight]:
        """Returns the parameters that are quantised, under each of their names."""
        embedding = getattr(model.get_input_embeddings(), "weight", None)
        output = _output_weight(model)
        stored = {}
        for name, parameter, is_expert in _matrices(model):
            is_output = parameter is output
            if parameter is embedding or (is_output and not self.has_output) or (self.experts_only and not is_expert):
                continue
            if not _is_skipped(name.removesuffix(".weight"), self.skipped):
                stored[name] = StoredWeight(self.num_bytes(tuple(parameter.shape)), self.arithmetic)
        return stored


@dataclass(frozen=True, slots=True)
class MixtureFormat:
    """One of llama.cpp's mixtures: embeddings and the output layer are quantised too."""

    mixture: str
    arithmetic: str = ""

    @property
    def label(self) -> str:
        """The name of the format in notes."""
        return f"{self.mixture.upper()} of llama.cpp"

    def stored(self, model: Any) -> dict[str, StoredWeight]:
        """Returns the parameters that are quantised, under each of their names."""
        config = model.config.get_text_config()
        num_experts = next((n for name in _EXPERT_COUNTS if (n := getattr(config, name, None))), 0)
        num_heads = getattr(config, "num_attention_heads", 1)
        heads_per_key = num_heads // (getattr(config, "num_key_value_heads", None) or num_heads)
        embedding, output = getattr(model.get_input_embeddings(), "weight", None), _output_weight(model)
        is_tied = output is None or output is embedding
        stored = {}
        for name, parameter, _ in _matrices(model, with_embeddings=True):
            layer = re.search(r"\.(\d+)\.", name)
            role = next((role for part, role in _ROLES.items() if part in name), "")
            if parameter is output or (is_tied and parameter is embedding):
                role = "output"
            width, number = int(parameter.shape[-1]), int(layer[1]) if layer else 0
            matrix = Matrix(role, width, number, int(config.num_hidden_layers), num_experts, heads_per_key)
            stored[name] = StoredWeight(num_bytes(parameter.numel(), type_in(self.mixture, matrix)))
        return stored


WeightFormat = GroupFormat | MixtureFormat | GgufFormat  # a way to store the weights of a model

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ROLES = {"qkv_proj": "fused", "v_proj": "value", "k_proj": "key", "o_proj": "merge", "down_proj": "down"}


def _matrices(model: Any, *, with_embeddings: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Yields (name, parameter, is it of experts) of the weights of linear layers, under each of their names. Experts
    are parameters [experts, .., ..]; routers are parameters of two dimensions outside of linear layers."""
    from torch import nn
    from torch.nn.modules.conv import _ConvNd
    from transformers.pytorch_utils import Conv1D

    for path, part in model.named_modules(remove_duplicate=False):
        is_linear = isinstance(part, (nn.Linear, Conv1D)) or (with_embeddings and isinstance(part, nn.Embedding))
        is_router = isinstance(part, nn.Linear) and path.endswith(("router", "mlp.gate", "shared_expert_gate"))
        for name, parameter in part.named_parameters(recurse=False):
            is_expert = parameter.dim() == 3 and not isinstance(part, _ConvNd)
            if is_expert or (is_linear and not is_router and parameter.dim() == 2):
                yield f"{path}.{name}" if path else name, parameter, is_expert


def _output_weight(model: Any) -> Any:
    """Returns the weight of the layer that makes logits of tokens, if the model has one."""
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return getattr(layer, "weight", None)


def _is_skipped(name: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether a pattern names the module, a module around it, or its last parts; `re:` marks an expression."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif fnmatch.fnmatchcase(f".{name}.", f"*.{pattern.strip('.')}.*"):
            return True
    return False


QUANTISATION = "quantization_config"


def weight_format(config: Mapping[str, Any], name: str | None, text: str) -> WeightFormat | None:
    """Returns the format of a model's weights: the one of that name, else its file's or config's; None: its dtype.
    InputError for a name or a `quantization_config` that is not modelled."""
    if name is not None:
        return None if name.lower() == NONE else format_of(name, text)
    if GGUF_FILE in config:
        return GgufFormat(Path(config[GGUF_FILE]))
    inner = config.get("text_config")
    content = config.get(QUANTISATION) or (inner.get(QUANTISATION) if isinstance(inner, Mapping) else None)
    return config_format(content, text) if content else None


# Formats by name


def format_of(name: str, text: str) -> WeightFormat:
    """Returns the format of `?weights=NAME`. InputError for an unknown name."""
    short = name.lower()
    if short in MIXTURES:
        return MixtureFormat(short)
    if short not in _FORMATS:
        formats = sorted([*_FORMATS, *MIXTURES, NONE])
        raise InputError(f"{text}: weights is {name!r}; {suggest(name, formats)}; known: {', '.join(formats)}")
    return _FORMATS[short]


_FORMATS: dict[str, GroupFormat] = {
    # Lin et al. 2024, arXiv 2306.00978; AutoAWQ and GPTQModel: a scale of 16 bits and a zero point for 128 weights
    "int4": GroupFormat("int4, groups of 128", 4, 16 + 4, 128),
    "int8": GroupFormat("int8, a scale for each output channel", 8, 16, 0),
    # Dettmers et al. 2023, arXiv 2305.14314, section 3: a float32 constant for 64 weights
    "nf4": GroupFormat("NF4, blocks of 64", 4, 32, 64),
    # DeepSeek-V3, arXiv 2412.19437, section 3.3: a float32 scale for 128 x 128 weights
    "fp8": GroupFormat("FP8, blocks of 128 x 128", 8, 32, 128 * 128, FLOAT8),
    # Open Compute Project, Microscaling Formats 1.0, section 5: a scale of 8 bits for 32 weights
    "mxfp4": GroupFormat("MXFP4, blocks of 32", 4, 8, 32),
}


# The quantization_config of a config


def config_format(content: Any, where: str) -> WeightFormat:
    """Returns the format that a `quantization_config` describes. InputError for one that is not modelled."""
    if not isinstance(content, Mapping):
        raise InputError(f"{where}: quantization_config is a {type(content).__name__}; a JSON object is expected")
    is_of_bits = content.get("load_in_4bit") or content.get("load_in_8bit")
    method = str(content.get("quant_method") or ("bitsandbytes" if is_of_bits else ""))
    reader = _METHODS.get(method)
    if reader is None:
        raise InputError(
            f"{where}: quantization_config has quant_method {method!r}, which is not modelled ({', '.join(_METHODS)} "
            f"are); choose a format with ?weights=, such as ?weights=int4, or ?weights={NONE} for the config's dtype"
        )
    try:
        return reader(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"{where}: quantization_config of {method} cannot be read ({type(error).__name__}: {error}); correct it, "
            "or choose a format with ?weights="
        ) from None


def _skipped(content: Mapping[str, Any], key: str = "modules_to_not_convert") -> tuple[str, ...]:
    return tuple(map(str, content.get(key) or ()))


def _integer(content: Mapping[str, Any], key: str, default: int) -> int:
    value = content.get(key)
    value = default if value is None else int(value)
    if not (value == -1 or 0 < value < 2**31):
        raise ValueError(f"{key} is {value}")
    return value


def _group_label(method: str, bits: int, group: int) -> str:
    return f"{method} of {bits} bits, " + (f"groups of {group}" if group > 0 else "a scale for each output channel")


def _awq(content: Mapping[str, Any]) -> GroupFormat:
    """AutoAWQ: scales of 16 bits and, with `zero_point`, zero points."""
    bits, group = _integer(content, "bits", 4), _integer(content, "group_size", content.get("q_group_size") or 128)
    zeros = bits if content.get("zero_point", True) else 0
    label = _group_label("AWQ", bits, group)
    return GroupFormat(label, bits, 16 + zeros, max(0, group), skipped=_skipped(content))


def _gptq(content: Mapping[str, Any]) -> GroupFormat:
    """GPTQ (arXiv 2210.17323) and AutoRound: zero points are stored for symmetric formats too."""
    bits, group = _integer(content, "bits", 4), _integer(content, "group_size", 128)
    method = "GPTQ" if content.get("quant_method") == "gptq" else "AutoRound"
    label, has_output = _group_label(method, bits, group), bool(content.get("lm_head"))
    return GroupFormat(label, bits, 16 + bits, max(0, group), skipped=_skipped(content), has_output=has_output)


def _bitsandbytes(content: Mapping[str, Any]) -> GroupFormat:
    """4 bits (arXiv 2305.14314), whose constants can be of 8 bits themselves, or LLM.int8 (arXiv 2208.07339)."""
    skipped = _skipped(content, "llm_int8_skip_modules")
    if not (content.get("load_in_4bit") or content.get("_load_in_4bit")):
        return GroupFormat("LLM.int8", 8, 32, 0, _INT8, skipped)
    kind = str(content.get("bnb_4bit_quant_type") or "fp4").upper()
    if content.get("bnb_4bit_use_double_quant"):  # 256 constants of 8 bits and one of 32
        return GroupFormat(f"{kind}, double quantisation", 4, 256 * 8 + 32, 64 * 256, "", skipped)
    return GroupFormat(f"{kind}, blocks of 64", 4, 32, 64, "", skipped)


def _fp8(content: Mapping[str, Any]) -> GroupFormat:
    """DeepSeek's blocks, or a scale for each tensor; activations are quantised on the way."""
    block, skipped = content.get("weight_block_size"), _skipped(content)
    if block is None:
        return GroupFormat("FP8, a scale for each tensor", 8, 32, -1, FLOAT8, skipped)
    rows, columns = (int(side) for side in block)
    return replace(_FORMATS["fp8"], label=f"FP8, blocks of {rows} x {columns}", group=rows * columns, skipped=skipped)


def _compressed_tensors(content: Mapping[str, Any]) -> GroupFormat:
    """compressed-tensors (vLLM's llm-compressor): one group of modules; `ignore` names those that are left out."""
    groups = list(content["config_groups"].values())
    schemes = {str(sorted(group["weights"].items())) for group in groups}
    if len(schemes) != 1:
        raise ValueError(f"{len(schemes)} different formats of weights")
    weights, inputs = groups[0]["weights"], groups[0].get("input_activations")
    bits, strategy = int(weights["num_bits"]), weights.get("strategy") or "tensor"
    is_float = weights.get("type") == "float"
    group = {"tensor": -1, "channel": 0}.get(strategy, 0)
    if strategy in ("group", "tensor_group"):
        group = int(weights["group_size"])
    elif strategy == "block":
        group = math.prod(int(side) for side in weights["block_structure"])
    scale_bits = 8 if strategy == "tensor_group" else 16  # NVFP4 has scales of FP8
    zeros = 0 if weights.get("symmetric", True) else bits
    arithmetic = ""
    if inputs and int(inputs["num_bits"]) == bits:
        arithmetic = {(8, True): FLOAT8, (8, False): _INT8, (4, True): "float4_e2m1fn"}.get((bits, is_float), "")
    kind = f"{'float' if is_float else 'int'}{bits}"
    shape = {-1: "a scale for each tensor", 0: "a scale for each output channel"}.get(group, f"groups of {group}")
    text, left_out = f"compressed-tensors {kind}, {shape}", _skipped(content, "ignore")
    return GroupFormat(text, bits, scale_bits + zeros, group, arithmetic, left_out, has_output=True)


_METHODS: Mapping[str, Callable[[Any], WeightFormat]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _gptq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "fbgemm_fp8": lambda of: GroupFormat("FP8, a scale for each output channel", 8, 32, 0, FLOAT8, _skipped(of)),
    # gpt-oss: the experts alone; products are computed in the model's dtype
    "mxfp4": lambda of: replace(_FORMATS["mxfp4"], skipped=_skipped(of), experts_only=True),
    "compressed-tensors": _compressed_tensors,
}
