"""Graphs that a target's tool cannot run, refused in one line: of another front end, training steps, micro-batches."""

from gdp.errors import InputError
from gdp.graph import Graph
from gdp.simulator.problem import Problem

# Kinds of ops that any model has, as the front ends call them and as nobody else does.
_ONNX_KINDS = "Add Cast Concat Conv Gather Gemm LayerNormalization MatMul Mul Relu Reshape Sigmoid Softmax Transpose"
_JAX_KINDS = (
    "broadcast_in_dim conv_general_dilated convert_element_type dot_general integer_pow reduce_max reduce_sum select_n"
)


def origin(graph: Graph) -> str:
    """Returns "PyTorch", "ONNX" or "JAX" by the kinds of the graph's ops; "" for a graph of the user's own."""
    kinds = set(graph.kinds)
    if any(kind.startswith("aten.") for kind in kinds):
        return "PyTorch"
    if kinds.intersection(_ONNX_KINDS.split()) or any("::" in kind for kind in kinds):
        return "ONNX"
    return "JAX" if kinds.intersection(_JAX_KINDS.split()) else ""


def check_modules(graph: Graph, what: str) -> None:
    """Raises InputError for a graph without module paths of PyTorch.

    The paths in an ONNX file, or of JAX scopes, name no module that a tool would find.
    """
    front_end = origin(graph)
    if front_end in ("ONNX", "JAX"):
        source = "an ONNX file" if front_end == "ONNX" else "a JAX function"
        nodes = ", or export it to onnxruntime or openvino" if front_end == "ONNX" else ""
        raise InputError(
            f"graph {graph.name!r}: its ops are those of {source} and have no {what} of PyTorch; "
            f"capture the PyTorch model itself{nodes}"
        )
    if not any(graph.modules):
        raise InputError(
            f"graph {graph.name!r}: its ops have no module paths, so it has no {what}; capture the PyTorch model itself"
        )


def check_nodes(graph: Graph, target: str) -> None:
    """Raises InputError for a graph of ops that are no nodes of an ONNX file."""
    front_end = origin(graph)
    if front_end in ("PyTorch", "JAX"):
        what = "a PyTorch model" if front_end == "PyTorch" else "a JAX function"
        raise InputError(
            f"{target}: graph {graph.name!r} is that of {what}; {target} places the nodes of an ONNX file, "
            "so place the file itself"
        )


def check_inference(problem: Problem, target: str) -> None:
    """Raises InputError for a training step, which the target's tool does not run."""
    if _is_training(problem):
        raise InputError(
            f"{target}: graph {problem.graph.name!r} is a training step, and {target} runs inference only; "
            "place the model with --inference"
        )


def check_training(problem: Problem, target: str) -> None:
    """Raises InputError for inference, which a tool that trains in layouts does not run."""
    if not _is_training(problem):
        raise InputError(
            f"{target}: graph {problem.graph.name!r} is inference, and {target} trains in layouts; export to vllm, "
            "sglang or tensorrt-llm"
        )


def check_one_batch(problem: Problem, target: str, *, pipelines: bool = True) -> None:
    """Raises InputError for micro-batches, where the target's tool runs one after the other.

    `pipelines`: whether other targets would take the model's modules as stages.
    """
    count = int(problem.microbatch.max()) + 1
    if count > 1:
        others = f", or take torch-pipelining or {'megatron' if _is_training(problem) else 'vllm'}" if pipelines else ""
        raise InputError(
            f"{target}: graph {problem.graph.name!r} has {count} micro-batches, and {target} runs one after the other, "
            f"not as a pipeline; leave out --microbatches{others}"
        )


def _is_training(problem: Problem) -> bool:
    return not {"backward", "update"}.isdisjoint(problem.graph.phases)
