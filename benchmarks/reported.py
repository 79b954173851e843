"""Benchmark `reported`: what users of gdp, and public reports about tools like it, found wrong, asked again.

`reported.yaml` has each report: its command, the answer of then, and the right one by hand. A row is met where today's
answer is right.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import model_configs
from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.rows import Rows
from gdp import files
from gdp.cluster import Cluster

_REPORTS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
LISTS = ("captures", "answers")
_CONFIGS: Mapping[str, Any] = _REPORTS["configs"]
_LONG = 110  # characters of an answer in words
_LIMIT_S = 600.0
_ERROR, _TEXT, _FILE = "error", "text", "file "
_SHEET = "sheet:"  # before the kind of a card
_MODEL = 1  # the word of a command that names the model
_DEFAULTS = {"place": {"--budget": "5s", "--no-cache": ""}, "compare": {"--budget": "5s"}}  # by the command


@dataclass(frozen=True, kw_only=True)
class Report:
    """One fault, the command that shows it, and the answer that is right."""

    report: str
    severity: int  # 5: silently wrong, or the main use is impossible; 2: small
    then: str | float
    asks: tuple[str, ...]  # commands without `gdp`, the last of which answers
    reads: str  # where its JSON has the answer
    over: str = ""  # the answer is that over this
    unit: float = 1.0  # in units of `reads`
    right: str | float | None = None  # a text that is part of the answer, or a figure
    within: float = 0.0  # a share of `right`
    at_least: float | None = None
    at_most: float | None = None

    @property
    def wanted(self) -> str:
        """The right answer in words."""
        if isinstance(self.right, str):
            return f"“{self.right}”"
        if self.right is not None:
            return f"{self.right:g}"
        bounds = [("at least", self.at_least), ("at most", self.at_most)]
        return ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)

    def is_met(self, answer: str | float | None) -> bool:
        """Says whether an answer is right."""
        if isinstance(self.right, str):
            return isinstance(answer, str) and self.right.lower() in answer.lower()
        if not isinstance(answer, int | float):
            return False
        if self.right is not None:
            return abs(answer - self.right) <= self.within * self.right
        return (self.at_least is None or answer >= self.at_least) and (self.at_most is None or answer <= self.at_most)


@dataclass(frozen=True, kw_only=True)
class ReportedBenchmark(Benchmark):
    """Each report of each list, asked by its command in a directory of its own."""

    name = "reported"
    lists: tuple[str, ...] = LISTS

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "list", self.lists, LISTS)

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        measured = []
        for title in self.lists:
            for report in reports(title):
                facts = {"list": title, "report": report.report, "asks": list(report.asks)}
                row = rows.row(f"{title}-{report.report}", facts, lambda report=report: {"answer": ask(report)})  # type: ignore[misc]
                met = report.is_met(row["answer"])
                shown = {"severity": report.severity, "then": report.then, "wanted": report.wanted}
                measured.append(facts | shown | {"now": _shown(row["answer"], report), "met": met})
                say(f"{'right' if met else 'WRONG'}: {report.report}: {measured[-1]['now']} ({report.wanted})")
        return {"reports": measured}


def reports(title: str) -> list[Report]:
    """Returns the reports of a list."""
    return [Report(**{**entry, "asks": tuple(entry["asks"])}) for entry in _REPORTS[title]]


def ask(report: Report) -> str | float | None:
    """Returns today's answer to a report; a text for an error that it does not read."""
    with tempfile.TemporaryDirectory(prefix="gdp-report-") as directory:
        for command in report.asks:
            done = _run(_words(command, Path(directory)), directory)
            if done.returncode not in (0, 3):
                break
        if report.reads == _ERROR or done.returncode not in (0, 3):
            return done.stderr.strip().rpartition("\n")[2]
        if report.reads == _TEXT:
            return done.stdout
        if report.reads.startswith(_FILE):
            return (Path(directory) / report.reads.removeprefix(_FILE)).read_text()
        if report.reads == "notes":
            return done.stderr
        with suppress(KeyError):
            return _figure(report, json.loads(done.stdout))
        return None


def _run(words: list[str], directory: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gdp", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=_LIMIT_S)


def at_sheets(cluster: Cluster) -> Cluster:
    """Returns the cluster at the rates of data sheets, with launches and without hosts: for figures by hand."""
    sheets = [replace(device, issue_ns=0, achieved={}) for device in cluster.devices]
    return replace(cluster, devices=tuple(sheets))


def _words(command: str, directory: Path) -> list[str]:
    """Returns a command's words, the model as `gdp` finds it and settings that it lacks."""
    words = shlex.split(command)
    verb, model = words[0], words[_MODEL]
    name, _, sizes = model.partition("?")
    if model.startswith(":"):
        words[_MODEL] = f"benchmarks.reported_models{model}"
    elif name in _CONFIGS:
        files.write_json(_made(directory / name) / "config.json", _CONFIGS[name])
        words[_MODEL] = f"hf:{name}?{sizes}" if sizes else f"hf:{name}"
    elif name in model_configs.names():
        words[_MODEL] = model_configs.write_model(model, directory)
    for place, word in enumerate(words):
        if word.startswith(_SHEET):
            at_sheets(Cluster.parse(word.removeprefix(_SHEET))).save(directory / "sheet.json")
            words[place] = "sheet.json"
    for option, value in _DEFAULTS.get(verb, {}).items():
        if option not in words:
            words += [option, value] if value else [option]
    return words if verb == "devices" else [*words, "--json"]


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _figure(report: Report, answer: Any) -> str | float | None:
    values = list(_at(answer, report.reads.split(".")))
    if report.over:
        least = min(value for value in _at(answer, report.over.split(".")) if value is not None)
        values = [value / least for value in values if value is not None]
    if all(isinstance(value, int | float) for value in values) and values:
        return float(max(values)) / report.unit
    return json.dumps(values[0] if len(values) == 1 else values)


def _at(value: Any, path: list[str]) -> Iterable[Any]:
    """Yields what a path of keys leads to; `*` is each item of a list."""
    if not path:
        yield from (
            value if isinstance(value, list) and all(isinstance(item, int | float) for item in value) else [value]
        )
    elif path[0] == "*":
        for item in value:
            yield from _at(item, path[1:])
    else:
        yield from _at(value[int(path[0])] if isinstance(value, list) else value[path[0]], path[1:])


def _shown(answer: str | float | None, report: Report) -> str:
    if not isinstance(answer, str):
        return "-" if answer is None else f"{answer:.4g}"
    text = re.sub(r"\s+", " ", answer).replace(f"{Path(__file__).parents[1]}/", "")
    if isinstance(report.right, str) and len(text) > _LONG:
        place = max(0, text.lower().find(report.right.lower()) - _LONG // 3)
        text = f"{'… ' if place else ''}{text[place : place + _LONG]} …"
    return text[: 2 * _LONG].replace("|", "\\|")
