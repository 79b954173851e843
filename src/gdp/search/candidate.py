"""Candidates: ways to run a step with their figures, ordered. All searches compare by them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from gdp.arrays import I64, position_in, unique
from gdp.cluster import Device
from gdp.costs.ranges import tie_share
from gdp.models.shards import WHOLE, Shards
from gdp.notebook import size
from gdp.parallel.layout import NONE, Layout
from gdp.parallel.step import BatchStream, Step
from gdp.simulator.orders import B_LEVEL
from gdp.simulator.plan import Baseline
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import NEVER, Simulation

OK, DOES_NOT_FIT, NOT_ALLOWED, ESTIMATED = "ok", "does not fit", "not allowed", "estimated"
_NOWHERE = np.zeros(0, np.int64)
_ON_CARDS = 0.001  # what a simpler answer may take more there; untuned


@dataclass(frozen=True, slots=True, order=True)
class Figures:
    """Figures to compare candidates by: fit first, then be fast. The lesser ones are better. Missing bytes are summed
    over devices, not those of the fullest one: so each byte less is a gain for a search. An estimate knows one replica,
    and has the bytes that its fullest device lacks at least."""

    excess_bytes: int = NEVER  # over the memory limits
    step_time_ns: int = NEVER  # of batches in flight: for each batch
    ties: tuple[int, ...] = ()  # further figures, by which equally fast candidates are compared

    @classmethod
    def of(cls, simulation: Simulation) -> "Figures":
        """Returns the figures of a step that was simulated."""
        return cls(int(simulation.missing_bytes.sum()), simulation.step_time_ns)

    @property
    def fits(self) -> bool:
        """True if no memory limit is passed."""
        return self.excess_bytes == 0


UNKNOWN = Figures()  # of a candidate that was not simulated: worse than any


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A layout, and the devices of each replica in the order of its places; R replicas, P places."""

    layout: Layout
    devices: tuple[tuple[int, ...], ...]  # [R][P]

    @property
    def num_places(self) -> int:
        """The number of devices of a replica."""
        return len(self.devices[0])

    @property
    def all_devices(self) -> tuple[int, ...]:
        """The devices that are used."""
        return tuple(chain.from_iterable(self.devices))


@dataclass(frozen=True, eq=False)
class BatchCut:
    """The cut of the batch of a candidate, and the devices that it goes to."""

    arrangement: Arrangement
    step: Step | BatchStream | None = None  # None: it was not cut
    places: I64 | None = None  # [N] of a replica's ops; None: not known, or all in one place
    is_captured: bool = True  # False: with figures between those of two captured steps
    is_searched: bool = False  # a search has placed the ops of the whole step


