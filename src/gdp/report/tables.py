"""Figures and tables as a person reads them."""

import math

from rich import box
from rich.table import Table


def format_ms(time_ns: int | None) -> str:
    """A time in ms with four significant digits: `123.4 ms`; `-` for None."""
    return "-" if time_ns is None else f"{digits(time_ns / 1e6, 4)} ms"


def format_gib(size_bytes: int) -> str:
    """A size in GiB with three significant digits: `1.25 GiB`."""
    return f"{digits(size_bytes / 2**30, 3)} GiB"


def digits(value: float, numdigits: int) -> str:
    """`value` with that many significant digits, whole digits always in full."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(numdigits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


def writable(name: str) -> str:
    """`name` with what is no character replaced: a lone surrogate cannot be written to a file."""
    return name.encode("utf-8", "replace").decode()


def new_table(*columns: str) -> Table:
    """A table with these headings; `>` in front of a heading sets the column flush right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table
