"""Memory of llama.cpp's cache of keys and values, read from a graph. llama.cpp allocates the cache at its start, for a
fixed number of tokens, beside the layers that use it. For each token a layer keeps a key and a value of all its
key-value heads, in float16 by default; DeepSeek's latent attention keeps the compressed latent alone
(llama-kv-cache.cpp). Layers with a sliding window are counted in full, so the figure is the most that they need; states
of state-space layers, whose size does not depend on the context, are not counted. N ops."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.export.modules import is_source
from gdp.graph import Graph
from gdp.graph.held_memory import is_cache
from gdp.simulator.problem import Problem

DEFAULT_TOKENS = 4096  # n_ctx of llama.cpp's common/common.h until 2025; since then it is the model's maximum
_BYTES = 2  # an element in float16, the default of --cache-type-k and --cache-type-v
_ITEM_BYTES = {"float64": 8, "float32": 4}  # of activations; other products have those of 16 bits


@dataclass(frozen=True, eq=False)
class Cache:
    """The cache of a graph's attention layers."""

    tokens: int  # of all sequences together, as llama.cpp's -c
    op_bytes: I64  # [N] held beside each op: at the parameter with a layer's keys, 0 elsewhere
    is_in_graph: bool = False  # the graph was captured with a cache, so nothing is added
    is_known: bool = True

    @property
    def num_bytes(self) -> int:
        return int(self.op_bytes.sum())

    def beside(self, problem: Problem) -> Problem:
        """Returns `problem` with the cache resident beside its layers; times are the same."""
        if not self.num_bytes:
            return problem
        resident_bytes = problem.graph.resident_bytes + self.op_bytes
        return replace(problem, graph=replace(problem.graph, resident_bytes=resident_bytes))


def find_cache(graph: Graph, tensors: Mapping[str, str], tokens: int | None) -> Cache:
    """Reads the cache for `tokens` (default: DEFAULT_TOKENS) from the ops of `graph`. `tensors` are the GGUF tensors by
    parameter. InputError if `tokens` are asked for and the graph has a cache, or one of unknown size."""
    op_bytes = np.zeros(graph.num_ops, np.int64)
    if is_cache(graph).any():
        if tokens is not None:
            raise InputError(
                f"--ctx {tokens}: graph {graph.name!r} has its cache already, of the context that MODEL says; leave "
                "out --ctx"
            )
        return Cache(0, op_bytes, is_in_graph=True)
    if tokens == 0:
        return Cache(0, op_bytes)
    count = DEFAULT_TOKENS if tokens is None else tokens
    by_layer: dict[str, dict[str, int]] = {}  # parameter op of each GGUF tensor, by layer
    for op in np.flatnonzero(np.asarray(graph.kinds) == "parameter").tolist():
        tensor = tensors.get(graph.op_names[op], "")
        if tensor.startswith("blk.") and not graph.op_names[op].endswith("bias"):
            _, layer, name = tensor.split(".", 2)
            by_layer.setdefault(layer, {})[name] = op
    products = _products(graph)
    is_known = True
    for ops in by_layer.values():
        elements, holder = _elements_per_token(ops, products, graph)
        if holder is not None:
            op_bytes[holder] = count * _BYTES * elements
        is_known &= elements > 0 or holder is None
    if not is_known:
        if tokens is not None:
            raise InputError(
                f"--ctx {tokens}: the size of the cache cannot be read from graph {graph.name!r}; give --ctx 0, and "
                "leave room with --reserve or --max-memory"
            )
        op_bytes[:] = 0
    return Cache(count if is_known else 0, op_bytes, is_known=is_known)


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of activations with weights: rows are tokens."""

    flops: int
    input_bytes: int
    output_bytes: int
    item_bytes: int

    @property
    def num_inputs(self) -> int:
        """Returns the columns of the activations: flops = (2 * inputs + 1 with a bias) * rows * outputs."""
        return self.flops * self.item_bytes // max(2 * self.output_bytes, 1)

    @property
    def num_outputs(self) -> int:
        """Returns the columns of the result."""
        return self.num_inputs * self.output_bytes // max(self.input_bytes, 1)


def _products(graph: Graph) -> dict[str, _Product]:
    """Returns the largest product of each module."""
    is_weight = is_source(graph)  # also weights in another precision
    input_bytes = np.zeros(graph.num_ops, np.int64)  # of the largest activation that each op reads
    edges = zip(graph.consumers.tolist(), graph.edge_tensors.tolist(), strict=True)
    by_consumer = {op: [tensor for _, tensor in pairs] for op, pairs in groupby(sorted(edges), key=itemgetter(0))}
    for op, tensors in by_consumer.items():  # in topological order
        activations = [tensor for tensor in tensors if not is_weight[graph.producers[tensor]]]
        is_weight[op] = not activations
        input_bytes[op] = max((int(graph.tensor_bytes[tensor]) for tensor in activations), default=0)
    output_bytes = np.zeros(graph.num_ops, np.int64)
    np.maximum.at(output_bytes, graph.producers, np.where(graph.view_of < 0, graph.tensor_bytes, 0))
    largest: dict[str, int] = {}
    for op in np.flatnonzero((input_bytes > 0) & (output_bytes > 0) & (graph.flops > 0)).tolist():
        module = graph.modules[op]
        if module not in largest or graph.flops[op] > graph.flops[largest[module]]:
            largest[module] = op
    return {
        module: _Product(
            int(graph.flops[op]), int(input_bytes[op]), int(output_bytes[op]), _ITEM_BYTES.get(graph.dtypes[op], 2)
        )
        for module, op in largest.items()
    }


def _elements_per_token(
    ops: Mapping[str, int], products: Mapping[str, _Product], graph: Graph
) -> tuple[int, int | None]:
    """Returns (elements that a layer keeps of a token, the parameter that they are beside); (0, None) without any."""
    by_tensor = {name: products[graph.modules[op]] for name, op in ops.items() if graph.modules[op] in products}
    if "attn_kv_a_mqa" in ops:
        latent = by_tensor.get("attn_kv_a_mqa")
        return (latent.num_outputs if latent else 0), ops["attn_kv_a_mqa"]
    if "attn_k" in ops:
        keys, values = by_tensor.get("attn_k"), by_tensor.get("attn_v", by_tensor.get("attn_k"))
        return (keys.num_outputs + values.num_outputs if keys and values else 0), ops["attn_k"]
    if "attn_qkv" in ops and "attn_output" in ops:
        fused, output = by_tensor.get("attn_qkv"), by_tensor.get("attn_output")
        return (max(fused.num_outputs - output.num_inputs, 0) if fused and output else 0), ops["attn_qkv"]
    return 0, None
