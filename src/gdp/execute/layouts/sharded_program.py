"""The program of all ranks of a step whose ops are cut over groups: T copies of each op, with exchanges among them.

    rank 0   mm --+--> all_reduce --> add           an exchange reads what all ranks send, and makes what its own gets
                   X
    rank 1   mm --+--> all_reduce --> add

Of an op, tensor or device n of a group, rank r has the number n * T + r. Each rank has the constants of its own
capture, such as the first row of its part of a table. Where tokens are cut as well, an exchange is among the ranks of
one part of them, or among those with the same part of the weights."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gdp.arrays import Bool
from gdp.costs.collectives import COLLECTIVE
from gdp.errors import InputError
from gdp.execute.layouts.step_program import micro_batch_of
from gdp.execute.layouts.updates import updates_of
from gdp.graph import Graph
from gdp.graph.fingerprint import difference
from gdp.models.pytorch import Replay
from gdp.models.pytorch.program import Program, named_state
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.routine import OpRoutine
from gdp.models.pytorch.shards.collectives import OF_ALL_RANKS, members
from gdp.models.pytorch.shards.cuts import OUTPUT, TOKENS_OF, AxisCut
from gdp.models.shards import Shards


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedProgram(Program):
    """The program of all ranks; inputs, results and state are those of the whole model."""

    ranks: Sequence[Program]  # [T]
    cuts: Mapping[str, AxisCut]  # as in a capture
    num_inner: int  # neighbouring ranks whose parts are those of `cuts`; others have other tokens

    @classmethod
    def of(cls, ranks: Sequence[Program], cuts: Mapping[str, AxisCut], shards: Shards) -> "ShardedProgram":
        """Returns the program of these ranks. InputError where the optimizer needs whole parameters."""
        ranks = [_with_own_draws(program) for program in ranks]
        first, count = ranks[0], len(ranks)
        graphs = [replace(program.graph, shapes=("",) * program.graph.num_ops) for program in ranks]  # with constants
        for graph in graphs[1:]:
            if what := difference(graph, graphs[0]):
                raise InputError(f"{graph.name}: {shards}: ranks have unlike ops: {what}; leave it out")
        part, _ = micro_batch_of(first)
        for update in updates_of(part).values():
            if update.name in cuts:
                update.check_elementwise(part, f"tensor={shards.tensor}", "rank", "without tensor")

        def by_rank(name: str) -> tuple[Any, ...]:
            """[N * T] Returns the items of all ranks."""
            return tuple(item for of in zip(*(getattr(each, name) for each in ranks), strict=True) for item in of)

        starts = np.arange(count) * (max(first.layouts) + 1)  # [T] of the values of each rank
        values = np.array(first.tensor_values)[:, None]
        inherited = {field.name: getattr(first, field.name) for field in fields(Program)}
        return cls(
            **inherited
            | {
                "graph": _graph_of_ranks(first, count),
                "calls": tuple(
                    _calls_of_all(ranks, op, rank, starts.tolist()) if is_exchange else ranks[rank].calls[op]
                    for op, is_exchange in enumerate(is_among_ranks(first.graph).tolist())
                    for rank in range(count)
                ),
                "tensor_values": tuple(np.where(values < 0, values, values + starts).reshape(-1).tolist()),
                "tensor_layouts": by_rank("tensor_layouts"),
                "layouts": {
                    value + start: layout
                    for start, each in zip(starts.tolist(), ranks, strict=True)
                    for value, layout in each.layouts.items()
                },
                "sources": {
                    op * count + rank: replace(source, tensor=source.tensor * count + rank)
                    for rank, each in enumerate(ranks)
                    for op, source in each.sources.items()
                },
                "private": {},
                "updated": {},
            },
            ranks=ranks,
            cuts=cuts,
            num_inner=shards.tensor if shards.tensor > 1 else count,
        )

    @property
    def adds_in_order(self) -> bool:
        """False: a product is the sum of those of the ranks."""
        return False

    def routine(self, op: int, device: torch.device | None = None) -> OpRoutine:
        """Returns `op` prepared for `device`; kept for the next time."""
        key, (own, rank) = (op, device), divmod(op, len(self.ranks))
        if key not in self._routines and not self.graph.kinds[op].startswith(f"{COLLECTIVE}."):
            self._routines[key] = RankRoutine(self.ranks[rank].routine(own, device), rank, len(self.ranks))
        return super().routine(op, device)

    # -- numbers of ranks --------------------------------------------------------------------------------------------

    def numbered(self, of_ranks: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
        """Returns the items of all ranks, each with its number among all."""
        count = len(self.ranks)
        return {n * count + rank: item for rank, items in enumerate(of_ranks) for n, item in items.items()}

    def of_ranks(self, items: Mapping[int, Any]) -> list[dict[int, Any]]:
        """[T] Returns the items of each rank, with their numbers there."""
        count = len(self.ranks)
        return [{n // count: item for n, item in items.items() if n % count == rank} for rank in range(count)]

    def _numbers(self, name: str) -> frozenset[int]:
        return frozenset(self.numbered([dict.fromkeys(getattr(rank, name)) for rank in self.ranks]))

    def _pairs(self, name: str) -> dict[int, int]:
        pairs, count = self.numbered([getattr(rank, name) for rank in self.ranks]), len(self.ranks)
        return {n: own * count + n % count for n, own in pairs.items()}

    loss_tensors = cached_property(lambda self: self._numbers("loss_tensors"))
    result_tensors = cached_property(lambda self: self._numbers("result_tensors"))
    state_tensors = cached_property(lambda self: self._numbers("state_tensors"))
    piece_tensors = cached_property(lambda self: self._numbers("piece_tensors"))
    keepers = cached_property(lambda self: self._pairs("keepers"))
    completed_by = cached_property(lambda self: self._pairs("completed_by"))

    # -- the whole model ---------------------------------------------------------------------------------------------

    def part_of(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """Returns what a rank has of a parameter, or of a tensor of its shape; others it has whole."""
        cut = self.cuts.get(name)
        is_cut, count = cut is not None and tuple(whole.shape) == cut.shape, self.num_inner
        return cut.part_of(whole, rank % count, count) if cut is not None and is_cut else whole

    def whole_of(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Returns a parameter, a tensor of its shape, or an output, from what the ranks have of it."""
        own, count = name.partition("@")[0], self.num_inner
        for key, size in ((own, count), (TOKENS_OF + own, len(parts) // count)):
            cut, groups = self.cuts.get(key), [parts[first : first + size] for first in range(0, len(parts), size)]
            parts = [of[0] if cut is None or not of[0].dim() else cut.whole_of(of) for of in groups]
        return parts[0]

    def wholes_of(self, parts: Sequence[Mapping[str, Tensor]], of: str = "") -> dict[str, Tensor]:
        """Returns tensors by name, of a parameter or `of` an output, from those of all ranks."""
        return {name: self.whole_of(of + name, [each[name] for each in parts]) for name in parts[0]}

    def bind_state(self, state: nn.Module | Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Copies parameters and buffers, of parameters each rank its part; see `Program.bind`."""
        named = dict(named_state(state)) if isinstance(state, nn.Module) else state
        parts = [{name: self.part_of(name, named[name], rank) for name in named} for rank in range(len(self.ranks))]
        return self.numbered([each.bind_state(own) for each, own in zip(self.ranks, parts, strict=True)])

    def bind_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Tensor]:
        """Copies inputs, which all ranks have; see `Program.bind`."""
        return self.numbered([self.ranks[0].bind_inputs(args, kwargs)] * len(self.ranks))

    def state_by_name(self, held: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Returns the whole parameters, and the buffers of the first rank."""
        own = zip(self.ranks, self.of_ranks(held), strict=True)
        return self.wholes_of([each.state_by_name(tensors) for each, tensors in own])

    def loss_of(self, held: Mapping[int, Tensor]) -> Tensor | None:
        """Returns the loss of the first rank, which all have."""
        return self.ranks[0].loss_of(self.of_ranks(held)[0])

    def named_outputs(self, held: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Returns the whole outputs by name, as `results` does."""
        own = zip(self.ranks, self.of_ranks(held), strict=True)
        return self.wholes_of([each.named_outputs(tensors) for each, tensors in own], OUTPUT)

    def results(self, held: Mapping[int, Tensor]) -> Replay:
        """Returns the results of a step, from tensors by number; others are ignored."""
        found = [each.results(tensors) for each, tensors in zip(self.ranks, self.of_ranks(held), strict=True)]
        gradients = self.wholes_of([each.gradients for each in found])
        return Replay(found[0].loss, self.named_outputs(held), gradients, self.state_by_name(held))


@dataclass(frozen=True, slots=True)
class RankRoutine:
    """An op of one rank."""

    routine: OpRoutine
    rank: int
    num_ranks: int

    def run(self, inputs: MutableMapping[int, Any], private: Any, seed: int = 0) -> dict[int, Any]:
        """Executes the op; see `Program.run`."""
        made = self.routine.run(_HeldByRank(inputs, self.rank, self.num_ranks), private, seed)
        return {tensor * self.num_ranks + self.rank: content for tensor, content in made.items()}

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes an argument, such as the learning rate, of the calls that have it."""
        self.routine.set_keyword(key, value)


class _HeldByRank(MutableMapping[int, Any]):
    """The tensors that a device holds, by the numbers of one rank."""

    def __init__(self, held: MutableMapping[int, Any], rank: int, num_ranks: int) -> None:
        self._held, self._rank, self._num_ranks = held, rank, num_ranks

    def __getitem__(self, number: int) -> Any:
        return self._held[number * self._num_ranks + self._rank]

    def __setitem__(self, number: int, content: Any) -> None:
        self._held[number * self._num_ranks + self._rank] = content

    def __delitem__(self, number: int) -> None:
        del self._held[number * self._num_ranks + self._rank]

    def __iter__(self) -> Iterator[int]:
        return (n // self._num_ranks for n in self._held if n % self._num_ranks == self._rank)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def ranks_of(program: Program) -> Sequence[Program]:
    """Returns the programs of the ranks that a device of a plan stands for; where ops are not cut, the program."""
    return program.ranks if isinstance(program, ShardedProgram) else (program,)


def _with_own_draws(program: Program) -> Program:
    """Returns the program of a rank with other random numbers than other ranks have, where they have other parts."""
    count = program.num_draws
    calls = (tuple(replace(call, seed=call.seed + call.part * count) for call in calls) for calls in program.calls)
    return replace(program, calls=tuple(calls))


def is_among_ranks(graph: Graph) -> Bool:
    """[N] Returns whether ops are exchanges among ranks."""
    return np.array([kind.startswith(f"{COLLECTIVE}.") for kind in graph.kinds], np.bool_)


def _calls_of_all(ranks: Sequence[Program], op: int, rank: int, starts: Sequence[int]) -> tuple[Call, ...]:
    """Returns the call of an exchange that reads what its ranks send, and makes what `rank` gets."""
    (call,) = ranks[rank].calls[op]
    among = members(rank, *_exchange_of(ranks[rank], op))
    sent = [(ranks[other].calls[op][0].args[0], starts[other]) for other in among]
    refs = [Ref(ref.value + start, ref.layout) for ref, start in sent]
    made = tuple(value if value < 0 else value + starts[rank] for value in call.outputs)
    function: Any = partial(OF_ALL_RANKS[call.func], among.index(rank))
    return (replace(call, func=function, args=(refs, *call.args[2:]), kwargs={}, outputs=made),)


def _exchange_of(program: Program, op: int) -> tuple[int, int]:
    """Returns the number of ranks that an op exchanges between, and how far apart they are; of others (1, 1)."""
    if not program.graph.kinds[op].startswith(f"{COLLECTIVE}."):
        return 1, 1
    (call,) = program.calls[op]
    return int(call.args[1]), int(call.kwargs.get("stride", 1))


def _graph_of_ranks(program: Program, count: int) -> Graph:
    """Returns the graph of all ranks. What an exchange reads, and what waits for it, is that of all ranks."""
    graph, ranks = program.graph, np.arange(count)
    exchanges = np.array([_exchange_of(program, op) for op in range(graph.num_ops)])  # [N, 2]

    def each(numbers: Any) -> Any:
        return np.where(numbers[:, None] < 0, numbers[:, None], numbers[:, None] * count + ranks).reshape(-1)

    tensors, ops = graph.edge_tensors, graph.consumers
    has_content = np.array(program.tensor_values)[tensors] >= 0
    of_edges = np.where(has_content[:, None], exchanges[ops], exchanges[graph.producers[tensors]])
    found = []
    for exchange in np.unique(of_edges, axis=0):
        sends = np.array([members(rank, *exchange.tolist()) for rank in range(count)])  # [T, ranks of an exchange]
        chosen = np.flatnonzero((of_edges == exchange).all(1))
        made = tensors[chosen, None, None] * count + sends
        found.append(np.stack((made, np.broadcast_to(ops[chosen, None, None] * count + ranks[:, None], made.shape))))
    edges = np.concatenate([each.reshape(2, -1) for each in found], axis=1)
    edges = edges[:, np.lexsort(edges[::-1])]
    of_ops: dict[str, Any] = graph.columns_of(np.repeat(np.arange(graph.num_ops), count))
    names = tuple(f"{name}%{rank}" for name in graph.op_names for rank in range(count))
    num_tensors = graph.num_tensors * count
    return Graph(
        name=graph.name,
        **of_ops | {"op_names": names, "groups": each(graph.groups), "origins": each(graph.origins)},
        producers=each(graph.producers),
        view_of=each(graph.view_of),
        tensor_bytes=np.repeat(graph.tensor_bytes, count),
        is_resident=np.repeat(graph.is_resident, count),
        is_kept=np.repeat(graph.is_kept, count),
        consumer_offsets=np.concatenate(([0], np.cumsum(np.bincount(edges[0], minlength=num_tensors)))),
        consumers=edges[1],
    )
