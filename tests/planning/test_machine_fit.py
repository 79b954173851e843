"""`gdp devices fit`: the numbers of a machine from steps that its user measured."""

import csv
import json

import numpy as np
import pytest

from gdp.cli import main
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.planning.machine_fit import MachineFit, fit_machine, prior_of, with_factors
from gdp.planning.measured_steps import read_steps

CARD = "rtx3090-24g"
TRUTH = {(CARD, "product"): 0.9, (CARD, "bandwidth"): 0.93, (CARD, "issue"): 1.4}


def products(count: int, size: int) -> Graph:
    """Returns a chain of equal square products, each followed by a sum."""
    array = f"bfloat16[{size},{size}]"
    num_bytes, ops = 2 * size * size, []
    for number in range(count):
        ops.append(Op(f"mm{number}", "aten.mm", 2 * size**3, 3 * num_bytes, "bfloat16",
                      shapes=f"aten.mm {array} {array} > {array}"))  # fmt: skip
        ops.append(Op(f"add{number}", "aten.add", size * size, 3 * num_bytes, "bfloat16",
                      shapes=f"aten.add {array} {array} > {array}"))  # fmt: skip
    return Graph.build("chain", ops, [Tensor(op, (op + 1,), num_bytes) for op in range(2 * count - 1)])


def sums(count: int, size: int) -> Graph:
    """Returns a chain of equal sums."""
    array, num_bytes = f"bfloat16[{size},{size}]", 2 * size * size
    text = f"aten.add {array} {array} > {array}"
    ops = [Op(f"add{n}", "aten.add", size * size, 3 * num_bytes, "bfloat16", shapes=text) for n in range(count)]
    return Graph.build("sums", ops, [Tensor(op, (op + 1,), num_bytes) for op in range(count - 1)])


