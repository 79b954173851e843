"""Modules that can be on different devices when hooks move their inputs, as accelerate's do.

A module with an entry runs on the device of its entry, with all that is inside it; its inputs are moved there. An op of
a module without an entry (a container) runs where its inputs are. It fails if its inputs come from two places, unless
the container gets an entry of its own:

    h ---> attention ---> add ---> mlp ---> add      in a layer: h comes from the layer before; the layer is a unit
    h ---------------------^ `---------------^

A module without parameters (rotary embeddings) goes with the op that feeds it: it has nothing to hold, and elsewhere
its inputs would travel for the sake of a few sums.

A parameter or buffer of a container itself (a scale, a class token) has an entry of its own, as in accelerate's maps:
it is where the container's ops that read it have their other inputs. Those of the model are with the step's inputs,
where accelerate moves them. N ops."""

import re
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from gdp.arrays import I64, Bool
from gdp.export.export_target import ExportUnits, check_modules, find, join
from gdp.graph import Graph
from gdp.graph.layers import enclosing
from gdp.placers.base import inherit
from gdp.simulator.problem import Problem

STATE_KINDS = ("parameter", "buffer", "constant")

_NOTHING, _INPUT = -1, 0  # labels: made of nothing; an input of the step
_LOSS, _PAD = "aten.nll_loss_forward", "aten.constant_pad_nd"
_LARGE = 0.5  # of the work: a container of more is not made a unit, its inconsistent parts share a device instead
_MOST_HELD = 0.5  # of a container's bytes in its own tensors: attention with its projections in one is a unit
_CONSTANT = re.compile(r"constant_\d+")  # made by the model's code, and in the state of no module


def module_units(problem: Problem, *, devices: Bool | None = None) -> ExportUnits:
    """Makes the finest units that run on any assignment of devices. They are modules that hold parameters, or compute
    from several places, named by their paths. A unit has several paths where modules must share a device."""
    check_modules(problem.graph, "modules")
    finder = _UnitFinder(problem)
    labels = finder.run()
    return ExportUnits.build(problem, labels, finder.names, joined=finder.parent, devices=devices)


def is_inside(module: str, path: str) -> bool:
    """Returns whether `module` is the one at `path` or in it; all are in ""."""
    return not path or module == path or module.startswith(f"{path}.")


def first_input(graph: Graph) -> int:
    """Returns the first op that is an input of the step; 0 if there is none."""
    return next((op for op, kind in enumerate(graph.kinds) if kind == "input"), 0)


def is_forward(graph: Graph) -> Bool:
    """[N] Returns which ops are of the forward pass."""
    return np.isin(graph.phases, ("forward", ""))


def is_source(graph: Graph) -> Bool:
    """[N] Returns which ops are parameters, buffers or constants, or hold memory without an input."""
    has_inputs = np.zeros(graph.num_ops, np.bool_)
    has_inputs[graph.consumers] = True
    return np.asarray(~has_inputs & (graph.is_of_kind(*STATE_KINDS) | (graph.resident_bytes > 0)))


def _is_state(graph: Graph, op: int) -> bool:
    return graph.kinds[op] in ("parameter", "buffer") and _CONSTANT.fullmatch(graph.op_names[op]) is None


