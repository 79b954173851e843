"""Functions of cut tensors, by kind: what each does with a rank's part, and where the cut is in its result.

The place of the cut is found by running the function on whole tensors without content. A function that cannot run on
parts gets whole tensors: correct for any model, and told to the plan.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from gdp.models.names import names
from gdp.models.pytorch.shards.cuts import (
    PARTIAL,
    SEQUENCE,
    AxisCut,
    cut_of,
    cuts_in,
    divided,
    mapped,
    mark,
    of_segments,
    part,
    path_of,
    segments_of,
    tensors_in,
    whole_shape,
    without_content,
)
from gdp.models.pytorch.shards.exchanges import RankExchanges

_VIEWS = names("view reshape unflatten flatten view_as reshape_as _unsafe_view ravel")
EXPANDS = names("expand expand_as broadcast_to")
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
    "linalg_vector_norm": (2, None),
    **dict.fromkeys(names("sort argsort diff"), (1, -1)),
    **dict.fromkeys(names("topk kthvalue"), (2, -1)),
    **dict.fromkeys(names("roll renorm"), (2, None)),
}
_SUMS = names("sum mean")
_REORDERED = names("apply repeat tile")  # entries of a cut dimension, in a way that is not known
_KINDS = 3  # that one layer makes: queries, keys and values
_BY_CHANNEL = names("group_norm batch_norm instance_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d")
_REFUSED = names("as_strided __bool__ item tolist nonzero unique masked_select") | names(
    # of whole tensors, though their results have the shape of what they read
    """
    masked_scatter index_put rot90 fliplr flipud cdist kron lstm gru rnn_tanh rnn_relu grid_sampler pixel_shuffle
    pixel_unshuffle channel_shuffle im2col col2im stft istft
    """
)
_WRITES = names(
    "__setitem__ index_put_ masked_scatter_ tril_ triu_ index_fill_ index_add_ index_copy_ scatter_ scatter_add_"
)
_OF_MATRICES = names(  # and linalg_*: of the last two dimensions
    "tril triu tril_ triu_ inverse pinverse cholesky cholesky_inverse cholesky_solve matrix_exp matrix_power svd qr"
)
_WHOLE = ("fft_", "upsample_", "avg_pool", "max_pool", "adaptive_", "fractional_", "reflection_pad")


def by_broadcast(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function whose operands are broadcast against each other, or that has one."""
    if name.startswith("new_"):
        return _blank(func, args, kwargs)
    is_of_matrices = name in _OF_MATRICES or name.startswith("linalg_")
    is_across = is_of_matrices and any(cut.dim >= len(cut.shape) - 2 for cut in cuts_in((args, kwargs)))
    if is_across or name.startswith(_WHOLE) or _is_custom(func):
        return _refuse(run, name, func, args, kwargs)
    args, kwargs = _tokens_gathered(run, args, kwargs)
    operands = list(tensors_in((args, kwargs)))
    if name.endswith("_") and not name.endswith("__") and cut_of(operands[0]) is None:
        return run.on_wholes(f"is written into a whole tensor by {name}", func, args, kwargs)
    lead = max(operands, key=lambda tensor: cut.num_parts if (cut := cut_of(tensor)) else 0)
    cut = cut_of(lead)
    assert cut is not None
    place = len(cut.shape) - cut.dim  # from the right
    clash = _clash(run, operands, cut, place)
    if clash:
        return run.on_wholes(clash, func, args, kwargs)

    def local(tensor: Tensor) -> Tensor:
        return tensor if tensor is lead else aligned(run, tensor, cut, place)

    if len(operands) > 1:
        args, kwargs = mapped((args, kwargs), local)
    return on_parts(run, name, func, args, kwargs, lead)


def _is_custom(func: Any) -> bool:
    """Returns whether a function is an operator of a user's or another library's, of which nothing is known."""
    name = str(func) if isinstance(func, (OpOverload, OpOverloadPacket)) else "aten."
    return not name.startswith(("aten.", "prim.", "prims.", "collective.", "context.", "gdp."))


