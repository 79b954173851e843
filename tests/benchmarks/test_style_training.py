"""Training of the style scorer: styles are tried on problems, and a network learns how they rank."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.architectures import style_training
from benchmarks.architectures.style_training import (
    Outcomes,
    StyleProgress,
    StyleTrainingConfig,
    fit,
    normalize,
    outcomes_path,
    read_parts,
    reset,
    scores_of,
    train_styles,
    try_styles,
    write_part,
)
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.policy.checkpoint import load_checkpoint, new_policy
from gdp.policy.construction import Constructor
from gdp.policy.features import INITIAL_WEIGHTS
from gdp.policy.scheduler import SchedulerPolicy, StyleNetwork
from gdp.policy.style_scorer import draw_styles, style_numbers
from gdp.policy.unit_source import NUM_PROBLEM_FEATURES, UnitSource, problem_features
from gdp.simulator.problem import Problem
from policy.tiny_policy import random_graph, tiny_tasks

CONFIG = StyleTrainingConfig(num_tasks=6, first_fit=2, num_groupings=3, num_styles=4, epochs=2, batch=16)
PROBLEM = Problem.build(random_graph(24, 0), Cluster.parse("p100-pcie-16g+v100-sxm-32g"))
UNTRAINED = Constructor.of(np.array(INITIAL_WEIGHTS, np.float32))


def test_scores_equal_pytorchs() -> None:
    """Scores in NumPy are those of the network in PyTorch."""
    net, generator = StyleNetwork(8), torch.Generator().manual_seed(0)
    reset(net, generator)
    with torch.no_grad():
        net.out.copy_(torch.randn(8, generator=generator))
    normalize(net, torch.full((NUM_PROBLEM_FEATURES,), 0.5), torch.full((NUM_PROBLEM_FEATURES,), 2.0))
    scorer = net.in_numpy()
    assert scorer is not None
    numbers = style_numbers(draw_styles(32, np.random.default_rng(0)), PROBLEM.num_devices)
    features = torch.from_numpy(problem_features(UnitSource.of(PROBLEM))).expand(32, -1)
    expected = scores_of(net, features, torch.from_numpy(numbers)) - net.hidden_bias @ torch.zeros(8)
    np.testing.assert_allclose(
        scorer.on(UnitSource.of(PROBLEM)).of(numbers), expected.detach().numpy(), rtol=1e-4, atol=1e-5
    )


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


def trained(out: Path, num_tasks: int = CONFIG.num_tasks, **run: Any) -> tuple[SchedulerPolicy, StyleProgress]:
    policy, tasks = new_policy("default", style_scorer=8), tiny_tasks()
    assert isinstance(policy, SchedulerPolicy)
    config, validation = replace(CONFIG, num_tasks=num_tasks), [tasks.unvaried(0)]
    return policy, train_styles(policy, tasks, config, out, validation=validation, **run)


def same(policy: SchedulerPolicy, out: Path) -> bool:
    resumed = load_checkpoint(out)
    return all(torch.equal(parameter, resumed.get_parameter(name)) for name, parameter in policy.named_parameters())


def test_interrupted_runs_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after five of six tasks, the last one in a part that is not full."""
    monkeypatch.setattr(style_training, "PART", 2)
    whole, progress = trained(tmp_path / "whole.safetensors")
    assert (progress.update, progress.updates) == (6, 6)
    stop, out = threading.Event(), tmp_path / "parts.safetensors"

    def stop_after_five(progress: StyleProgress) -> None:
        if progress.update == 5:
            stop.set()

    _, progress = trained(out, stop=stop, on_update=stop_after_five)
    assert progress.update == 5
    assert not out.exists()
    drawn: list[int] = []
    trained(out, resume=True, on_update=lambda progress: drawn.append(progress.update))
    assert drawn == [5, 6, 6]  # the fit to four tasks again, the last task, the last fit
    assert same(whole, out)


def test_a_run_that_has_ended_goes_on_to_more_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From three tasks to six, the parameters of six."""
    monkeypatch.setattr(style_training, "PART", 2)
    whole, _ = trained(tmp_path / "whole.safetensors")
    out = tmp_path / "longer.safetensors"
    assert not same(trained(out, num_tasks=3)[0], tmp_path / "whole.safetensors")
    trained(out, resume=True)
    assert same(whole, out)


def test_runs_keep_their_tasks(tmp_path: Path) -> None:
    """A run does not go back to fewer tasks."""
    out = tmp_path / "mine.safetensors"
    trained(out, num_tasks=3)
    before = out.read_bytes()
    with pytest.raises(InputError, match="3 updates were made already; --updates of at least 3 is expected"):
        trained(out, resume=True, num_tasks=2)
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
