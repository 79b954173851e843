"""A plan and what it takes to simulate, show, export or run it: its model, its devices, its limits. They come from the
files beside the plan, if those are its own, else from what was asked: MODEL is read again. What is given in addition
overrides what was asked."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gdp.cluster import Cluster
from gdp.cluster.device import split_runtime
from gdp.errors import InputError, prefixed
from gdp.graph import Graph, GraphSource
from gdp.graph.accumulation import one_microbatch
from gdp.graph.fingerprint import difference
from gdp.graph.microbatches import count_microbatches
from gdp.models.measured_times import MeasuredTimes
from gdp.models.model import Model
from gdp.models.op_costs import without_costs
from gdp.models.serving import ServedStep
from gdp.models.shards import WHOLE
from gdp.models.source import ModelSource
from gdp.parallel.layout import Layout
from gdp.parallel.step import BatchStream, Step, in_flight
from gdp.planning.options import READING, constraints_of, in_directory, reading_of
from gdp.planning.plan_directory import files_beside
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, replay


def graph_beside(plan: Plan) -> Graph | None:
    """Returns the graph beside the plan's file; None if there is none, or one of another plan."""
    if plan.path is None:
        return None
    there = [path for path in files_beside(plan.path)[:2] if path.is_file()]
    for path in sorted(there, key=lambda path: -path.stat().st_mtime_ns):
        graph = Graph.load(path)
        if graph.fingerprint == plan.graph:
            return graph
    return None


