"""`.gguf` files: the metadata becomes a config, the types of the tensors the bytes of the weights."""

from pathlib import Path

import numpy as np
import pytest

from gdp.errors import InputError
from gdp.models.gguf.tensors import BITS
from gdp.models.model import Reading
from gdp.models.source import ModelSource, load

gguf = pytest.importorskip("gguf")

HIDDEN, INNER, WORDS, LAYERS = 256, 512, 320, 2
F32, F16, Q4_K, Q6_K = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q4_K", "Q6_K"))


def matrix(rows: int, columns: int, kind: "gguf.GGMLQuantizationType") -> np.ndarray:
    """Returns zeros in the blocks of a type."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    return np.zeros((rows, columns // size * num_bytes), np.uint8)


def write(path: Path, num_experts: int = 0, skipped: str = "", split: bool = False) -> int:
    """Writes a small Llama, or Mixtral, in two types; returns the bytes of its tensors."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=8 if split else 0)
    writer.add_context_length(64)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // 4)
    writer.add_vocab_size(WORDS)
    writer.add_name("small")
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(2)
    total = 0

    def add(name: str, shape: tuple[int, ...], kind: "gguf.GGMLQuantizationType" = F32) -> None:
        nonlocal total
        if name == skipped:
            return
        if kind == F32:
            data = np.zeros(shape, np.float32)
            writer.add_tensor(name, data)
        else:
            data = matrix(int(np.prod(shape[:-1])), shape[-1], kind).reshape(*shape[:-1], -1)
            writer.add_tensor(name, data, raw_dtype=kind)
        total += data.nbytes

    add("token_embd.weight", (WORDS, HIDDEN), Q4_K)
    add("output.weight", (WORDS, HIDDEN), Q6_K)
    add("output_norm.weight", (HIDDEN,))
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            add(f"{block}.{norm}.weight", (HIDDEN,))
        for name, rows in (("attn_q", 256), ("attn_k", 128), ("attn_v", 128), ("attn_output", 256)):
            add(f"{block}.{name}.weight", (rows, HIDDEN), Q6_K if name == "attn_v" else Q4_K)
        experts = (num_experts,) if num_experts else ()
        end = "_exps" if num_experts else ""
        if num_experts:
            add(f"{block}.ffn_gate_inp.weight", (num_experts, HIDDEN))
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            add(f"{block}.ffn_{name}{end}.weight", (*experts, *shape), Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


@pytest.mark.parametrize("num_experts", [0, 8])
def test_bytes_of_a_file(num_experts: int, tmp_path: Path) -> None:
    """Exactly: Q4_K has 144 bytes for 256 weights, Q6_K 210, norms and routers are float32."""
    total = write(tmp_path / "small.gguf", num_experts)
    model = ModelSource(f"{tmp_path}/small.gguf?batch=1&sequence=1", Reading(training=False)).whole()
    graph = model.graph
    parameters = np.array([kind == "parameter" for kind in graph.kinds])
    assert graph.resident_bytes[parameters].sum() == total
    assert "products are computed in the model's dtype" in model.notes[0]
    (query,) = (op for op, name in enumerate(graph.op_names) if name == "model.layers.0.self_attn.q_proj.weight")
    assert graph.resident_bytes[query] == 256 * 256 // 256 * 144
    (product,) = (op for op, name in enumerate(graph.op_names) if name == "model.layers.0.self_attn.q_proj.mm_0")
    assert graph.bytes_accessed[product] == 256 * 144 + 2 * (256 + 256)
    if num_experts:
        assert sum("grouped_mm" in kind for kind in graph.kinds) == 2 * LAYERS


def test_a_split_model_is_read_from_all_its_files(tmp_path: Path) -> None:
    """A file that is missing is named."""
    total = write(tmp_path / "small.gguf", split=True)
    first, *others = sorted(tmp_path.glob("small-*.gguf"))
    assert others
    graph = load(f"{first}?batch=1&sequence=1", training=False)
    assert graph.resident_bytes[[kind == "parameter" for kind in graph.kinds]].sum() == total
    others[-1].unlink()
    with pytest.raises(InputError, match=f"{others[-1].name}: no such file; all files of a split model"):
        load(f"{first}?batch=1&sequence=2", training=False)


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    """What is missing, damaged, of an unknown architecture, or without a tensor."""
    with pytest.raises(InputError, match=r"none\.gguf: no such file; check the path"):
        load("none.gguf", training=False)
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(InputError, match=r"bad\.gguf: is no GGUF file, or an incomplete one .*; download it again"):
        load(str(path), training=False)
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("other")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"architecture 'bert' is not one that Transformers .* maps .*hf:DIR"):
        load(str(path), training=False)
    write(path, skipped="blk.1.ffn_up.weight")
    with pytest.raises(InputError, match=r"has no tensor for model\.layers\.1\.mlp\.up_proj\.weight \[512, 256\]"):
        load(str(path), training=False)


def test_bits_of_types() -> None:
    """Our table beside llama.cpp's own."""
    for name, bits in BITS.items():
        size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert bits == 8 * num_bytes / size, name
