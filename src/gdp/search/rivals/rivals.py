"""START HERE: the parallel steps that users run today, chosen without our search and scored by the same simulator.

    ddp        torch.nn.parallel.DistributedDataParallel: a replica a device, buckets of 25 MB
    zero1      the same with the optimizer's state cut over the replicas (ZeroRedundancyOptimizer, DeepSpeed stage 1)
    fsdp       torch.distributed.fsdp: parameters cut over the replicas as well, gathered block by block
    megatron   the best grid of tensor x data x pipeline with equal layers a stage, 1F1B, with or without full
               recomputation and the optimizer's state cut over replicas
    fsdp-tp    torchtitan: FSDP over groups of cards, whose ops are cut over the cards of each
    vllm       of a forward pass: the best of all sizes of groups times stages with as many layers each

The first three accumulate gradients over the fewest micro-batches that fit in memory, as users raise that number; with
several, all blocks are recomputed if that is faster. fsdp-tp does so for each size of groups. Where ops are cut, so are
tokens between them (sequence parallelism), over cards that the fastest links of a host join. All give each replica as
many micro-batches, on unequal devices too, and leave CPUs beside accelerators idle. R replicas, P stages, D devices, N
ops of a micro-batch."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from gdp.arrays import I64, unique
from gdp.cluster import Cluster
from gdp.costs.op_times import op_times
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.accumulation import once_ops
from gdp.graph.copies import RECOMPUTED
from gdp.graph.layers import LayerPaths
from gdp.graph.microbatches import shared_ops
from gdp.models.shards import WHOLE, Shards
from gdp.parallel.held_state import HeldState
from gdp.parallel.layout import BLOCKS, NONE, Layout
from gdp.parallel.rings import rings_over
from gdp.parallel.step import Step
from gdp.placers.base import inherit
from gdp.placers.settings import EXPERT
from gdp.search.candidate import UNKNOWN, Arrangement, BatchCut, Candidate
from gdp.search.layouts.dispatch import levels_of, simulate_1f1b
from gdp.search.question import BatchQuestion, Solution
from gdp.simulator.constraints import Constraints, memory_limits
from gdp.simulator.levels import communication_levels
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate


def accelerators(question: BatchQuestion) -> list[int]:
    """Returns the accelerators, by number; all devices if there is none."""
    devices = question.cluster.devices
    return [number for number, device in enumerate(devices) if not device.is_cpu] or list(range(len(devices)))


def _degrees(question: BatchQuestion, *, training: bool = True) -> tuple[dict[Shards, BatchQuestion], str]:
    """Returns the question about the step as it is and on groups of each size; and why the last is not there."""
    degrees, reason = {WHOLE: question}, "no two equal cards are joined by links of a host"
    for size in question.cluster.group_sizes():
        try:
            shards = Shards(size).settled(training=training)
            degrees[shards] = question.on_groups(shards)
        except InputError as error:  # such as heads that the size does not divide
            reason = str(error)
    return degrees, reason


def _by_speed(question: BatchQuestion) -> I64:
    """Returns the accelerators by number, the faster ones first."""
    devices = accelerators(question)
    times_ns = op_times(question.parts.exact(1), question.cluster)[:, devices].clip(0).sum(axis=0)
    return np.array(devices)[np.argsort(times_ns, kind="stable")]


def _simulated(question: BatchQuestion, graph: Graph, layout: Layout, stage: I64, grid: I64) -> Candidate:
    """Returns the step of `layout` with stage p of replica r on device `grid` [R, P]; see `simulate_layout`. Over
    hosts, the better of one ring over all and of rings inside and between them, as NCCL chooses."""
    cluster = question.cluster
    names = [[cluster.devices[number].name.rpartition(".")[0] for number in column] for column in grid.T.tolist()]
    hosts = [np.unique(column, return_inverse=True)[1] for column in names]
    sizes = np.bincount(hosts[0])
    over_hosts = len(sizes) > 1 and len(set(sizes.tolist())) == 1 and sizes[0] > 1
    ways = [None, hosts[0].tolist()] if over_hosts and all((own == hosts[0]).all() for own in hosts) else [None]
    steps = [simulate_layout(graph, layout, cluster, stage, grid, question.constraints, hosts=way) for way in ways]
    return min(_candidate(layout, grid, *each) for each in steps)


def _candidate(layout: Layout, grid: I64, step: Step, simulation: Simulation) -> Candidate:
    """Returns the candidate that a step is; one that breaks another constraint than memory is not allowed."""
    cut = BatchCut(Arrangement(layout, tuple(map(tuple, grid.tolist()))), step)
    candidate = replace(Candidate.of(simulation), cut=cut)
    return candidate if _is_allowed(simulation) else replace(candidate, figures=UNKNOWN, refusal=simulation.reasons[0])


def _is_allowed(simulation: Simulation) -> bool:
    return simulation.feasible or bool(simulation.missing_bytes.any())


def simulate_layout(
    graph: Graph,
    layout: Layout,
    cluster: Cluster,
    stage: I64,
    grid: I64,
    constraints: Constraints | None = None,
    *,
    hosts: Sequence[int] | None = None,
    in_program_order: bool = False,
    bucket_bytes: int | None = None,
) -> tuple[Step, Simulation]:
    """Returns the step of `layout` with stage p of replica r on device `grid` [R, P], in the 1F1B schedule. `graph` is
    the step of one micro-batch, `stage` [N] its ops' stages, `hosts` [R] as in `Step.of`. Rings avoid slow links.
    Within a pass ops start in the best of several orders, or `in_program_order` alone. InputError where the layout does
    not suit the graph."""
    rings = rings_over(cluster, grid, layout, hosts)
    step = Step.of(graph, layout, places=stage, bucket_bytes=bucket_bytes, **rings)
    _check_modelled(step)
    problem = Problem.build(step.graph, cluster, constraints)
    placement = step.placement(stage, grid)
    # as PyTorch overlaps sums with the backward pass, or better
    levels = [problem.program_level] if in_program_order else levels_of(problem, step, placement)
    return step, simulate_1f1b(problem, placement, stage[step.origin], step.replica, levels)


def _check_modelled(step: Step) -> None:
    """Raises InputError for a step that does not do what its layout says: its time would be another one's."""
    graph, layout = step.graph, step.layout
    gathers = {phase for kind, phase in zip(graph.kinds, graph.phases, strict=True) if kind.startswith("all_gather.")}
    if (layout.zero and not gathers) or (layout.zero == 3 and "forward" not in gathers):
        raise InputError(f"zero={layout.zero} is not modelled for this graph; leave it out")
    if layout.recompute != NONE and not graph.is_in_role(RECOMPUTED).any():
        raise InputError("recomputation finds no block in this graph; leave recompute out")


