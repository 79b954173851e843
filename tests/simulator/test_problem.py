"""Constraints of Problem.build; gdp-plan files: strict readers, bit-equal round trips, where they belong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate, verify

CLUSTER = Cluster.parse("2xp100-pcie-16g")  # gpu0, gpu1
GIB = 2**30


def chain(*ops: Op) -> Graph:
    """Each op feeds the next with a tensor of 4 bytes."""
    return Graph.build("chain", ops, [Tensor(op, (op + 1,), 4) for op in range(len(ops) - 1)])


LAYERS = chain(
    Op("input", flops=10),
    Op("mm_0", flops=10, module="encoder.layers.0"),
    Op("mm_1", flops=10, module="encoder.layers.1"),
    Op("mm_2", flops=10, module="decoder"),
)


def test_pins() -> None:
    """A pin holds the ops on its device whose module or name it matches anywhere."""
    problem = Problem.build(LAYERS, CLUSTER, pins=[(r"layers\.1|coder$", "gpu1"), ("^inp", "gpu0")])
    assert problem.allowed.tolist() == [[True, False], [True, True], [False, True], [False, True]]


def test_equal_pins_agree() -> None:
    """Two equal pins are one."""
    problem = Problem.build(LAYERS, CLUSTER, pins=[("encoder", "gpu1"), ("mm_1", "gpu1")])
    assert problem.allowed[:, 0].tolist() == [True, False, False, True]


KINDS = chain(Op("a", "aten.mm"), Op("b", "aten.mm.out"), Op("c", "aten.relu"), Op("d"))


@pytest.mark.parametrize(
    ("forbid", "allowed"),
    [
        ([("mm", "gpu0")], [[False, True, True], [False, True, True], [True] * 3, [True] * 3]),
        ([("mm$", "p100-pcie-16g")], [[False, False, True], [True] * 3, [True] * 3, [True] * 3]),
        ([("^aten", "gpu1"), ("relu", "l4-24g")], [[True, False, True]] * 2 + [[True, False, False], [True] * 3]),
        ([("^$", "gpu2"), ("^$", "gpu2")], [[True] * 3] * 3 + [[True, True, False]]),
    ],
)
def test_forbidden_kinds(forbid: list[tuple[str, str]], allowed: list[list[bool]]) -> None:
    """A forbidden kind of op stays off the device, or off all devices of a kind."""
    problem = Problem.build(KINDS, Cluster.parse("2xp100-pcie-16g+l4-24g"), forbid=forbid)
    assert problem.allowed.tolist() == allowed
    assert (problem.op_time_ns >= 0).all()  # they could run there, and default priorities stay


def test_device_named_like_a_kind() -> None:
    """A device's name goes before a kind of devices that is called alike."""
    devices = [replace(CLUSTER.devices[0], name="p100-pcie-16g"), CLUSTER.devices[1]]
    cluster = replace(CLUSTER, devices=tuple(devices))
    assert Problem.build(KINDS, cluster, forbid=[("mm", "p100-pcie-16g")]).allowed.sum(axis=0).tolist() == [2, 4]


