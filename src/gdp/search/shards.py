"""The choice whether ops are cut over groups of cards: the same question about local programs of several degrees.

    question --tensor=4, 2, .. on groups--> its bound --a look, as many groups as samples first--> solution --.
             --with expert=.., context=..--> its bound --a look, where arithmetic promises less--> solution --+
             --as it is--> its bound --------------------a look----------------------------------> solution --+--> best
                                          the two that promise the fastest layouts share the time left

A question whose bound is above the best step found is not asked, nor one behind a degree that is slower than another,
unless cards idle less: as degrees grow, they exchange more. To capture the local programs of the first two degrees
comes on top of the budget, before it where they come first; those of others are of it. Groups come first where copies
of the model do not use all cards well: in a forward pass, where samples are fewer than cards or some cards wait, and
where a copy and its optimizer state are too large for a card and take long to gather. They come after the step as it is
where a copy is too large but is gathered beside the work, where sums of gradients take longer than the work, if what
was found is far from their bounds, and where nothing else fits. Tokens are cut (`context`) where arithmetic
promises less to exchange: activations go among fewer ranks each, but gradients are of more weights, and keys and values
go, too."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from math import gcd, inf
from operator import attrgetter
from textwrap import shorten
from types import MappingProxyType

from gdp.bounds.layout_bound import layout_bound
from gdp.budget import Clock
from gdp.cluster.cluster import Cluster
from gdp.cluster.groups import divisors
from gdp.costs.attention import ATTENTION
from gdp.costs.collectives import ALL_GATHER, ALL_REDUCE, COLLECTIVE, AlikeCards
from gdp.costs.table import class_of
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.accumulation import ELEMENT_BYTES
from gdp.graph.parameter_bytes import gradients_of_updates
from gdp.graph.shapes import parsed_calls
from gdp.models.shards import WHOLE, Shards
from gdp.notebook import milliseconds
from gdp.parallel.layout import Layout
from gdp.parallel.step import in_flight
from gdp.search.place_question import PlaceQuestion, waiting_share
from gdp.search.question import Solution
from gdp.simulator.constraints import memory_limits
from gdp.stop import skip_on_interrupt

Solve = Callable[..., Solution]  # of a question, a clock and, to go on from, the answer that is known
_LOOK = 0.3  # of the time is for a look at all degrees,
_FIRST = 0.5  # of the time is for the step as it is, where it comes first and groups may be better,
_REACHED = 2.0  # times their bound, that steps of groups hardly take less than. Untuned
_WHOLE = 0.3  # of the rest for the step as it is, first where no degree fits,
_AGAIN = 2  # degrees at most share what is left: the one whose best layout, estimated or simulated, is the fastest,
_NEAR = 1.1  # and one that promises no more than this times its step time. Untuned
_BESIDE = 1.25  # times the best step: the two best degrees, if not slower, are looked at with experts. Untuned
_FURTHER = 0.15  # of the rest is for a look at each further degree of experts and tokens; untuned
_LEAST_GAIN = 0.02  # of the step time, that exchanges have to promise before a further degree is captured; untuned
_MOST_REASON = 160  # characters


def over_degrees(question: PlaceQuestion, clock: Clock, solve: Solve) -> Solution:
    """Returns the best that `solve` finds for `question` and, where they may win, for local programs on groups. An
    answer without groups is kept unless another one fits better or is faster."""
    degrees = question.degrees
    if not degrees:
        return stamped(solve(question, clock), question.shards)
    if question.needs_groups:
        return _Contest(question, clock, solve).run(degrees)
    may_need_groups = question.may_need_groups
    whole = solve(question, clock.part(_FIRST) if may_need_groups else clock)
    if clock.stop.is_set() or (not may_need_groups and whole.plan is not None and whole.plan.status == "ok"):
        return whole
    return _Contest(question, clock, solve, {WHOLE: whole}).run(degrees)


class _Contest:
    """The answers for several degrees, and why there is none of others."""

    def __init__(
        self,
        question: PlaceQuestion,
        clock: Clock,
        solve: Solve,
        known: Mapping[Shards, Solution] = MappingProxyType({}),
    ) -> None:
        """`known` are answers by their shards, as all that is found."""
        assert question.source is not None, "it has degrees"
        self.question, self.source, self.clock, self.solve = question, question.source, clock, solve
        self.found = dict(known)
        self._hoped_ns = inf  # the least that a way which was looked at before may take, if any estimate is right
        for solution in known.values():
            misses, answer_ns = _rank(solution)
            estimates = (each.step_time_ns for each in solution.looked_at if each.fits)
            self._hoped_ns = self._hoped_ns if misses else min([answer_ns, *estimates])
        self.opened = {WHOLE: question}
        self.failures: dict[Shards, InputError] = {}
        self.uncut: set[Shards] = set()  # that the model is not cut by
        devices = question.cluster.devices
        self._longest_s = 0.0  # that a look has taken
        self._num_cards = sum(not device.is_cpu for device in devices) or len(devices)
        self.has_experts = question.source.reading.training and question.has_experts

    def run(self, degrees: Iterable[int]) -> Solution:
        """Returns the best answer for local programs, the most promising first, and the step as it is, if not known."""
        look, turns = self.clock.part(_LOOK), [*degrees]
        for turn, degree in enumerate(turns):
            self._look(Shards(degree), look, 1 / (len(turns) - turn))
        if WHOLE not in self.found and self._best_ns == inf:  # FSDP may be all that fits
            self._ask(WHOLE, self.clock.part(_WHOLE))
        self._look_further(self._over_samples(turns))
        for shards in sorted(self._fitting, key=lambda each: _rank(self.found[each]))[:2]:
            if _rank(self.found[shards])[1] <= _BESIDE * self._best_ns:
                self._look_further(self._with_experts(shards))
        self._look_further(self._with_context(turns))
        if WHOLE not in self.found and self.question.bound_ns < self._best_ns and self._has_time_for_whole:
            has_others = self._best_ns < inf or (self.uncut and self.source.reading.training)
            self._ask(WHOLE, self.clock.part(_WHOLE).at_least(self._longest_s) if has_others else self.clock.part())
            self._look_further(self._with_context(turns))
        if not self.found:
            raise self.failures.get(WHOLE) or next(iter(self.failures.values()))
        promised_ns = {shards: self._promised_ns(shards) for shards in self.found if shards in self.opened}
        limit_ns = min(self._best_ns, _NEAR * min(promised_ns.values(), default=inf))
        hoped_ns = {shards: self._reachable_ns(shards, promised_ns[shards]) for shards in promised_ns}
        again = sorted((shards for shards in hoped_ns if hoped_ns[shards] <= limit_ns), key=hoped_ns.__getitem__)
        for turn, shards in enumerate(again[:_AGAIN]):
            if not self.clock.is_up:
                self._ask(shards, self.clock.part(1 / (len(again[:_AGAIN]) - turn)))
        return self._answer(min(self.found, key=lambda shards: _rank(self.found[shards])))

    @property
    def _has_time_for_whole(self) -> bool:
        """True where as much time is left as the longest look has taken, or nothing else was found that fits."""
        if self._best_ns == inf:
            return not (self.found and self.clock.is_up)
        return not self.clock.is_up and self.clock.has(self._longest_s)

    def _look(self, shards: Shards, clock: Clock, share: float) -> None:
        begin_s = self.clock.seconds
        try:
            self._open(shards)
            self._ask(shards, clock.part(share))
            self._longest_s = max(self._longest_s, self.clock.seconds - begin_s)
        except InputError as error:  # such as heads that the degree does not divide
            self.failures[shards] = error

    def _look_further(self, several: Iterable[Shards]) -> None:
        """Looks at further degrees until one is not better than what was found before."""
        for shards in several:
            before = self._best_ns
            if shards in self.found or shards in self.failures:
                continue
            if not self.clock.is_up:
                self._look(shards, self.clock, _FURTHER)
            if self._best_ns >= before:
                return

    def _open(self, shards: Shards) -> None:
        """Captures the local program of a rank. InputError where the model or the cluster does not allow it, where it
        cannot win, and where there is no time."""
        degree, best, is_first = shards.num_ranks, self._best.num_ranks, shards == Shards(shards.tensor)
        for other in [each.num_ranks for each in self._fitting] if is_first else []:
            is_between = 1 < min(degree, best) < other < max(degree, best)
            if is_between and self._waiting_share(degree) >= self._waiting_share(other):
                raise InputError(f"groups of {other} are slower than those of {best}")
        is_on_top = self.question.is_on_top(shards)
        if self.clock.is_up or not (is_on_top or self.clock.has(self.question.reading_s(shards))):
            raise InputError("there was no time; give a larger --budget")
        if _REACHED * self.question.bound_ns >= self._hoped_ns:
            raise InputError("without them a step is near the bound of all layouts")
        try:
            with self.clock.paused() if is_on_top else nullcontext():
                asked = self.opened[shards] = self.question.sharded(shards)
        except InputError:
            self.uncut.add(shards)
            raise
        if asked.bound_ns >= self._best_ns or _REACHED * asked.bound_ns >= self._hoped_ns:
            near = "" if asked.bound_ns >= self._best_ns else ", and few come near"
            raise InputError(f"no step of theirs takes less than {milliseconds(asked.bound_ns)}{near}")
        if is_on_top:
            with self.clock.paused():
                skip_on_interrupt(self.clock.stop, asked.prepare)
        if self.clock.stop.is_set():
            raise InputError("they were not looked at: an interrupt came")

    def _ask(self, shards: Shards, clock: Clock) -> None:
        """Asks for an answer, from the one that is known on; from op placement, if it promises most as it is."""
        known, further = self.found.get(shards), tuple[Solution, ...]()
        if known is not None and known.best is not None:
            is_most = shards == WHOLE and self._promised_ns(shards) == self._best_ns
            further = (known,) if is_most or not known.best.is_whole else ()
        try:
            solution = self.solve(self.opened[shards], clock, *further)
        except InputError as error:
            self.failures.setdefault(shards, error)
            return
        self.found[shards] = solution if known is None else min(known, solution, key=_rank)

    def _promised_ns(self, shards: Shards) -> float:
        """The step time of the best answer or layout of a degree that fits, be it an estimate."""
        misses, answer_ns = _rank(self.found[shards])
        estimates = (each.step_time_ns for each in self.found[shards].looked_at if each.has_places and each.fits)
        return min([inf if misses else answer_ns, *estimates])

    def _reachable_ns(self, shards: Shards, promised_ns: float) -> float:
        """Returns what a degree promises, or, where op placement on groups is its best, which a look searches for a
        moment, what steps of groups hardly take less than; less where a search of places may gain."""
        best = self.found[shards].best
        if best is None:
            return promised_ns
        if shards != WHOLE and best.is_whole:
            return min(promised_ns, _REACHED * self.opened[shards].bound_ns)
        return promised_ns / _NEAR if best.cut is not None and len(best.devices[0]) > 1 else promised_ns

    @property
    def _best(self) -> Shards:
        return min(self.found, key=lambda shards: _rank(self.found[shards]), default=WHOLE)

    @property
    def _best_ns(self) -> float:
        """The step time of the best answer that fits."""
        return min((_rank(self.found[shards])[1] for shards in self._fitting), default=inf)

    @property
    def _fitting(self) -> list[Shards]:
        return [shards for shards, solution in self.found.items() if not _rank(solution)[0]]

    def _waiting_share(self, degree: int) -> float:
        """Returns what groups of `degree` cards wait for each other, as a share of their work on whole samples."""
        groups = sum(bool(device.group) for device in self.question.cluster.grouped(degree).devices)
        return waiting_share(self.source.batch_size or 1, groups)

    def _with_experts(self, shards: Shards) -> Iterator[Shards]:
        """Yields degrees of experts of a mixture in training beside a tensor degree, from whole experts on."""
        counts = reversed(divisors(shards.tensor if self.has_experts else 1))
        yield from (replace(shards, expert=count) for count in counts)

    def _over_samples(self, sizes: Iterable[int]) -> list[Shards]:
        """Returns degrees of experts on ranks that are replicas otherwise, the most parts first: where each card has a
        sample."""
        samples = self.source.amounts().get("samples", 1)
        sizes = sizes if self.has_experts and samples >= self._num_cards else ()
        return [Shards(expert=size) for size in sorted(sizes, reverse=True) if samples % size == 0]

    def _with_context(self, sizes: Iterable[int]) -> list[Shards]:
        """Returns degrees that cut tokens and promise a gain in training, the fewest parts first."""
        if not self.source.reading.training or self._best_ns == inf:
            return []
        amounts, most, expert = self.source.amounts(), (1 - _LEAST_GAIN) * self._best_ns, self._best.expert
        whole = amounts.get("tokens", 0) // amounts.get("samples", 1)  # 0: not known
        sizes = [size for size in sizes if whole % size == 0]
        several = [Shards(tensor, context=size // tensor) for size in sizes for tensor in (1, *divisors(size)[:-1])]
        promising = [shards for shards in several if self._estimated_ns(shards) < most]
        return [replace(each, expert=gcd(expert, each.tensor)) for each in sorted(promising, key=attrgetter("context"))]

    def _estimated_ns(self, shards: Shards) -> float:
        """Returns about what a step takes with tokens cut: as long as that of as many ranks which cut ops alone, but
        for exchanges, else as that of fewer ranks. inf where neither is known, and where memory does not suffice."""
        question, size = self.question, shards.num_ranks
        alone = [each for each in self.found if (each.tensor, each.context) == (size, 1)]
        base = min(alone, key=lambda each: _rank(self.found[each]), default=Shards(shards.tensor))
        if base not in self.found or _rank(self.found[base])[0] or not (alone or Shards(size) in self.uncut):
            return inf
        plan, cluster = self.found[base].plan, question.cluster.grouped(size)
        assert plan is not None, "it fits"
        is_group = [bool(device.group) for device in cluster.devices]
        held = int(question.graph.resident_bytes.sum()) / (shards.tensor * sum(is_group))  # with ZeRO
        if held > memory_limits(cluster, question.constraints.on_groups(cluster, question.cluster))[is_group].max():
            return inf
        graph, num_samples = self.opened[base].graph, self.source.batch_size or 1
        return _with_tokens_cut_ns(graph, plan.step_time_ns, base, shards, cluster, num_samples)

    def _answer(self, chosen: Shards) -> Solution:
        found = {shards: stamped(solution, self.opened[shards].shards) for shards, solution in self.found.items()}
        best = found.pop(chosen)
        others = [each for solution in found.values() for each in solution.looked_at]
        reasons: dict[tuple[bool, str], list[Shards]] = {}
        for shards, error in self.failures.items():
            if shards != WHOLE and shards not in self.found:
                is_further = shards != Shards(shards.tensor)
                reasons.setdefault((is_further, shorten(str(error), _MOST_REASON)), []).append(shards)
        notes = *best.notes, *(note for note in self.opened[chosen].notes if note not in self.question.notes)
        if reasons:
            each = (
                f"{' and '.join(map(str, several))}: {reason}"
                if is_further
                else f"groups of {', '.join(str(shards.tensor) for shards in several)} cards: {reason}"
                for (is_further, reason), several in reasons.items()
            )
            notes += (f"ops were not cut over {'; '.join(each)}",)
        parts, plan = self.question.parts, best.plan
        bound_ns = best.bound_ns if parts is None else layout_bound(parts.read, self.question.cluster)
        if plan is not None and plan.search is not None:
            search = replace(plan.search, seconds=self.clock.seconds, simulations=self.clock.simulations)
            best = best._replace(plan=replace(plan, search=search))
        return best._replace(looked_at=(*best.looked_at, *others), bound_ns=bound_ns, notes=notes)


def stamped(solution: Solution, shards: Shards) -> Solution:
    """Returns the solution of a local program with the shards in its layouts and in its plan."""
    if shards == WHOLE or solution.plan is None:
        return solution
    plan = solution.plan
    document = dict(plan.layout or Layout().document())
    document |= shards.document() | {"data": shards.samples * document["data"]}
    kept = (each for each in (solution.best, *solution.looked_at) if each is not None)
    looked_at = {each: replace(each.on_groups(shards), name="") for each in kept}  # names are of ways on single cards
    return solution._replace(
        plan=replace(plan, layout=document),
        best=None if solution.best is None else looked_at[solution.best],
        looked_at=tuple(looked_at[each] for each in solution.looked_at),
    )


def _rank(solution: Solution) -> tuple[float, float]:
    """Returns the bytes that a card lacks, 0 if the answer fits, and the step time: the lesser, the better."""
    plan, best = solution.plan, solution.best
    if plan is None:
        return inf, inf
    lacks = 0 if plan.status == "ok" else 1 if plan.search is None else max(int(plan.search.missing_bytes.max()), 1)
    is_in_flight = best is not None and in_flight(plan.layout)
    return lacks, best.step_time_ns if is_in_flight and best is not None else plan.step_time_ns


def _with_tokens_cut_ns(
    graph: Graph, step_time_ns: int, base: Shards, shards: Shards, cluster: Cluster, num_samples: int
) -> float:
    """Returns about what a step of `shards` takes on the groups of `cluster`, where the local program `graph` of `base`
    takes `step_time_ns`: the same but for exchanges if `base` has as many ranks, else a part. All of it is
    known in bytes of that program."""
    group = next(device for device in cluster.devices if device.group)
    num_groups = sum(bool(device.group) for device in cluster.devices) * shards.num_ranks // base.tensor
    num_used, scale = min(num_samples, num_groups), base.tensor / shards.tensor
    gradients = graph.tensor_bytes[gradients_of_updates(graph)].tolist()
    sums = [(ALL_REDUCE, int(each * scale)) for each in gradients]
    keys = [(ALL_GATHER, int(each * scale)) for each in _key_bytes(graph)] * 3  # and again, and their gradients
    among = AlikeCards.of_group(group, shards.context)
    added_ns = _total_ns(among, sums) + _total_ns(among, keys) / num_used
    if base.num_ranks < shards.num_ranks:  # on more cards, where ops have no more parts
        return step_time_ns / min(shards.context, num_groups / num_used) + added_ns
    calls = [
        (kind.removeprefix(f"{COLLECTIVE}."), num_bytes)
        for kind, num_bytes in zip(graph.kinds, graph.bytes_accessed.tolist(), strict=True)
        if class_of(kind) == COLLECTIVE
    ]
    spared_ns = _total_ns(AlikeCards.of_group(group), calls)
    if shards.tensor > 1:
        fewer = AlikeCards.of_group(group, shards.tensor)
        spared_ns -= _total_ns(fewer, [(kind, num_bytes // shards.context) for kind, num_bytes in calls])
    return step_time_ns - spared_ns / num_used + added_ns


def _key_bytes(graph: Graph) -> list[int]:
    """Returns the bytes of keys, and those of values, of each attention of a forward pass."""
    return [
        ELEMENT_BYTES.get(array.dtype, 4) * array.num_elements
        for kind, phase, shapes in zip(graph.kinds, graph.phases, graph.shapes, strict=True)
        if kind in ATTENTION and phase == "forward" and shapes
        for array in parsed_calls(shapes)[0].arrays[1:3]
    ]


def _total_ns(cards: AlikeCards, exchanges: Iterable[tuple[str, int]]) -> int:
    return sum(count * cards.time_ns(*each) for each, count in Counter(exchanges).items())