class _UnitFinder:
    """Makes modules whole (units with all that is inside them), or joins units, until no op has inputs from two."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.problem, self.graph = problem, graph
        self.forward_ops = np.flatnonzero(is_forward(graph)).tolist()
        self.is_source = is_source(graph).tolist()
        holds = (graph.resident_bytes > 0) & ~graph.is_of_kind("buffer", "constant")
        self.is_parameter = (holds | graph.is_of_kind("parameter")).tolist()
        self.inputs_of: list[list[int]] = [[] for _ in range(graph.num_ops)]
        has_content = graph.tensor_bytes[graph.edge_tensors] > 0
        producers = graph.producers[graph.edge_tensors[has_content]].tolist()
        for producer, consumer in zip(producers, graph.consumers[has_content].tolist(), strict=True):
            self.inputs_of[consumer].append(producer)
        times = problem.mean_op_time_ns.tolist()
        self.work = self._by_module([time_ns / max(sum(times), 1) for time_ns in times])
        containers = self._containers()
        self.whole = {
            graph.modules[op]
            for op in self.forward_ops
            if graph.modules[op]
            and not (_is_state(graph, op) and graph.modules[op] in containers)
            and (self.is_source[op] or graph.resident_bytes[op] > 0 or self._uses_source_outside(op))
        }
        self.root_of: dict[str, str] = {}  # of each module: the outermost whole one around it, "" if there is none
        self.number: dict[str, int] = {}
        self.names: list[str] = []
        self.parent: list[int] = []
        self.joined: set[tuple[str, str]] = set()

    def run(self) -> I64:
        """[N] Returns labels, numbers into `names`."""
        conflicts = {""}
        while conflicts:
            self._number_roots()
            labels, conflicts = self._label()
            self.whole |= conflicts
        self._join_without_parameters(labels)
        self._follow_readers(labels)
        readers: dict[int, set[int]] = defaultdict(set)  # modules that are given a container's own tensor
        for op in self.forward_ops:
            for producer in self.inputs_of[op]:
                if producer in self.number_of_tensor and self.root_of[self.graph.modules[op]]:
                    readers[labels[producer]].add(labels[op])
                elif self.is_source[producer] and min(labels[producer], labels[op]) > _INPUT:  # tied weights
                    join(self.parent, labels[producer], labels[op])
        for number, units in readers.items():
            if len(units) == 1:
                join(self.parent, number, *units)
        for op, inputs in enumerate(self.inputs_of):
            if labels[op] > _INPUT and any(self.graph.kinds[producer] == "input" for producer in inputs):
                join(self.parent, labels[op], _INPUT)
                break
        return inherit(self.problem, labels)

    def _follow_readers(self, labels: list[int]) -> None:
        """Labels forward ops that nothing feeds, such as positions and masks. They go with the one unit that reads
        them, or else are made where the step's inputs are."""
        readers: list[set[int]] = [set() for _ in labels]
        for op in reversed(self.forward_ops):
            if labels[op] == _NOTHING and readers[op] and not self.is_source[op]:
                labels[op] = readers[op].pop() if len(readers[op]) == 1 else _INPUT
            if labels[op] != _NOTHING:
                for producer in self.inputs_of[op]:
                    readers[producer].add(find(self.parent, labels[op]))

    def _join_without_parameters(self, labels: list[int]) -> None:
        """Joins modules that hold no parameter, and use none, with the unit that feeds them first."""
        fed_by: dict[str, int] = {}
        users = set[str]()
        for op in self.forward_ops:
            root = self.root_of[self.graph.modules[op]]
            if not root:
                continue
            if any(self.is_parameter[item] for item in (op, *self.inputs_of[op])):
                users.add(root)
            for producer in self.inputs_of[op]:
                if self.root_of[self.graph.modules[producer]] != root and labels[producer] != _NOTHING:
                    fed_by.setdefault(root, labels[producer])
        for root in set(self.root_of.values()) - {"", *users}:
            join(self.parent, self.number[root], fed_by.get(root, _INPUT))

    def _is_shifted(self, op: int) -> bool:
        """Returns whether `op` makes the shifted labels of a causal language model. Transformers' `ForCausalLMLoss`
        pads them and moves them to the logits; other losses read labels where they are."""
        while self.graph.kinds[op] in ("aten.clone", "aten._to_copy") and len(self.inputs_of[op]) == 1:
            op = self.inputs_of[op][0]
        return self.graph.kinds[op] == _PAD and all(self.graph.kinds[item] == "input" for item in self.inputs_of[op])

    def _by_module(self, values: Iterable[float]) -> dict[str, float]:
        """Returns the sum of `values` [N] in each module."""
        sums: dict[str, float] = defaultdict(float)
        for module, value in zip(self.graph.modules, values, strict=True):
            for path in enclosing(module):
                sums[path] += value
        return sums

    def _containers(self) -> set[str]:
        """Returns the modules that hold several others with parameters, and but a small part of the bytes themselves.
        Those of most of the work may hold more."""
        graph, own_bytes = self.graph, dict[str, int]()
        state = [op for op in self.forward_ops if _is_state(graph, op)]
        for op in state:
            own_bytes[graph.modules[op]] = own_bytes.get(graph.modules[op], 0) + int(graph.resident_bytes[op])
        all_bytes = self._by_module(graph.resident_bytes.tolist())
        parts = [path for path in {graph.modules[op] for op in state if self.is_parameter[op]} if path]
        num_parts: dict[str, int] = defaultdict(int)
        for part in parts:
            for path in {"", *enclosing(part)} - {part}:
                num_parts[path] += 1
        return {
            path
            for path, held_bytes in own_bytes.items()
            if num_parts[path] > 1 and (held_bytes <= _MOST_HELD * all_bytes[path] or self.work[path] > _LARGE)
        }

    def _uses_source_outside(self, op: int) -> bool:
        """Returns whether `op` reads a source of another module, such as a tied weight: it needs an entry."""
        owners = (self.graph.modules[producer] for producer in self.inputs_of[op] if self.is_source[producer])
        return any(owner and not is_inside(owner, self.graph.modules[op]) for owner in owners)

    def _number_roots(self) -> None:
        self.root_of = {
            module: next((path for path in enclosing(module) if path in self.whole), "")
            for module in set(self.graph.modules)
        }
        graph, roots = self.graph, sorted(set(self.root_of.values()) - {""})
        own = [op for op in self.forward_ops if _is_state(graph, op) and not self.root_of[graph.modules[op]]]
        self.names = ["input", *roots, *(graph.op_names[op] for op in own)]
        self.number = {root: number for number, root in enumerate(self.names) if number}
        self.number_of_tensor = {op: number for number, op in enumerate(own, 1 + len(roots))}
        self.parent = list(range(len(self.names)))
        for op, number in self.number_of_tensor.items():
            if not graph.modules[op]:  # accelerate moves the model's own tensors to the device of the inputs
                join(self.parent, number, _INPUT)
        for first, second in self.joined:
            join(self.parent, self._number_of(first), self._number_of(second))

    def _number_of(self, root: str) -> int:
        """Returns the number of `root`, or of the larger root that it has become part of."""
        if root == "input":
            return _INPUT
        return self.number[next(path for path in enclosing(root) if path in self.number)]

    def _label(self) -> tuple[list[int], set[str]]:
        """Returns the unit of each op, as far as forward ops and modules tell, and modules that must become whole."""
        graph = self.graph
        labels = [self.number.get(self.root_of[module], _NOTHING) for module in graph.modules]
        for op, number in self.number_of_tensor.items():
            labels[op] = number
        own = set(self.number_of_tensor.values())
        conflicts: set[str] = set()
        for op in self.forward_ops:
            if labels[op] != _NOTHING:
                continue
            if graph.kinds[op] == "input":
                labels[op] = _INPUT
                continue
            reads = [item for item in self.inputs_of[op] if not (graph.kinds[op] == _LOSS and self._is_shifted(item))]
            read = {labels[item] for item in reads if labels[item] != _NOTHING}
            moved = read - own - {labels[item] for item in reads if self.is_source[item]}
            for number in read - moved:  # weights that a container reads are where its other inputs are
                join(self.parent, number, min(moved or read))
            units = sorted({find(self.parent, number) for number in read})
            if len(units) > 1:
                module = graph.modules[op]
                if module and self.work.get(module, 0.0) <= _LARGE:
                    conflicts.add(module)
                for other in units[1:] if not conflicts else ():
                    self.joined.add((self.names[units[0]], self.names[other]))
                    join(self.parent, units[0], other)
            labels[op] = units[0] if units else _NOTHING
        return labels, conflicts
