"""A Transformers config and an ONNX file with a symbolic batch."""

import json
from pathlib import Path

import onnx
from onnx import TensorProto, helper

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 32000, "dtype": "bfloat16",
}  # fmt: skip
Path("llama").mkdir()
Path("llama/config.json").write_text(json.dumps(CONFIG))

nodes = [
    helper.make_node("MatMul", ["x", "w"], ["h"], name="left"),
    helper.make_node("Relu", ["h"], ["y"], name="activation"),
]
graph = helper.make_graph(
    nodes, "model", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 64])],
    [helper.make_tensor("w", TensorProto.FLOAT, [64, 64], bytes(4 * 64 * 64), raw=True)],
)  # fmt: skip
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), "model.onnx")
