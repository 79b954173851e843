"""Layouts within a budget: no phase begins what the clock has no time for, and estimates cut each model once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gdp.budget import Budget, Clock
from gdp.graph import Graph
from gdp.parallel.layout import AUTO, BLOCKS, NONE, Layout
from gdp.parallel.recompute import Recomputation, blocks_to_recompute, recomputed
from gdp.planning.layout_answer import LayoutAnswer
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Arrangement, BatchCut, Candidate, Figures
from gdp.search.layouts.arrangement import replicated_ways
from gdp.search.layouts.choose import _confirmed
from gdp.search.layouts.estimate import Estimator
from gdp.search.layouts.estimate_queue import EstimateQueue
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.layouts.less_memory import with_less_memory
from gdp.search.layouts.screening import Screening
from gdp.search.question import BatchQuestion, Solution
from gdp.search.settings import DEFAULTS, LargeSteps, Settings
from gdp.simulator.constraints import Constraints
from problems import choose
from tests.search.test_layouts import BATCH, encoder, layers, machine_of, parts_of

BUDGET_S, TICK_S = 10.0, 0.02


@dataclass
class SlowMachine:
    """A machine where reading a model and simulating a layout take seconds, and every look at the clock a little."""

    read_s: float = 0.0
    simulation_s: float = 0.0
    now_s: float = 0.0
    num_reads: int = 0
    parts: Parts = field(init=False)
    layouts: list[str] = field(default_factory=list)  # that were simulated

    def __call__(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    def part(self, num_parts: int) -> Graph:
        self.now_s += self.read_s
        self.num_reads += 1
        return layers(num_parts)

    def choose(self, memory: str, monkeypatch: pytest.MonkeyPatch) -> Solution:
        """Chooses in a budget that begins when the whole step is read."""
        simulate: Callable[..., Any] = LayoutSearch.simulate

        def slow(search: LayoutSearch, arrangement: Any, *args: Any, **options: Any) -> Any:
            self.now_s += self.simulation_s
            self.layouts.append(str(arrangement.layout))
            return simulate(search, arrangement, *args, **options)

        monkeypatch.setattr(LayoutSearch, "simulate", slow)
        parts = self.parts = Parts(self.part, BATCH, self.part(1), seconds=self.read_s)
        self.num_reads, self.now_s = 0, 0.0
        clock = Clock(Budget(seconds=BUDGET_S), timer=self)
        return choose(parts, machine_of([1.0] * 4, memory=memory), budget=clock, num_threads=1)


@pytest.mark.parametrize(("read_s", "most"), [(0.5, 20), (4.0, 2), (9.0, 1), (11.0, 0)])
def test_parts_are_read_while_there_is_time(read_s: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reads of 4 s two go into a budget of 10 s; of 11 s none does, and the ops of the whole step are placed."""
    machine = SlowMachine(read_s=read_s)
    choice = machine.choose("1GB", monkeypatch)
    assert machine.now_s <= 1.1 * BUDGET_S
    assert (machine.num_reads == 0) == (most == 0)
    assert machine.num_reads <= most
    assert choice.plan.status == "ok"
    assert choice.best.is_whole == (most == 0)
    if most == 0:
        reasons = {each.refusal or "" for each in choice.looked_at}
        assert any("no time is left to read the model with 1/4 of its batch" in reason for reason in reasons)
        assert "there was no time to read the model" in LayoutAnswer.of(choice, machine.parts).notes[0]


