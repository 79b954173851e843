"""Checkpoint files: a policy's parameters, the manifest of its training, and, until that ends, its state.

    NAME.safetensors    metadata {"gdp": JSON}: format, version, policy, config, manifest
                        tensors: parameters by name; "optimizer/..." the state of training

A file is written under a temporary name and renamed: parameters and state are of the same update, whatever happens.
Readers raise InputError with one line that names the file, what is wrong and the remedy."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import save
from torch import Tensor

from gdp import files
from gdp.errors import InputError
from gdp.policy.checkpoint_file import CHECKPOINT, TRAINING, read_config
from gdp.policy.construction import SchedulerConfig
from gdp.policy.scheduler import Policy, SchedulerPolicy

P = TypeVar("P", bound=Policy)

POLICIES: Mapping[str, tuple[Any, Any]] = MappingProxyType({"default": (SchedulerPolicy, SchedulerConfig)})
"""The class and the configuration of each policy that files hold."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The contents of a checkpoint file."""

    policy: str  # name
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    parameters: Mapping[str, Tensor]
    training: Mapping[str, Tensor]  # empty where training has ended

    def fill(self, policy: Policy) -> None:
        """Gives `policy` the parameters. Raises InputError unless names and shapes are its own and all is finite."""
        expected = policy.state_dict()
        check_tensors(self.parameters, expected)
        policy.load_state_dict(dict(self.parameters))


def new_policy(name: str, *, seed: int = 0, **changes: Any) -> SchedulerPolicy:
    """Returns policy `name` in its default configuration but for `changes`, its parameters drawn by `seed` alone."""
    policy_class, config_class = POLICIES[name]
    policy: SchedulerPolicy = seeded(lambda: policy_class(config_class(**changes)), seed)
    return policy


def save_checkpoint(
    path: str | Path, policy: Policy, manifest: Mapping[str, Any], training: Mapping[str, Tensor] | None = None
) -> None:
    """Writes `policy`, its configuration, `manifest` (of JSON values) and the tensors of `training`, atomically."""
    tensors = dict(policy.state_dict())
    if bad := next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None):
        raise InputError(f"{path}: not written, parameter {bad!r} is not finite; train with a lower learning rate")
    tensors.update({TRAINING + name: tensor for name, tensor in (training or {}).items()})
    header = CHECKPOINT.header(policy=policy.name, config=config_document(policy), manifest=dict(manifest))
    # clones: parameters that share memory are stored one by one
    content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, header)
    files.write_bytes(path, content)


def config_document(policy: Policy) -> dict[str, Any]:
    """Returns all fields of the policy's configuration."""
    return asdict(cast("Any", policy).config)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Reads the file, on the CPU, without checks of the parameters against a policy."""
    with CHECKPOINT.opened(path, "pt") as (header, file):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    return Checkpoint(
        policy=header["policy"],
        config=header["config"],
        manifest=header["manifest"],
        parameters={name: tensor for name, tensor in tensors.items() if not name.startswith(TRAINING)},
        training={name.removeprefix(TRAINING): tensor for name, tensor in tensors.items() if name.startswith(TRAINING)},
    )


def load_checkpoint(path: str | Path) -> SchedulerPolicy:
    """Reads the policy in the file, on the CPU."""
    checkpoint = read_checkpoint(path)
    try:
        if checkpoint.policy not in POLICIES:
            raise InputError(f"policy {checkpoint.policy!r} is unknown; one of {', '.join(POLICIES)} is expected")
        policy_class, config_class = POLICIES[checkpoint.policy]
        config = read_config(config_class, checkpoint.config, "config")
        policy: SchedulerPolicy = seeded(lambda: policy_class(config), 0)
        checkpoint.fill(policy)
        policy.check()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (RuntimeError, ValueError) as error:  # sizes that no layer can have
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: config: {reason[:200]}; the file is damaged, train it again") from None
    return policy


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises InputError unless `tensors` has exactly the tensors `expected`, of these shapes and types, all finite."""
    for name in sorted(expected.keys() - tensors.keys()):
        raise InputError(f"tensor {name!r} is missing; the file is of another gdp or damaged, train it again")
    for name in sorted(tensors.keys() - expected.keys()):
        raise InputError(f"tensor {name!r} is none of the policy's; the file is of another gdp, train it again")
    for name, tensor in tensors.items():
        shape, dtype = tuple(expected[name].shape), expected[name].dtype
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise InputError(
                f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}; {dtype} {shape} is expected, train it again"
            )
        if not _is_finite(tensor):
            raise InputError(f"tensor {name!r} holds values that are not finite; train it again")


def seeded(construct: Callable[[], P], seed: int) -> P:
    """Returns a new policy, whose initial parameters depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):  # layers draw them from PyTorch's own generator
        torch.manual_seed(seed)
        return construct()


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
