"""Ranges of predicted steps: hand cases of kinds, cards and ties."""

from dataclasses import replace
from math import exp, hypot, log
from types import MappingProxyType

import numpy as np
import pytest
import torch

from gdp.cluster import Cluster
from gdp.cluster.achieved import figures_of_kind, scaled
from gdp.costs.ranges import CORES, TIMED, StepKind, range_of, range_on, tie_share
from gdp.graph import Graph
from gdp.models.pytorch import capture

TRAINING = StepKind(is_trained=True, runtime="eager", exchanges="", is_of_products=True, is_thin=False)
FIGURES = {
    "judged": ["a100", "ada"],
    "family": 1.2,
    "unknown": 1.5,
    "ties": {"card": 0.05, "cpu": 0.06},
    "other": {"factors": [0.5, 2.0]},
    "cells": [{"kind": [True, "eager", "", True, False], "rows": 40, "judged": ["a100"], "factors": [0.9, 1.1]}],
}


@pytest.fixture(scope="module")
def step() -> Graph:
    """Returns a training step with a convolution of single channels, which takes most of its time."""
    thin = torch.nn.Conv2d(64, 64, 5, padding=2, groups=64)
    return capture(torch.nn.Sequential(thin, torch.nn.Flatten()), (torch.randn(8, 64, 16, 16),)).graph


def test_range_of_a_kind_that_was_judged() -> None:
    """100 ms on a card of a family whose steps were judged: 90 to 110 ms, by 40 rows of the kind."""
    found = range_on(TRAINING, ["a100-sxm-80g"], FIGURES)
    assert found.of(100_000_000) == (90_000_000, 110_000_000)
    assert found.rests_on == "40 measured steps of eager training on one device, mostly products"


@pytest.mark.parametrize(("card", "factor"), [("h100-sxm-80g", 1.2), ("rtx4090-24g", 1.2), ("my-own-card", 1.5)])
def test_other_cards_have_wider_ranges(card: str, factor: float) -> None:
    """The spread of a card on which the kind was not judged comes in addition, independently, whatever else was judged
    on it; cards of no family have the widest."""
    found = range_on(TRAINING, [card, "a100-sxm-80g"], FIGURES)
    assert found.low == pytest.approx(exp(-hypot(log(0.9), log(factor))))
    assert found.high == pytest.approx(exp(hypot(log(1.1), log(factor))))
    assert found.rests_on.endswith(f"on one device, mostly products, none on cards like {card}")


def test_kind_without_rows_rests_on_others() -> None:
    """CUDA graphs were not judged: the range is that of other kinds, and says so."""
    found = range_on(TRAINING._replace(runtime="cuda-graphs"), ["a100-sxm-80g"], FIGURES)
    assert (found.low, found.high) == (0.5, 2.0)
    assert (
        found.rests_on == "measured steps of other kinds, none of cuda-graphs training on one device, mostly products"
    )


def test_kind_of_a_step(step: Graph) -> None:
    """A step says whether it is trained, how it is run, on how many devices, and that its convolutions are thin."""
    one, two = np.zeros(step.num_ops, np.int64), np.arange(step.num_ops) % 2
    offloaded = Cluster.parse("a100-sxm-80g+cpu-16core:compile")
    cards, hosts = Cluster.parse("2xa100-sxm-80g:compile"), Cluster.parse("2x(2xa100-sxm-80g)@100gbit:compile")
    assert StepKind.of(step, cards, one) == (True, "compile", "", True, True)
    several = [
        ("cards", "several devices", cards, two),
        ("cards", "several devices", hosts, two),
        ("groups", "groups of cards", cards.grouped(2), one),
        ("network", "several hosts", hosts, two * 2),
        ("network", "several hosts", hosts.grouped(2), two),
        ("host", "cards beside a CPU", offloaded, two),
    ]
    for exchanges, where, cluster, placement in several:
        kind = StepKind.of(step, cluster, placement)
        assert kind == (True, "compile", exchanges, True, True)
        assert str(kind) == f"compile training on {where}, mostly products, many grouped convolutions"


