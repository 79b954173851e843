"""Settings of the placers: one record for each, every number with its source. A source is a measurement, with where it
is written down, physics, a paper, or "untuned": chosen once, by eye."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedSettings:
    """Placements that a placer tries before it answers."""

    ops_at_once: int = 200_000  # simulated between two looks at a clock: up to a tenth of a second at 0.3 us an op
    num_repairs: int = 3  # candidates that are repaired when none of them fits; untuned


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSettings:
    """Repair of a placement that does not fit."""

    levels: tuple[int, ...] = (128, 512, 2048)  # numbers of groups to move, coarse to fine; untuned
    rounds: int = 8  # simulated batches of moves at each level, for each device; untuned
    most_held: int = 2**26  # ops times devices: physics, `held_bytes` makes a table of them, of half a GB


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousSettings:
    """Contiguous stages of a chain of modules."""

    memory_shares: tuple[float, ...] = (0.5, 0.9)  # weight of memory where balanced times do not fit; untuned
    work: int = 1_000_000  # ops simulated in all, half a second at 0.3 us an op and some; above, `num_chains`
    num_chains: int = 3  # best chains on which all numbers of devices are tried then; untuned


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedSettings:
    """Interleaved stages."""

    stages_per_device: tuple[int, ...] = (2, 3, 4)  # more send more; untuned


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """Stages by bisection, and by dynamic programming."""

    alive: tuple[float, ...] = (0.25, 0.5, 1.0)  # of a stage's allocations, held at once where nothing fits; untuned
    num_halvings: int = 50  # the bottleneck to 15 digits, as many as a float64 has


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSettings:
    """Branch and bound."""

    max_taken: int = 16  # of `earliest_starts`: a bound is worth no more time than a few simulations; untuned
    max_delayed: int = 4  # likewise
    nodes_per_call: int = 256  # between two looks at the clock: milliseconds
    max_exchanges: int = 5040  # those of 7 equal devices, any further ones are taken for unequal; untuned


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """Layers in turn, as people place them."""

    min_share: float = 0.5  # of the main list's layers that make another list count, as an encoder's; untuned
    slowest: float = 4.0  # slower devices get no layers, as a CPU beside accelerators; untuned


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSettings:
    """List schedules: m-ETF, m-SCT, HEFT."""

    work: int = 2_000_000  # ops x devices scheduled in all, about 1 s (benchmarks/results/scale.md)
    least_ns: int = 300  # that an op takes for each device (benchmarks/results/scale.md)
    slice: int = 500_000  # ops x devices between two looks at the clock: a quarter of a second
    limits: tuple[float, ...] = (0.85, 0.7)  # of the memory, tried where schedules with all of it do not fit; untuned
    max_lp_edges: int = 3000  # above, favourite children are found greedily: the linear program takes many seconds
    favourite: float = 0.5  # Baechi's rounding of the relaxation (B. Jeon et al., SoCC 2020)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisSettings:
    """Partitions by METIS, quietly; it leaves parts empty where one vertex has most of the weight."""

    total_weight: int = 10**9  # of all vertices: METIS adds weights up in int64
    imbalances: tuple[int, ...] = (30, 100, 300, 1000)  # ufactor: a part may be heavier by so many 1/1000; untuned
    work: int = 3_000_000  # vertices and edges partitioned in all, about 1 s
    max_runs: int = 256  # untuned
    memory_shares: tuple[float, ...] = (0.5, 0.8)  # weight of memory where times alone do not fit; untuned
    prepared_ns: int = 500  # to prepare, for each op and consumer (benchmarks/results/scale.md)
    partitioned_ns: int = 20_000  # to partition, for each unit (benchmarks/results/scale.md)
    vertices_per_part: int = 8  # at least; untuned
    smallest_target: float = 0.1  # of an equal share; slower devices get no part; untuned
    smallest_weight: float = 0.02  # of the mean weight; untuned


TRIED, REPAIR, CONTIGUOUS, STAGES = TriedSettings(), RepairSettings(), ContiguousSettings(), StageSettings()
INTERLEAVED = InterleavedSettings()
EXACT, EXPERT, LISTS, METIS = ExactSettings(), ExpertSettings(), ListSettings(), MetisSettings()
