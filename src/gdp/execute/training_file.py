"""Training files: all that a training goes on from.

    NAME.safetensors    metadata {"gdp": JSON}: format, version, num_steps, seed
                        tensors: "state/NAME" parameters and buffers, "optimizer/NAME/KEY" optimizer state

A file is written under a temporary name and renamed, so it is whole or absent. Readers raise InputError with one line
that names the file, the problem and the remedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gdp import files
from gdp.errors import InputError
from gdp.execute.optimizer_state import StateByName

FORMAT, VERSION = "gdp-training", 1
SUFFIX = ".safetensors"
_STATE, _OPTIMIZER = "state/", "optimizer/"
_HEADER_FIELDS = {
    "format": files.is_string,
    "version": files.is_size,
    "num_steps": files.is_size,
    "seed": files.is_size,
}


@dataclass(frozen=True, eq=False)
class SavedTraining:
    """The state of a training after `num_steps` steps, whatever its layout; tensors are on the CPU."""

    state: Mapping[str, Tensor]  # parameters and buffers by name
    optimizer: StateByName
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
        header = {"format": FORMAT, "version": VERSION, "num_steps": self.num_steps, "seed": self.seed}
        content = save(
            {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()},
            {"gdp": orjson.dumps(header).decode()},
        )
        files.write_bytes(path, content)

    @classmethod
    def read(cls, path: str | Path) -> "SavedTraining":
        """Reads the file."""
        if Path(path).is_dir():
            raise InputError(f"{path}: is a directory; name a file")
        try:
            with safe_open(path, framework="pt") as file:
                header = _read_header(file.metadata())
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        except FileNotFoundError:
            raise InputError(f"{path}: no such file; check the path") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
        except SafetensorError:
            raise InputError(
                f"{path}: truncated, or no safetensors file; copy it again or go on from another"
            ) from None
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        optimizer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(_OPTIMIZER):
                parameter, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
                optimizer.setdefault(parameter, {})[key] = tensor
        state = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items() if name.startswith(_STATE)}
        return cls(state, optimizer, header["num_steps"], header["seed"])


def _read_header(metadata: Mapping[str, str] | None) -> Mapping[str, Any]:
    text = (metadata or {}).get("gdp")
    if text is None:
        raise InputError("has no gdp header; name a file that Placed.save wrote")
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InputError("its gdp header is not JSON; copy it again or go on from another") from None
    header = files.require_header(document, FORMAT, VERSION)
    files.require_keys(header, "header", _HEADER_FIELDS, set(_HEADER_FIELDS))
    return header
