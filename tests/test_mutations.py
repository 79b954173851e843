"""Whatever is in a file, a command reads it or says in a line why not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutation_cases import KINDS, good_files, is_good, run_cases

QUICK = [name for name, kind in KINDS.items() if not kind.needs_model]


@pytest.fixture(scope="module")
def files() -> Iterator[None]:
    """Makes good files of the kinds that need no model."""
    with good_files(with_models=False):
        yield


@pytest.fixture(scope="module")
def all_files() -> Iterator[None]:
    """Makes good files of all kinds."""
    sys.path.append(str(Path(__file__).parent / "models"))
    with good_files(with_models=True):
        yield


@pytest.mark.parametrize("name", QUICK)
def test_changed_files(files: None, name: str) -> None:
    """No traceback, no hang, less than 2 GiB: a few changes of each kind of file, the same every time."""
    assert [result for result in run_cases(name, range(10)) if not is_good(result[1])] == []


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_many_changed_files(all_files: None, name: str) -> None:
    """The same of thousands, models and the user's cache among them."""
    assert [result for result in run_cases(name, range(400)) if not is_good(result[1])] == []
