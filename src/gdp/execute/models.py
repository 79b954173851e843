"""From a model to something that runs: parameters and inputs, and the captured step."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from gdp.capture import capture
from gdp.capture.step import Loss, OptimizerName
from gdp.cluster import Cluster
from gdp.execute.run import Executable, Run, run_on_threads
from gdp.execute.targets import find_targets
from gdp.graph import Graph
from gdp.plan import Plan
from gdp.sources import builder_of, check_optimizer
from gdp.user_functions import printing_to_stderr


def run(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    on: Sequence[str] | None = None,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    steps: int = 20,
    training: bool = True,
    optimizer: OptimizerName = "adam",
    loss: Loss | None = None,
) -> Run:
    """Execute `plan` of a step of `model(*args, **kwargs)` on this machine: `gdp run` in Python.

    `training`, `optimizer` and `loss` are those of the capture that was placed, `on` says where devices are as in
    `gdp.execute.targets.find_targets`, the others are those of `gdp.execute.run.run_on_threads`, which see for errors.
    The model is left as it is.
    """
    name = type(model).__name__
    made = capture(model, args, kwargs, name=name, training=training, optimizer=optimizer, loss=loss)
    executable = Executable(made, model, tuple(args), dict(kwargs or {}), loss)
    return run_on_threads(executable, plan, find_targets(plan.devices, on), graph=graph, cluster=cluster, steps=steps)


def read_executable(text: str, *, training: bool = True, optimizer: str = "adam", seed: int = 0) -> Executable:
    """The model that MODEL names, with parameters and inputs drawn by `seed` on the CPU, and its captured step.

    InputError as for `sources.read_model`; a `gdp-graph` file has no model.
    """
    check_optimizer(optimizer)
    build = builder_of(text, training=training)
    with printing_to_stderr():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            answer = build()
        model, args, kwargs = answer if len(answer) == 3 else (*answer, {})
        made = capture(model, args, kwargs, name=text, training=training, optimizer=cast(OptimizerName, optimizer))
    return Executable(made, model, args, kwargs)
