"""Remedies: changes with which a step fits, where it does not."""

from functools import partial
from itertools import count
from pathlib import Path

import pytest

from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.models.lora import Lora
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.planning.remedies import Remedy, RemedySearch, held_bytes
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.simulator.constraints import Constraints
from tests.planning.test_advice import branches
from tests.search.test_layout_budget import machine_of, parts_of

GIB, MIB = 2**30, 2**20
OPTIONS = SearchOptions(num_threads=1)

MODULE = """
import torch
from torch import nn

def stack():
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))), (torch.randn(2, 256),)
"""


def searched(model: object, devices: str, clock: Clock | None = None, **limits: int) -> list[Remedy]:
    constraints = Constraints(max_memory_bytes=limits)
    question = PlaceQuestion.of(model, Cluster.parse(devices), constraints, None, None, OPTIONS)  # type: ignore[arg-type]
    return RemedySearch(question, clock or Clock(Budget(simulations=4000)), devices=devices).run()


def test_the_smallest_machines_that_hold_a_step() -> None:
    """Nine times 4 GiB are too much for two cards of 16 GiB: a CPU beside them, one more, or a card of 40 GiB does."""
    found = searched(branches(3, resident=4 * GIB), "2xp100-pcie-16g")
    assert [(each.change, each.option) for each in found] == [
        ("a cpu-16core beside it", "--devices 2xp100-pcie-16g+cpu-16core"),
        ("1 more p100-pcie-16g", "--devices 3xp100-pcie-16g"),
        ("one a100-pcie-40g", "--devices a100-pcie-40g"),
    ]
    assert all(each.step_time_ns is not None and each.missing_bytes == 0 for each in found)
    assert searched(branches(3, 2**60 // 9), "2xp100-pcie-16g") == []


def test_one_larger_card_runs_the_step_as_it_was_asked() -> None:
    """An eager host takes 11 us for each of 50 small products, 550 us; a CUDA graph does not wait for it."""
    mm = "aten.mm float32[10,500] float32[500,100] > float32[10,100]"
    ops = [Op(f"mm{at}", "aten.mm", 10**6, phase="forward", shapes=mm, resident_bytes=GIB // 2) for at in range(50)]
    graph = Graph.build("chain", ops, [Tensor(at, (at + 1,), 100) for at in range(49)])
    (card,) = (each for each in searched(graph, "l4-24g:cuda-graphs") if each.change.startswith("one "))
    assert card.option == "--devices rtx5090-32g:cuda-graphs"
    assert card.step_time_ns is not None
    assert card.step_time_ns < 50 * 11_000


def test_the_number_of_devices_is_the_smallest() -> None:
    """A card of 16 GiB holds one op of 9 GiB: 7 need 7 cards, 5 more than 2; 18 need more than are suggested."""
    for number, more in ((7, ["5 more p100-pcie-16g"]), (18, [])):
        ops = [Op(f"b{each}", resident_bytes=9 * GIB) for each in range(number)]
        graph = Graph.build("chain", ops, [Tensor(each, (each + 1,), 8) for each in range(number - 1)])
        found = [each.change for each in searched(graph, "2xp100-pcie-16g")]
        assert [change for change in found if " more " in change] == more


def test_without_time_bytes_are_counted() -> None:
    """When the time is up, or before a try can be prepared, changes are told whose memory is 1/0.6 of 36 GiB and more.

    It is 38.4 of 64 GiB on four cards, while three were enough where they can be tried.
    """
    slow = Clock(Budget(seconds=9.0), timer=partial(next, count()))  # each look takes a second
    for clock in (Clock(Budget(seconds=0.0)), slow):
        found = searched(branches(3, resident=4 * GIB), "2xp100-pcie-16g", clock)
        assert [(each.change, each.step_time_ns) for each in found] == [
            ("a cpu-16core beside it", None),
            ("2 more p100-pcie-16g", None),
            ("one a100-pcie-80g", None),
        ]


def test_remedies_of_a_batch_that_is_cut() -> None:
    """Weights, state and gradients do not fit on two devices of 7 MB, whatever the batch; on four they do."""
    cluster = machine_of([1.0] * 2, memory="7MB")
    question = PlaceQuestion.of(parts_of(held_bytes=10**5), cluster, Constraints(), "auto", None, OPTIONS)
    clock = Clock(Budget(simulations=10_000))
    assert "2 more x1.0" in [each.change for each in RemedySearch(question, clock).run()]
    assert all(each.step_time_ns is None for each in RemedySearch(question, clock.part(0.0)).run())


@pytest.mark.parametrize("is_quick", [True, False])
def test_other_updates_of_parameters(is_quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of 65,536 float32 parameters hold 12 bytes each with Adam, 3 MiB in all; with 8-bit Adam 6, 1.5 MiB.

    SGD holds 4. With gradients of 4 bytes these are 2.5 and 2 MiB, less than the limit; without the time to capture the
    step anew they are worked out.
    """
    (tmp_path / "remedied.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source, cluster = ModelSource("remedied:stack", Reading()), Cluster.parse("l4-24g")
    limit, model = Constraints(max_memory_bytes={"gpu0": 11 * MIB // 4}), source.whole()
    question = PlaceQuestion.of(source, cluster, limit, None, None, OPTIONS, model)
    assert held_bytes(question) == (3 * MIB, 11 * MIB // 4)
    clock = Clock(Budget(simulations=1000) if is_quick else Budget(seconds=1e-3 + 2 * model.captured_s))
    search = RemedySearch(question, clock, source, model, missing_bytes=5 * MIB // 4)
    updates = [each for each in search.run() if each.option.startswith("--optimizer")]
    assert [each.option for each in updates] == ["--optimizer adam-8bit", "--optimizer sgd"]
    assert all((each.step_time_ns is None) != is_quick for each in updates)


def test_adapters_beside_frozen_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers hold 12 bytes a parameter, 3 MiB; frozen in bf16 2, 0.5 MiB, in NF4 0.13 MiB.

    Adapters of 4 x 16 x 512 parameters of 14 bytes are 0.44 MiB more: 1.25 MiB hold both, not SGD with its gradients.
    """
    (tmp_path / "adapted_stack.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source, cluster = ModelSource("adapted_stack:stack", Reading()), Cluster.parse("l4-24g")
    limit, model = Constraints(max_memory_bytes={"gpu0": 5 * MIB // 4}), source.whole()
    question = PlaceQuestion.of(source, cluster, limit, None, None, OPTIONS, model)
    found = RemedySearch(question, Clock(Budget(simulations=1000)), source, model, missing_bytes=2 * MIB).run()
    assert [each.option for each in found][:2] == ["--lora rank=16,weights=nf4", "--lora rank=16"]
    late = RemedySearch(question, Clock(Budget(seconds=0.0)), source, model, missing_bytes=2 * MIB).run()
    assert {"--lora rank=16,weights=nf4", "--lora rank=16"} <= {each.option for each in late}
    for text in ("rank=16,weights=nf4", "rank=16,targets=[02]"):
        lora = Lora.parse(text)
        assert lora is not None
        own = ModelSource("adapted_stack:stack", Reading(lora=lora)).whole().graph
        assert lora.held_bytes(model.graph) == pytest.approx(own.resident_bytes.sum(), rel=0.02)
    adapted = ModelSource("adapted_stack:stack", Reading(lora=Lora.parse("rank=16")))
    question = PlaceQuestion.of(adapted, cluster, limit, None, None, OPTIONS, adapted.whole())
    again = RemedySearch(question, Clock(Budget(simulations=1000)), adapted, model, missing_bytes=MIB).run()
    assert not [each for each in again if "--lora" in each.option]


def test_a_clock_is_paused() -> None:
    """What is done in a pause comes on top, for all parts of a clock: the looks inside do not count."""
    clock = Clock(Budget(seconds=10.0), timer=partial(next, count()))  # each look takes a second
    part = clock.part()
    with clock.paused():
        assert [clock.seconds for _ in range(3)] == [5, 6, 7]
    assert part.seconds == 5