def test_groups_go_where_all_ops_may() -> None:
    """A group may go where each of its ops may."""
    ops = (
        Op("a", group=3, time_ns={"gpu0": 1, "gpu1": 1}),
        Op("b", time_ns={"gpu0": 1, "gpu1": 1}),
        Op("c", group=3, time_ns={"gpu0": -1, "gpu1": 1}),
    )
    problem = Problem.build(chain(*ops), CLUSTER)
    assert problem.allowed.tolist() == [[False, True], [True, True], [False, True]]
    assert problem.graph.group_index.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("ops", "options", "fragments"),
    [
        ((Op("a"),), {"pins": [("b", "gpu0")]}, ["pin b=gpu0", "matches no module path and no op name"]),
        ((Op("a"),), {"pins": [("a", "gpu7")]}, ["pin a=gpu7", "no device 'gpu7'", "gpu0, gpu1"]),
        ((Op("a"),), {"pins": [("(", "gpu0")]}, ["pin (=gpu0", "not a regular expression"]),
        (
            (Op("a"),),
            {"pins": [("a", "gpu0"), (".", "gpu1")]},
            ["pin .=gpu1", "'a'", "pinned to gpu0 by pin a=gpu0", "drop one"],
        ),
        (
            (Op("a", time_ns={"gpu0": -1}),),
            {"pins": [("a", "gpu0")]},
            ["op 0 'a'", "pins leave no device", "runs on gpu1 only, pin a=gpu0; relax --pin"],
        ),
        (
            (Op("a", group=0), Op("b", group=0)),
            {"pins": [("a", "gpu0"), ("b", "gpu1")]},
            ["op 0 'a'", "no device can hold its whole group 0", "pin a=gpu0 of op 'a', pin b=gpu1 of op 'b'; "],
        ),
        (
            (Op("a", group=0, time_ns={"gpu0": -1}), Op("b", group=0, time_ns={"gpu1": -1})),
            {},
            [
                "op 0 'a'",
                "no device can hold its whole group 0",
                "op 'a' runs on gpu1 only, op 'b' runs on gpu0 only; ",
            ],
        ),
        ((Op("a", "mm"),), {"forbid": [("conv", "gpu0")]}, ["forbid conv=gpu0: matches no op's kind", "kinds", "mm"]),
        ((Op("a"),), {"forbid": [("conv", "gpu0")]}, ["forbid conv=gpu0: matches no op's kind", "no op", "has one"]),
        (
            (Op("a", "mm"),),
            {"forbid": [("mm", "gpu7")]},
            ["forbid mm=gpu7", "'gpu7' is no device and no kind of device", "gpu0"],
        ),
        ((Op("a", "mm"),), {"forbid": [("(", "gpu0")]}, ["forbid (=gpu0", "not a regular expression"]),
        (
            (Op("a", "mm"),),
            {"forbid": [("mm", "p100-pcie-16g")]},
            ["op 0 'a'", "its forbids leave no device", "run it: forbid mm=p100-pcie-16g; relax --forbid"],
        ),
        (
            (Op("a", "mm"), Op("b", "mm")),
            {"pins": [("b", "gpu1")], "forbid": [("m", "gpu0"), ("mm", "gpu1")]},
            ["op 0 'a'", "its forbids leave no device that can run it: forbid m=gpu0, forbid mm=gpu1; "],
        ),
        (
            (Op("a", "mm"), Op("b", "mm", time_ns={"gpu1": -1})),
            {"pins": [("a", "gpu1")], "forbid": [("mm", "gpu0")]},
            ["op 1 'b'", "its forbids leave no device that can run it: op 'b' runs on gpu0 only, forbid mm=gpu0; "],
        ),
        (
            (Op("a", "mm"), Op("b", "relu")),
            {"pins": [("b", "gpu0"), ("a", "gpu1")], "forbid": [("m", "gpu1"), ("relu", "gpu1")]},
            ["op 0 'a'", "its pins and forbids leave no device", "it: forbid m=gpu1, pin a=gpu1; relax --pin or --for"],
        ),
        (
            (Op("a", "mm", group=4), Op("b", "relu", group=4)),
            {"pins": [("b", "gpu0")], "forbid": [("mm", "gpu0")]},
            ["op 0 'a'", "its whole group 4: forbid mm=gpu0 of op 'a', pin b=gpu0 of op 'b'; relax one"],
        ),
        (
            (Op("a", resident_bytes=5), Op("b", resident_bytes=4), Op("c", resident_bytes=9)),
            {"pins": [("a", "gpu1"), ("c", "gpu0"), ("b|a", "gpu1")], "max_memory_bytes": {"gpu1": 8}},
            ["pin a=gpu1, pin b|a=gpu1: gpu1 must hold 9 bytes", "of 2 ops", "limit is 8; pin fewer ops there"],
        ),
        (
            (Op("a", group=2, resident_bytes=1), Op("b"), Op("c", group=2, resident_bytes=2 * GIB)),
            {"pins": [("a", "gpu1")], "max_memory_bytes": {"gpu1": 2 * GIB}},
            ["pin a=gpu1: gpu1 must hold 2147483649 bytes", "of 2 ops with their groups", "limit is 2147483648"],
        ),
        ((Op("a", time_ns={"p100-pcie-16g": -1}),), {}, ["op 0 'a'", "no device", "can run it"]),
        ((Op("a"),), {"max_memory_bytes": {"gpu9": 1}}, ["max-memory gpu9", "no such device"]),
        ((Op("a"),), {"max_memory_bytes": {"gpu0": -1}}, ["max-memory gpu0", "-1 bytes"]),
        ((Op("a"),), {"reserve": 1.0}, ["reserve is 1.0", "below 1"]),
        ((Op("a"),), {"reserve": -0.1}, ["reserve is -0.1"]),
        ((Op("a"),), {"op_time_ns": np.ones((2, 2), np.int64)}, ["op_time_ns has shape (2, 2)", "(1, 2)"]),
    ],
)
def test_impossible_constraints_are_refused(ops: tuple[Op, ...], options: dict[str, Any], fragments: list[str]) -> None:
    """One line says which constraints cannot be kept, and the remedy."""
    with pytest.raises(InputError) as caught:
        Problem.build(chain(*ops), CLUSTER, **options)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_pins_may_fill_a_device() -> None:
    """Pins that fill a device to the last byte are kept."""
    graph = chain(Op("a", resident_bytes=5), Op("b", resident_bytes=4), Op("c", resident_bytes=9))
    problem = Problem.build(graph, CLUSTER, pins=[("a|b", "gpu1")], max_memory_bytes={"gpu1": 9})
    assert problem.allowed.tolist() == [[False, True], [False, True], [True, True]]


