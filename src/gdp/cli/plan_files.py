"""The files that `gdp place` writes: their names, which spare plans of other graphs, and what became of them."""

import contextlib
import math
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType

from gdp.budget import Effort
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import check_writable, log
from gdp.errors import InputError
from gdp.export import llama_cpp, servers
from gdp.export.export_target import is_cpu
from gdp.export.exported_plan import exported_by_name
from gdp.export.layouts import torch_fsdp, torchtitan
from gdp.export.targets_by_name import find_target
from gdp.graph import Graph
from gdp.models.model import GGUF, HUGGING_FACE
from gdp.models.model_text import is_onnx
from gdp.models.serving import ServedStep
from gdp.models.shards import WHOLE
from gdp.parallel.layout import NONE, Layout
from gdp.parallel.step import in_flight
from gdp.planning.plan_cache import KeptAnswer
from gdp.planning.plan_directory import files_beside
from gdp.report.page import write_page
from gdp.report.page_data import PageData
from gdp.report.progress import StatusLine, live
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation
from gdp.stop import skip_on_interrupt

_MANY_OPS = 50_000  # whose graph is written in columns, and the report if there is time: it takes half a second
_MOST_TRIED_OPS = 5_000  # of a copy, which is cut by styles once more; untuned
_TAKES_SECONDS = "that takes seconds"  # after an interrupt
_MANY_DEVICES = 128  # whose links take as long: 16,000 of them


@dataclass(frozen=True)
class PlanFiles:
    """Names the files to write; None: not asked for. `written` has those that are whole."""

    plan: Path
    graph: Path | None
    cluster: Path | None
    report: Path | None
    are_asked_for: bool  # by --out, which may overwrite
    note: str = ""  # why names are numbered
    written: list[Path] = field(default_factory=list)
    effort: Effort = field(default_factory=Effort)

    @classmethod
    def of(cls, request: PlaceRequest) -> "PlanFiles":
        """Returns the names for --out, or those in the current directory."""
        if request.out is None:
            # a graph with measured times, or costs of the user's, is nowhere else
            is_elsewhere = request.times is None and request.reading.op_costs is None
            files = cls(Path("plan.json"), None, None, None, False)
            return files if is_elsewhere else files.with_graph()
        plan = request.out / "plan.json"
        in_json, _, cluster = files_beside(plan)
        return cls(plan, in_json, cluster, request.out / "report.html", True)

    def with_graph(self) -> "PlanFiles":
        """Returns the same files with the graph, beside the plan."""
        return replace(self, graph=self.graph or files_beside(self.plan)[0])

    def suited_to(self, problem: Problem) -> "PlanFiles":
        """Returns the files of a plan for `problem`: large graphs in columns, and no cluster of very many devices."""
        files = self
        if self.are_asked_for and self.graph is not None and problem.num_ops > _MANY_OPS:  # else names spare others
            files = replace(self, graph=files_beside(self.plan)[1])
        if files.cluster is not None and problem.num_devices > _MANY_DEVICES:
            log(f"gdp: note: {files.cluster} is not written: it is long")
            return replace(files, cluster=None)
        return files

    def written_s(self, num_ops: int) -> float:
        """Returns about how long it takes to write them for a step of `num_ops`."""
        return self.effort.written_s(num_ops, has_graph=self.graph is not None, has_report=self.report is not None)

    def check(self) -> None:
        """Raises InputError if one cannot be written."""
        for path in filter(None, (self.plan, self.graph, self.cluster, self.report)):
            check_writable(path)

    def sparing_others(self, graph: Graph) -> "PlanFiles":
        """Returns names that overwrite nothing of another graph: plan-2.json, ... where the user named no directory."""
        if self.are_asked_for:
            return self
        first: list[Path] = []
        for number in count(1):
            suffix = "" if number == 1 else f"-{number}"
            plan = Path(f"plan{suffix}.json")
            kept = None if self.graph is None else files_beside(plan)[0]
            others = _others(plan, kept, graph)
            if not others:
                break
            first = others if number == 1 else first
        note = ""
        if number > 1:
            verb = "is not of this graph and stays" if len(first) == 1 else "are not of this graph and stay"
            note = f"gdp: note: {' and '.join(map(str, first))} {verb}; this plan will be {plan}"
        return PlanFiles(plan, kept, None, None, False, note)

    def write(
        self,
        answer: KeptAnswer,
        simulation: Simulation,
        stop: threading.Event | None = None,
        latest_s: float = math.inf,
        amounts: Mapping[str, int] = MappingProxyType({}),
        served: ServedStep | None = None,
    ) -> InputError | None:
        """Writes all of them, the plan first; returns the error that ended it, if any. After `stop` no files are
        written that would take seconds, and no long report that would end after `latest_s`, by `time.monotonic`; notes
        say which. `amounts` are the samples and tokens of a step, or it is a `served` one."""
        if self.note:
            log(self.note)
        problem = simulation.problem
        data = PageData(answer.plan, simulation, answer.progress, answer.advice, None, answer.layouts, amounts, served)
        steps: list[tuple[Path | None, Callable[[Path], None]]] = [
            (self.plan, answer.plan.save),
            (self.graph, problem.graph.save),
            (self.cluster, problem.cluster.save),
            (self.report, lambda path: write_page(path, data)),
        ]
        line = StatusLine("")
        try:
            with live(line):
                for path, write in steps:
                    if path is None:
                        continue
                    is_long = path in (self.graph, self.report) and problem.num_ops > _MANY_OPS
                    reason = ""
                    if is_long and stop is not None and stop.is_set():
                        reason = _TAKES_SECONDS
                    elif (
                        is_long
                        and path == self.report
                        and time.monotonic() + self.effort.write_report.seconds(problem.num_ops) > latest_s
                    ):
                        reason = "that takes longer than the budget has"
                    else:
                        line.say(f"writing {path}")
                        skip_on_interrupt(stop if is_long else None, partial(self._write, write, path))
                        reason = "" if path in self.written else _TAKES_SECONDS
                    if reason:
                        log(f"gdp: note: {path} is not written: {reason}")
        except InputError as error:
            return error
        return None

    def _write(self, write: Callable[[Path], None], path: Path) -> None:
        write(path)
        self.written.append(path)

    @property
    def shown(self) -> list[Path]:
        """The files that the answer names."""
        return [path for path in self.written if path in (self.plan, self.report)]

    def next_command(self, request: PlaceRequest, plan: Plan) -> str:
        """Returns the command to go on with, which needs nothing but the plan: the export for its likely tool, which
        takes a plan with a layout."""
        target, plan_file = request.target, str(self.plan)
        if request.is_for_servers and plan.num_ranks > 1:  # on groups, which other servers run
            target = None
        if target is None:
            tools = _likely_tools(request, plan)
            tool = next((each for each in tools if plan.layout is None or _takes(each, request, plan)), None)
            options: tuple[str, ...] = ()
        elif request.is_for_servers and request.reading.serving.cache_element_bytes not in servers.CACHE_BYTES:
            tool, options = llama_cpp.NAME, ()
        else:
            tool, options = target.name, target.options
        if tool is not None and plan.layout is None and "reserve" not in request.asked.options:
            options += _own_reserve(tool, plan)
        return shlex.join(
            ["gdp", "simulate", plan_file] if tool is None else ["gdp", "export", plan_file, "--to", tool, *options]
        )


