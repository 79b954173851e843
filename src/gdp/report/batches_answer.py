"""Shows the layout of batches in flight: throughput and latency in words, as a table, as JSON."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from gdp.report.tables import digits, format_gib, format_ms, new_table
from gdp.search.batches.place_batches import BatchChoice, ServedLayout
from gdp.simulator.throughput import Throughput

_MOST_ROWS = 12  # of the table; all are in --json


def layout_in_words(served: ServedLayout) -> str:
    """Returns `2 replicas of the model on 2 devices in stages each`."""
    arrangement = served.arrangement
    data, places = len(arrangement.devices), arrangement.num_places
    copies = "one copy of the model" if data == 1 else f"{data} replicas of the model"
    where = "one device" if places == 1 else f"{places} devices"
    stages = " in stages" if places > 1 and served.is_pipeline else ""
    return f"{copies} on {where}{stages}{' each' if data > 1 else ''}"


def of_throughput(figures: Throughput, samples: int | None = None) -> str:
    """Returns a sentence with throughput and latency; `samples` are those of a batch, if they are known."""
    rate = figures.batches_per_second
    of_samples = "" if samples is None else f" ({digits(rate * samples, 4)} samples)"
    return (
        f"Time per batch {format_ms(figures.time_per_batch_ns)}, {digits(rate, 4)} batches{of_samples} per second; "
        f"a batch takes up to {format_ms(figures.latency_ns)} from where it enters."
    )


def batches_report(choice: BatchChoice, samples: int | None, written: str, command: str) -> Iterator[RenderableType]:
    """Yields the answer of `gdp place --batches`, from the headline to the next command."""
    best, search = choice.best, choice.plan.search
    assert search is not None
    simulation = best.candidate.replay
    cluster = simulation.problem.cluster
    count = best.stream.num_batches
    searched = f"{search.simulations:,} simulations in {search.seconds:.1f} s, seed {choice.plan.seed}"
    yield Text(f"{simulation.problem.graph.name} on {cluster.name}, {count} batches in flight: {searched}")
    yield Text(f"Best layout: {layout_in_words(best)}", style="bold")
    yield Text(of_throughput(best.throughput, samples), style="bold")
    against = [
        f"{digits(way.throughput.time_per_batch_ns / best.throughput.time_per_batch_ns, 3)} times as {name}"
        for name, way in choice.baselines.items()
        if not way.missing_bytes
    ]
    if against:
        yield Text(f"{', '.join(against)}.".replace(" times as ", " times as fast as ", 1))
    above = best.throughput.time_per_batch_ns / max(choice.bound_ns, 1) - 1
    if choice.bound_ns:
        yield Text(
            f"No layout takes less than {format_ms(choice.bound_ns)} for a batch: this is at most {above:.1%} above."
        )
    yield ""
    names = {id(way): name for name, way in choice.baselines.items()}
    table = new_table("layout", "in flight", ">time per batch", ">latency", ">fullest device", "")
    for row in choice.layouts[:_MOST_ROWS]:
        peaks = row.candidate.replay.peak_memory_bytes
        counts = row.arrangement.layout.microbatches
        lacks = f", lacks {format_gib(row.missing_bytes)}" if row.missing_bytes else ""
        table.add_row(
            layout_in_words(row),
            f"{counts[0]} each" if len(set(counts)) == 1 else ":".join(map(str, counts)),
            format_ms(row.throughput.time_per_batch_ns),
            format_ms(row.throughput.latency_ns),
            format_gib(int(peaks.max())),
            f"{names.get(id(row), '')}{lacks}".removeprefix(", "),
            style="bold" if row is best else None,
        )
    yield table
    if len(choice.layouts) > _MOST_ROWS:
        yield Text(f"and {len(choice.layouts) - _MOST_ROWS} more that are slower or do not fit")
    yield ""
    yield _devices(best)
    yield ""
    yield Text(f"Plan written to {written}" if written else "The plan is not written.")
    if command:
        yield Text(f"Next: {command}")


def _devices(served: ServedLayout) -> RenderableType:
    """Returns a table of the devices of a layout: their memory, and how busy they are once the replicas are full."""
    simulation = served.candidate.replay
    problem = simulation.problem
    table = new_table("device", "kind", "replica", ">busy", ">peak memory", ">limit")
    replica_of = {d: replica for replica, group in enumerate(served.arrangement.devices) for d in group}
    for number, device in enumerate(problem.cluster.devices):
        table.add_row(
            device.name,
            device.kind,
            str(replica_of.get(number, "-")),
            f"{served.throughput.busy_fraction[number]:.1%}",
            format_gib(int(simulation.peak_memory_bytes[number])),
            format_gib(int(problem.memory_limit_bytes[number])),
        )
    return table


def batches_document(choice: BatchChoice, samples: int | None) -> dict[str, Any]:
    """Returns the keys of `--json` beside those of every plan."""
    names = {id(way): name for name, way in choice.baselines.items()}
    return {
        "batches": choice.best.stream.num_batches,
        "samples_per_batch": samples,
        "throughput": choice.best.throughput.document(),
        "time_per_batch_bound_ns": choice.bound_ns,
        "layout": choice.best.stream.document(),
        "layouts": [
            {
                "layout": row.stream.document(),
                "devices": [list(group) for group in row.arrangement.devices],
                "baseline": names.get(id(row)),
                "status": "does not fit" if row.missing_bytes else "ok",
                "throughput": row.throughput.document(),
                "peak_memory_bytes": np.asarray(row.candidate.replay.peak_memory_bytes).tolist(),
            }
            for row in choice.layouts
        ],
    }