def _blank(func: Any, args: Any, kwargs: Any) -> Any:
    """Makes a tensor of given sizes, cut as the one that it is made like if it has as many there."""
    cut, whole = cut_of(args[0]), without_content(func, args, kwargs)
    if (
        cut is None
        or cut.is_partial
        or len(whole.shape) != len(cut.shape)
        or whole.shape[cut.dim] != cut.shape[cut.dim]
    ):
        return func(*args, **kwargs)
    size = [*whole.shape[: cut.dim], args[0].shape[cut.dim], *whole.shape[cut.dim + 1 :]]
    content = args[2:] if isinstance(args[1], (tuple, list)) else ()
    result = func(args[0], size, *content, **{key: value for key, value in kwargs.items() if key != "size"})
    return mark(result, replace(cut, shape=tuple(whole.shape)))


def _tokens_gathered(run: RankExchanges, args: Any, kwargs: Any) -> Any:
    """Returns arguments whose tokens are whole where they meet tensors that are cut otherwise."""
    by_tokens = [SEQUENCE in cut.sources for cut in cuts_in((args, kwargs))]
    if all(by_tokens) or not any(by_tokens):
        return args, kwargs

    def whole(tensor: Tensor) -> Tensor:
        cut = cut_of(tensor)
        return tensor if cut is None or SEQUENCE not in cut.sources else run.for_cut_work(tensor)

    return mapped((args, kwargs), whole)


def _clash(run: RankExchanges, operands: Sequence[Tensor], cut: AxisCut, place: int) -> str:
    """Returns why the operands cannot be cut as one of them is; "" if they can."""
    for tensor in operands:
        other, size = cut_of(tensor), cut.shape[cut.dim]
        if other is not None and not other.is_partial:
            if other.num_parts > 1 and (len(other.shape) - other.dim, *_pieces(other)) != (place, *_pieces(cut)):
                return "meets a tensor that is cut along another dimension"
        elif place == 1 and tensor.dim() > 1 and tensor.shape[-1] == size > 1 and SEQUENCE not in cut.sources:
            is_weight = isinstance(tensor, nn.Parameter) or run.rows_of(tensor) is not None
            if not is_weight:
                return "meets whole activations"
    return ""


def _pieces(cut: AxisCut) -> tuple[Any, ...]:
    return cut.outer, cut.segments, cut.counts


def aligned(run: RankExchanges, y: Tensor, cut: AxisCut, place: int) -> Tensor:
    """Returns an operand as it meets one with this cut, broadcast from the right."""
    other, is_as_wide = cut_of(y), y.dim() >= place and y.shape[-place] == cut.shape[cut.dim] > 1
    if other is not None:
        if other.num_parts == cut.num_parts or (other.num_parts == 1 and not is_as_wide):
            return y
        if other.num_parts == 1:
            dim = y.dim() - place
            own_part = part(y, dim, cut.num_parts, run.own_part(cut), cut.outer, cut.segments, cut.counts)
            return mark(own_part, replace(cut, shape=other.shape, dim=dim, sources=other.sources))
        finer = cut.num_parts // other.num_parts  # heads that several ranks have: each takes its share
        width = y.shape[other.dim] // finer
        own = run.own_part(cut) % finer * width
        return mark(
            y.narrow(other.dim, own, width), AxisCut(other.shape, other.dim, cut.num_parts, sources=other.sources)
        )
    if is_as_wide:
        return run.own(y, -place, cut)
    return run.entered(y)


