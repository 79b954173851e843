"""Control flow of PyTorch (`torch.cond`, `while_loop`, `scan`, ...), captured as the operators that one run executes.

cond               one branch: that of a known condition, else the one that takes more FLOPs, else more bytes
while_loop         the body once for each turn; once where no known numbers decide on the end
scan, map          the body once for each slice
associative_scan   as PyTorch computes it without torch.compile, by halves"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._higher_order_ops import utils
from torch._higher_order_ops.associative_scan import associative_scan, generic_associative_scan
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gdp.models.pytorch.bytes_accessed import bytes_accessed
from gdp.models.pytorch.flops import count_flops
from gdp.models.pytorch.fused_attention import note, recorders
from gdp.models.pytorch.routine import leaves
from gdp.models.pytorch.traits import traits_of
from gdp.models.unsupported import UnsupportedError

Branch = Callable[..., Any]

COND_NOTE = "torch.cond is captured as the branch that takes more work, of two whose choice depends on content"
LOOP_NOTE = "torch.while_loop is counted as one turn of its body: the number of turns depends on content"


@contextlib.contextmanager
def control_flow_in_python() -> Iterator[None]:
    """Has the functions of control flow call their operators without torch.compile, and scan by halves by default."""
    defaults = tuple("generic" if item == "pointwise" else item for item in associative_scan.__defaults__ or ())
    is_one_function = hasattr(utils, "_hop_compile_and_call")  # that compiles, as in PyTorch 2.13
    uncompiled = (
        patch.object(utils, "_hop_compile_and_call", lambda function, args, more=None: function(*args, **more or {}))
        if is_one_function
        else patch.object(torch, "compile", _uncompiled_operators(torch.compile))
    )
    with uncompiled, patch.object(associative_scan, "__defaults__", defaults):
        yield


def _uncompiled_operators(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `torch.compile`, but for functions of PyTorch's own that call operators of control flow."""

    def chosen(model: Any = None, **options: Any) -> Any:
        is_own = getattr(model, "__module__", "").startswith("torch._higher_order_ops")
        return model if is_own else compile(model, **options)

    return chosen


def run_operator(
    operator: HigherOrderOperator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    inside: contextlib.AbstractContextManager[Any],
) -> Any:
    """Runs an operator that takes functions, these `inside`. UnsupportedError for one that is not known."""
    name = str(operator)
    if (run := _RUNS.get(name)) is not None:
        with inside:
            return run(*args, **kwargs)
    try:
        return operator(*args, **kwargs)
    except NotImplementedError as error:
        if "no rule registered" not in str(error):
            raise
        raise UnsupportedError(
            f"torch.ops.higher_order.{name}; call the function inside, or write it with torch.cond, while_loop or scan"
        ) from error


def _cond(
    condition: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], operands: Sequence[Any] = ()
) -> Any:
    chosen = _known(condition)
    if chosen is None:
        note(COND_NOTE)
        chosen = _work(if_true, operands) >= _work(if_false, operands)
    return (if_true if chosen else if_false)(*operands)


def _while_loop(
    condition: Callable[..., Any], body: Callable[..., Any], carried: Sequence[Any], more: Sequence[Any] = ()
) -> Any:
    carried = tuple(carried)
    for recorder in recorders():
        for tensor in carried:
            recorder.find_constant(tensor)
    while (goes_on := _known(condition(*carried, *more))) is not False:
        carried = tuple(body(*carried, *more))
        if goes_on is None:
            note(LOOP_NOTE)
            break
    return carried


def _scan(
    body: Callable[..., Any], carried: Sequence[Any], slices: Sequence[Tensor], additional_inputs: Sequence[Any] = ()
) -> Any:
    carried, rows = list(carried), []
    for number in range(len(slices[0])):
        made = list(body(*carried, *(item[number] for item in slices), *additional_inputs))
        carried, row = made[: len(carried)], made[len(carried) :]
        rows.append(row)
    return (*carried, *(torch.stack(row) if isinstance(row[0], Tensor) else row[0] for row in zip(*rows, strict=True)))


def _associative_scan(body: Callable[..., Any], slices: Sequence[Tensor], additional_inputs: Sequence[Any] = ()) -> Any:
    run: Callable[..., Any] = generic_associative_scan
    return run(body, slices, additional_inputs=tuple(additional_inputs))


def _known(condition: Any) -> bool | None:
    """Returns a condition that is a number or a constant; None for one that depends on content."""
    if isinstance(condition, FakeTensor):
        condition = condition.constant
    with _disable_current_modes():
        return None if condition is None else bool(condition)


_RUNS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": lambda body, slices, more=(): _scan(body, (), slices, more),
    "associative_scan": _associative_scan,
    "invoke_subgraph": lambda function, _name, *operands: function(*operands),
    "wrap": lambda function, *operands, **options: function(*operands, **options),
}


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs and bytes of operators that are not recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        traits = traits_of(func)
        if not traits.is_view:
            made, written = [tensor for tensor in leaves(result) if tensor is not None], traits.written(args, kwargs)
            read = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
            self.flops += count_flops(func, args, kwargs, made or written)[0]
            self.bytes += bytes_accessed(func, args, read, made, written)
        return result


def _work(branch: Callable[..., Any], operands: Sequence[Any]) -> tuple[int, int]:
    """Returns the FLOPs and bytes of a branch, of which nothing is recorded."""
    tensors = [tensor for tensor in tree_leaves(operands) if isinstance(tensor, FakeTensor)]
    own = [recorder.memories.fake_mode for recorder in recorders()]
    mode = (own or [tensor.fake_mode for tensor in tensors])[0]
    work = _Work()
    with _disable_current_modes(), torch.no_grad(), mode, work:
        branch(*tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, tuple(operands)))
    return work.flops, work.bytes
