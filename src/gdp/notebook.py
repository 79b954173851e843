"""Shows results: figures for a line of text, and tables of static HTML with all text escaped."""

import html
import math
import re
from collections.abc import Sequence

MOST_ROWS = 16  # of a table of devices or kinds
# control characters but tabs and lines, and characters without width, which also turn the direction of what follows
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Returns `text` with characters escaped that do something to a terminal, as names in files may have them."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """Returns a table with a title above it and a note below."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(_short(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    below = f"<p>{html.escape(note)}</p>" if note else ""
    return (
        f"<div><p><b>{html.escape(title)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"{below}</div>"
    )


def milliseconds(time_ns: int | None) -> str:
    """Returns a time in ms with three decimals; a dash for None."""
    return "–" if time_ns is None else f"{time_ns / 1e6:,.3f} ms"


def size(size_bytes: int) -> str:
    """Returns a size with one decimal in the largest unit of 1024 that fits: `44.0 GiB`; bytes in full."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes} bytes"


def format_gib(size_bytes: int) -> str:
    """Returns a size in GiB with three significant digits: `1.25 GiB`."""
    return f"{digits(size_bytes / 2**30, 3)} GiB"


def digits(value: float, numdigits: int) -> str:
    """Returns `value` with `numdigits` significant digits, whole digits always in full."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(numdigits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


def count(number: int, noun: str) -> str:
    """Returns `1 op` or `2,000 ops`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:80]}…{text[-39:]}"