def test_memory_limits() -> None:
    """A limit is the lower of that by name and the device's own, less the share kept free."""
    problem = Problem.build(LAYERS, CLUSTER, max_memory_bytes={"gpu0": 9 * GIB}, reserve=0.25)
    # gpu0: 9 < 16 - 16 / 4, gpu1: 16 - 16 / 4; a limit above the device's memory changes nothing
    assert problem.memory_limit_bytes.tolist() == [9 * GIB, 12 * GIB]
    assert Problem.build(LAYERS, CLUSTER, max_memory_bytes={"gpu0": 0}, reserve=0.25).memory_limit_bytes[0] == 0
    assert Problem.build(LAYERS, CLUSTER, max_memory_bytes={"gpu1": 99 * GIB}).memory_limit_bytes[1] == 16 * GIB


def test_broken_constraints() -> None:
    """A placement is told which constraints it breaks."""
    ops = (Op("a", flops=1, group=0), Op("b", flops=1, group=0), Op("c", flops=1))
    problem = Problem.build(chain(*ops), CLUSTER, pins=[("c", "gpu0")], max_memory_bytes={"gpu0": 3})
    split = simulate(problem, [0, 1, 0])
    assert not split.feasible
    assert "group 0 is split over gpu0 and gpu1" in split.reasons
    # c and b are on gpu0: the copy of b's 4 bytes does not fit in 3
    assert any(
        "gpu0: peak 8 bytes, limit 3, 5 bytes missing" in reason for reason in simulate(problem, [0, 0, 0]).reasons
    )
    assert any("'c' is not allowed on gpu1" in reason for reason in simulate(problem, [1, 1, 1]).reasons)


# Plans


def plan_of(problem: Problem, placement: list[int]) -> Plan:
    step = simulate(problem, placement)
    return Plan(
        graph=problem.graph.fingerprint,
        cluster=problem.cluster.fingerprint,
        devices=tuple(device.name for device in problem.cluster.devices),
        placement=step.placement,
        order=step.order,
        step_time_ns=step.step_time_ns,
        peak_memory_bytes=step.peak_memory_bytes,
        lower_bound_ns=1,
        placer="hand",
        seed=0,
        gdp_version="0",
    )


PLAN = plan_of(Problem.build(LAYERS, CLUSTER), [0, 0, 1, 1])


