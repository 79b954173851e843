"""torch.utils.checkpoint: a note on parts that get no gradients."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

NO_GRADIENT = (
    "torch.utils.checkpoint(use_reentrant=True) gets no input that requires a gradient, so the parameters behind it "
    "get none; give it use_reentrant=False"
)


@contextlib.contextmanager
def noting_cut_gradients() -> Iterator[None]:
    """Makes a capture note what PyTorch warns of: a checkpoint without an input that requires a gradient."""
    check = checkpoint.check_backward_validity

    def check_and_note(inputs: Any) -> None:
        recorders = [mode for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "notes")]
        if not recorders:
            check(inputs)
        elif not any(isinstance(item, Tensor) and item.requires_grad for item in inputs):
            recorders[-1].notes[NO_GRADIENT] = None

    with patch.object(checkpoint, "check_backward_validity", check_and_note):
        yield
