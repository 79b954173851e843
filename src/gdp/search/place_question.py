"""Opens the question of `place`: which step on which devices, and whether its ops are placed or its batch is cut."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from gdp.arrays import I64
from gdp.bounds.layout_bound import layout_bound
from gdp.bounds.lower_bound import lower_bound
from gdp.cluster import Cluster
from gdp.costs.collectives import ALL_REDUCE, exchange_times
from gdp.errors import InputError
from gdp.graph import Graph, GraphSource
from gdp.graph.parameter_bytes import gradients_of_updates
from gdp.models.model import Model
from gdp.models.shards import WHOLE, Shards
from gdp.models.source import ModelSource
from gdp.models.unequal import UnequalStep
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.parallel.step import check_batches
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Candidate
from gdp.search.layouts.reading_ahead import read_ahead, read_ahead_of_groups
from gdp.search.ops.good_order import in_program_order
from gdp.search.question import BatchQuestion, OnProgress, Question
from gdp.search.settings import DEFAULTS, Settings
from gdp.search.solvers import solver_of
from gdp.simulator.constraints import Constraints, memory_limits
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from gdp.units.reduction import Reduction

Placeable = str | ModelSource | Parts | GraphSource | Problem | tuple[Any, ...]
"""A MODEL, the parts of a batch, a step, or (module, args) and (module, args, kwargs)."""
_Opened = ModelSource | Parts | GraphSource | Problem
_PREPARED = 2  # degrees whose local programs are captured on top of a budget; others are of it
_IDLE = 0.1  # of the work of all cards, while some wait for others; untuned
_HIDDEN = 0.5  # of the time of all work at least: sums that take less, and gathers, go beside it; untuned
_LOCALLY = 2.0  # times that to capture the whole step takes, that of a rank does (Llama-70B: 5 and 10 s)


def waiting_share(num_samples: int, num_devices: int) -> float:
    """Returns what all devices could do beside the work on whole samples, as a share of it, until the last is done."""
    return -(-num_samples // num_devices) * num_devices / num_samples - 1


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search, whatever the question. InputError for values out of range."""

    placer: str = AUTO
    seed: int = 0
    robust: float | None = None  # relative deviation of op times to average step times over; None: by the placer
    checkpoint: str | None = None  # the file of a policy; None: the one that comes with gdp
    starts: Sequence[Candidate] = ()  # of the whole step: searches of ops begin from these too
    num_threads: int | None = None  # None: as many as there are processors
    settings: Settings = DEFAULTS

    def __post_init__(self) -> None:
        if self.robust is not None and not (isinstance(self.robust, Real) and 0 <= self.robust < 0.5):
            raise InputError(f"robust is {self.robust!r}; at least 0 and below 0.5 is expected, such as 0.02 or 2%")
        if not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed!r}; an integer from 0 to 2^63 - 1 is expected")
        if not isinstance(self.settings, Settings):
            raise InputError(f"settings is a {type(self.settings).__name__}; gdp.search.settings.Settings is expected")
        solver_of(self.placer)
        if self.num_threads is not None and not (isinstance(self.num_threads, Integral) and self.num_threads > 0):
            raise InputError(f"num_threads is {self.num_threads!r}; an integer above 0 is expected")

    @property
    def noise_share(self) -> float:
        """The relative deviation of op times to search under: by default that of the placer."""
        if self.robust is not None:
            return self.robust
        return self.settings.noise.spread if solver_of(self.placer).searches else 0.0


