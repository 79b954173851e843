"""`.gguf` files as configs: hyperparameters and tensors' types from the metadata; the weights are not read. The `gguf`
package parses a file, Transformers maps llama.cpp's names of hyperparameters to those of its configs."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdp.errors import InputError

GGUF_FILE = "gguf_file"  # the key of a config that names the file it is from


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file: `shape` as PyTorch has it, the name of its type, and its bytes there."""

    shape: tuple[int, ...]
    kind: str
    num_bytes: int


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Returns the config of Transformers that describes the model in `path`, as `config.json` would. InputError, with
    the remedy, for a file that is missing, damaged or of an architecture that Transformers does not map."""
    reader = _reader(path)
    try:
        import transformers
        from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES, load_gguf_checkpoint
    except ImportError:
        raise InputError(f"{path}: needs Transformers; pip install 'gdp-placement[hf,gguf]'") from None
    architecture = _content(reader, "general.architecture")
    if not architecture:
        raise InputError(f"{path}: has no general.architecture; name the first file of a split model")
    try:
        config: dict[str, Any] = dict(load_gguf_checkpoint(str(path))["config"])  # type: ignore[no-untyped-call]
    except Exception as error:
        supported = ", ".join(GGUF_SUPPORTED_ARCHITECTURES)
        raise InputError(
            f"{path}: its architecture {architecture!r} is not one that Transformers {transformers.__version__} maps "
            f"({type(error).__name__}: {' '.join(str(error).split())[:100]}; known: {supported}); "
            "give its config.json as hf:DIR?weights=FORMAT"
        ) from None
    config.pop("_model_name_or_path", None)
    num_experts = int(_content(reader, f"{architecture}.expert_count") or 0)
    if architecture == "llama" and num_experts:
        used = int(_content(reader, "llama.expert_used_count") or 0)
        config |= {"model_type": "mixtral", "num_local_experts": num_experts, "num_experts_per_tok": used}
    embedding = gguf_tensors(path).get("token_embd.weight")
    if embedding is not None:
        config["vocab_size"] = embedding.shape[0]
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.get("model_type") in names:
        config["architectures"] = [names[config["model_type"]]]
    return {**config, GGUF_FILE: str(path)}


def gguf_tensors(path: Path) -> dict[str, GgufTensor]:
    """Returns the tensors of a file, or of all files of a split model, by name."""
    tensors: dict[str, GgufTensor] = {}
    for part in _parts(path):
        for tensor in _reader(part).tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
            tensors[str(tensor.name)] = GgufTensor(shape, tensor.tensor_type.name, int(tensor.n_bytes))
    return tensors


def _parts(path: Path) -> list[Path]:
    """Returns the files of a split model, `NAME-00001-of-00003.gguf`; of another the file alone."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    parts = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]
    for part in parts:
        if not part.is_file():
            raise InputError(f"{part}: no such file; all files of a split model are needed")
    return parts


def _reader(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError(f"{path}: reading .gguf files needs gguf; pip install 'gdp-placement[hf,gguf]'") from None
    if not path.is_file():
        raise InputError(f"{path}: {'is no file' if path.exists() else 'no such file'}; check the path")
    try:
        return GGUFReader(path)
    except Exception as error:  # of NumPy and of struct, by the place of the damage
        raise InputError(
            f"{path}: is no GGUF file, or an incomplete one ({type(error).__name__}); download it again"
        ) from None


def _content(reader: Any, key: str) -> Any:
    """Returns the value of a key; None if the file does not have it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()
