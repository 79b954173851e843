"""The command that an answer ends with is taken by `gdp export`, whatever the layout."""

import json
import random
from pathlib import Path

import pytest

from gdp.cli import main
from tests.export.test_shard_exports import LLAMA, SIZES

CODE = """
import torch
from torch import nn

def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), (torch.randn(8, 8, 64),)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

def blocks():
    return nn.Sequential(*(Block() for _ in range(3))), (torch.randn(8, 8, 64),)
"""
BIGCODE = {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], "n_embd": 16, "n_layer": 2}
BIGCODE |= {"n_head": 2, "vocab_size": 32, "n_positions": 64}
MODELS = ("hf:llama?batch=8&sequence=8", "hf:bigcode?batch=8&sequence=8", "mine:encoder", "mine:blocks")


def drawn(seed: int) -> list[str]:
    """Returns a model and a layout of four cards, by chance."""
    chance = random.Random(seed)
    model = chance.choice(MODELS)
    degree, rest = chance.choice([("tensor=2", 2), ("tensor=4", 1), ("context=2", 2), ("tensor=2,context=2", 1)])
    if chance.random() < 0.2:
        return [model, "--inference", "--parallel", "tensor=2"]
    keys = [degree]
    if rest > 1:
        keys.append(
            chance.choice([f"data={rest}", f"data={rest},zero={chance.randint(1, 3)}", f"stages={rest}", "data=1"])
        )
    keys += chance.sample(["microbatches=2", "recompute=blocks", "recompute=selective"], chance.randint(0, 2))
    if "tensor" in degree:
        keys.append(chance.choice(["sequence=on", "sequence=off", "overlap=on", "sequence=off,overlap=on"]))
    if sum(key.startswith("recompute") for key in keys) > 1:
        keys.remove("recompute=blocks")
    return [model, "--parallel", ",".join(keys)]


def check(seed: int, directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs `gdp place`, and the command that it ends with; returns the tool, "" for none."""
    directory.joinpath("mine.py").write_text(CODE)
    for name, config in (("llama", LLAMA | SIZES), ("bigcode", BIGCODE)):
        directory.joinpath(name).mkdir(exist_ok=True)
        directory.joinpath(name, "config.json").write_text(json.dumps(config))
    options = ["--devices", "4xa100-sxm-80g", "--budget", "9sims", "--no-advice", "--out", f"plans{seed}"]
    status = main(["place", *drawn(seed), *options])
    printed = capsys.readouterr()
    assert status in (0, 2), (drawn(seed), printed.err)
    if status:
        return ""
    command = printed.out.rpartition("Next: gdp ")[2].split()
    assert main(command) == 0, (drawn(seed), command, capsys.readouterr().err)
    return command[-1] if command[0] == "export" else ""


def test_the_next_command_of_drawn_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of models with weights that `parallelize_module` cuts and others, in all degrees, some tool is named."""
    monkeypatch.chdir(tmp_path)
    assert {check(seed, tmp_path, capsys) for seed in range(6)} - {""}


@pytest.mark.long
def test_the_next_command_of_many_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As above, of a hundred layouts."""
    monkeypatch.chdir(tmp_path)
    tools = [check(seed, tmp_path, capsys) for seed in range(100)]
    assert {"", "torch-fsdp", "torchtitan"} <= set(tools)
