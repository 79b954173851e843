"""START HERE: a plan in the format of another tool, with the step as the tool runs it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gdp import files, notebook
from gdp.errors import InputError, prefixed
from gdp.export.adapt import AdaptedPlan, adapt
from gdp.export.export_target import ExportTarget, check_training
from gdp.export.layouts.target import CutStep, LayoutTarget, cut_step
from gdp.export.targets_by_name import find_layout_target, find_target
from gdp.models.shards import WHOLE, Shards
from gdp.models.source import ModelSource
from gdp.parallel.step import in_flight, layout_in_flight
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate
from gdp.simulator.throughput import Throughput

_HEADS = {  # tools that cut heads evenly: may several ranks have the same head of keys?
    **dict.fromkeys(("vllm", "sglang", "tensorrt-llm", "megatron"), True),
    **dict.fromkeys(("torchtitan", "transformers"), False),  # github.com/pytorch/torchtitan/issues/2574
}


@dataclass(frozen=True, eq=False)
class Exported:
    """A plan as another tool runs it: `content` is its file, `simulation` its step, which may not fit in memory."""

    target: ExportTarget | LayoutTarget
    step: AdaptedPlan | CutStep
    plan: Plan

    def __repr__(self) -> str:
        """Returns `Exported('torch-fsdp', 51.900 ms)`."""
        fits = "" if self.fits else ", does not fit"
        return f"Exported({self.target.name!r}, {notebook.milliseconds(self.step_time_ns)}{fits})"

    @cached_property
    def content(self) -> str:
        """The file of the tool."""
        if isinstance(self.step, AdaptedPlan):
            return self.step.content
        assert isinstance(self.target, LayoutTarget)
        return self.target.write(self.step)

    @property
    def simulation(self) -> Simulation:
        """The step of the tool, with what the tool holds."""
        return self.step.simulation

    @property
    def step_time_ns(self) -> int:
        """The step time in the tool."""
        return self.simulation.step_time_ns

    @cached_property
    def throughputs(self) -> tuple[Throughput, Throughput] | None:
        """The figures in the tool and in the plan of batches in flight; None for other plans."""
        plan, problem = self.plan, self.simulation.problem
        if plan.layout is None or not in_flight(plan.layout):
            return None
        own = simulate(problem, plan.placement, order=plan.order)
        one, other = (Throughput.of(each, layout_in_flight(plan.layout)) for each in (self.simulation, own))
        return one, other

    @property
    def fits(self) -> bool:
        """True if all devices have the memory."""
        return not self.simulation.missing_bytes.any()

    def save(self, path: str | Path) -> Path:
        """Writes the file of the tool, atomically. InputError if the step does not fit, or it cannot be written."""
        if not self.fits:
            raise InputError(f"{path}: is not written: the step does not fit as {self.target.name} runs it")
        files.write_bytes(path, self.content.encode())
        return Path(path)


def exported_by_name(problem: Problem, plan: Plan, name: str, source: ModelSource | None) -> Exported:
    """Returns `plan` for the tool called `name` without options, with its file; see `exported`."""
    target = target_for(plan, name)
    if isinstance(target, ExportTarget):
        problem = problem if "reserve" in plan.question.options else target.within_share(problem)
        target.read_units(problem)
    answer = exported(problem, plan, target, source)
    answer.content  # noqa: B018 - InputError for what the tool has no words for
    return answer


def target_for(plan: Plan, name: str) -> ExportTarget | LayoutTarget:
    """Returns the tool called `name`, without options, for a plan. InputError, with the plan's file, where it does not
    take its layout."""
    if (of_layouts := find_layout_target(name, is_cut=plan.layout is not None)) is not None:
        return of_layouts
    target = find_target(name)
    with prefixed(plan.path or "plan"):
        check_takes_layout(plan, target)
    return target


def exported(
    problem: Problem, plan: Plan, target: ExportTarget | LayoutTarget, source: ModelSource | None = None
) -> Exported:
    """Returns `plan`, which solves `problem`, for `target`; `source` is MODEL, where it is known. InputError, with the
    remedy, for what the target cannot run."""
    if plan.shards.shares:
        target = _of_shares(target, plan.shards)
    if source is not None and plan.shards.tensor > 1 and target.name in _HEADS:
        _check_heads(target.name, plan.shards.tensor, *source.num_heads)
    if isinstance(target, LayoutTarget):
        check_training(problem, target.name)
        step = cut_step(problem, plan, target.name, has_stages=target.has_stages, held_by=target.held_by, source=source)
        for key in ("expert", "context"):
            if getattr(step.layout.shards, key) > 1 and key not in target.degrees:
                raise InputError(f"{target.name}: has no {key} shards; export to torchtitan or megatron")
        if step.layout.shards.overlap and "overlap" not in target.degrees:
            raise InputError(f"{target.name}: waits for exchanges; place without overlap, or export to megatron")
        return Exported(target, step, plan)
    if source is not None and target.with_model is not None:
        is_cut = plan.shards != WHOLE and not plan.shards.shares
        target = target.with_model(source.sharded(plan.shards) if is_cut else source)
    if plan.shards.expert > 1 and target.with_experts is not None:
        target = target.with_experts(plan.shards)
    return Exported(target, adapt(problem, plan, target), plan)


def _of_shares(target: ExportTarget | LayoutTarget, shards: Shards) -> ExportTarget:
    if isinstance(target, LayoutTarget) or target.with_shares is None:
        remedy = f"export to llama-cpp, or place with tensor={shards.tensor} on equal cards"
        raise InputError(f"{shards} is not runnable today by {target.name}, whose shares are equal; {remedy}")
    return target.with_shares(shards.shares)


def _check_heads(name: str, num_ranks: int, num_queries: int | None, num_keys: int | None) -> None:
    """Raises InputError where the heads of MODEL cannot be cut evenly over ranks."""

    def is_taken(ranks: int, count: int | None, *, repeats: bool) -> bool:
        return count is None or count % ranks == 0 or (repeats and ranks % count == 0)

    fitting = [
        ranks
        for ranks in range(1, num_ranks + 1)
        if is_taken(ranks, num_queries, repeats=False) and is_taken(ranks, num_keys, repeats=_HEADS[name])
    ]
    if fitting[-1] < num_ranks:
        keys = f", {num_keys} of them of keys," if num_keys not in (None, num_queries) else ""
        remedy = f"place with tensor={fitting[-1]}" if fitting[-1] > 1 else "leave tensor out of --parallel"
        found = f"MODEL has {num_queries}{keys} for {num_ranks} ranks"
        raise InputError(f"{name}: cuts heads evenly, and {found}; {remedy}")


def check_takes_layout(plan: Plan, target: ExportTarget) -> None:
    """Raises InputError if the plan has a layout that a tool for one copy of the model does not take."""
    layout, shards = plan.layout, WHOLE if plan.layout is None else Shards.of_document(plan.layout)
    takes_experts = target.with_experts is not None and shards.expert == shards.num_ranks  # whole on each card
    is_more = bool(shards.sequence) or (shards.expert > 1 and not takes_experts) or shards.context > 1
    if shards.shares:
        _of_shares(target, shards)
        return
    if shards != WHOLE and (is_more or not target.takes_shards):
        options = plan.question.options
        is_training = not options.get("inference") and options.get("phase", "step") == "step"
        tools = "torch-fsdp, torchtitan or megatron" if is_training else "vllm, sglang or tensorrt-llm"
        remedy = f"export to {tools}"
        if target.takes_shards and not is_training:
            remedy = "place with --parallel tensor alone"
        raise InputError(
            f"has ops cut over {shards.num_ranks} cards ({shards}), which {target.name} does not take; {remedy}, or "
            "leave tensor out of --parallel"
        )
    has_replicas = layout is not None and layout.get("data") != shards.samples
    if layout is not None and in_flight(layout) and has_replicas:
        if not target.takes_replicas:
            raise InputError(
                f"has {layout['data']} replicas in flight, which {target.name} does not take; export to vllm, or place "
                f"with --for {target.name}, without --batches"
            )
    elif layout is not None and (
        layout.get("data") != shards.samples or layout.get("recompute") != "none" or "offload" in layout
    ):
        raise InputError(
            f"has replicas, recomputed blocks or activations on the host, which {target.name} does not take; "
            "export to torch-fsdp, torchtitan or megatron, or place with --parallel none"
        )
