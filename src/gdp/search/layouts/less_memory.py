"""The levers where a layout does not fit: which arrangements take less memory, and which blocks auto stands for.
recompute=auto and offload=auto are the fewest blocks that let a replica fit, the cheapest first. Each of P places of a
replica has blocks of its own, and of these the first few are taken. N ops of a micro-batch, R replicas."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gdp.arrays import I64
from gdp.budget import Clock, has_time
from gdp.parallel.layout import AUTO, BLOCKS, NONE, SELECTIVE, Layout
from gdp.search.candidate import Arrangement
from gdp.search.layouts.arrangement import more_microbatches

_OFFLOADED_SHARES = (1.0, 0.75, 0.5, 0.25)  # of the blocks, tried in turn
_MOST_PROBES = 5  # looks between no block and all, to find the fewest that fit


def with_less_memory(arrangement: Arrangement, batch_size: int, *, has_cpu: bool) -> list[Arrangement]:
    """Returns arrangements like `arrangement` that take less memory by one change each. Activations may wait on the
    host where it `has_cpu` that holds no replica."""
    layout = arrangement.layout
    layouts = []
    if layout.recompute == layout.offload == NONE:
        layouts.append(replace(layout, recompute=AUTO))
        layouts += [replace(layout, offload=AUTO)] if has_cpu and layout.zero < 3 else []
    if layout.data > 1 and layout.zero < (3 if layout.is_even and layout.offload == NONE else 2):
        layouts.append(replace(layout, zero=layout.zero + 1))
    others = [replace(arrangement, layout=other) for other in layouts]
    more = more_microbatches(arrangement, batch_size) if arrangement.num_places == 1 else None
    return others if more is None else [more, *others]


def with_chosen_blocks(
    layout: Layout,
    ranked: Sequence[tuple[str, int]],
    places: I64,
    lacking: Callable[[Layout], I64],
    clock: Clock | None = None,
    again_ns: Callable[[Layout], int] | None = None,
) -> Layout:
    """Returns `layout` with blocks in place of auto: whole ones, or selectively all if that fits and is quicker.
    `ranked` are the paths of blocks in the order in which they are taken, and an op of each; `places` [N] are those of
    ops, and `lacking(layout)` returns the bytes [P] that a replica lacks in each place; `again_ns(layout)` the time
    that its recomputed ops take."""
    is_offload = layout.offload == AUTO

    def with_blocks(paths: str | tuple[str, ...]) -> Layout:
        return replace(layout, offload=paths or NONE) if is_offload else replace(layout, recompute=paths or NONE)

    of_place = [[path for path, op in ranked if places[op] == place] for place in range(int(places.max()) + 1)]
    shares = _OFFLOADED_SHARES if is_offload else (1.0,)
    chosen = fewest_blocks(of_place, lambda paths: lacking(with_blocks(paths))[: len(of_place)], shares, clock)
    cut = with_blocks(BLOCKS if chosen and len(chosen) == len(ranked) else chosen)
    if again_ns is None or not chosen:
        return cut
    selective = with_blocks(SELECTIVE)
    return selective if again_ns(selective) < again_ns(cut) and not (lacking(selective) > 0).any() else cut


def fewest_blocks(
    ranked: Sequence[Sequence[str]],
    lacking: Callable[[tuple[str, ...]], I64],
    shares: Sequence[float] = (1.0,),
    clock: Clock | None = None,
) -> tuple[str, ...]:
    """Returns the fewest paths with which no place lacks memory; all of a place that lacks some even then. `ranked` [P]
    are the paths of blocks in each place, and `lacking(paths)` returns the bytes [P] that are missing in each place
    with these blocks recomputed; 0 or less where it fits. Memory is taken to fall with each block: the number is
    guessed between two that were tried, as if all blocks saved the same. Where all together lack some, other `shares`
    of them are tried in turn: links may not take the activations of all blocks in time, and then these wait. Once the
    clock is up, the answer is the fewest that were tried with success."""

    def first(counts: I64) -> tuple[str, ...]:
        return tuple(path for paths, count in zip(ranked, counts.tolist(), strict=True) for path in paths[:count])

    lacks_low = lacking(())
    most = np.where(lacks_low > 0, [len(paths) for paths in ranked], 0)
    if not most.any():
        return ()
    high = most
    for share in shares:
        high = np.ceil(most * share).astype(np.int64)
        lacks_high = lacking(first(high))
        if not (lacks_high > 0).any():
            break
    else:
        high, lacks_high = most, lacking(first(most))
    low = np.where(lacks_high > 0, high, 0)
    for _ in range(_MOST_PROBES):
        if (high - low <= 1).all() or not has_time(clock):
            break
        share = lacks_low / np.maximum(lacks_low - lacks_high, 1)
        guess = low + np.ceil((high - low) * share).astype(np.int64)
        guess = np.where(high - low > 1, np.clip(guess, low + 1, high - 1), high)
        lacks = lacking(first(guess))
        is_low = (lacks > 0) & (guess < high)
        low, lacks_low = np.where(is_low, guess, low), np.where(is_low, lacks, lacks_low)
        high, lacks_high = np.where(is_low, high, guess), np.where(is_low, lacks_high, lacks)
    return first(high)
