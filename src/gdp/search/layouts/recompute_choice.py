"""How many blocks are recomputed with recompute=auto: the fewest that let a replica fit, the cheapest first.

Each of P places of a replica has blocks of its own, and of these the first few are taken.
"""

from collections.abc import Callable, Sequence

import numpy as np

from gdp.arrays import I64

_MOST_PROBES = 5  # simulations between none and all


def fewest_blocks(ranked: Sequence[Sequence[str]], lacking: Callable[[tuple[str, ...]], I64]) -> tuple[str, ...]:
    """Returns the fewest paths with which no place lacks memory; all of a place that lacks some even then.

    `ranked` [P] are the paths of blocks in each place, and `lacking(paths)` returns the bytes [P] that are missing in
    each place with these blocks recomputed; 0 or less where it fits. Memory is taken to fall with each block: the
    number is guessed between two that were tried, as if all blocks saved the same.
    """

    def first(counts: I64) -> tuple[str, ...]:
        return tuple(path for paths, count in zip(ranked, counts.tolist(), strict=True) for path in paths[:count])

    low = np.zeros(len(ranked), np.int64)
    lacks_low = lacking(())
    high = np.where(lacks_low > 0, [len(paths) for paths in ranked], 0)
    if not high.any():
        return ()
    lacks_high = lacking(first(high))
    low = np.where(lacks_high > 0, high, low)
    for _ in range(_MOST_PROBES):
        if (high - low <= 1).all():
            break
        share = lacks_low / np.maximum(lacks_low - lacks_high, 1)
        guess = low + np.ceil((high - low) * share).astype(np.int64)
        guess = np.where(high - low > 1, np.clip(guess, low + 1, high - 1), high)
        lacks = lacking(first(guess))
        is_low = (lacks > 0) & (guess < high)
        low, lacks_low = np.where(is_low, guess, low), np.where(is_low, lacks, lacks_low)
        high, lacks_high = np.where(is_low, high, guess), np.where(is_low, lacks_high, lacks)
    return first(high)
