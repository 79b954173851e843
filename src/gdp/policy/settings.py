"""Settings of the default policy: one record for each of its parts, every number with its source. Almost all were
chosen by hand before training ("untuned"): the styles are random around them, and the style scorer has learned which
suit a problem. Shipped checkpoints are trained with these values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingSettings:
    """Units."""

    slack: float = 4.0  # how much heavier than average a unit may be; untuned
    spread: float = 0.5  # standard deviation of the noise on the logarithm of a pair's score; untuned
    freed: tuple[float, float] = (0.005, 0.6)  # share of the units that choose again in a refinement; untuned


@dataclass(frozen=True, slots=True, kw_only=True)
class StyleSettings:
    """Random styles, whose options are drawn with these shares; untuned."""

    sizes: tuple[int, ...] = (50, 100, 200, 400, 800, 1500)  # numbers of units
    size_shares: tuple[float, ...] = (0.2, 0.25, 0.25, 0.15, 0.1, 0.05)
    fine: tuple[int, ...] = (200, 400, 800, 1500)  # numbers of units of styles by the earliest finish
    kinds: tuple[str, ...] = ("mixed", "finish", "stages")
    kind_shares: tuple[float, ...] = (0.75, 0.1, 0.15)
    passes: tuple[int, ...] = (1, 2, 3, 5)
    pass_shares: tuple[float, ...] = (0.35, 0.2, 0.25, 0.2)
    most: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)  # share of the devices to use
    most_shares: tuple[float, ...] = (0.15, 0.15, 0.15, 0.55)
    slacks: tuple[float, ...] = (0.6, 0.8, 1.0, 1.3, 1e9)  # times the memory that an estimate may fill
    spread: float = 0.7  # standard deviation of the logarithm of a scale in the first pass
    later_spread: float = 0.5  # in later passes, and of refinements
    variation: float = 0.3  # near to a style that did well
    refining_temperatures: tuple[float, ...] = (0.3, 1.0)
    left_out: float = 0.1  # probability of each feature to be left out


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSettings:
    """The style scorer."""

    usual_log_ops: float = 7.0  # subtracted from logarithms, so that they are near 0; untuned
    usual_log_units: float = 5.5  # likewise
    largest_log: float = 6.0  # of ratios, some of which are next to nothing; untuned
    ample_log_slack: float = 1.0  # of styles that ignore the estimate of memory; untuned
    first_rank: float = 0.02  # added to ranks, so that the very first do not outweigh all others; untuned
    prior: float = 1.0  # weight of other problems against this one's ranks; untuned


@dataclass(frozen=True, slots=True, kw_only=True)
class PracticeSettings:
    """Roll-outs in training."""

    num_tried: int = 4  # placements of each step that leads to a training incumbent; untuned
    many: int = 16  # samples from which on groups of as many share a style (POMO, Kwon et al. 2020)
    temperature: float = 0.5  # of constructions, most of which take the best device in use; refinements have 1
    passes: int = 2  # at most: a record of more takes time and memory, for the same weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSettings:
    """Clusters to train on, in ranges a little wider than those of the catalogue; untuned."""

    most_kinds: int = 3
    hosts_share: float = 0.4  # of clusters with several hosts,
    most_hosts: int = 4
    wiring: tuple[str, ...] = ("port", "pair", "bus")  # shared within a host: a device's own port, nothing, one bus
    speed: tuple[float, float] = (0.5, 2.0)  # times a kind's own rates: cards between the built-in ones
    link_bytes_per_second: tuple[float, float] = (6e9, 450e9)  # half of PCIe 3.0 x16 (shared, or 8 lanes) to NVLink 4
    link_latency_ns: tuple[float, float] = (1_000, 30_000)  # of a socket to three times the assumed 10 us of a copy
    network_bytes_per_second: tuple[float, float] = (1.25e9, 50e9)  # 10 to 400 Gbit/s
    network_latency_ns: tuple[float, float] = (5_000, 50_000)


GROUPING, STYLES, SCORER, PRACTICE = GroupingSettings(), StyleSettings(), ScorerSettings(), PracticeSettings()
DRAWN = DrawnSettings()
