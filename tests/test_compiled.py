"""The cache of compiled kernels."""

import importlib.util
import pickle
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
