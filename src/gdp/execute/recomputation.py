"""Programs of steps that recompute, or whose activations wait on the host.

A copy of an op makes the calls of the op once more, with the same random numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gdp.arrays import I64
from gdp.graph import Graph
from gdp.graph.copies import HOST_COPY, RECOMPUTED
from gdp.models.pytorch.program import Program
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.parallel.offload import KIND, Offload
from gdp.parallel.recompute import Recomputation


def with_copies(program: Program, step: Recomputation) -> Program:
    """Returns the program of the graph of `step`, a recomputation of the graph of `program`.

    Copies draw the same random numbers as their originals, and write no buffers: batch normalisation is given no
    running statistics.
    """
    is_copy = step.graph.is_in_role(RECOMPUTED).tolist()
    number = {op: new for new, op in enumerate(step.op_origin.tolist()) if not is_copy[new]}
    program = _renumbered(program, step.graph, number, step.tensor_origin)
    values = program.tensor_values
    calls = list(program.calls)
    for op, origin in enumerate(step.op_origin.tolist()):
        if is_copy[op]:
            inputs = {values[tensor] for tensor in program.inputs_of[op]}
            calls[op] = tuple(_without_state(program.calls[number[origin]], inputs))
    return replace(program, calls=tuple(calls))


def with_host_copies(program: Program, step: Offload) -> Program:
    """Returns the program of the graph of `step`, in which activations of the graph of `program` wait on the host."""
    is_new = step.graph.is_in_role(HOST_COPY) & (np.array(step.graph.kinds) == KIND)
    kept = np.flatnonzero(~is_new).tolist()  # in their order
    number = dict(enumerate(kept))
    return _renumbered(program, step.graph, number, step.tensor_origin)


def _renumbered(program: Program, graph: Graph, number: Mapping[int, int], tensor_origin: I64) -> Program:
    """Returns the program of `graph`, in which ops have another `number`, and tensors the content of others.

    New ops make no calls: they pass their input on.
    """
    origins = tensor_origin.tolist()
    calls: list[tuple[Call, ...]] = [()] * graph.num_ops
    for op, new in number.items():
        calls[new] = program.calls[op]
    return replace(
        program,
        graph=graph,
        calls=tuple(calls),
        tensor_values=tuple(program.tensor_values[origin] if origin >= 0 else -1 for origin in origins),
        tensor_layouts=tuple(program.tensor_layouts[origin] if origin >= 0 else None for origin in origins),
        sources={number[op]: source for op, source in program.sources.items()},
        private={number[op]: state for op, state in program.private.items()},
        updated={number[op]: name for op, name in program.updated.items()},
    )


def _without_state(calls: tuple[Call, ...], values: set[int]) -> Iterator[Call]:
    """Yields the calls of a copy, with None for buffers that only the original overwrites."""
    for call in calls:
        unknown = {old for old, _ in call.writes if old not in values}
        values |= {new for old, new in call.writes if old in values} | {value for value in call.outputs if value >= 0}
        if not unknown:
            yield call
            continue

        def given(item: Any, unknown: set[int] = unknown) -> Any:
            return None if type(item) is Ref and item.value in unknown else item

        yield replace(
            call,
            args=tuple(map(given, call.args)),
            kwargs={key: given(item) for key, item in call.kwargs.items()},
            writes=tuple((old, new) for old, new in call.writes if old not in unknown),
        )
