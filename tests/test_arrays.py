"""Arrays: a faster function has the results of numpy's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gdp.arrays import unique


@given(st.lists(st.integers(-(2**63), 2**63 - 1)) | st.lists(st.text(max_size=3)))
def test_distinct_values_are_those_of_numpy(values: list[int] | list[str]) -> None:
    """Numbers and texts are ascending, each once, and of the type that they had."""
    found, expected = unique(values), np.unique(values)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)
