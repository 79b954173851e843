"""Shows the layout of batches in flight: throughput and latency in words, as a table, as JSON."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from gdp.graph.copies import BATCH_END
from gdp.models.serving import ServedStep
from gdp.notebook import digits, format_gib
from gdp.parallel.step import in_flight, layout_in_flight
from gdp.report.layouts import copies_in_words
from gdp.report.tables import format_ms, new_table
from gdp.search.batches.place_batches import USUAL, alone, is_pipeline, throughput_of
from gdp.search.candidate import Candidate
from gdp.search.question import Solution
from gdp.simulator.simulate import Simulation
from gdp.simulator.throughput import Throughput

_MOST_ROWS = 12  # of the table; all are in --json


def layout_in_words(candidate: Candidate) -> str:
    """Returns `2 replicas of the model on 2 devices in stages each`, with the cards of a group behind it."""
    num_places, num_ranks = candidate.way.num_places, candidate.layout.shards.num_ranks
    words = copies_in_words(len(candidate.devices), num_places, in_stages=num_places > 1 and is_pipeline(candidate))
    return words if num_ranks == 1 else f"{words}, a device being {num_ranks} cards"


def of_throughput(figures: Throughput, samples: int | None = None) -> str:
    """Returns a sentence with throughput and latency; `samples` are those of a batch, if they are known."""
    rate = figures.batches_per_second
    of_samples = "" if samples is None else f" ({digits(rate * samples, 4)} samples)"
    return (
        f"Time per batch {format_ms(figures.time_per_batch_ns)}, {digits(rate, 4)} batches{of_samples} per second; "
        f"a batch takes up to {format_ms(figures.latency_ns)} from where it enters."
    )


def in_flight_of(figures: Throughput, simulation: Simulation) -> tuple[int, int, int, int | None]:
    """Returns the batches in flight, the time per batch, the latency, and the time of a batch alone. The last is that
    of `simulation`; None where that is of the stream of batches."""
    alone_ns = None if simulation.problem.graph.is_in_role(BATCH_END).any() else simulation.step_time_ns
    return figures.num_batches, figures.time_per_batch_ns, figures.latency_ns, alone_ns


def serving_sentence(served: ServedStep, simulation: Simulation, layout: Mapping[str, Any] | None) -> str:
    """Returns the speed of a served step in words, or of several in flight where that is its layout."""
    if layout is None or not in_flight(layout):
        return served.sentence(simulation.step_time_ns)
    return served.sentence_in_flight(*in_flight_of(Throughput.of(simulation, layout_in_flight(layout)), simulation))


def _in_flight(candidate: Candidate) -> tuple[int, int, int, int | None]:
    return in_flight_of(throughput_of(candidate), alone(candidate))


def usual_of(solution: Solution) -> list[Candidate]:
    """Returns what users run: one device, stages with as many layers each, replicas."""
    named = {each.name: each for each in solution.looked_at if each.name}
    return [named[name] for name in USUAL if name in named]


def batches_report(
    solution: Solution,
    samples: int | None,
    written: str,
    command: str,
    served: ServedStep | None = None,
    requests: str = "",
) -> Iterator[RenderableType]:
    """Yields the answer of `gdp place --batches`, from the headline to the next command."""
    best, plan = solution.best, solution.plan
    assert best is not None
    assert plan is not None
    assert plan.search is not None
    search, cluster, count = plan.search, best.problem.cluster, best.layout.num_parts
    searched = f"{search.simulations:,} simulations in {search.seconds:.1f} s, seed {plan.seed}"
    yield Text(f"{best.problem.graph.name} on {cluster.name}, {count} batches in flight: {searched}")
    yield Text(f"Best layout: {layout_in_words(best)}", style="bold")
    yield Text(of_throughput(throughput_of(best), samples), style="bold")
    if served is not None:
        yield Text(served.sentence_in_flight(*_in_flight(best)), style="bold")
    if requests:
        yield Text(requests, style="bold")
    usual = [each for each in usual_of(solution) if each.fits]
    against = [f"{digits(each.step_time_ns / best.step_time_ns, 3)} times as {each.name}" for each in usual]
    if against:
        yield Text(f"{', '.join(against)}.".replace(" times as ", " times as fast as ", 1))
    above = best.step_time_ns / max(solution.bound_ns, 1) - 1
    if solution.bound_ns:
        bound = format_ms(solution.bound_ns)
        yield Text(f"No layout takes less than {bound} for a batch: this is at most {above:.1%} above.")
    yield ""
    table = new_table("layout", "in flight", ">time per batch", ">latency", ">fullest device", "")
    for row in solution.looked_at[:_MOST_ROWS]:
        peaks = row.replay.peak_memory_bytes
        counts = row.layout.microbatches
        lacks = f", lacks {format_gib(row.missing_bytes)}" if row.missing_bytes else ""
        table.add_row(
            layout_in_words(row),
            f"{counts[0]} each" if len(set(counts)) == 1 else ":".join(map(str, counts)),
            format_ms(row.step_time_ns),
            format_ms(throughput_of(row).latency_ns),
            format_gib(int(peaks.max())),
            f"{row.name}{lacks}".removeprefix(", "),
            style="bold" if row is best else None,
        )
    yield table
    if len(solution.looked_at) > _MOST_ROWS:
        yield Text(f"and {len(solution.looked_at) - _MOST_ROWS} more that are slower or do not fit")
    yield ""
    yield _devices(best)
    yield ""
    yield Text(f"Plan written to {written}" if written else "The plan is not written.")
    if command:
        yield Text(f"Next: {command}")


def _devices(candidate: Candidate) -> RenderableType:
    """Returns a table of the devices of a layout: their memory, and how busy they are once the replicas are full."""
    simulation, problem = candidate.replay, candidate.problem
    busy = throughput_of(candidate).busy_fraction
    replica_of = {d: str(replica) for replica, group in enumerate(candidate.devices) for d in group}
    sizes = zip(simulation.peak_memory_bytes.tolist(), problem.memory_limit_bytes.tolist(), strict=True)
    rows = [
        (device.name, device.kind, replica_of.get(number, "-"), f"{busy[number]:.1%}", *map(format_gib, pair))
        for number, (device, pair) in enumerate(zip(problem.cluster.devices, sizes, strict=True))
    ]
    return new_table("device", "kind", "replica", ">busy", ">peak memory", ">limit", rows=rows)


def batches_document(solution: Solution, samples: int | None, served: ServedStep | None = None) -> dict[str, Any]:
    """Returns the keys of `--json` beside those of every plan."""
    best = solution.best
    assert best is not None
    serving = {} if served is None else {"serving": served.in_flight(*_in_flight(best))}
    return serving | {
        "batches": best.layout.num_parts,
        "samples_per_batch": samples,
        "throughput": throughput_of(best).document(),
        "time_per_batch_bound_ns": solution.bound_ns,
        "layout": best.step.document(),
        "layouts": [
            {
                "layout": row.step.document(),
                "devices": [list(group) for group in row.devices],
                "baseline": row.name or None,
                "status": row.status,
                "throughput": throughput_of(row).document(),
                "peak_memory_bytes": np.asarray(row.replay.peak_memory_bytes).tolist(),
            }
            for row in solution.looked_at
        ],
    }
