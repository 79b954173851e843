"""Bytes that training takes for each parameter, by use and type, as the ops of a step hold and read them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from gdp.arrays import I64, Bool, mask, unique
from gdp.graph.accumulation import ELEMENT_BYTES
from gdp.graph.copies import ACCUMULATE, EXCHANGE_START
from gdp.graph.graph import Graph
from gdp.graph.held_memory import HeldMemory

# by a part of the kind of updates: the name of the state, and its least bytes an element beside master weights
_STATES = {"8bit": ("8-bit moments", 2), "adam": ("moments", 8), "sgd": ("momentum", 0), "adafactor": ("factors", 0)}
_SHOWN_SHARE = 0.01  # of parameters: types of fewer are not named


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of a trained parameter, on average; replicas that share state count as one."""

    weights: float
    gradients: float
    master_weights: float
    optimizer_state: float
    types: str  # such as "bf16 weights and gradients, float32 master weights and moments"
    has_frozen: bool = False  # others than those that are trained are held as well

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master_weights + self.optimizer_state

    def __str__(self) -> str:
        """Returns `16 bytes a parameter: bf16 weights and gradients, float32 master weights and moments`."""
        return f"{self.total:.3g} bytes a {'trained ' if self.has_frozen else ''}parameter: {self.types}"

    @classmethod
    def of(cls, graph: Graph) -> "ParameterBytes | None":
        """Reads them off the first replica of `graph`; None for a step without updates of parameters."""
        trained, own, state, kinds = _trained(graph)
        if not len(trained):
            return None
        shares, weight_shares = _shares(graph)
        types = [graph.dtypes[op] for op in trained.tolist()]
        sizes = np.array([ELEMENT_BYTES[dtype] for dtype in types])
        own *= weight_shares
        elements = own / sizes
        gradients = gradients_of_updates(graph)
        gradients = gradients[graph.replicas[graph.producers[gradients]] == 0]
        makers = graph.producers[gradients]
        is_chunk = graph.is_collective[makers] | (weight_shares > 1)
        gradient_bytes = graph.tensor_bytes[gradients] * np.where(is_chunk, shares, 1)
        states = {found for kind in kinds for part, found in _STATES.items() if part in kind.lower()}
        label, least = states.pop() if len(states) == 1 else ("optimizer state", np.inf)
        masters = 4 * float(elements[sizes == 2].sum())
        if float(state[trained][sizes == 2].sum()) * shares < masters * (1 + least / 4):
            masters = 0.0
        rest = float(state.sum()) * shares - masters
        made = [graph.dtypes[op] for op in makers.tolist()]
        parts = [("weights", _listed(types, own)), ("gradients", _listed(made, gradient_bytes))]
        parts += [("master weights", "float32")] * bool(masters)
        if rest > _SHOWN_SHARE * elements.sum():
            is_mute = label.startswith(("8-bit", "optimizer"))
            parts.append((label, "" if is_mute else "float32" if masters else parts[0][1]))
        totals = (float(own.sum()), float(gradient_bytes.sum()), masters, rest)
        weights, summed, copies, others = (round(total / float(elements.sum()), 3) for total in totals)
        is_frozen = HeldMemory.by_op(graph)[0][graph.replicas == 0].sum() > (1 + _SHOWN_SHARE) * totals[0]
        return cls(weights, summed, copies, others, _sentence(parts), bool(is_frozen))


def gradients_of_updates(graph: Graph) -> I64:
    """Returns the tensors that updates read and that ops of other phases make."""
    is_late, makers = _is_update(graph), graph.producers[graph.edge_tensors]
    is_source = graph.is_of_kind("parameter", "buffer", "constant", "input")
    return unique(graph.edge_tensors[is_late[graph.consumers] & ~is_late[makers] & ~is_source[makers]])


def _is_update(graph: Graph) -> Bool:
    return graph.is_in_phase("update") & ~graph.is_collective & ~graph.is_in_role(ACCUMULATE)


def _trained(graph: Graph) -> tuple[I64, I64, I64, set[str]]:
    """Returns the parameters [P] of the first replica with updates, their bytes [P], state [N], and kinds of updates.
    What updates alone read is state, as steps of JAX have it."""
    own, state, _ = HeldMemory.by_op(graph)
    sources, is_late = graph.producers[graph.edge_tensors], _is_update(graph)[graph.consumers]
    is_updated, is_read = mask(sources[is_late], graph.num_ops), mask(sources[~is_late], graph.num_ops)
    has_type = np.array([dtype in ELEMENT_BYTES for dtype in graph.dtypes])
    is_held = has_type & (own > 0) & is_updated & (graph.replicas == 0)
    is_trained = is_held & is_read
    kinds = {graph.kinds[op] for op in graph.consumers[is_late & is_trained[sources]].tolist()}
    state = np.where(is_trained, state, np.where(is_held, own, 0))
    return np.flatnonzero(is_trained), own[is_trained], state, kinds


def _shares(graph: Graph) -> tuple[int, int]:
    """Returns the number of replicas that share optimizer state, and that share parameters: ZeRO gathers these."""
    replicas = int(graph.replicas.max(initial=0)) + 1
    gathers = graph.is_in_role(EXCHANGE_START) & np.array([kind.startswith("all_gather") for kind in graph.kinds])
    return replicas if gathers.any() else 1, replicas if (gathers & ~graph.is_in_phase("update")).any() else 1


def _listed(dtypes: Iterable[str], sizes: I64) -> str:
    """Returns the types of most of the bytes, most first: `bf16 and float32`."""
    sums = Counter[str]()
    for dtype, size in zip(dtypes, sizes.tolist(), strict=True):
        sums[{"bfloat16": "bf16", "tf32": "float32"}.get(dtype, dtype)] += size
    return " and ".join(name for name, size in sums.most_common() if size > _SHOWN_SHARE * sums.total())


def _sentence(parts: list[tuple[str, str]]) -> str:
    """Returns `bf16 weights and gradients, float32 moments` of names with their types."""
    texts = []
    for types, group in groupby(parts, key=lambda part: part[1]):
        names = [name for name, _ in group]
        listed = " and ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])
        texts.append(f"{types} {listed}".strip())
    return ", ".join(texts)
