"""A style scorer says which styles suit a problem: searches take those first, and training learns it from outcomes."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.policy.checkpoint import load_checkpoint, new_policy
from gdp.policy.construction import Constructor
from gdp.policy.features import INITIAL_WEIGHTS
from gdp.policy.sampling import draw_styles
from gdp.policy.scheduler import SchedulerPolicy, StyleNetwork
from gdp.policy.style_scorer import StyleScores, in_grouping, style_numbers
from gdp.policy.training import style_training
from gdp.policy.training.pretrain import TrainingProgress, TrainingRun
from gdp.policy.training.style_training import (
    Outcomes,
    StyleTrainingConfig,
    fit,
    outcomes_path,
    read_parts,
    train_styles,
    try_styles,
    write_part,
)
from gdp.policy.unit_source import NUM_PROBLEM_FEATURES, UnitSource, problem_features
from gdp.search.candidate import Figures
from gdp.search.ops.zero_shot import StylePool
from gdp.simulator.problem import Problem
from policy.tiny_policy import random_graph, tiny_tasks

CONFIG = StyleTrainingConfig(num_tasks=6, first_fit=2, num_groupings=3, num_styles=4, epochs=2, batch=16)
PROBLEM = Problem.build(random_graph(24, 0), Cluster.parse("p100-pcie-16g+v100-sxm-32g"))
UNTRAINED = Constructor.of(np.array(INITIAL_WEIGHTS, np.float32))


def network(seed: int = 0) -> StyleNetwork:
    net, generator = StyleNetwork(8), torch.Generator().manual_seed(seed)
    net.reset(generator)
    with torch.no_grad():
        net.out.copy_(torch.randn(8, generator=generator))
    net.normalize(torch.full((NUM_PROBLEM_FEATURES,), 0.5), torch.full((NUM_PROBLEM_FEATURES,), 2.0))
    return net


def scores_of(net: StyleNetwork, problem: Problem = PROBLEM) -> StyleScores:
    scorer = net.in_numpy()
    assert scorer is not None
    return scorer.on(UnitSource.of(problem))


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


def test_scores_equal_pytorchs() -> None:
    """Scores in NumPy are those of the network in PyTorch."""
    net = network()
    numbers = style_numbers(draw_styles(32, np.random.default_rng(0)), PROBLEM.num_devices)
    features = torch.from_numpy(problem_features(UnitSource.of(PROBLEM))).expand(32, -1)
    expected = net(features, torch.from_numpy(numbers)) - net.hidden_bias @ torch.zeros(8)
    np.testing.assert_allclose(scores_of(net).of(numbers), expected.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_styles_move_to_a_grouping() -> None:
    """Styles of one grouping are scored as if drawn in it."""
    styles = draw_styles(5, np.random.default_rng(1))
    moved = [replace(style, num_units=styles[0].num_units, following=styles[0].following) for style in styles]
    numbers = in_grouping(style_numbers(styles, 4), styles[0].num_units, styles[0].following)
    assert np.array_equal(numbers, style_numbers(moved, 4))


def test_scores_learn_from_ranks_on_the_problem() -> None:
    """The errors on styles that were tried shrink, and an exact prediction changes nothing."""
    scores = scores_of(network())
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
    scores = scores_of(network())
    pool = StylePool(scores, np.random.default_rng(4))
    first = pool.take(8, [])
    left = style_numbers(pool.styles, PROBLEM.num_devices)
    assert len({(style.num_units, style.following) for style in first}) == 1
    in_first = scores.of(in_grouping(left, first[0].num_units, first[0].following))
    assert scores.of(style_numbers(first, PROBLEM.num_devices)).max() <= in_first.min() + 1e-5
    tried = [(Figures(0, number), style) for number, style in enumerate(first)]
    scales = [style.scale.tobytes() for style in (*first, *pool.take(8, tried))]
    assert len(set(scales)) == 16


def test_outcomes_rank_fitting_first() -> None:
    """Placements that fit rank before all others."""
    ranks = style_training._ranks(np.array([5, 1, 9, 3]), np.array([0, 7, 0, 2]))
    assert ranks.tolist() == [0.125, 0.875, 0.375, 0.625]


def test_the_fit_ranks_what_it_saw() -> None:
    """Here the rank of a style depends on its number of units alone."""
    rng, net = np.random.default_rng(5), StyleNetwork(8)
    outcomes = []
    for _ in range(8):
        numbers = style_numbers(draw_styles(64, rng), 4)
        ranks = (np.argsort(np.argsort(numbers[:, 0] + 1e-3 * rng.random(64))) + 0.5) / 64
        outcomes.append(Outcomes(rng.random(NUM_PROBLEM_FEATURES, np.float32), numbers, ranks.astype(np.float32)))
    fit(net, outcomes, replace(CONFIG, epochs=60))
    assert style_training._correlation(net, outcomes) > 0.8  # type: ignore[operator]


def trained(
    out: Path, run: TrainingRun | None = None, num_tasks: int = CONFIG.num_tasks
) -> tuple[SchedulerPolicy, TrainingProgress]:
    policy, tasks = new_policy("default", style_scorer=8), tiny_tasks()
    assert isinstance(policy, SchedulerPolicy)
    config, validation = replace(CONFIG, num_tasks=num_tasks), [tasks.unvaried(0)]
    return policy, train_styles(policy, tasks, config, out, validation=validation, run=run)


def same(policy: SchedulerPolicy, out: Path) -> bool:
    resumed = load_checkpoint(out)
    return all(torch.equal(parameter, resumed.get_parameter(name)) for name, parameter in policy.named_parameters())


def test_interrupted_runs_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after five of six tasks, the last one in a part that is not full."""
    monkeypatch.setattr(style_training, "PART", 2)
    whole, progress = trained(tmp_path / "whole.safetensors")
    assert (progress.update, progress.updates) == (6, 6)
    stop, out = threading.Event(), tmp_path / "parts.safetensors"

    def stop_after_five(progress: TrainingProgress) -> None:
        if progress.update == 5:
            stop.set()

    _, progress = trained(out, TrainingRun(stop=stop, on_update=stop_after_five))
    assert progress.update == 5
    assert not out.exists()
    drawn: list[int] = []
    trained(out, TrainingRun(resume=True, on_update=lambda progress: drawn.append(progress.update)))
    assert drawn == [5, 6, 6]  # the fit to four tasks again, the last task, the last fit
    assert same(whole, out)