@dataclass(frozen=True, eq=False)
class PlaceQuestion:
    """A question of `place`: where the ops of a step go, or how a batch is cut over devices."""

    step: Graph | Problem  # of the whole batch
    cluster: Cluster
    constraints: Constraints
    options: SearchOptions
    parts: Parts | None = None  # of the batch, which may be cut; None: the ops of the whole step are placed
    layout: Layout | None = None  # of the batch; None: any
    num_batches: int = 0  # in flight of a forward pass; 0: one step is placed
    groups_of: Callable[[Problem], I64 | None] = lambda problem: None  # of a batch in flight, as in `BatchQuestion`
    source: ModelSource | None = None  # that is captured anew to be cut; None: a step as it is
    parallel: Layout | str | None = None  # as it was asked for
    shards: Shards = WHOLE  # the step is the local program of one rank, and devices are groups
    notes: tuple[str, ...] = ()  # of the model that was read
    captured_s: float = 0.0  # that it took to capture

    @classmethod
    def of(
        cls,
        model: Placeable,
        cluster: Cluster,
        constraints: Constraints,
        parallel: Layout | str | None,
        batches: int | None,
        options: SearchOptions,
        read: Model | None = None,
    ) -> "PlaceQuestion":
        """Returns the question about `model`, whose whole step is `read` if it was read before. `parallel` is a layout,
        "auto" for any, "none" for op placement, or None: any layout if the batch of a training step can be cut, unless
        the step fits on the only device. InputError where there is no layout as asked."""
        if options.checkpoint is not None and not Path(options.checkpoint).is_file():
            raise InputError(f"checkpoint: {options.checkpoint}: no such file; check the path")
        if isinstance(model, str | tuple):
            model = ModelSource(model) if isinstance(model, str) else ModelSource.of_example(model)
        if isinstance(parallel, Layout) and parallel.shards != WHOLE:
            if not isinstance(model, ModelSource):
                raise InputError(
                    f"--parallel: {parallel.shards} cuts the ops of a MODEL; a step as it is has no shards"
                )
            if model.reading.shards == WHOLE:
                model, read = model.sharded(parallel.shards, cluster), None
            own = replace(parallel, shards=WHOLE)
            parallel = NONE if own.is_whole else own
        if isinstance(model, Problem) and (model.cluster is not cluster or constraints != Constraints()):
            raise InputError("model: a problem has its devices and constraints; give no others")
        if isinstance(model, ModelSource):
            read = read or model.whole()
        shards = model.reading.shards if isinstance(model, ModelSource) else WHOLE
        if shards != WHOLE:
            if isinstance(model, ModelSource) and model.unequal is not None:
                constraints = _checked(model.unequal, cluster, constraints)
            grouped = cluster.grouped(shards.num_ranks, shards.shares)
            constraints, cluster = constraints.on_groups(grouped, cluster), grouped
        asked = cls(_whole_step(model, read), cluster, constraints, options, parallel=parallel, shards=shards)
        if isinstance(model, ModelSource) and read is not None:
            asked = replace(asked, source=model, notes=read.notes, captured_s=read.captured_s)
        if batches is not None:
            check_batches(asked.graph, batches)
            return replace(asked, parts=Parts({1: asked.graph}.__getitem__, 1, asked.graph), num_batches=batches)
        is_for_ops = options.placer != AUTO or len(options.starts) > 0 or isinstance(model, Problem)
        if parallel not in (None, NONE):
            if is_for_ops:
                raise InputError("parallel: a layout is placed by auto, without starts; leave placer and starts out")
            parts = _parts(model, read)
            if not isinstance(parallel, Layout):
                return replace(asked, parts=parts)
            parts.check(parallel.num_parts)
            return replace(asked, parts=parts, layout=parallel)
        may_be_cut = parallel is None and not is_for_ops and _may_be_cut(model, read)
        if may_be_cut and (cluster.num_devices > 1 or not _fits_alone(asked.problem)):
            with contextlib.suppress(InputError):  # the batch cannot be split
                parts = _parts(model, read)
                if parts.batch_size > 1 or not _fits_alone(asked.problem):  # one sample is recomputed, not cut
                    return replace(asked, parts=parts)
        return asked

    @property
    def graph(self) -> Graph:
        """The whole step."""
        return self.step.graph if isinstance(self.step, Problem) else self.step

    @cached_property
    def problem(self) -> Problem:
        """The problem of placing the ops of the whole step."""
        if isinstance(self.step, Problem):
            return self.step
        return Problem.build(self.step, self.cluster, self.constraints)

    def sharded(self, shards: Shards) -> "PlaceQuestion":
        """Returns the same question about the local program of a rank, on groups of the devices. InputError where the
        model is not cut so, or there is no such group."""
        if shards == self.shards:
            return self
        if self.source is None:
            raise InputError(f"--parallel: {shards} cuts the ops of a MODEL; a step as it is has no shards")
        source, limits = self.source.sharded(shards, self.cluster), self.constraints
        if self.parts is None or self.num_batches:
            batches = self.num_batches or None
            asked = PlaceQuestion.of(source, self.cluster, limits, self.parallel, batches, self.options)
            return replace(asked, groups_of=self.groups_of)
        parts, cluster = self.parts.sharded(shards), self.cluster.grouped(shards.num_ranks)
        return replace(
            self,
            step=parts.exact(1),
            cluster=cluster,
            constraints=limits.on_groups(cluster, self.cluster),
            parts=parts,
            source=source,
            shards=source.reading.shards,
            notes=parts.notes,
        )

    @property
    def degrees(self) -> tuple[int, ...]:
        """The sizes of groups that may be looked at, the most promising first: where a forward pass has the most cards,
        and in training about as many groups as samples, or the fewest where a dense copy is too large for a card and
        takes long to gather. None where layouts are given, or ops are what it is about."""
        source, options, limits = self.source, self.options, self.constraints
        is_asked = self.parallel in (None, AUTO) and options.placer == AUTO and not options.starts
        if source is None or not is_asked or limits.pins or limits.forbid or self.shards != WHOLE:
            return ()
        if source.is_file or source.is_timed or source.reading.op_costs is not None or source.reading.microbatches > 1:
            return ()
        sizes, cards = self.cluster.group_sizes(), [device for device in self.cluster.devices if not device.is_cpu]
        likely = len(cards or self.cluster.devices) / ((source.batch_size or 1) if source.reading.training else 1)
        if source.reading.training and self._is_too_large and self._sums_share > _HIDDEN and not self.has_experts:
            likely = max(sizes, default=1)  # large groups leave the most memory to few stages on slow connections
        return tuple(sorted(sizes, key=lambda size: (abs(log2(size / likely)), -size)))

    @property
    def has_experts(self) -> bool:
        """True where the ops are those of a mixture of experts, whose products are small as they are."""
        return any("grouped_mm" in kind for kind in self.graph.kinds)

    def reading_s(self, shards: Shards) -> float:
        """Returns the seconds to capture a rank's local program, and a part of its batch; 0 where it was before."""
        assert self.source is not None, "it has degrees"
        source = self.source.sharded(shards)
        is_read = source.is_kept(1) or (self.parts is not None and self.parts.has_read(source.reading.shards))
        return 0.0 if is_read else (1 if self.parts is None else 2) * _LOCALLY * self.captured_s

    @property
    def needs_groups(self) -> bool:
        """True where copies of the model use cards badly: a forward pass, few samples, or so many that some cards would
        wait for others, or a copy too large for a card, whose state takes long to gather."""
        assert self.source is not None
        is_card = [not device.is_cpu for device in self.cluster.devices]
        num_cards = sum(is_card)
        is_alike = len({device.kind for device in self.cluster.devices if not device.is_cpu}) == 1
        samples = self.source.batch_size or 1  # unlike cards have shares of them by speed
        is_uneven = samples < num_cards or (is_alike and waiting_share(samples, num_cards) > _IDLE)
        is_slow = self._is_too_large and self._sums_share > _HIDDEN
        return not self.source.reading.training or is_uneven or is_slow

    @property
    def has_groups_first(self) -> bool:
        """True where the local programs of the first degrees are captured before a clock begins."""
        return bool(self.degrees) and (self.needs_groups or self._is_too_large)

    def is_on_top(self, shards: Shards) -> bool:
        """Returns whether to capture the local program comes on top of a budget, once the degree may win."""
        return shards in map(Shards, self.degrees[:_PREPARED]) and not self.has_groups_first

    @property
    def may_need_groups(self) -> bool:
        """True where copies of the model, which come first, may use cards badly: one is too large for a card, or cards
        take longer to sum gradients than all work takes at least."""
        return self._is_too_large or self._sums_share > 1

    @property
    def _is_too_large(self) -> bool:
        limits = memory_limits(self.cluster, self.constraints)[[not device.is_cpu for device in self.cluster.devices]]
        return int(self.graph.resident_bytes.sum()) > int(limits.max(initial=0))

    @cached_property
    def _sums_share(self) -> float:
        """The time in which all cards sum gradients, over what work and its launches take at least; by their slowest
        connection where they do not exchange alike."""
        cards = np.flatnonzero([not device.is_cpu for device in self.cluster.devices])
        if len(cards) < 2:
            return 0.0
        launches_ns = self.graph.num_ops * max(self.cluster.devices[number].launch_ns for number in cards)
        work_ns = max(layout_bound({1: self.graph}, self.cluster), launches_ns, 1)
        num_bytes = int(self.graph.tensor_bytes[gradients_of_updates(self.graph)].sum())
        if (alike := exchange_times(self.cluster, cards[:, None])) is not None:
            return alike[1].time_ns(ALL_REDUCE, num_bytes) / work_ns
        rates = self.cluster.bytes_per_second[np.ix_(cards, cards)][~np.eye(len(cards), dtype=np.bool_)]
        return 2e9 * (1 - 1 / len(cards)) * num_bytes / float(rates.min()) / work_ns

    @cached_property
    def bound_ns(self) -> int:
        """A time that no step of the question takes less than."""
        return lower_bound(self.problem) if self.parts is None else layout_bound(self.parts.read, self.cluster)

    def prepare(self) -> None:
        """Imports and reads what takes seconds, before a clock begins."""
        solver_of(self.options.placer).prepare()
        if self.parts is not None and self.layout is None and not self.num_batches:
            (read_ahead if self.shards == WHOLE else read_ahead_of_groups)(self.about_batch())
        for degree in self.degrees[:_PREPARED] if self.has_groups_first else ():
            with contextlib.suppress(InputError):  # such as heads that the degree does not divide
                self.sharded(Shards(degree)).prepare()

    def about_ops(self, on_progress: OnProgress | None = None) -> Question:
        """Returns the question of where the ops of the whole step go, not reduced yet."""
        problem, options = self.problem, self.options
        return Question(
            problem,
            Reduction.nothing(problem),
            seed=options.seed,
            starts=options.starts,
            checkpoint=options.checkpoint,
            num_threads=options.num_threads,
            on_progress=on_progress,
            settings=options.settings,
        )

    def about_batch(self, on_progress: OnProgress | None = None) -> BatchQuestion:
        """Returns the question of how the batch is cut; ValueError where it is not."""
        if self.parts is None:
            raise ValueError("question: it is about the ops of the whole step")
        options = self.options
        return BatchQuestion(
            self.parts,
            self.cluster,
            self.constraints,
            self.layout,
            self.num_batches,
            self.groups_of(self.problem),
            seed=options.seed,
            checkpoint=options.checkpoint,
            num_threads=options.num_threads,
            on_progress=on_progress,
            settings=options.settings,
        )


