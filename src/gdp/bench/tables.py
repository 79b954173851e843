"""What the benchmarks share: Markdown tables, means of ratios, verdicts, and the machine that a figure was made on."""

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdp import files
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


def mean_ratio(ratios: Sequence[float | None]) -> dict[str, float | int | None]:
    """Geometric mean of those that are there, and of how many out of how many."""
    there = [ratio for ratio in ratios if ratio is not None]
    return {
        "ratio": geometric_mean(there) if there else None, "num_workloads": len(there), "num_rows": len(ratios),
    }  # fmt: skip


def mean_sentence(
    what: str, mean: Mapping[str, Any], other: str, target: float | None = None, aim: float | None = None
) -> str:
    """The `mean_ratio` of the step times of `what` and `other`, with a verdict if there is a target."""
    if mean["ratio"] is None:
        return f"{what} and {other} have plans that fit on no workload together, so there is no mean ratio."
    over = f"over {counted(mean['num_workloads'], 'workload')}"
    if left_out := mean["num_rows"] - mean["num_workloads"]:
        over += f", without the {left_out} where one of both has no plan that fits"
    judged = "" if target is None else f"; {verdict(mean['ratio'], target, aim)}"
    return f"{what} takes **{mean['ratio']:.3f}x** the step time of {other} ({over}{judged})."


def counted(count: int, noun: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def ratio_text(ratio: float) -> str:
    """Two or three decimals: `0.85`, `0.862`."""
    return f"{ratio:.3f}".removesuffix("0")


def verdict(
    value: float,
    target: float,
    aim: float | None = None,
    *,
    at_least: bool = False,
    text: Callable[[float], str] = ratio_text,
) -> str:
    """Whether `value` is at most, or `at_least`, the target and perhaps the aim."""
    limits = {"target": target} if aim is None else {"target": target, "aim": aim}
    parts = []
    for name, limit in limits.items():
        reached = value >= limit if at_least else value <= limit
        parts.append(f"{name} {text(limit)}: {'reached' if reached else 'missed'}")
    return "; ".join(parts)


def write_figures(out: Path, name: str, figures: Mapping[str, Any], plot: str | None = None) -> None:
    """Write `figures` to NAME.json, their `markdown` to NAME.md, and an SVG `plot` to NAME.svg, all in `out`."""
    files.write_json(out / f"{name}.json", {key: value for key, value in figures.items() if key != "markdown"})
    files.write_bytes(out / f"{name}.md", figures["markdown"].encode())
    if plot is not None:
        files.write_bytes(out / f"{name}.svg", plot.encode())


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
