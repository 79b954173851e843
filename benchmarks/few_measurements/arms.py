"""All arms, and those that learn nothing before a choice: orders, the residual, Bayesian optimisation."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.few_measurements.elsewhere import ELSEWHERE, propose
from benchmarks.few_measurements.published import PUBLISHED
from benchmarks.few_measurements.scorer import POLICIES
from benchmarks.few_measurements.trial import Arm, ArmRun, Lessons, Trial, one_by_one
from benchmarks.measured_sources.choices import Choice
from gdp.tune.residual import Residual, expected_gain

_REFITTED = (2, 3, 4, 5, 7, 10, 14, 19, 25, 35, 50)  # measurements after which a kernel is: it takes 10 ms
_WIDE = 0.5  # relative deviation of naive times: they are off by a factor, which depends on the layout


def _in_order(keys_of: Callable[[Choice], Any], needs: str = "") -> Arm:
    """Returns an arm that measures by the least key, ties in random order."""

    def player(trial: Trial, _lessons: Lessons) -> ArmRun:
        ties, keys = trial.generator.permutation(len(trial.seen)), keys_of(trial.choice)
        order = sorted(range(len(ties)), key=lambda number: (keys[number], ties[number]))
        return ArmRun(lambda measured: next(number for number in order if number not in measured))

    return Arm(one_by_one(player), needs)


def _with_residual(
    times_of: Callable[[Choice], npt.ArrayLike], spread_of: Callable[[Choice], float], needs: str = ""
) -> Arm:
    """Returns an arm whose residual is refitted after each measurement."""

    def player(trial: Trial, _lessons: Lessons) -> ArmRun:
        choice = trial.choice
        residual = Residual.of(times_of(choice), choice.traits, spread_of(choice), trial.noise)
        return ArmRun(lambda measured: propose(residual, measured), residual.answer)

    return Arm(one_by_one(player), needs)


def _gaussian_process(trial: Trial, _lessons: Lessons) -> ArmRun:
    """Returns the run of Bayesian optimisation over traits, without costs: the first two candidates are drawn."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    choice, generator = trial.choice, trial.generator
    deviation = choice.traits.std(axis=0)
    traits = (choice.traits / np.where(deviation > 0, deviation, 1))[:, deviation > 0]
    kernel = ConstantKernel(1.0, (0.05, 20)) * Matern(1.0, (0.2, 20), nu=2.5)
    kernel += WhiteKernel(trial.noise**2, (1e-6, 0.1))

    kernels = [kernel]

    def propose_next(measured: Mapping[int, float]) -> int:
        left = [number for number in range(len(traits)) if number not in measured]
        if len(measured) < 2 or len(left) == 1 or not traits.shape[1]:
            return int(generator.choice(left))
        known = list(measured)
        logs = np.log([measured[number] for number in known])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length is at a bound: few points say little
            fitted = len(known) in _REFITTED
            optimizer = "fmin_l_bfgs_b" if fitted else None
            process = GaussianProcessRegressor(
                kernel if fitted else kernels[-1], normalize_y=True, random_state=0, optimizer=optimizer
            ).fit(traits[known], logs)
            kernels.append(process.kernel_)
        means, deviations = process.predict(traits[left], return_std=True)
        gains = expected_gain(logs.min(), means, deviations.clip(1e-9))
        return left[int(np.argmax(gains))]

    return ArmRun(propose_next)


ARMS: Mapping[str, Arm] = {
    "random": _in_order(lambda choice: np.zeros(len(choice.measured))),
    "expert's rule": _in_order(lambda choice: choice.preference, "sheet"),
    "naive costs": _in_order(lambda choice: choice.naive, "sheet"),
    "naive costs, residual": _with_residual(lambda choice: choice.naive, lambda _: _WIDE, "sheet"),
    "Gaussian process": Arm(one_by_one(_gaussian_process)),
    **PUBLISHED,
    "gdp's costs": _in_order(lambda choice: choice.predicted),
    "gdp's costs, residual": _with_residual(lambda choice: choice.predicted, lambda choice: choice.spread),
    **ELSEWHERE,
    **POLICIES,
}