def on_parts(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any, lead: Tensor) -> Any:
    """Runs a function on parts, and marks its results."""
    cut = cut_of(lead)
    assert cut is not None
    shape = lead.shape  # of the part: outside of the mode
    result = run.of_part(cut, func, *args, **kwargs)
    made = list(tensors_in(result))
    if not made:
        return result
    if name in _SAME and all(tensor.shape == shape for tensor in made):
        for tensor in made:
            mark(tensor, cut)
        return result
    wholes = list(tensors_in(without_content(func, args, kwargs)))
    for tensor, whole in zip(made, wholes, strict=True):
        places = [dim for dim, size in enumerate(whole.shape) if tensor.shape[dim] != size]
        if len(places) != 1:
            return run.on_wholes(f"loses its cut in {name}", func, args, kwargs)
        dim = places[0]
        is_same = whole.shape[dim] == cut.shape[cut.dim]
        if not is_same and (
            name in _REORDERED or cut.outer > 1 or cut.segments or tensor.shape[dim] * cut.num_parts != whole.shape[dim]
        ):
            return run.on_wholes(f"is cut in pieces that {name} moves", func, args, kwargs)
        segments = cut.segments if is_same else ()
        mark(tensor, replace(cut, shape=tuple(whole.shape), dim=dim, segments=segments))
    return result