def _accumulating(question: BatchQuestion, zero: int) -> Solution:
    """Returns the step with a replica a device and the fewest micro-batches that fit. Where those are several, all
    blocks may be recomputed for fewer of them, if that is faster. Where the batch has no equal part for each device,
    some devices are left out, the slowest first."""
    devices = accelerators(question)
    count = len(devices)
    if count == 1 and zero:
        return Solution(Candidate.refused(None, "one device has no replicas to cut state over"))
    while count > 2 and not question.parts.divides(count):
        count -= 1
    is_all = count == len(devices)
    grid = (np.array(devices) if is_all else np.sort(_by_speed(question)[:count]))[:, None]
    kept = _fewest_microbatches(question, Layout((1,) * count, zero), grid)
    best = kept.best
    assert best is not None
    if best.simulation is None or (best.fits and max(best.layout.microbatches) == 1):
        return kept
    again = _fewest_microbatches(question, Layout((1,) * count, zero, recompute=BLOCKS), grid)
    is_better = again.best is not None and again.best.fits and again.best < best
    return Solution(again.best if is_better else best, looked_at=(*kept.looked_at, *again.looked_at))


def _fewest_microbatches(question: BatchQuestion, layout: Layout, grid: I64) -> Solution:
    """Returns the step of `layout` with the fewest micro-batches that fit; the nearest to it where none does."""
    tried: list[Candidate] = []
    for microbatches in question.parts.counts(layout.data):
        way = replace(layout, microbatches=(microbatches,) * layout.data)
        try:
            graph = question.parts.exact(way.num_parts)
            candidate = _simulated(question, graph, way, np.zeros(graph.num_ops, np.int64), grid)
        except InputError as error:
            tried = tried or [_impossible(way, grid, error)]
            break
        tried.append(candidate)
        if candidate.fits:
            return Solution(candidate, looked_at=tuple(tried))
        if (_held_bytes(candidate.replay) > candidate.problem.memory_limit_bytes).any():
            break  # parameters and optimizer state, of which more micro-batches free nothing
    nearest = min(tried, default=Candidate.refused(None, _uneven(question, layout.data)))
    return Solution(nearest, looked_at=tuple(each for each in tried if each.simulation is not None))


