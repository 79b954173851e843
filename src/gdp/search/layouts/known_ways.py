"""Arrangements that are known without a search, such as those that users run where memory is scarce."""

from collections.abc import Container
from dataclasses import replace

import numpy as np

from gdp.cluster.device import host_of
from gdp.parallel.layout import BLOCKS, Layout
from gdp.search.candidate import Arrangement
from gdp.search.layouts.arrangement import forced, more_microbatches, replicated_ways
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.question import BatchQuestion
from gdp.simulator.constraints import memory_limits
from gdp.simulator.simulate import NEVER

USUAL_ZERO = (0, 1, 3)  # what users run on each device: DDP, ZeRO 1, FSDP
_MOST_A_PLACE = 16  # micro-batches: the bubble is a seventeenth of the step
_DEEPER = 1.25  # times as fast, by arithmetic: an estimate of many stages takes long; untuned


def all_ways(search: LayoutSearch) -> list[Arrangement]:
    """Returns all arrangements, or those of the layout that is asked for."""
    machine, batch_size = search.estimator.machine, search.parts.batch_size
    if (layout := search.question.layout) is not None:
        return [] if layout.is_whole else forced(machine, layout, batch_size)
    ways = replicated_ways(machine, batch_size, is_fixed=search.parts.is_fixed)
    return sorted(ways, key=lambda way: way.num_places)  # those that are quickest to look at


def stages_of_groups(search: LayoutSearch) -> Arrangement | None:
    """Returns one copy of the model on most groups of cards of several hosts, in the most micro-batches that can be
    simulated; None on other devices."""
    groups = {number: device.group for number, device in enumerate(search.question.cluster.devices) if device.group}
    hosts = {host_of(card) for cards in groups.values() for card in cards}
    return _deepest(search, groups) if len(hosts) > 1 else None


def _deepest(search: LayoutSearch, devices: Container[int] | None = None) -> Arrangement | None:
    """Returns one copy of the model on most of all devices, or of these, in the most micro-batches that can be
    simulated, up to `_MOST_A_PLACE`."""
    parts, most = search.parts, search.settings.large.most_ops
    num_ops = parts.exact(parts.batch_size if parts.is_fixed else 1).num_ops
    ways = [
        way
        for way in all_ways(search)
        if way.layout.data == 1 < way.num_places
        and way.layout.num_parts <= min(most // num_ops, _MOST_A_PLACE * way.num_places)
        and (devices is None or all(device in devices for device in way.all_devices))
    ]
    return max(ways, key=lambda way: (way.num_places, way.layout.num_parts), default=None)


def promising_depth(search: LayoutSearch, other: Arrangement | None) -> Arrangement | None:
    """Returns one copy of the model in stages on most devices with all blocks recomputed; None where arithmetic does
    not promise much more than an estimate of `other`."""
    if (way := _deepest(search)) is None:
        return None
    deep, known = with_all_blocks(way), None if other is None else search.attempt(search.estimator.estimate, other)
    limit_ns = known.step_time_ns if known is not None and known.fits else NEVER
    least, bubble = search.attempt(search.estimator.least, deep), (way.num_places - 1) / way.layout.num_parts
    is_far = least is None or not least.fits or _DEEPER * least.step_time_ns * (1 + bubble) > limit_ns
    return None if is_far else deep


def share_held(search: LayoutSearch) -> float:
    """Returns the share of the memory of a card, or of a group of cards of several hosts, that a copy of the model
    takes with its gradients, and with its optimizer state cut over all of them; 0 for groups of one host."""
    devices = search.question.cluster.devices
    is_group = np.array([bool(device.group) for device in devices])
    if is_group.any() and stages_of_groups(search) is None:
        return 0.0
    is_card = np.array([not device.is_cpu for device in devices])
    is_holder = is_group if is_group.any() else is_card if is_card.any() else ~is_card
    figures, count = search.estimator.replicas.figures(Layout()), max(int(is_holder.sum()), 1)
    held_bytes = figures.resident_bytes - figures.state_bytes * (count - 1) // count + figures.gradient_bytes
    return held_bytes / max(int(search.estimator.limits_bytes[is_holder].max(initial=0)), 1)


def is_too_large(question: BatchQuestion) -> bool:
    """Returns whether no device has the memory for one copy of the model."""
    held_bytes = int(question.parts.exact(1).resident_bytes.sum())
    return held_bytes > int(memory_limits(question.cluster, question.constraints).max())


def is_large(question: BatchQuestion) -> bool:
    """Returns whether estimates of the step take long."""
    return question.parts.exact(1).num_ops > question.settings.large.estimated_ops


def least_memory(search: LayoutSearch) -> Arrangement | None:
    """Returns FSDP on the most devices with all blocks recomputed, and the fewest micro-batches that fit by estimate;
    one where none does."""
    ways = [way for way in all_ways(search) if way.num_places == 1 and way.layout.zero == 3]
    way = max(ways, key=lambda way: way.layout.data, default=None)
    if way is None:
        return None
    least = with_all_blocks(way)
    return fitting_way(search, least) or least


def with_all_blocks(way: Arrangement) -> Arrangement:
    """Returns `way` with all blocks recomputed."""
    return replace(way, layout=replace(way.layout, recompute=BLOCKS))


def fitting_way(search: LayoutSearch, way: Arrangement) -> Arrangement | None:
    """Returns `way` with the fewest micro-batches that fit by estimate; None: there is none. With all blocks recomputed
    those come first that fit beside what is gathered, since no other layout may take less."""
    cut: Arrangement | None = way
    fitting: Arrangement | None = None
    while cut is not None and (estimate := search.attempt(search.estimator.estimate, cut)) is not None:
        if estimate.fits and (way.layout.recompute != BLOCKS or search.estimator.fits_beside_gathers(estimate)):
            return cut
        fitting = cut if estimate.fits else fitting
        cut = more_microbatches(cut, search.parts.batch_size)
    return fitting
