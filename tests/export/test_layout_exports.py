"""`gdp export` of layouts: PyTorch runs its module, Megatron-LM and torchtitan read their options."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from export_models import graph_of

import gdp
from gdp.export.layouts import torch_fsdp
from gdp.export.layouts.cut_step import cut_step
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.search.place import plan_of
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

FOUR = "4xp100-pcie-16g"


def planned(
    layout: str, devices: str = FOUR, *, model: str = "llama", cuts: tuple[int, ...] = ()
) -> tuple[Problem, Plan]:
    """A plan of a layout with 8 samples a micro-batch, layer `cuts` begin the stages of each replica."""
    from dataclasses import replace

    graph, cluster = graph_of(model, True), gdp.Cluster.parse(devices)
    places = np.zeros(graph.num_ops, np.int64)
    if cuts:
        from gdp.export.chains import find_layers

        places = np.searchsorted(cuts, find_layers(Problem.build(graph, cluster)).positions - 1, side="right")
    step = Step.of(graph, Layout.parse(layout), places=places if cuts else None)
    problem, size = Problem.build(step.graph, cluster), len(cuts) + 1
    on = np.arange(step.layout.data * size).reshape(-1, size)
    plan = plan_of(simulate(problem, step.placement(places, on)), 0, "by hand", 0)
    return problem, replace(plan, layout=step.document() | {"batch": 8 * step.layout.num_parts})


def test_pytorch_trains_with_the_module_as_on_one_device(tmp_path: Path) -> None:
    layouts = [
        "data=2",
        "data=2,microbatches=3:1,recompute=layers.1:layers.2",
        "data=2,microbatches=2,zero=1",
        "data=2,microbatches=2,zero=2,recompute=blocks",
        "data=2,microbatches=2,zero=3,recompute=blocks",
    ]
    names = [f"step{number}" for number in range(len(layouts))]
    for name, layout in zip(names, layouts, strict=True):
        problem, plan = planned(layout, "2xp100-pcie-16g", model="tied")
        step = cut_step(problem, plan, torch_fsdp.NAME, has_stages=False)
        assert step.simulation.step_time_ns == plan.step_time_ns
        tmp_path.joinpath(f"{name}.py").write_text(torch_fsdp.write(step))
    here = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            here / "layout_training.py",
            *names,
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(here), *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"{name} equal" for name in names]
