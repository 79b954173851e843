"""Fits the few numbers of a machine to steps that its user measured: the most likely ones, given those of its family.

    minimize  sum over rows huber(log(predicted / measured) / 0.08) + sum over numbers (log(fitted / known) / prior)^2

A row errs by what the cost model errs, so few rows move a number little, and a number that no row tells of stays as it
is. R rows, P numbers."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from gdp.cluster import Cluster, Device
from gdp.cluster.achieved import GPU, family_of, scaled, share
from gdp.cluster.changes import routes_of
from gdp.cluster.device import Route, is_cpu_kind
from gdp.errors import InputError
from gdp.planning.measured_steps import MeasuredStep

PRIORS = MappingProxyType({"product": 0.05, "bandwidth": 0.05, "issue": 0.2, "rate": 0.1, "latency": 0.2})
"""Standard deviations of logarithms. Cards of one family differ by some percent in clocks and bandwidth, hosts and
links by more: untuned."""
_UNKNOWN = 0.3  # of the shares of a card of no known family: those of the families differ as much
ROW_ERROR = 0.08  # of a prediction with the right numbers; untuned: above most priors, so that few rows move little
_LEAST_ERROR, _DISAGREES = 0.02, 3.0  # sigmas
_HUBER = 1.5  # sigmas, beyond which a row counts by its distance
STEP = 0.02  # of a logarithm, for differences

F64 = npt.NDArray[np.float64]
Number = tuple[str, str]  # a kind of device or link, and which number of it


@dataclass(frozen=True, eq=False)
class MachineFit:
    """The numbers of a machine before and after, and what the rows say of them."""

    steps: Sequence[MeasuredStep]  # (): steps of one model that are not simulated again
    cluster: Cluster  # as it was known
    numbers: Sequence[Number]  # [P]
    logs: F64  # [P] of factors
    before: F64  # [R] predicted over measured times, in logarithms
    after: F64  # [R]
    left_out: F64  # [R] of each row, where the others alone fit
    kinds: Sequence[str]  # [R] of steps, whose ranges the rows narrow; "": it has no range

    @property
    def factors(self) -> Mapping[Number, float]:
        """The number that each is multiplied by."""
        return dict(zip(self.numbers, np.exp(self.logs).tolist(), strict=True))

    @cached_property
    def fitted(self) -> Cluster:
        """The cluster with the fitted numbers, and what the rows say of its steps."""
        cluster = with_factors(self.cluster, self.factors)
        devices = [replace(device, measured_steps=self.measured_steps(device.kind)) for device in cluster.devices]
        return replace(cluster, devices=tuple(devices))

    def measured_steps(self, device_kind: str) -> Mapping[str, Sequence[float]]:
        """Returns by kind of step the ratios of measured to predicted times on devices of a kind, where the other rows
        alone fit: one for each model, since its steps err alike. Rows that are not simulated again may be of any of
        several kinds of cards, and tell nothing then."""
        kinds = {device.kind for device in self.cluster.devices if not device.is_cpu}
        if not self.steps and len(kinds) > 1:
            return MappingProxyType({})
        logs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row, (kind, left_out) in enumerate(zip(self.kinds, self.left_out.tolist(), strict=True)):
            cluster = self.steps[row].cluster if self.steps else self.cluster
            if kind and device_kind in {device.kind for device in cluster.devices}:
                logs[kind][self.steps[row].model if self.steps else ""].append(-left_out)
        return MappingProxyType(
            {
                kind: tuple(float(f"{np.exp(np.median(of_model)):.4g}") for of_model in by_model.values())
                for kind, by_model in logs.items()
            }
        )

    @property
    def distances(self) -> F64:
        """The distances [R] of rows after the fit from their median: what all err by, none disagrees about."""
        return np.abs(self.after - np.median(self.after))

    @property
    def sigma(self) -> float:
        """The deviation of rows after the fit from their median, which no single row sets."""
        return float(np.clip(1.4826 * np.median(self.distances), _LEAST_ERROR, ROW_ERROR))

    @property
    def disagreeing(self) -> list[int]:
        """The rows that the others contradict, beyond three sigmas."""
        return np.flatnonzero(self.distances > _DISAGREES * self.sigma).tolist()

    @property
    def unlikely(self) -> list[Number]:
        """The numbers that rows carry three deviations of their priors or more."""
        return [
            key for key, log in zip(self.numbers, self.logs, strict=True) if abs(log) >= _DISAGREES * prior_of(*key)
        ]

    @property
    def kinds_without_rows(self) -> list[str]:
        """The kinds of devices of the cluster that no row tells of."""
        measured = {device.kind for step in self.steps for device in step.cluster.devices}
        return sorted({device.kind for device in self.cluster.devices} - measured)

    @property
    def kinds_elsewhere(self) -> list[str]:
        """The kinds of devices of rows that the cluster does not have."""
        measured = {device.kind for step in self.steps for device in step.cluster.devices}
        return sorted(measured - {device.kind for device in self.cluster.devices})

    def number_rows(self) -> list[dict[str, Any]]:
        """Returns what each number was and is, beside its prior."""
        every = [*(step.cluster for step in self.steps), self.cluster]
        known = {key: value for cluster in every for key, value in known_numbers(cluster).items()}
        return [
            {"of": kind, "number": what, "before": known[kind, what], "prior": prior_of(kind, what)}
            | {"after": known[kind, what] * factor, "factor": factor}
            for (kind, what), factor in self.factors.items()
        ]

    def step_rows(self) -> list[dict[str, Any]]:
        """Returns the errors of each row, as shares of the measured time."""
        logs = {"before": self.before, "after": self.after, "left_out": self.left_out}
        return [
            {"row": row + 1, "model": step.model, "measured_ms": step.measured_ns / 1e6}
            | {name: float(np.expm1(values[row])) for name, values in logs.items()}
            | {"disagrees": row in self.disagreeing}
            for row, step in enumerate(self.steps)
        ]


def fit_machine(
    steps: Sequence[MeasuredStep], cluster: Cluster, on_progress: Callable[[str], None] = lambda text: None
) -> MachineFit:
    """Returns the fit of `cluster`, and of what rows have beside it. InputError for a step that is not modelled."""
    numbers = list(dict.fromkeys(key for each in (cluster, *(s.cluster for s in steps)) for key in known_numbers(each)))
    measured, known = np.log([step.measured_ns for step in steps]), dict[tuple[object, ...], float]()
    kinds = [""] * len(steps)

    def predicted(row: int, logs: F64) -> float:
        """The logarithm of a row's ratio; only numbers of its own cluster count."""
        own = known_numbers(steps[row].cluster)
        factors = {key: float(np.exp(log)) for key, log in zip(numbers, logs, strict=True) if key in own}
        at = row, *factors.items()
        if at not in known:
            step = steps[row].predicted(with_factors(steps[row].cluster, factors))
            if not step.step_time_ns:
                raise InputError(f"{steps[row].where}: takes no time; name a model that computes")
            known[at], kinds[row] = float(np.log(step.step_time_ns)), str(step.step_kind or "")
        return known[at] - float(measured[row])

    def ratios(logs: F64) -> F64:
        on_progress(f"{len(known)} steps simulated")
        return np.array([predicted(row, logs) for row in range(len(steps))])

    def slopes(logs: F64) -> F64:
        shifts = np.eye(len(numbers)) * STEP
        return np.stack([(ratios(logs + shift) - ratios(logs)) / STEP for shift in shifts], axis=1)

    logs = _most_likely(ratios, slopes, numbers)
    after, priors = ratios(logs), priors_of(numbers)
    jacobian = np.vstack([slopes(logs) / ROW_ERROR, np.diag(1 / priors)])
    errors = np.array([*after / ROW_ERROR, *logs / priors])
    weights = np.append(np.minimum(1, _HUBER * ROW_ERROR / np.maximum(np.abs(after), 1e-9)), np.ones(len(numbers)))
    left_out = []
    for row in range(len(steps)):  # a Gauss-Newton step from the fit, without the row
        rest = np.where(np.arange(len(weights)) == row, 0, weights)
        change = np.linalg.solve(jacobian.T @ (rest[:, None] * jacobian), -jacobian.T @ (rest * errors))
        left_out.append(predicted(row, logs + change))
    return MachineFit(steps, cluster, numbers, logs, ratios(np.zeros(len(numbers))), after, np.array(left_out), kinds)


