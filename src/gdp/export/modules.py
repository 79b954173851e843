"""Modules that can be on different devices when hooks move their inputs, as accelerate's do.

A module with an entry runs on the device of its entry, with all that is inside it; its inputs are moved there. What
runs in a module without an entry (a container) runs where its inputs are. So an op of a container whose inputs come
from two places fails, unless the container gets an entry of its own:

    h ---> attention ---> add ---> mlp ---> add      in a layer: h comes from the layer before; the layer is a unit
    h ---------------------^ `---------------^

A module without parameters (rotary embeddings) goes with what feeds it: it has nothing to hold, and apart from there
its inputs would travel for the sake of a few sums. N ops.
"""

from collections.abc import Iterable

import numpy as np

from gdp.export.checks import check_modules
from gdp.export.units import Units, find, join
from gdp.graph import I64, Bool, Graph
from gdp.placers.base import inherit
from gdp.problem import Problem

_NOTHING, _INPUT = -1, 0  # labels: made of nothing; an input of the step
_STATE_KINDS = ("parameter", "buffer", "constant")
_LOSS, _PAD = "aten.nll_loss_forward", "aten.constant_pad_nd"
_LARGE = 0.5  # of the work: a container of more is not made a unit, its inconsistent parts share a device instead


def module_units(problem: Problem, *, devices: Bool | None = None) -> Units:
    """The finest units such that any assignment of devices to them runs: modules that hold parameters, or compute from
    several places. Names are the paths of modules, several joined by ` + ` where they must share a device."""
    check_modules(problem.graph, "modules")
    finder = _Finder(problem)
    labels = finder.run()
    return Units.build(problem, labels, finder.names, joined=finder.parent, devices=devices)


def enclosing(path: str) -> Iterable[str]:
    """`a`, `a.b`, `a.b.c` of `a.b.c`."""
    parts = path.split(".") if path else []
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