@pytest.mark.parametrize("memory", ["4MB", "1GB"])
def test_layouts_are_simulated_while_there_is_time(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more simulations of 1.5 s are made than a budget of 10 s has, where nothing fits as where all does."""
    machine = SlowMachine(simulation_s=1.5)
    choice = machine.choose(memory, monkeypatch)
    assert machine.now_s <= 1.1 * BUDGET_S
    assert 0 < len(machine.layouts) <= BUDGET_S / 1.5
    assert choice.plan.status == ("ok" if memory == "1GB" else "infeasible")


@pytest.mark.parametrize("op_s", [0.01, 0.04, 0.2])
def test_no_step_is_simulated_that_there_is_no_time_for(op_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 16 to 2,000 ops at 10, 40 or 200 ms an op: all but the first end within the budget."""
    machine = SlowMachine()
    simulated: Callable[..., Any] = LayoutSearch._simulated
    ends: list[float] = []

    def slow(search: LayoutSearch, *args: Any) -> Any:
        candidate = simulated(search, *args)
        machine.now_s += op_s * candidate.problem.num_ops
        ends.append(machine.now_s)
        return candidate

    monkeypatch.setattr(LayoutSearch, "_simulated", slow)
    choice = machine.choose("1GB", monkeypatch)
    assert choice.plan.status == "ok"
    assert len(ends) < 2 or ends[-1] <= BUDGET_S
    assert ends


@pytest.mark.parametrize("simulation_s", [0.0, 4.0, 30.0])
def test_what_takes_the_least_memory_is_found_however_slow_the_machine(
    simulation_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where FSDP with all blocks recomputed just fits, an answer fits, also where one step takes all of the time."""
    way = Layout((1,) * 4, zero=3, recompute=BLOCKS)
    alone = choose(parts_of(), machine_of([1.0] * 4, memory="1GB"), layout=way, budget="1sims")
    memory = f"{max(alone.plan.peak_memory_bytes)}B"
    machine = SlowMachine(simulation_s=simulation_s)
    assert machine.choose(memory, monkeypatch).plan.status == "ok"


@pytest.mark.parametrize("memory", ["1GB", "24MB", "6MB"])
def test_arithmetic_promises_no_more_than_estimates(memory: str) -> None:
    """Where arithmetic says that a layout lacks memory, an estimate says that it lacks as much or more."""
    parts, cluster = Parts(layers, BATCH), machine_of([1.0, 1.0, 2.0, 2.0], memory=memory)
    estimator = Estimator(parts, cluster, Constraints())
    ways = replicated_ways(estimator.machine, BATCH)
    ways += [other for way in ways for other in with_less_memory(way, BATCH, has_cpu=False)]
    least = [estimator.least(way).missing_bytes for way in dict.fromkeys(ways)]
    estimated = [estimator.estimate(way).missing_bytes for way in dict.fromkeys(ways)]
    assert all(one <= other for one, other in zip(least, estimated, strict=True))
    assert any(least) == (memory != "1GB")  # with 24 MB one device lacks memory for the activations of a whole batch


@pytest.mark.parametrize("memory", ["1GB", "24MB"])
def test_a_large_step_is_promised_more_than_least_and_no_more_than_estimates(memory: str) -> None:
    """Of a chain, arithmetic knows that stages wait for the first micro-batch and the last one, and what rings take."""
    cluster, large = machine_of([1.0, 1.0, 2.0, 2.0], memory=memory), replace(LargeSteps(), estimated_ops=0)
    estimator = Estimator(Parts(layers, BATCH), cluster, Constraints(), replace(Settings(), large=large))
    ways = replicated_ways(estimator.machine, BATCH)
    ways += [replace(way, layout=replace(way.layout, recompute=AUTO)) for way in ways]
    least, promised, estimated = (
        [find(way) for way in ways] for find in (estimator.least, estimator.promise, estimator.estimate)
    )
    each = [*zip(ways, least, promised, estimated, strict=True)]
    assert all(one.step_time_ns <= two.step_time_ns <= 1.001 * three.step_time_ns for _, one, two, three in each)
    assert all(one.missing_bytes == two.missing_bytes for _, one, two, _ in each)
    assert all(one.step_time_ns < two.step_time_ns for way, one, two, _ in each if len(way.all_devices) > 1)
    small = Estimator(Parts(layers, BATCH), cluster, Constraints())
    assert all(small.promise(way).step_time_ns == small.least(way).step_time_ns for way in ways)


def test_replicas_on_one_card_each_are_looked_at_in_a_few_micro_batches() -> None:
    """Few samples at once may be faster: what passes between their ops stays in the cache of a card."""
    estimator = Estimator(Parts(layers, BATCH), machine_of([1.0] * 2), Constraints())
    alone = [way.layout for way in replicated_ways(estimator.machine, BATCH) if way.num_places == 1]
    counts = {layout.microbatches for layout in alone if layout.data == 2 and layout.zero == 0}
    assert counts == {(1, 1), (2, 2), (4, 4), (8, 8)}
    assert {layout.zero for layout in alone if layout.data == 2} == {0, 1, 3}


@pytest.mark.parametrize("memory", ["1GB", "24MB"])
def test_what_was_estimated_before_is_not_estimated_again(memory: str) -> None:
    """A queue that knows all estimates of another has the same arrangements and estimates of them, and makes none."""
    question = BatchQuestion(parts_of(), machine_of([1.0] * 4, memory=memory))
    queues, made = list[EstimateQueue](), list[Arrangement]()
    for _ in range(2):
        search = LayoutSearch(question, Clock(None))
        estimate = search.estimator.estimate

        def noted(way: Arrangement, estimate: Callable[[Arrangement], Candidate] = estimate) -> Candidate:
            made.append(way)
            return estimate(way)

        search.estimator.estimate = noted  # type: ignore[method-assign]
        queue = EstimateQueue(search.estimator, BATCH, search.attempt)
        if queues:
            queue.know(queues[0].left, search.clock)
        queue.add(replicated_ways(search.estimator.machine, BATCH))
        while unknown := [each for each in queue.left if not each.has_places]:
            queue.estimate(unknown[0])
        queues.append(queue)
    first, second = ({each.way: each.figures for each in queue.left} for queue in queues)
    assert first == second
    assert sorted(map(str, made)) == sorted(map(str, first))


@pytest.mark.parametrize("memory", ["24MB", "6MB"])
def test_blocks_are_chosen_in_the_places_that_are_the_fastest_with_them(memory: str) -> None:
    """An estimate is the best of all places, also where blocks are not chosen in each of them."""
    cluster = machine_of([1.0, 1.0, 2.0, 2.0], memory=memory)
    estimator = Estimator(Parts(encoder, BATCH), cluster, Constraints())
    alike = replicated_ways(estimator.machine, BATCH)
    ways = [replace(way, layout=replace(way.layout, recompute=AUTO)) for way in alike]
    for way in ways:
        several = [estimator._with_places(way, places) for places in estimator._candidates(way)]
        assert estimator.estimate(way).figures == min(each.figures for each in several)
    assert any(len(estimator._candidates(way)) > 1 for way in ways)


def test_parts_that_were_read_come_before_the_least_memory() -> None:
    """Where nothing was simulated, the best estimate of a part of the batch that was read is: plain replicas here, not
    FSDP with all blocks recomputed. Where no device holds a copy of the model, none is."""
    for held_bytes, wanted in ((0, [NONE]), (10**8, [])):
        question = BatchQuestion(parts_of(held_bytes=held_bytes), machine_of([1.0] * 4, memory="64MB"))
        search = LayoutSearch(question, Clock(None))
        for num_parts in (1, 4):
            search.parts.exact(num_parts)
        screening = Screening(search)
        screening._queue.add(replicated_ways(search.estimator.machine, BATCH))
        for each in [*screening._queue.left]:
            screening._queue.estimate(each)
        candidates = screening.of_read_parts()
        assert [each.layout.recompute for each in candidates] == wanted
        assert all(each.layout.num_parts in (1, 4) and each.may_be_answer for each in candidates)


def test_a_step_of_another_size_is_recomputed_alike() -> None:
    """What was found for a quarter of the batch gives the step of half of it."""
    few, more = encoder(4), encoder(2)
    known = Recomputation.of(blocks_to_recompute(few, "blocks"))
    assert known.of_other_sizes(more).fingerprint == recomputed(more, "blocks").fingerprint


def test_estimates_find_each_set_of_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layouts recompute the same blocks, in however many parts of the batch, these are found once."""
    seen: list[tuple[str, ...]] = []
    make = Recomputation.of

    def counted(blocks: Any, places: Any = None) -> Recomputation:
        seen.append(blocks.paths)
        return make(blocks, places)

    monkeypatch.setattr(Recomputation, "of", counted)
    parts, cluster = Parts(encoder, BATCH), machine_of([1.0] * 4, memory="24MB")
    estimator = Estimator(parts, cluster, Constraints())
    ways = replicated_ways(estimator.machine, BATCH)
    for way in ways:
        for other in with_less_memory(way, BATCH, has_cpu=False):
            if other.layout.recompute == AUTO:
                estimator.estimate(other)
    assert seen
    assert len(seen) <= len(set(seen)) + 1  # all layers have a name of their own


def test_a_layout_that_was_told_of_is_not_lost_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may end an attempt after its step was simulated, before it returns."""
    attempt: Callable[..., Any] = LayoutSearch.attempt

    def cut_short(search: LayoutSearch, *args: Any) -> Any:
        found = attempt(search, *args)
        return None if isinstance(found, Candidate) and found.simulation is not None else found

    monkeypatch.setattr(LayoutSearch, "attempt", cut_short)
    told: list[Candidate] = []
    choice = choose(parts_of(), machine_of([1.0] * 4), budget="300sims", on_progress=told.append)
    assert choice.best.figures == min(each.figures for each in told if each.may_be_answer)
    assert not choice.best.is_whole


@pytest.mark.parametrize(("replica_ns", "is_confirmed"), [(100, True), (5_000, False)])
def test_replicas_beside_a_better_op_placement_are_confirmed_before_they_are_searched(
    replica_ns: int, is_confirmed: bool
) -> None:
    """Those that are interpolated and cannot be read in time are left out; hopeless ones are never searched."""
    step: Any = SimpleNamespace(feasible=True)
    replicas = Arrangement(Layout((1, 1)), ((0, 1), (2, 3)))
    whole, rough = (
        Candidate(np.zeros(1, int), Figures(0, time_ns), simulation=step, cut=cut)
        for time_ns, cut in (
            (90, BatchCut(Arrangement(Layout(), ((0, 1, 2, 3),)))),
            (replica_ns, BatchCut(replicas, None, np.zeros(1, int), is_captured=False)),
        )
    )
    asked: list[Arrangement] = []
    search: Any = SimpleNamespace(
        has_time=lambda _: True,
        attempt=lambda _, way: asked.append(way),
        simulate=lambda *_, **__: None,
        settings=DEFAULTS,
    )
    assert _confirmed(search, [whole, rough]) == ([whole] if is_confirmed else [whole, rough])
    assert asked == [rough.way] * is_confirmed
