"""Products between DequantizeLinear and QuantizeLinear, as runtimes run them: one kernel that reads the small types.

An exporter of quantised models writes `x_q -> DequantizeLinear -> Conv -> QuantizeLinear -> y_q` ("QDQ"). ONNX Runtime
(onnxruntime/core/optimizer/qdq_transformer), TensorRT (explicit quantisation) and OpenVINO run that as one kernel on
8-bit integers. So

- a product all of whose operands are dequantised 8-bit tensors computes in int8 and reads these tensors; an operator by
  element, a pooling or a movement does too if its result is quantised again;
- the QuantizeLinear that alone reads its result, or reads it through one Relu or Clip, is part of it;
- a product with a weight of at most 4 bits reads that weight, and computes in floats (ONNX Runtime: MatMulNBits);
- a DequantizeLinear that no other op reads is gone, and so is one that a QuantizeLinear undoes.

A weight of 8 bits beside operands in floats stays as the file has it: a float copy is made in each step."""

from collections.abc import Collection
from dataclasses import replace

from gdp.models.names import element_bits, names
from gdp.models.onnx.node_costs import table_name
from gdp.models.onnx.nodes import OnnxOp

_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
_BETWEEN = frozenset({"Relu", "Clip"})  # a range, which quantisation cuts off by itself
# Operators of ONNX Runtime's QDQ node groups beside the products
_OTHERS = names(
    """
    Add Sub Mul Div Sigmoid Tanh LeakyRelu Relu Clip Softmax Gelu AveragePool GlobalAveragePool MaxPool Concat Where
    Resize Transpose Slice Split Gather Pad Expand DepthToSpace SpaceToDepth Max Min ReduceMean
    """
)
_DEQUANTIZE, _QUANTIZE = "DequantizeLinear", "QuantizeLinear"


def fuse_quantised(steps: list[OnnxOp], kept: Collection[str]) -> tuple[list[OnnxOp], int]:
    """Returns the ops as runtimes run them, and the number of products that compute in int8. kept: names of tensors
    that are results of the model, which stay."""
    readers: dict[str, list[int]] = {}
    makers: dict[str, int] = {}
    for number, step in enumerate(steps):
        for name in step.inputs:
            readers.setdefault(name, []).append(number)
        makers.update(dict.fromkeys(step.outputs, number))
    fused: dict[int, OnnxOp] = {}
    gone: set[int] = set()
    num_products = 0
    for number, step in enumerate(steps):
        kind = table_name(step.kind)
        sources = {name: steps[maker] for name in step.inputs if (maker := makers.get(name, -1)) >= 0}
        wide = {name: source for name, source in sources.items() if _dequantised_bits(source)}
        if kind == _QUANTIZE and wide:
            fused[number] = _absorbed(step, wide)  # of a tensor that is moved and not computed with
            continue
        if not wide or number in gone:
            continue
        chain = _chain_to_quantise(steps, number, readers, kept)
        # all operands are dequantised, or parameters: biases, which a kernel adds in 32 bits
        is_whole = wide.keys() == sources.keys()
        eight_bits = is_whole and {_dequantised_bits(source) for source in wide.values()} <= {8, 32}
        is_product = kind in _PRODUCTS and _num_operands(step, wide) >= 2
        if eight_bits and (is_product or (kind in _OTHERS and chain)):
            fused[number] = replace(_joined(_absorbed(step, wide), steps, chain), dtype="int8")
            gone.update(chain)
            num_products += is_product
        elif kind in _PRODUCTS:
            narrow = {name: source for name, source in wide.items() if _dequantised_bits(source) <= 4}
            if narrow:
                fused[number] = _absorbed(step, narrow)
    result = [fused.get(number, step) for number, step in enumerate(steps) if number not in gone]
    read = {name for step in result for name in step.inputs} | set(kept)
    return [step for step in result if table_name(step.kind) != _DEQUANTIZE or read & step.outputs.keys()], num_products


def _dequantised_bits(step: OnnxOp) -> int:
    """Returns the bits of the input of a DequantizeLinear; biases have 32; 0 for any other op."""
    if table_name(step.kind) != _DEQUANTIZE or not step.inputs:
        return 0
    bits = element_bits(step.read_dtype) or 0
    return bits if bits <= 4 or step.read_dtype in ("int8", "uint8", "int32") else 0


def _num_operands(step: OnnxOp, wide: dict[str, OnnxOp]) -> int:
    """Returns the number of 8-bit operands; a product of a tensor with itself has two."""
    return sum(name in wide and _dequantised_bits(wide[name]) == 8 for name in step.operands[:2])


def _chain_to_quantise(
    steps: list[OnnxOp], number: int, readers: dict[str, list[int]], kept: Collection[str]
) -> list[int]:
    """Returns the ops from the one after `number` to the QuantizeLinear that alone reads the result; [] if none."""
    chain: list[int] = []
    while True:
        outputs = list(steps[number].outputs)
        if len(outputs) != 1 or outputs[0] in kept or len(readers.get(outputs[0], ())) != 1:
            return []
        number = readers[outputs[0]][0]
        chain.append(number)
        kind = table_name(steps[number].kind)
        if kind == _QUANTIZE:
            return chain
        if kind not in _BETWEEN or len(chain) > 1:
            return []


def _absorbed(step: OnnxOp, wide: dict[str, OnnxOp]) -> OnnxOp:
    """Returns `step` with the inputs of the ops in `wide` in place of their results."""
    inputs: list[str] = []
    num_bytes = step.bytes_accessed
    for name in step.inputs:
        if name in wide:
            inputs += wide[name].inputs
            num_bytes += wide[name].bytes_accessed - 2 * wide[name].outputs[name].num_bytes
        else:
            inputs.append(name)
    return replace(step, inputs=list(dict.fromkeys(inputs)), bytes_accessed=max(0, num_bytes))


def _joined(step: OnnxOp, steps: list[OnnxOp], chain: list[int]) -> OnnxOp:
    """Returns `step` with the ops after it in the same kernel: what is between them stays in registers."""
    for number in chain:
        other = steps[number]
        (name, value), *_ = step.outputs.items()
        num_bytes = step.bytes_accessed + other.bytes_accessed - 2 * value.num_bytes
        inputs = [*step.inputs, *(one for one in other.inputs if one != name)]
        read, flops = list(dict.fromkeys(inputs)), step.flops + other.flops
        step = replace(step, inputs=read, outputs=other.outputs, flops=flops, bytes_accessed=max(0, num_bytes))
    return step
