"""The trained policy of searches, read without PyTorch, which takes seconds to import."""

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdp.arrays import F32
from gdp.policy.checkpoint_file import CHECKPOINT, TRAINING, read_config
from gdp.policy.construction import Constructor, check_weights
from gdp.policy.features import NUM_FEATURES
from gdp.policy.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from gdp.policy.base import Policy


def shipped() -> str:
    """Returns the file of the policy that comes with gdp."""
    return str(files("gdp.policy") / "default.safetensors")


def read_policy(path: str | Path | None = None) -> "Constructor | Policy":
    """Returns the constructor of the policy in the file `path` (None: the one that comes with gdp), or a policy without
    one. Raises InputError for a bad file."""
    path = shipped() if path is None else path
    with CHECKPOINT.opened(path, "numpy") as (header, file):
        weights = _plain_weights(header, file)
    if weights is not None:
        return Constructor.alike(weights)
    from gdp.policy.checkpoint import load_checkpoint  # raises InputError if it is no policy

    policy = load_checkpoint(path)
    return policy if policy.constructor is None else policy.constructor


def _plain_weights(header: Any, file: Any) -> F32 | None:
    """Returns the weights [2, K] of a default policy without a network and with all features, else None."""
    if header["policy"] != "default":
        return None
    config = read_config(SchedulerConfig, header["config"], "config")
    names = {name for name in file.keys() if not name.startswith(TRAINING)}  # noqa: SIM118, it is no mapping
    if config.network or not config.device_features or names != {"base"}:
        return None
    base = file.get_slice("base")
    if base.get_dtype() != "F32" or base.get_shape() != [2, NUM_FEATURES]:
        return None
    weights: F32 = file.get_tensor("base")
    if not np.isfinite(weights).all():
        return None
    check_weights(weights)
    return weights
