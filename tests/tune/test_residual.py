"""The residual: what a measured step says about others, by hand; and which candidate comes next."""

from math import inf, log

import numpy as np
import pytest

from gdp.tune.residual import Residual, expected_gain


def test_a_measured_step_moves_others_as_far_as_their_errors_go_together() -> None:
    """By hand, of two candidates with the same traits.

    Variance 0.5^2 + 0.5^2 = 0.5 each; covariance 0.5^2 + 0.2 x 0.5^2 = 0.3. One takes 1.1 times the prediction: the
    other is expected at 0.3 / 0.5 of that error, with variance 0.5 - 0.3^2 / 0.5 = 0.32.
    """
    residual = Residual.of([100, 200], [[1.0], [1.0]], spread=0.5, noise=0.0)
    means, deviations = residual.after({0: 110.0})
    assert np.exp(means).tolist() == pytest.approx([110, 200 * 1.1**0.6])
    assert deviations.tolist() == pytest.approx([0, 0.32**0.5], abs=1e-5)


def test_like_candidates_are_moved_more_than_others() -> None:
    """Of three equal predictions the one with the trait of a slow step is expected to be slower than the third."""
    means, _ = Residual.of([100, 100, 100], [[0.0], [0.0], [9.0]], spread=0.2, noise=0.01).after({0: 150.0})
    assert means[0] > means[1] > means[2] > log(100)


def test_nothing_measured() -> None:
    """First comes the fastest prediction; a failed measurement moves none, and its candidate does not come again."""
    residual = Residual.of([300, 100, 200], [[0], [1], [2]], spread=0.1, noise=0.01)
    first, second = residual.proposal({}), residual.proposal({1: inf})
    assert first is not None
    assert second is not None
    assert (first.candidate, second.candidate) == (1, 2)
    assert first.predicted_ns == pytest.approx(100)
    assert second.predicted_ns == pytest.approx(200)
    assert residual.proposal({0: 1.0, 1: 1.0, 2: 1.0}) is None


def test_it_ends_when_none_is_likely_to_be_faster() -> None:
    """A candidate of twice the time is not worth a measurement, one within the spread is."""
    for other, is_likely in ((200, False), (103, True)):
        proposal = Residual.of([100, other], [[0], [1]], spread=0.1, noise=0.02).proposal({0: 100.0})
        assert proposal is not None
        assert proposal.is_likely == is_likely


def test_predictions_decide_where_noise_hides_which_is_faster() -> None:
    """Of two steps that differ by less than the noise, the answer is the one that is predicted to be faster; of others,
    and of failed ones, what was measured decides."""
    residual = Residual.of([100, 120], [[0], [1]], spread=0.1, noise=0.05)
    assert residual.answer({0: 101.0, 1: 100.0}) == 0
    assert residual.answer({0: 150.0, 1: 100.0}) == 1
    assert residual.answer({0: inf, 1: 100.0}) == 1


def test_expected_gain() -> None:
    """At a mean of the best so far it is deviation / sqrt(2 pi), far below it the distance, far above it nothing."""
    gains = expected_gain(0.0, np.array([0.0, -5.0, 5.0]), np.array([0.1, 0.1, 0.1]))
    assert gains.tolist() == pytest.approx([0.1 / (2 * np.pi) ** 0.5, 5.0, 0.0], abs=1e-12)


def test_orders_of_a_placement_err_together() -> None:
    """A step of half the predicted time again says that the same placement in another order takes as much longer, and
    little of another placement with the same traits."""
    residual = Residual.of([100] * 3, [[0.0]] * 3, spread=0.2, noise=0.01, placed=["a", "a", ""])
    alone = Residual.of([100] * 3, [[0.0]] * 3, spread=0.2, noise=0.01)
    (means, deviations), (means_alone, deviations_alone) = (each.after({0: 150.0}) for each in (residual, alone))
    assert 145 < np.exp(means[1]) <= 150
    assert deviations[1] < 0.5 * deviations_alone[1]
    assert means[2] == pytest.approx(means_alone[2])
