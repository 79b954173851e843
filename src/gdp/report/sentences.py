"""Describes a plan in sentences, for a terminal and for a page."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from gdp.arrays import I64, unique
from gdp.cluster import Cluster
from gdp.costs.collectives import COLLECTIVE
from gdp.costs.op_times import has_shares, ranks_of
from gdp.costs.ranges import StepRange
from gdp.graph import Graph
from gdp.graph.held_memory import HeldMemory, is_cache
from gdp.graph.parameter_bytes import ParameterBytes, gradients_of_updates
from gdp.models.serving import ServedStep
from gdp.notebook import digits, format_gib
from gdp.report.tables import format_ms, format_range
from gdp.search.solvers import SOLVERS
from gdp.simulator.mfu import computing_devices
from gdp.simulator.orders import BY_CALL
from gdp.simulator.plan import Baseline, Plan, Search
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation

_MOST_NAMED, _NAMED_OF_MANY = 64, 8  # devices: of more the first are named
_MUCH_EXCHANGED = 0.25  # of a step; a choice: groups on NVLink exchange for 5 to 20 %
_NEARLY_FULL = 0.95  # of a memory limit; a choice: allocators lose some per cent to fragmentation


def headline(plan: Plan, baselines: Mapping[str, Baseline], count: int = 1, step_range: StepRange | None = None) -> str:
    """Returns the step time, with the range `step_range`, and its ratios to baselines. `count` is the number of
    micro-batches of the step."""
    parts = [text if ratio is None else f"{ratio:.2f} times {text}" for ratio, text in against(plan, baselines, count)]
    if parts:
        parts[0] = parts[0].replace(" times ", " times as fast as ", 1)
    return f"Step time {format_range(plan.step_time_ns, step_range)}" + (": " + ", ".join(parts) if parts else "")


def against(plan: Plan, baselines: Mapping[str, Baseline], count: int = 1) -> list[tuple[float | None, str]]:
    """Returns how many times as fast as one device, the expert of the GDP paper and the best baseline a plan is, each
    with its name; without a ratio that no device can hold the step. A layout is compared with the whole batch on one
    device; other plans with the step that they are of, in `count` micro-batches."""
    times = {
        name: baseline.step_time_ns
        for name, baseline in baselines.items()
        if baseline.status == "ok" and baseline.step_time_ns is not None
    }
    best = min(times, key=times.__getitem__, default=None)
    is_grouped = plan.num_ranks > 1
    one = "group of cards" if is_grouped else "device"
    named = {
        "single": f"the best single {one}" + (" in as many micro-batches" if count > 1 and plan.layout is None else ""),
        "expert": "the paper's expert",
        "op placement": "the best op placement" + (" on such groups" if is_grouped else ""),
        "data parallel": "data parallelism of such groups" if is_grouped else "plain data parallelism",
    }
    if best is not None and best not in named:
        skipped = any(baseline.status == "skipped" for baseline in baselines.values())
        named[best] = f"the best baseline {'that ran ' if skipped else ''}({best})"
    ratios: list[tuple[float | None, str]] = []
    if plan.step_time_ns > 0:
        ratios += [(times[name] / plan.step_time_ns, text) for name, text in named.items() if name in times]
    if "single" in baselines and baselines["single"].status == "infeasible":
        ratios.append((None, f"no single {one} can hold {'it' if plan.layout is None else 'the whole batch'}"))
    return ratios


def of_speed(simulation: Simulation, amounts: Mapping[str, int] = MappingProxyType({})) -> Iterator[str]:
    """Yields what a step does per second, its `amounts`, its share of the peak rate, and what its range rests on."""
    rates = [f"{digits(rate, 4)} {noun}" for noun, rate in per_second(simulation.step_time_ns, amounts).items()]
    parts = [f"{' and '.join(rates)} per second"] if rates else []
    if simulation.mfu is not None:
        share, dtype = simulation.mfu
        count = sum(device.num_cards for device in computing_devices(simulation.problem, simulation.placement))
        parts.append(f"MFU {digits(100 * share, 3)}% of the {dtype} rate of {count} device{'s' * (count > 1)}")
    if parts:
        yield f"{'; '.join(parts)}."
    if simulation.step_range is not None:
        yield f"The range has 8 of 10 steps; it rests on {simulation.step_range.rests_on}."


def per_second(step_time_ns: int, amounts: Mapping[str, int]) -> dict[str, float]:
    """Returns how many of each of `amounts`, those of a step, are done per second; {} for a step without time."""
    return {noun: count * 1e9 / step_time_ns for noun, count in amounts.items()} if step_time_ns else {}


def of_bound(step_time_ns: int, bound_ns: int, count: int = 1, replicas: int = 1) -> str:
    """Returns a sentence on the largest possible distance to the optimum of a graph with `count` micro-batches."""
    if bound_ns == 0 and step_time_ns > 0:
        return "Lower bound 0: the distance to the optimum is unknown."
    above = 100 * (step_time_ns / bound_ns - 1) if bound_ns else 0.0
    batch = "is not split" if count <= 1 else f"is split into {count} micro-batches"
    if replicas > 1:
        batch = f"is split over {replicas} replicas"
    return (
        f"Lower bound {format_ms(bound_ns)} of any placement of this graph, whose batch {batch}: the plan is at most "
        f"{digits(above, 3)} % above the optimum."
    )


def of_search(search: Search, simulation: Simulation) -> Iterator[str]:
    """Yields sentences on the order of micro-batches or calls, and on step times when op times vary."""
    if num_microbatches(simulation) > 1:
        # the share of the step in which a device that holds ops computes, on average
        busy = float(simulation.busy_fraction[unique(simulation.placement)].mean())
        yield f"Order of micro-batches: {search.order}; devices in use wait for {1 - busy:.0%} of the step."
    elif search.order == BY_CALL:
        yield "Ops start by the call of their layer, as if each call were a micro-batch."
    if (times := search.under_noise) is not None:
        yield (
            f"Expected with op times that vary by {times.noise:.1%}: {format_ms(times.mean_ns)} "
            f"({times.num_draws} draws)."
        )


def lacking(cluster: Cluster, missing_bytes: I64) -> str:
    """Returns the devices that are too small, each with the bytes that it lacks."""
    return ", ".join(
        f"{device.name} lacks {missing} bytes" + (f" ({format_gib(missing)})" if missing >= 2**20 else "")
        for device, missing in zip(cluster.devices, missing_bytes.tolist(), strict=True)
        if missing
    )


def num_microbatches(simulation: Simulation) -> int:
    """Returns the number of micro-batches of the step."""
    return int(simulation.problem.microbatch.max()) + 1


def num_replicas(simulation: Simulation) -> int:
    """Returns the number of replicas of the model."""
    return int(simulation.problem.graph.replicas.max()) + 1


def of_groups(problem: Problem) -> Iterator[str]:
    """Yields a sentence on the devices that are groups of cards."""
    groups = [device for device in problem.cluster.devices if device.group]
    if groups and has_shares(problem.graph, groups[0]):
        yield (
            f"{groups[0].name} is a group of {groups[0].num_cards} cards with shares of their own: an op takes the "
            f"longest of all cards; memory is that of the fullest one, {groups[0].kind}."
        )
    elif groups:
        names = _listed([device.name for device in groups])
        what = "is a group" if len(groups) == 1 else "are groups"
        yield (
            f"{names} {what} of {groups[0].num_cards} cards, which all run the same local program; ops, times and "
            "memory are those of each card."
        )


def of_left_out(cards: Cluster, cluster: Cluster) -> Iterator[str]:
    """Yields a sentence on those of `cards` that are in none of the groups of `cluster`."""
    used = {name for device in cluster.devices for name in device.group or (device.name,)}
    rest = [device.name for device in cards.devices if device.name not in used]
    if rest:
        num_cards = max(device.num_cards for device in cluster.devices)
        yield f"{_listed(rest)} {'is' if len(rest) == 1 else 'are'} left out: in no group of {num_cards} cards"


def of_exchanges(simulation: Simulation) -> Iterator[str]:
    """Yields a sentence on what the cards of groups exchange, where that takes much of the step."""
    problem = simulation.problem
    is_exchange = np.array([kind.startswith(f"{COLLECTIVE}.") for kind in problem.graph.kinds], np.bool_)
    times_ns = problem.op_time_ns[np.arange(problem.num_ops), simulation.placement] * is_exchange
    busiest = int(np.argmax(busy_ns := np.bincount(simulation.placement, times_ns, problem.num_devices)))
    share, link = busy_ns[busiest] / max(simulation.step_time_ns, 1), problem.cluster.devices[busiest].link
    if share > _MUCH_EXCHANGED and link is not None:
        yield (
            f"the cards of {problem.cluster.devices[busiest].name} exchange for {share:.0%} of the step, "
            f"{format_ms(int(busy_ns[busiest]))}, at {link.bytes_per_second / 1e9:.3g} GB/s; faster links or a smaller "
            "group would take less"
        )


def of_held_memory(graph: Graph) -> Iterator[str]:
    """Yields sentences on the memory of parameters and of their optimizer, and on the bytes that each one takes."""
    held = HeldMemory.of(graph)
    if held.optimizer_state_bytes:
        parameters, state = format_gib(held.parameter_bytes), format_gib(held.optimizer_state_bytes)
        where = "on one card of every group together" if ranks_of(graph).any() else "on all devices together"
        yield f"Held for the whole step, {where}: parameters {parameters}, optimizer state {state}."
    if (each := ParameterBytes.of(graph)) is not None:
        yield f"{each}."


def of_more_sequences(simulation: Simulation, served: ServedStep, options: Collection[str]) -> str:
    """Returns sentences on what a decode step could serve besides: sequences, groups in flight; "" for none. `options`
    are those that the request takes."""
    graph, limits = simulation.problem.graph, simulation.problem.memory_limit_bytes
    cache = np.bincount(simulation.placement, graph.resident_bytes * is_cache(graph), len(limits))
    free, has_cache = limits - simulation.peak_memory_bytes, cache > 0
    if served.phase != "decode" or not has_cache.any():
        return ""
    parts = []
    most = int(served.num_sequences * (1 + (free[has_cache] / cache[has_cache]).min()))
    if most > served.num_sequences:
        powers = (2**power for power in range(served.num_sequences.bit_length(), most.bit_length()))
        listed = ",".join(map(str, dict.fromkeys((served.num_sequences, *powers, most))))
        times = f": --sweep batch={listed} has their times" if "--sweep" in options else ""
        parts.append(f"By their caches {most:,} have room{times}.")
    kinds = [device.kind for device in simulation.problem.cluster.devices]
    num_stages = sum(kind in {kinds[holder] for holder in np.flatnonzero(has_cache)} for kind in kinds)
    if num_stages > 1 and "--batches" in options:
        parts.append(f"A token is on one device at a time: --batches {num_stages} serves as many groups at once.")
    return " ".join(parts)


def is_searched(plan: Plan) -> bool:
    """Returns whether the plan is from a search over all devices."""
    solver = SOLVERS.get(plan.placer)
    return solver is not None and solver.searches


def of_empty_devices(simulation: Simulation, shown: Callable[[str], str] = str, *, searched: bool = False) -> str:
    """Returns a sentence on devices without ops, their names as `shown` gives them; "" if there are none. `searched`:
    whether the plan is from a search over all devices, which then found no faster plan with them."""
    problem = simulation.problem
    counts = np.bincount(simulation.placement, minlength=problem.num_devices)
    empty = [shown(device.name) for number, device in enumerate(problem.cluster.devices) if not counts[number]]
    if not empty:
        return ""
    hold, them = ("holds no op", "it") if len(empty) == 1 else ("hold no ops", "them")
    reason = f": the search found no faster plan with {them}" if searched else ""
    return f"{_listed(empty)} {hold}{reason}."


def _listed(names: Sequence[str]) -> str:
    """Returns the names of devices, of very many the first."""
    if len(names) <= _MOST_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMED_OF_MANY])} and {len(names) - _NAMED_OF_MANY} more devices"


def of_updates(simulation: Simulation, shown: Callable[[str], str] = str) -> str:
    """Returns a sentence on cards that have no room for what `foreach` of torch.optim's Adam holds beside all gradients
    while it updates, the roots of second moments, which peaks leave out; "" if there are none."""
    graph, placement = simulation.problem.graph, simulation.placement
    kinds = zip(graph.kinds, graph.shapes, strict=True)
    if not any("adam" in kind and text.startswith("optimizer.foreach") for kind, text in kinds):
        return ""
    found, gradients = ParameterBytes.of(graph), gradients_of_updates(graph)
    roots = HeldMemory.by_op(graph)[1] // (3 if found is not None and found.master_weights else 2)
    needed = np.zeros(simulation.problem.num_devices, np.int64)
    np.add.at(needed, placement, graph.resident_bytes + roots)
    np.add.at(needed, placement[graph.producers[gradients]], graph.tensor_bytes[gradients])
    missing = (needed - simulation.problem.memory_limit_bytes).tolist()
    names = [
        f"{shown(device.name)} lacks {format_gib(lack)}"
        for device, lack in zip(simulation.problem.cluster.devices, missing, strict=True)
        if lack > 0 and not device.is_cpu
    ]
    if not names:
        return ""
    return (
        f"{_listed(names)} while torch.optim's foreach, its default, updates: it holds roots of all second moments "
        "beside the gradients, which peaks leave out; train with fused=True (--optimizer adam,fused)."
    )


def of_full_devices(simulation: Simulation, shown: Callable[[str], str] = str) -> str:
    """Returns a sentence on devices that are nearly full, their names as `shown` gives them; "" if there are none."""
    limits = np.maximum(simulation.problem.memory_limit_bytes, 1)
    filled = simulation.peak_memory_bytes / limits
    names = [
        f"{shown(device.name)} ({share:.1%})"
        for device, share in zip(simulation.problem.cluster.devices, filled.tolist(), strict=True)
        if share > _NEARLY_FULL
    ]
    if not names:
        return ""
    return f"Nearly full: {_listed(names)}; --reserve 10% leaves room for what is not in the model."