def fit_slopes(
    cluster: Cluster, numbers: Sequence[Number], before: F64, slopes: F64, kinds: Sequence[str]
) -> MachineFit:
    """Returns the fit of `cluster` to rows of one model that are not simulated again: logarithms `before` [R] of
    predicted over measured times, which follow the numbers by `slopes` [R, P]. None moves by more than three
    deviations: they may all err alike."""
    most = _DISAGREES * priors_of(numbers)
    logs = _most_likely(lambda logs: before + slopes @ logs, lambda logs: slopes, numbers).clip(-most, most)
    after = before + slopes @ logs
    return MachineFit((), cluster, numbers, logs, before, after, after, kinds)


def priors_of(numbers: Sequence[Number]) -> F64:
    """Returns the deviations [P] of their logarithms among machines."""
    return np.array([prior_of(*number) for number in numbers])


def prior_of(kind: str, what: str) -> float:
    """Returns the deviation of the logarithm of a number: a wide one for the rates of a card of no known family."""
    is_unknown = what in ("product", "bandwidth") and family_of(kind) == GPU and not is_cpu_kind(kind)
    return _UNKNOWN if is_unknown else PRIORS[what]


def _most_likely(ratios: Callable[[F64], F64], slopes: Callable[[F64], F64], numbers: Sequence[Number]) -> F64:
    """Returns the logarithms [P] of the most likely factors of `numbers`; `ratios` are those [R] of predicted over
    measured times with given factors, and `slopes` [R, P] how they change."""
    from scipy.optimize import least_squares

    priors = priors_of(numbers)

    def errors(logs: F64) -> F64:
        return np.array([*ratios(logs) / ROW_ERROR, *logs / priors])

    def jacobian(logs: F64) -> F64:
        return np.vstack([slopes(logs) / ROW_ERROR, np.diag(1 / priors)])

    def loss(squares: F64) -> F64:  # Huber's for rows, squares for priors
        is_far = (np.arange(len(squares)) < len(squares) - len(numbers)) & (squares > _HUBER**2)
        root = np.sqrt(np.maximum(squares, _HUBER**2))
        rho = np.where(is_far, 2 * _HUBER * root - _HUBER**2, squares)
        return np.stack([rho, np.where(is_far, _HUBER / root, 1), np.where(is_far, -0.5 * _HUBER / root**3, 0)])

    start = np.zeros(len(numbers))
    found: F64 = least_squares(errors, start, jacobian, loss=loss, xtol=1e-3, ftol=1e-4, max_nfev=20).x
    return found


