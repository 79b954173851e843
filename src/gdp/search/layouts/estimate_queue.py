"""The arrangements that are left, with what arithmetic or an estimate says of each."""

from collections.abc import Callable, Iterable, Sequence

from gdp.budget import Clock, has_time
from gdp.search.candidate import Arrangement, Candidate
from gdp.search.layouts.estimate import Estimator
from gdp.search.layouts.less_memory import with_less_memory

Attempt = Callable[[Callable[[Arrangement], Candidate], Arrangement], Candidate | None]
"""Returns an estimate of an arrangement by a function that makes one; None where the model does not allow it."""


class EstimateQueue:
    """The arrangements that are left. Where one does not fit, others of its kind that take less memory join."""

    def __init__(
        self,
        estimator: Estimator,
        batch_size: int,
        attempt: Attempt,
        *,
        grows: bool = True,
        known: Iterable[Arrangement] = (),
    ) -> None:
        """With `grows` false none joins. Those that are `known` are left out."""
        self.estimator = estimator
        self.left: list[Candidate] = []
        self._batch_size, self._attempt, self._grows = batch_size, attempt, grows
        self._known, self._seen = set(known), set[Arrangement]()
        self._num_parts: set[int] = set()  # of the batch, that were looked at

    def add(self, ways: Iterable[Arrangement], clock: Clock | None = None) -> None:
        """Adds what arithmetic says of new arrangements, and of others that take less memory than do not fit. Once one
        is there, further parts of the batch are looked at while there is time."""
        pending = list(ways)[::-1]
        while pending:
            way = pending.pop()
            num_parts = way.layout.num_parts
            if way in self._seen or (num_parts not in self._num_parts and self.left and not has_time(clock)):
                continue
            self._num_parts.add(num_parts)
            self._seen.add(way)
            least = self._attempt(self.estimator.promise, way)
            if least is not None:
                self.left += [] if way in self._known else [least]
                pending += [] if least.fits else self._smaller(way)[::-1]

    def know(self, estimates: Sequence[Candidate], clock: Clock) -> None:
        """Adds estimates that were made before, and what takes less memory than those that do not fit; see `add`."""
        new = [each for each in estimates if each.way not in self._known]
        self.left += new
        self._seen |= {each.way for each in new}
        for each in new:
            if not each.fits:
                self.add_smaller(each.way, clock)

    def estimate(self, known: Candidate, clock: Clock | None = None) -> None:
        """Replaces what arithmetic says of an arrangement by an estimate; see `add` for the clock."""
        self.left.remove(known)
        estimate = self._attempt(self.estimator.estimate, known.way)
        if estimate is not None:
            self.left.append(estimate)
            if not estimate.fits:
                self.add_smaller(known.way, clock)

    def add_smaller(self, way: Arrangement, clock: Clock | None = None) -> None:
        """Adds others that take less memory than `way`, which does not fit; see `add` for the clock."""
        self.add(self._smaller(way), clock)

    def best(self, clock: Clock) -> Candidate | None:
        """Returns the most promising of all, estimated; None where there is none, or time is up before."""
        while self.left:
            most = min(self.left)
            if most.has_places:
                return most
            if clock.is_up or not self.estimator.has_time(most.way):
                return None
            self.estimate(most, clock)
            clock.spend(1)
        return None

    def _smaller(self, way: Arrangement) -> list[Arrangement]:
        if not self._grows:
            return []
        has_cpu = not set(self.estimator.all_cpus) <= set(way.all_devices)  # one that holds no replica
        return with_less_memory(way, self._batch_size, has_cpu=has_cpu)