class PlanSource:
    """A plan with its question; MODEL, DEVICES and options that are given in addition override it. InputError, with
    what differs, where they are not those of the plan."""

    def __init__(
        self, plan: Plan, *, model: str = "", devices: str = "", options: Mapping[str, Any] | None = None
    ) -> None:
        self.plan, self._model, self._devices, self._given = plan, model, devices, options or {}
        asked = plan.question.options
        if model not in ("", plan.question.model):  # another MODEL is read as it says itself
            asked = {name: value for name, value in asked.items() if name not in (*READING, "times")}
        self.options = {**asked, **self._given}

    @cached_property
    def cluster(self) -> Cluster:
        """The devices of the plan."""
        question, plan = self.plan.question, self.plan
        if self._devices:
            runtime = split_runtime(question.cluster)[1]  # of the plan, unless another is named
            own = f"{self._devices}:{runtime}" if runtime and not split_runtime(self._devices)[1] else self._devices
            return self._of_plan(Cluster.parse(own), self._devices)
        if plan.path is not None and (beside := files_beside(plan.path)[2]).is_file():
            cluster = Cluster.load(beside)
            if cluster.fingerprint == plan.cluster:
                return cluster
        if not question.cluster:
            raise InputError("does not say its devices; name them with --devices")
        return self._of_plan(Cluster.parse(in_directory(question.cluster, question.directory)), question.cluster)

    def _of_plan(self, cluster: Cluster, text: str) -> Cluster:
        plan, shards = self.plan, self.plan.shards
        if shards != WHOLE:
            cluster = cluster.grouped(shards.num_ranks, shards.shares)
        if cluster.fingerprint == plan.cluster:
            return cluster
        names = tuple(device.name for device in cluster.devices)
        differs = "its devices or links have other figures"
        if names != plan.devices:
            differs = f"it has {_listed(names)}, and the plan {_listed(plan.devices)}"
        raise InputError(f"the plan is for other devices than {text}: {differs}; name its own with --devices")

    @property
    def cards(self) -> Cluster:
        """The devices that the plan's groups are made of, as they were asked for."""
        question = self.plan.question
        return Cluster.parse(self._devices or in_directory(question.cluster, question.directory))

    @cached_property
    def model(self) -> ModelSource:
        """MODEL, to be read again. InputError where the plan does not say it."""
        question = self.plan.question
        if self._model:
            return ModelSource(self._model, reading_of(self.resolved))
        if not question.model:
            raise InputError("does not say its MODEL; name it")
        return ModelSource(question.model, reading_of(self.resolved), Path(question.directory))

    @property
    def known_model(self) -> ModelSource | None:
        """MODEL; None where the plan does not say it."""
        with contextlib.suppress(InputError):
            return self.model
        return None

    @property
    def resolved(self) -> dict[str, Any]:
        """The options with the files of those that were asked found from where the plan was asked."""
        files = {
            name: in_directory(self.options[name], self.plan.question.directory)
            for name in ("op_costs", "times", "checkpoint")
            if self.options.get(name) is not None and name not in self._given
        }
        return self.options | files

    @cached_property
    def placed(self) -> Graph | None:
        """The graph whose ops the plan places, where a file has it."""
        if (beside := graph_beside(self.plan)) is not None:
            return beside
        question = self.plan.question
        source = ModelSource(question.model, directory=Path(question.directory))
        if not source.is_file or not Path(source.text).is_file() or source.text.endswith(".onnx"):
            return None
        graph = Graph.load(source.text)
        return graph if graph.fingerprint == self.plan.graph else None

    def read(self) -> Model:
        """Returns the graph whose ops the plan places, cut as its layout says."""
        is_asked = not self._model and not self._given.keys() & {*READING, "times"}
        if is_asked and self.placed is not None:
            return Model(self.placed, {}, is_captured=False, served=self._served)
        try:
            model = self._cut()
        except InputError as error:
            if self._model or "budget" in self.plan.question.options:
                raise
            name = self.plan.question.model
            raise InputError(f"was made in Python, of a graph called {name!r}; name its MODEL or file") from error
        if model.graph.fingerprint != self.plan.graph:
            raise InputError(self._differs(model.graph))
        return model

    @property
    def _served(self) -> ServedStep | None:
        """The facts of a served step, where they are kept from its capture; a graph file does not have them."""
        with contextlib.suppress(InputError):  # MODEL may be elsewhere
            if self.plan.question.model and self.model.reading.serving.has_cache and self.model.is_kept(1):
                return self.model.whole().served
        return None

    def check_executes(self, captured: Graph) -> None:
        """Raises InputError, with what differs, unless the plan is one of the step `captured`, whatever its costs."""
        placed = self.placed or captured
        is_own = placed.fingerprint == self.plan.graph
        if not is_own or difference(without_costs(captured), without_costs(placed)):
            raise InputError(self._differs(captured, without=without_costs))

    def _cut(self) -> Model:
        layout, source = self.plan.layout, self.model
        times = self.resolved.get("times")
        if times is not None:
            source = source.timed(MeasuredTimes(Path(times)), self.cluster)
        if (shards := self.plan.shards) != WHOLE:
            source = source.sharded(shards, self.cards if shards.shares else None)
        if layout is None or (not in_flight(layout) and Layout.of_document(layout).of_groups.is_whole):
            return source.whole()
        if in_flight(layout) or source.is_file:
            model = source.whole()
            graph = model.graph
            if graph.fingerprint == self.plan.graph:
                return model
            if layout.get("whole", graph.fingerprint) != graph.fingerprint:
                raise InputError(
                    f"the plan is of a layout of another graph than {graph.name!r}, which has {graph.num_ops:,} ops; "
                    "place this graph anew"
                )
            if in_flight(layout):
                return replace(model, graph=BatchStream.of_document(graph, layout).graph)
            parts = {1: graph, count_microbatches(graph): one_microbatch(graph)}
            return replace(model, graph=Step.of_document(parts.__getitem__, layout).graph)
        if source.reading.microbatches > 1:
            raise InputError("--microbatches: the plan has its layout in it; leave the option out")
        step = Step.of_document(lambda num_parts: source.part(num_parts).graph, layout)
        return Model(step.graph, {}, is_captured=True)

    def _differs(self, graph: Graph, without: Callable[[Graph], Graph] = lambda graph: graph) -> str:
        """Returns how `graph`, read from MODEL, differs from that of the plan, `without` what may differ."""
        name, plan = self.model.text, self.plan
        asked = plan.question.options
        changed = [option for option in (*READING, "times") if self.options.get(option) != asked.get(option)]
        if given := [option for option in changed if option in self._given]:
            was, now = (_typed(given[0], options.get(given[0])) for options in (asked, self.options))
            return f"the plan was asked with {was}, not {now}; leave the option out, or place anew"
        if self.placed is not None:
            what = difference(without(graph), without(self.placed))
        elif graph.num_ops != len(plan.placement):
            what = f"it has {graph.num_ops:,} ops, not {len(plan.placement):,}"
        else:
            what = "it has as many ops, with other costs, names or edges; place with --out, to be told the first one"
        if changed and plan.question.options:
            what += f"; the plan was asked with {_typed(changed[0], asked.get(changed[0]))}"
        other = version("gdp-placement")
        versions = "" if plan.gdp_version == other else f" (the plan is of gdp {plan.gdp_version}, this is {other})"
        return f"{name} is not what was placed: {what}{versions}; place it anew"

    @property
    def constraints(self) -> Constraints:
        """The limits of the plan; those of cards that are in no group are left out."""
        options = dict(self.options)
        if self.plan.shards != WHOLE:
            known = {name for device in self.cluster.devices for name in (device.name, *device.group)}
            texts = options.get("max_memory") or ()
            options["max_memory"] = [text for text in texts if text.rpartition("=")[0] in known]
        limits = constraints_of(options, self.cluster).on_groups(self.cluster, self.cluster)
        return replace(limits, max_memory_bytes=None) if self.plan.shards.shares else limits

    def problem(self) -> Problem:
        """Returns the problem that the plan solves."""
        return Problem.build(self.read().graph, self.cluster, self.constraints)


def simulation_of(plan: Plan, graph: GraphSource | None = None, cluster: Cluster | str | None = None) -> Simulation:
    """Returns the replay of the plan: every start, finish and transfer.

    A plan from a file is read with its graph and devices; `graph` and `cluster` are others in their place."""
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}; a gdp.Plan is expected, as gdp.Plan.load(path) returns")
    if plan.problem is not None and graph is None and cluster is None:
        return replay(plan.problem, plan)
    with prefixed(plan.path) if plan.path is not None else prefixed("plan"):
        source = PlanSource(plan)
        known = plan.problem
        own = source.problem() if graph is None and cluster is None else None
        if own is not None:
            return replay(own, plan)
        devices = Cluster.of(cluster) if cluster is not None else source.cluster if known is None else known.cluster
        whole = Graph.of(graph) if graph is not None else source.read().graph if known is None else known.graph
        return replay(Problem.build(whole, devices), plan)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:7])} and {len(names) - 7} more"


def _typed(name: str, value: Any) -> str:
    """Returns an option as it is typed."""
    option = f"--{name.replace('_', '-')}"
    if value in (None, False):
        return f"no {option}"
    return option if value is True else f"{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"