def test_a_run_that_has_ended_goes_on_to_more_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From three tasks to six, the parameters of six."""
    monkeypatch.setattr(style_training, "PART", 2)
    whole, _ = trained(tmp_path / "whole.safetensors")
    out = tmp_path / "longer.safetensors"
    assert not same(trained(out, num_tasks=3)[0], tmp_path / "whole.safetensors")
    trained(out, TrainingRun(resume=True))
    assert same(whole, out)


def test_runs_keep_their_tasks(tmp_path: Path) -> None:
    """A run does not go back to fewer tasks."""
    out = tmp_path / "mine.safetensors"
    trained(out, num_tasks=3)
    before = out.read_bytes()
    with pytest.raises(InputError, match="3 updates were made already; --updates of at least 3 is expected"):
        trained(out, TrainingRun(resume=True), num_tasks=2)
    assert out.read_bytes() == before


def test_fits_follow_at_twice_the_tasks() -> None:
    """Each fit follows at twice as many tasks as the one before."""
    config = StyleTrainingConfig(first_fit=25)
    assert [config.last_fit(number) for number in (24, 25, 49, 50, 99, 100, 5000)] == [0, 25, 25, 50, 50, 100, 3200]


def test_other_outcomes_are_refused(tmp_path: Path) -> None:
    """Outcomes of another run are one clear error."""
    outcome = try_styles(PROBLEM, UNTRAINED, None, (1, 4), np.random.default_rng(0))
    directory = outcomes_path(tmp_path / "mine.safetensors")
    write_part(directory, 0, "one run", [outcome])
    assert np.array_equal(read_parts(directory, "one run")[0].numbers, outcome.numbers)
    with pytest.raises(InputError, match="is of a run with other options; delete the directory"):
        read_parts(directory, "another run")
