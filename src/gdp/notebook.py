"""Tables of static HTML that show results in a notebook, with all text escaped."""

import html
from collections.abc import Sequence


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


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:80]}…{text[-39:]}"
