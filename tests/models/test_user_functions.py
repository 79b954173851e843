"""Functions of the user's: what they print is no answer, however they print it."""

import json
import sys
from pathlib import Path

import pytest

from gdp.cli import main

LOUD = """
import ctypes, os, subprocess, sys
import torch
from torch import nn

def say(where):
    print(f"{where} by print")
    os.write(1, f"{where} by write\\n".encode())
    subprocess.run(["echo", f"{where} by echo"], check=True)
    subprocess.run([sys.executable, "-c", f"print('{where} by child')"], stdout=sys.stdout.fileno(), check=True)
    ctypes.CDLL(None).printf(f"{where} by printf\\n".encode())  # stays in C's buffer if no terminal is there

say("import")

class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        say("forward")
        return self.linear(x)

def net():
    say("function")
    return Loud(), torch.ones(2, 8)
"""
WAYS = ("print", "write", "echo", "child", "printf")


@pytest.fixture(autouse=True)
def _module(workplace: Path) -> None:
    """Writes the models of the tests."""
    (workplace / "loud_model.py").write_text(LOUD)


def test_json_is_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output has one JSON object, whatever a function prints, and in whatever way."""
    commands = (
        ["capture", "loud_model:net", "--out", "graph.json.gz"],
        ["place", "loud_model:net", "--devices", "2xcpu-16core", "--budget", "20sims", "--no-advice"],
        ["run", "loud_model:net", "--plan", "plan.json", "--on", "cpu,cpu", "--steps", "1"],
    )
    for command in commands:
        sys.modules.pop("loud_model", None)
        assert main([*command, "--json"]) == 0, command
        out, err = capfd.readouterr()
        assert isinstance(json.loads(out), dict)
        assert out.count("\n") == 1
        for where in ("import", "function", "forward"):
            for way in WAYS:
                assert f"{where} by {way}\n" in err, (command, where, way)


def test_standard_output_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    """After an error standard output is where it was, and empty."""
    Path("loud_model.py").write_text(LOUD + "\nraise RuntimeError('no')\n")
    assert main(["capture", "loud_model:net", "--out", "graph.json.gz", "--json"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "module loud_model cannot be imported (RuntimeError: no, loud_model.py line 28)" in err.splitlines()[-1]
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("gdp ")


def test_functions_that_change_the_directory() -> None:
    """A function that changes the directory does not move the files that are written."""
    Path("elsewhere").mkdir()
    Path("loud_model.py").write_text(LOUD.replace("def net():", "def net():\n    os.chdir('elsewhere')"))
    command = ["place", "loud_model:net", "--devices", "2xcpu-16core", "--budget", "20sims", "--no-advice"]
    assert main(command) == 0
    assert Path("plan.json").exists()
    assert not list(Path("elsewhere").iterdir())