def _impossible(layout: Layout, grid: I64, error: InputError) -> Candidate:
    """Returns a layout that the model does not allow."""
    return Candidate.refused(BatchCut(Arrangement(layout, tuple(map(tuple, grid.tolist())))), str(error))


def _fsdp_over_groups(question: BatchQuestion) -> Solution:
    """Returns the best step over all sizes of groups."""
    degrees, reason = _degrees(question)
    solutions = [
        Solution(
            None if found.best is None else found.best.on_groups(shards),
            looked_at=tuple(each.on_groups(shards) for each in found.looked_at),
        )
        for shards, asked in degrees.items()
        if shards != WHOLE
        for found in [_accumulating(asked, zero=3)]
    ]
    best = min((each.best for each in solutions if each.best is not None), default=Candidate.refused(None, reason))
    return Solution(best, looked_at=tuple(each for solution in solutions for each in solution.looked_at))


@dataclass(frozen=True, eq=False)
class _Grid:
    """A grid of tensor x data x pipeline, with a bound on its step."""

    question: BatchQuestion  # about the step that the cards of a group run
    shards: Shards
    layout: Layout
    devices: I64  # [R, P]
    bound_ns: int  # no step of the grid is shorter: what its busiest device computes
    likely_ns: float  # the bound and the bubble
    excess_bytes: int  # what parameters and optimizer state alone pass the memory limit by


def megatron(question: BatchQuestion) -> Solution:
    """Returns the best step over all degrees, grids, micro-batches and both ways to map replicas to devices. A grid is
    simulated with recomputation where it does not fit without: that only adds work. Grids whose busiest device computes
    for longer than the best step takes are left out. Parts of the batch that were not captured are interpolated, but
    for the best step's."""
    degrees = _degrees(question)[0]
    grids = [grid for shards, asked in degrees.items() for grid in _grids(asked, shards)]
    grids.sort(key=lambda grid: (grid.excess_bytes > 0, grid.likely_ns, grid.excess_bytes))
    tried: list[Candidate] = []
    refused = Candidate.refused(None, _uneven(question, len(accelerators(question))))
    for grid in grids:
        best = min(tried, default=refused)
        if best.fits and (grid.excess_bytes or grid.bound_ns >= best.step_time_ns):
            continue
        if grid.excess_bytes and any(not each.fits for each in tried):
            break  # the others hold more
        for recompute in (NONE, BLOCKS):
            layout = replace(grid.layout, recompute=recompute)
            try:
                candidate = _on_grid(grid.question, layout, grid.devices, grid.question.parts.rough(layout.num_parts))
            except InputError as error:
                refused = _impossible(layout, grid.devices, error).on_groups(grid.shards)
                continue
            assert candidate.cut is not None
            cut = replace(candidate.cut, step=None)  # only figures are kept: steps of many cards are large
            tried.append(replace(candidate, cut=cut, simulation=None).on_groups(grid.shards))
            if tried[-1].fits:
                break
    left = [*tried]
    while left and (best := min(left)).refusal is None and best.simulation is None:
        left.remove(best)
        layout, asked = best.layout.of_groups, degrees[best.layout.shards]
        with contextlib.suppress(InputError):  # a layer may fail with so few samples
            exact = _on_grid(asked, layout, np.array(best.devices), asked.parts.exact(layout.num_parts))
            left.append(exact.on_groups(best.layout.shards))
    return Solution(min(left, default=refused), looked_at=tuple(tried))


