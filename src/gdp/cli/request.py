"""Reads and checks the question to `gdp place`: the model, the devices, the options of the search."""

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gdp import files
from gdp.budget import Budget, Clock, latest_s, search_s
from gdp.cli.inputs import read_graph
from gdp.cli.shared import log, refuse_beside
from gdp.cluster import Cluster
from gdp.costs.op_times import unused_names
from gdp.errors import InputError, prefixed
from gdp.export.export_target import ExportTarget
from gdp.export.exportable_plan import answer_for
from gdp.export.targets_by_name import server_units, serving_target
from gdp.graph import Graph
from gdp.models.measured_times import check_runtimes
from gdp.models.model import Model, Reading
from gdp.models.shards import WHOLE
from gdp.models.source import ModelSource
from gdp.parallel.layout import NONE, Layout
from gdp.planning import plan_cache
from gdp.report.progress import live
from gdp.search.place import answer
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.search.question import Solution
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Asked
from gdp.simulator.simulate import default_threads


@dataclass(frozen=True, eq=False, kw_only=True)
class PlaceRequest:
    """Holds the options of `gdp place`, parsed."""

    source: ModelSource
    devices: str
    cluster: Cluster
    constraints: Constraints
    parallel: Layout | str | None = None  # None: any layout where that is possible
    batches: int | None = None
    requests: float | None = None  # per second, at which a server is asked about
    budget: Budget
    options: SearchOptions
    times: Path | None = None
    target: ExportTarget | None = None
    is_for_servers: bool = False  # the target is one that servers run, which nobody asked for
    with_cache: bool = False
    with_advice: bool = False
    out: Path | None = None
    json: bool = False
    asked: Asked  # what a plan file says
    began_s: float = field(default_factory=time.monotonic)  # when the budget began, by `time.monotonic`
    latest_s: float = math.inf  # when all files are to be written

    @property
    def model(self) -> str:
        """MODEL, as it is named in messages."""
        return self.source.text

    @property
    def reading(self) -> Reading:
        """The options for reading MODEL."""
        return self.source.reading

    def read(self) -> Model:
        """Reads the model's graph, with measured times if --times has some."""
        return read_graph(self.source)

    @property
    def can_split(self) -> bool:
        """True if the model can be read anew with its batch split."""
        return not self.source.is_file

    @property
    def options_of_more_sequences(self) -> set[str]:
        """The options for more sequences in a decode step that this request takes as well."""
        is_for_target = self.target is not None and not self.is_for_servers
        if is_for_target or self.options.placer != "auto" or self.options.checkpoint is not None:
            return set()
        takes_sweep = self.requests is None and self.times is None and self.reading.batch is None
        takes = {"--sweep": takes_sweep, "--batches": self.parallel in (None, NONE)}
        return {option for option, is_taken in takes.items() if is_taken}

    def check(self, sweep: str | None) -> None:
        """Raises InputError for options that say something else than --batches, --parallel or --requests."""
        if self.requests is not None:
            if self.reading.serving.phase != "decode" or "prompt=" not in self.model:
                raise InputError(
                    "--requests: are served by a decoder; add --phase decode, and the prompt of one: hf:DIR?prompt=1024"
                )
            if not 0 < self.requests < math.inf:
                raise InputError(f"--requests is {self.requests}; a rate per second above 0 is expected")
            refuse_beside("--requests", {"--sweep": sweep is not None, "--parallel": self.parallel is not None})
        if self.times is not None:
            check_runtimes(self.cluster, is_trained=self.reading.training)
        has_layout = self.parallel not in (None, "none")
        others = {"--placer": self.options.placer != "auto", "--for": self.target is not None}
        if self.batches is not None:
            if self.reading.microbatches > 1:
                raise InputError("--microbatches: accumulates gradients, and --batches serves; leave one of them out")
            own = {"--checkpoint": self.options.checkpoint, "--robust": self.options.robust, "--sweep": sweep}
            more = {"--parallel": has_layout} | {name: value is not None for name, value in own.items()}
            refuse_beside("--batches", {**more, **others})
        elif has_layout and not (isinstance(self.parallel, Layout) and self.parallel.of_groups.is_whole):
            _check_reading_for_layouts(self.reading, is_file=self.source.is_file)
            refuse_beside("--parallel", others)
        elif self.target is not None and _has_shards(self.parallel) and not self.target.takes_shards:
            raise InputError(
                f"--parallel {self.parallel}: {self.target.name} takes no ops that are cut over cards; leave --for or "
                "tensor out"
            )

    def question(self, model: Model) -> PlaceQuestion:
        """Returns what is asked about MODEL, read as `model`. InputError for what a search would be in vain with."""
        with self.named(), live(f"preparing {model.graph.name} on {self.cluster.name}"):
            parallel = NONE if self.parallel is None and self.target is not None else self.parallel
            limits, options = self.constraints, self.options
            question = PlaceQuestion.of(self.source, self.cluster, limits, parallel, self.batches, options, model)
            problem = question.problem  # bad constraints are better known now than after a search
            if self.target is not None:
                self.target.read_units(problem)
        return question

    def opened(self, model: Model) -> "tuple[PlaceRequest, PlaceQuestion]":
        """Returns the request and its question about MODEL, read as `model`, for the tool that is to run the answer."""
        request = self.under_measured_noise(model.noise)
        return request.for_servers(request.question(model))

    @property
    def find(self) -> Callable[[PlaceQuestion, Clock], Solution]:
        """The search for the answer of `auto`: among the plans that the target can express, if there is one."""
        return answer if self.target is None else partial(answer_for, self.target)

    def for_servers(self, question: PlaceQuestion) -> "tuple[PlaceRequest, PlaceQuestion]":
        """Returns the request and its question for what servers run, layers in order, unless it asks for else."""
        layout = self.parallel if isinstance(self.parallel, Layout) else None
        has_shards = layout is not None and layout.of_groups.is_whole and not layout.shards.shares
        asks_else = self.target is not None or self.times is not None or not (self.parallel is None or has_shards)
        if not self.reading.serving.has_cache or asks_else or self.options.placer != "auto" or self.options.checkpoint:
            return self, question
        target = serving_target(question.problem)
        if target is None:
            return self, question
        if question.num_batches:
            return self, replace(question, groups_of=server_units)
        return replace(self, target=target, is_for_servers=True), question

    def under_measured_noise(self, noise: float | None) -> "PlaceRequest":
        """Returns the request with the noise of measured op times, unless --robust gives another."""
        if noise is None or self.options.robust is not None:
            return self
        return replace(self, options=replace(self.options, robust=min(round(noise, 4), 0.49)))

    def later(self, seconds: float) -> "PlaceRequest":
        """Returns the request whose budget begins `seconds` later: to capture and to compile come on top of it."""
        return replace(self, began_s=self.began_s + seconds)

    def within_budget(self, written_s: float) -> "PlaceRequest":
        """Returns the request with the budget that is left: seconds include reading a graph file, and writing.

        Writing takes `written_s`. At least half of the budget stays for the answer."""
        total_s = self.budget.seconds
        if total_s is None:
            return self
        left = Budget(seconds=search_s(total_s, time.monotonic() - self.began_s, written_s))
        return replace(self, budget=left, latest_s=self.began_s + latest_s(total_s))

    def cache_entry(self, graph: Graph, layouts: Sequence[object] = ()) -> Path | None:
        """Returns the file that keeps the answer; None with --no-cache. `layouts`: the layouts that are asked for."""
        if not self.with_cache:
            return None
        checkpoint = self.options.checkpoint
        policy = None if checkpoint is None else hashlib.sha256(files.read_bytes(checkpoint)).hexdigest()
        options = {
            "placer": self.options.placer,
            "layouts": list(layouts),
            "budget": str(self.budget),
            "policy": policy,
            "advice": self.with_advice,
            "target": None if self.target is None else [self.target.name, *self.target.options],
            "seed": self.options.seed,
            "robust": self.options.robust,
            "threads": self.options.num_threads or default_threads(),
        }
        return plan_cache.entry(graph, self.cluster, self.constraints, options)

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Puts the model and the devices in front of the message of an error."""
        return prefixed(f"{self.model} on {self.devices}")

    def say_notes(self, graph: Graph, cluster: Cluster) -> None:
        """Logs what may not be as the user expects."""
        if self.is_local:
            log("gdp: note: devices as they are now; gdp devices detect shows them, and which figures are estimates")
        for sentence in unused_names(graph, cluster):
            log(f"gdp: note: {sentence}")
        if self.times is not None and not any(graph.times_ns):
            kinds = ", ".join(sorted({device.kind for device in self.cluster.devices}))
            log(f"gdp: note: {self.times} has no time of these ops on {kinds} with this PyTorch: all are modelled")

    @property
    def is_local(self) -> bool:
        """True for the devices of this machine."""
        return self.devices.strip() == "local"


def _has_shards(parallel: Layout | str | None) -> bool:
    return isinstance(parallel, Layout) and parallel.shards != WHOLE


def _check_reading_for_layouts(reading: Reading, *, is_file: bool) -> None:
    if not is_file and reading.microbatches > 1:
        raise InputError("--microbatches: --parallel has a number of its own; write --parallel microbatches=M")
    if not reading.training or reading.serving.has_cache:
        raise InputError(
            "--parallel: layouts cut training steps; leave --inference and --phase out, or serve with --batches N"
        )