def known_numbers(cluster: Cluster) -> dict[Number, float]:
    """Returns the numbers that may be fitted: shares of a kind of device (or rates, where it tells none), the ns that a
    kernel takes its host, and bytes per second and ns of routes by what they are."""
    numbers: dict[Number, float] = {}
    for device in cluster.devices:
        has_shares = bool(device.achieved)
        numbers[device.kind, "product"] = (
            share(device.achieved, "product") if has_shares else device.flops_per_second["float32"]
        )
        numbers[device.kind, "bandwidth"] = (
            share(device.achieved, "pointwise") if has_shares else device.memory_bytes_per_second
        )
        if issue_ns := device.issue_ns or device.launch_ns:
            numbers[device.kind, "issue"] = issue_ns
    links = [device.link for device in cluster.devices if device.link is not None]
    for route in (*routes_of(cluster).values(), *links):
        numbers.setdefault((route.exchange or "links", "rate"), route.bytes_per_second)
        if route.latency_ns:
            numbers.setdefault((route.exchange or "links", "latency"), route.latency_ns)
    return numbers


def with_factors(cluster: Cluster, factors: Mapping[Number, float]) -> Cluster:
    """Returns `cluster` with its numbers multiplied by `factors`; those of other machines do not count."""

    def factor(kind: str, what: str) -> float:
        return factors.get((kind, what), 1.0)

    def changed(device: Device) -> Device:
        product, bandwidth = factor(device.kind, "product"), factor(device.kind, "bandwidth")
        issue, host = factor(device.kind, "issue"), "issue_ns" if device.issue_ns else "launch_ns"
        device = replace(device, **{host: round(getattr(device, host) * issue)})
        device = device if device.link is None else replace(device, link=of_route(device.link))
        if not device.achieved:
            rates = {dtype: round(rate * product) for dtype, rate in device.flops_per_second.items()}
            rate = round(device.memory_bytes_per_second * bandwidth)
            return replace(device, flops_per_second=MappingProxyType(rates), memory_bytes_per_second=rate)
        return replace(device, achieved=scaled(device.achieved, product, bandwidth))

    def of_route(route: Route) -> Route:
        rate, latency = (factor(route.exchange or "links", what) for what in ("rate", "latency"))
        bytes_per_second = max(round(route.bytes_per_second * rate), 1)
        return replace(route, bytes_per_second=bytes_per_second, latency_ns=round(route.latency_ns * latency))

    routes = {pair: of_route(route) for pair, route in routes_of(cluster).items()}
    return Cluster.build(cluster.name, [changed(device) for device in cluster.devices], routes)
