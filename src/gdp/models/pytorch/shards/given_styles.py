"""The plan of `parallelize_module` in MODEL's own code: which weights it cuts, noted where the code would cut them.

The mesh of the code is a stand-in of one rank: `tensor=T` of the layout says how many there are. So modules stay
whole, and are cut later as the styles say.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import nn

from gdp.errors import InputError

STYLES = "_gdp_styles"  # of a module: those that `parallelize_module` was given for it
_MODULE = "torch.distributed.device_mesh"
_COLUMNS, _ROWS = "ColwiseParallel", "RowwiseParallel"
_OTHERS = ("SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")
_DIMS = {(_COLUMNS, nn.Linear): 0, (_ROWS, nn.Linear): 1, (_COLUMNS, nn.Embedding): 1, (_ROWS, nn.Embedding): 0}
_OF_ONE_RANK: dict[str, Any] = {  # of a mesh
    "ndim": 1,
    "size": lambda mesh, *_dim: 1,
    "get_rank": lambda mesh: 0,
    "get_local_rank": lambda mesh, *_dim: 0,
    "__getitem__": lambda mesh, _names: mesh,
}


@dataclass(frozen=True)
class GivenCuts:
    """The cuts that styles say."""

    dims: dict[str, int]  # by the path of a weight: the dimension that is cut
    gathered: frozenset[str]  # paths of weights whose results are gathered at once
    by_tokens: bool  # tokens are cut between


@contextlib.contextmanager
def styles_noted() -> Iterator[None]:
    """Has `parallelize_module` inside note its styles, on meshes that `init_device_mesh` makes without processes: they
    have one rank, and know sizes alone. The class stays, since code that is imported inside names it."""
    if _MODULE not in sys.modules:
        yield
        return
    with contextlib.ExitStack() as stack:

        def init(*_args: Any, **_options: Any) -> None:
            from torch.distributed.tensor import parallel

            for name in (_COLUMNS, _ROWS, *_OTHERS):
                stack.enter_context(patch.object(getattr(parallel, name), "_apply", _noted))

        stack.enter_context(patch.multiple(sys.modules[_MODULE].DeviceMesh, __init__=init, **_OF_ONE_RANK))
        yield


def _noted(style: Any, module: nn.Module, _mesh: Any) -> nn.Module:
    module.__dict__.setdefault(STYLES, []).append(style)
    return module


def given_cuts(model: Any) -> GivenCuts | None:
    """Returns the cuts that the styles of a model say; None for one without. InputError for a style that cuts no such
    module."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    styled = [(path, module, style) for path, module in modules for style in module.__dict__.get(STYLES, ())]
    if not styled:
        return None
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    dims, gathered, by_tokens = dict[str, int](), set[str](), False
    for path, module, style in styled:
        name = type(style).__name__
        by_tokens |= name == "SequenceParallel" or any(place.is_shard() and place.dim > 0 for place in _layouts(style))
        if name in _OTHERS:
            continue
        dim = next((dim for (cut, kind), dim in _DIMS.items() if cut == name and isinstance(module, kind)), None)
        if dim is None:
            raise InputError(
                f"{path or type(module).__name__} is a {type(module).__name__}, and {name} of parallelize_module cuts "
                "Linear and Embedding; correct its plan"
            )
        for parameter in module.parameters(recurse=False):
            if dim < parameter.dim():
                dims[paths[id(parameter)]] = dim
        if name == _COLUMNS and any(place.is_replicate() for place in style.output_layouts):
            gathered.add(paths[id(module.weight)])
    return GivenCuts(dims, frozenset(gathered), by_tokens)


def _layouts(value: Any) -> Iterator[Any]:
    """Yields the placements of a style."""
    if hasattr(value, "is_replicate"):
        yield value
    elif isinstance(value, (tuple, list, dict)) or hasattr(value, "_apply"):
        members = value if isinstance(value, (tuple, list)) else (value if isinstance(value, dict) else vars(value))
        for each in members.values() if isinstance(members, dict) else members:
            yield from _layouts(each)
