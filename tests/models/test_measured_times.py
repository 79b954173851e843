"""Measured op times are found again for equal work on an equal device, and damaged files are named."""

import sqlite3
from pathlib import Path

import pytest
import torch
from torch import nn

from gdp import Cluster, InputError
from gdp.costs.op_times import count_time_sources, op_times
from gdp.models.measured_times import MeasuredTimes, OpTime, OpTimer, with_times
from gdp.models.model import Model
from gdp.models.pytorch import capture
from gdp.models.pytorch.signature import signatures

ONE = OpTime("aten.mm.default(float32[2, 3], float32[3, 4])", 1200, 30, 20)


def test_times_are_kept_by_their_key(tmp_path: Path) -> None:
    """Times are kept by device, library and signature."""
    times = MeasuredTimes(tmp_path / "times.db", create=True)
    many = [OpTime(f"op {number}", number, 1, 2) for number in range(1300)]
    times.store("core", "torch 1", [ONE, *many])
    times.store("core", "torch 2", [OpTime(ONE.signature, 7, 0, 1)])
    times.store("core", "torch 1", [OpTime("op 3", 33, 1, 2)])
    again = MeasuredTimes(tmp_path / "times.db")
    found = again.find("core", "torch 1", [ONE.signature, *(time.signature for time in many), "unknown"])
    assert found[ONE.signature] == ONE
    assert len(found) == 1301
    assert found["op 3"].median_ns == 33
    assert again.find("core", "torch 2", [ONE.signature])[ONE.signature].median_ns == 7
    assert again.find("gpu", "torch 1", [ONE.signature]) == {}


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """Files of other programs are refused, and stay as they are."""
    text, other, newer = tmp_path / "a.db", tmp_path / "b.db", tmp_path / "c.db"
    text.write_text("this is no database, though it is longer than the header of one is\n" * 4)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (x)")
    MeasuredTimes(newer, create=True)
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    before = {path: path.read_bytes() for path in (text, other, newer)}
    for path, message in ((text, "not a database"), (other, "no file of measured times"), (newer, "version is 9")):
        for create in (False, True):
            with pytest.raises(InputError, match=message):
                MeasuredTimes(path, create=create)
    with pytest.raises(InputError, match="no such file"):
        MeasuredTimes(tmp_path / "absent.db")
    assert not (tmp_path / "absent.db").exists()
    assert {path: path.read_bytes() for path in before} == before


def test_signatures() -> None:
    """Equal work has one signature, other work another."""

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            a, b = x.exp(), (x + 1).exp()
            return a, b, x.t().exp(), x[:1].exp(), torch.where(x > 0, a, b)

    found = capture(Net(), (torch.zeros(3, 4),), name="net", training=False)
    by_kind: dict[str, list[str]] = {}
    for kind, signature in zip(found.graph.kinds, signatures(found.program), strict=True):
        by_kind.setdefault(kind, []).append(signature)
    plain, plain_again, transposed, part = by_kind["aten.exp"]
    assert plain == plain_again == "aten.exp.default(float32[3, 4])"
    assert transposed == "aten.exp.default(float32[4, 3] strides [1, 4])"
    assert part == "aten.exp.default(float32[1, 4])"
    assert by_kind["input"] == ["input float32[3, 4]"]
    assert by_kind["aten.gt"] == ["aten.gt.Scalar(float32[3, 4], 0)"]


def test_measured_times_replace_the_roofline(tmp_path: Path) -> None:
    """Measured times replace the roofline, and ops without one are counted."""
    found = capture(nn.Linear(4, 4), (torch.zeros(2, 4),), name="net")
    names = signatures(found.program)
    cluster = Cluster.parse("2xp100-pcie-16g")
    times = MeasuredTimes(tmp_path / "times.db", create=True)
    op = found.graph.kinds.index("aten.addmm")
    times.store("p100-pcie-16g", "torch x", [OpTime(names[op], 123_456, 0, 1)])
    timer = OpTimer(times, cluster)
    timed = timer.measured(Model(found.graph, {}, is_captured=True), names, "torch x").graph
    assert timer.lacks(timed)
    assert op_times(timed, cluster)[op].tolist() == [123_456] * 2
    modelled = [number for number in range(timed.num_ops) if number != op]
    assert (op_times(timed, cluster)[modelled] == op_times(found.graph, cluster)[modelled]).all()
    assert all(count["measured"] == 1 for count in count_time_sources(timed, cluster).values())
    assert timed.fingerprint != found.graph.fingerprint
    assert with_times(timed, found.graph.times_ns).fingerprint == found.graph.fingerprint
