"""A style scorer says which styles suit a problem: searches take those first."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.policy.style_scorer import StyleScorer, StyleScores, draw_styles, in_grouping, shapes, style_numbers
from gdp.policy.unit_source import NUM_PROBLEM_FEATURES, UnitSource, problem_features
from gdp.search.candidate import Figures
from gdp.search.ops.zero_shot import StylePool
from gdp.simulator.problem import Problem
from policy.tiny_policy import random_graph

PROBLEM = Problem.build(random_graph(24, 0), Cluster.parse("p100-pcie-16g+v100-sxm-32g"))


def random_scores() -> StyleScores:
    rng = np.random.default_rng(0)
    scorer = StyleScorer(**{name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes(8).items()})
    return replace(scorer, deviation=np.full(NUM_PROBLEM_FEATURES, 2.0, np.float32)).on(UnitSource.of(PROBLEM))


@pytest.mark.parametrize("devices", ["p100-pcie-16g", "4xp100-pcie-16g", "p100-pcie-16g+cpu-16core"])
def test_problem_features_are_small(devices: str) -> None:
    """Features of problems are finite and small, on one device and on unlike ones."""
    features = problem_features(UnitSource.of(Problem.build(random_graph(24, 0), Cluster.parse(devices))))
    assert features.shape == (NUM_PROBLEM_FEATURES,)
    assert np.isfinite(features).all()
    assert np.abs(features).max() <= 16


def test_problem_features_have_no_unit() -> None:
    """Devices and links half as fast: shares and ratios stay, up to rounding and the overhead of each op."""
    problem = Problem.build(random_graph(24, 0), Cluster.parse("4xp100-pcie-16g"))
    cluster = problem.cluster
    slow = replace(cluster, bytes_per_second=cluster.bytes_per_second // 2, latency_ns=cluster.latency_ns * 2)
    slowed = Problem.build(problem.graph, slow, op_time_ns=problem.op_time_ns * 2)
    features = [problem_features(UnitSource.of(one)) for one in (problem, slowed)]
    np.testing.assert_allclose(*features, atol=1e-5)


def test_styles_move_to_a_grouping() -> None:
    """Styles of one grouping are scored as if drawn in it."""
    styles = draw_styles(5, np.random.default_rng(1))
    moved = [replace(style, num_units=styles[0].num_units, following=styles[0].following) for style in styles]
    numbers = in_grouping(style_numbers(styles, 4), styles[0].num_units, styles[0].following)
    assert np.array_equal(numbers, style_numbers(moved, 4))


def test_scores_learn_from_ranks_on_the_problem() -> None:
    """The errors on styles that were tried shrink, and an exact prediction changes nothing."""
    scores = random_scores()
    numbers = style_numbers(draw_styles(64, np.random.default_rng(2)), PROBLEM.num_devices)
    ranks = np.random.default_rng(3).permutation(64) / 64
    wanted = np.log(ranks + 0.02)

    def error(known: StyleScores) -> float:
        return float(np.std(wanted - known.of(numbers)))

    assert error(scores.learn(numbers, ranks)) < error(scores)
    exact = np.exp(scores.of(numbers).astype(np.float64)) - 0.02
    np.testing.assert_allclose(scores.learn(numbers, exact).of(numbers), scores.of(numbers), atol=1e-4)


def test_pools_give_no_style_twice() -> None:
    """A pool gives the best styles of one grouping, and none twice."""
    scores = random_scores()
    pool = StylePool(scores, np.random.default_rng(4))
    first = pool.take(8, [])
    left = style_numbers(pool.styles, PROBLEM.num_devices)
    assert len({(style.num_units, style.following) for style in first}) == 1
    in_first = scores.of(in_grouping(left, first[0].num_units, first[0].following))
    assert scores.of(style_numbers(first, PROBLEM.num_devices)).max() <= in_first.min() + 1e-5
    tried = [(Figures(0, number), style) for number, style in enumerate(first)]
    scales = [style.scale.tobytes() for style in (*first, *pool.take(8, tried))]
    assert len(set(scales)) == 16
