"""Types of arrays, for annotations, and tables whose columns are alike."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Content = npt.NDArray[Any]  # of any type
_Value = TypeVar("_Value", bound=np.generic)
_Record = TypeVar("_Record", bound=tuple[Any, ...])


def narrow(table: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
    """Returns one column [N, 1] of a table [N, D] that is broadcast from one, else the table itself. Tables of equal
    devices are broadcast: of a million ops one takes 0.5 GB with 64 devices."""
    return table[:, :1] if table.strides[1] == 0 else table


def wide(table: npt.NDArray[_Value], num_columns: int) -> npt.NDArray[_Value]:
    """Returns the table with `num_columns`, broadcast where `table` has one column."""
    return table if table.shape[1] == num_columns else np.broadcast_to(table, (len(table), num_columns))


def filled(table: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
    """Returns the table with all its columns in memory and read-only, as kernels take those that are not narrow."""
    whole = np.ascontiguousarray(table)
    whole.setflags(write=False)
    return whole


def pick(table: npt.NDArray[_Value], columns: Sequence[int] | I64) -> npt.NDArray[_Value]:
    """Returns the table [N, C] of these `columns`, broadcast where `table` [N, D] is."""
    own = narrow(table)
    return wide(own if own.shape[1] < table.shape[1] else np.ascontiguousarray(own[:, columns]), len(columns))


def rows_of(table: npt.NDArray[_Value], rows: npt.NDArray[Any]) -> npt.NDArray[_Value]:
    """Returns the table [M, D] of these `rows` [M], broadcast where `table` [N, D] is."""
    return wide(narrow(table)[rows], table.shape[1])


def running_sums(begins: I64, ends: I64, amounts: npt.NDArray[_Value], length: int) -> npt.NDArray[_Value]:
    """Returns the sums [length] of the `amounts` that are at each position: each from its begin to before its end."""
    change = np.zeros(length + 1, amounts.dtype)
    np.add.at(change, begins, amounts)
    np.add.at(change, ends, np.negative(amounts))
    return np.cumsum(change)[:-1]


def unique(values: npt.ArrayLike) -> Content:
    """Returns the distinct values, ascending. `numpy.unique` has a hash table for them since NumPy 2.3, which takes 60
    times as long for a million integers."""
    ascending = np.sort(np.asarray(values), axis=None)
    is_first = np.ones(len(ascending), np.bool_)
    is_first[1:] = ascending[1:] != ascending[:-1]
    return ascending[is_first]


def scattered(indices: Content | Sequence[int], values: npt.ArrayLike, length: int, rest: int = -1) -> Content:
    """Returns [length] the `values` at `indices`, which may be one value, and `rest` elsewhere."""
    result = np.full(length, rest)
    result[indices] = values
    return result


def mask(indices: Content | Sequence[int], length: int) -> Bool:
    """Returns [length] whether each number is in `indices`."""
    return scattered(indices, True, length, False)


def position_in(order: I64, length: int) -> I64:
    """Returns [length] the position of each number in `order`, -1 of those that are not in it."""
    return scattered(order, np.arange(len(order)), length)


def combined(how: np.ufunc, indices: Content, values: Content, length: int, start: int = 0) -> Content:
    """Returns [length] `start` and the `values` at the index of each, combined: added up, the least or the largest."""
    result = np.full((length, *values.shape[1:]), start, np.result_type(values, np.int64))
    how.at(result, indices, values)
    return result


def by_first(ids: I64) -> I64:
    """Returns numbers [N] that are equal where `ids` [N] are, from 0 in the order in which these first come."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return position_in(np.argsort(first, kind="stable"), len(first))[inverse]


def connected(first: Content, second: Content, count: int) -> I64:
    """Returns the number [count] of the connected part that each vertex is in, of edges from `first` to `second`."""
    from scipy.sparse import coo_array  # half a second, which most commands never need
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(first), np.bool_), (first, second)), shape=(count, count))
    return np.asarray(connected_components(edges, directed=False)[1], np.int64)


def zeros(record: type[_Record], **sizes: int) -> _Record:
    """Returns the named tuple `record` of zeros, with arrays of the types and shapes that its annotations give.
    `Annotated[Any, "int64 [N, D + 1]"]` is an array of N rows and D + 1 columns, where `sizes` has N and D. A field
    that is annotated with another record has one of these."""
    fields = record.__annotations__.values()
    return record(*(_array(form[1], sizes) if (form := get_args(field)) else zeros(field, **sizes) for field in fields))


def _array(form: str, sizes: Mapping[str, int]) -> Content:
    dtype, axes = form.rstrip("]").split(" [")
    terms = [axis.split(" + ") for axis in axes.split(", ")]
    return np.zeros([sum(int(term) if term.isdecimal() else sizes[term] for term in axis) for axis in terms], dtype)
