"""Answers on standard outputs whose encoding lacks characters."""

import io
import json
import sys

import pytest

from gdp.cli import main
from gdp.cli.shared import print_json, print_text


def ascii_output(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, "ascii"))
    return content


@pytest.mark.parametrize("args", [["workloads"], ["devices", "list"], ["devices", "show", "2xp100-pcie-16g"]])
def test_tables_are_ascii_where_the_output_is(monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    """Tables have lines of hyphens for lines of box characters."""
    printed = ascii_output(monkeypatch)
    assert main(args) == 0
    assert b"----" in printed.getvalue()


def test_timelines_and_names_are_ascii_where_the_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks become characters of a similar darkness, one for one; other characters are escaped."""
    printed = ascii_output(monkeypatch)
    print_text("gpu0 ▁▂▃▄▅▆▇█ layer…7 é")
    assert printed.getvalue() == b"gpu0 .:-=+*#@ layer~7 \\xe9\n"


def test_lines_and_bars_are_ascii_on_a_dumb_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names stay as they are, and so does JSON."""
    monkeypatch.setenv("TERM", "dumb")
    print_text("── é █")
    print_json({"name": "█"})
    assert capsys.readouterr().out == '-- é @\n{"name":"█"}\n'


def test_json_stays_json_where_the_output_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JSON document with other characters is escaped as JSON."""
    printed = ascii_output(monkeypatch)
    print_json({"name": "é…\U0001f600"})
    assert json.loads(printed.getvalue()) == {"name": "é…\U0001f600"}
