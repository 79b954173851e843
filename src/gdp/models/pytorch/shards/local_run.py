"""The forward pass of a rank: functions of cut tensors, with the exchanges that they need.

A cut tensor carries an `AxisCut`. The model's code sees whole sizes, so that all sizes that it computes are whole
ones; each function of PyTorch that gets a cut tensor runs on this rank's part, once sizes among its arguments are those
of the part.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from gdp.models.names import names
from gdp.models.pytorch.shards import parts, products, weights
from gdp.models.pytorch.shards.cuts import PARTIAL, AxisCut, cut_of, cuts_by, cuts_in, mapped, mark, tensors_in
from gdp.models.pytorch.shards.exchanges import _RUNS, RankExchanges

_SIZES = names("shape size numel nelement __len__")
_FACTS = names(  # of a tensor, which its part has too
    """
    dtype device requires_grad is_cuda is_meta ndim dim layout grad_fn is_leaf is_floating_point is_complex
    element_size is_contiguous stride is_mps is_sparse is_nested is_quantized names data_ptr _version _is_view _base
    """
)
_KEEP_SUMS = names(  # linear in a partial sum
    """
    view reshape transpose permute flatten unflatten squeeze unsqueeze contiguous __getitem__ index_select narrow split
    chunk sum mean neg to movedim swapaxes expand clone select
    """
)
_ROWS = names("view reshape flatten unsqueeze to type contiguous __getitem__ index_select repeat_interleave")
_FACTORS = names("mul __mul__ __rmul__ div __truediv__")
_TERMS = names("add __add__ __radd__ sub __sub__ __iadd__ add_")
_FIRST = ("input", "tensors", "tensor", "self")  # names of a first argument
_GENERATOR, _OPTIONS = "_checkpoint_without_reentrant_generator", 5  # and its arguments between function and inputs


class LocalRun(RankExchanges):
    """Runs a forward pass as one rank of several."""

    rules: Mapping[str, parts.Rule] = MappingProxyType({**parts.RULES, **weights.RULES})

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the model's code inside: functions of `torch.nn.functional` as the functions that they call."""
        checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
        with contextlib.ExitStack() as stack:
            for name in checks:
                stack.enter_context(patch.object(nn.functional, name, lambda *tensors: False))
            stack.enter_context(patch.object(checkpoint, _GENERATOR, self._checkpoint(getattr(checkpoint, _GENERATOR))))
            apply = checkpoint.CheckpointFunction.apply
            stack.enter_context(patch.object(checkpoint.CheckpointFunction, "apply", self._reentrant(apply)))
            _RUNS.append(self)
            stack.callback(_RUNS.pop)
            with self:
                yield

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Shares no tensors inside with the code outside: what runs again makes its own."""
        outer, self._once = self._once, {}
        try:
            yield
        finally:
            self._once = outer

    def _again(self, func: Any, args: Sequence[Any]) -> Any:
        """Returns a function of `args` that may run in a backward pass, with copies of them."""
        with cuts_by(self.attribute):
            cuts = [cut_of(each) for each in args]

        def again(*args: Any, **kwargs: Any) -> Any:
            with cuts_by(self.attribute):
                for each, cut in zip(args, cuts, strict=True):
                    if cut is not None:
                        mark(each, cut)
            with contextlib.nullcontext() if self in _RUNS else self.running(), self._apart():
                return func(*args, **kwargs)

        return again

    def _checkpoint(self, original: Any) -> Any:
        def generator(func: Any, *options: Any, **kwargs: Any) -> Any:
            again = self._again(func, options[_OPTIONS:])
            with self._apart():
                yield from original(again, *options, **kwargs)

        return generator

    def _reentrant(self, original: Any) -> Any:
        return lambda func, is_random, *args: original(self._again(func, args), is_random, *args)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self.is_off:
            return func(*args, **(kwargs or {}))
        with cuts_by(self.attribute):
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        name = _name_of(func)
        if kwargs and (name in self.rules or name in _ROWS):
            args, kwargs = _in_place(func, args, kwargs)
        if name in _SIZES:
            cut = cut_of(args[0])
            return func(*args, **kwargs) if cut is None else _whole_size(name, cut.shape, *args[1:], **kwargs)
        cuts = cuts_in((args, kwargs))
        is_product = name in products.NAMES
        if any(cut.is_partial for cut in cuts) and name not in _FACTS:
            if self._keeps_sum(name, args, kwargs):
                return self._of_sum(name, func, args, kwargs)
            args, kwargs = mapped((args, kwargs), self.summed)
            cuts = cuts_in((args, kwargs))
        may_begin = (self.context or self.plan is not None) and (is_product or name == "embedding")
        if name in _FACTS or not (cuts or may_begin):
            result = func(*args, **kwargs)
            if name in _ROWS and self.is_entered(args[0]):
                self.kept(("enter",), result, lambda: result)
            if name == "__getitem__" and isinstance(args[0], nn.Parameter) and isinstance(args[1], Tensor):
                self.kept(("rows",), result, lambda: args[0])
            if name in parts.EXPANDS and result.dim() == args[0].dim():
                self.expanded(result, args[0], tuple(result.shape))
            return result
        if cuts and not is_product and all(cut.num_parts == 1 for cut in cuts):
            args, kwargs = mapped((args, kwargs), self.entered)
            return self.for_parts(cuts, lambda: func(*args, **kwargs))
        return self.rules.get(name, parts.by_broadcast)(self, name, func, args, kwargs)

    def finished(self, output: Any, *, keeps_cuts: bool) -> Any:
        """Returns a result of the model with whole tensors; partial sums are whole in any case."""

        def whole(tensor: Tensor) -> Tensor:
            cut = cut_of(tensor)
            if cut is None or (keeps_cuts and not cut.is_partial):
                return tensor
            return self.refused(tensor, "is a result of the model", is_result=True)

        with cuts_by(self.attribute):
            return torch.utils._pytree.tree_map_only(Tensor, whole, output)

    def _keeps_sum(self, name: str, args: Any, kwargs: Any) -> bool:
        """Returns whether a function may run on partial sums: it is linear in them."""
        cuts = [cut_of(tensor) for tensor in tensors_in((args, kwargs))]
        if name in _TERMS:
            if self._is_biased(name, args):
                return True
            same = len(cuts) == 2 and None not in cuts and cuts[0].shape == cuts[1].shape  # type: ignore[union-attr]
            return same and all(cut is not None and cut.is_partial for cut in cuts)
        first = cut_of(args[0])
        if first is None and name in names("mul __mul__") and len(args) > 1:
            first = cut_of(args[1])
        others = [cut for cut in cuts if cut is not None and cut is not first]
        if first is None or not first.is_partial or others or name not in _KEEP_SUMS | _FACTORS:
            return False
        tensors = list(tensors_in((args, kwargs)))
        summand = next(tensor for tensor in tensors if cut_of(tensor) is first)
        if self.is_summed(summand):
            return False
        if name == "to":  # sums are exchanged in the narrower type
            dtype = next((item for item in (*args[1:], *kwargs.values()) if isinstance(item, torch.dtype)), None)
            return dtype is None or dtype.itemsize <= summand.dtype.itemsize
        return name in _KEEP_SUMS or all(tensor is summand or tensor.shape[-1:] in ((), (1,)) for tensor in tensors)

    def _is_biased(self, name: str, args: Sequence[Any]) -> bool:
        """Returns whether rows of a whole parameter are added to partial results: biases of experts."""
        if name not in names("add add_ __add__ __iadd__") or len(args) != 2 or not isinstance(args[1], Tensor):
            return False
        cut, bias = cut_of(args[0]), args[1]
        is_open = cut is not None and cut.is_partial and not self.is_summed(args[0])
        return is_open and cut_of(bias) is None and self.rows_of(bias) is not None and bias.shape == args[0].shape

    def _of_sum(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        sources = frozenset().union(*(cut.sources for tensor in tensors_in((args, kwargs)) if (cut := cut_of(tensor))))
        enter = self.term if name in _TERMS else self.entered
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor if cut_of(tensor) else enter(tensor))
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            mark(tensor, AxisCut(tuple(tensor.shape), PARTIAL, self.num_ranks, sources=sources))
        return result


def _in_place(func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """Returns arguments as most write them: the first one by its place, and `dim` for NumPy's `axis`."""
    first = next((key for key in _FIRST if key in kwargs), None) if not args else None
    if first is not None:
        args = (kwargs[first],)
        kwargs = {key: value for key, value in kwargs.items() if key != first}
    if "axis" in kwargs and not inspect.isfunction(func):
        kwargs = {"dim" if key == "axis" else key: value for key, value in kwargs.items()}
    return args, kwargs


@functools.cache
def _name_of(func: Any) -> str:
    """Returns the name of a function, a method, or a property."""
    name = str(getattr(func, "__name__", ""))
    return str(func.__self__.__name__) if name == "__get__" else name


def _whole_size(name: str, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    if name == "__len__":
        return shape[0]
    if name in ("numel", "nelement"):
        return math.prod(shape)
    dim = args[0] if args else kwargs.get("dim")
    return torch.Size(shape) if dim is None else shape[dim]