def _on_grid(question: BatchQuestion, layout: Layout, devices: I64, graph: Graph) -> Candidate:
    stage = equal_stages(Problem.build(graph, question.cluster), devices.shape[1])
    assert stage is not None, "the layers are those of the graph that the grid was found with"
    return _simulated(question, graph, layout, stage, devices)


def _grids(question: BatchQuestion, shards: Shards) -> Iterator[_Grid]:
    num_devices = len(accelerators(question))
    for num_replicas in range(1, num_devices + 1):
        if num_devices % num_replicas:
            continue
        num_stages = num_devices // num_replicas
        for microbatches in question.parts.counts(num_replicas):
            layout = Layout((microbatches,) * num_replicas, stages=num_stages)
            with contextlib.suppress(InputError):  # a layer may fail with so few samples
                problem = Problem.build(question.parts.rough(layout.num_parts), question.cluster)
                state = HeldState.of(problem.graph)
                stage = equal_stages(problem, num_stages)
                if stage is None:
                    break
                for devices in _device_grids(question, num_replicas, num_stages):
                    for zero in (0, 1)[:num_replicas]:
                        cut = replace(layout, zero=zero)
                        yield _bounded(question, shards, problem, state, cut, stage, devices)


def _bounded(
    question: BatchQuestion,
    shards: Shards,
    problem: Problem,
    state: HeldState,
    layout: Layout,
    stage: I64,
    devices: I64,
) -> _Grid:
    graph, count = problem.graph, layout.microbatches[0]
    is_update = shared_ops(graph)[1]
    times = np.where(np.logical_or(*once_ops(graph)), 1, count)[:, None] * np.maximum(problem.op_time_ns, 0)
    num_stages, resident = devices.shape[1], graph.resident_bytes
    if layout.zero:
        times[is_update] //= layout.data
        resident = state.cut_resident(graph, layout.data, with_parameters=False)
    busy_ns = np.zeros(devices.shape, np.int64)
    held = np.zeros(num_stages, np.int64)
    for number in range(num_stages):
        ops = stage == number
        busy_ns[:, number] = times[ops].sum(axis=0)[devices[:, number]]
        held[number] = resident[ops].sum()
    bound_ns = int(busy_ns.max())
    limits = memory_limits(question.cluster, question.constraints)
    excess = int(np.maximum(held - limits[devices], 0).sum())
    bubble = (num_stages - 1) / count
    return _Grid(question, shards, layout, devices, bound_ns, bound_ns * (1 + bubble), excess)


def _device_grids(question: BatchQuestion, num_replicas: int, num_stages: int) -> list[I64]:
    """Returns the grids [R, P] of devices: the stages of a replica side by side, and the replicas of a stage. The
    second is Megatron's order of ranks. They differ only where devices or routes do."""
    devices = np.array(accelerators(question))
    inner = devices.reshape(num_replicas, num_stages)
    outer = devices.reshape(num_stages, num_replicas).T
    cluster = question.cluster
    apart = ~np.eye(len(devices), dtype=np.bool_)
    routes = [table[np.ix_(devices, devices)][apart] for table in (cluster.latency_ns, cluster.bytes_per_second)]
    kinds = {cluster.devices[number].kind for number in devices.tolist()}
    is_uniform = len(kinds) == 1 and all(len(unique(values)) <= 1 for values in routes)
    return [inner] if is_uniform or np.array_equal(inner, outer) else [inner, outer]


