"""The state of a training run between two updates, and its restoration from a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from gdp.errors import InputError
from gdp.policy.base import Policy
from gdp.policy.checkpoint import check_tensors, config_document, read_checkpoint

ADAM_EPSILON = 1e-5  # not 1e-8: gradients that are 0 but for rounding would move parameters by whole steps
_LISTS = {"tasks.sources": "other graphs or devices", "validation": "other validation graphs"}  # of arguments
_MAX_NAMED = 5  # arguments in a message


class TrainingState:
    """The optimizer and everything else that changes while a policy is trained, besides its parameters."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters(), eps=ADAM_EPSILON)
        names = {parameter: name for name, parameter in policy.named_parameters()}
        self._tensors = {
            "updates": torch.tensor(0),  # done
            "cpu_seconds": torch.tensor(0.0, dtype=torch.float64),
            "best_validation": torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64),
        }
        # Adam makes these in its first step; they are made here, so that there is always the same to store
        for parameter in self.optimizer.param_groups[0]["params"]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
            for name, tensor in self.optimizer.state[parameter].items():
                self._tensors[f"{names[parameter]}/{name}"] = tensor

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns all of it by name; writing to these tensors changes the state."""
        return self._tensors

    @property
    def updates(self) -> int:
        """The number of updates done."""
        return int(self._tensors["updates"])

    @property
    def cpu_hours(self) -> float:
        """CPU hours of all runs."""
        return float(self._tensors["cpu_seconds"]) / 3600

    def count_update(self, cpu_seconds: float) -> None:
        """Counts one more update."""
        self._tensors["updates"] += 1
        self._tensors["cpu_seconds"] += cpu_seconds

    def is_best(self, reward: float) -> bool:
        """Returns whether this is the best validation so far, and keeps it for the next comparison."""
        best = self._tensors["best_validation"]
        if reward <= float(best):
            return False
        best.fill_(reward)
        return True

    def restore(self, path: Path, arguments: Mapping[str, Any], num_updates: int) -> None:
        """Restores state and parameters from a checkpoint file of a run of `num_updates` with the same `arguments`.

        Raises InputError for other arguments, naming them, and for a file without a state to go on from.
        """
        checkpoint = read_checkpoint(path)
        try:
            before = {"policy": checkpoint.policy, "config": checkpoint.config}
            now = {"policy": self.policy.name, "config": config_document(self.policy)}
            check_same({**before, **checkpoint.manifest.get("arguments", {})}, {**now, **arguments})
            checkpoint.fill(self.policy)
            if checkpoint.training:
                check_tensors(checkpoint.training, self._tensors)
                for name, tensor in checkpoint.training.items():
                    self._tensors[name].copy_(tensor)
            elif checkpoint.manifest.get("updates") == num_updates:
                self._tensors["updates"].fill_(num_updates)
                self._tensors["cpu_seconds"].fill_(3600 * checkpoint.manifest["cpu_hours"])
            else:
                raise InputError("holds no state of training to resume; train on from it with --from")
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def check_same(arguments_before: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raises InputError naming the arguments in which a checkpoint's run differs from this one."""
    before, now = _flat(arguments_before), _flat(orjson.loads(orjson.dumps(arguments)))
    names = [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]
    if not names:
        return
    if names[0].startswith(("policy", "config")):
        names = names[:1]  # runs of other policies differ in most arguments
    differences = [text for prefix, text in _LISTS.items() if any(name.startswith(prefix) for name in names)]
    differences += [
        f"{name} = {_short(before.get(name))}, not {_short(now.get(name))}"
        for name in names
        if not name.startswith(tuple(_LISTS))
    ]
    more = [f"{len(differences) - _MAX_NAMED} more"] if len(differences) > _MAX_NAMED else []
    raise InputError(
        f"was trained with {', and '.join(differences[:_MAX_NAMED] + more)}; "
        "resume with the same arguments, or train on from it with --from"
    )


def _flat(value: object, name: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings and lists by their dotted path."""
    if isinstance(value, Mapping) or (isinstance(value, list) and value):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        parts = [_flat(item, f"{name}.{key}" if name else str(key)) for key, item in items]
        return {path: leaf for part in parts for path, leaf in part.items()}
    return {name: value}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:16]}..."