GRAPHS = {
    "large": products(4, 8192), "wide": products(6, 6144), "square": products(9, 4096), "mid": products(10, 5120),
    "sums": sums(20, 8192), "more": sums(40, 6144), "long": sums(9, 4096),
    "small": sums(50, 64), "tiny": products(60, 64), "many": sums(200, 32),
}  # fmt: skip

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def net():
    return Net(), (torch.ones(4096, 2048),)
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Rows that the machine of TRUTH makes, in a file; returns a function of those to change."""
    monkeypatch.chdir(tmp_path)
    for name, graph in GRAPHS.items():
        graph.save(f"{name}.json")
    machine = with_factors(Cluster.parse(CARD), TRUTH)

    def write(names=tuple(GRAPHS), factors=None):
        rows = [{"model": f"{name}.json", "ms": "1", "devices": CARD} for name in names]
        _write(rows)
        for row, step, name in zip(rows, read_steps(tmp_path / "runs.csv"), names, strict=True):
            row["ms"] = step.predicted(machine).step_time_ns / 1e6 * (factors or {}).get(name, 1)
        _write(rows)
        return read_steps(tmp_path / "runs.csv")

    return write


def _write(rows):
    with open("runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_a_machine_that_differs_is_found_from_its_steps(runs):
    """Ten rows bring each number at least half of the way, and errors of steps below 0.4 of what they were."""
    fit = fit_machine(runs(), Cluster.parse(CARD))
    for key, true in TRUTH.items():
        share = np.log(fit.factors[key]) / np.log(true)
        assert 0.5 < share < 1.1, (key, fit.factors[key])
    assert np.abs(fit.after).mean() < 0.4 * np.abs(fit.before).mean()
    assert np.abs(fit.left_out).mean() < np.abs(fit.before).mean()
    assert not fit.disagreeing


def test_one_row_moves_little(runs):
    """A row weighs (0.05 / 0.08)^2 = 0.39 of a prior: it moves its number by 28 % of the way, and others by nothing."""
    fit = fit_machine(runs(["large"]), Cluster.parse(CARD))
    assert 0.96 < fit.factors[CARD, "product"] < 0.99  # of 0.9
    assert fit.factors[CARD, "issue"] == pytest.approx(1, abs=1e-3)


def test_a_wrong_row_is_named(runs, capsys):
    """A row that is twice as slow as the others say stands out, and does not carry the fit away."""
    runs(factors={"mid": 2.0})
    assert main(["devices", "fit", "--runs", "runs.csv", "--out", "mine.yaml", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in answer["rows"] if row["disagrees"]] == ["mid.json"]
    assert main(["devices", "fit", "--runs", "runs.csv", "--out", "mine.yaml"]) == 0
    assert "row 4 disagrees with the others; check" in capsys.readouterr().out


@pytest.mark.parametrize(("after", "disagreeing"), [([0.5, 0.52, 0.48, 0.5, 0.7], [4]), ([0.5], [])])
def test_rows_disagree_with_each_other(after, disagreeing):
    """Rows that all err by 0.5 agree: deviations from it are 0, 0.02, 0.02, 0 and 0.2, three sigmas 0.09; one row has
    no others."""
    rows, none = np.array(after), np.zeros(0)
    fit = MachineFit((), Cluster.parse(CARD), (), none, rows, rows, rows, [""] * len(rows))
    assert fit.disagreeing == disagreeing


def test_numbers_that_no_machine_has_are_named(runs, capsys):
    """All steps four times as slow are rather not those of such a card, and the fit says so."""
    runs(factors=dict.fromkeys(GRAPHS, 4.0))
    assert main(["devices", "fit", "--runs", "runs.csv", "--out", "mine.yaml"]) == 0
    assert f"warning: issue of {CARD} is" in capsys.readouterr().out


def test_the_file_predicts_as_the_fit_does(runs, tmp_path):
    """A cluster that is written and read again has equal times of all rows."""
    steps = runs()
    fit = fit_machine(steps, Cluster.parse(CARD))
    fit.fitted.save(tmp_path / "mine.yaml")
    read = Cluster.parse(str(tmp_path / "mine.yaml"))
    assert read.fingerprint == fit.fitted.fingerprint
    for step, log in zip(steps, fit.after, strict=True):
        assert step.predicted(read).step_time_ns == pytest.approx(step.measured_ns * np.exp(log), rel=1e-9)


def test_rows_narrow_the_ranges_of_their_machine(runs, tmp_path):
    """The file has a ratio of each model by its kind of step, without the row itself; steps of that kind have a
    narrower range on it, and rest on them."""
    steps = runs()
    fit = fit_machine(steps, Cluster.parse(CARD))
    fit.fitted.save(tmp_path / "mine.yaml")
    own = Cluster.parse(str(tmp_path / "mine.yaml")).devices[0].measured_steps
    assert sum(map(len, own.values())) == len(GRAPHS)
    kind = max(own, key=lambda each: len(own[each]))
    logs = [-log for log, of_row in zip(fit.left_out, fit.kinds, strict=True) if of_row == kind]
    assert np.log(own[kind]) == pytest.approx(logs, abs=1e-3)
    row = fit.kinds.index(kind)
    before, after = (steps[row].predicted(each).step_range for each in (Cluster.parse(CARD), fit.fitted))
    assert np.log(after.high / after.low) < 0.8 * np.log(before.high / before.low)
    assert after.rests_on == f"{before.rests_on}, and {len(logs)} on this machine"


def test_steps_of_one_model_count_once(runs):
    """Two rows of one model err alike, so their middle is one ratio."""
    one = fit_machine(runs(["large", "large", "wide"], {"wide": 1.1}), Cluster.parse(CARD))
    (own,) = one.measured_steps(CARD).values()
    assert len(own) == 2
    assert one.measured_steps("l4-24g") == {}


def test_links_are_fitted_to_steps_in_layouts(tmp_path):
    """Exchanges over NVLink follow the rate and the latency of its routes, and change nothing where those are known."""
    from gdp.costs.collectives import exchange_times

    cluster = Cluster.parse("4xa100-sxm-80g")
    slower = with_factors(cluster, {("nvlink3", "rate"): 0.5})
    later = with_factors(cluster, {("nvlink3", "latency"): 2.0})
    times = [exchange_times(each, [[n] for n in range(4)])[1] for each in (cluster, slower, later)]
    large, small = ([each.time_ns("all_reduce", size) for each in times] for size in (10**9, 1000))
    assert 1.7 < large[1] / large[0] < 2.01
    assert small[2] == pytest.approx(2 * small[0], rel=0.01)


def test_steps_in_layouts_set_links(tmp_path, monkeypatch):
    """Rows of two replicas and of two stages are simulated so, and slow ones make links slower, which a row of one
    device alone does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fitted_net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    layouts = "data=2", "stages=2,microbatches=2", "none"
    rows = [{"model": "fitted_net:net", "ms": 1, "parallel": each} for each in layouts]
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    cluster = Cluster.parse("2xa100-sxm-80g")
    steps = read_steps(tmp_path / "runs.json", "2xa100-sxm-80g")
    slow = with_factors(cluster, {("nvlink3", "rate"): 0.01})
    data, stages, alone = ([step.predicted(each).step_time_ns for each in (cluster, slow)] for step in steps)
    assert data[1] > 2 * data[0]
    assert stages[1] > 1.1 * stages[0]
    assert alone[1] == alone[0]


