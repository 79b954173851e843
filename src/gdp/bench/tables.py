"""What the benchmarks share: Markdown tables, means of ratios, and the machine that a figure was made on."""

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version

import numpy as np
import numpy.typing as npt

from gdp.simulate import default_threads


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def geometric_mean(ratios: npt.ArrayLike) -> float:
    """exp of the mean logarithm of `ratios`. ValueError when there is none, or one is not above 0."""
    values = np.asarray(ratios, np.float64)
    if not values.size or not (values > 0).all():
        raise ValueError(f"geometric mean of {values.tolist()}; at least one ratio, all above 0, is expected")
    return float(np.exp(np.log(values).mean()))


def milliseconds(time_ns: float) -> str:
    """Four significant digits: `12.34`, `1234`."""
    text = f"{time_ns / 1e6:#.4g}".rstrip(".")
    return f"{time_ns / 1e6:.0f}" if "e" in text else text


def spread(texts: Sequence[str]) -> str:
    """`low to high`, or the one text if both are the same."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def machine() -> dict[str, str | int]:
    """Processor, threads that this process may use, and the versions that decide speed."""
    return {
        "processor": _processor(),
        "num_threads": default_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("gdp-placement", "numba", "numpy")},
    }


def machine_line() -> str:
    """`machine()` as a sentence."""
    facts = machine()
    return (
        f"{facts['processor']}, {facts['num_threads']} threads, {facts['system']}; "
        f"Python {facts['python']}, Numba {facts['numba']}, NumPy {facts['numpy']}, gdp {facts['gdp-placement']}"
    )


def _processor() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
