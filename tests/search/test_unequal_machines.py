"""Unequal machines with a CPU: no part of a machine, and no plan of an equal machine, gives a faster step.

Searches are heuristics, so what is found may be slower by the little that two searches differ by.
"""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from benchmarks.workloads import model_of
from gdp.cluster import Cluster, changes
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.search.place import place
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

KINDS = ("rtx4090-24g", "rtx3090-24g", "l4-24g", "p100-pcie-16g", "v100-sxm-32g", "a100-sxm-80g")
LINKS = ("pcie3", "pcie4", "pcie5")
MODELS = (model_of("llama-1b"), model_of("moe"), "decode")
DECODER = {  # the shape of Qwen2.5-32B, with 16 of its 64 layers
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 16,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
SLACK = 1.03  # two searches of this budget differ by up to so much


def random_machine(weight_bytes: int, seed: int, most: int) -> tuple[list[str], dict[str, int]]:
    """Returns cards beside a CPU, and their memory limits, which sum to 0.3 to 1.2 times the weights."""
    rng = np.random.default_rng([seed, 19])
    count = int(rng.integers(2, most + 1))
    cards = [f"{rng.choice(KINDS)}:{rng.choice(LINKS)}" for _ in range(count)]
    shares = rng.dirichlet(np.full(count, 3.0)) * rng.uniform(0.3, 1.2) * weight_bytes
    return cards, {f"gpu{number}": int(share) for number, share in enumerate(shares)}


def graph_of(model: str, directory: Path) -> Graph:
    """Returns the step of a workload, or of one token of `DECODER` for each of four samples."""
    if model == "decode":
        (directory / "config.json").write_text(json.dumps(DECODER))
        model = f"hf:{directory}?batch=4&sequence=1"
    return ModelSource(model, Reading(training=False)).whole().graph


def placed(graph: Graph, cluster: Cluster, limits: dict[str, int], budget: str) -> Plan | None:
    """Returns the plan found; None if nothing fits."""
    names = {device.name for device in cluster.devices}
    limits = {name: min(limit, 10**15) for name, limit in limits.items() if name in names}
    try:
        plan = place(
            graph, cluster, placer="local-search", budget=budget, robust=0.0, max_memory_bytes=limits, num_threads=1
        )
    except InputError:
        return None
    return plan if plan.status == "ok" else None


def rivals(graph: Graph, cards: list[str], limits: dict[str, int], budget: str) -> dict[str, int]:
    """Returns step times by name: of all parts of the machine, and of plans of equal machines replayed on it."""
    cluster, host = Cluster.parse("+".join([*cards, "cpu-16core"])), len(cards)
    times: dict[str, int] = {}
    for size in range(1, host + 1):
        for part in combinations(range(host + 1), size):
            if (plan := placed(graph, changes.only(cluster, part), limits, budget)) is not None:
                times[f"devices {part}"] = plan.step_time_ns
    problem = Problem.build(graph, cluster, max_memory_bytes=limits)
    for like, card in enumerate(cards):
        for count in range(2, host + 1):
            equal = Cluster.parse(f"{count}x{card}+cpu-16core")
            same = {f"gpu{number}": limits[f"gpu{like}"] for number in range(count)}
            plan = placed(graph, equal, same, budget)
            for part in combinations(range(host), count) if plan is not None else ():
                assert plan is not None
                order = [np.zeros(0, np.int64) for _ in range(host + 1)]
                for number, ops in zip((*part, host), plan.order, strict=True):
                    order[number] = ops
                step = simulate(problem, np.array([*part, host])[plan.placement], order=order)
                if step.feasible:
                    times[f"{count}x{card} on {part}"] = step.step_time_ns
    return times


def check(graph: Graph, seed: int, budget: str, most: int) -> None:
    cards, limits = random_machine(int(graph.resident_bytes.sum()), seed, most)
    plan = placed(graph, Cluster.parse("+".join([*cards, "cpu-16core"])), limits, budget)
    others = rivals(graph, cards, limits, budget)
    if others:
        best = min(others, key=others.__getitem__)
        assert plan is not None, best
        assert plan.step_time_ns <= SLACK * others[best], (cards, limits, best)


def test_no_part_and_no_equal_plan_is_faster_on_a_small_machine() -> None:
    """Two random cards, and a decoder of eight layers with experts."""
    check(ModelSource(model_of("moe"), Reading(training=False)).whole().graph, 0, "400sims", 2)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(20))
def test_no_part_and_no_equal_plan_is_faster_on_20_machines(model: str, seed: int, tmp_path: Path) -> None:
    """Twenty random machines with two to four cards."""
    check(graph_of(model, tmp_path), seed, "3000sims", 4)
