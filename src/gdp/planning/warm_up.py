"""Compiles before a clock starts: on a new machine no budget pays for what Numba takes."""

from collections.abc import Callable, Collection, Iterable
from functools import cache
from importlib import import_module

import numpy as np
from numba.core import event
from numba.core.dispatcher import Dispatcher

from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget
from gdp.cluster import WORD_DEVICES, Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.search.place import place
from gdp.search.settings import DEFAULTS
from gdp.search.solvers import SOLVERS
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate

_KERNELS = "engine", "heaps", "longest_paths", "memory", "simulate"
_SIMULATION = ("bounds.lower_bound", *(f"simulator.{name}" for name in _KERNELS))
_PLACERS = tuple(f"placers.{name}" for name in ("base", "dp_stages", "list_kernels", "schedule"))
_SEARCH = (*_PLACERS, "search.ops.annealing", "units.units")
_EXACT = ("placers.exact",)
_POLICY = ("policy.rollout",)
_NUM_OPS, _TENSOR_BYTES = 40, 2**26  # transfers keep every placement far from the lower bound, which would end a search

OnKernel = Callable[[int, int], None]  # is called with the number of kernels that are ready, and that of all


def warm_up(
    placers: Collection[str] = ("auto",),
    problem: Problem | None = None,
    *,
    num_devices: int = 0,
    on_kernel: OnKernel | None = None,
) -> None:
    """Compiles the kernels that `placers` run on `problem`, or loads them. Without placers these are the kernels of the
    simulator and of the lower bound. `on_kernel` is called as each kernel has been compiled, and never where all come
    from the cache. Some kernels have a form of their own for many devices: those of `problem`, or `num_devices`."""
    is_many = max(num_devices, 0 if problem is None else problem.num_devices) > WORD_DEVICES
    is_exact = "exact" in placers or (len(placers) > 0 and problem is not None and is_small(problem))
    is_learned = any(SOLVERS[name].is_learned for name in placers if name in SOLVERS)
    parts = ((_SEARCH, len(placers) > 0), (_POLICY, is_learned), (_EXACT, is_exact))
    modules = [*_SIMULATION, *(name for names, is_run in parts if is_run for name in names)]
    with event.install_listener("numba:compile", _Counter(kernels_of(modules), on_kernel)):
        _run_kernels(len(placers) > 0, is_many=is_many, is_exact=is_exact, is_learned=is_learned)


def is_small(problem: Problem) -> bool:
    """Returns True if `auto` asks the exact placer too."""
    return bool(problem.graph.group_index.max() < DEFAULTS.ops.small_units)


def kernels_of(modules: Iterable[str]) -> set[Dispatcher]:
    """The kernels of `modules`, named without the package."""
    imported = [import_module(f"gdp.{name}") for name in modules]
    return {value for module in imported for value in vars(module).values() if isinstance(value, Dispatcher)}


class _Counter(event.Listener):
    """Counts the kernels that are ready whenever one has been compiled."""

    def __init__(self, kernels: set[Dispatcher], on_kernel: OnKernel | None) -> None:
        self.kernels, self.on_kernel = kernels, on_kernel

    def on_start(self, event: event.Event) -> None:
        pass

    def on_end(self, event: event.Event) -> None:
        if self.on_kernel is not None and event.data["dispatcher"] in self.kernels:
            self.on_kernel(sum(bool(kernel.signatures) for kernel in self.kernels), len(self.kernels))


@cache
def _run_kernels(has_placers: bool, *, is_many: bool, is_exact: bool, is_learned: bool) -> None:
    """Runs the kernels once in a process, which has them from then on."""
    cluster = Cluster.parse("2xp100-pcie-16g")
    problem = Problem.build(_step(_NUM_OPS), cluster)
    evaluate(problem, np.zeros(problem.num_ops, np.int64))
    lower_bound(problem)
    if has_placers:
        _place(_step(_NUM_OPS), cluster, 80)
    if is_learned:
        _place(_step(_NUM_OPS), cluster, 80, "gdp-zero-shot")
    if is_many:
        many = Cluster.parse(f"{WORD_DEVICES + 1}xp100-pcie-16g")
        evaluate(Problem.build(_step(_NUM_OPS), many), np.zeros(_NUM_OPS, np.int64))
        if has_placers:
            _place(_step(8 * WORD_DEVICES), many, 400)
    if is_exact:
        _place(_step(4), cluster, 20, "exact")


def _place(graph: Graph, cluster: Cluster, simulations: int, placer: str = "auto") -> None:
    """Places a graph. KeyboardInterrupt for a Ctrl-C, which a search takes for the end of its budget."""
    plan = place(graph, cluster, budget=Budget(simulations=simulations), placer=placer)
    if plan.search is not None and plan.search.interrupted:
        raise KeyboardInterrupt


def _step(num_ops: int) -> Graph:
    ops = [Op(f"op{op}", "mm", 10**9, resident_bytes=2**20, module=f"layers.{op // 4}") for op in range(num_ops)]
    tensors = [Tensor(op, tuple(range(op + 2, min(op + 4, num_ops))), _TENSOR_BYTES) for op in range(num_ops - 2)]
    return Graph.build("warm-up", ops, tensors)
