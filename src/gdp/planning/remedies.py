"""Remedies: changes with which a step would fit, where nothing does.

    same machine: more micro-batches | another optimizer or precision | adapters beside frozen weights
    other machine: a CPU beside it | more such devices | one larger card      smaller step: fewer samples

Each is tried by a search that ends at the first step that fits. Of changes that differ in size the smallest
one that was found in time is told; if none was, the smallest one that bytes held leave room for."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from gdp.budget import Clock
from gdp.cluster import Cluster, changes
from gdp.cluster.catalogue import KINDS
from gdp.cluster.device import split_runtime
from gdp.errors import InputError
from gdp.graph.held_memory import HeldMemory
from gdp.graph.parameter_bytes import ParameterBytes
from gdp.models.lora import Lora
from gdp.models.model import PURE_BF16, Model
from gdp.models.source import ModelSource
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.parallel.step import with_caches
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Candidate
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.layouts.screening import Screening
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import BatchQuestion, Question
from gdp.search.solvers import solve
from gdp.simulator.constraints import memory_limits
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import NEVER

_MOST_DEVICES = 16  # of a machine with more of the same
_ROOMY = 0.6  # of the memory, held: with more a search takes long, and likely in vain
_HOST = "cpu-16core"  # the CPU beside a machine that has none
_FACTORS = (2, 4, 8, 16)  # fewer samples, more micro-batches
_TRY_SHARE = 0.5  # of the time that is left for changes that differ in size, for each of them
_PREPARED = 6  # times the time to build a problem: what it takes to prepare a search
_MOST_CAPTURED_S = 5.0  # a model that takes longer is not captured anew
_CAPTURES = 3  # times that it takes: a capture, and its step
_STATE_BYTES = {"adam-8bit": 2.0, "sgd": 0.0}  # of a parameter, by the optimizer
_ADAPTERS = ("rank=16,weights=nf4", "rank=16")
_UPDATES = (("adam-8bit", ""), ("", PURE_BF16), ("adam-8bit", PURE_BF16), ("sgd", ""), ("sgd", PURE_BF16))


class Remedy(NamedTuple):
    """A change with which a step fits."""

    change: str
    option: str = ""  # of `gdp place`; "": none makes the change
    step_time_ns: int | None = None  # of the first step found that fits; None: bytes were counted, nothing was tried
    missing_bytes: int = 0


class _Try(NamedTuple):
    change: str
    option: str
    question: Callable[[], PlaceQuestion]  # InputError where there is none
    is_roomy: bool = False  # by the bytes that it holds; without the time to try it, it is told


def held_bytes(question: PlaceQuestion) -> tuple[int, int]:
    """Returns the bytes that a step holds from its beginning to its end, whatever the batch, and all memory."""
    limits_bytes = memory_limits(question.cluster, question.constraints)
    step = with_caches(question.graph, max(question.num_batches, 1))
    return int(step.resident_bytes.sum()), int(limits_bytes.sum())


def leaner_updates(question: PlaceQuestion) -> Iterator[tuple[str, dict[str, str], int]]:
    """Yields options for optimizers and precisions with which all memory holds a captured step, by arithmetic, each
    with the values that it changes and the bytes held with it."""
    source, each = question.source, ParameterBytes.of(question.graph)
    state = 0.0 if each is None else each.master_weights + each.optimizer_state
    if source is None or each is None or not question.captured_s or not state:
        return
    elements = HeldMemory.of(question.graph).optimizer_state_bytes / state
    held, limits = held_bytes(question)
    for optimizer, precision in _UPDATES:
        if (precision and not each.master_weights) or optimizer == source.reading.optimizer:
            continue
        kept = _STATE_BYTES.get(optimizer, each.optimizer_state / (2 if precision else 1))
        saved = round(elements * (state - kept - (0 if precision else each.master_weights)))
        if saved > 0 and held - saved <= limits:
            others = {"optimizer": optimizer, "precision": precision}
            others = {name: value for name, value in others.items() if value}
            yield " ".join(f"--{name} {value}" for name, value in others.items()), others, held - saved


def _can_hold(question: PlaceQuestion) -> bool:
    held, limits = held_bytes(question)
    return held <= limits


@dataclass(frozen=True, eq=False)
class RemedySearch:
    """A search for remedies of a question that no step answers."""

    question: PlaceQuestion
    clock: Clock
    source: ModelSource | None = None  # of the step, where it can be read anew
    model: Model | None = None  # the step as it was read
    parallel: Layout | str | None = None  # that the user asked for
    devices: str = ""  # DEVICES of the command line
    missing_bytes: int = 0  # on the device that lacks most

    def run(self) -> list[Remedy]:
        """Returns remedies, those first that need no other machine, as far as the clock lets them be tried."""
        asked, clock = self.question, self.clock
        if clock.stop.is_set():
            return []
        began = clock.seconds
        if (parts := asked.parts) is None and not clock.is_up:
            Problem.build(asked.graph, asked.cluster, asked.constraints)
        elif parts is not None:  # tries interpolate what is not read yet
            asked = replace(asked, parts=Parts(parts.within(clock).rough, parts.batch_size, parts.exact(1)))
        least_s = _PREPARED * (clock.seconds - began)
        rows: list[Sequence[_Try | Remedy]] = [list(self._split()), *([each] for each in self._updated())]
        rows += [[each] for each in self._adapted()]
        rows += [list(row) for row in (self._with_host(asked), self._with_more(asked), self._on_one_card(asked))]
        rows += [list(self._of_fewer_samples(asked))]
        remedies: list[Remedy] = []
        for turn, row in enumerate(rows):
            words = set(row[0].option.split()) if row else set()
            if row and not any(each.option and words.issuperset(each.option.split()) for each in remedies):
                remedies += _smallest(row, clock.part(1 / (len(rows) - turn)), least_s)
        return remedies

    def _split(self) -> Iterator[_Try]:
        """Yields what holds fewer activations; a batch that may be cut in any way was tried in all of them."""
        asked, source = self.question, self.source
        if source is None or not asked.graph.is_in_phase("update").any():
            return
        count = source.reading.microbatches
        is_one = asked.parts is None and source.batch_size == 1
        if count == 1 and (is_one or self.parallel not in (None, AUTO)):
            own = source, asked.cluster, asked.constraints, AUTO, None, asked.options, self.model
            yield _Try("a layout of the batch", "--parallel auto", partial(PlaceQuestion.of, *own))
        elif asked.parts is None:
            for factor in _FACTORS:
                option = f"--microbatches {count * factor}"
                yield _Try(f"{factor} times as many micro-batches", option, partial(self._cut, count * factor))

    def _cut(self, microbatches: int, samples_by: int = 1) -> PlaceQuestion:
        assert self.source is not None
        return replace(self.question, step=self.source.split(microbatches, samples_by))

    def _updated(self) -> Iterator[_Try | Remedy]:
        """Yields optimizers and precisions that hold less, first by arithmetic."""
        source, captured_s = self.source, self.question.captured_s
        if source is None:
            return
        is_quick = captured_s < _MOST_CAPTURED_S and self.clock.has(len(_UPDATES) * _CAPTURES * captured_s)
        for option, others, held_after in leaner_updates(self.question):
            if is_quick:
                reading = replace(source.reading, **others)  # type: ignore[arg-type]
                yield _Try(option, option, partial(self._captured, ModelSource(source.text, reading)))
            elif self._is_enough(held_after):
                yield Remedy(option, option)

    def _is_enough(self, held_after: int, limits_after: int | None = None) -> bool:
        """Returns whether a step that holds so much fits in so much memory, by default that of now, by arithmetic."""
        held, limits = held_bytes(self.question)
        limits_after = limits if limits_after is None else limits_after
        gained = limits_after - held_after - (limits - held)
        return held_after <= limits_after and 0 < gained >= self.missing_bytes * self.question.cluster.num_devices

    def _is_roomy(self, question: PlaceQuestion) -> bool:
        held, limits = held_bytes(question)
        return held < _ROOMY * limits and self._is_enough(held, limits)

    def _adapted(self) -> Iterator[_Try]:
        """Yields QLoRA and LoRA; that they are captured anew comes on top of the time."""
        asked, source, model = self.question, self.source, self.model
        is_trained = model is not None and model.is_captured and asked.graph.is_in_phase("update").any()
        if source is None or not is_trained or source.reading.lora is not None:
            return

        def question(own: ModelSource) -> PlaceQuestion:
            with self.clock.paused():
                return self._captured(own)

        for adapters in _ADAPTERS:
            lora = Lora.parse(adapters)
            assert lora is not None
            own, option = ModelSource(source.text, replace(source.reading, lora=lora)), f"--lora {adapters}"
            yield _Try(option, option, partial(question, own), self._is_enough(lora.held_bytes(asked.graph)))

    def _captured(self, source: ModelSource) -> PlaceQuestion:
        asked = self.question
        parallel = NONE if asked.parts is None else asked.layout or AUTO
        own = asked.cluster, asked.constraints, parallel, None, asked.options, source.whole()
        return PlaceQuestion.of(source, *own)

    def _with_host(self, asked: PlaceQuestion) -> Iterator[_Try]:
        devices, runtime = split_runtime(self.devices)
        text = f"{devices}+{_HOST}" + (f":{runtime}" if runtime else "")
        if self.devices and not any(device.is_cpu for device in asked.cluster.devices):
            with contextlib.suppress(InputError):  # a file
                larger = replace(asked, cluster=Cluster.parse(text))
                yield _Try(f"a {_HOST} beside it", f"--devices {text}", lambda: larger, self._is_roomy(larger))

    def _of_fewer_samples(self, asked: PlaceQuestion) -> Iterator[_Try]:
        parts, source = asked.parts, self.source

        def smaller(factor: int) -> PlaceQuestion:
            if parts is None:
                return self._cut(1 if source is None else source.reading.microbatches, factor)
            fewer = Parts(lambda count: parts.rough(count * factor), parts.batch_size // factor, parts.rough(factor))
            return replace(asked, step=parts.rough(factor), parts=fewer)

        if _can_hold(asked) and (parts is not None or source is not None):
            yield from (_Try(f"1/{factor} of the samples", "", partial(smaller, factor)) for factor in _FACTORS)

    def _with_more(self, asked: PlaceQuestion) -> Iterator[_Try]:
        """Yields the machine with further devices as the one with the most memory."""
        cluster, constraints = asked.cluster, asked.constraints
        like = int(np.argmax(memory_limits(cluster, constraints)))
        name, kind = cluster.devices[like].name, cluster.devices[like].kind
        for count in range(1, _MOST_DEVICES - asked.cluster.num_devices + 1):
            larger = changes.with_another(cluster, like)
            if larger is None:
                return
            cluster, constraints = larger, constraints.also_for(larger.devices[-1].name, name)
            is_plain = re.fullmatch(rf"(\d+x)?{re.escape(kind)}", self.devices)
            option = f"--devices {cluster.num_devices}x{kind}" if is_plain else ""
            question = replace(asked, cluster=cluster, constraints=constraints)
            if _can_hold(question):
                yield _Try(f"{count} more {kind}", option, partial(replace, question), self._is_roomy(question))

    def _on_one_card(self, asked: PlaceQuestion) -> Iterator[_Try]:
        """Yields cards of the catalogue with more memory than any here, ascending, that run a step as the ones here."""
        runtime = split_runtime(self.devices)[1]
        most = max(device.memory_bytes for device in asked.cluster.devices)
        for name, kind in sorted(KINDS.items(), key=lambda item: (item[1].memory_bytes, item[0])):
            if kind.memory_bytes > most and not kind.is_cpu and not kind.port.startswith("thunderbolt"):
                free = replace(asked.constraints, max_memory_bytes=None)  # limits are those of devices here
                text = f"{name}:{runtime}" if runtime else name
                question = replace(asked, cluster=Cluster.parse(text), constraints=free)
                if _can_hold(question):
                    yield _Try(f"one {name}", f"--devices {text}", partial(replace, question), self._is_roomy(question))


def _smallest(row: Sequence[_Try | Remedy], clock: Clock, least_s: float) -> list[Remedy]:
    """Returns the first change of `row` with which a step fits, if any does. From the first that is roomy the row is
    doubled until one fits, then halved. Where no try fits, as without the time for any, the first that is roomy by its
    bytes is told, so that no answer depends on how busy the machine is."""
    first = next((place for place, each in enumerate(row) if isinstance(each, Remedy) or each.is_roomy), None)
    low, turn, high, remedies = -1, first or 0, len(row), list[Remedy]()
    while low < turn < high and not clock.is_up:
        each, fitting = row[turn], None
        if isinstance(each, Remedy):
            return [each]
        own = clock.part(_TRY_SHARE if len(row) > 1 else 1.0)
        with contextlib.suppress(InputError):
            fitting = _first_that_fits(each.question(), own, least_s)
        if fitting is None:
            low = turn
        else:
            high, remedies = turn, [Remedy(each.change, each.option, fitting.step_time_ns)]
        turn = (low + high) // 2 if remedies else min(2 * turn + 1, len(row) - 1)
    if not remedies and first is not None and not clock.stop.is_set():
        return [Remedy(row[first].change, row[first].option)]
    return remedies


def _first_that_fits(asked: PlaceQuestion, clock: Clock, least_s: float) -> Candidate | None:
    if not _can_hold(asked) or not clock.has(least_s):
        return None
    parts, cluster, best = asked.parts, asked.cluster, None
    has_cpu = any(device.is_cpu for device in cluster.devices)
    if parts is not None:
        question = BatchQuestion(parts.within(clock), cluster, asked.constraints, asked.layout, asked.num_batches)
        best = Screening(LayoutSearch(question, clock.part(0.5) if has_cpu else clock)).first_that_fits()
    if best is None and (parts is None or (has_cpu and asked.layout is None)):  # weights may wait on the CPU
        best = solve("local-search", Question.about(asked.problem, bound_ns=NEVER), clock).best
    return best if best is not None and best.fits else None
