"""Fixtures of the tests that read models of users."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes an empty directory, with a cache of its own, the working one; modules in it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if Path(vars(module).get("__file__") or "").is_relative_to(tmp_path):
            del sys.modules[name]
