"""Drawn architectures: each runs, is a function of seed and number, and is like no built-in workload; sets of them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.architectures.__main__ import main
from benchmarks.architectures.draw import DEFAULT, FAMILIES, MAX_OPS, MIN_OPS, captured, draw
from benchmarks.architectures.drawn_set import make_set
from benchmarks.architectures.drawn_tasks import DrawnLayouts, DrawnTasks
from benchmarks.architectures.graph_set import INDEX, GraphSet
from benchmarks.architectures.likeness import MAX_LIKENESS, BuiltIns, neighbourhoods, structure
from benchmarks.architectures.train import main as train
from benchmarks.workloads import model_of
from gdp.errors import InputError
from gdp.models.source import load
from gdp.policy.checkpoint import read_checkpoint
from gdp.policy.training.tasks import TaskConfig

SMALL = (60, 100)  # ops to aim at
PAIR = ("tables", "encoders")


@pytest.fixture(autouse=True, scope="module")
def _few_ops() -> Iterator[None]:
    """Lets draws aim at few ops: they are as many as a set takes, and each op takes a millisecond to capture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.architectures.draw.TARGET_OPS", (MIN_OPS, 2 * MIN_OPS))
        yield


@pytest.fixture(scope="module")
def built_ins() -> BuiltIns:
    return BuiltIns.read(["amoebanet"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, built_ins: BuiltIns) -> GraphSet:
    """A set of four graphs."""
    directory = tmp_path_factory.mktemp("sets") / "whole"
    return make_set(directory, 4, seed=3, families=PAIR, built_ins=lambda: built_ins)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_draws_training_steps(family: str) -> None:
    """A draw has all phases."""
    graph = captured(family, "drawn", np.random.default_rng(0), SMALL)
    assert {"forward", "backward", "update"} <= set(graph.phases)
    assert graph.flops.sum() > 0


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_draws_run_whatever_the_sizes(family: str) -> None:
    """Of forty draws none fails, hardly two have one structure, and a seed always gives the same graph."""
    graphs = [captured(family, "drawn", np.random.default_rng([7, seed])) for seed in range(40)]
    assert len({structure(graph) for graph in graphs}) >= 39
    assert captured(family, "drawn", np.random.default_rng([7, 0])).fingerprint == graphs[0].fingerprint


def test_a_draw_is_in_range_and_families_take_turns(built_ins: BuiltIns, whole: GraphSet) -> None:
    """Number n of a seed does not depend on what was drawn before."""
    assert [graph.family for graph in whole.graphs] == [*PAIR, *PAIR]
    assert [graph.name for graph in whole.graphs[:2]] == ["tables-3-0", "encoders-3-1"]
    assert all(MIN_OPS <= graph.num_ops <= MAX_OPS for graph in whole.graphs)
    assert draw(3, 1, PAIR, built_ins).graph.fingerprint == whole.graphs[1].fingerprint


def test_relatives_are_alike_and_sizes_do_not_matter(built_ins: BuiltIns) -> None:
    """AmoebaNets of two sizes have nearly all neighbourhoods in common; NASNet, made of one, is rejected too."""
    larger = load("amoebanet/cps3-f128-b32")
    assert built_ins.nearest(larger) == ("amoebanet", pytest.approx(1.0, abs=0.02))
    assert built_ins.nearest(load(model_of("nasnet/cps1-f44-is224-b128")))[1] > MAX_LIKENESS
    small = load(model_of("tree_lstm/h512-l8-b1024"))
    assert built_ins.nearest(small)[1] < 0.05
    assert len(neighbourhoods(small)) <= small.num_ops


def test_a_draw_like_a_built_in_workload_is_rejected(whole: GraphSet) -> None:
    """With a drawn graph among the built-in workloads, its number gives the next draw."""
    first = whole.graphs[1].load()
    again = draw(3, 1, PAIR, BuiltIns({"twin": neighbourhoods(first)}))
    assert again.rejected["like a built-in workload"] >= 1
    assert structure(again.graph) != structure(first)


def test_sets_survive_interruptions(tmp_path: Path, whole: GraphSet, built_ins: BuiltIns) -> None:
    """One part ends by request, one by a kill that left a graph without a row."""
    directory = tmp_path / "parts"
    calls = iter(range(10))
    part = make_set(
        directory, 4, seed=3, families=PAIR, built_ins=lambda: built_ins, must_stop=lambda: next(calls) == 2
    )
    assert len(GraphSet.open(directory).graphs) == len(part.graphs) == 2
    shutil.copy(whole.graphs[2].path, directory)
    (directory / ".graph-000003.json.gz.x.tmp").write_text("half")
    done = make_set(directory, 4, seed=3, families=PAIR, built_ins=lambda: built_ins)
    assert [graph.row() for graph in done.graphs] == [graph.row() for graph in whole.graphs]
    assert (directory / INDEX).read_bytes() == (whole.directory / INDEX).read_bytes()
    assert len({graph.structure for graph in done.graphs}) == 4


def test_sets_open_without_graphs(tmp_path: Path, whole: GraphSet) -> None:
    """A set is opened without reading its graphs."""
    directory = Path(shutil.copytree(whole.directory, tmp_path / "copy"))
    graphs = GraphSet.open(directory).graphs
    assert graphs[1].load().fingerprint == graphs[1].fingerprint
    graphs[0].path.unlink()
    assert GraphSet.open(directory).graphs == graphs
    with pytest.raises(InputError, match="no such file"):
        graphs[0].load()
    shutil.copy(graphs[2].path, graphs[1].path)
    with pytest.raises(InputError, match="is not the graph that the set names"):
        graphs[1].load()


def test_sets_of_another_seed_are_refused(whole: GraphSet, built_ins: BuiltIns) -> None:
    """A set of another seed is not added to."""
    with pytest.raises(InputError, match="has graphs of seed 3, not 4; name another directory"):
        make_set(whole.directory, 4, seed=4, families=PAIR, built_ins=lambda: built_ins)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["graph.json.gz", "--count", "2"], "graph.json.gz is no directory; choose another place"),
        (["new", "--count", "2", "--family", "nope"], "'nope' is unknown; one of cells, residual, "),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bad input is one line with exit status 2, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    Path("graph.json.gz").touch()
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["graph.json.gz"]


