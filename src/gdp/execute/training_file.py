"""Training files: all that a training goes on from.

    NAME.safetensors    metadata {"gdp": JSON}: format, version, num_steps, seed
                        tensors: "state/NAME" parameters and buffers, "optimizer/NAME/KEY" optimizer state,
                        "scaler/KEY" that of a GradScaler

A file is written under a temporary name and renamed, so it is whole or absent. Readers raise InputError with one line
that names the file, the problem and the remedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from safetensors.torch import save
from torch import Tensor

from gdp import files
from gdp.errors import InputError
from gdp.execute.optimizer_state import StateByName
from gdp.tensor_file import TensorFormat

SUFFIX = ".safetensors"
_STATE, _OPTIMIZER, _SCALER = "state/", "optimizer/", "scaler/"
_TRAINING = TensorFormat(
    name="gdp-training",
    version=1,
    fields=MappingProxyType({"num_steps": files.is_size, "seed": files.is_size}),
    writer="Placed.save",
    remedy="copy it again or go on from another",
)


@dataclass(frozen=True, eq=False)
class SavedTraining:
    """The state of a training after `num_steps` steps, whatever its layout; tensors are on the CPU."""

    state: Mapping[str, Tensor]  # parameters and buffers by name
    optimizer: StateByName
    scaler: Mapping[str, Tensor]  # of the loss, by key; {} without one
    num_steps: int
    seed: int

    def write(self, path: str | Path) -> None:
        """Writes the file. InputError if its name does not end in .safetensors, or it cannot be written."""
        path = Path(path)
        if path.suffix != SUFFIX:
            raise InputError(f"{path}: a name that ends in {SUFFIX} is expected, such as training{SUFFIX}")
        tensors = {_STATE + name: tensor for name, tensor in self.state.items()}
        tensors |= {
            f"{_OPTIMIZER}{name}/{key}": tensor
            for name, by_key in self.optimizer.items()
            for key, tensor in by_key.items()
        }
        tensors |= {_SCALER + key: tensor for key, tensor in self.scaler.items()}
        content = save(
            {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()},
            _TRAINING.header(num_steps=self.num_steps, seed=self.seed),
        )
        files.write_bytes(path, content)

    @classmethod
    def read(cls, path: str | Path) -> "SavedTraining":
        """Reads the file."""
        with _TRAINING.opened(path, "pt") as (header, file):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        optimizer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(_OPTIMIZER):
                parameter, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
                optimizer.setdefault(parameter, {})[key] = tensor
        state = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items() if name.startswith(_STATE)}
        scaler = {name.removeprefix(_SCALER): item for name, item in tensors.items() if name.startswith(_SCALER)}
        return cls(state, optimizer, scaler, header["num_steps"], header["seed"])
