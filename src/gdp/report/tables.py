"""Formats figures and tables for people."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from gdp.costs.ranges import StepRange
from gdp.notebook import digits, printable


@dataclass(frozen=True, slots=True)
class Printable:
    """A table or sentence whose texts, which may be names in files, do nothing to a terminal; its colours stay."""

    part: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        """Yields the pieces of a line."""
        for segment in console.render(self.part, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def format_ms(time_ns: int | None) -> str:
    """Returns a time in ms with four significant digits: `123.4 ms`; `-` for None."""
    return "-" if time_ns is None else f"{digits(time_ns / 1e6, 4)} ms"


def format_range(time_ns: int, step_range: StepRange | None) -> str:
    """Returns a time with the range that measured steps justify: `1,640 ms (1,476 to 1,952)`."""
    if step_range is None:
        return format_ms(time_ns)
    low, high = (digits(end_ns / 1e6, 3) for end_ns in step_range.of(time_ns))
    return f"{format_ms(time_ns)} ({low} to {high})"


def short(name: str, most: int = 120) -> str:
    """Shortens `name` to at most `most` characters: its beginning and its end."""
    tail = (most - 1) // 3
    return name if len(name) <= most else f"{name[: most - 1 - tail]}…{name[-tail:]}"


def writable(name: str) -> str:
    """Returns `name` with lone surrogates replaced, which cannot be written to a file."""
    return name.encode("utf-8", "replace").decode()


_LEAST_TEXT = 12  # characters of a name in a line
MOST_DEVICES, SHOWN_OF_MANY = 64, 16  # rows of a table: of more devices the first are shown


def least_width(table: Table, console: Console) -> int:
    """Returns the width that the figures and short texts of a table of `new_table` need."""
    for column in table.columns:
        least = (cell_len(str(cell)) for cell in (column.header, *column.cells))
        column.min_width = max(least) if column.no_wrap else min(max(least), _LEAST_TEXT)
    return table.__rich_measure__(console, console.options.update(max_width=1000)).minimum


def new_table(*columns: str, rows: Iterable[Sequence[str]] = ()) -> Table:
    """Returns a table with these headings and rows; `>` in front of a heading sets the column flush right. In a narrow
    terminal text goes on in the next line, so that no name is cut, and no figure."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        is_figure = column.startswith(">")
        table.add_column(
            column.lstrip(">"), justify="right" if is_figure else "left", no_wrap=is_figure, overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table
