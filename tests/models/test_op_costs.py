"""What a user knows of ops reaches the cost model, by kind and by name; a bad file is named in one line."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

import gdp
from gdp import cli
from gdp.costs.op_times import op_times
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.models.op_costs import OpCost, OpCosts, without_costs

pytestmark = pytest.mark.usefixtures("workplace")


def graph() -> Graph:
    """A weight and an input, two layers of an op that nobody knows, and a product."""
    ops = [
        Op("layers.0.w", "parameter", module="layers.0", resident_bytes=400),
        Op("layers.0.act_0", "my.act", flops=100, bytes_accessed=800, module="layers.0", phase="forward"),
        Op("layers.1.act_0", "my.act", flops=100, bytes_accessed=800, dtype="bfloat16", module="layers.1"),
        Op("head.mm_0", "aten.mm", flops=2000, bytes_accessed=1200, module="head", time_ns={"p100-pcie-16g": 5}),
    ]
    tensors = [
        Tensor(0, (1,), 400, resident=True),
        Tensor(1, (2,), 404),  # 101 floats
        Tensor(1, (3,), 40, view_of=1),  # a view: no more elements
        Tensor(2, (3,), 400),  # 200 of 16 bits
        Tensor(3, (), 400, keep=True),
    ]
    return Graph.build("net", ops, tensors)


HEAD = "format: gdp-op-costs\nversion: 1\nops:\n"


def costs(*entries: str) -> OpCosts:
    path = Path("costs.yaml")
    path.write_text(HEAD + "".join(f"  - {entry}\n" for entry in entries))
    return OpCosts.load(path)


def test_entries() -> None:
    """Entries set FLOPs and times in their order, and nothing else."""
    known = costs(
        "{kind: my.act, flops_per_output_element: 2.5}",
        "{match: 'layers\\.1', flops: 4e3}",
        "{match: '^layers', time: {p100-pcie-16g: 1.5us, gpu1: 2us}}",
        "{kind: aten.mm, time: {l4-24g: 0.1us}}",
    )
    before, after = graph(), known.apply(graph())
    assert after.flops.tolist() == [0, 253, 4000, 2000]  # 101 * 2.5 = 252.5, rounded up; then 200 * 2.5, overridden
    given = {"p100-pcie-16g": 1500, "gpu1": 2000}
    assert [dict(table) for table in after.times_ns] == [{}, given, given, {"p100-pcie-16g": 5, "l4-24g": 100}]
    assert without_costs(after).fingerprint == without_costs(before).fingerprint
    times = op_times(after, gdp.Cluster.parse("2xp100-pcie-16g"))
    assert times[1].tolist() == [1500, 2000]  # by kind, and on gpu1 by name


def test_widths_of_elements() -> None:
    """Elements are counted in the width of the op's arithmetic."""
    assert costs("{kind: my.act, flops_per_output_element: 1}").apply(graph()).flops.tolist() == [0, 101, 200, 2000]


def test_complete_entries() -> None:
    """A kind of which entries say all counts as known."""
    unknown = {"my.act": 2, "inside.a.loop": 1}
    assert costs("{kind: my.act, flops: 1}").still_unknown(graph(), unknown) == {"inside.a.loop": 1}
    assert costs("{match: act, flops: 1}").still_unknown(graph(), unknown) == {"inside.a.loop": 1}
    assert costs("{match: layers.0, flops: 1}").still_unknown(graph(), unknown) == unknown
    assert [costs("{kind: my.act, flops: 1}").covers(kind) for kind in ("my.act", "aten.mm")] == [True, False]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{kind: my.acct, flops: 1}", "kind 'my.acct': no op of 'net' is of this kind; did you mean my.act?"),
        ("{match: decoder, flops: 1}", "entry 0: match 'decoder': finds no op of 'net' that does anything"),
        ("{match: parameter, flops: 1}", "finds no op"),
        ("{flops: 1}", "entry 0: names no ops; give kind"),
        ("{kind: my.act, match: act, flops: 1}", "entry 0: kind 'my.act': has match 'act' too"),
        ("{kind: my.act}", "kind 'my.act': says nothing; give flops"),
        ("{kind: my.act, flops: 1, flops_per_output_element: 2}", "has both flops and flops_per_output_element"),
        ("{kind: my.act, flop: 1}", "entry 0: unknown key 'flop'; known keys: kind, match, flops"),
        ("{kind: my.act, flops: many}", "entry 0: flops is 'many'; a number is expected"),
        ("{kind: my.act, flops: -1}", "entry 0: flops is -1; at least 0"),
        ("{kind: my.act, flops_per_output_element: -0.5}", "flops_per_output_element is -0.5; at least 0"),
        ("{kind: my.act, flops_per_output_element: 9e18}", "less than 2^63 FLOPs an op are expected"),
        ("{kind: my.act, time: {l4-24g: 3 hours}}", "entry 0: time on l4-24g is '3 hours'; a number with one of ns"),
        ("{kind: my.act, time: 12us}", "entry 0: time is '12us'; a mapping from names or kinds of devices to times"),
        ("{match: '(', flops: 1}", "match is no regular expression"),
        ("{kind: 3, flops: 1}", "entry 0: kind is 3; text that is not empty"),
        ("{kind: a, kind: b, flops: 1}", "key 'kind' is given twice"),
        ("3", "entry 0: is a int; a mapping is expected"),
    ],
)
def test_bad_entries(entry: str, expected: str) -> None:
    """A bad entry is named in one line."""
    with pytest.raises(InputError) as error:
        costs(entry).apply(graph())
    assert expected in str(error.value)
    assert str(error.value).startswith("costs.yaml: ")
    assert "\n" not in str(error.value)


