"""Settings: the numbers that tune a search, one record for each solver, each with its source. A source is a measurement
(in `docs/notes/search.md` or by a benchmark), physics, or "untuned": chosen once, by eye. `place(...,
settings=replace(Settings(), ops=replace(OpsSettings(), slow_share=0.3)))` tries another value. Shares of time are of
what is left when their phase begins, if nothing else is said."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeSteps:
    """From how many ops on a step is large, by what would take too long. One simulation takes about 0.3 us an op."""

    planned_ops: int = 3_000  # of a micro-batch: stages by dynamic programming take a second; untuned
    estimated_ops: int = 10_000  # a look at many layouts takes as long as placing ops, which comes first; untuned
    slow_ops: int = 60_000  # a second for a simulation in all orders: few orders, rings, micro-batches; untuned
    searched_ops: int = 120_000  # hundreds of simulations take minutes: no search; untuned
    winning_ops: int = 200_000  # a step is cut and simulated only if it may be the best; untuned
    read_ahead_ops: int = 500_000  # measured: docs/notes/search.md, "Layouts of large steps"
    most_ops: int = 2_000_000  # physics: 8 GB of memory, and a minute to cut and simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSettings:
    """Op times vary, and a plan should be fast on average."""

    spread: float = 0.02  # where none was measured; an assumption: kernels repeat within 1 to 3 %
    num_tables: int = 4  # of perturbed op times that a search averages over; untuned
    fewest_simulations: int = 500  # there must be time for, or a search is without noise; untuned
    last_share: float = 0.15  # of a search is under noise. Measured: docs/notes/search.md, "Noise during all of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSearchSettings:
    """Tunables of the local search, chosen together on seven workloads (benchmarks/results/search.md)."""

    levels: tuple[int, ...] = (30, 100, 300)  # number of groups at each level of a cycle
    moves_per_group: float = 24.0  # annealing moves at each level, for each group, where there is time for them
    num_cycles: int = 6  # cycles that an island should at least have time for: shorter ones on large graphs
    hot: float = 0.015  # relative temperature at the start of a level
    cold: float = 0.0003  # and at its end
    weighted: float = 0.7  # share of the levels on which large transfers join first; noise alone decides on the others
    following: float = 0.5  # share of the levels on which backward ops first join their forward ops
    mating: float = 0.5  # share of the cycles whose groups respect another good placement too
    guided: float = 0.7  # share of the moves that take a group with an op on the critical path
    to_neighbour: float = 0.3  # share of the moves that take a group to a neighbour's device,
    swapped: float = 0.2  # and that swap two groups; the rest go anywhere
    score_spread: float = 0.5  # standard deviation of the noise on the logarithm of a pair's score
    slack: float = 8.0  # how much heavier than average a group may be
    num_starts: int = 64  # partitions made as further starts
    start_share: float = 0.1  # of the time at most for them
    max_consumers: tuple[int | None, ...] = (None, 8, 3)  # of tensors that a partition sees; None: all
    imbalances: tuple[int, ...] = (30, 100, 300, 1000)  # of partitions, in METIS' unit of 1/1000
    num_tried: int = 8  # best starts that get a cycle each, in at most half of the cycles ("Few starts")
    num_elites: int = 6  # candidates that further cycles start from
    num_islands: int | None = None  # None: one per thread, or 4 with a budget in simulations
    chunk: int = 32  # moves between two looks at the clock,
    chunk_ops: int = 2_000_000  # and ops in all of them: half a second

    def __post_init__(self) -> None:
        shares = (self.guided, self.mating, self.following, self.weighted, self.start_share)
        counts = (*self.levels, self.num_cycles, self.num_tried, self.num_elites)
        if not self.levels or min(counts) < 1 or self.hot < self.cold or self.cold <= 0:
            raise ValueError(f"{self}: counts of at least 1 and temperatures hot >= cold > 0 are expected")
        if min(shares) < 0 or max(shares) > 1:
            raise ValueError(f"{self}: shares from 0 to 1 are expected")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsSettings:
    """`auto` on the ops of one step. Measured where docs/notes/search.md is named, else untuned."""

    quick_share: float = 0.4  # for the quick classical placers,
    hurried_share: float = 0.7  # and where they have most of it
    slow_share: float = 0.15  # of the whole time: later no slow placer begins ("Slow placers on short budgets")
    streaming_share: float = 0.2
    few_microbatches: int = 4  # placed before all are ("Micro-batches": 0.02 % behind all of 16)
    few_microbatches_share: float = 0.4  # of the search
    fewer_devices_share: float = 0.2  # of the search ("Slow cards")
    policy_share: float = 0.5  # of the time that is left, for a policy of one's own ("The policy before the search")
    unhurried: int = 1000  # simulations of a large step there must be time for, or classical placers come first
    searched: int = 200  # the same, or there is no search
    small_units: int = 12  # a step of fewer is not reduced, and the exact placer looks at it,
    small_nodes: int = 200_000  # with this effort;
    nodes_per_simulation: int = 100  # of it while nothing fits: most are partial placements ("Small problems")
    order_share: float = 0.4  # of the whole time: later no further order is tried
    order_partitions: int = 4  # that orders by call are tried on ("Orders by call"),
    order_simulations: int = 400  # where there is time for this many,
    order_gain: float = 0.9  # and chosen where they take this share of the b-level's step times, on average
    cuts_share: float = 0.35  # for shifted cuts of replicas, ("Steps with replicas")
    one_replica_share: float = 0.5  # and for a search of one replica
    nearest_cut: float = 0.01  # of a stage's work: how far a cut moves at least,
    farthest_cut: float = 0.5  # and at most
    most_shifts: int = 400  # in a row that help nothing
    near_devices_share: float = 0.6  # on 64 of more devices, where a search on all follows
    num_starts_on_many: int = 4  # of that search


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The placements that a policy draws and refines. Measured where said, else untuned."""

    least_draw_share: float = 0.4  # of the time for drawing, and as much for varying, at most
    fewest_simulations: int = 192  # of a zero-shot answer on a large problem,
    most_simulations: int = 2048  # on a small one,
    simulated_ops: int = 5_000_000  # and in between simulations times ops: most answers take a second or two
    drawn_share: float = 0.1875  # of them on drawn styles, and as many on variations of these
    fewest_drawn_share: float = 1 / 2  # the same where they are fewest: then the best of few groupings decides
    fewest_varied_share: float = 1 / 6
    num_styles: int = 8  # in a grouping, which takes several times as long as a placement in it
    refinement_units: tuple[int, ...] = (25, 50, 100, 200, 400, 800)  # in a grouping of a refinement, in turn
    pool: int = 384  # styles to take from
    best_parent: float = 0.4  # probability that the best style is varied, then the next, and so on


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """The choice of a layout. Untuned where nothing is said."""

    # which arrangements there are, and their estimates
    microbatches_alone: tuple[int, ...] = (1, 2, 4, 8)  # of a replica in one place; docs/notes/search.md
    microbatches_a_place: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # of a pipeline: the bubble is 1/2 to 1/33 of the step
    seen_microbatches: int = 2  # of each place that are simulated; the others are alike
    # which are simulated, by shares of the budget
    screen_share: float = 0.35  # later no further arrangement is simulated
    late_share: float = 0.7  # the same where nothing fits yet
    most_simulated: int = 16  # arrangements that fit
    far_estimate: float = 1.1  # times the best step: by estimate, what takes longer is not simulated
    # which are searched, and for how long
    quick_share: float = 0.1  # first op placement of a small step
    whole_share: float = 0.5  # op placement, if it may still win,
    large_share: float = 0.8  # and of large steps, which need one long search
    replicas_share: float = 0.15  # replicas on one device each, which leave little to be found
    final_share: float = 0.4  # replicas on several devices each
    least_gain: float = 1.001  # times the bound: a step that takes less is not searched
    gain_of_places: float = 1.3  # times the best step: what a search of replicas on several devices may make up for,
    gain_of_replicas: float = 1.08  # of replicas on one device each,
    gain_of_ops: float = 1.6  # and of ops that classical placers placed
    replica_share: float = 0.5  # of a search: for one replica, before the whole step


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Layouts for batches in flight. Untuned."""

    screen_share: float = 0.35  # of the budget: later no further group of devices is looked at, if anything fits
    gain_of_places: float = 1.5  # times the best: as much may a search of places gain
    num_searched: int = 2  # arrangements


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingSettings:
    """Streamed weights. Measured where docs/notes/search.md is named, else untuned."""

    # starts
    num_hosts: int = 2  # the devices with the most memory that may be hosts
    num_sets: int = 4  # sets of devices by host, and
    num_starts: int = 16  # starts in all,
    far_start: float = 1.5  # if the programme expects at most this many times the least step time
    passing: tuple[float, ...] = (1.0, 0.5, 0.25)  # of a memory, at most, are for inputs and results of an op
    buffered_weights: int = 2  # physics: one in use and one on its way have room on a device that weights are sent to
    digits: int = 4  # of shares that count as equal
    table_share: float = 0.01  # of the missing bytes: tables of at least this size may go to the host
    # numbers of turns of each device, the most different ones first, all but 1 raised to the least that memory allows;
    # 0: two turns, the weights used last are streamed
    rounds: tuple[int, ...] = (2, 16, 1, 0, 48, 4, 24, 8, 96)
    most_rounds: int = 512
    num_early: int = 2  # numbers of turns that are tried before the first refinement
    num_first: int = 5  # layouts that are tried and refined before all others
    fewest: int = 3  # layouts that are tried with all numbers of turns, at least
    fewest_simulations: int = 3  # of each layout and number of turns
    far_layout: float = 1.5  # times the rival's step: a layout whose best step takes longer is not refined
    late_fill: float = 2.0  # times the least expected time: stages with nothing sent are tried last if they take longer
    # descents
    rough_gain: float = 0.02  # in early tries of a layout, the next simulation follows a gain of this part or more
    exact_gain: float = 0.001  # the same in later tries
    far_step: float = 1.1  # times the best step: fewer weights are streamed only while the step takes less
    steps: tuple[float, ...] = (0.3, 0.1, 0.03)  # parts of a device's share that a descent moves to another device
    factors: tuple[float, ...] = (2.0, 1.4, 1 / 1.4, 0.5)  # changes of the number of turns
    most_pairs: int = 4  # of up to this many devices any two exchange shares, else neighbours
    kept_gain: float = 0.998  # a change is kept if it makes the step faster by this factor, else smaller steps follow
    num_restarts: int = 100  # descents from random changes of the best layouts
    num_restarted: int = 3  # layouts that restarts begin from ("Parts of unequal machines")
    num_fits: int = 6  # simulations at most to find the least shares streamed
    close_fit: float = 0.003  # of the memory limit: what fits as closely as this is not refined
    # stages that fill memories
    most_sequences: int = 2000  # of devices, ranked,
    num_sequences: int = 4  # and simulated,
    far_sequence: float = 1.1  # if their sum of times is at most this many times the least
    num_helpers: int = 2  # devices of the best sequence that compute beside its slowest stage,
    helper_shares: tuple[float, ...] = (1.0, 0.5)  # with these shares of their room
    most_moves: int = 5  # simulations at most to move the cuts of one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a search."""

    large: LargeSteps = field(default_factory=LargeSteps)
    noise: NoiseSettings = field(default_factory=NoiseSettings)
    local_search: LocalSearchSettings = field(default_factory=LocalSearchSettings)
    ops: OpsSettings = field(default_factory=OpsSettings)
    policy: PolicySettings = field(default_factory=PolicySettings)
    layouts: LayoutSettings = field(default_factory=LayoutSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    streaming: StreamingSettings = field(default_factory=StreamingSettings)


DEFAULTS = Settings()
