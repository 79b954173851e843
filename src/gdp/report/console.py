"""Shows answers in a terminal: sentences and tables. Step times in ms, sizes in GiB."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gdp.cluster import Cluster
from gdp.costs.op_times import count_time_sources
from gdp.graph import Graph
from gdp.graph.parameter_bytes import ParameterBytes
from gdp.models.serving import ServedStep
from gdp.notebook import format_gib
from gdp.parallel.layout import Layout
from gdp.parallel.step import in_flight
from gdp.planning.advice import Advice
from gdp.planning.compare import Comparison
from gdp.planning.remedies import Remedy, held_bytes, leaner_updates
from gdp.report import sentences
from gdp.report.advice_answer import advice_report
from gdp.report.batches_answer import in_flight_of, of_throughput
from gdp.report.limits import Limits
from gdp.report.tables import MOST_DEVICES, SHOWN_OF_MANY, format_ms, format_range, new_table
from gdp.report.timeline_text import TimelineText
from gdp.search.place_question import PlaceQuestion
from gdp.simulator.plan import Plan
from gdp.simulator.simulate import Simulation
from gdp.simulator.throughput import Throughput


def place_report(
    plan: Plan,
    simulation: Simulation,
    unknown_costs: Mapping[str, int],
    written: str,
    next_command: str,
    advice: Advice | None = None,
    serving: str = "",
    amounts: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[RenderableType]:
    """Yields the answer of `gdp place`, from the headline to the next command. `serving` is a sentence on the speed of
    serving, `amounts` are the samples and tokens of a step of another kind."""
    assert plan.search is not None
    graph, cluster = simulation.problem.graph, simulation.problem.cluster
    sizes = f"{graph.num_ops:,} ops, {graph.num_tensors:,} tensors"
    plural = "" if plan.search.simulations == 1 else "s"
    searched = f"{plan.search.simulations:,} simulation{plural} in {plan.search.seconds:.1f} s, seed {plan.seed}"
    count = sentences.num_microbatches(simulation)
    title = f"{graph.name} in {count} micro-batches" if count > 1 else graph.name
    yield Text(f"{title} ({sizes}) on {cluster.name}, placer {plan.placer}: {searched}")
    yield Text(sentences.headline(plan, plan.search.baselines, count, simulation.step_range), style="bold")
    if serving:
        yield Text(serving, style="bold")
    for sentence in (*sentences.of_speed(simulation, amounts), *sentences.of_search(plan.search, simulation)):
        yield Text(sentence)
    yield Text(sentences.of_bound(plan.step_time_ns, plan.lower_bound_ns, count, sentences.num_replicas(simulation)))
    if plan.search.baselines:
        yield ""
        yield _baselines(plan)
    yield ""
    yield from device_report(simulation, searched=sentences.is_searched(plan))
    yield ""
    yield TimelineText(simulation)
    if advice is not None:
        yield ""
        yield from advice_report(advice, simulation)
    if unknown_costs:
        yield Text(_unknown(unknown_costs))
    yield from _time_sources(graph, cluster)
    yield ""
    yield Text(f"Plan written to {written}" if written else "The plan is not written.")
    if next_command:
        yield Text(f"Next: {next_command}")


def device_report(
    simulation: Simulation, *, searched: bool = False, tells_held: bool = True
) -> Iterator[RenderableType]:
    """Yields a table of the devices, the limit of the step, and devices that are nearly full or hold no ops.
    `searched`: whether the plan is from a search over all devices. `tells_held`: whether held memory is told."""
    problem = simulation.problem
    counts = np.bincount(simulation.placement, minlength=problem.num_devices)
    devices = problem.cluster.devices
    num_shown = len(devices) if len(devices) <= MOST_DEVICES else SHOWN_OF_MANY
    sizes = zip(simulation.peak_memory_bytes.tolist(), problem.memory_limit_bytes.tolist(), strict=True)
    rows = [
        (device.name, device.kind, f"{busy:.1%}", f"{count:,}", *map(format_gib, pair))
        for device, busy, count, pair in zip(devices, simulation.busy_fraction, counts, sizes, strict=True)
    ]
    yield new_table("device", "kind", ">busy", ">ops", ">peak memory", ">limit", rows=rows[:num_shown])
    if num_shown < len(devices):
        busy, peaks = simulation.busy_fraction[num_shown:], simulation.peak_memory_bytes[num_shown:].tolist()
        yield Text(
            f"and {len(devices) - num_shown} more devices: busy {busy.min():.1%} to {busy.max():.1%}, "
            f"peak memory {format_gib(min(peaks))} to {format_gib(max(peaks))}; --json has all"
        )
    yield ""
    yield Text(str(Limits.of(simulation)))
    for sentence in (
        *sentences.of_groups(problem),
        *(sentences.of_held_memory(problem.graph) if tells_held else ()),
        sentences.of_full_devices(simulation),
        sentences.of_updates(simulation),
        sentences.of_empty_devices(simulation, searched=searched),
    ):
        if sentence:
            yield Text(sentence)


def simulate_report(
    headline: str,
    simulation: Simulation,
    bound_ns: int,
    served: ServedStep | None = None,
    throughput: Throughput | None = None,
) -> Iterator[RenderableType]:
    """Yields the answer of `gdp simulate`."""
    yield Text(headline)
    if throughput is not None:
        yield Text(of_throughput(throughput), style="bold")
    if served is not None:
        flight = None if throughput is None else in_flight_of(throughput, simulation)
        speed = served.sentence(simulation.step_time_ns) if flight is None else served.sentence_in_flight(*flight)
        yield Text(speed, style="bold")
    yield from map(Text, sentences.of_speed(simulation))
    counts = sentences.num_microbatches(simulation), sentences.num_replicas(simulation)
    yield Text(sentences.of_bound(simulation.step_time_ns, bound_ns, *counts))
    yield Text("The plan fits." if simulation.feasible else "The plan is not feasible.")
    yield ""
    yield from device_report(simulation)


def compare_report(comparison: Comparison, served: ServedStep | None = None) -> Iterator[RenderableType]:
    """Yields the table of `gdp compare`: medians over seeds, the best in bold; the speed of a `served` step too."""
    best_ns = min((row.step_time_ns for row in comparison.rows if row.step_time_ns is not None), default=None)
    count = comparison.num_batches
    per_batch = f", and per batch: {count} are in flight" if count else ""
    speed = () if served is None else (">tokens per second",)
    rest = ">best seed", ">worst seed", ">above bound", ">seconds", ">simulations"
    table = new_table("placer", "status", ">step time", *speed, *rest)
    for row in comparison.rows:
        times = [time_ns for time_ns in row.step_time_ns_by_seed if time_ns is not None]
        bound_ns = comparison.bound_of(row)
        above = None if row.step_time_ns is None or not bound_ns else row.step_time_ns / bound_ns - 1
        table.add_row(
            row.placer,
            _status(row.status),
            "-" if row.step_time_ns is None else format_range(row.step_time_ns, row.step_range),
            *(() if served is None else (served.rate_text(row.step_time_ns),)),
            format_ms(min(times, default=None)),
            format_ms(max(times, default=None)),
            "-" if above is None else f"{above:.1%}",
            f"{row.seconds:.2f}",
            f"{row.simulations:,}",
            style="bold" if row.step_time_ns is not None and row.step_time_ns == best_ns else None,
        )
    yield table
    yield ""
    for row in comparison.rows:
        if row.layout is not None and row.step_time_ns is not None:
            yield Text(f"{row.placer}: {row.layout}.")
        elif row.reason:
            yield Text(f"{row.placer}: {row.reason}{'' if row.layout is None else f' ({row.layout})'}.")
    yield Text(f"{comparison.bounds(format_ms)}. Step times are medians over seeds{per_batch}.")
    if served is not None and best_ns is not None:
        yield Text(served.sentence(best_ns))


def capture_report(graph: Graph, unknown_costs: Mapping[str, int], path: str) -> Iterator[RenderableType]:
    """Yields the answer of `gdp capture`."""
    if unknown_costs:
        yield Text(_unknown(unknown_costs))
    for sentence in sentences.of_held_memory(graph):
        yield Text(sentence)
    yield Text(f"Graph of {graph.num_ops:,} ops and {graph.num_tensors:,} tensors written to {path}")


def nothing_fits(
    simulation: Simulation, plan: Plan, question: PlaceQuestion, remedies: Sequence[Remedy], num_samples: int | None
) -> str:
    """Returns one line: the devices that are too small, the bytes they lack and why, and changes that are enough.
    `num_samples` are those of the batch, if it can be cut."""
    problem, missing = simulation.problem, simulation.missing_bytes
    lacking = sentences.lacking(problem.cluster, missing)
    if plan.placer != "auto":
        return f"placer {plan.placer} found nothing that fits in memory: {lacking}; use --placer auto"
    held, limit = held_bytes(question)
    worst, each = int(missing.argmax()), ParameterBytes.of(question.graph)
    own = int(problem.graph.resident_bytes[simulation.placement == worst].sum())
    rest = format_gib(int(simulation.peak_memory_bytes[worst]) - own)
    text = f"{format_gib(held)} are held for the whole step" + (f", with {each}" if each else "")
    text += ", more than all memory, so that no batch helps" if held > limit else ""
    rest += f" at the peak of {problem.cluster.devices[worst].name}"
    text += f"; {'gradients, ' if each else ''}activations and the rest take {rest}"
    if remedies:
        remedy = f"it would fit with {', or with '.join(map(_remedy, remedies))}"
    else:
        remedy = "add devices or memory" + ("" if held > limit else ", or make the batch smaller")
        if held > limit:
            least = int(missing.max()) * problem.num_devices
            enough = (option for option, _, held_with in leaner_updates(question) if held - held_with >= least)
            remedy += next((f", or take {option}" for option in enough), "")
    is_cut = plan.layout is not None and not in_flight(plan.layout)
    num_parts = Layout.of_document(plan.layout or {}).num_parts if is_cut else 1
    if held <= limit and each is not None and num_parts == num_samples:
        remedy += "; one sample is too large as it is: --parallel tensor=N or context=N cuts it"
    return f"nothing fits in memory: {lacking}; {text}; {remedy}"


def _remedy(remedy: Remedy) -> str:
    """Returns `2 more l4-24g (12.3 ms or less)`."""
    time_ns = remedy.step_time_ns
    return f"{remedy.change} ({'about, not tried' if time_ns is None else f'{format_ms(time_ns)} or less'})"


def _time_sources(graph: Graph, cluster: Cluster) -> Iterator[RenderableType]:
    """Yields the numbers of measured and modelled op times, if any are measured."""
    if not any(graph.times_ns):
        return
    counts = count_time_sources(graph, cluster)
    for device, count in counts.items():
        measured = f"{count['measured']:,} of {graph.num_ops:,} measured"
        yield Text(f"Op times on {device}: {measured}, {count['roofline']:,} modelled, {count['free']:,} free.")


def _baselines(plan: Plan) -> Table:
    assert plan.search is not None
    table = new_table("placer", "status", ">step time", ">of the plan's", ">seconds")
    step_ns = max(plan.step_time_ns, 1)
    table.add_row(plan.placer, "ok", format_ms(plan.step_time_ns), "1.000", f"{plan.search.seconds:.2f}", style="bold")
    baselines = sorted(
        plan.search.baselines.items(), key=lambda item: (item[1].status != "ok", item[1].step_time_ns or math.inf)
    )
    for name, baseline in baselines:
        time_ns, seconds = baseline.step_time_ns, f"{baseline.seconds:.2f}"
        ratio = "-" if time_ns is None else f"{time_ns / step_ns:.3f}"
        table.add_row(name, _status(baseline.status), format_ms(time_ns), ratio, seconds)
    return table


def _unknown(unknown_costs: Mapping[str, int]) -> str:
    listed = sorted(unknown_costs.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} ({count})" for kind, count in listed[:6]) + (", ..." if len(listed) > 6 else "")
    total = sum(unknown_costs.values())
    remedy = "give it with --op-costs FILE or gdp.register_flops"
    ops = "op has no known cost and counts" if total == 1 else "ops have no known cost and count"
    return f"{total:,} {ops} as one FLOP per element ({remedy}): {kinds}"


def _status(status: str) -> str:
    return {"infeasible": "does not fit", "failed": "no placement", "skipped": "no time"}.get(status, status)
