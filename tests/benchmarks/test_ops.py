"""The benchmark of ops: the rule of each kind, and how much of a step those without one take."""

from pathlib import Path

import pytest

from benchmarks.ops import OpsBenchmark, rule_of_kind
from benchmarks.small_models import DIFFUSERS, TIMM, TRANSFORMERS
from gdp.errors import InputError
from gdp.models.papers import PAPERS


def test_a_small_part_has_rules(tmp_path: Path) -> None:
    """A built-in workload and one model of each library: no operator that takes 1 % of a step lacks a rule."""
    figures = OpsBenchmark(models=("inception-v3-b32", "gpt2", "DiTTransformer2DModel")).run(out=tmp_path)
    assert figures["counts"] == {"built-in": 1, "Transformers": 1, "Diffusers": 1}
    assert not figures["refused"]
    assert all(line["share"] < 0.01 for line in figures["unruled"])
    rules = {line["kind"]: line["rule"] for line in figures["ruled"]}
    assert (rules["aten.convolution"], rules["aten.relu"], rules["aten.cat"]) == ("formula", "pointwise", "movement")
    assert "| `aten.addmm` | formula |" in (tmp_path / "ops.md").read_text()


def test_counts_of_models() -> None:
    """All built-in workloads, at least 60 models of Transformers, 20 of timm and 12 of Diffusers."""
    assert len(PAPERS.names()) == 14
    assert (len(TRANSFORMERS) >= 60, len(TIMM) >= 20, len(DIFFUSERS) >= 12) == (True, True, True)


def test_an_op_without_a_rule_is_named() -> None:
    """An operator that no table has is "unknown"."""
    assert rule_of_kind("aten._cudnn_rnn") == "unknown"
    assert rule_of_kind("aten.mm") == "formula"
    with pytest.raises(InputError, match="ops: no model 'bogus'"):
        OpsBenchmark(models=("bogus",)).run()
