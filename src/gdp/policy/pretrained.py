"""The trained policy that searches ask, read without PyTorch, which takes seconds to import."""

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdp.errors import InputError
from gdp.policy.checkpoint_file import TRAINING, opened, read_config
from gdp.policy.construction import F32, Constructor, check_weights
from gdp.policy.rollout import NUM_FEATURES
from gdp.policy.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from gdp.policy.base import Policy


def shipped() -> str:
    """The file of the policy that comes with gdp."""
    return str(files("gdp.policy") / "default.safetensors")


def read_policy(path: str | Path | None = None) -> "Constructor | Policy":
    """What draws the placements of the policy in the file `path` (None: the one that comes with gdp): a constructor, or
    a policy that has none. InputError for a bad file."""
    path = shipped() if path is None else path
    with opened(path, "numpy") as (header, file):
        weights = _plain_weights(header, file)
    if weights is not None:
        return Constructor.alike(weights)
    from gdp.policy.checkpoint import load_checkpoint  # says what is wrong if it is no policy

    policy = load_checkpoint(path)
    return policy if policy.constructor is None else policy.constructor


def read_constructor(path: str | Path | None = None) -> Constructor:
    """The same; InputError also for a policy that does not draw placements unit by unit."""
    policy = read_policy(path)
    if not isinstance(policy, Constructor):
        raise InputError(f"{path}: holds policy {policy.name!r}, which no search can ask; train policy default")
    return policy


def _plain_weights(header: Any, file: Any) -> F32 | None:
    """[2, K] the weights of a default policy that has no network and nothing left out; None for all else."""
    if header["policy"] != "default":
        return None
    config = read_config(SchedulerConfig, header["config"], "config")
    names = {name for name in file.keys() if not name.startswith(TRAINING)}  # noqa: SIM118, it is no mapping
    if config.network or not config.device_features or names != {"base"}:
        return None
    found = file.get_slice("base")
    if found.get_dtype() != "F32" or found.get_shape() != [2, NUM_FEATURES]:
        return None
    weights: F32 = file.get_tensor("base")
    if not np.isfinite(weights).all():
        return None
    check_weights(weights)
    return weights