def test_steps_of_groups(tmp_path, monkeypatch):
    """A row of two cards that share each product is predicted so: in less time than one card takes, and with links."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fitted_net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"model": "fitted_net:net", "ms": 1, "parallel": each} for each in ("tensor=2", "none")]
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    cluster = Cluster.parse("2xa100-sxm-80g")
    slow = with_factors(cluster, {("nvlink3", "rate"): 0.01})
    tensor, alone = read_steps(tmp_path / "runs.json", "2xa100-sxm-80g")
    assert 0.5 < tensor.predicted(cluster).step_time_ns / alone.predicted(cluster).step_time_ns < 0.9
    assert tensor.predicted(slow).step_time_ns > 2 * tensor.predicted(cluster).step_time_ns


def test_cards_of_no_known_family_follow_their_rows(runs):
    """Shares of a card whose family is not known are those of any card, which rows may carry further."""
    assert fit_machine(runs(["large"], {"large": 1.5}), Cluster.parse(CARD)).factors[CARD, "product"] > 0.8
    assert prior_of("rtx-9090-64g", "product") > 5 * prior_of(CARD, "product")
    assert prior_of("amd-epyc-1core", "product") == prior_of(CARD, "product")


def test_the_file_is_of_no_runtime(runs, capsys):
    """Rows that ran compiled are predicted so; the cluster is written without a runtime, for others. A kind of card
    that it does not have, or that no row has, is named."""
    runs()
    rows = [{"model": "large.json", "ms": "40", "devices": CARD, "runtime": "compile"},
            {"model": "wide.json", "ms": "40", "devices": "2xl4-24g", "runtime": "compile"}]  # fmt: skip
    _write(rows)
    words = ["devices", "fit", "--runs", "runs.csv", "--out", "mine.yaml"]
    assert main(words) == 0
    assert f"mine.yaml has no {CARD}, which rows have" in capsys.readouterr().out
    assert {device.runtime for device in Cluster.parse("mine.yaml").devices} == {"eager"}
    assert main([*words, "--devices", f"{CARD}+2xa100-sxm-80g"]) == 0
    assert "no row is of a100-sxm-80g" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model,devices\nlarge.json,l4-24g\n", "row 1: has no ms; add the column"),
        ("model,ms\nlarge.json,3\n", "row 1: has no devices; add the column, or --devices"),
        ("model,ms,devices\nlarge.json,3,l4-24g\nlarge.json,fast,l4-24g\n", "row 2: ms is 'fast'"),
        ("model,ms,devices\nlarge.json,3,l4-24g\nnone.json,3,l4-24g\n", "row 2: none.json: no such file"),
        ("model,ms,devices,bacth\nlarge.json,3,l4-24g,8\n", "column 'bacth' is unknown"),
        ("model,ms,devices,batch\nlarge.json,3,l4-24g,many\n", "batch is 'many'; a whole number"),
        ("model,ms,devices,parallel\nlarge.json,3,l4-24g,auto\n", "row 1: "),
        (
            "model,ms,devices,parallel\nlarge.json,3,2xl4-24g,data=2,zero=1\n",
            "row 1: has more cells than there are col",
        ),
        (
            "model,ms,devices,microbatches,parallel\nlarge.json,3,2xl4-24g,2,data=2\n",
            "row 1: microbatches: parallel has",
        ),
        (
            "model,ms,devices,inference,parallel\nlarge.json,3,2xl4-24g,yes,data=2\n",
            "row 1: parallel is 'data=2', of tr",
        ),
        ("model,ms,devices\n", "has no rows"),
        ('model,ms,devices\nlarge.json,3,"l4-24g\n', "runs.csv: is no CSV file (unexpected end of data); mend it"),
    ],
)
def test_bad_rows_are_refused_in_one_line(text, reason, runs, tmp_path, capsys):
    """Each says which row, what and the remedy, and nothing is written."""
    (tmp_path / "runs.csv").write_text(text)
    assert main(["devices", "fit", "--runs", "runs.csv", "--out", "mine.yaml"]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize(
    ("row", "reason"), [("runtime: 1", "--runtime is '1'"), ("dim: [8]", "--dim"), ("runtime: [eager]", "--runtime")]
)
def test_values_of_other_types_are_refused_in_one_line(row, reason, runs, tmp_path, capsys):
    """YAML has numbers and lists where words are expected."""
    (tmp_path / "runs.yaml").write_text(f"- {{model: large.json, ms: 3, devices: l4-24g, {row}}}\n")
    assert main(["devices", "fit", "--runs", "runs.yaml", "--out", "mine.yaml"]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
