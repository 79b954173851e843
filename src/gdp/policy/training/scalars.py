"""TensorBoard's files of a training run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdp.errors import InputError


class Scalars:
    """TensorBoard's files in `directory`, if there is one; values of a killed run after `updates` are dropped."""

    def __init__(self, directory: Path | None, updates: int) -> None:
        self.writer: Any = None
        if directory is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                f"--tensorboard {directory}: tensorboard is not installed; pip install 'gdp-placement[train]'"
            ) from None
        self.writer = SummaryWriter(str(directory), purge_step=updates)

    def __enter__(self) -> "Scalars":
        return self

    def __exit__(self, *_error: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Writes `values` of update number `update`, by name."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, update)
