"""The plan of `parallelize_module` in a user's code is the plan of the local program."""

import re
from pathlib import Path

import pytest

from gdp.errors import InputError
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from tests.models.test_shards import captured, exchanges, product_flops

CODE = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

STYLES = {{{styles}}}

def build():
    mesh = init_device_mesh("cuda", (4,))
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    model = nn.Sequential(block, nn.Conv1d(8, 8, 1))
    assert mesh.size() == 1, "tensor= says how many ranks there are"
    tp.parallelize_module(block, mesh, STYLES)
    {more}
    return model, (torch.randn(4, 8, 64),)
"""
BOTH = '"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()'


def source(directory: Path, styles: str, more: str = "") -> ModelSource:
    name = re.sub(r"\W", "_", directory.name)  # a module of its own, since Python keeps them
    directory.joinpath(f"{name}.py").write_text(CODE.format(styles=styles, more=more))
    return ModelSource(f"{name}:build", directory=directory)


@pytest.mark.parametrize("sequence", [False, True])
def test_plan_that_is_ours(sequence: bool) -> None:
    """A decoder whose code cuts what gdp would has the same products, exchanges and weights."""
    given, own = (captured(name, 2, sequence=sequence) for name in ("given", "llama"))
    assert product_flops(given.graph) == product_flops(own.graph)
    assert exchanges(given.graph) == exchanges(own.graph)
    assert int(given.graph.resident_bytes.sum()) == int(own.graph.resident_bytes.sum())
    assert any("as parallelize_module in MODEL says" in note for note in given.notes)


def test_plan_that_is_not_ours() -> None:
    """What has no style stays whole, and is named with its share of the work."""
    local, whole = captured("given-mlp", 2), captured("given-mlp")
    attention = 6 * 16 * (2 * 64 * 64 + 2 * 64 * 32) * 2 + 3 * 4 * 2 * 8 * 8 * 64 * 2  # of two layers, and of scores
    repeated = 2 * product_flops(local.graph) - product_flops(whole.graph)
    assert repeated == pytest.approx(attention, rel=0.1)
    assert any("q_proj.weight has no style" in note for note in local.notes)


@pytest.mark.parametrize(("more", "is_cut"), [("", False), (', "3": tp.SequenceParallel()', True)])
def test_tokens_are_cut_as_the_plan_says(tmp_path: Path, more: str, is_cut: bool) -> None:
    """Tokens are cut between ops where the plan does so."""
    local = source(tmp_path, BOTH + more).sharded(Shards(2))
    assert local.reading.shards.sequence is is_cut
    kinds = {kind for _, kind in exchanges(local.part(1).graph)}
    assert ("reduce_scatter" in kinds) is is_cut


def test_modules_that_styles_do_not_cut(tmp_path: Path) -> None:
    """A style of a module that is no linear layer is named in one line."""
    with pytest.raises(InputError, match=r": 0\.1 is a GELU, and ColwiseParallel .* correct its plan"):
        source(tmp_path, '"*": tp.ColwiseParallel()').sharded(Shards(2))


def test_meshes_for_anything_else(tmp_path: Path) -> None:
    """Code that cuts by other means is refused in one line."""
    more = "from torch.distributed.fsdp import fully_shard; fully_shard(model, mesh=mesh)"
    with pytest.raises(InputError, match=r"not supported: modules that are cut over processes already"):
        source(tmp_path, BOTH, more).whole()
