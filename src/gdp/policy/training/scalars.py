"""TensorBoard's files of a training run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gdp.errors import InputError


@contextmanager
def scalars(directory: Path | None, updates: int) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yields a function that writes values by name of an update to TensorBoard's files in `directory`, if there is one.

    Values of a killed run after `updates` are dropped.
    """
    if directory is None:
        yield lambda update, values: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            f"--tensorboard {directory}: tensorboard is not installed; pip install 'gdp-placement[train]'"
        ) from None
    with SummaryWriter(str(directory), purge_step=updates) as writer:

        def write(update: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, update)

        yield write
