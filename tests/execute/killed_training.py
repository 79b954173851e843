"""What the processes of `test_kills` do, each in a directory of its own."""

import os
from pathlib import Path

import torch
from torch import nn

import gdp
from gdp.search.batch_parts import Parts

LAYOUT = "data=2,microbatches=2,zero=1"


def model() -> nn.Module:
    """Returns a model that draws."""
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 8))


def place(path: Path) -> None:
    """Writes the plan of its training step."""

    def part(count: int) -> gdp.Graph:
        return gdp.capture(model(), (torch.zeros(8 // count, 16),), name="Sequential").graph

    layout = gdp.Layout.parse(LAYOUT)
    gdp.place(Parts(part, 8), gdp.Cluster.parse("2xcpu-16core"), parallel=layout, budget="10sims").save(path)


def train(directory: Path, num_steps: int) -> None:
    """Trains on from the file of the last step, and writes each loss down."""
    os.chdir(directory)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    learned = model()
    batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(number)) for number in range(num_steps)]
    plan = gdp.Plan.load("plan.json")
    resume = "training.safetensors" if os.path.exists("training.safetensors") else None
    with gdp.placed(learned, plan, on=["cpu", "cpu"], learning_rate=0.01, resume=resume) as trained:
        while trained.num_steps < num_steps:
            loss = trained(batches[trained.num_steps])
            with open("losses.txt", "a") as lines:
                lines.write(f"{trained.num_steps} {loss.item().hex()}\n")
            trained.save("training.safetensors")
