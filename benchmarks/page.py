"""Pages of benchmarks: Markdown from the templates in `pages/`, with numbers as text, and the machine's description."""

import os
import platform
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, PackageLoader, StrictUndefined

from gdp.simulator.simulate import default_threads


def render(name: str, figures: Mapping[str, Any]) -> str:
    """Returns the page `name`, filled with `figures`."""
    text = _templates().get_template(f"{name}.md").render(figures).strip("\n")
    return "\n\n".join(map(_wrapped, re.split(r"\n{2,}", text))) + "\n"


def _wrapped(block: str) -> str:
    """Returns a paragraph or a list with lines of at most 120 characters, any other block as it is."""
    if block.startswith(("|", "#", "    ", "!")):
        return block
    items = re.split(r"\n(?=- )", block)
    return "\n".join(
        textwrap.fill(
            " ".join(item.split()),
            120,
            subsequent_indent="  " if item.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in items
    )


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("benchmarks", "pages"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {
        "cells": cells,
        "f": number,
        "mean": lambda values: float(np.mean(list(values))),
        "median": lambda values: float(np.median(list(values))),
        "ms": milliseconds,
        "quartiles": lambda values: np.percentile(values, (25, 75)).tolist(),
        "range": spread,
    }
    templates.globals |= {"counted": counted, "header": header}
    return templates


def header(*columns: str | Iterable[str]) -> str:
    """Returns the head of a Markdown table, of names and lists of names; all but the first to the right."""
    names = [name for column in columns for name in ([column] if isinstance(column, str) else column)]
    return f"| {' | '.join(names)} |\n| {' | '.join([':--', *['--:'] * (len(names) - 1)])} |"


def cells(names: Iterable[Any], text_of: Callable[[Any], str]) -> str:
    """Returns neighbouring cells of a Markdown table, one for each of `names`."""
    return " | ".join(map(text_of, names))


def number(value: float | None, spec: str) -> str:
    """Returns `value` formatted by `spec`; `-` for None."""
    return "-" if value is None else format(value, spec)


def counted(count: int, noun: str) -> str:
    """Returns `1 seed`, `3 seeds`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def milliseconds(time_ns: float) -> str:
    """Returns a time in ms with four significant digits: `12.34`, `1234`."""
    text = f"{time_ns / 1e6:#.4g}".rstrip(".")
    return f"{time_ns / 1e6:.0f}" if "e" in text else text


def spread(values: Iterable[float], spec: str) -> str:
    """Returns `lowest to highest`, or one number if both look the same."""
    ordered = sorted(values)
    low, high = format(ordered[0], spec), format(ordered[-1], spec)
    return low if low == high else f"{low} to {high}"


def geometric_mean(ratios: npt.ArrayLike) -> float:
    """Returns exp of the mean logarithm of `ratios`. ValueError when there is none, or one is not above 0."""
    values = np.asarray(ratios, np.float64)
    if not values.size or not (values > 0).all():
        raise ValueError(f"geometric mean of {values.tolist()}; at least one ratio, all above 0, is expected")
    return float(np.exp(np.log(values).mean()))


def machine() -> dict[str, str | int]:
    """Returns the processor, the threads that this process may use, and the versions that decide speed."""
    return {
        "processor": _processor(),
        "num_threads": default_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("gdp-placement", "numba", "numpy")},
    }


def _processor() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
