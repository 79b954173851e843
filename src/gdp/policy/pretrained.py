"""The trained policy that searches ask, read without PyTorch, which takes seconds to import."""

from importlib.resources import files
from pathlib import Path

import numpy as np

from gdp.errors import InputError
from gdp.policy.checkpoint_file import opened
from gdp.policy.construction import Constructor
from gdp.policy.rollout import NUM_FEATURES


def shipped() -> str:
    """The file of the policy that comes with gdp."""
    return str(files("gdp.policy") / "default.safetensors")


def read_constructor(path: str | Path | None = None) -> Constructor:
    """The constructor of the policy in the file `path` (None: the one that comes with gdp).

    Raises InputError for a bad file and for a policy that does not draw placements unit by unit.
    """
    path = shipped() if path is None else path
    with opened(path, "numpy") as (header, file):
        is_plain = header["config"].get("network") is False and header["config"].get("device_features") is True
        if header["policy"] == "default" and is_plain:
            if "base" not in file.keys():  # noqa: SIM118, it is no mapping
                raise InputError("tensor 'base' is missing; the file is damaged, train it again")
            base = file.get_tensor("base")
            if base.shape != (2, NUM_FEATURES) or base.dtype != np.float32 or not np.isfinite(base).all():
                expected = f"finite float32 {(2, NUM_FEATURES)} is expected"
                raise InputError(f"tensor 'base' is {base.dtype} {base.shape}; {expected}, train it again")
            return Constructor.alike(base)
    from gdp.policy.checkpoint import load_checkpoint

    policy = load_checkpoint(path)
    if policy.constructor is None:
        raise InputError(f"{path}: holds policy {policy.name!r}, which no search can ask; train policy default")
    return policy.constructor