@dataclass(frozen=True, eq=False)
class Candidate:
    """A way to run a step, and its figures; the lesser of two candidates is the better one."""

    placement: Placement  # [N]; empty where no step was simulated
    figures: Figures = UNKNOWN
    priority: I64 | None = None  # [N] by which ready ops are started; None: the problem's, in `order`
    order: str = B_LEVEL  # of micro-batches
    simulation: Simulation | None = None  # the step in full, if it was kept
    cut: BatchCut | None = None  # None: the graph as it is
    refusal: str | None = None  # why it is not allowed; "": by a constraint; None: it is
    name: str = ""  # of what users run

    def __lt__(self, other: "Candidate") -> bool:
        return self.figures < other.figures

    @classmethod
    def start(cls, simulation: Simulation) -> "Candidate":
        """Returns the placement of `simulation` to begin a search from, with a priority that runs the step again."""
        position = np.empty(len(simulation.placement), np.int64)
        for ops in simulation.order:
            position[ops] = np.arange(len(ops))
        priority = position_in(np.lexsort((position, simulation.op_start_ns))[::-1], len(position))
        return cls(simulation.placement, priority=priority)

    @classmethod
    def of(cls, simulation: Simulation, order: str = B_LEVEL) -> "Candidate":
        """Returns the candidate that `simulation` is, with a priority that runs it again; `order` is its name."""
        return replace(cls.start(simulation), figures=Figures.of(simulation), order=order, simulation=simulation)

    @classmethod
    def estimated(cls, arrangement: Arrangement, figures: Figures, places: I64 | None = None) -> "Candidate":
        """Returns an arrangement whose step was not simulated; without `places` what arithmetic says of it at least."""
        return cls(_NOWHERE, figures, cut=BatchCut(arrangement, places=places))

    @classmethod
    def refused(cls, cut: BatchCut | None, reason: str = "") -> "Candidate":
        """Returns one that is not allowed, for a reason; "": a constraint."""
        return cls(_NOWHERE, cut=cut, refusal=reason)

    def on_groups(self, shards: Shards) -> "Candidate":
        """Returns the candidate of a local program with `shards` in its layouts."""
        if (cut := self.cut) is None or shards == WHOLE:
            return self
        way = replace(cut.arrangement, layout=replace(cut.arrangement.layout, shards=shards))
        step = cut.step if cut.step is None else replace(cut.step, layout=replace(cut.step.layout, shards=shards))
        return replace(self, cut=replace(cut, arrangement=way, step=step))

    @property
    def fits(self) -> bool:
        """True if it is allowed and passes no memory limit."""
        return self.figures.fits and self.refusal is None

    @property
    def step_time_ns(self) -> int:
        return self.figures.step_time_ns

    @property
    def status(self) -> str:
        """OK, DOES_NOT_FIT, NOT_ALLOWED, or ESTIMATED for what was not simulated."""
        if self.refusal is not None:
            return NOT_ALLOWED
        return ESTIMATED if self.simulation is None else OK if self.fits else DOES_NOT_FIT

    @property
    def missing_bytes(self) -> int:
        """The bytes that the device lacks which lacks most; 0 where it fits or is not allowed."""
        if self.simulation is not None:
            return int(self.simulation.missing_bytes.max())
        return 0 if self.refusal is not None else self.figures.excess_bytes

    @property
    def obstacle(self) -> str:
        """The reason why it does not fit or is not allowed; "" where it may run."""
        if self.refusal is not None or self.fits:
            return self.refusal or ""
        device = int(np.argmax(self.replay.missing_bytes))
        name = self.problem.cluster.devices[device].name
        return f"does not fit by {size(int(self.replay.missing_bytes[device]))} on {name}"

    @property
    def replay(self) -> Simulation:
        """The step in full; ValueError if it was not kept."""
        if self.simulation is None:
            raise ValueError("candidate: its simulation was not kept; make it with `Question.replay`")
        return self.simulation

    @property
    def problem(self) -> Problem:
        """The problem that its step solves."""
        return self.replay.problem

    @property
    def way(self) -> Arrangement:
        """The arrangement of the batch; ValueError for a placement of the graph as it is."""
        if self.cut is None:
            raise ValueError("candidate: its batch is not cut")
        return self.cut.arrangement

    @property
    def layout(self) -> Layout:
        """The layout of the batch; of a placement of the graph as it is, the whole one."""
        return Layout() if self.cut is None else self.cut.arrangement.layout

    @property
    def named_layout(self) -> Layout:
        """The layout, with what auto stands for in its step if that is a word; lists of modules stay auto."""
        step = None if self.cut is None else self.cut.step
        if step is None or not isinstance(step.layout.recompute, str) or not isinstance(step.layout.offload, str):
            return self.layout
        return replace(self.layout, recompute=step.layout.recompute, offload=step.layout.offload)

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices [R][P] of each replica."""
        return self.way.devices

    @property
    def step(self) -> Step | BatchStream:
        """The step that was cut; ValueError where none was."""
        if self.cut is None or self.cut.step is None:
            raise ValueError("candidate: its step was not cut")
        return self.cut.step

    @property
    def places(self) -> I64:
        """The places [N] of a replica's ops; ValueError where they are not known."""
        if self.cut is None or self.cut.places is None:
            raise ValueError("candidate: the places of its ops are not known")
        return self.cut.places

    @property
    def has_places(self) -> bool:
        """True if more is known of it than arithmetic says: the places of a replica's ops."""
        return self.cut is not None and self.cut.places is not None

    @property
    def is_whole(self) -> bool:
        """True for op placement of the whole step."""
        return self.layout.is_whole

    @property
    def may_be_answer(self) -> bool:
        """True if it was simulated as captured, whether or not it fits."""
        return self.simulation is not None and (self.cut is None or self.cut.is_captured)

    @property
    def error(self) -> float:
        """The share by which the times of two plans may differ and be a tie; 0 where that is not known."""
        return 0.0 if self.simulation is None else tie_share(self.problem.graph, self.problem.cluster, self.placement)

    @property
    def allowance(self) -> float:
        """The share of its time that a simpler answer may take more. On cards a tie is no reason to be slower than what
        users run: of published steps, the predicted fastest of one tensor degree was the fastest to 0.5 %."""
        is_on_cards = not all(device.is_cpu for device in self._used)
        return min(self.error, _ON_CARDS) if is_on_cards else self.error

    @property
    def complexity(self) -> tuple[int, ...]:
        """Risks of a prediction, the worst first: devices, ZeRO, more work, micro-batches, transfers, parts."""
        layout = self.named_layout
        more_work = (layout.recompute != NONE) + (layout.offload != NONE)
        num_devices, num_transfers = sum(each.num_cards for each in self._used), len(self.replay.transfer_tensors)
        num_microbatches = max(layout.microbatches, default=1)
        return num_devices, layout.zero, more_work, num_microbatches, num_transfers, layout.num_parts

    @property
    def _used(self) -> list[Device]:
        return [self.problem.cluster.devices[device] for device in unique(self.placement).tolist()]

    @property
    def baseline(self) -> Baseline:
        """The row of a comparison with an answer; ValueError for one that was not simulated."""
        return Baseline("ok" if self.fits else "infeasible", self.step_time_ns, 0.0)


def simplest(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the simplest of the candidates that are as fast as the best: slower by its allowance at most. Where the
    error of predictions is not known, as of graphs without shapes on GPUs, the best candidate is the answer."""
    candidates = [each for each in candidates if each.may_be_answer] or candidates
    best = min(candidates)
    if not (best.fits and best.error):
        return best
    limit_ns = (1 + best.allowance) * best.step_time_ns
    ties = [each for each in candidates if each.fits and each.step_time_ns <= limit_ns]
    return min(ties, key=lambda each: (each.complexity, each.figures))