def document(**changes: Any) -> dict[str, Any]:
    return {**PLAN.to_document(), **changes}


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        ([], ["list", "gdp-plan"]),
        (document(format="gdp-graph"), ["format is 'gdp-graph'"]),
        (document(version=3), ["version is 3", "reads gdp-plan version 2"]),
        (document(version=1), ["version 1", "does not say what was asked", "place it anew"]),
        (document(asked={"model": "gnmt-2"}), ["asked is", "an object with model, options, cluster and directory"]),
        (document(note=""), ["unknown key 'note'"]),
        ({key: value for key, value in document().items() if key != "order"}, ["order is missing"]),
        (document(placement="0011"), ["placement is '0011'"]),
        (document(placement=[0, 0, 1, 2]), ["op 3 is on device 2", "0 to 1"]),
        (document(placement=[0, 0, 1, -1]), ["placement is [0, 0, 1, -1]"]),
        (document(order=[[0, 1, 2, 3]]), ["order has 1 entries", "one per device, 2"]),
        (document(order=[[0, 1], [2, 4]]), ["order of device 1", "4 is no op", "0 to 3"]),
        (document(order=[[0, 1, 2], [3]]), ["order of device 0", "op 2 is placed on device 1"]),
        (document(order=[[0, 1, 0], [2, 3]]), ["order of device 0", "op 0 is listed twice"]),
        (document(order=[[0, 1], [2]]), ["op 3 is missing", "list every op once"]),
        (document(order=[[0, 1], ["2", 3]]), ["order is", "a list of lists of integers"]),
        (document(peak_memory_bytes=[1]), ["peak_memory_bytes has 1 entries"]),
        (document(step_time_ns=1.5), ["step_time_ns is 1.5"]),
        (document(step_time_ns=-1), ["step_time_ns is -1"]),
        (document(devices=[1, 2]), ["devices is [1, 2]", "a list of strings"]),
        (document(seed=None), ["seed is None"]),
    ],
)
def test_bad_plans_are_refused(tmp_path: Path, content: object, fragments: list[str]) -> None:
    """One line names the file, the place and the remedy."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_plans_are_bit_equal_again(tmp_path: Path, name: str) -> None:
    """A plan that is read and written again is bit-equal, and verifies."""
    PLAN.save(tmp_path / name)
    read = Plan.load(tmp_path / name)
    read.save(tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_bytes() == (tmp_path / name).read_bytes()
    assert verify(Problem.build(LAYERS, CLUSTER), read) == []


def test_plans_of_other_questions_are_refused() -> None:
    """A plan is refused on another graph or cluster, and not under another name."""
    PLAN.check_belongs(replace(LAYERS, name="renamed"), replace(CLUSTER, name="renamed"))
    with pytest.raises(InputError, match=r"the plan is of graph .*; place this graph anew"):
        PLAN.check_belongs(chain(Op("other")), CLUSTER)
    with pytest.raises(InputError, match=r"the plan is for cluster .*; place for this cluster anew"):
        PLAN.check_belongs(LAYERS, Cluster.parse("2xl4-24g"))


def test_verify_names_wrong_figures() -> None:
    """Verifying names every figure that a replay does not give."""
    problem = Problem.build(LAYERS, CLUSTER)
    wrong = replace(PLAN, step_time_ns=PLAN.step_time_ns + 1, peak_memory_bytes=PLAN.peak_memory_bytes + 1)
    step_time, peak = verify(problem, wrong)
    assert step_time == f"step_time_ns is {PLAN.step_time_ns + 1}; the replay gives {PLAN.step_time_ns}"
    assert peak.startswith("peak_memory_bytes is")
    (bound,) = verify(problem, replace(PLAN, lower_bound_ns=PLAN.step_time_ns + 1))
    assert bound.startswith("lower_bound_ns")


def test_deadlocks_are_refused() -> None:
    """An order in which ops wait for each other is refused."""
    problem = Problem.build(LAYERS, CLUSTER)
    with pytest.raises(InputError, match=r"deadlock, op 1 waits"):
        simulate(problem, PLAN.placement, order=[[1, 0], [2, 3]])


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (chain(Op("a", flops=1, resident_bytes=2**61), Op("b", flops=1, resident_bytes=2**62)), "sum to"),
        (chain(Op("a", time_ns={"gpu0": 2**62}), Op("b", flops=1)), "op times and transfers sum to"),
    ],
)
def test_sums_that_could_wrap_around_are_refused(graph: Graph, message: str) -> None:
    """No figure may pass int64: a step of 2^62 bytes that "fits" would be the worst of answers."""
    with pytest.raises(InputError, match=message):
        Problem.build(graph, CLUSTER)


def test_op_times_are_copied_and_checked() -> None:
    """Changes of the caller's times change no problem, and wrong shapes are refused."""
    times = np.ones((LAYERS.num_ops, CLUSTER.num_devices), np.int64)
    problem = Problem.build(LAYERS, CLUSTER, op_time_ns=times)
    times[:] = 5  # the caller's array stays writable, and the problem as it was
    assert problem.op_time_ns.max() == 1
    with pytest.raises(InputError, match="holds -2"):
        Problem.build(LAYERS, CLUSTER, op_time_ns=times - 7)