def _own_reserve(tool: str, plan: Plan) -> tuple[str, ...]:
    """Returns the option that gives a tool the memory of the plan, where the tool takes less by default."""
    assert plan.problem is not None
    memory = [device.memory_bytes for device in plan.problem.cluster.devices]
    free = 1 - float((plan.peak_memory_bytes / memory).max())
    return ("--reserve", f"{math.floor(100 * free)}%") if free < find_target(tool).reserve else ()


def _takes(tool: str, request: PlaceRequest, plan: Plan) -> bool:
    """Returns whether a tool runs the plan as it is. False as well where it takes long to find out: a model of many
    layers is run on parts, as `parallelize_module` cuts it."""
    assert plan.problem is not None
    assert plan.layout is not None
    layout = Layout() if in_flight(plan.layout) else Layout.of_document(plan.layout)
    num_ops = plan.problem.num_ops // layout.num_parts
    if tool == torch_fsdp.NAME and layout.shards != WHOLE and num_ops > _MOST_TRIED_OPS:
        return False
    with contextlib.suppress(InputError):
        return exported_by_name(plan.problem, plan, tool, request.source).fits
    return False


def _likely_tools(request: PlaceRequest, plan: Plan) -> list[str]:
    """Returns the names of tools that run plans of such a model, the likeliest first; none where several are as
    likely."""
    text, reading, cut = request.model, request.reading, plan.layout
    if cut is not None and in_flight(cut) and cut["data"] > 1:  # a server for each replica
        return ["vllm"] * (reading.serving.has_cache and GGUF not in text)
    if cut is not None and not in_flight(cut):
        if not reading.training:  # on groups of cards
            return ["vllm"] * (text.startswith(HUGGING_FACE) and GGUF not in text)
        assert plan.problem is not None
        layout = Layout.of_document(cut)
        num_places = layout.stages or len(set(cut.get("places") or (0,)))
        is_on_cards = not is_cpu(plan.problem)[plan.placement].any()
        if num_places > 1 or not is_on_cards or layout.offload != NONE or layout.shards.shares:
            return []
        has_own_models = [torchtitan.NAME] * (layout.shards != WHOLE and text.startswith(HUGGING_FACE))
        return [torch_fsdp.NAME, *has_own_models]
    if text.startswith(HUGGING_FACE) and not reading.training:
        is_served = reading.serving.has_cache
        return ["llama-cpp" if GGUF in text else "vllm" if is_served else "hf-device-map"]
    return ["onnxruntime"] * is_onnx(text)


def _others(plan: Path, kept: Path | None, graph: Graph) -> list[Path]:
    """Returns the files that are there and have something else than `graph` or a plan of it. A plan with its own graph
    of the same name beside it, as with other costs or measured times, may be replaced."""
    read, known = None, None
    with contextlib.suppress(InputError):  # something else of the user's
        read = Plan.load(plan)
    if kept is not None:
        with contextlib.suppress(InputError):
            known = Graph.load(kept)
    if known is not None and read is not None and (known.name, known.fingerprint) == (graph.name, read.graph):
        return []
    planned = None if read is None else read.graph if read.layout is None else read.layout.get("whole")
    others = [plan] if plan.exists() and planned != graph.fingerprint else []
    is_other = kept is not None and kept.exists() and (known is None or known.fingerprint != graph.fingerprint)
    return [*others, kept] if kept is not None and is_other else others
