"""The forward pass of a rank: functions of cut tensors, with the exchanges that they need.

A cut tensor carries an `AxisCut`. The model's code sees whole sizes, so that all sizes that it computes are whole
ones; each function of PyTorch that gets a cut tensor runs on this rank's part, once sizes among its arguments are those
of the part. The place of the cut in a result is found by running the function on whole tensors without content.
A function that cannot run on parts gets whole tensors: correct for any model, and told to the plan.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from gdp.models.names import names
from gdp.models.pytorch.shards import products
from gdp.models.pytorch.shards.collectives import Enter, Gather, Leave, Own, Repeated, Scatter
from gdp.models.pytorch.shards.cuts import PARTIAL, AxisCut, cut_of, mark, part, segments_of
from gdp.models.pytorch.shards.loss import parallel_cross_entropy

SEQUENCE = "tokens"
"""The source of a cut of tokens, in place of weights."""

_SIZES = names("shape size numel nelement __len__")
_FACTS = names(  # of a tensor, which its part has too
    """
    dtype device requires_grad is_cuda is_meta ndim dim layout grad_fn is_leaf is_floating_point is_complex
    element_size is_contiguous stride is_mps is_sparse is_nested is_quantized names data_ptr _version
    """
)
_VIEWS = names("view reshape unflatten flatten view_as reshape_as _unsafe_view ravel")
_EXPANDS = names("expand expand_as broadcast_to")
_SPLITS = names("split split_with_sizes chunk tensor_split unsafe_chunk unsafe_split unbind")
_SAME = names(
    """
    to type float half bfloat16 double contiguous clone detach dropout gelu silu relu sigmoid tanh exp cos sin neg
    softplus requires_grad_ cpu cuda relu_ silu_ dropout_ type_as rsqrt sqrt square abs
    """
)
_ALONG = {  # functions along a dimension: its place among the arguments, and its default
    **dict.fromkeys(names("softmax log_softmax cumsum cumprod logcumsumexp cummax cummin logsumexp unfold"), (1, None)),
    **dict.fromkeys(names("select index_select gather scatter scatter_add index_add index_copy"), (1, None)),
    **dict.fromkeys(names("max min amax amin var std argmax argmin prod any all norm flip median"), (1, None)),
    **dict.fromkeys(names("sort argsort diff"), (1, -1)),
    **dict.fromkeys(names("topk roll renorm kthvalue"), (2, None)),
}
_SUMS = names("sum mean")
_KINDS = 3  # that one layer makes: queries, keys and values
_BY_CHANNEL = names("group_norm batch_norm instance_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d")
_REFUSED = names("as_strided __setitem__ __bool__ item tolist nonzero unique masked_select index_put index_put_")
_KEEP_SUMS = names(  # linear in a partial sum
    """
    view reshape transpose permute flatten unflatten squeeze unsqueeze contiguous __getitem__ index_select narrow split
    chunk sum mean neg to movedim swapaxes expand clone select
    """
)
_FACTORS = names("mul __mul__ __rmul__ div __truediv__")
_TERMS = names("add __add__ __radd__ sub __sub__ __iadd__ add_")


class LocalRun(TorchFunctionMode):
    """Runs a forward pass as one rank of `num_ranks`; `plan` decides on weights, and is None once they are cut."""

    def __init__(self, num_ranks: int, rank: int = 0, *, by_tokens: bool = False, gathered: frozenset[str], plan: Any):
        super().__init__()
        self.num_ranks, self.rank, self.by_tokens = num_ranks, rank, by_tokens
        self.gathered, self.plan = gathered, plan
        self._once: dict[tuple[Any, ...], tuple[Tensor, Any]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the model's code inside: functions of `torch.nn.functional` as the functions that they call."""
        checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
        with contextlib.ExitStack() as stack:
            for name in checks:
                stack.enter_context(patch.object(nn.functional, name, lambda *tensors: False))
            with self:
                yield

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _SIZES:
            cut = cut_of(args[0])
            return func(*args, **kwargs) if cut is None else _whole_size(name, cut.shape, *args[1:], **kwargs)
        cuts = _cuts((args, kwargs))
        is_product = name in products.NAMES
        if any(cut.is_partial for cut in cuts) and name not in _FACTS:
            if self._keeps_sum(name, args, kwargs):
                return self._of_sum(name, func, args, kwargs)
            args, kwargs = _mapped((args, kwargs), self.summed)
            cuts = _cuts((args, kwargs))
        if name in _FACTS or not (cuts or (self.plan is not None and (is_product or name == "embedding"))):
            return func(*args, **kwargs)
        if is_product:
            return self._product(name, func, args, kwargs)
        rule = _RULES.get(name)
        if rule is None and name in _ALONG:
            rule = LocalRun._along
        if rule is not None:
            return rule(self, name, func, args, kwargs)
        return self._general(name, func, args, kwargs)

    def finished(self, output: Any, *, keeps_cuts: bool) -> Any:
        """Returns a result of the model with whole tensors; partial sums are whole in any case."""

        def whole(tensor: Tensor) -> Tensor:
            cut = cut_of(tensor)
            if cut is None or (keeps_cuts and not cut.is_partial):
                return tensor
            return self._refused(tensor, "is a result of the model", is_result=True)

        return torch.utils._pytree.tree_map_only(Tensor, whole, output)

    # Exchanges

    def _kept(self, key: tuple[Any, ...], tensor: Tensor, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned the first time for this tensor."""
        key = (*key, id(tensor), tensor._version)
        if key not in self._once:
            self._once[key] = tensor, make()
        return self._once[key][1]

    def entered(self, x: Tensor) -> Tensor:
        """Returns a whole tensor for cut work: the same one for all its readers."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        return self._kept(("enter",), x, lambda: Enter.apply(x, self.num_ranks))

    def summed(self, x: Tensor, *, is_whole: bool = False) -> Tensor:
        """Returns the sum of the partial results of all ranks, with tokens cut; others stay as they are."""
        cut = cut_of(x)
        if cut is None or not cut.is_partial:
            return x
        dim = max(x.dim() - 2, 0)
        if not self.by_tokens or is_whole or x.dim() < 2 or x.shape[dim] % self.num_ranks:
            return self._kept(("sum",), x, lambda: Leave.apply(x, self.num_ranks))
        tokens = AxisCut(cut.shape, dim, self.num_ranks, sources=frozenset({SEQUENCE}))
        return self._kept(("sum",), x, lambda: mark(Scatter.apply(x, dim, self.num_ranks), tokens))

    def whole(self, x: Tensor, *, is_summed: bool = False) -> Tensor:
        """Returns the whole of a cut tensor; `is_summed`: for cut work."""
        cut = cut_of(x)
        if cut is None:
            return x
        if cut.is_partial:
            return self.summed(x, is_whole=True)
        return self._kept(("whole", is_summed), x, lambda: self._gathered(x, cut, is_summed))

    def _gathered(self, x: Tensor, cut: AxisCut, is_summed: bool) -> Tensor:
        if cut.segments:
            pieces = x.split([size // cut.num_parts for size in cut.segments], cut.dim)
            shape = list(cut.shape)
            wholes = []
            for piece, size in zip(pieces, cut.segments, strict=True):
                shape[cut.dim] = size
                wholes.append(self._gathered(piece, AxisCut(tuple(shape), cut.dim, cut.num_parts), is_summed))
            return torch.cat(wholes, cut.dim)
        result: Tensor = Gather.apply(x, cut.dim, cut.outer, self.num_ranks, self.rank, is_summed)
        copies = self.num_ranks // cut.num_parts
        if copies > 1:
            apart = result.unflatten(cut.dim, (cut.num_parts, copies, x.shape[cut.dim]))
            result = apart.select(cut.dim + 1, 0).flatten(cut.dim, cut.dim + 1)
        return result if result.shape[cut.dim] == cut.shape[cut.dim] else result.narrow(cut.dim, 0, cut.shape[cut.dim])

    def own(self, y: Tensor, dim: int, cut: AxisCut) -> Tensor:
        """Returns this rank's part of a whole tensor that meets one with a `cut` at the size of its dimension `dim`."""
        dim %= y.dim()
        if self.plan is not None and (planned := self.plan.cut_operand(y, dim, cut)) is not None:
            return planned
        of_y = AxisCut(tuple(y.shape), dim, cut.num_parts, cut.outer, cut.segments, cut.sources)

        def make() -> Tensor:
            is_even = cut.num_parts == self.num_ranks and not cut.segments and y.shape[dim] % cut.num_parts == 0
            if is_even and y.requires_grad and torch.is_grad_enabled():
                return Own.apply(y, dim, cut.outer, self.num_ranks, self.rank)
            return part(self.entered(y), dim, cut.num_parts, self._own_part(cut), cut.outer, cut.segments)

        return self._kept(("own", dim, cut.outer, cut.num_parts), y, lambda: mark(make(), of_y))

    def _own_part(self, cut: AxisCut) -> int:
        return self.rank * cut.num_parts // self.num_ranks

    def _refused(self, x: Tensor, reason: str, *, is_result: bool = False) -> Tensor:
        """Returns the whole of a tensor that a function cannot have in parts, and tells the plan."""
        cut = cut_of(x)
        if cut is not None and self.plan is not None and not cut.is_partial:
            self.plan.refuse(cut.sources, reason, is_result=is_result)
        return self.whole(x)

    def _on_wholes(self, reason: str, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = _mapped((args, kwargs), lambda tensor: self._refused(tensor, reason))
        return func(*args, **kwargs)

    # Sums

    def _keeps_sum(self, name: str, args: Any, kwargs: Any) -> bool:
        """Returns whether a function may run on partial sums: it is linear in them."""
        cuts = [cut_of(tensor) for tensor in _tensors((args, kwargs))]
        if name in _TERMS:
            same = len(cuts) == 2 and None not in cuts and cuts[0].shape == cuts[1].shape  # type: ignore[union-attr]
            return same and all(cut is not None and cut.is_partial for cut in cuts)
        first = cut_of(args[0])
        if first is None and name in names("mul __mul__") and len(args) > 1:
            first = cut_of(args[1])
        others = [cut for cut in cuts if cut is not None and cut is not first]
        if first is None or not first.is_partial or others or name not in _KEEP_SUMS | _FACTORS:
            return False
        tensors = list(_tensors((args, kwargs)))
        summand = next(tensor for tensor in tensors if cut_of(tensor) is first)
        if ("sum", id(summand), summand._version) in self._once:
            return False
        if name == "to":  # sums are exchanged in the narrower type
            dtype = next((item for item in (*args[1:], *kwargs.values()) if isinstance(item, torch.dtype)), None)
            return dtype is None or dtype.itemsize <= summand.dtype.itemsize
        return name in _KEEP_SUMS or all(tensor is summand or tensor.shape[-1:] in ((), (1,)) for tensor in tensors)

    def _of_sum(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        sources = frozenset().union(*(cut.sources for tensor in _tensors((args, kwargs)) if (cut := cut_of(tensor))))
        args, kwargs = _mapped((args, kwargs), lambda tensor: tensor if cut_of(tensor) else self.entered(tensor))
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            mark(tensor, AxisCut(tuple(tensor.shape), PARTIAL, self.num_ranks, sources=sources))
        return result

    # Functions of cut tensors

    def _general(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function whose operands are broadcast against each other, or that has one."""
        if name.startswith("new_"):
            return func(*args, **kwargs)
        operands = list(_tensors((args, kwargs)))
        if name.endswith("_") and not name.endswith("__") and cut_of(operands[0]) is None:
            return self._on_wholes(f"is written into a whole tensor by {name}", func, args, kwargs)
        lead = max(operands, key=lambda tensor: cut.num_parts if (cut := cut_of(tensor)) else 0)
        cut = cut_of(lead)
        assert cut is not None
        place = len(cut.shape) - cut.dim  # from the right
        clash = self._clash(operands, cut, place)
        if clash:
            return self._on_wholes(clash, func, args, kwargs)

        def local(tensor: Tensor) -> Tensor:
            return tensor if tensor is lead else self._aligned(tensor, cut, place)

        if len(operands) > 1:
            args, kwargs = _mapped((args, kwargs), local)
        return self._run(name, func, args, kwargs, lead)

    def _clash(self, operands: Sequence[Tensor], cut: AxisCut, place: int) -> str:
        """Returns why the operands cannot be cut as one of them is; "" if they can."""
        for tensor in operands:
            other, size = cut_of(tensor), cut.shape[cut.dim]
            if other is not None and not other.is_partial:
                if (len(other.shape) - other.dim, other.outer, other.segments) != (place, cut.outer, cut.segments):
                    return "meets a tensor that is cut along another dimension"
            elif place == 1 and tensor.dim() > 1 and tensor.shape[-1] == size > 1 and SEQUENCE not in cut.sources:
                is_weight = isinstance(tensor, nn.Parameter)
                if not is_weight:
                    return "meets whole activations"
        return ""

    def _aligned(self, y: Tensor, cut: AxisCut, place: int) -> Tensor:
        """Returns an operand as it meets one with this cut, broadcast from the right."""
        other = cut_of(y)
        if other is not None:
            if other.num_parts == cut.num_parts:
                return y
            finer = cut.num_parts // other.num_parts  # heads that several ranks have: each takes its share
            width = y.shape[other.dim] // finer
            own = self._own_part(cut) % finer * width
            return mark(
                y.narrow(other.dim, own, width), AxisCut(other.shape, other.dim, cut.num_parts, sources=other.sources)
            )
        if y.dim() >= place and y.shape[-place] == cut.shape[cut.dim] > 1:
            return self.own(y, -place, cut)
        return self.entered(y)

    def _run(self, name: str, func: Any, args: Any, kwargs: Any, lead: Tensor) -> Any:
        """Runs a function on parts, and marks its results."""
        cut = cut_of(lead)
        assert cut is not None
        shape = lead.shape  # of the part: outside of the mode
        result = func(*args, **kwargs)
        made = list(_tensors(result))
        if not made:
            return result
        if name in _SAME and all(tensor.shape == shape for tensor in made):
            for tensor in made:
                mark(tensor, cut)
            return result
        wholes = list(_tensors(_without_content(func, args, kwargs)))
        for tensor, whole in zip(made, wholes, strict=True):
            places = [dim for dim, size in enumerate(whole.shape) if tensor.shape[dim] != size]
            if len(places) != 1:
                return self._on_wholes(f"loses its cut in {name}", func, args, kwargs)
            dim = places[0]
            is_same = whole.shape[dim] == cut.shape[cut.dim]
            if not is_same and (cut.outer > 1 or cut.segments or tensor.shape[dim] * cut.num_parts != whole.shape[dim]):
                return self._on_wholes(f"is cut in pieces that {name} moves", func, args, kwargs)
            segments = cut.segments if is_same else ()
            mark(tensor, AxisCut(tuple(whole.shape), dim, cut.num_parts, cut.outer, segments, cut.sources))
        return result

    def _view(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, cut = args[0], cut_of(args[0])
        if cut is None or (len(args) > 1 and isinstance(args[1], torch.dtype)):
            return self._general(name, func, args, kwargs)
        shape = tuple(_without_content(func, args, kwargs).shape)
        before, passed = cut.before, 1
        reason = f"is viewed as {list(shape)}, across the cut"
        for dim, size in enumerate(shape):
            if passed <= before < passed * size and before % passed == 0 and not cut.segments:
                outer = before // passed
                width = math.prod(x.shape) // max(1, math.prod(shape[:dim]) * math.prod(shape[dim + 1 :]))
                is_even = width * cut.num_parts == size and size % outer == 0
                is_padded = cut.shape[cut.dim] == size  # a vocabulary
                rest = len(shape) - dim - 1
                is_kinds = size <= _KINDS and outer == 1 and rest and (rest > 1 or cut.num_parts % size)
                if is_kinds and self.plan is not None and self.plan.segment(cut, [cut.shape[cut.dim] // size] * size):
                    before *= size  # queries, keys and values behind each other
                elif is_even or is_padded:
                    local = [*shape[:dim], width if is_even else x.shape[cut.dim], *shape[dim + 1 :]]
                    result = x.view(local) if name == "view" else x.reshape(local)
                    return mark(result, AxisCut(shape, dim, cut.num_parts, outer, (), cut.sources))
                else:
                    heads = size // max(outer, 1)
                    reason = f"has {heads} heads or parts, no multiple of {cut.num_parts}"
                    if self.plan is not None and cut.num_parts % heads == 0:
                        self.plan.repeat(cut.sources, heads)
                    break
            passed *= size
        return self._on_wholes(reason, func, args, kwargs)

    def _expand(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, cut = args[0], cut_of(args[0])
        if cut is None:
            return func(*_mapped(args, self.whole), **kwargs)
        shape = list(_without_content(func, args, kwargs).shape)
        dim = cut.dim + len(shape) - x.dim()
        local = [*shape[:dim], x.shape[cut.dim], *shape[dim + 1 :]]
        return mark(x.expand(local), AxisCut(tuple(shape), dim, cut.num_parts, cut.outer, cut.segments, cut.sources))

    def _split(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, cut = args[0], cut_of(args[0])
        assert cut is not None
        dim = kwargs.get("dim", args[-1] if len(args) == (2 if name == "unbind" else 3) else 0) % x.dim()
        if dim != cut.dim:
            return self._run(name, func, args, kwargs, x)
        wholes = _without_content(func, args, kwargs)
        groups = None if name == "unbind" else self._groups(cut, [piece.shape[dim] for piece in wholes])
        if name == "unbind" and len(wholes) <= _KINDS and self.plan is not None:
            self.plan.segment(cut, [1] * len(wholes))
        if groups is None:
            return self._on_wholes(f"is divided by {name} along the cut", func, args, kwargs)
        pieces = x.split([sum(group) // cut.num_parts for group in groups], dim)
        return tuple(
            mark(piece, _of_segments(tuple(whole.shape), dim, group, cut))
            for piece, whole, group in zip(pieces, wholes, groups, strict=True)
        )

    def _groups(self, cut: AxisCut, sizes: Sequence[int]) -> list[tuple[int, ...]] | None:
        """Returns the segments in each of consecutive pieces of a cut dimension; None if they are cut otherwise."""
        if any(size % cut.num_parts for size in sizes):
            return None
        segments = segments_of(cut)
        if len(segments) == 1 and len(sizes) > 1:
            if self.plan is None or not self.plan.segment(cut, sizes):
                return None
            segments = tuple(sizes)
        groups, rest = [], list(segments)
        for size in sizes:
            group: list[int] = []
            while sum(group) < size and rest:
                group.append(rest.pop(0))
            if sum(group) != size:
                return None
            groups.append(tuple(group))
        return groups

    def _item(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, cut = args[0], cut_of(args[0])
        if cut is None:  # a cut index
            return func(*_mapped(args, lambda tensor: self._refused(tensor, "is an index")), **kwargs)
        if name == "narrow":
            given = {"dim": 0, "start": 0, "length": 0} | dict(zip(("dim", "start", "length"), args[1:], strict=False))
            dim, start, length = map(int, (given | kwargs).values())
            index: tuple[Any, ...] = (*[slice(None)] * (dim % x.dim()), slice(start, start + length))
        else:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
        at = _entry(index, cut.dim, x.dim())
        if at is None or index[at] == slice(None):
            return self._run(name, func, args, kwargs, x)
        entry, size = index[at], cut.shape[cut.dim]
        if isinstance(entry, slice):
            start, stop, step = entry.indices(size)
            if (start, stop, step) == (0, size, 1):
                return self._run(name, func, args, kwargs, x)
            sizes = [width for width in (start, stop - start, size - stop) if width]
            groups = self._groups(cut, sizes) if step == 1 and start < stop else None
            if groups is not None:
                own = slice(start // cut.num_parts, stop // cut.num_parts)
                result = x[(*index[:at], own, *index[at + 1 :])]
                whole = _without_content(torch.Tensor.__getitem__, (x, index), {})
                group = groups[1 if start else 0]
                dim = next(d for d, width in enumerate(whole.shape) if result.shape[d] != width)
                return mark(result, _of_segments(tuple(whole.shape), dim, group, cut))
        elif size <= _KINDS and self.plan is not None:
            self.plan.segment(cut, [1] * size)
        return self._on_wholes("is indexed along the cut", func, args, kwargs)

    def _along(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        cut, (place, default) = cut_of(args[0]), _ALONG[name]
        dim = kwargs.get("dim", args[place] if len(args) > place else default)
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        is_index = name in ("gather", "scatter", "scatter_add", "index_add", "index_copy")
        ndim = args[0].dim()
        if cut is None or is_index or None in dims or cut.dim in [place % ndim for place in dims if type(place) is int]:
            return self._on_wholes(f"is read along the cut by {name}", func, args, kwargs)
        return self._run(name, func, args, kwargs, args[0])

    def _sum(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, cut = args[0], cut_of(args[0])
        assert cut is not None
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dims = (
            range(x.dim())
            if dim is None
            else [d % x.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
        )
        if cut.dim not in dims:
            return self._run(name, func, args, kwargs, x)
        if cut.num_parts != self.num_ranks or cut.shape[cut.dim] % cut.num_parts:
            return self._on_wholes(f"is read along the cut by {name}", func, args, kwargs)
        result = func(*args, **kwargs) / (cut.num_parts if name == "mean" else 1)
        return self.summed(mark(result, AxisCut(tuple(result.shape), PARTIAL, self.num_ranks)), is_whole=True)

    def _norm(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, cut = args[0], cut_of(args[0])
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        if cut is None or cut.dim >= len(cut.shape) - len(shape):
            return self._on_wholes(f"is normalised along the cut by {name}", func, args, kwargs)
        args, kwargs = _mapped((args, kwargs), lambda tensor: tensor if tensor is x else self.entered(tensor))
        return self._run(name, func, args, kwargs, x)

    def _refuse(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        return self._on_wholes(f"is read whole by {name}", func, args, kwargs)

    def _pad(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, cut = args[0], cut_of(args[0])
        if cut is None or cut.dim >= len(cut.shape) - len(args[1]) // 2:
            return self._on_wholes("is padded along the cut", func, args, kwargs)
        return self._run(name, func, args, kwargs, x)

    def _cat(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = list(args[0])
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % tensors[0].dim()
        cuts = [cut_of(tensor) for tensor in tensors]
        lead = next(cut for cut in cuts if cut is not None)
        if lead.dim != dim:
            return self._general(name, func, args, kwargs)
        segments: list[int] = []
        for cut in cuts:
            if cut is None or (cut.dim, cut.num_parts) != (dim, lead.num_parts):
                return self._on_wholes("is joined to whole tensors", func, args, kwargs)
            segments += segments_of(cut)
        shape = list(lead.shape)
        shape[dim] = sum(segments)
        return mark(func(tensors, dim), _of_segments(tuple(shape), dim, tuple(segments), lead))

    def _glu(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        with self:
            first, second = args[0].chunk(2, dim)
            return first * second.sigmoid()

    # Weights

    def _product(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        product = products.read(name, args, kwargs)
        if product is None:
            return self._on_wholes(f"is multiplied by {name}", func, args, kwargs)
        operands = list(product.operands)
        if self.plan is not None:
            operands = self.plan.choose(self, product, operands)
        for at, tensor in enumerate(operands):  # tokens come together where columns are cut
            cut = cut_of(tensor)
            others = [other for place, other in enumerate(map(cut_of, operands)) if other is not None and place != at]
            if cut is not None and SEQUENCE in cut.sources and others:
                operands[at] = gathered = self.whole(tensor, is_summed=True)
                self._kept(("enter",), gathered, lambda gathered=gathered: gathered)  # type: ignore[misc]
        cuts = [cut for cut in map(cut_of, operands) if cut is not None]
        if not cuts:
            return product.call(func, operands)
        lead = max(cuts, key=lambda cut: cut.num_parts)
        letter = next(
            letters[cut.dim] for letters, cut in zip(product.letters, map(cut_of, operands), strict=True) if cut is lead
        )
        is_sum = letter not in product.result
        if not self._agree(product.letters, operands, letter, lead) or (is_sum and lead.num_parts < self.num_ranks):
            cut_operands = [self._refused(tensor, f"is multiplied by {name} with another cut") for tensor in operands]
            return product.call(func, cut_operands)
        for at, (letters, tensor) in enumerate(zip(product.letters, operands, strict=True)):
            cut = cut_of(tensor)
            if letter not in letters:
                operands[at] = self.entered(tensor) if not (is_sum and at == product.bias) else tensor
            elif cut is None:
                operands[at] = self.own(tensor, letters.index(letter), lead)
            elif isinstance(tensor, nn.Parameter) and cut.num_parts < self.num_ranks and tensor.requires_grad:
                operands[at] = Repeated.apply(tensor, cut.num_parts, self.num_ranks, self.rank)
            elif cut.num_parts < lead.num_parts:
                operands[at] = self._aligned(tensor, lead, len(letters) - letters.index(letter))
        sources = frozenset().union(*(cut.sources for cut in cuts))
        if is_sum:
            bias = operands[product.bias] if product.bias is not None else None
            result = product.call(func, operands, with_bias=False)
            result = mark(result, AxisCut(tuple(result.shape), PARTIAL, self.num_ranks, sources=sources))
            if bias is None:
                return result
            total = self.summed(result)
            with self:
                return total + bias
        result = product.call(func, operands)
        dim = product.result.index(letter)
        shape = [*result.shape[:dim], lead.shape[lead.dim], *result.shape[dim + 1 :]]
        mark(result, AxisCut(tuple(shape), dim, lead.num_parts, lead.outer, lead.segments, sources))
        return self.whole(result) if sources & self.gathered else result

    def _agree(self, letters: Sequence[str], operands: Sequence[Tensor], letter: str, lead: AxisCut) -> bool:
        """Returns whether all cuts of operands are those of this letter."""
        for text, cut in zip(letters, map(cut_of, operands), strict=True):
            if cut is None:
                continue
            if text[cut.dim] != letter or (cut.outer, cut.segments) != (lead.outer, lead.segments):
                return False
        return True

    def _attention(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        query, key, value = args[:3] if len(args) > 2 else (kwargs.pop(part) for part in ("query", "key", "value"))
        rest = list(args[3:])
        triple = []
        for tensor in (query, key, value):
            cut = cut_of(tensor)
            is_by_head = cut is None or (cut.dim == len(cut.shape) - 3 and cut.outer == 1 and not cut.segments)
            triple.append(
                tensor if is_by_head else self._refused(tensor, "is cut otherwise than by heads in attention")
            )
        lead = next((cut for cut in map(cut_of, triple) if cut is not None and cut.num_parts == self.num_ranks), None)
        if lead is None:
            return self._on_wholes("has fewer heads than ranks", func, (*triple, *rest), kwargs)
        heads = _whole_shape(triple[0])[-3]
        parts = []
        for tensor in triple:
            cut, count = cut_of(tensor), _whole_shape(tensor)[-3]
            if cut is None and count > 1:
                num_parts = self.num_ranks if count % self.num_ranks == 0 else count
                if self.num_ranks % num_parts:
                    return self._on_wholes("attends in groups that ranks share", func, (*triple, *rest), kwargs)
                tensor = self.own(tensor, -3, AxisCut(tuple(tensor.shape), tensor.dim() - 3, num_parts))
            elif cut is None:
                tensor = self.entered(tensor)
            elif cut.num_parts < self.num_ranks and count == heads:
                tensor = self._aligned(tensor, lead, 3)
            parts.append(tensor)
        lead = cut_of(parts[0])
        assert lead is not None
        rest, kwargs = _mapped((rest, kwargs), lambda tensor: self._aligned(tensor, lead, 3))
        shape = (*_whole_shape(triple[0])[:-1], value.shape[-1])
        sources = frozenset().union(*(cut.sources for cut in map(cut_of, triple) if cut is not None))
        return mark(func(*parts, *rest, **kwargs), AxisCut(shape, len(shape) - 3, self.num_ranks, sources=sources))

    def _embedding(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        table, ids = args[:2]
        if self.plan is not None and cut_of(table) is None:
            table = self.plan.table(self, table)
        cut = cut_of(table)
        if cut is None or cut.dim != 0 or cut_of(ids) is not None or cut.outer > 1:
            if not _cuts((args, kwargs)):
                return func(*args, **kwargs)
            return self._on_wholes("is a table", func, (table, *args[1:]), kwargs)
        rows = table.shape[0]
        first = self.rank * rows
        is_other = (ids < first) | (ids >= first + rows)
        places = (ids - first).masked_fill(is_other, 0)
        padding = args[2] - first if len(args) > 2 and 0 <= args[2] - first < rows else -1
        result = func(table, places, padding).masked_fill(is_other.unsqueeze(-1), 0)
        return mark(result, AxisCut(tuple(result.shape), PARTIAL, self.num_ranks, sources=cut.sources))

    def _cross_entropy(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        logits, target, weight, reduction, ignored, smoothing = [*args, *(None, None, 1, -100, 0.0)[len(args) - 1 :]][
            :6
        ]
        options = {"weight": weight, "reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing}
        options |= kwargs
        cut = cut_of(logits)
        is_plain = options["weight"] is None and not options["label_smoothing"] and not target.is_floating_point()
        is_small = self.plan is not None and cut is not None and self.plan.is_small(cut.sources)
        if cut is None or cut.dim != 1 or len(cut.shape) != 2 or not is_plain or cut_of(target) is not None or is_small:
            return self._on_wholes("is read by a loss", func, args, kwargs)
        return parallel_cross_entropy(
            logits, target, cut.shape[1], self.num_ranks, self.rank, options["reduction"], options["ignore_index"]
        )


_Rule = Callable[[LocalRun, str, Any, Any, Any], Any]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_VIEWS, LocalRun._view),
    **dict.fromkeys(_EXPANDS, LocalRun._expand),
    **dict.fromkeys(_SPLITS, LocalRun._split),
    **dict.fromkeys(_SUMS, LocalRun._sum),
    **dict.fromkeys(_REFUSED | _BY_CHANNEL, LocalRun._refuse),
    **dict.fromkeys(("layer_norm", "rms_norm"), LocalRun._norm),
    **dict.fromkeys(("__getitem__", "narrow"), LocalRun._item),
    **dict.fromkeys(("cat", "concat", "concatenate"), LocalRun._cat),
    "pad": LocalRun._pad,
    "glu": LocalRun._glu,
    "scaled_dot_product_attention": LocalRun._attention,
    "embedding": LocalRun._embedding,
    "cross_entropy_loss": LocalRun._cross_entropy,
}


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


def _whole_shape(tensor: Tensor) -> tuple[int, ...]:
    cut = cut_of(tensor)
    return tuple(tensor.shape) if cut is None else cut.shape


def _of_segments(shape: tuple[int, ...], dim: int, segments: tuple[int, ...], cut: AxisCut) -> AxisCut:
    """Returns the cut of a tensor with these segments; equal ones are counted."""
    if len(set(segments)) == 1:
        return AxisCut(shape, dim, cut.num_parts, len(segments), (), cut.sources)
    return AxisCut(shape, dim, cut.num_parts, 1, segments, cut.sources)


def _entry(index: tuple[Any, ...], dim: int, ndim: int) -> int | None:
    """Returns the place in an index of what selects from a dimension; None if all of it is there."""

    def taken(entry: Any) -> int:
        if entry is None or entry is Ellipsis or isinstance(entry, bool):
            return 0
        return entry.dim() if isinstance(entry, Tensor) and entry.dtype is torch.bool else 1

    room = ndim - sum(map(taken, index))
    passed = 0
    for place, entry in enumerate(index):
        width = room if entry is Ellipsis else taken(entry)
        if passed <= dim < passed + width:
            return None if entry is Ellipsis else place
        passed += width
    return None


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (tuple, list)):
        for one in item:
            yield from _tensors(one)
    elif isinstance(item, dict):
        yield from _tensors(tuple(item.values()))


def _cuts(item: Any) -> list[AxisCut]:
    return [cut for tensor in _tensors(item) if (cut := cut_of(tensor)) is not None]


def _mapped(item: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns nested arguments with other tensors."""
    if isinstance(item, Tensor):
        return change(item)
    if type(item) in (tuple, list):
        return type(item)(_mapped(one, change) for one in item)
    if type(item) is dict:
        return {key: _mapped(one, change) for key, one in item.items()}
    return item


def _without_content(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of a function of whole tensors, which have no content."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(_whole_shape(tensor), dtype=tensor.dtype, device="meta")

    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        args, kwargs = _mapped((args, kwargs), empty)
        return func(*args, **kwargs)
