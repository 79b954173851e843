"""Shows exported plans: the loss against the plan, the devices, the file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gdp.export.adapt import AdaptedPlan
from gdp.export.exported_plan import Exported, exported_by_name
from gdp.export.layouts.target import CutStep, LayoutTarget
from gdp.graph import Graph, GraphSource
from gdp.notebook import digits
from gdp.planning.plan_source import PlanSource, simulation_of
from gdp.report import sentences
from gdp.report.console import device_report
from gdp.report.documents import cluster_document, graph_document
from gdp.report.tables import format_ms
from gdp.simulator.plan import Plan

_OF_PHASES = {"decode": "a token", "prefill": "a first token"}  # what a step of serving makes
_WORTH_A_SEARCH = 0.01  # a loss that is more than what two searches of equal budget differ by


def write_export(plan: Plan, to: str, path: str | Path | None = None, graph: GraphSource | None = None) -> Exported:
    """Returns the plan for the tool called `to`, as `gdp export --to` has them, and writes its file to `path` if given.

    A plan from a file reads its graph and devices again; `graph` is another to be taken. InputError, with the remedy,
    for what the tool cannot run, and where the step does not fit."""
    problem = simulation_of(plan, None if graph is None else Graph.of(graph)).problem
    answer = exported_by_name(problem, plan, to, PlanSource(plan).known_model)
    if path is not None:
        answer.save(path)
    return answer


def export_report(answer: Exported, path: Path) -> Iterator[RenderableType]:
    """Yields the answer of `gdp export`."""
    step, target, problem = answer.step, answer.target, answer.simulation.problem
    what = str(step.layout) if isinstance(step, CutStep) else f"{step.units.num_units:,} units"
    yield Text(f"{problem.graph.name} on {problem.cluster.name} for {target.name}: {what}")
    yield Text(loss_sentence(answer), style="bold")
    if isinstance(step, AdaptedPlan):
        if step.program_order_ns is not None and step.program_order_ns != step.step_time_ns:
            yield Text(f"With ops started in the order of the program a step takes {format_ms(step.program_order_ns)}.")
        if step.is_offloaded:
            yield Text("Modules that do not fit keep their weights on the CPU and fetch them when they start.")
        elif step.loss > _WORTH_A_SEARCH:
            yield Text(f"gdp place --for {target.name} searches only for plans that {target.name} can express.")
    yield from map(Text, _notes(answer))
    yield ""
    yield from device_report(step.simulation, tells_held=not (isinstance(step, CutStep) and step.held.sentence))
    yield ""
    yield Text(f"Written to {path}")
    content = answer.content.strip()
    if isinstance(step, AdaptedPlan) and "\n" not in content and len(content) <= 200:
        yield Text(content)


def loss_sentence(answer: Exported) -> str:
    """Returns `module level: 341.2 ms a step instead of 320.1 ms (6.6 % slower)`; of batches in flight for each."""
    what = _OF_PHASES.get(str(answer.plan.question.options.get("phase")), "a step")
    times_ns, among = (answer.step_time_ns, answer.step.plan_step_time_ns), ""
    if answer.throughputs is not None:
        figures = answer.throughputs[0]
        times_ns = figures.time_per_batch_ns, answer.throughputs[1].time_per_batch_ns
        made, what = what if what != "a step" else "each", "a group" if what == "a token" else "a batch"
        among = f"; with {figures.num_batches} in flight {made} takes {format_ms(figures.latency_ns)}"
    loss = times_ns[0] / max(times_ns[1], 1) - 1
    word = "slower" if loss > 0 else "faster"
    against = (
        f" instead of {format_ms(times_ns[1])} ({digits(abs(100 * loss), 2)} % {word})" if loss else ", as in the plan"
    )
    return f"{answer.target.level}: {format_ms(times_ns[0])} {what}{against}{among}"


def _notes(answer: Exported) -> list[str]:
    """Returns sentences on what the tool does otherwise."""
    step, target = answer.step, answer.target
    if isinstance(step, AdaptedPlan):
        return step.notes
    assert isinstance(target, LayoutTarget)
    refused = [
        f"{held.sentence} So {sentences.lacking(step.problem.cluster, simulation.missing_bytes)}; "
        f"{' '.join(step.held.options)} is written instead."
        for held, simulation in step.refused
    ]
    return [*refused, *target.notes(step)]


def export_document(answer: Exported, path: Path | None) -> dict[str, Any]:
    """Returns the answer of `gdp export --json`; `path` is None if nothing fits and nothing was written."""
    step, simulation, target = answer.step, answer.simulation, answer.target
    own: dict[str, Any]
    if isinstance(step, CutStep):
        own = {"layout": step.layout.document(), "devices": step.devices.tolist(), "moved_ops": step.num_moved}
    else:
        own = {
            "offloads": step.is_offloaded,
            "num_units": step.units.num_units,
            "program_order_step_time_ns": step.program_order_ns,
        }
    return {
        "graph": graph_document(step.problem.graph if isinstance(step, CutStep) else step.graph),
        "cluster": cluster_document(simulation.problem.cluster),
        "target": target.name,
        "level": target.level,
        **own,
        "status": "ok" if answer.fits else "infeasible",
        "step_time_ns": answer.step_time_ns,
        "plan_step_time_ns": step.plan_step_time_ns,
        "loss": answer.step_time_ns / max(step.plan_step_time_ns, 1) - 1,
        "throughput": None if answer.throughputs is None else answer.throughputs[0].document(),
        "peak_memory_bytes": simulation.peak_memory_bytes.tolist(),
        "busy_fraction": simulation.busy_fraction.tolist(),
        "host_wait_fraction": simulation.host_wait_fraction.tolist(),
        "content": answer.content,
        "path": None if path is None else str(path),
        "notes": _notes(answer),
    }


def does_not_fit(answer: Exported) -> str:
    """Returns one line with the devices that are too small and the bytes that they lack."""
    step, target = answer.step, answer.target
    lacking = sentences.lacking(step.simulation.problem.cluster, step.simulation.missing_bytes)
    if isinstance(step, CutStep):
        lacking += f" ({step.held.sentence.rstrip('.')})" if step.held.sentence else ""
        remedy = "place with more micro-batches, with zero=3 or recompute=blocks, or"
    else:
        lacking += "" if step.problem.graph is step.graph else f" with {target.name}'s own cache (--ctx)"
        remedy = f"place with --for {target.name}, or" if step.target.offload is None else ""
    return f"nothing fits in memory with {target.level}: {lacking}; {remedy} add devices or memory".replace(";  ", "; ")
