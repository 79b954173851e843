"""The compiled roll-out computes the features of the table."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.arrays import F64, I64
from gdp.policy.features import FEATURES, INITIAL_WEIGHTS, NUM_FEATURES, NUMBERS
from gdp.policy.rollout import roll_out
from gdp.policy.rollout_arrays import RolloutArrays, RolloutRecord
from gdp.policy.style_scorer import draw_style, options_of
from gdp.policy.unit_source import UnitSource
from gdp.simulator.problem import Problem
from strategies import Instance, instances


class PlainRollout:
    """The state of a roll-out in plain Python, and the features of devices in that state."""

    def __init__(self, source: UnitSource, arrays: RolloutArrays, was: I64, most: int) -> None:
        problem, self.arrays, self.most = source.problem, arrays, most
        self.num_devices, self.num_units = problem.num_devices, len(arrays.work_ns)
        self.limit_bytes = np.maximum(problem.memory_limit_bytes, 1)
        self.cluster = problem.cluster
        self.targets = np.repeat(np.arange(self.num_units), np.diff(arrays.offsets))
        sent = np.zeros((self.num_units, self.num_units))
        sent_ns = arrays.sent_bytes * source.ns_per_byte + source.latency_ns
        np.add.at(sent, (arrays.senders, self.targets), np.maximum(sent_ns, 1e-9))
        self.near = row_shares(sent + sent.T)
        two_steps = self.near @ self.near
        np.fill_diagonal(two_steps, 0.0)
        self.second, self.similar = row_shares(two_steps), np.zeros_like(sent)
        rows = np.repeat(np.arange(self.num_units), np.diff(arrays.similar.offsets))
        self.similar[rows, arrays.similar.units] = arrays.similar.shares
        runs = arrays.time_ns >= 0
        times_ns, works_ns = (np.where(runs, ns, 0.0) + 1.0 for ns in (arrays.time_ns, arrays.work_ns[:, None]))
        speed = 1.0 / (times_ns.sum(axis=0) / works_ns.sum(axis=0))
        self.speed = speed / speed.sum()
        self.device: dict[int, int] = {}  # of each unit that has one
        self.was = was
        self.finish_ns: dict[int, float] = {}
        self.begin_pass()

    def begin_pass(self) -> None:
        self.free_ns, self.recent, self.before = np.zeros(self.num_devices), np.zeros(self.num_devices), -1

    def choose(self, unit: int, device: int, end_ns: float) -> None:
        self.device[unit] = device
        self.finish_ns[unit] = self.free_ns[device] = end_ns
        self.recent *= 0.8
        self.recent[device] += 0.2
        self.before = device

    def transfer_ns(self, pair: int, device: int) -> float:
        home = self.device[self.arrays.senders[pair]]
        if home == device:
            return 0.0
        rate = self.cluster.bytes_per_second[home, device]
        return float(self.arrays.sent_bytes[pair] * 1e9 / rate + self.cluster.latency_ns[home, device])

    def features(self, unit: int, device_before: int, candidates: list[int]) -> tuple[dict[str, F64], F64]:
        """(values [D] of each feature, ends [D]) for a unit that has no device, meaningful at `candidates`."""
        arrays, shape = self.arrays, self.num_devices
        home = np.array([self.device.get(other, -1) for other in range(self.num_units)])
        here = home[:, None] == np.arange(shape)  # [U, D]
        near, second, like = (shares[unit] @ here for shares in (self.near, self.second, self.similar))
        load = np.where(here, arrays.time_ns, 0.0).sum(axis=0)
        busy = np.stack([arrays.slices[here[:, device]].sum(axis=0) for device in range(shape)])
        held = (arrays.held_bytes[:, None] * here).sum(axis=0)
        is_empty = ~here.any(axis=0)
        arriving = [pair for pair in np.flatnonzero(self.targets == unit) if home[arrays.senders[pair]] >= 0]
        inputs, ready = np.zeros(shape), np.zeros(shape)
        for device in candidates:
            sent = {pair: self.transfer_ns(pair, device) for pair in arriving}
            inputs[device] = sum(sent.values())
            ready[device] = max(
                (
                    self.finish_ns[arrays.senders[pair]] + transfer
                    for pair, transfer in sent.items()
                    if arrays.senders[pair] < unit
                ),
                default=0.0,
            )
        start = np.maximum(ready, self.free_ns)
        time_ns = np.maximum(arrays.time_ns[unit], 0.0)  # forbidden devices are no candidates
        end = start + time_ns
        own_ns = max(arrays.work_ns[unit], 1.0)
        all_slices = np.maximum(arrays.slices.sum(axis=0), 1e-9)
        meanwhile = (arrays.slices[unit] * busy / all_slices).sum(axis=1) / self.speed / own_ns
        share = self.speed * max(arrays.work_ns.sum(), 1.0)
        fair = share * max(shape / max(self.most, 1), 1.0)
        after = load + time_ns
        memory = (held + arrays.held_bytes[unit]) / self.limit_bytes
        is_before = np.arange(shape) == self.before
        all_near, all_like = max(near.sum(), 1e-9), max(like.sum(), 1e-9)

        def above_lowest(values: F64) -> F64:
            return np.maximum(values - values[candidates].min(), 0.0)

        def below_one(values: F64) -> F64:
            return np.asarray(values / (1.0 + values))

        return {
            "neighbours here, of all": near,
            "neighbours here, of those placed": near / all_near,
            "neighbours' neighbours here": second,
            "like units here, of those placed": like / all_like,
            "start later than elsewhere": np.minimum(above_lowest(start) / share, 4.0),
            "end later than elsewhere": below_one(above_lowest(end) / own_ns),
            "load": np.minimum(load / share, 4.0),
            "load after, of the highest": after / np.maximum(np.maximum(load.max(), after), 1.0),
            "load meanwhile": np.minimum(meanwhile, 4.0),
            "load meanwhile above the lowest": np.minimum(above_lowest(meanwhile), 4.0),
            "memory": np.minimum(memory, 4.0),
            "memory short": np.clip((memory - 0.8) * 5.0, 0.0, 4.0),
            "empty": is_empty * 1.0,
            "empty, by how many are not": is_empty * (~is_empty).mean(),
            "unit before is here": is_before * 1.0,
            "recent units here": self.recent,
            "slower than the fastest": np.log((time_ns + 1.0) / (time_ns[candidates].min() + 1.0)),
            "inputs to send": inputs / (inputs + own_ns),
            "inputs to send above the lowest": below_one(above_lowest(inputs) / own_ns),
            "like units here, by load meanwhile": np.minimum(like * meanwhile / all_like, 4.0),
            "was here": (np.arange(shape) == device_before) * 1.0,
            "load after, above a fair share": np.clip((after / fair - 1.0) * 4.0, 0.0, 4.0),
            "unit before is here, within a fair share": is_before * (after <= fair) * 1.0,
            "most of like units are here": (like > 0.5 * all_like) * 1.0,
        }, end


def row_shares(amounts: F64) -> F64:
    """`amounts` [U, U] over the sum of their row; 0 in empty rows."""
    return np.asarray(amounts / np.where(amounts.any(axis=1), amounts.sum(axis=1), 1.0)[:, None])


def assert_equal_features(seen: F64, expected: Mapping[str, F64], candidates: list[int], where: str) -> None:
    for name, number in NUMBERS.items():
        np.testing.assert_allclose(
            seen[candidates, number], expected[name][candidates], rtol=1e-4, atol=1e-5, err_msg=f"{name}, {where}"
        )


@settings(max_examples=40)
@given(instances(max_ops=16, max_devices=4), st.booleans(), st.sampled_from([0.25, 1.0]), st.integers(0, 99))
def test_columns_are_rows_of_the_table(instance: Instance, refines: bool, most: float, seed: int) -> None:
    """Each feature in the record of a roll-out equals its plain computation."""
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    rng, num_passes = np.random.default_rng(seed), 2
    source = UnitSource.of(problem)
    incumbent = problem.allowed.argmax(axis=1) if refines else None
    units = source.draw(8, rng, incumbent=incumbent)
    shape = 1, units.num_units
    devices = np.full(units.num_units, -1) if incumbent is None else incumbent[units.first_op]
    fixed = np.where(rng.random(shape) < 0.5, devices, -1)
    style = replace(draw_style(rng), scale=np.ones((2, NUM_FEATURES), np.float32), passes=num_passes, most=most)
    options = options_of([replace(style, temperature=1.0)], problem.num_devices, refines=refines)
    weights = rng.normal(size=(2, NUM_FEATURES)).astype(np.float32)
    record, chosen = RolloutRecord.empty(1, num_passes, units.num_units, problem.num_devices), np.zeros(shape, np.int64)
    arrays = RolloutArrays.of(source, units)
    uniforms = rng.random((1, num_passes, units.num_units))
    roll_out(arrays, weights, options, fixed, devices, uniforms, chosen, record)

    plain = PlainRollout(source, arrays, devices, int(options.most[0]))
    plain.device = {unit: int(device) for unit, device in enumerate(fixed[0]) if device >= 0}
    for turn in range(num_passes):
        plain.begin_pass()
        for unit in range(units.num_units):
            before = plain.device.get(unit, int(devices[unit]))
            if fixed[0, unit] < 0:
                plain.device.pop(unit, None)
            candidates = np.flatnonzero(record.masks[0, turn, unit]).tolist()
            expected, end_ns = plain.features(unit, before, candidates)
            assert_equal_features(record.features[0, turn, unit], expected, candidates, f"pass {turn}, unit {unit}")
            device = int(record.devices[0, turn, unit])
            plain.choose(unit, device, float(end_ns[device]))


def test_names_are_unique() -> None:
    """Each feature has a name of its own and two weights."""
    assert len(NUMBERS) == NUM_FEATURES == len(FEATURES)
    assert [len(row) for row in INITIAL_WEIGHTS] == [NUM_FEATURES] * 2
