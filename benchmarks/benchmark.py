"""Benchmarks in one form: settings go in; figures, and a page that shows them, come out.

settings --measure--> figures --the template pages/NAME.md--> page

The settings are the fields of a benchmark, and the options of its command; one that no option can say, such as a
configuration, is for tests.
"""

import shlex
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from benchmarks import figures
from benchmarks.page import machine, render
from benchmarks.rows import Rows
from benchmarks.workloads import workloads
from gdp import files
from gdp.budget import Budget
from gdp.errors import InputError, suggest

Say = Callable[[str], None]
HELP = {
    "ablation": "What each term of the costs brings, too; it takes a quarter of an hour.",
    "against": "Trained beside gdp's plan.",
    "all": "Every row, in place of a sample.",
    "batch": "Samples of a step; of paper: the checkpoint of gdp-batch. Default: gdp's own policy.",
    "budget": "Of each search or training.",
    "card": "The cards that the runs were measured on.",
    "checkpoint": "A trained policy, for all workloads; further ones are compared with it.",
    "checkpoints": "Directory of `gdp train training-set --hold-out FAMILY`.",
    "choices": "What has a device of its own.",
    "counts": "Micro-batches.",
    "devices": "DEVICES each.",
    "drawn": "Directory of `benchmarks.architectures`, of another seed than the graphs trained on.",
    "enough": "Plans that a number moves, after which it is not tried on further problems.",
    "evaluations": "Placements that a run simulates.",
    "file": "CSV of your own candidates, in place of the tables: choice, traits, predicted, measured.",
    "fine_tune_budget": "Training on a workload.",
    "graphs": "Number of drawn graphs.",
    "hdp_factor": "HDP's processor time over that of fine-tuning.",
    "machines": "Sets of devices.",
    "measurements": "Plans that each arm measures.",
    "methods": "Placers.",
    "models": "Workloads, or configs; `all` are thirty.",
    "num_steps": "The first so many, each with its layout and devices.",
    "one_budget": "Training from scratch.",
    "only_devices": "Ops are not measured: what was measured of the devices predicts them.",
    "patience": "Placements in a row that bring nothing, and a run ends.",
    "placements": "Predicted and measured.",
    "placers": "FILE.py:FUNCTION or module:FUNCTION of anybody, and ours.",
    "pretraining": "Updates in simulation, on the other models.",
    "ranges": "Written, with the ranges of predictions that judged steps justify.",
    "repeats": "Steps of each.",
    "runs": "CSV of measured steps, in place of all sources: sizes, ways to be parallel, a time.",
    "sample": "Rows of a file whose models take long to capture.",
    "seeds": "Runs of each workload.",
    "sources": "What was measured.",
    "steps": "Of a measurement.",
    "updates": "Of each training and fine-tuning.",
    "workloads": "WORKLOAD each; of short also WORKLOAD:LAYOUT.",
}
"""The meaning of a setting, by its name."""


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """A benchmark; its fields are its settings."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, int | float) and not value > 0 and not isinstance(value, bool):
                least = "a factor above 0" if isinstance(value, float) else "at least 1"
                raise InputError(f"{self.name}: {setting.name} is {value}; {least} is expected")
            if isinstance(value, Sequence) and not value:
                raise InputError(f"{self.name}: no {setting.name}; at least one is expected")

    @abstractmethod
    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        """Returns all figures by name; rows that are kept from before are not made again.

        `say` is called with a line as each row ends. RuntimeError if a plan does not give its figures again.
        """

    def check_workloads(self) -> None:
        """Raises InputError for an unknown name in `workloads`, before hours of measuring."""
        for name in getattr(self, "workloads", ()):
            workloads.get(name)

    def draw(self, measured: Mapping[str, Any]) -> bytes | None:
        """Returns an SVG file of the figures; None: the page has none."""
        return None

    def run(self, *, out: Path | None = None, rows: Path | None = None, say: Say = lambda _: None) -> dict[str, Any]:
        """Returns the figures as JSON values, with the page as `markdown`.

        `out` is the page's file (`.md`), with its drawing beside it; or a directory for page, drawing, JSON and rows.
        Rows are kept in `rows`, and those found there are not made again.
        """
        is_page = out is not None and out.suffix == ".md"
        page = out if is_page or out is None else out / f"{self.name}.md"
        if page is not None and type(self).draw is not Benchmark.draw:
            figures.require_matplotlib()  # before hours of measuring
        if rows is None and out is not None and not is_page:
            rows = out / "rows"
        with ExitStack() as stack:
            scratch = rows or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gdp-bench-")))
            measured = self.measure(Rows(scratch, keep=rows is not None), say)
        shown = {"command": self.command, "machine": machine(), **self._settings(), **measured}
        drawing = None if page is None else self.draw(measured)
        plot = None if drawing is None or page is None else page.with_suffix(".svg")
        markdown = render(self.name, {**shown, "plot": plot and plot.name})
        document: dict[str, Any] = to_document(shown)
        if page is not None:
            files.write_bytes(page, markdown.encode())
            if not is_page:
                files.write_json(page.with_suffix(".json"), document)
            if plot is not None and drawing is not None:
                files.write_bytes(plot, drawing)
        return {**document, "markdown": markdown}

    @property
    def command(self) -> str:
        """The command line with these settings; defaults are left out, but for budget and seeds."""
        words = ["python -m benchmarks", self.name]
        for setting in settings_of(type(self)):
            value = getattr(self, setting.name)
            if value != setting.default or setting.name in ("budget", "seeds"):
                words.append(f"--{setting.name.replace('_', '-')}")
                words += [] if setting.kind is bool else [shlex.quote(setting.text_of(value))]
        return " ".join(words)

    def _settings(self) -> dict[str, Any]:
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}


@dataclass(frozen=True)
class Setting:
    """A field of a benchmark that an option can say: a number, a text, a path, a budget, or a tuple of some."""

    name: str
    kind: Any  # its type; of a tuple that of an item
    is_tuple: bool
    default: Any  # MISSING: there is none

    def read(self, text: Any) -> Any:
        """Returns the value that an option gives."""
        if self.is_tuple:
            return tuple(self.kind(item.strip()) for item in text.split(","))
        return Budget.parse(text) if self.kind is Budget else text

    def text_of(self, value: Any) -> str:
        """Returns the text that an option takes for `value`."""
        if self.is_tuple:
            return ",".join(map(str, value))
        return f"{value:g}" if isinstance(value, float) else str(value)


def settings_of(benchmark: type[Benchmark]) -> list[Setting]:
    """Returns the settings of a benchmark that its command has."""
    settings, hints = [], get_type_hints(benchmark)
    for item in fields(benchmark):
        kind = hints[item.name]
        is_tuple = get_origin(kind) is tuple
        if is_tuple:
            kind = get_args(kind)[0]
        if isinstance(kind, UnionType):
            (kind,) = set(get_args(kind)) - {NoneType}
        if kind in (bool, int, float, str, Path, Budget):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            settings.append(Setting(item.name, kind, is_tuple, default))
    return settings


def to_document(value: Any) -> Any:
    """Returns figures as JSON values."""
    if hasattr(value, "to_document"):
        return to_document(value.to_document())
    if isinstance(value, Budget | Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return to_document(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_document(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_document(item) for item in value]
    return value


def pick(bench: str, kind: str, names: Iterable[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    """Returns `names`, all that are known for None. InputError for an unknown one."""
    chosen = tuple(known if names is None else names)
    for name in chosen:
        if name not in known:
            raise InputError(f"{bench}: no {kind} {name!r}; {suggest(name, known)}")
    return chosen


def require_seconds(bench: str, budget: Budget, example: str) -> float:
    """Returns the seconds of `budget`. InputError if it counts simulations, or is 0."""
    if not budget.seconds:
        raise InputError(f"{bench}: budget is {budget}; a time such as {example} is expected")
    return budget.seconds
