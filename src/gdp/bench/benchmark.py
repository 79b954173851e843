"""Benchmarks in one form: settings go in; figures, and a page that shows them, come out.

settings --measure--> figures --the template pages/NAME.md--> page
"""

import shlex
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from gdp import files
from gdp.bench import figures
from gdp.bench.page import machine, render
from gdp.bench.rows import Rows
from gdp.budget import Budget
from gdp.errors import InputError, suggest

Say = Callable[[str], None]
REPEATED = {"repeated": True}  # metadata of a setting that is given once for each value


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """A benchmark; its fields are its settings."""

    name: ClassVar[str]
    options: ClassVar[Sequence[str] | None] = None  # the settings that the command has; None: all

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, int | float) and not value > 0 and not isinstance(value, bool):
                least = "a factor above 0" if isinstance(value, float) else "at least 1"
                raise InputError(f"bench {self.name}: {setting.name} is {value}; {least} is expected")
            if isinstance(value, Sequence) and not value:
                raise InputError(f"bench {self.name}: no {setting.name}; at least one is expected")

    @abstractmethod
    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        """Returns all figures by name; rows that are kept from before are not made again.

        `say` is called with a line as each row ends. RuntimeError if a plan does not give its figures again.
        """

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
        words = ["gdp bench", self.name]
        for setting in fields(self):
            value, flag = getattr(self, setting.name), f"--{setting.name.replace('_', '-')}"
            is_option = self.options is None or setting.name in self.options
            if not is_option or (value == _default(setting) and setting.name not in ("budget", "seeds")):
                continue
            if isinstance(value, tuple):
                values = value if setting.metadata.get("repeated") else [",".join(value)]
            else:
                values = [f"{value:g}" if isinstance(value, float) else str(value)]
            words += [f"{flag} {shlex.quote(str(text))}" for text in values]
        return " ".join(words)

    def _settings(self) -> dict[str, Any]:
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}


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
            raise InputError(f"bench {bench}: no {kind} {name!r}; {suggest(name, known)}")
    return chosen


def require_seconds(bench: str, budget: Budget, example: str) -> float:
    """Returns the seconds of `budget`. InputError if it counts simulations, or is 0."""
    if not budget.seconds:
        raise InputError(f"bench {bench}: budget is {budget}; a time such as {example} is expected")
    return budget.seconds


def _default(setting: Field[Any]) -> Any:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()
