"""Bytes that training takes for each parameter, by use and type, as the ops of a step hold and read them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from gdp.arrays import I64
from gdp.graph.copies import ACCUMULATE, EXCHANGE_START
from gdp.graph.graph import Graph
from gdp.graph.held_memory import HeldMemory

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
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

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master_weights + self.optimizer_state

    def __str__(self) -> str:
        """Returns `16 bytes a parameter: bf16 weights and gradients, float32 master weights and moments`."""
        return f"{self.total:.3g} bytes a parameter: {self.types}"

    @classmethod
    def of(cls, graph: Graph) -> "ParameterBytes | None":
        """Reads them off the first replica of `graph`; None for a step without updates of parameters."""
        trained, state, updates = _trained(graph)
        shares, weight_shares = _shares(graph)
        dtypes = np.array(graph.dtypes)
        trained = trained[np.isin(dtypes[trained], list(ELEMENT_BYTES))]
        if not len(trained):
            return None
        own = HeldMemory.by_op(graph)[0][trained] * weight_shares
        elements = own / np.array([ELEMENT_BYTES[dtype] for dtype in dtypes[trained].tolist()])
        count = float(elements.sum())
        gradients = gradients_of_updates(graph)
        gradients = gradients[graph.replicas[graph.producers[gradients]] == 0]
        makers = graph.producers[gradients]
        is_chunk = graph.is_collective[makers] | (weight_shares > 1)
        gradient_bytes = graph.tensor_bytes[gradients] * np.where(is_chunk, shares, 1)
        names = {name for kind in updates for part, name in _STATES.items() if part in kind.lower()}
        label, least = names.pop() if len(names) == 1 else ("optimizer state", np.inf)
        is_half = np.array([ELEMENT_BYTES[dtype] == 2 for dtype in dtypes[trained].tolist()])
        half_state = float(state[trained][is_half].sum() * shares)
        masters = 4.0 * float(elements[is_half].sum())
        masters = masters if masters and half_state >= masters * (1 + least / 4) else 0.0
        rest = float(state.sum() * shares) - masters
        weight_types = _types(dtypes[trained], own)
        state_types = "" if label.startswith(("8-bit", "optimizer")) else "float32" if masters else weight_types
        parts = [("weights", weight_types), ("gradients", _types(dtypes[makers], gradient_bytes))]
        parts += [("master weights", "float32")] if masters else []
        parts += [(label, state_types)] if rest > 0.01 * count else []
        total = (own.sum(), gradient_bytes.sum(), masters, rest)
        weights, gradients, copies, others = (round(float(size) / count, 3) for size in total)
        return cls(weights, gradients, copies, others, _listed(parts))


def _trained(graph: Graph) -> tuple[I64, I64, set[str]]:
    """Returns the parameters of the first replica with updates, the state [N] beside them, and the kinds of updates.

    What updates alone read is state, as steps of JAX have it.
    """
    own, state, _ = HeldMemory.by_op(graph)
    sources, is_late = graph.producers[graph.edge_tensors], _is_update(graph)[graph.consumers]
    is_updated, is_read = np.zeros((2, graph.num_ops), np.bool_)
    is_updated[sources[is_late]] = True
    is_read[sources[~is_late]] = True
    is_held = (own > 0) & is_updated & (graph.replicas == 0)
    is_trained = is_held & is_read
    kinds = {graph.kinds[op] for op in graph.consumers[is_late & is_trained[sources]].tolist()}
    return np.flatnonzero(is_trained), np.where(is_trained, state, np.where(is_held, own, 0)), kinds


def _is_update(graph: Graph) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return graph.is_in_phase("update") & ~graph.is_collective & ~graph.is_in_role(ACCUMULATE)


def _shares(graph: Graph) -> tuple[int, int]:
    """Returns the number of replicas that share optimizer state, and that share parameters: ZeRO gathers these."""
    replicas = int(graph.replicas.max(initial=0)) + 1
    gathers = graph.is_in_role(EXCHANGE_START) & np.array([kind.startswith("all_gather") for kind in graph.kinds])
    is_early = gathers & ~graph.is_in_phase("update")
    return replicas if gathers.any() else 1, replicas if is_early.any() else 1


def gradients_of_updates(graph: Graph) -> I64:
    """Returns the tensors that updates read and that ops of other phases make."""
    is_late, makers = _is_update(graph), graph.producers[graph.edge_tensors]
    is_source = np.array([kind in ("parameter", "buffer", "constant", "input") for kind in graph.kinds])
    is_read = is_late[graph.consumers] & ~is_late[makers] & ~is_source[makers]
    return np.unique(graph.edge_tensors[is_read])


def _types(dtypes: Iterable[str], sizes: I64) -> str:
    """Returns the types of most of the bytes, most first: `bf16 and float32`."""
    sums: dict[str, int] = {}
    for dtype, size in zip(dtypes, sizes.tolist(), strict=True):
        name = {"bfloat16": "bf16", "tf32": "float32"}.get(str(dtype), str(dtype))
        sums[name] = sums.get(name, 0) + size
    least = _SHOWN_SHARE * sum(sums.values())
    return " and ".join(sorted((name for name, size in sums.items() if size > least), key=lambda name: -sums[name]))


def _listed(parts: list[tuple[str, str]]) -> str:
    """Returns `bf16 weights and gradients, float32 moments` of names with their types."""
    texts = []
    for types, group in groupby(parts, key=lambda part: part[1]):
        names = [name for name, _ in group]
        listed = " and ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])
        texts.append(f"{types} {listed}".strip())
    return ", ".join(texts)
