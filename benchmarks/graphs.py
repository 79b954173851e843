"""The graphs of benchmarks: built-in workloads, and synthetic training graphs of any size to measure cost against size.

The synthetic ones are shaped as captures of unrolled LSTMs are: layers of cells unrolled over time, a projection and a
loss at each step, the backward pass by reverse-mode differentiation with one op for each gradient (and one for each sum
of two), one update for each parameter. An op has one output.
"""

from collections.abc import Callable, Sequence

from benchmarks.workloads import model_of, workloads
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.models.source import load

BATCH, HIDDEN, VOCABULARY = 64, 1024, 10_000  # those of rnnlm-2, but for its wider layers
FLOAT_BYTES = 4

Inputs = Callable[[str], tuple[Graph, Cluster]]
"""From a workload's name to its graph and cluster."""


def workload_inputs(name: str) -> tuple[Graph, Cluster]:
    """Returns the training graph of a workload, and the cluster that it is usually placed on."""
    return load(model_of(name)), Cluster.parse(workloads.get(name).cluster)


def lstm_training_graph(num_steps: int, num_layers: int = 4) -> Graph:
    """Returns one training step of `num_layers` LSTM layers unrolled over `num_steps`, with module paths and phases."""
    builder = _Builder()
    weights = [
        [builder.parameter(f"layers.{layer}.{name}", HIDDEN, 4 * HIDDEN) for name in ("input_gates", "state_gates")]
        for layer in range(num_layers)
    ]
    projection = builder.parameter("softmax", HIDDEN, VOCABULARY)
    zeros = [builder.source("zeros", f"layers.{layer}", BATCH * HIDDEN) for layer in range(num_layers)]
    outputs, cells, losses = zeros.copy(), zeros.copy(), []
    for _ in range(num_steps):
        x = builder.source("tokens", "embedding", BATCH * HIDDEN)
        for layer in range(num_layers):
            x, cells[layer] = _cell(builder, f"layers.{layer}", weights[layer], x, outputs[layer], cells[layer])
            outputs[layer] = x
        scores = builder.matmul("softmax", x, projection, HIDDEN, VOCABULARY)
        losses.append(builder.elementwise("log_softmax", "softmax", [scores], BATCH * VOCABULARY))
    builder.differentiate(builder.elementwise("mean", "softmax", losses, 1))
    return builder.build(f"lstm-{num_layers}x{num_steps}")


def lstm_training_graph_of(num_ops: int, num_layers: int = 4) -> Graph:
    """Returns the unrolled LSTM with the number of steps that comes nearest to `num_ops` ops, at least one."""
    one, two = (lstm_training_graph(num_steps, num_layers).num_ops for num_steps in (1, 2))
    return lstm_training_graph(max(1, 1 + round((num_ops - one) / (two - one))), num_layers)


def _cell(builder: "_Builder", module: str, weights: Sequence[int], x: int, output: int, cell: int) -> tuple[int, int]:
    """Returns (output, cell) of one step of an LSTM layer with dropout on its input."""
    gates_of, state_of = weights

    def op(kind: str, *inputs: int) -> int:
        return builder.elementwise(kind, module, inputs, BATCH * HIDDEN)

    inputs = builder.matmul(module, op("dropout", x), gates_of, HIDDEN, 4 * HIDDEN)
    states = builder.matmul(module, output, state_of, HIDDEN, 4 * HIDDEN)
    gates = builder.elementwise("add", module, [inputs, states], 4 * BATCH * HIDDEN)
    kept = op("mul", op("sigmoid", gates), cell)
    written = op("mul", op("sigmoid", gates), op("tanh", gates))
    cell = op("add", kept, written)
    return op("mul", op("sigmoid", gates), op("tanh", cell)), cell


class _Builder:
    """Ops with one output each, numbered as they are added; `differentiate` adds their gradients."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.inputs: list[tuple[int, ...]] = []  # of each op
        self.elements: list[int] = []  # of each op's output
        self.parameters: list[int] = []
        self.phase = "forward"

    def parameter(self, module: str, rows: int, columns: int) -> int:
        self.parameters.append(self._add("parameter", module, (), rows * columns, flops=0))
        return self.parameters[-1]

    def source(self, kind: str, module: str, elements: int) -> int:
        return self._add(kind, module, (), elements, flops=0)

    def elementwise(self, kind: str, module: str, inputs: Sequence[int], elements: int) -> int:
        return self._add(kind, module, tuple(inputs), elements, flops=elements)

    def matmul(self, module: str, left: int, right: int, inner: int, columns: int) -> int:
        return self._add("matmul", module, (left, right), BATCH * columns, flops=2 * BATCH * inner * columns)

    def differentiate(self, loss: int) -> None:
        """Appends the gradients of everything that `loss` depends on but sources, and the updates of the parameters."""
        self.phase = "backward"
        gradients = {loss: self.source("ones", self.ops[loss].module, 1)}

        def accumulate(op: int, gradient: int) -> None:
            if op in gradients:
                pair = gradients[op], gradient
                gradient = self.elementwise("add", self.ops[op].module, pair, self.elements[op])
            gradients[op] = gradient

        for op in range(loss, -1, -1):
            kind, inputs, module = self.ops[op].kind, self.inputs[op], self.ops[op].module
            if not inputs:
                continue
            gradient = gradients[op]
            if kind in ("mul", "matmul"):
                for position, target in enumerate(inputs):
                    if self._needs_gradient(target):
                        pair = gradient, inputs[1 - position]
                        flops = self.ops[op].flops
                        accumulate(target, self._add(kind, module, pair, self.elements[target], flops=flops))
                continue
            if kind != "add":
                operands = (gradient,) if kind == "mean" else (gradient, op)
                gradient = self.elementwise(f"{kind}_backward", module, operands, self.elements[inputs[0]])
            for target in inputs:
                if self._needs_gradient(target):
                    accumulate(target, gradient)
        self.phase = "update"
        for parameter in self.parameters:
            module, elements = self.ops[parameter].module, self.elements[parameter]
            self.elementwise("update", module, [parameter, gradients[parameter]], elements)

    def build(self, name: str) -> Graph:
        consumers: list[list[int]] = [[] for _ in self.ops]
        for op, inputs in enumerate(self.inputs):
            for producer in inputs:
                consumers[producer].append(op)
        parameters = set(self.parameters)
        tensors = [
            Tensor(op, tuple(readers), FLOAT_BYTES * self.elements[op], resident=op in parameters)
            for op, readers in enumerate(consumers)
            if readers
        ]
        return Graph.build(name, self.ops, tensors)

    def _needs_gradient(self, op: int) -> bool:
        return bool(self.inputs[op]) or self.ops[op].kind == "parameter"

    def _add(self, kind: str, module: str, inputs: tuple[int, ...], elements: int, *, flops: int) -> int:
        number = len(self.ops)
        moved = FLOAT_BYTES * (elements + sum(self.elements[op] for op in inputs)) if inputs else 0
        resident = 3 * FLOAT_BYTES * elements if kind == "parameter" else 0  # with Adam's two moments
        self.ops.append(
            Op(f"{kind}_{number}", kind, flops, moved, resident_bytes=resident, phase=self.phase, module=module)
        )
        self.inputs.append(inputs)
        self.elements.append(elements)
        return number
