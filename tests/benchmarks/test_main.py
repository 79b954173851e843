"""The command line of the benchmarks: options are the settings, and bad input is one line."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command_line
from benchmarks.benchmark import HELP, settings_of


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("search --workloads gnmt-5", "'gnmt-5'"),
        ("search --rows file", "file is no directory; choose another place"),
        ("search --out file", "file is no directory; choose another place"),
        ("search --sedes 3", "No such option: --sedes"),
        ("paper --checkpoints none", "none: no such directory"),
        ("paper --checkpoints directory", "directory: no checkpoint there holds family rnnlm out"),
        ("paper --checkpoints directory --hdp-factor 0", "hdp_factor is 0.0"),
        ("generalization --checkpoints directory --fine-tune-budget fast", "budget is 'fast'"),
        ("trained --checkpoint none --budget 20sims", "budget is 20sims; a time such as 3s is expected"),
        ("trained", "Missing option '--checkpoint'"),
        ("few-measurements --file none.csv", "none.csv: "),
        ("execution-against --against dpd", "execution-against: no arm 'dpd'; did you mean ddp"),
        ("serach", "No such command 'serach'"),
    ],
)
def test_bad_input(
    words: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input is one line on standard error, status 2, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    Path("directory").mkdir()
    Path("file").touch()
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words.split()])
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "")  # signals are left to the tests
    assert command_line.main() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert part in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "file"]


@pytest.mark.parametrize("name", command_line.NAMES)
def test_settings(name: str) -> None:
    """Each default is read from the text that a command line has for it."""
    for setting in settings_of(command_line.benchmark_of(name)):
        if isinstance(setting.default, tuple):
            assert setting.read(setting.text_of(setting.default)) == setting.default


def test_help() -> None:
    """HELP names settings that are there."""
    names = {item.name for name in command_line.NAMES for item in settings_of(command_line.benchmark_of(name))}
    assert set(HELP) <= names
