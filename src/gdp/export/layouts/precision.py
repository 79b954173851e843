"""Memory of training in the types of tools: a step as it is with what a tool holds in place of what its plan holds.

Bytes of an element, with Adam:

    plan, mixed        bf16 weight 2    gradient 2            copy 4, moments 8     16
    torchtitan, FSDP   float32 weight 4, gathered in bf16     gradient 4, moments 8 16, and 2 while gathered
    Megatron-LM        bf16 weight 2    main gradient 4       copy 4, moments 8     18
    plan, pure-bf16    bf16 weight 2    gradient 2            moments 4              8

torchtitan/config/configs.py: `dtype`, `mixed_precision_param`, `mixed_precision_reduce` (float32 by default);
torch.distributed.fsdp.MixedPrecisionPolicy; megatron/training/arguments.py: `--bf16` accumulates and sums gradients in
float32, in a buffer that stays, unless `--grad-reduce-in-bf16` is given."""

from dataclasses import dataclass, replace

import numpy as np

from gdp.graph import Graph
from gdp.graph.accumulation import ELEMENT_BYTES
from gdp.graph.copies import ACCUMULATE, exchange_of
from gdp.graph.held_memory import HeldMemory
from gdp.graph.layers import LayerPaths
from gdp.graph.parameter_bytes import ParameterBytes, gradients_of_updates
from gdp.models.model import FLOAT32, MIXED, PURE_BF16
from gdp.parallel.layout import Layout

AUTOCAST = "autocast"  # float32 weights, and products in half precision as the model is written
HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of a tool beside that of a plan, for an element of a parameter."""

    sentence: str = ""  # on what it holds
    resident_bytes: float = 0.0  # more than in the plan, for the whole step
    state_scale: float = 1.0  # bytes of the optimizer's state by those of the plan
    gradient_scale: int = 1  # the same of gradients; 0: they are added to memory that is held
    exchange_scale: int = 1  # the same of gradients that are sent
    options: tuple[str, ...] = ()  # of the tool
    keeps_rest: bool = False  # parameters outside of lists of layers, gathered, from the first pass to the last

    def step(self, graph: Graph) -> Graph:
        """Returns the step `graph` of a plan as the tool runs it."""
        graph = _with_rest(graph) if self.keeps_rest else graph
        if (self.resident_bytes, self.state_scale, self.gradient_scale, self.exchange_scale) == (0, 1, 1, 1):
            return graph
        own, state, _ = HeldMemory.by_op(graph)
        is_late = graph.is_in_phase("update") & ~graph.is_collective
        is_trained = np.zeros(graph.num_ops, np.bool_)
        is_trained[graph.producers[graph.edge_tensors[is_late[graph.consumers]]]] = True
        elements = own / np.array([ELEMENT_BYTES.get(dtype, 4) for dtype in graph.dtypes])
        more = np.where(is_trained, elements * self.resident_bytes + state * (self.state_scale - 1), 0)
        sizes, accessed = graph.tensor_bytes.copy(), graph.bytes_accessed.copy()
        is_gather = np.array([kind.startswith("all_gather") for kind in graph.kinds])
        is_sum = graph.is_collective & ~is_gather[exchange_of(graph)]
        is_gradient, is_sent = np.zeros((2, graph.num_tensors), np.bool_)
        is_gradient[graph.base[gradients_of_updates(graph)]] = True
        is_sent[graph.base[graph.edge_tensors[is_sum[graph.consumers]]]] = True
        is_sent[is_sum[graph.producers]] = True
        is_sent &= ~is_gradient
        sizes[is_gradient[graph.base]] *= self.gradient_scale
        sizes[is_sent[graph.base]] *= self.exchange_scale
        accessed[is_sum] *= self.exchange_scale
        accessed[graph.is_in_role(ACCUMULATE)] *= max(self.gradient_scale, 1)
        resident = graph.resident_bytes + more.astype(np.int64)
        return replace(graph, resident_bytes=resident, tensor_bytes=sizes, bytes_accessed=accessed)


def _with_rest(graph: Graph) -> Graph:
    """Returns the step with what is gathered outside of lists of layers there until the backward pass has ended."""
    layers = LayerPaths.of(graph)
    listed = {number for number, name in enumerate(layers.lists) if name}
    is_listed = np.array([layers.of_module.get(module, -1) in listed for module in graph.modules], np.bool_)
    gathers = [kind.startswith("all_gather") for kind in graph.kinds]
    is_rest = (np.array(gathers, np.bool_) & ~graph.is_in_phase("update"))[graph.producers]
    is_rest[graph.edge_tensors[(is_listed & ~graph.is_collective)[graph.consumers]]] = False
    is_backward = graph.is_in_phase("backward")
    sizes = np.where(is_rest & is_backward[graph.producers], 0, graph.tensor_bytes)
    kept = np.flatnonzero(is_rest & ~is_backward[graph.producers] & (graph.view_of < 0) & (sizes > 0))
    copies = graph.microbatches * (int(graph.replicas.max()) + 1) + graph.replicas
    ops = np.flatnonzero(is_backward & ~graph.is_collective)
    last = np.zeros(int(copies.max()) + 1, np.int64)
    np.maximum.at(last, copies[ops], ops)
    readers = last[copies[graph.producers[kept]]]
    is_new = ~np.isin(kept * graph.num_ops + readers, graph.edge_tensors * graph.num_ops + graph.consumers)
    kept, readers = kept[is_new], readers[is_new]
    added = np.bincount(kept + 1, minlength=graph.num_tensors + 1)
    consumers = np.insert(graph.consumers, graph.consumer_offsets[kept + 1], readers)
    offsets = graph.consumer_offsets + np.cumsum(added)
    return replace(graph, tensor_bytes=sizes, consumers=consumers, consumer_offsets=offsets)


def precision_of(graph: Graph) -> str:
    """Returns the precision of a training step: `mixed`, `pure-bf16`, `float32` or `AUTOCAST`; "" for other steps."""
    each = ParameterBytes.of(graph)
    if each is None:
        return ""
    if each.weights < 3:
        return MIXED if each.master_weights else PURE_BF16
    return AUTOCAST if set(HALF) & set(graph.dtypes) else FLOAT32


def as_fsdp(graph: Graph, layout: Layout, tool: str) -> Held:
    """Returns what FSDP2 holds: float32 weights that are gathered in half precision, gradients summed in float32.
    Without ZeRO 3 the gathered weights stay, as the casts of autocast do."""
    if precision_of(graph) != MIXED:
        return Held()
    gathered = 0 if layout.zero == 3 else 2
    sentence = (
        f"{tool} holds float32 weights, and float32 gradients, which are summed so, where the plan has bf16 ones with "
        "float32 copies: figures are those of the tool."
    )
    return Held(sentence, gathered - 2, 1.0, 2, 2)
