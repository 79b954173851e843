"""The trained policy of searches, read without PyTorch, which takes seconds to import."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from gdp.arrays import F32
from gdp.policy import style_scorer
from gdp.policy.checkpoint_file import CHECKPOINT, TRAINING, read_config
from gdp.policy.construction import Constructor, SchedulerConfig, check_weights
from gdp.policy.features import NUM_FEATURES
from gdp.policy.style_scorer import StyleScorer


def shipped() -> str:
    """Returns the file of the policy that comes with gdp."""
    return str(files("gdp.policy") / "default.safetensors")


def read_policy(path: str | Path | None = None) -> Constructor:
    """Returns the constructor of the policy in `path` (None: gdp's own). Raises InputError for a bad file."""
    path = shipped() if path is None else path
    with CHECKPOINT.opened(path, "numpy") as (header, file):
        tensors = _plain_tensors(header, file)
    if tensors is not None:
        scorer = StyleScorer.of(tensors) if style_scorer.PREFIX + "out" in tensors else None
        return Constructor.of(tensors["base"], scorer)
    from gdp.policy.checkpoint import load_checkpoint  # raises InputError if it is no policy

    return load_checkpoint(path).constructor


def _plain_tensors(header: Any, file: Any) -> Mapping[str, F32] | None:
    """Returns the parameters of a policy, None for damaged files."""
    if header["policy"] != "default":
        return None
    config = read_config(SchedulerConfig, header["config"], "config")
    expected: dict[str, tuple[int, ...]] = {"base": (2, NUM_FEATURES)}
    if config.style_scorer:
        shapes = style_scorer.shapes(config.style_scorer)
        expected |= {style_scorer.PREFIX + name: shape for name, shape in shapes.items()}
    names = {name for name in file.keys() if not name.startswith(TRAINING)}  # noqa: SIM118, it is no mapping
    if names != expected.keys():
        return None
    tensors: dict[str, F32] = {}
    for name, shape in expected.items():
        part = file.get_slice(name)
        if part.get_dtype() != "F32" or part.get_shape() != list(shape):
            return None
        tensors[name] = file.get_tensor(name)
        if not np.isfinite(tensors[name]).all():
            return None
    check_weights(tensors)
    return tensors
