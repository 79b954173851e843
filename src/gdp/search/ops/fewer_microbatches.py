"""Search over a few of many micro-batches first.

All copies of an op share a device, so a placement of a few micro-batches determines that of all. A simulation of 4 of
16 micro-batches takes a quarter of the time, and its result is a start for all of them. On large graphs classical
placers see the few alone, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gdp.graph.excerpts import Excerpt
from gdp.search.candidate import Candidate
from gdp.search.ops.local_search import LocalSearch
from gdp.search.question import Question
from gdp.simulator.problem import Placement, Problem


@dataclass(frozen=True, eq=False)
class Few:
    """A problem's first few micro-batches, and the way back."""

    problem: Problem
    excerpt: Excerpt

    @classmethod
    def of(cls, problem: Problem, count: int) -> "Few | None":
        """Returns the first `count` micro-batches; None unless there are at least twice as many."""
        if problem.microbatch.max() + 1 < 2 * count:
            return None
        excerpt = Excerpt.of_microbatches(problem.graph, problem.microbatch, count)
        return cls(problem.excerpt(excerpt.graph, excerpt.ops), excerpt)

    @classmethod
    def of_large(cls, question: Question) -> "Few | None":
        """Returns the first few micro-batches of a large problem, else None."""
        return cls.of(question.problem, question.settings.ops.few_microbatches) if question.is_large else None

    def restrict(self, placement: Placement) -> Placement:
        """Returns a placement of all micro-batches as one of the few."""
        return placement[self.excerpt.ops]

    def expand(self, placement: Placement) -> Placement:
        """Returns a placement of the few micro-batches as one of all."""
        return placement[self.excerpt.twin]


def best_of_few(few: Few, search: LocalSearch, starts: Sequence[Candidate], share: float) -> list[Candidate]:
    """Returns the best placements of all micro-batches that a search of the few finds from `starts`, to be measured.

    It takes a `share` of the budget of `search`, which need not have been started.
    """
    part = search.part(few.problem, search.clock.until(share))
    part.start([Candidate(few.restrict(start.placement)) for start in starts])
    part.run()
    return [Candidate(few.expand(elite.placement)) for elite in part.elites]
