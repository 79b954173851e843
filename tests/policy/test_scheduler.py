"""The default policy draws placements that keep the rules, treats like devices alike, and learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.policy.construction import SchedulerConfig, UnitInstance
from gdp.policy.features import NUM_FEATURES, NUMBERS
from gdp.policy.rollout import roll_out
from gdp.policy.rollout_arrays import RolloutArrays, RolloutRecord
from gdp.policy.scheduler import SchedulerPolicy
from gdp.policy.style_scorer import draw_refinement, draw_style, options_of, vary
from gdp.policy.unit_source import UnitSource
from gdp.search.ops.fine_tune import FineTuneConfig, fine_tune
from gdp.search.ops.zero_shot import Evaluator, ZeroShotConfig, zero_shot
from gdp.search.question import Question
from gdp.search.settings import DEFAULTS
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate
from strategies import Instance, instances

SMALL = SchedulerConfig(num_units=(4, 8))
WITH_SCORER = replace(SMALL, style_scorer=8)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def policy_of(config: SchedulerConfig, seed: int = 0) -> SchedulerPolicy:
    """Returns a policy whose weights differ from the untrained ones."""
    torch.manual_seed(seed)
    policy = SchedulerPolicy(config)
    with torch.no_grad():
        policy.base += torch.randn(policy.base.shape)
    if policy.styles is not None:
        for parameter in policy.styles.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.5)
    return policy


def layered(num_layers: int = 6, width: int = 4, num_devices: int = 3) -> Problem:
    """Layers of independent ops that each feed two ops of the next layer."""
    ops = [Op(f"op{i}", "mm", flops=10**9, module=f"layers.{i // width}") for i in range(num_layers * width)]
    tensors = []
    for op in range((num_layers - 1) * width):
        below = (op // width + 1) * width
        tensors.append(Tensor(op, (below + op % width, below + (op + 1) % width), 10_000))
    return Problem.build(Graph.build("layered", ops, tensors), Cluster.parse(f"{num_devices}xp100-pcie-16g"))


@settings(max_examples=25)
@given(
    instances(max_ops=24, keep_groups=True),
    st.sampled_from([SMALL, WITH_SCORER]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
)
def test_samples_keep_rules_and_scores(
    instance: Instance, config: SchedulerConfig, temperature: float, refines: bool
) -> None:
    """Samples keep groups and allowed devices, and score as they were drawn."""
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    policy = policy_of(config)
    view = policy.constructor.grouped(problem, 6, rng())
    if refines:
        incumbent = policy.sample(view, 1, rng()).placements[0]
        view = policy.constructor.grouped(problem, 6, rng(), incumbent=incumbent)
    rollouts = policy.sample(view, 5, rng(), temperature=temperature)
    assert not any(problem.broken_constraints(placement) for placement in rollouts.placements)
    assert not rollouts.log_prob.requires_grad
    log_prob, entropy = policy.score(view, rollouts)
    # scores reach hundreds in float32, and a logarithm of a probability has their rounding: 25e-6 was seen
    torch.testing.assert_close(log_prob.detach(), rollouts.log_prob, rtol=1e-5, atol=1e-4)
    (log_prob.mean() + entropy).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters())


def test_devices_without_memory() -> None:
    """Where no device has any memory, placements keep the other rules."""
    names = {device.name: 0 for device in layered().cluster.devices}
    problem = Problem.build(layered().graph, layered().cluster, max_memory_bytes=names)
    policy = policy_of(SMALL)
    rollouts = policy.sample(policy.constructor.grouped(problem, 24, rng()), 5, rng())
    assert rollouts.log_prob.isfinite().all()
    assert not any(problem.broken_constraints(placement) for placement in rollouts.placements)


def test_forbidden_devices_are_never_drawn() -> None:
    """Pinned ops are on their device in all samples, with probability 1."""
    problem = Problem.build(layered().graph, layered().cluster, pins=[(r"layers\.2", "gpu1")])
    policy = policy_of(SMALL)
    view = policy.constructor.grouped(problem, 24, rng())
    rollouts = policy.sample(view, 50, rng())
    assert (rollouts.placements[:, 8:12] == 1).all()
    pinned = np.unique(view.units.index[8:12])
    log_prob = rollouts.log_prob.reshape(50, -1, view.units.num_units)
    assert (log_prob[:, :, pinned] == 0).all()  # one device is left: log 1


@settings(max_examples=20)
@given(st.permutations(range(4)), st.integers(1, 3))
def test_renamed_devices_keep_their_features(names: list[int], passes: int) -> None:
    """Features belong to a device, whatever its number is."""
    problem = layered(num_devices=4)
    alone = np.full(4, -1)  # without the rule on empty devices, which goes by number
    source = replace(UnitSource.of(problem), equal_before=alone)
    units = source.draw(24, rng(1))
    arrays = RolloutArrays.of(source, units)
    fixed = rng(2).integers(0, 4, (1, units.num_units))
    fixed[0, -1] = -1
    weights = rng(3).normal(size=(2, NUM_FEATURES)).astype(np.float32)
    style = replace(draw_style(rng(4)), temperature=0.0, passes=passes)
    seen = []
    for placed in (fixed, np.where(fixed < 0, -1, np.array(names)[fixed])):
        chosen, record = np.zeros_like(fixed), RolloutRecord.empty(1, passes, units.num_units, 4)
        uniforms = np.zeros((1, passes, units.num_units))
        options = options_of([style], 4, refines=False)
        roll_out(arrays, weights, options, placed, np.full(units.num_units, -1), uniforms, chosen, record)
        seen.append((record.features[0, -1, -1], chosen[0, -1]))
    np.testing.assert_allclose(seen[1][0][names], seen[0][0], rtol=1e-5, atol=1e-6)
    assert seen[1][1] == names[seen[0][1]]


def test_devices_hold_what_is_counted_anew() -> None:
    """After six passes the features of a unit are those of the units where they are."""
    problem = layered(num_devices=3)
    source = replace(UnitSource.of(problem), equal_before=np.full(3, -1))
    units = source.draw(24, rng(1))
    arrays = RolloutArrays.of(source, units)
    weights = rng(3).normal(size=(2, NUM_FEATURES)).astype(np.float32)
    style = replace(draw_style(rng(5)), temperature=2.0, passes=6, slack=1e9, most=1.0)
    chosen, record = np.zeros((1, units.num_units), np.int64), RolloutRecord.empty(1, 6, units.num_units, 3)
    free = np.full((1, units.num_units), -1)
    options = options_of([style], 3, refines=False)._replace(scale=np.ones((1, 2, NUM_FEATURES), np.float32))
    roll_out(arrays, weights, options, free, free[0], rng(6).random((1, 6, units.num_units)), chosen, record)
    assert np.array_equal(chosen[0], record.devices[0, -1])
    last = units.num_units - 1  # when it chose for the last time, all others were where they are now
    others = np.arange(last)
    for device in range(3):
        here = others[chosen[0, :last] == device]
        seen = dict(zip(NUMBERS, record.features[0, -1, last, device], strict=True))
        row = slice(arrays.near.offsets[last], arrays.near.offsets[last + 1])
        there = np.isin(arrays.near.units[row], here)
        assert seen["neighbours here, of all"] == pytest.approx(arrays.near.shares[row][there].sum(), abs=1e-5)
        load = arrays.time_ns[here, device].sum() / (arrays.speed[device] * arrays.total_ns)
        assert seen["load"] == pytest.approx(min(load, 4.0), rel=1e-5)
        assert seen["empty"] == float(len(here) == 0)


def test_styles_limit_the_devices_in_use() -> None:
    """A style uses as many devices as it says, and no more."""
    policy = policy_of(SMALL)
    view = policy.constructor.grouped(layered(num_devices=4), 24, rng())
    for most, count in ((0.25, 1), (0.5, 2), (1.0, 4)):
        style = replace(draw_style(rng(1)), temperature=5.0, most=most)
        used = [len(np.unique(placement)) for placement in policy.constructor.place(view, [style] * 20, rng())]
        assert max(used) == count


def test_first_of_like_empty_devices() -> None:
    """Of exchangeable devices that are empty only the first can be chosen."""
    policy = policy_of(SMALL)
    view = policy.constructor.grouped(layered(), 24, rng())
    styles = [replace(draw_style(rng(seed)), temperature=5.0, passes=1) for seed in range(30)]
    placements = policy.constructor.place(view, styles, rng())
    order = [int(np.flatnonzero(view.units.index == unit)[0]) for unit in range(view.units.num_units)]
    for placement in placements:
        first_uses = list(dict.fromkeys(placement[order].tolist()))
        assert first_uses == sorted(first_uses)


def test_refining_changes_freed_units_only() -> None:
    """A refinement moves at most the share of units that choose again."""
    problem, policy = layered(), policy_of(SMALL)
    start = policy.sample(policy.constructor.grouped(problem, 24, rng()), 1, rng(), temperature=5.0).placements[0]
    view = policy.constructor.grouped(problem, 24, rng(), incumbent=start)
    assert (view.incumbent[view.units.index] == start).all()
    rollouts = policy.sample(view, 40, rng(), temperature=5.0)
    changed = (rollouts.placements != start).mean(axis=1)
    assert 0 < changed.max() <= 0.6 + 1 / view.units.num_units


def test_resident_bytes_go_where_they_fit() -> None:
    """Three ops of 6 GiB on devices of 16: two fit together, never three."""
    ops = [Op(f"op{i}", "mm", flops=10**9, resident_bytes=6 * 2**30) for i in range(3)]
    problem = Problem.build(Graph.build("big", ops, []), Cluster.parse("2xp100-pcie-16g"))
    policy = policy_of(SMALL)
    placements = policy.sample(policy.constructor.grouped(problem, 3, rng()), 40, rng(), temperature=5.0).placements
    assert (np.sort(placements.sum(axis=1)) <= 2).all()
    assert all((evaluate(problem, placement)[1] <= problem.memory_limit_bytes).all() for placement in placements)


@pytest.mark.parametrize("devices", ["1xp100-pcie-16g", "16xp100-pcie-16g", "2xa100-sxm-80g+1xl4-24g+cpu-16core"])
def test_any_number_and_mix_of_devices(devices: str) -> None:
    """One policy places on one device, on 16 and on unlike ones."""
    problem = Problem.build(layered().graph, Cluster.parse(devices))
    view = SchedulerPolicy(SMALL).instance(problem, rng())
    assert isinstance(view, UnitInstance)
    assert SchedulerPolicy(SMALL).sample(view, 3, rng()).placements.max() < problem.num_devices


def test_styles_depend_on_the_generator_alone() -> None:
    """The same seed gives the same style, and scales are never negative."""
    for make in (draw_style, draw_refinement, lambda generator: vary(draw_style(generator), generator)):
        one, again, other = make(rng(1)), make(rng(1)), make(rng(2))
        assert np.array_equal(one.scale, again.scale)
        assert not np.array_equal(one.scale, other.scale)
        assert (one.scale >= 0).all()  # a style weighs more or less, never the other way round


def test_zero_shot_repeats_itself() -> None:
    """Zero-shot makes as many simulations as it may, and gives the same answer for a seed."""
    problem, policy = layered(), policy_of(SMALL)
    clocks = [Clock(Budget.parse("1m")) for _ in range(2)]
    first, second = (
        zero_shot(Question.about(problem, seed=3), clock, constructor=policy.constructor).best for clock in clocks
    )
    assert clocks[0].simulations == DEFAULTS.policy.most_simulations
    assert first is not None
    assert second is not None
    assert np.array_equal(first.placement, second.placement)
    assert evaluate(problem, first.placement)[0] == first.step_time_ns


def test_zero_shot_simulates_larger_problems_less() -> None:
    """5,000,000 / 20,000 = 250 simulations, 0.1875 * 250 = 46 of them drawn, and as many varied."""
    ops = [Op(f"op{i}", "mm") for i in range(20_000)]
    cluster = Cluster.parse("2xp100-pcie-16g")
    problem = Problem.build(Graph.build("wide", ops, []), cluster, op_time_ns=np.full((20_000, 2), 1000))
    for budget, numbers in (("1m", (250, 46, 46)), ("64sims", (64, 12, 12)), ("12sims", (12, 8, 4))):
        config = ZeroShotConfig.sized(problem, Clock(Budget.parse(budget)), DEFAULTS.policy)
        assert (config.num_simulations, config.num_drawn, config.num_varied) == numbers


def test_large_problems_draw_half() -> None:
    """Shares of a budget that is just as large do not end the drawing before."""
    problem = Problem.build(Graph.build("large", [Op(f"op{n}") for n in range(30_000)], []), Cluster.parse("2xl4-24g"))
    for budget in ("1m", "192sims", "5000sims"):
        config = ZeroShotConfig.sized(problem, Clock(Budget.parse(budget)), DEFAULTS.policy)
        assert (config.num_simulations, config.num_drawn, config.num_varied) == (192, 96, 32)
        assert config.draw_share >= config.num_drawn / config.num_simulations


def test_fine_tuning_keeps_budget_for_updates() -> None:
    """The zero-shot answer takes at most a third of the budget."""
    question, clock = Question.about(layered()), Clock(Budget.parse("300sims"))  # the answer may have up to 100
    assert fine_tune(question, clock, policy=policy_of(SMALL)).num_updates > 0


def test_equals_replace_the_best() -> None:
    """A placement that is as good as the best one replaces it."""
    problem = layered()
    evaluator = Evaluator(Question.about(problem), Clock(Budget.parse("100sims")))
    num_ops = evaluator.problem.num_ops
    evaluator.try_out(np.zeros((1, num_ops), np.int64))
    evaluator.try_to_improve(np.ones((1, num_ops), np.int64))  # devices are equal
    assert set(evaluator.placement.tolist()) == {1}


def test_fine_tuning_reaches_the_optimum() -> None:
    """Twelve equal ops on three devices, 4 each; the same seed gives the same answer."""
    ops = [Op(f"op{i}", "mm") for i in range(12)]
    cluster = Cluster.parse("3xp100-pcie-16g")
    problem = Problem.build(Graph.build("even", ops, []), cluster, op_time_ns=np.full((12, 3), 1000))
    config = FineTuneConfig(zero_shot=ZeroShotConfig(num_simulations=8, num_drawn=4, num_varied=2))
    found = []
    for _ in range(2):
        policy = policy_of(SMALL)
        torch.nn.init.zeros_(policy.base)
        question, clock = Question.about(problem, seed=1), Clock(Budget.parse("400sims"))
        solution = fine_tune(question, clock, policy=policy, config=config)
        assert solution.num_updates > 0
        assert solution.best is not None
        found.append(solution.best)
    assert found[0].step_time_ns == 4000
    assert np.array_equal(found[0].placement, found[1].placement)
