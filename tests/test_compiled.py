"""The cache of compiled kernels."""

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest
from numba.core.caching import IndexDataCacheFile

KERNEL = """
from gdp.compiled import kernel
@kernel
def doubled(value):
    return 2 * value
"""
INNER = """
from gdp.compiled import inner
@inner
def times(value):
    return {factor} * value
"""
CALLER = """
from gdp.compiled import kernel
from small_inner import times
@kernel
def multiplied(value):
    return times(value)
"""
RENAMED = b"cgdp.simulator.records\nNoSuchRecord\n."  # a pickle that names a class which is not there


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("small_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_cache_of_an_older_gdp_is_compiled_anew(tmp_path: Path) -> None:
    """An index that names a record which is gone is no index; Numba by itself raises AttributeError."""
    source = tmp_path / "small_kernel.py"
    source.write_text(KERNEL)
    assert module_of(source).doubled(2) == 4
    (index,) = (tmp_path / "__pycache__").glob("*.nbi")
    again = module_of(source)
    assert again.doubled(2) == 4
    assert sum(again.doubled.stats.cache_hits.values()) == 1
    index.write_bytes(pickle.dumps(numba.__version__) + RENAMED)
    with pytest.raises(AttributeError):
        IndexDataCacheFile._load_index(module_of(source).doubled._cache._cache_file)
    stale = module_of(source)
    assert stale.doubled(2) == 4
    assert sum(stale.doubled.stats.cache_hits.values()) == 0
    mended = module_of(source)
    assert mended.doubled(3) == 6
    assert sum(mended.doubled.stats.cache_hits.values()) == 1


def test_a_kernel_is_compiled_anew_when_a_function_that_it_calls_has_changed(tmp_path: Path) -> None:
    """Numba looks at the kernel's own file alone, and would run the function of before."""
    source = tmp_path / "small_kernel.py"
    source.write_text(CALLER)
    for factor, expected in ((2, 10), (3, 15), (3, 15)):
        inner_source = tmp_path / f"times{factor}.py"  # Python's own cache takes files of one second and size for one
        inner_source.write_text(INNER.format(factor=factor))
        sys.modules["small_inner"] = module_of(inner_source)
        caller = module_of(source).multiplied
        assert caller(5) == expected
    assert sum(caller.stats.cache_hits.values()) == 1