def test_other_files() -> None:
    """Files of another format are refused."""
    for content, expected in (
        ("", "costs.yaml: is empty; a gdp-op-costs document is expected"),
        ("format: gdp-cluster\nversion: 1\n", "format is 'gdp-cluster'; 'gdp-op-costs' is expected"),
        ("format: gdp-op-costs\nversion: 2\nops: []\n", "version is 2; this gdp reads gdp-op-costs version 1"),
        ("format: gdp-op-costs\nversion: 1\n", "ops is missing"),
    ):
        Path("costs.yaml").write_text(content)
        with pytest.raises(InputError, match=expected):
            OpCosts.load("costs.yaml")
    with pytest.raises(InputError, match=r"missing.yaml: no such file"):
        OpCosts.load("missing.yaml")


def test_costs_in_python() -> None:
    """Costs can be made in Python."""
    made = gdp.OpCosts((OpCost(kind="my.act", flops_per_output_element=Fraction(5, 2)),))
    assert made.apply(graph()).flops.tolist() == [0, 253, 500, 2000]


def test_commands_take_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands take a file, and its costs reach plans and micro-batches."""
    graph().save("net.json")
    costs("{match: 'layers.*act', time: {p100-pcie-16g: 3ms}}")
    devices = ["--devices", "2xp100-pcie-16g"]

    def run(*args: str) -> tuple[int, str, str]:
        status = cli.main(list(args))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    status, out, _ = run(
        "place", "net.json", *devices, "--budget", "50sims", "--no-advice", "--op-costs", "costs.yaml", "--json"
    )
    assert status == 0
    assert json.loads(out)["step_time_ns"] >= 2 * 3_000_000
    assert dict(Graph.load("graph.json.gz").times_ns[1]) == {"p100-pcie-16g": 3_000_000}  # beside the plan
    Path("graph.json.gz").unlink()
    assert run("simulate", "plan.json")[0] == 0  # which read the costs again
    placers = ["--placers", "single", "--budget", "10sims", "--seeds", "1"]
    status, out, _ = run("compare", "net.json", *devices, *placers, "--op-costs", "costs.yaml", "--json")
    assert json.loads(out)["rows"][0]["step_time_ns"] >= 2 * 3_000_000
    two = ["--microbatches", "2", "--out", "two.json"]
    assert run("capture", "net.json", *two, "--op-costs", "costs.yaml")[0] == 0
    doubled = Graph.load("two.json")
    assert doubled.times_ns[doubled.op_names.index("layers.0.act_0@1")] == {"p100-pcie-16g": 3_000_000}
    costs("{kind: my.acct, flops: 1}")
    status, out, err = run("place", "net.json", *devices, "--op-costs", "costs.yaml")
    assert (status, out) == (2, "")
    assert err.strip().endswith("entry 0: kind 'my.acct': no op of 'net' is of this kind; did you mean my.act?")


def test_unknown_costs_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An op of unknown cost is reported with the option, until the file has its cost."""
    Path("user_op_model.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Roots(nn.Module):\n"
        "    def forward(self, x):\n        return torch.linalg.ldl_factor(x)[0].sum()\n\n\n"
        "def build():\n    return Roots(), torch.ones(4, 4)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["capture", "user_op_model:build", "--inference", "--out", "roots.json"]
    assert cli.main(command) == 0
    assert "(give it with --op-costs FILE or gdp.register_flops): aten.linalg_ldl_factor" in capsys.readouterr().out
    kind = next(kind for kind in Graph.load("roots.json").kinds if "linalg_ldl_factor" in kind)
    costs(f"{{kind: {kind}, flops: 640}}")
    assert cli.main([*command, "--op-costs", "costs.yaml"]) == 0
    assert "no known cost" not in capsys.readouterr().out
    found = Graph.load("roots.json")
    assert found.flops[found.kinds.index(kind)] == 640