def _view(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    x, cut = args[0], cut_of(args[0])
    if cut is None or (len(args) > 1 and isinstance(args[1], torch.dtype)):
        return by_broadcast(run, name, func, args, kwargs)
    shape = tuple(without_content(func, args, kwargs).shape)
    before, passed = cut.before, 1
    reason = f"is viewed as {list(shape)}, across the cut"
    for dim, size in enumerate(shape):
        if passed <= before < passed * size and before % passed == 0 and not cut.segments:
            outer = before // passed
            width = math.prod(x.shape) // max(1, math.prod(shape[:dim]) * math.prod(shape[dim + 1 :]))
            is_even = width * cut.num_parts == size and width % outer == 0
            is_padded = cut.shape[cut.dim] == size  # a vocabulary
            rest = len(shape) - dim - 1
            is_kinds = size <= _KINDS and outer == 1 and rest and (rest > 1 or cut.num_parts % size)
            if is_kinds and run.plan is not None and run.plan.segment(cut, [cut.shape[cut.dim] // size] * size):
                before *= size  # queries, keys and values behind each other
            elif is_even or is_padded:
                local = [*shape[:dim], width if is_even else x.shape[cut.dim], *shape[dim + 1 :]]
                result = x.view(local) if name == "view" else x.reshape(local)
                if (found := run.source(x)) is not None:
                    run.expanded(result, *found)
                return mark(result, AxisCut(shape, dim, cut.num_parts, outer, (), cut.sources))
            else:
                heads = size // max(outer, 1)
                reason = f"has {heads} heads or parts, no multiple of {cut.num_parts}"
                if run.plan is not None and cut.num_parts % heads == 0:
                    run.plan.repeat(cut.sources, heads)
                break
        passed *= size
    return run.on_wholes(reason, func, args, kwargs)


def _expand(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    x, cut = args[0], cut_of(args[0])
    if cut is None:
        as_other = whole_shape([*args, *kwargs.values()][1]) if name == "expand_as" else None
        return func(x, *args[1:], **kwargs) if as_other is None else x.expand(as_other)
    shape = list(without_content(func, args, kwargs).shape)
    dim = cut.dim + len(shape) - x.dim()
    local = [*shape[:dim], x.shape[cut.dim], *shape[dim + 1 :]]
    return run.expanded(mark(x.expand(local), replace(cut, shape=tuple(shape), dim=dim)), x, tuple(shape))


def _split(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    x, cut = args[0], cut_of(args[0])
    assert cut is not None
    dim = kwargs.get("dim", args[-1] if len(args) == (2 if name == "unbind" else 3) else 0) % x.dim()
    if dim != cut.dim:
        return on_parts(run, name, func, args, kwargs, x)
    wholes = without_content(func, args, kwargs)
    groups = None if name == "unbind" else _groups(run, cut, [piece.shape[dim] for piece in wholes])
    if name == "unbind" and len(wholes) <= _KINDS and run.plan is not None:
        run.plan.segment(cut, [1] * len(wholes))
    if groups is None:
        return run.on_wholes(f"is divided by {name} along the cut", func, args, kwargs)
    pieces = x.split([width for width, _ in groups], dim)
    return tuple(
        mark(piece, replace(of_piece, shape=tuple(whole.shape)))
        for piece, whole, (_, of_piece) in zip(pieces, wholes, groups, strict=True)
    )


def _groups(run: RankExchanges, cut: AxisCut, sizes: Sequence[int]) -> list[tuple[int, AxisCut]] | None:
    """Returns what a rank has of each of consecutive pieces of a cut dimension; None if they are cut otherwise.

    Each is a number of columns, and their cut with the shape of all pieces.
    """
    if any(size % cut.num_parts for size in sizes) and not cut.counts:
        return None
    segments = divided(segments_of(cut), sizes)
    if segments != segments_of(cut) and (run.plan is None or cut.counts or not run.plan.segment(cut, segments)):
        return None
    groups, first = [], 0
    rest = list(zip(segments, cut.counts or (cut.num_parts,) * len(segments), strict=True))
    for size in sizes:
        group: list[tuple[int, int]] = []
        while sum(width for width, _ in group) < size and rest:
            group.append(rest.pop(0))
        widths, counts = zip(*group or [(-1, 1)], strict=True)
        if sum(widths) != size:
            return None
        sources = cut.sources if run.plan is None else run.plan.pieces(cut, first, size)
        local = sum(width // count for width, count in group)
        groups.append((local, of_segments(cut.shape, cut.dim, widths, counts, sources)))
        first += size
    return groups


def _item(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    x, cut = args[0], cut_of(args[0])
    if cut is None:  # a cut index
        return func(*mapped(args, lambda tensor: run.refused(tensor, "is an index")), **kwargs)
    if name == "narrow":
        given = {"dim": 0, "start": 0, "length": 0} | dict(zip(("dim", "start", "length"), args[1:], strict=False))
        dim, start, length = map(int, (given | kwargs).values())
        index: tuple[Any, ...] = (*[slice(None)] * (dim % x.dim()), slice(start, start + length))
    else:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
    at = _entry(index, cut.dim, x.dim())
    if at is None or index[at] == slice(None):
        return on_parts(run, name, func, args, kwargs, x)
    entry, size = index[at], cut.shape[cut.dim]
    if isinstance(entry, slice):
        start, stop, step = entry.indices(size)
        is_strided = start < step and stop == size and not cut.counts and size // cut.num_parts % step == 0
        if (start, stop, step) == (0, size, 1) or (step > 1 and is_strided):
            return on_parts(run, name, func, args, kwargs, x)
        sizes = [width for width in (start, stop - start, size - stop) if width]
        groups = _groups(run, cut, sizes) if step == 1 and start < stop else None
        if groups is not None:
            first, (width, of_piece) = sum(local for local, _ in groups[: bool(start)]), groups[bool(start)]
            result = x[(*index[:at], slice(first, first + width), *index[at + 1 :])]
            whole = without_content(torch.Tensor.__getitem__, (x, index), {})
            dim = next((d for d, width in enumerate(whole.shape) if result.shape[d] != width), 0)
            return mark(result, replace(of_piece, shape=tuple(whole.shape), dim=dim))
    elif size <= _KINDS and run.plan is not None:
        run.plan.segment(cut, [1] * size)
    return run.on_wholes("is indexed along the cut", func, args, kwargs)


def _along(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    cut, (place, default) = cut_of(args[0]), _ALONG[name]
    dim = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    is_index = name in ("gather", "scatter", "scatter_add", "index_add", "index_copy")
    ndim = args[0].dim()
    if is_index and len({(c.dim, c.outer) for c in map(cut_of, tensors_in((args, kwargs))) if c}) == 1:
        is_index = any(cut_of(tensor) is None for tensor in tensors_in((args, kwargs)))
    if cut is None or is_index or None in dims or cut.dim in [place % ndim for place in dims if type(place) is int]:
        return run.on_wholes(f"is read along the cut by {name}", func, args, kwargs)
    return on_parts(run, name, func, args, kwargs, args[0])


def _sum(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    x, cut = args[0], cut_of(args[0])
    assert cut is not None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = range(x.dim()) if dim is None else [d % x.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    if cut.dim not in dims:
        return on_parts(run, name, func, args, kwargs, x)
    if cut.num_parts != run.num_ranks or cut.shape[cut.dim] % cut.num_parts:
        return run.on_wholes(f"is read along the cut by {name}", func, args, kwargs)
    if run.plan is not None:
        run.plan.normed.update(map(path_of, cut.sources))
    result = func(*args, **kwargs) / (cut.num_parts if name == "mean" else 1)
    return run.summed(mark(result, AxisCut(tuple(result.shape), PARTIAL, run.num_ranks)), is_whole=True)


def _norm(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    x, cut = args[0], cut_of(args[0])
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if cut is None or cut.dim >= len(cut.shape) - len(shape):
        return run.on_wholes(f"is normalised along the cut by {name}", func, args, kwargs)
    args, kwargs = mapped((args, kwargs), lambda tensor: tensor if tensor is x else run.entered(tensor))
    return on_parts(run, name, func, args, kwargs, x)


def _refuse(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    return run.on_wholes(f"is read whole by {name}", func, args, kwargs)


def _write(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Writes into this rank's part what is written into all of a tensor."""
    x, cut = args[0], cut_of(args[0])
    if cut is None or SEQUENCE not in cut.sources:
        return (_refuse if name in ("__setitem__", "index_put_") else by_broadcast)(run, name, func, args, kwargs)
    if name in ("scatter_", "scatter_add_") and type(args[1]) is int and args[1] % x.dim() != cut.dim:
        cuts = [cut_of(tensor) for tensor in tensors_in((args, kwargs))]
        if all(each is not None and (each.dim, each.outer) == (cut.dim, cut.outer) for each in cuts):
            return on_parts(run, name, func, args, kwargs, x)
    whole = run.whole(x).clone()
    func(whole, *mapped(args[1:], run.whole), **mapped(kwargs, run.whole))
    x.copy_(run.own(whole, cut.dim, cut))
    return None if name == "__setitem__" else x


def _pad(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    x, cut = args[0], cut_of(args[0])
    if cut is None or cut.dim >= len(cut.shape) - len(args[1]) // 2:
        return run.on_wholes("is padded along the cut", func, args, kwargs)
    return on_parts(run, name, func, args, kwargs, x)


def _cat(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [tensor for tensor in args[0] if tensor.numel()] or list(args[0])  # without empty caches
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % max(tensor.dim() for tensor in tensors)
    cuts = [cut_of(tensor) for tensor in tensors]
    lead = next(cut for cut in cuts if cut is not None)
    if lead.dim != dim:
        return by_broadcast(run, name, func, args, kwargs)
    segments, counts = list[int](), list[int]()
    for cut in cuts:
        if cut is None or (cut.dim, cut.num_parts) != (dim, lead.num_parts):
            return run.on_wholes("is joined to whole tensors", func, args, kwargs)
        segments += segments_of(cut)
        counts += cut.counts or (cut.num_parts,) * len(segments_of(cut))
    shape = list(lead.shape)
    shape[dim] = sum(segments)
    cut = of_segments(tuple(shape), dim, tuple(segments), tuple(counts), lead.sources)
    return mark(func(tensors, dim), cut)


def _glu(run: RankExchanges, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    with run:
        first, second = args[0].chunk(2, dim)
        return first * second.sigmoid()


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


Rule = Callable[[RankExchanges, str, Any, Any, Any], Any]
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(EXPANDS, _expand),
    **dict.fromkeys(_SPLITS, _split),
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_REFUSED | _BY_CHANNEL, _refuse),
    **dict.fromkeys(_WRITES, _write),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("__getitem__", "narrow"), _item),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "pad": _pad,
    "glu": _glu,
}