def test_graphs_have_a_task_of_their_own(whole: GraphSet) -> None:
    """Drawn once, with cluster and layout, and the same in every process."""
    layouts = DrawnLayouts(share=0.7)
    sources = [stored for stored in whole.graphs[1::2] for _ in range(3)]
    tasks = [DrawnTasks(sources, TaskConfig(), 1, layouts) for _ in range(2)]
    problems = [[each.unvaried(number).problem for each in tasks] for number in range(len(sources))]
    for one, other in problems:
        assert one.cluster.fingerprint == other.cluster.fingerprint
        assert np.array_equal(one.op_time_ns, other.op_time_ns)
    assert len({one.cluster.fingerprint for one, _ in problems}) == len(sources)
    replicas = [any("#" in name for name in one.graph.op_names) for one, _ in problems]
    assert 0 < sum(replicas) < len(sources)
    assert max(one.num_ops for one, _ in problems) <= 2 * layouts.most_ops


def test_layouts_are_of_all_sorts() -> None:
    """Drawn layouts differ, within their limits."""
    layouts = [DrawnLayouts().draw(np.random.default_rng(seed), 1 + seed % 8, 1 + seed % 24) for seed in range(400)]
    for seed, layout in enumerate(layouts):
        assert layout.data <= 1 + seed % 8
        assert layout.num_parts <= 1 + seed % 24
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    uneven = [layout for layout in layouts if not layout.is_even]
    whole = [layout for layout in layouts if layout.is_whole]
    assert min(len(uneven), len(whole), sum(layout.recompute != "none" for layout in layouts)) > 20


def test_unrolled_nets_are_drawn_by_name() -> None:
    """So a number of a seed stays the same graph of the other families; they have few modules for their ops."""
    assert "unrolled" not in DEFAULT
    graph = draw(0, 0, ("unrolled",), BuiltIns({"none": np.zeros(1, np.uint64)})).graph
    assert MIN_OPS <= graph.num_ops <= MAX_OPS
    assert len(set(graph.modules)) < graph.num_ops / 40


def test_drawn_graphs_are_made_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy is trained on a directory of drawn graphs but for a family that validates, and goes on to more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(BuiltIns, "read", lambda: BuiltIns({"none": np.zeros(1, np.uint64)}))
    make = ["drawn", "--count", "2", "--family", "tables", "--family", "encoders", "--seed", "4"]
    assert main([*make, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["num_graphs"], answer["num_drawn"]) == (2, 2)
    args = ["drawn", "--styles", "8", "--groupings", "1", "--validation-family", "encoders", "--out", "own.safetensors"]
    assert train([*args, "--updates", "1"]) == 0
    assert train([*args, "--updates", "2", "--resume"]) == 0
    manifest = read_checkpoint("own.safetensors").manifest
    assert ([graph["name"] for graph in manifest["graphs"]], manifest["clusters"]) == (["tables-4-0"], [])
    assert (manifest["updates"], manifest["num_trials"]) == (2, 16)
    assert -1 <= manifest["rank_correlation"] <= 1
    path, index = Path("drawn/graph-000000.json.gz"), Path("drawn/set.json").read_bytes()
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    capsys.readouterr()
    assert train([*args[:-1], "other.safetensors"]) == 2
    assert f"{path}: truncated or damaged gzip; write or copy the file again, or delete it" in capsys.readouterr().err
    path.unlink()
    assert main(make) == 0
    assert (path.read_bytes(), Path("drawn/set.json").read_bytes()) == (whole, index)
