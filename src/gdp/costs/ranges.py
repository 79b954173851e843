"""Ranges: how far steps are from their predictions, by kind of step; and when two plans are a tie. A range has 80 % of
measured steps of its kind. ranges.toml has factors on the predicted time, made from what others measured (`python -m
benchmarks measured --ranges FILE`), and says how; steps that were measured on a machine narrow its own ranges, or widen
them. N ops, D devices."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import exp, hypot, log
from typing import Any, NamedTuple

import numpy as np

from gdp.arrays import I64, unique
from gdp.cluster import Cluster, Device
from gdp.cluster.achieved import GPU, OF_FLOPS, family_of, figures_of_kind
from gdp.cluster.catalogue import NETWORK
from gdp.costs.collectives import ALL_GATHER
from gdp.costs.kernels import CLASSES
from gdp.costs.op_times import has_kernels, step_kernels
from gdp.costs.rates import kernel_times
from gdp.graph import Graph

_THIN = [number for number, name in enumerate(CLASSES) if name.startswith(("grouped", "depthwise"))]
# of the time: predictions of steps with so many of them err more; steps with more of products err otherwise. Untuned
_MANY_THIN, _MOST_PRODUCTS = 0.1, 0.6
CORES, TIMED = "cores", "timed"
"""In place of a runtime: ops of cores as measured devices predict them, and ops that were measured."""
_DEVIATIONS = 1.2816  # from the middle of a normal distribution to the ends of 80 % of it
# measured steps of a machine that a range counts as, in its width and in its middle
_PRIOR_WIDTH, _PRIOR_MIDDLE = 4, 2
_LEAST_WIDTH = 0.01  # of a side, in logarithms
_MOST_DEVIATIONS = 3.0  # that a step counts as: errors have longer tails than a normal distribution
CARDS, GROUPS, PARAMETERS, HOST = "cards", "groups", "parameters", "host"
_WHERE = {
    "": "one device",
    CARDS: "several devices",
    PARAMETERS: "several devices with parameters gathered",  # for each pass, as FSDP does
    GROUPS: "groups of cards",
    HOST: "cards beside a CPU",  # which holds what is offloaded
    NETWORK: "several hosts",
}


@dataclass(frozen=True, slots=True)
class StepRange:
    """The range of 80 % of measured steps about a predicted time, and the text of what it rests on."""

    low: float  # factors on the predicted time
    high: float
    rests_on: str

    def of(self, time_ns: int) -> tuple[int, int]:
        """Returns the shortest and the longest time in ns."""
        return int(time_ns * self.low), int(time_ns * self.high)


class StepKind(NamedTuple):
    """The traits of a step that the error of its prediction depends on, besides the card."""

    is_trained: bool
    runtime: str  # or `CORES`, or `TIMED`
    exchanges: str  # "": one device is in use; else a key of `_WHERE`
    is_of_products: bool  # most of the time is in products, attention and convolutions
    is_thin: bool  # much of the time is in convolutions of groups or of single channels

    @classmethod
    def of(cls, graph: Graph, cluster: Cluster, placement: I64) -> "StepKind | None":
        """Returns the kind of a step under `placement` [N]; None where a device in use does not price kernels, and ops
        were not measured on cores either. On cards a step whose ops were measured is of the kind of others."""
        devices = _used(cluster, placement)
        cards = [device for device in devices if not device.is_cpu]
        is_trained = bool(graph.is_in_phase("backward").any())
        if not cards and (any(graph.times_ns) or all(has_kernels(graph, core) for core in devices)):
            runtime, exchanges = TIMED if any(graph.times_ns) else CORES, CARDS if len(devices) > 1 else ""
            return cls(is_trained, runtime, exchanges, is_of_products=False, is_thin=False)
        if not (cards and all(has_kernels(graph, card) for card in cards)):
            return None
        kernels = step_kernels(graph, cards[0].runtime)  # shares of the time are much alike on all
        counts = np.bincount(kernels.ops, minlength=len(kernels.offsets) - 1)
        times_ns = kernel_times(kernels, cards[0]) * np.repeat(counts, np.diff(kernels.offsets))
        thin, products = (
            times_ns[chosen].sum() / times_ns.sum()
            for chosen in (np.isin(kernels.kinds, _THIN), kernels.kinds < len(OF_FLOPS))
        )
        exchanges = _exchanges(graph, cluster, placement)
        return cls(is_trained, cards[0].runtime, exchanges, bool(products > _MOST_PRODUCTS), bool(thin > _MANY_THIN))

    def __str__(self) -> str:
        """Returns `eager training on several hosts, mostly products`, or `training on one device, ops measured`."""
        where = _WHERE[self.exchanges]
        if self.runtime in (CORES, TIMED):
            ops = "ops measured" if self.runtime == TIMED else "processor cores measured"
            return f"{'training' if self.is_trained else 'inference'} on {where}, {ops}"
        most = ", mostly products" if self.is_of_products else ", mostly not products"
        thin = ", many grouped convolutions" * self.is_thin
        return f"{self.runtime} {'training' if self.is_trained else 'inference'} on {where}{most}{thin}"


def range_of(graph: Graph, cluster: Cluster, placement: I64) -> StepRange | None:
    """Returns the range of the step time under `placement`; None where `StepKind.of` is."""
    kind = StepKind.of(graph, cluster, placement)
    if kind is None:
        return None
    devices = _used(cluster, placement)
    cards = [device for device in devices if not device.is_cpu]
    by_kind = {device.kind: device.measured_steps.get(str(kind), ()) for device in cards or devices}
    own = min(by_kind.values(), key=len)  # a kind without steps of its own tells how little is known
    return range_on(kind, sorted({_known_as(card) for card in cards}), own=own)


def _known_as(card: Device) -> str:
    """Returns the kind of a card; "" of one of no family whose rates were measured."""
    is_measured = family_of(card.kind) == GPU and card.achieved != figures_of_kind(card.kind).achieved
    return "" if is_measured else card.kind


def range_on(
    kind: StepKind, cards: Sequence[str], table: Mapping[str, Any] | None = None, own: Sequence[float] = ()
) -> StepRange:
    """Returns the range of steps of a kind on `cards` ("": one whose rates were measured), by the figures of `table` or
    of ranges.toml. A spread that comes in addition is independent: squares of the logarithms add up. `own` are ratios
    of measured to predicted times of the machine, one a model."""
    figures = table or _table()
    cell = next((cell for cell in figures["cells"] if StepKind(*cell["kind"]) == kind), None)
    low, high = (cell or figures["other"])["factors"]
    text = f"{cell['rows']:,} measured steps of {kind}" if cell else f"measured steps of other kinds, none of {kind}"
    unknown = [card for card in cards if card and family_of(card) == GPU]
    families = (cell or figures)["judged"]
    strange = unknown or [card for card in cards if family_of(card) not in families]
    if strange:
        spread = log(figures["unknown" if unknown else "family"])
        low, high = exp(-hypot(log(low), spread)), exp(hypot(log(high), spread))
        text += f", none on cards like {' or '.join(card or 'these' for card in strange)}"
    if not own:
        return StepRange(low, high, text)
    return StepRange(*_narrowed(low, high, own), f"{text}, and {len(own)} on this machine")


def _narrowed(low: float, high: float, own: Sequence[float]) -> tuple[float, float]:
    """Returns the factors of a range with steps of the machine itself, which widen it where they contradict it: of a
    normal distribution of unknown mean and variance, of which the range is the prior (Gelman et al., "Bayesian Data
    Analysis", 3.3). The prediction is in the range."""
    center, width = (log(high) + log(low)) / 2, max((log(high) - log(low)) / 2, _LEAST_WIDTH)
    logs, count = np.log(own) - center, len(own)
    mean, prior = float(logs.mean()), _PRIOR_MIDDLE / (_PRIOR_MIDDLE + count)
    far = _MOST_DEVIATIONS * width / _DEVIATIONS
    squares = float(np.square((logs - mean).clip(-far, far)).sum()) + prior * count * mean**2
    scale = ((_PRIOR_WIDTH + squares * (_DEVIATIONS / width) ** 2) / (_PRIOR_WIDTH + count)) ** 0.5
    center += (1 - prior) * mean
    return exp(min(center - scale * width, 0.0)), exp(max(center + scale * width, 0.0))


def tie_share(graph: Graph, cluster: Cluster, placement: I64) -> float:
    """Returns the share by which step times of two plans may differ in a tie; 0 where a device in use tells none."""
    ties, is_modelled = _table()["ties"], not any(graph.times_ns)
    return float(
        min(
            ties["cpu"] if device.is_cpu else ties["card"] if is_modelled and has_kernels(graph, device) else 0.0
            for device in _used(cluster, placement)
        )
    )


def _exchanges(graph: Graph, cluster: Cluster, placement: I64) -> str:
    used = unique(placement)
    if any(device.is_cpu for device in _used(cluster, placement)):
        return HOST
    if cluster.exchanges.size and (cluster.exchanges[np.ix_(used, used)] == NETWORK).any():
        return NETWORK
    if any(device.group for device in _used(cluster, placement)):
        return GROUPS
    if len(used) == 1:
        return ""
    of_update = graph.is_in_phase("update")
    gathers = any(kind.startswith(ALL_GATHER) and not of_update[op] for op, kind in enumerate(graph.kinds))
    return PARAMETERS if gathers else CARDS


def _used(cluster: Cluster, placement: I64) -> list[Device]:
    return [cluster.devices[device] for device in unique(placement).tolist()]


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("gdp.costs") / "ranges.toml").read_text(encoding="utf-8"))
