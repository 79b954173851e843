"""A batch in equal parts: the graphs of one of K parts, each read once."""

from collections.abc import Callable, Iterator

from gdp.errors import UnevenBatchError
from gdp.graph import Graph
from gdp.graph.microbatches import MAX_MICROBATCHES

Source = Callable[[int], Graph]
"""From K to the step of one of K equal parts of the batch; UnevenBatchError where there are none."""

_PRIME = 1021  # the largest prime below MAX_MICROBATCHES: a batch that is no multiple of it tells its size in an error


class EqualParts:
    """The steps of equal parts of a batch."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._graphs: dict[int, Graph | None] = {}
        self._batch_size: int | None = None
        self._is_asked = False

    def graph(self, num_parts: int) -> Graph | None:
        """Returns the step of one of `num_parts` parts; None if they would not be equal."""
        if self._batch_size is not None and self._batch_size % num_parts:
            return None
        if num_parts not in self._graphs:
            try:
                self._graphs[num_parts] = self._source(num_parts)
            except UnevenBatchError as error:
                self._batch_size = error.batch_size
                self._graphs[num_parts] = None
        return self._graphs[num_parts]

    def exact(self, num_parts: int) -> Graph:
        """Returns the step of one of `num_parts` parts; UnevenBatchError where they would not be equal."""
        graph = self.graph(num_parts)
        if graph is None:
            raise UnevenBatchError(f"the batch has no {num_parts} equal parts", self._batch_size)
        return graph

    @property
    def batch_size(self) -> int | None:
        """The samples of the batch; None where the source does not tell."""
        if not self._is_asked:
            self._is_asked = True
            if self._batch_size is None:
                self.graph(_PRIME)
        return self._batch_size

    def counts(self, num_replicas: int) -> Iterator[int]:
        """Yields the numbers of micro-batches that each of `num_replicas` may have, ascending."""
        for count in range(1, (self.batch_size or MAX_MICROBATCHES) // num_replicas + 1):
            if self.graph(num_replicas * count) is not None:
                yield count
