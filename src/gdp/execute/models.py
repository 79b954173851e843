"""From MODEL to something that runs: a model with parameters and inputs, and its captured step."""

import contextlib
import sys
from typing import Literal, cast

import torch

from gdp.capture import capture
from gdp.errors import InputError
from gdp.execute.run import Executable
from gdp.sources import OPTIMIZERS, builder_of


def read_executable(text: str, *, training: bool = True, optimizer: str = "adam", seed: int = 0) -> Executable:
    """The model that MODEL names, with parameters and inputs drawn by `seed` on the CPU, and its captured step.

    InputError as for `sources.read_model`; a `gdp-graph` file has no model.
    """
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer is {optimizer!r}; one of {', '.join(OPTIMIZERS)} is expected")
    build = builder_of(text)
    with contextlib.redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        answer = build()
    model, args, kwargs = answer if len(answer) == 3 else (*answer, {})
    made = capture(model, args, kwargs, name=text, training=training, optimizer=cast(Literal["adam", "sgd"], optimizer))
    return Executable(made, model, args, kwargs)