def _held_bytes(simulation: Simulation) -> I64:
    """[D] Returns the bytes of parameters and optimizer state."""
    graph, count = simulation.problem.graph, simulation.problem.num_devices
    return np.bincount(simulation.placement, graph.resident_bytes, count).astype(np.int64)


def _uneven(question: BatchQuestion, count: int) -> str:
    return f"a batch of {question.parts.batch_size} has no {count} equal parts"


def vllm(question: BatchQuestion) -> Solution:
    """Returns the best forward pass over all sizes of groups and numbers of stages, on the first cards: what users of
    vLLM try with `-tp` and `-pp`. Layers that do not divide are shared out evenly, as by its partition."""
    tried: list[Candidate] = []
    for shards, asked in _degrees(question, training=False)[0].items():
        devices = np.array(accelerators(asked))
        problem = Problem.build(asked.parts.exact(1), asked.cluster, asked.constraints)
        for num_stages in range(1, len(devices) + 1):
            stage = equal_stages(problem, num_stages, is_even=False)
            if stage is None:
                break
            layout = Layout(stages=None if num_stages == 1 else num_stages)
            levels = problem.b_level_ns, communication_levels(problem, devices[stage])
            steps = [simulate(problem, devices[stage], priority=level) for level in levels]
            cut = BatchCut(Arrangement(layout, (tuple(devices[:num_stages].tolist()),)))
            tried += [replace(Candidate.of(step), cut=cut).on_groups(shards) for step in steps if _is_allowed(step)]
    return Solution(min(tried, default=Candidate.refused(None)), looked_at=tuple(tried))


SERVERS: Mapping[str, Callable[[BatchQuestion], Solution]] = MappingProxyType({"vllm": vllm})

RIVALS: Mapping[str, Callable[[BatchQuestion], Solution]] = MappingProxyType(
    {
        "ddp": partial(_accumulating, zero=0),
        "zero1": partial(_accumulating, zero=1),
        "fsdp": partial(_accumulating, zero=3),
        "megatron": megatron,
        "fsdp-tp": _fsdp_over_groups,
    }
)


def equal_stages(problem: Problem, num_stages: int, *, is_even: bool = True) -> I64 | None:
    """Returns the stage [N] of each op of a step; None where the layers are fewer than, or no multiple of `num_stages`;
    not `is_even`: stages may differ by a layer. Stages are as Megatron cuts them: as many layers each, the embedding
    with the first, the head with the last. Layers are those of the numbered lists in module paths. Other modules go
    with the layer in front of them."""
    graph = problem.graph
    if num_stages == 1:
        return np.zeros(graph.num_ops, np.int64)
    layers = LayerPaths.of(graph)
    sizes = {path: layers.lists.count(path) for path in layers.lists if path}
    longest = max(sizes.values(), default=0)
    is_layer = [sizes.get(path, 0) >= max(EXPERT.min_share * longest, 2) for path in layers.lists]
    count = sum(is_layer)
    if count < num_stages or (is_even and count % num_stages):
        return None
    position = np.maximum(np.cumsum(is_layer) - 1, 0)  # [L]
    of_part = position * num_stages // count
    labels = np.array([*of_part, -1])[[layers.of_module.get(module, -1) for module in graph.modules]]
    number, is_last = np.arange(graph.num_ops), labels == num_stages - 1
    after = number > np.flatnonzero(is_last & graph.is_in_phase("forward"))[-1]
    before = number < np.flatnonzero(np.append(is_last & graph.is_in_phase("backward"), True))[0]
    head = (after & graph.is_in_phase("forward")) | (before & graph.is_in_phase("backward"))
    labels[head & (labels < 0)] = (
        num_stages - 1
    )  # where it reads the embedding, which is larger than what it computes on
    stage = inherit(problem, labels)
    grouped = np.flatnonzero(graph.groups >= 0)
    lowest = np.full(int(graph.groups.max(initial=-1)) + 1, num_stages)
    np.minimum.at(lowest, graph.groups[grouped], stage[grouped])
    stage[grouped] = lowest[graph.groups[grouped]]
    return stage