class _Finder:
    """Makes modules solid (units with all that is inside them), or joins units, until no op has inputs from two."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.problem, self.graph = problem, graph
        self.is_forward = [phase in ("forward", "") for phase in graph.phases]
        has_inputs = np.zeros(graph.num_ops, np.bool_)
        has_inputs[graph.consumers] = True
        is_state = np.array([kind in _STATE_KINDS for kind in graph.kinds], np.bool_)
        self.is_source = (~has_inputs & (is_state | (graph.resident_bytes > 0))).tolist()
        self.inputs_of: list[list[int]] = [[] for _ in range(graph.num_ops)]
        has_content = graph.tensor_bytes[graph.edge_tensors] > 0
        sources = graph.producers[graph.edge_tensors[has_content]].tolist()
        for producer, consumer in zip(sources, graph.consumers[has_content].tolist(), strict=True):
            self.inputs_of[consumer].append(producer)
        self.work_ns = self._work_by_module()
        self.solid = {
            graph.modules[op]
            for op in range(graph.num_ops)
            if (self.is_source[op] or graph.resident_bytes[op] > 0) and graph.modules[op] and self.is_forward[op]
        }
        self.solid |= {graph.modules[op] for op in range(graph.num_ops) if self._uses_foreign_source(op)}
        self.root_of: dict[str, str] = {}  # of each module: the outermost solid one around it, "" if there is none
        self.number: dict[str, int] = {}
        self.names: list[str] = []
        self.parent: list[int] = []
        self.joined: set[tuple[str, str]] = set()

    def run(self) -> I64:
        """[N] labels, numbers into `names`."""
        while True:
            self._number_roots()
            labels, conflicts = self._label()
            if not conflicts:
                break
            self.solid |= conflicts
        self._join_without_parameters(labels)
        self._follow_readers(labels)
        for op in range(self.graph.num_ops):  # tied weights
            if self.is_forward[op]:
                for producer in self.inputs_of[op]:
                    if self.is_source[producer] and labels[producer] > _INPUT:
                        join(self.parent, labels[producer], labels[op] if labels[op] > _INPUT else labels[producer])
        first = next(
            (labels[op] for op in range(self.graph.num_ops) if self._reads_input(op) and labels[op] > _INPUT), _NOTHING
        )
        if first > _INPUT:
            join(self.parent, first, _INPUT)
        return inherit(self.problem, labels)

    def _follow_readers(self, labels: list[int]) -> None:
        """Forward ops that nothing feeds, as positions and masks, go with the one unit that reads them, or else are
        made where the step's inputs are."""
        readers: list[set[int]] = [set() for _ in labels]
        for op in reversed(range(self.graph.num_ops)):
            if labels[op] == _NOTHING and self.is_forward[op] and readers[op] and not self.is_source[op]:
                labels[op] = readers[op].pop() if len(readers[op]) == 1 else _INPUT
            if labels[op] != _NOTHING and self.is_forward[op]:
                for producer in self.inputs_of[op]:
                    readers[producer].add(find(self.parent, labels[op]))

    def _join_without_parameters(self, labels: list[int]) -> None:
        """Join modules that hold no parameter, and use none, with what feeds them first."""
        graph = self.graph
        fed_by: dict[str, int] = {}
        uses = set[str]()
        for op in range(graph.num_ops):
            root = self.root_of[graph.modules[op]]
            if not root or not self.is_forward[op]:
                continue
            if _is_parameter(graph, op) or any(_is_parameter(graph, producer) for producer in self.inputs_of[op]):
                uses.add(root)
            for producer in self.inputs_of[op]:
                if self.root_of[graph.modules[producer]] != root and labels[producer] != _NOTHING:
                    fed_by.setdefault(root, labels[producer])
        for root, number in self.number.items():
            if root not in uses:
                join(self.parent, number, fed_by.get(root, _INPUT))

    def _is_shifted(self, op: int) -> bool:
        """Whether `op` makes the shifted labels of a causal language model, which Transformers' loss pads, and moves to
        the logits (`ForCausalLMLoss`); other losses read labels where they are."""
        while self.graph.kinds[op] in ("aten.clone", "aten._to_copy") and len(self.inputs_of[op]) == 1:
            op = self.inputs_of[op][0]
        reads = self.inputs_of[op]
        return self.graph.kinds[op] == _PAD and all(self.graph.kinds[x] == "input" for x in reads)

    def _reads_input(self, op: int) -> bool:
        return any(self.graph.kinds[producer] == "input" for producer in self.inputs_of[op])

    def _work_by_module(self) -> dict[str, float]:
        work_ns: dict[str, float] = {}
        times = self.problem.mean_op_time_ns.tolist()
        total = max(sum(times), 1)
        for module, time_ns in zip(self.graph.modules, times, strict=True):
            for path in enclosing(module):
                work_ns[path] = work_ns.get(path, 0.0) + time_ns / total
        return work_ns

    def _uses_foreign_source(self, op: int) -> bool:
        """A module that uses a tied weight has it in its own state, too, and needs an entry."""
        module = self.graph.modules[op]
        if not module or not self.is_forward[op]:
            return False
        return any(
            self.is_source[producer]
            and (owner := self.graph.modules[producer])
            and owner != module
            and not owner.startswith(f"{module}.")
            for producer in self.inputs_of[op]
        )

    def _number_roots(self) -> None:
        self.root_of = {
            module: next((path for path in enclosing(module) if path in self.solid), "")
            for module in set(self.graph.modules)
        }
        roots = sorted(set(self.root_of.values()) - {""})
        self.names = ["input", *roots]
        self.number = {root: number for number, root in enumerate(self.names) if number}
        self.parent = list(range(len(self.names)))
        for first, second in self.joined:
            join(self.parent, self._number_of(first), self._number_of(second))

    def _number_of(self, root: str) -> int:
        """A root may have become part of a larger one."""
        if root == "input":
            return _INPUT
        return self.number[next(path for path in enclosing(root) if path in self.number)]

    def _label(self) -> tuple[list[int], set[str]]:
        """The unit of each op, as far as forward ops and modules tell; modules that must become solid."""
        graph = self.graph
        labels = [_NOTHING] * graph.num_ops
        conflicts: set[str] = set()
        for op in range(graph.num_ops):
            root = self.root_of[graph.modules[op]]
            if root:
                labels[op] = self.number[root]
                continue
            if not self.is_forward[op]:
                continue
            if graph.kinds[op] == "input":
                labels[op] = _INPUT
                continue
            reads = [x for x in self.inputs_of[op] if not (graph.kinds[op] == _LOSS and self._is_shifted(x))]
            found = sorted({find(self.parent, labels[x]) for x in reads if labels[x] != _NOTHING})
            if len(found) > 1:
                module = graph.modules[op]
                if module and self.work_ns.get(module, 0.0) <= _LARGE:
                    conflicts.add(module)
                for other in found[1:] if not conflicts else ():
                    self.joined.add((self.names[found[0]], self.names[other]))
                    join(self.parent, found[0], other)
            labels[op] = found[0] if found else _NOTHING
        return labels, conflicts


def _is_parameter(graph: Graph, op: int) -> bool:
    return graph.kinds[op] == "parameter" or (
        graph.kinds[op] not in ("buffer", "constant") and int(graph.resident_bytes[op]) > 0
    )