def _checked(step: UnequalStep, cluster: Cluster, constraints: Constraints) -> Constraints:
    """Returns the constraints but for limits of memory, which each member keeps. InputError where one does not."""
    limits = dict(zip((device.name for device in cluster.devices), memory_limits(cluster, constraints), strict=True))
    for card, graph in zip(step.cards, step.graphs, strict=True):
        problem = Problem.build(graph, Cluster.build(card.name, [step.group], {}))
        used = int(in_program_order(simulate(problem, np.zeros(graph.num_ops, np.int64))).peak_memory_bytes[0])
        if (limit := int(limits[card.name])) < used:
            raise InputError(
                f"{step.shards}: {card.name} ({card.kind}) takes {used / 2**30:.2f} GiB with its share, of "
                f"{limit / 2**30:.2f} GiB; give it a smaller one, or add a card"
            )
    return replace(constraints, max_memory_bytes=None)


def _whole_step(model: _Opened, read: Model | None) -> Graph | Problem:
    """Returns the step of the whole batch."""
    if read is not None:
        return read.graph
    if isinstance(model, Problem):
        return model
    return model.exact(1) if isinstance(model, Parts) else Graph.of(model)  # type: ignore[arg-type]


def _parts(model: _Opened, read: Model | None) -> Parts:
    """Returns the parts of the batch. InputError where it cannot be split."""
    if isinstance(model, ModelSource) and read is not None:
        return Parts.of_source(model, read.graph, read.captured_s)
    return Parts.of(model)  # type: ignore[arg-type]


def _may_be_cut(model: _Opened, read: Model | None) -> bool:
    """Returns whether layouts are looked at unasked: of a training step that can be read anew with fewer samples."""
    if not isinstance(model, ModelSource) or read is None:
        return isinstance(model, Parts)
    reading = model.reading
    is_whole = reading.microbatches == 1
    is_known = model.is_timed or not any(read.graph.times_ns)  # a user's times are of ops of the whole batch
    return is_whole and is_known and reading.training and not reading.serving.has_cache and not model.is_file


def _fits_alone(problem: Problem) -> bool:
    """Returns whether all of the step fits on the first device: then one device has no use for layouts."""
    return in_program_order(simulate(problem, np.zeros(problem.num_ops, np.int64))).feasible
