"""Place, compare, sweeps and advice agree on drawn problems: with more to choose from, none answers worse."""

import json
from pathlib import Path

import numpy as np
import pytest

from gdp.budget import Clock
from gdp.cli import main
from gdp.cluster import Cluster, changes
from gdp.graph import Graph, Op, Tensor
from gdp.parallel.layout import NONE
from gdp.planning.advice import FASTER, MORE, ONE_FEWER, Advice, advise
from gdp.planning.compare import compare
from gdp.planning.layout_advice import advise_on_layouts
from gdp.planning.sweep import SweepRow, place_row
from gdp.search.place import answer, place
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Plan
from gdp.simulator.simulate import replay
from tests.search.test_layouts import machine_of, parts_of

BUDGET = "80sims"
DECODED = "?batch=4&context=512"
OPTIONS = SearchOptions(num_threads=1)
ADDING = (MORE, FASTER, "twice the memory")
"""Changes to a machine on which the plan itself runs as fast."""


def drawn_graph(rng: np.random.Generator) -> Graph:
    """Eight to sixteen ops of 1 to 8 ms on a P100, each after up to two earlier ones."""
    count = int(rng.integers(8, 17))
    ops = [
        Op(f"op{n}", flops=int(rng.integers(9, 75)) * 10**9, resident_bytes=int(rng.integers(2**30)))
        for n in range(count)
    ]
    edges = {(int(rng.integers(n)), n) for n in range(1, count) for _ in range(2)}
    return Graph.build("drawn", ops, [Tensor(a, (b,), int(rng.integers(1, 10**7))) for a, b in sorted(edges)])


def drawn_machine(rng: np.random.Generator) -> Cluster:
    return Cluster.parse("+".join(rng.choice(["p100-pcie-16g", "t4-16g", "l4-24g"], 3)))


def swept(model: object, cluster: Cluster, parallel: str | None) -> list[SweepRow]:
    rows: list[SweepRow] = []
    for count in range(1, cluster.num_devices + 1):
        part = changes.first(cluster, count)
        question = PlaceQuestion.of(model, part, Constraints(), parallel, None, OPTIONS)  # type: ignore[arg-type]
        rows.append(place_row(count, question, rows, Clock.of(BUDGET)))
    return rows


def check(advice: Advice, plan: Plan) -> None:
    """A machine that has more is no slower than the plan that advice began from, one with less no faster than now."""
    assert advice.plan.step_time_ns <= plan.step_time_ns
    for each in advice.what_ifs:
        time_ns = each.step_time_ns or 2**62  # None: nothing fits
        assert each.change not in ADDING or time_ns <= plan.step_time_ns, each
        assert each.change != ONE_FEWER or time_ns >= advice.plan.step_time_ns, each


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 27))])
def test_ops(seed: int) -> None:
    """Placements of ops: a row is no slower than the rows before it, and a machine that has more no slower than now."""
    rng = np.random.default_rng(seed)
    graph, cluster = drawn_graph(rng), drawn_machine(rng)
    plan = place(graph, cluster, budget=BUDGET, num_threads=1)
    rows = swept(graph, cluster, NONE)
    times = [row.step_time_ns or 2**62 for row in rows]
    assert times == sorted(times, reverse=True)
    assert times[-1] <= plan.step_time_ns
    compared = compare(graph, cluster, placers="single,heft,auto", budget=BUDGET, seeds=1, num_threads=1)
    by_placer = {row.placer: row.step_time_ns or 2**62 for row in compared.rows}
    assert by_placer["auto"] == plan.step_time_ns
    assert plan.step_time_ns <= min(by_placer["single"], by_placer["heft"])
    assert plan.problem is not None
    advice = advise(graph, replay(plan.problem, plan), plan, Constraints(), budget=Clock.of(BUDGET).rest, num_threads=1)
    check(advice, plan)


def drawn_speeds(seed: int) -> tuple[float, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.choice([0.1, 0.3, 0.6, 1.0], int(rng.integers(2, 5))).tolist())


@pytest.mark.parametrize(
    "speeds",
    [
        (1.0, 1.0, 1.0),
        (1.0, 0.6, 0.2),
        (1.0, 0.9, 0.3, 0.3),
        *(pytest.param(drawn_speeds(seed), marks=pytest.mark.long) for seed in range(20)),
    ],
)
def test_layouts(speeds: tuple[float, ...]) -> None:
    """Layouts of a batch: the same, bounds belong to their rows, and a device that slows the step down is left idle."""
    cluster = machine_of(list(speeds))
    question = PlaceQuestion.of(parts_of(), cluster, Constraints(), None, None, OPTIONS)
    solution = answer(question, Clock.of(BUDGET))
    plan = solution.plan
    assert plan is not None
    times = [row.step_time_ns or 2**62 for row in swept(parts_of(), cluster, None)]
    assert times == sorted(times, reverse=True)
    assert times[-1] <= plan.step_time_ns
    compared = compare(parts_of(), cluster, placers="single,auto", budget=BUDGET, seeds=1, num_threads=1)
    assert compared.rows[1].step_time_ns == plan.step_time_ns
    assert all(compared.bound_of(row) <= (row.step_time_ns or 2**62) for row in compared.rows)
    advice, better = advise_on_layouts(solution, question.parts or parts_of(), Constraints(), Clock.of("500sims"))
    assert better.plan is advice.plan
    check(advice, plan)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder, and the directory of captured graphs beside it."""
    directory = tmp_path_factory.mktemp("agreement")
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **heads, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("model", "memory", "options", "of_plan"),
    [
        ("?batch=4&sequence=64", "32MiB", [], []),
        ("?batch=4&sequence=64", "32MiB", [], ["--parallel", "data=2", "--robust", "0"]),
        ("?batch=2&sequence=256", "8MiB", ["--phase", "prefill"], []),
        (DECODED, "8MiB", ["--phase", "decode"], []),
        (DECODED, "8MiB", ["--phase", "decode"], ["--parallel", "none"]),
        (DECODED, "10MiB", ["--phase", "decode"], ["--batches", "3"]),
        (DECODED, "8MiB", ["--phase", "decode"], ["--for", "hf-device-map"]),
    ],
)
def test_commands(
    model: str,
    memory: str,
    options: list[str],
    of_plan: list[str],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`auto` of `gdp compare` takes as long as the answer of `gdp place`, for a plan and, if that says all, a MODEL."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(llama / "cache"))
    asked = [f"hf:{llama}{model}", *options, "--devices", "3xl4-24g"]
    asked += [word for gpu in range(3) for word in ("--max-memory", f"gpu{gpu}={memory}")]
    quick = ["--budget", BUDGET, "--threads", "1", "--json"]
    assert main(["place", *asked, *of_plan, *quick, "--no-advice", "--no-cache"]) == 0
    answer = json.loads(capsys.readouterr().out)
    expected = answer["throughput"]["time_per_batch_ns"] if "throughput" in answer else answer["step_time_ns"]
    for question in [["plan.json"]] if of_plan else [["plan.json"], asked]:
        assert main(["compare", *question, *quick, "--placers", "auto", "--seeds", "1"]) == 0
        compared = json.loads(capsys.readouterr().out)
        assert compared["batches"] == answer.get("batches")
        assert [row["step_time_ns"] for row in compared["rows"] if row["placer"] == "auto"] == [expected]
