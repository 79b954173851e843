"""Types of arrays, for annotations."""

from typing import Any

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Content = npt.NDArray[Any]  # of any type
