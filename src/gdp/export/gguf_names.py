"""Names of the GGUF tensors that the parameters of Transformers models become, asked of llama.cpp's package `gguf`. The
package has a table of names for each tensor, and the tensors of each architecture. A graph has the names of its
parameters, not its architecture, so the architecture is the smallest one that has a tensor for each parameter."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from gdp.errors import InputError

# Parameters as Transformers 5 holds them, which convert_hf_to_gguf.py splits or renames in code, not by the table.
_FUSED = r"\.experts\.gate_up_proj$", ("ffn_gate_exps", "ffn_gate_up_exps")  # split in most architectures
_CONVERTED = (
    (r"\.experts\.down_proj$", ("ffn_down_exps",)),
    (r"\.experts\.up_proj$", ("ffn_up_exps",)),
    (r"\.(router|gate)(\.layer)?$", ("ffn_gate_inp",)),
    (r"\.shared_mlp\.input_linear$", ("ffn_gate_shexp",)),
    (r"e_score_correction_bias$", ("exp_probs_b",)),
    (r"\.attn_sub_norm$", ("attn_sub_norm",)),
    (r"\.ffn_sub_norm$", ("ffn_sub_norm",)),
    (r"\.dt_bias$", ("ssm_dt",)),
)
_METADATA = re.compile(r"\.act_fn\.")  # of Apertus: numbers in the file's header, no tensor
_NOT_TEXT = re.compile(r"vision|visual|image|audio|speech|multi_?modal|mm_|projector")
# Differences between the module paths of Transformers 5 and the names in checkpoints, which the table has.
_PATHS = (("", ""), (r"\blanguage_model\.", ""), (r"^(model|transformer)\.", ""), (r"^model\.", "backbone."))
FEED_FORWARD = "(ffn_|post_ffw_|exp_probs_b|channel_mix_)"  # tensors of a layer that follow the attention


def gguf_tensors(parameters: Sequence[str]) -> dict[str, str]:
    """Returns the GGUF tensor of each parameter, without `.weight`: `blk.3.attn_q`, `output_norm`. Other parameters are
    left out. InputError for parameters that no architecture of llama.cpp has, and if `gguf` is not installed."""
    table = _NameTable()
    patterns = {path: _pattern(path) for path in parameters if not _METADATA.search(path)}
    options = {pattern: table.find(pattern) for pattern in patterns.values()}
    for path, pattern in patterns.items():
        if not options[pattern]:
            raise InputError(
                f"llama-cpp knows no GGUF tensor for the parameters of {path.rpartition('.')[0]!r}; {_remedy(path)}"
            )
    tensor_of = table.of_architecture(options)
    return {path: tensor_of[pattern].format(bid=_number(path)) for path, pattern in patterns.items()}


def is_feed_forward(tensor: str) -> bool:
    """Returns whether a GGUF tensor of a layer belongs to the feed-forward part: `blk.3.ffn_up`."""
    return re.match(FEED_FORWARD, tensor.split(".", 2)[2]) is not None


def _remedy(path: str) -> str:
    if _NOT_TEXT.search(path):
        return (
            "it takes decoders of text alone (llama.cpp keeps vision and audio parts in a file of their own, which -ot "
            "does not place), so place the part that text_config of config.json describes"
        )
    return (
        "it takes the decoders of llama.cpp with the names of Transformers (model.layers.0.self_attn.q_proj, ...); "
        "--for hf-device-map takes others"
    )


class _NameTable:
    """The tensors that each name can be, by the package's tables."""

    def __init__(self) -> None:
        try:
            from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
            from gguf.tensor_mapping import TensorNameMap
        except ImportError:
            raise InputError(
                "llama-cpp: the names of GGUF tensors come from the package gguf, which is not installed; "
                "pip install 'gdp-placement[gguf]'"
            ) from None
        self._architectures: dict[str, set[Any]] = {
            MODEL_ARCH_NAMES[key]: set(tensors) for key, tensors in MODEL_TENSORS.items()
        }
        self._names: dict[Any, str] = TENSOR_NAMES
        self._by_name: dict[str, list[Any]] = defaultdict(list)  # a later entry wins, as in TensorNameMap
        for mapping in (TensorNameMap.mappings_cfg, TensorNameMap.block_mappings_cfg):
            for tensor, keys in mapping.items():
                for key in keys:
                    self._by_name[key].append(tensor)
        self._by_gguf_name = {name.removeprefix("blk.{bid}."): tensor for tensor, name in TENSOR_NAMES.items()}

    def find(self, pattern: str) -> list[Any]:
        """Returns the tensors that the parameter `pattern` can be, the likeliest last."""
        if not re.search(_FUSED[0], pattern):
            for name in _spellings(pattern):
                if tensors := self._by_name.get(name):
                    return tensors
        for ending, names in (_FUSED, *_CONVERTED):
            if re.search(ending, pattern):
                return [self._by_gguf_name[name] for name in names if name in self._by_gguf_name]
        return []

    def of_architecture(self, options: dict[str, list[Any]]) -> dict[str, str]:
        """Chooses one of `options` for each name, by the architecture with the fewest tensors left over. InputError,
        with what the nearest architecture lacks, if none has a tensor for each name."""
        best: tuple[tuple[bool, int], dict[str, str]] | None = None
        nearest, lacking = "", list(options)
        for architecture, tensors in self._architectures.items():
            chosen = {
                name: [tensor for tensor in tensors_of_name if tensor in tensors]
                for name, tensors_of_name in options.items()
            }
            names = {
                name: self._names[tensors_of_name[-1]] for name, tensors_of_name in chosen.items() if tensors_of_name
            }
            owners: dict[str, str] = {}
            missing = [
                name
                for name in options
                if name not in names or owners.setdefault(names[name], _stacked(name)) != _stacked(name)
            ]
            if missing:
                nearest, lacking = min((nearest, lacking), (architecture, missing), key=lambda each: len(each[1]))
                continue
            parts = {name.rpartition(".")[2] for name in names.values()}
            # few architectures, such as gpt-oss with its sinks, have a norm behind the attention and none before or
            # behind the feed-forward part
            usual = ("ffn_norm", "post_ffw_norm", "attn_sinks")
            is_odd = "post_attention_norm" in parts and parts.isdisjoint(usual)
            key = is_odd, len(tensors) - len(names)
            if best is None or key < best[0]:
                best = key, names
        if best is None:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise InputError(
                "llama-cpp: no architecture of llama.cpp has a GGUF tensor for each parameter of this model; the "
                f"nearest, {nearest}, lacks one for {lacking[0].format(bid=0)!r}{more}; {_remedy(' '.join(lacking))}"
            )
        return best[1]


def _pattern(path: str) -> str:
    """Returns `model.layers.{bid}.mlp.experts.w1` of `model.layers.3.mlp.experts.7.w1.weight`: GGUF stacks experts."""
    path = re.sub(r"\.(weight|bias)$|(?<=_proj)_bias$", "", path)
    path = re.sub(r"\bexperts\.\d+\.", "experts.", path)
    return re.sub(r"\.\d+(?=\.)", ".{bid}", path, count=1)


def _stacked(name: str) -> str:
    """Returns `model.altup_projections` of `model.altup_projections.1`: GGUF stacks lists outside of layers."""
    return re.sub(r"\.\d+$", "", name)


def _number(path: str) -> str:
    match = re.search(r"\.(\d+)\.", path)
    return match[1] if match else ""


def _spellings(pattern: str) -> Iterator[str]:
    for path, replacement in _PATHS:
        name = re.sub(path, replacement, pattern) if path else pattern
        yield name
        yield re.sub(r"\.dt_bias$", ".dt_proj", name)
        yield _stacked(name)
