"""Types of arrays, for annotations, and tables whose columns are alike."""

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Content = npt.NDArray[Any]  # of any type
_Value = TypeVar("_Value", bound=np.generic)


def narrow(table: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
    """Returns one column [N, 1] of a table [N, D] that is broadcast from one, else the table itself.

    Tables of equal devices are broadcast: of a million ops one takes 0.5 GB with 64 devices.
    """
    return table[:, :1] if table.strides[1] == 0 else table


def wide(table: npt.NDArray[_Value], num_columns: int) -> npt.NDArray[_Value]:
    """Returns the table with `num_columns`, broadcast where `table` has one column."""
    return table if table.shape[1] == num_columns else np.broadcast_to(table, (len(table), num_columns))


def filled(table: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
    """Returns the table with all its columns in memory and read-only, as kernels take those that are not narrow."""
    whole = np.ascontiguousarray(table)
    whole.setflags(write=False)
    return whole


def rows_of(table: npt.NDArray[_Value], rows: npt.NDArray[Any]) -> npt.NDArray[_Value]:
    """Returns the table [M, D] of these `rows` [M], broadcast where `table` [N, D] is."""
    return wide(narrow(table)[rows], table.shape[1])
