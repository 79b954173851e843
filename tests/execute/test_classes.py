"""Classes of kernels are measured on processor cores, and the cluster file carries what they reach."""

from dataclasses import replace
from pathlib import Path

import pytest

from gdp import Cluster
from gdp.execute.backends import CPU, Target
from gdp.execute.calibrate.calibrate import _share, _shares, _TimedOp, with_achieved
from gdp.execute.calibrate.work import QUICK


def test_shares_are_medians_by_modelled_time() -> None:
    """Half of the modelled time of a class is that of ops that reach a larger share."""
    assert _share([(0.5, 30), (0.1, 10), (2.0, 20)]) == 0.5  # 10, 40 and 60 of 60 ns
    assert _share([(0.0, 1)]) == 1e-4


def test_shares_of_several_classes_are_what_others_leave() -> None:
    """An op of two classes tells the one that no op has alone, of the time that the known one leaves."""
    alone = _TimedOp({"norm": 10.0}, 20.0)  # half of the rate
    both = _TimedOp({"norm": 10.0, "copy": 6.0}, 80.0)  # 20 ns are the norm's, 60 are left
    assert _shares([both, alone]) == {"norm": 0.5, "copy": 0.1}


def test_cores_have_shares_of_all_classes(tmp_path: Path) -> None:
    """Products, convolutions of all kinds, passes and gathers are measured; a file keeps them."""
    cluster = Cluster.parse("2xcpu-16core")
    extent, lines = replace(QUICK, probes=((2, 32, 32),)), []
    devices = [replace(device, launch_ns=0) for device in cluster.devices]
    found = with_achieved(devices, [Target("cpu0", CPU), Target("cpu1", CPU)], extent, lines.append)
    assert lines == ["classes of kernels on all cores at once, 2 images of 32 x 32 with 32 channels"]
    for device in found:
        assert {
            "product",
            "convolution",
            "depthwise_convolution",
            "norm",
            "gather",
            "element_gather",
            "depthwise_wide_weight_gradient",
            "softmax",
        } <= device.achieved.keys()
    path = tmp_path / "local.yaml"
    replace(cluster, devices=tuple(found)).save(path)
    again = Cluster.load(path).devices
    assert [dict(each.achieved) for each in again] == [pytest.approx(dict(each.achieved)) for each in found]
