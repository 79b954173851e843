"""A request to `gdp place` whose MODEL is read: what is asked about it, and the files of the answer."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import log, warm_up
from gdp.graph import Graph
from gdp.models.model import Model
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.parallel.step import Step
from gdp.report.progress import live
from gdp.search.place_question import PlaceQuestion
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem


@dataclass(frozen=True, eq=False)
class OpenRequest:
    """A request with its model and its question."""

    request: PlaceRequest
    model: Model
    question: PlaceQuestion
    files: PlanFiles

    @classmethod
    def of(cls, request: PlaceRequest) -> "OpenRequest":
        """Reads MODEL and checks what is asked about it. InputError for what a search would be in vain with."""
        files = PlanFiles.of(request)
        files.check()
        began = time.monotonic()
        model = request.read()
        request = request.later(time.monotonic() - began if model.is_captured else 0.0)
        request, question = request.opened(model)
        request.say_notes(model.graph, question.cluster)
        # a plan of batches in flight is of another graph than the model's
        return cls(request, model, question, files if question.num_batches else files.sparing_others(model.graph))

    def cache_entry(self) -> Path | None:
        """Returns the file that keeps the answer; None: it is not kept."""
        question, dimension = self.question, self.request.reading.batch_dim
        if question.num_batches:
            return None
        if question.parts is not None:
            layouts = [str(question.layout or AUTO), question.parts.batch_size, dimension]
            return self.request.cache_entry(question.graph, layouts)
        return self.request.cache_entry(question.graph, [NONE] if self.request.parallel == NONE else question.degrees)

    def problem_of(self, plan: Plan) -> Problem:
        """Returns the problem that a plan of this question solves."""
        layout = None if plan.layout is None else Layout.of_document(plan.layout)
        asked = self.question if layout is None else self.question.sharded(layout.shards)
        if layout is None or asked.parts is None or layout.of_groups.is_whole:
            return asked.problem
        graph = Step.of_document(asked.parts.exact, plan.layout or {}).graph
        return Problem.build(graph, asked.cluster, asked.constraints)

    def prepared(self) -> "OpenRequest":
        """Does what a search needs before its clock begins; returns the request with the budget that is left."""
        question, began = self.question, time.monotonic()
        name = question.graph.name
        with live("loading the placer" if question.parts is None else f"reading a part of the batch of {name}"):
            question.prepare()
        read_s = time.monotonic() - began
        policy = () if question.options.checkpoint is None else ("gdp-zero-shot",)
        compiled_s = warm_up((question.options.placer, *policy), question.problem)
        num_parts = 1 if question.layout is None else question.layout.num_parts
        written_s = self.files.written_s(question.problem.num_ops * num_parts)
        return replace(self, request=self.request.later(read_s + compiled_s).within_budget(written_s))

    @property
    def amounts(self) -> dict[str, int]:
        """The samples and tokens of a step, those that are known; none for batches in flight, which tell their own."""
        return {} if self.question.num_batches else self.request.source.amounts(self.model.served)

    def is_offloaded(self, plan: Plan) -> bool:
        """Returns whether `plan` is of another graph, with weights on a CPU that a target fetches."""
        is_other = plan.num_ranks == 1 and plan.graph != self.model.graph.fingerprint
        return self.request.target is not None and is_other

    def files_of(self, plan: Plan, graph: Graph) -> PlanFiles:
        """Returns the files for `plan`, which is of `graph`; an offloaded graph is nowhere else."""
        if self.question.num_batches:
            return self.files.sparing_others(graph)
        target = self.request.target
        if target is None or not self.is_offloaded(plan):
            return self.files
        files = self.files.with_graph()
        log(
            f"gdp: note: weights that do not fit stay on a CPU, and {target.name} fetches them module by module; "
            f"the plan is of the graph that does so, {files.graph}"
        )
        return files
