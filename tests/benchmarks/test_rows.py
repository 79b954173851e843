"""Rows are made once, and never mistaken for those of other settings."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import SEARCH, Rows, code_of
from gdp.errors import InputError


def refuse() -> dict[str, Any]:
    raise AssertionError("made once more")


def test_a_row_is_made_once_and_found_again(tmp_path: Path) -> None:
    """A row is made once and found again."""
    settings = {"budget": 1.5, "sizes": (1, 2)}
    made = Rows(tmp_path).row("a/b c", settings, lambda: {"times": [1, None]})
    assert Rows(tmp_path).row("a/b c", settings, refuse) == made == {"times": [1, None]}
    assert [path.name for path in tmp_path.iterdir()] == ["a_b_c.json"]


def test_a_row_that_failed_is_not_kept(tmp_path: Path) -> None:
    """A row that failed is not kept."""
    with pytest.raises(AssertionError):
        Rows(tmp_path).row("a", {}, refuse)
    assert Rows(tmp_path).row("a", {}, lambda: {"x": 1}) == {"x": 1}


def test_rows_that_are_not_kept_are_made_anew(tmp_path: Path) -> None:
    """Rows that are not kept are made anew."""
    rows = Rows(tmp_path, keep=False)
    assert [rows.row("a", {}, lambda value=value: {"x": value})["x"] for value in (1, 2)] == [1, 2]


@pytest.mark.parametrize("settings", [{"budget": 2}, {}, {"budget": 1, "more": 0}])
def test_a_row_made_with_other_settings_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A row made with other settings is refused."""
    Rows(tmp_path).row("a", {"budget": 1}, lambda: {"x": 1})
    with pytest.raises(InputError, match=r"a\.json: was made with another (budget|more); .* --rows or --out"):
        Rows(tmp_path).row("a", settings, refuse)


def test_a_row_of_other_code_is_refused(tmp_path: Path) -> None:
    """What all rows share is among their settings, and code that differs in a byte has another digest."""
    here = Path(__file__).parents[2]
    assert all((here / room).exists() or (here / "src" / room).exists() for room in SEARCH)
    assert len({code_of("gdp/costs"), code_of("benchmarks/rows.py"), code_of("gdp/costs", "benchmarks/rows.py")}) == 3
    Rows(tmp_path, shared={"code": code_of("gdp/costs")}).row("a", {"budget": 1}, lambda: {"x": 1})
    with pytest.raises(InputError, match="another code"):
        Rows(tmp_path, shared={"code": code_of("gdp/graph")}).row("a", {"budget": 1}, refuse)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "gdp-bench-row", "version": 1}'])
def test_a_damaged_row_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """A damaged row is refused in one line."""
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.json: .*--out") as raised:
        Rows(tmp_path).row("a", {}, refuse)
    assert "\n" not in str(raised.value)