def test_there_is_no_range_where_kernels_are_not_priced(step: Graph) -> None:
    """Without shapes there is no range, and none on CPUs that were not measured; a CPU beside a card may hold ops."""
    one, half = np.zeros(step.num_ops, np.int64), np.arange(step.num_ops) % 2
    card, both = Cluster.parse("a100-sxm-80g"), Cluster.parse("a100-sxm-80g+cpu-16core")
    assert range_of(step, card, one) is not None
    beside = range_of(step, both, half)
    assert beside is not None
    assert beside.rests_on.startswith("measured steps of other kinds, none of eager training on cards beside a CPU")
    assert range_of(step, Cluster.parse("cpu-16core"), one) is None
    bare = replace(step, shapes=("",) * step.num_ops)
    assert range_of(bare, card, one) is None
    timed = replace(step, times_ns=({"a100-sxm-80g": 1000}, *step.times_ns[1:]))
    assert range_of(timed, card, one) == range_of(step, card, one)
    shares = [tie_share(graph, card, one) for graph in (step, bare, timed)]
    assert shares[0] > 0
    assert shares[1:] == [0, 0]
    assert tie_share(bare, Cluster.parse("cpu-16core"), one) == 0.066


def test_steps_on_cores_have_ranges_where_something_was_measured(step: Graph) -> None:
    """Ops that were measured predict a step on cores in another range than classes of kernels that were."""
    one, half = np.zeros(step.num_ops, np.int64), np.arange(step.num_ops) % 2
    cores = Cluster.parse("2xcpu-16core")
    measured = [replace(core, achieved=MappingProxyType({"product": 0.8})) for core in cores.devices]
    measured_cores = replace(cores, devices=tuple(measured))
    timed = replace(step, times_ns=({"cpu-16core": 1000},) * step.num_ops)
    assert StepKind.of(step, measured_cores, one) == (True, CORES, "", False, False)
    assert StepKind.of(timed, cores, half) == (True, TIMED, "cards", False, False)
    assert range_of(step, cores, one) is None
    told = [range_of(step, measured_cores, half), range_of(timed, cores, half)]
    assert [found.rests_on.rpartition(" of ")[2] for found in told if found] == [
        "training on several devices, processor cores measured",
        "training on several devices, ops measured",
    ]


OWN = [  # ratios of measured to predicted times, the middle of the range of exp(-0.1) to exp(0.1), and its width
    ((1.0,) * 12, 0.0, 0.1 * (4 / 16) ** 0.5),
    ((exp(0.1),) * 4, 0.1 * 4 / 6, 0.1 * ((4 + 2 * 4 / 6 * 1.2816**2) / 8) ** 0.5),
    ((exp(-0.2), exp(0.2)), 0.0, 0.1 * ((4 + 2 * (2 * 1.2816) ** 2) / 6) ** 0.5),
]


@pytest.mark.parametrize(("own", "middle", "width"), OWN)
def test_steps_of_the_machine_itself_count(own: tuple[float, ...], middle: float, width: float) -> None:
    """A range counts as four measured steps in its width and as two in its middle, beside those of the machine."""
    cell = FIGURES["cells"][0] | {"factors": [exp(-0.1), exp(0.1)]}
    found = range_on(TRAINING, ["a100-sxm-80g"], FIGURES | {"cells": [cell]}, own)
    assert log(found.low) == pytest.approx(middle - width)
    assert log(found.high) == pytest.approx(middle + width)
    assert found.rests_on.endswith(f"mostly products, and {len(own)} on this machine")


def test_steps_that_contradict_a_range_widen_it() -> None:
    """Steps that take half and twice as long as predicted leave no doubt that the range is too narrow; and the
    prediction stays in the range of steps that all take longer."""
    plain, wide, slow = (range_on(TRAINING, ["a100"], FIGURES, own) for own in ((), (0.5, 2.0), (1.5,) * 20))
    assert wide.low < plain.low
    assert wide.high > plain.high
    assert slow.low == 1
    assert slow.high > 1.4


def test_measured_rates_make_a_card_less_strange() -> None:
    """A card of no family reaches what any card does, so its range is wide; that of one whose rates were measured is as
    wide as that of a known family that has no rows."""
    card = Cluster.parse("a100-sxm-80g").devices[0]
    strange = replace(card, kind="my-own-card", achieved=figures_of_kind("my-own-card").achieved)
    measured = replace(strange, achieved=scaled(strange.achieved, 1.1, 1.2))
    known = replace(card, kind="h100-sxm-80g")
    linear = capture(torch.nn.Linear(4096, 4096), (torch.randn(4096, 4096),)).graph
    one, widths = np.zeros(linear.num_ops, np.int64), []
    for device in (strange, measured, known):
        found = range_of(linear, Cluster.build("one", [device], {}), one)
        assert found is not None
        widths.append(found.high / found.low)
    assert widths[0] > widths[1] == pytest.approx(widths[2])
