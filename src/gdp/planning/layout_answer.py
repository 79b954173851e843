"""The layouts that were looked at, with what limits each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten

import numpy as np

from gdp.graph import Graph
from gdp.graph.copies import RECOMPUTED
from gdp.models.shards import WHOLE
from gdp.notebook import format_gib
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.parallel.step import Step
from gdp.search.batch_parts import Parts
from gdp.search.candidate import DOES_NOT_FIT, ESTIMATED, NOT_ALLOWED, OK, Candidate
from gdp.search.question import Solution

_MOST_REASON = 120  # characters of an error in the table
_RANDOM = ("dropout", "bernoulli")  # in kinds of ops
_MOST_TIES = 3  # that are named
_MOST_LOST = 0.02  # of the flops: rnnlm-2 in 4 parts has 0.8% more, whose products of weights are not cut


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """The figures of a layout that was looked at."""

    option: str  # the layout as `--parallel` takes it
    layout: Layout  # with the modules that recompute=auto stands for, if it was simulated
    num_places: int  # devices of a replica
    status: str  # as that of a `Candidate`
    step_time_ns: int
    missing_bytes: int
    peak_memory_bytes: tuple[int, ...] | None  # of each device; None: not simulated
    limit: str  # what keeps it from being faster, or from being used, in a few words

    @classmethod
    def of(cls, candidate: Candidate) -> "LayoutRow":
        """Returns the row of `candidate`."""
        is_simulated = candidate.simulation is not None
        peaks = tuple(candidate.replay.peak_memory_bytes.tolist()) if is_simulated else None
        time_ns = 0 if candidate.status == NOT_ALLOWED else candidate.step_time_ns
        figures = candidate.status, time_ns, candidate.missing_bytes
        layout = candidate.step.layout if is_simulated else candidate.layout
        return cls(str(candidate.named_layout), layout, len(candidate.devices[0]), *figures, peaks, limit(candidate))


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    """The rows of all layouts that were looked at: the one of the plan, other simulated ones, estimates, and what does
    not fit; the fastest of each first."""

    rows: tuple[LayoutRow, ...]
    bound_ns: int  # no layout of this batch on these devices takes less
    num_moved: int  # ops that a search put on devices of other replicas
    notes: tuple[str, ...]  # what the step does otherwise than the whole one

    @classmethod
    def of(cls, solution: Solution, parts: Parts) -> "LayoutAnswer":
        """Returns what is kept of `solution` among layouts of the batch of `parts`."""
        best = solution.best
        assert best is not None
        others = [each for each in solution.looked_at if each is not best]
        if parts.misread:  # of all layouts that cut the batch, which the note says once
            others = [each for each in others if each.layout.num_parts == 1]
        others.sort(  # of several degrees
            key=lambda each: (
                each.status == NOT_ALLOWED or each.missing_bytes > 0,
                each.status == ESTIMATED,
                each.figures,
            )
        )
        rows = tuple(map(LayoutRow.of, (best, *others)))
        shards = best.layout.shards
        own = parts if shards == WHOLE else parts.sharded(shards)
        notes = (*_ties(rows, best.error), *_notes(best, own), *solution.notes)
        return cls(rows, solution.bound_ns, num_moved(best), notes)

    @property
    def distinct(self) -> list[LayoutRow]:
        """The rows, the best of those with one layout and as many devices a replica."""
        first = dict[tuple[str, int], LayoutRow]()
        for row in self.rows:
            first.setdefault((row.option, row.num_places), row)
        return [*first.values()]

    @property
    def best(self) -> LayoutRow:
        """The row of the plan."""
        return self.rows[0]


def limit(candidate: Candidate) -> str:
    """Returns what keeps a layout from being faster, or from being used, in a few words."""
    if candidate.status == NOT_ALLOWED:
        return (
            shorten(candidate.refusal or "", _MOST_REASON) or "a pin or --forbid keeps its replicas from their devices"
        )
    if candidate.status == ESTIMATED:
        return f"would lack about {format_gib(candidate.missing_bytes)}" if candidate.missing_bytes else "estimated"
    simulation = candidate.replay
    devices = simulation.problem.cluster.devices
    if candidate.status == DOES_NOT_FIT:
        lacking = int(simulation.missing_bytes.argmax())
        return f"does not fit by {format_gib(int(simulation.missing_bytes[lacking]))} on {devices[lacking].name}"
    busiest = int(simulation.busy_fraction.argmax())
    return f"{devices[busiest].name} computes for {simulation.busy_fraction[busiest]:.0%} of it"


def num_moved(candidate: Candidate) -> int:
    """Returns the number of ops that a search put on devices of other replicas than their own."""
    if candidate.simulation is None or candidate.is_whole:
        return 0
    is_own = np.zeros((candidate.layout.data, candidate.replay.problem.num_devices), np.bool_)
    for replica, devices in enumerate(candidate.devices):
        is_own[replica, list(devices)] = True
    step = candidate.step
    assert isinstance(step, Step)
    return int((~is_own[step.replica, candidate.replay.placement] & ~step.is_on_host).sum())


def _ties(rows: Sequence[LayoutRow], error: float) -> Iterator[str]:
    """Yields a sentence on the layouts that are as fast as that of the plan, as far as can be told."""
    best, fitting = rows[0], [row for row in rows if row.status == OK]
    limit_ns = (1 + error) * min((row.step_time_ns for row in fitting), default=0)
    ties = {row.option: row.step_time_ns for row in reversed(fitting) if row.step_time_ns <= limit_ns}
    ties = dict(sorted(ties.items(), key=lambda item: item[1]))
    ties.pop(best.option, None)
    if ties and error:
        named = [
            f"{option} ({_beside(time_ns, best.step_time_ns)})" for option, time_ns in [*ties.items()][:_MOST_TIES]
        ]
        more = f" and {len(ties) - len(named)} more" if len(named) < len(ties) else ""
        chosen = "simplest" if min(ties.values()) < best.step_time_ns else "fastest"
        yield (
            f"a tie with {', '.join(named)}{more}: predictions of two layouts err by {error:.1%} beside each other; "
            f"the {chosen} is the answer"
        )


def _beside(time_ns: int, best_ns: int) -> str:
    ratio = best_ns / max(time_ns, 1)
    return f"predicted {ratio - 1:.1%} faster" if ratio > 1 else f"{1 / max(ratio, 1e-9) - 1:.1%} slower"


def _notes(candidate: Candidate, parts: Parts) -> Iterator[str]:
    layout = candidate.layout
    if parts.misread:
        yield f"no layout cuts the batch: {parts.misread}"
    if parts.refused:
        yield (
            f"layouts of {', '.join(map(str, sorted(parts.refused)))} parts of the batch were not tried: there was no "
            "time to read the model with those; give a larger --budget"
        )
    graph = candidate.step.graph
    if layout.recompute not in (NONE, AUTO) and not graph.is_in_role(RECOMPUTED).any():
        yield "nothing is recomputed: the backward pass reads no results of these modules that could be made again"
    num_parts = layout.num_parts * layout.shards.samples
    if num_parts == 1 or parts.is_fixed:
        return
    kinds = set(graph.kinds)
    samples = parts.batch_size // num_parts
    if any("batch_norm" in kind for kind in kinds):
        yield f"batch normalisation sees {samples} samples at a time instead of {parts.batch_size}, as in DDP"
    if any(name in kind for kind in kinds for name in _RANDOM):
        yield "draws of dropout differ from those of the whole batch"
    whole, cut = (_flops(parts.exact(count)) * count for count in (1, layout.num_parts))
    if abs(cut - whole) > _MOST_LOST * whole:
        yield (
            f"the {layout.num_parts} parts have {cut / whole:.1%} of the flops of the whole step; where the dimension "
            "that is cut is not the batch, figures are of another step: put the batch first, say where it is with "
            "--batch-dim, or place with --parallel none"
        )


def _flops(graph: Graph) -> int:
    """Returns the flops of the passes, without updates."""
    return int(graph.flops[np.isin(graph.phases, ("forward", "backward"))].sum())
