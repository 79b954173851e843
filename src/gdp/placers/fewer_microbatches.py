"""Search with a few of many micro-batches first: replicas share a device, so a placement of a few is one of all.

A simulation of 4 of 16 micro-batches takes a quarter of the time, and what is found is a start for all of them. On
large graphs classical placers see the few alone, too.
"""

from dataclasses import dataclass, replace

from gdp.microbatches import Excerpt
from gdp.placers.local_search import LocalSearch
from gdp.problem import Placement, Problem

FEW = 4  # micro-batches
_LARGE = 60_000  # ops; classical placers take many seconds beyond


@dataclass(frozen=True, eq=False)
class Few:
    """A problem's first few micro-batches, and the way back."""

    problem: Problem
    excerpt: Excerpt

    @classmethod
    def of(cls, problem: Problem) -> "Few | None":
        """None unless there are at least twice as many."""
        if problem.microbatch.max() + 1 < 2 * FEW:
            return None
        excerpt = Excerpt.of(problem.graph, problem.microbatch, FEW)
        ops = excerpt.ops
        few = replace(
            problem, graph=excerpt.graph, op_time_ns=problem.op_time_ns[ops], allowed=problem.allowed[ops],
            microbatch=problem.microbatch[ops],
        )  # fmt: skip
        return cls(few, excerpt)

    @classmethod
    def of_large(cls, problem: Problem) -> "Few | None":
        """None unless it is large as well."""
        return cls.of(problem) if problem.num_ops > _LARGE else None

    def restrict(self, placement: Placement) -> Placement:
        """A placement of all as one of the few."""
        return placement[self.excerpt.ops]

    def expand(self, placement: Placement) -> Placement:
        """A placement of the few as one of all."""
        return placement[self.excerpt.twin]


def best_of_few(few: Few, search: LocalSearch, starts: list[Placement], share: float) -> tuple[list[Placement], int]:
    """(the best placements of all micro-batches that a search of the few finds from `starts`, simulations).

    It takes a `share` of the budget of `search`, which need not have been started.
    """
    part = LocalSearch(
        few.problem, search.clock_until(share),
        seed=search.seed, config=search.config, num_spent=search.spent, num_threads=search.num_threads,
    )  # fmt: skip
    part.start([few.restrict(start) for start in starts])
    part.run()
    return [few.expand(incumbent.placement) for incumbent in part.elites], part.num_simulations
