"""Parts of a batch as steps: what a model's step is with 1/K of its samples, for any K that divides the batch."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import cache
from itertools import combinations
from math import inf
from types import MappingProxyType

from gdp.budget import Clock, Effort
from gdp.errors import InputError, WrongBatchError
from gdp.graph import Graph
from gdp.graph.accumulation import one_microbatch
from gdp.graph.interpolation import have_same_ops, interpolated
from gdp.graph.microbatches import MAX_MICROBATCHES, count_microbatches
from gdp.models.model import Reading
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from gdp.search.settings import DEFAULTS, LargeSteps


class Parts:
    """Reads steps of parts of the batch, each once; others are interpolated from two that were read."""

    def __init__(
        self,
        read: Callable[[int], Graph],
        batch_size: int,
        whole: Graph | None = None,
        *,
        is_fixed: bool = False,
        seconds: float = 0.0,
        is_kept: Callable[[int], bool] = lambda num_parts: False,
        source: ModelSource | None = None,
    ) -> None:
        """`read(K)` returns the step of 1/K of `batch_size` samples; `whole` is the one of all, if it is there.

        `is_fixed`: `batch_size` counts micro-batches, which stay as they are: K is 1 or as many. `seconds`: what it
        took to capture `whole`. `is_kept(K)` tells whether the step of 1/K is in a cache, and is read in no time.
        `source` is the MODEL, if its ops may be cut."""
        self.source = source
        self._sharded: dict[Shards, Parts] = {}
        self.batch_size, self.is_fixed = batch_size, is_fixed
        self._read_part = read
        self._exact: dict[int, Graph] = {} if whole is None else {1: whole}
        self._rough: dict[int, Graph] = {}
        self._failures: dict[int, InputError] = {}
        self._misread: list[InputError] = []  # that no batch is cut: then only the whole step is
        self._seconds = {1: seconds}  # that capturing took
        self._is_kept = cache(is_kept)
        self._refused: set[int] = set()
        self._clock: Clock | None = None
        self.notes: tuple[str, ...] = ()  # of the model that was read last

    @classmethod
    def of(cls, value: "Parts | Graph | ModelSource | str", batch_dim: int | None = None) -> "Parts":
        """Returns `value`, or the parts of a MODEL or of a graph in micro-batches; see `of_source` and `of_graph`.

        `batch_dim` is the dimension of inputs that is the batch; None: the first, unless two sizes say otherwise."""
        if isinstance(value, str):
            return cls.of_source(ModelSource(value, Reading(batch_dim=batch_dim)))
        if batch_dim is not None:
            raise InputError(f"batch_dim is {batch_dim}; it is that of a MODEL such as 'module:function'; leave it out")
        if isinstance(value, Parts):
            return value
        if isinstance(value, ModelSource):
            return cls.of_source(value)
        if isinstance(value, Graph):
            return cls.of_graph(value)
        raise InputError(
            f"parts is a {type(value).__name__}; gdp.Parts, a MODEL such as 'module:function', or a graph in "
            "micro-batches is expected"
        )

    @classmethod
    def of_source(cls, source: ModelSource, whole: Graph | None = None, seconds: float = 0.0) -> "Parts":
        """Returns the parts of a MODEL, of which `whole` is the whole step, captured in so many `seconds`.

        InputError where it has no batch that can be split."""
        if source.is_file:
            return cls.of_graph(source.whole().graph if whole is None else whole)
        samples = source.batch_size
        if not samples:
            raise InputError(
                f"--parallel: {source.text} has no batch that can be split: it is a step of JAX or of your own; gdp "
                "capture the step of one micro-batch, and give that file with --microbatches M"
            )

        def read(num_parts: int) -> Graph:
            model = source.part(num_parts)
            parts._seconds[num_parts], parts.notes = model.captured_s, model.notes
            if num_parts > 1:
                source.check_part(parts.exact(1), model.graph, (1, num_parts))
            return model.graph

        parts = cls(read, samples, whole, seconds=seconds, is_kept=source.is_kept, source=source)
        return parts

    @classmethod
    def of_graph(cls, graph: Graph) -> "Parts":
        """Returns the micro-batches of a training step whose names tell them (`x@1` of `x`). InputError without."""
        if {"backward", "update"}.isdisjoint(graph.phases):
            raise InputError(f"--parallel: {graph.name!r} is a forward pass; --batches N serves it on several devices")
        one = one_microbatch(graph)
        count = count_microbatches(graph)
        return cls({1: graph, count: one}.__getitem__, count, graph, is_fixed=True)

    def sharded(self, shards: Shards) -> "Parts":
        """Returns the parts of the local program of a rank, which knows what was read of it before.

        InputError where there is no MODEL whose ops can be cut so."""
        if self.source is None:
            raise InputError(f"--parallel: {shards} cuts the ops of a MODEL; a step as it is has no shards")
        shards = shards.settled(training=self.source.reading.training)
        if shards not in self._sharded:
            source = self.source.sharded(shards)
            if source.reading.serving.has_cache:  # one step, whose batch is not split
                parts = Parts(lambda num_parts: source.part(num_parts).graph, self.batch_size, source=source)
            else:
                parts = Parts.of_source(source)
            self._sharded[shards] = parts
        return self._sharded[shards]

    def has_read(self, shards: Shards) -> bool:
        """Returns whether the local program of a rank was read before."""
        return shards in self._sharded and 1 in self._sharded[shards].read

    def within(self, clock: Clock) -> "Parts":
        """Returns the same parts, which are read only where `clock` has the time that the slowest took so far."""
        parts = copy(self)
        parts._clock = clock
        return parts

    @property
    def read(self) -> Mapping[int, Graph]:
        """The steps that were read, by the number of parts."""
        return MappingProxyType(self._exact)

    def exact(self, num_parts: int) -> Graph:
        """Returns the step of one of `num_parts`, as captured.

        InputError if they would differ in size, if the model fails with so few samples, and if there is no time left.
        """
        self.check(num_parts)
        if num_parts in self._failures:
            raise self._failures[num_parts]
        if num_parts not in self._exact:
            self._exact[num_parts] = self._read_in_time(num_parts)
        return self._exact[num_parts]

    def read_ahead(self, num_devices: int, large: LargeSteps = DEFAULTS.large) -> None:
        """Reads the step of a part for each device, or of the next larger one: others are interpolated from it.

        Of a large step it is a part for as many devices as a step may have replicas that can be looked at in time.
        Where two are there that others are interpolated from, none is read."""
        if self._pair() is not None:
            return
        for count in range(min(num_devices, max(large.read_ahead_ops // self.exact(1).num_ops, 2)), 1, -1):
            if self.divides(count):
                with contextlib.suppress(InputError):  # a layer may fail with so few samples
                    self.exact(count)
                    return

    def _read_in_time(self, num_parts: int) -> Graph:
        clock = self._clock
        if num_parts not in self.readable([num_parts]):
            self._refused.add(num_parts)
            raise InputError(
                f"--parallel: no time is left to read the model with 1/{num_parts} of its batch; give a larger --budget"
            )
        began = time.monotonic() if clock is None else clock.seconds
        try:
            return self._read_part(num_parts)
        except WrongBatchError as error:
            self._misread.append(error)
            raise
        except InputError as error:
            self._failures[num_parts] = error
            raise
        finally:
            seconds = (time.monotonic() if clock is None else clock.seconds) - began
            self._seconds[num_parts] = max(self._seconds.get(num_parts, 0.0), seconds)

    def rough(self, num_parts: int) -> Graph:
        """Returns the step of one of `num_parts`, as captured where it was read and for the first two asked for."""
        if num_parts not in self._exact and num_parts not in self._rough:
            self._rough[num_parts] = self.between(num_parts, self.exact)
        return self._exact.get(num_parts) or self._rough[num_parts]

    def between(self, num_parts: int, make: Callable[[int], Graph]) -> Graph:
        """Returns `make(num_parts)`, for steps that were read; others are interpolated from what it makes of two.

        `make` returns a graph of that many parts, whose figures are linear in the number of samples."""
        self.check(num_parts)
        pair = None if num_parts in self._exact else self._pair()
        if pair is None:
            return make(num_parts)
        one, other = map(make, pair)
        sizes = [self.batch_size // parts for parts in (*pair, num_parts)]
        return interpolated(one, sizes[0], other, sizes[1], sizes[2])

    def _pair(self) -> tuple[int, int] | None:
        """Returns two numbers of parts, read and far apart, whose steps have the same ops; None: there are none."""
        for one, other in sorted(combinations(sorted(self._exact), 2), key=lambda pair: pair[0] / pair[1]):
            if have_same_ops(self._exact[one], self._exact[other]):
                return one, other
        return None

    def is_captured(self, num_parts: int) -> bool:
        """Returns whether `rough` returns the step as captured."""
        return num_parts in self._exact

    @property
    def misread(self) -> str:
        """The reason why what was read is no part of a batch; "" if it is one, or nothing was read."""
        return next(map(str, self._misread), "")

    @property
    def refused(self) -> frozenset[int]:
        """The numbers of parts that there was no time to read, in all that share what is read."""
        return frozenset(self._refused - set(self._exact))

    def readable(self, counts: Iterable[int]) -> set[int]:
        """Returns those of the numbers of parts whose steps were read, or can be in the time left."""
        clock, left_s, effort = self._clock, inf, Effort()
        if clock is not None:
            effort = clock.effort
            seconds_left = clock.seconds_left
            left_s = 0.0 if clock.stop.is_set() else inf if seconds_left is None else seconds_left
        num_ops = max((graph.num_ops for graph in self._exact.values()), default=0)
        captured_s, kept_s = max(self._seconds.values()), effort.read_kept.seconds(num_ops)
        return {
            count
            for count in counts
            if count in self._exact or (kept_s if self._is_kept(count) else captured_s) <= left_s
        }

    def divides(self, num_parts: int) -> bool:
        """Returns whether the batch has so many equal parts."""
        if self._misread:
            return num_parts == 1
        if self.is_fixed:
            return num_parts in (1, self.batch_size)
        return num_parts >= 1 and self.batch_size % num_parts == 0

    def counts(self, num_replicas: int) -> list[int]:
        """Returns the numbers of micro-batches that each of `num_replicas` may have, ascending."""
        most = min(self.batch_size, MAX_MICROBATCHES) // num_replicas
        return [count for count in range(1, most + 1) if self.divides(num_replicas * count)]

    def check(self, num_parts: int) -> None:
        """Raises InputError, with numbers that would do, where the batch has not so many equal parts."""
        if self._misread and num_parts > 1:
            raise self._misread[0]
        if not self.divides(num_parts) and self.is_fixed:
            raise InputError(
                f"--parallel: the step has {self.batch_size} micro-batches, which stay as they are, and the layout "
                f"{num_parts}; let data times microbatches be {self.batch_size}"
            )
        if not self.divides(num_parts):
            whole = [count for count in range(1, self.batch_size + 1) if self.batch_size % count == 0]
            near = sorted(sorted(whole, key=lambda count: abs(count - num_parts))[:4])
            raise InputError(
                f"--parallel: a batch of {self.batch_size} has no {num_parts} equal micro-batches over all replicas; "
                f"take {', '.join(map(str, near))}"
            )
