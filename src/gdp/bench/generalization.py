"""`gdp bench generalization`: the policy on families that it was not trained on, at once and after a minute.

    zero-shot    at most 64 simulations          |  each by the checkpoint in a directory that holds
    fine-tuned   below 50 updates, 60 s          |  the workload's family out (`held_out.py`)
    search       classical placers, then the search without a policy, with fine-tuning's processor time

Each classical placer counts with its best seed, and the best of them is chosen for each workload with hindsight.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdp import workloads
from gdp.bench import methods
from gdp.bench.comparison import (
    BEST_CLASSICAL,
    EXPERT,
    MethodsRow,
    best_baselines,
    classical_table,
    compare,
    mean_cell,
)
from gdp.bench.held_out import HeldOut, checkpoints_in, choose
from gdp.bench.plot import dot_plot
from gdp.bench.runs import WorkloadRuns
from gdp.bench.tables import (
    counted,
    machine,
    machine_line,
    markdown_table,
    mean_sentence,
    milliseconds,
    verdict,
    write_figures,
)
from gdp.budget import Budget
from gdp.errors import InputError

MAX_UPDATES = 49  # of fine-tuning: the GDP paper's "fewer than 50"
TARGET_ZERO_SHOT, AIM_ZERO_SHOT = 1.0, 0.9  # times the best classical placer's step time, geometric mean
TARGET_SHARE, AIM_SHARE = 0.5, 0.75  # of the workloads where zero-shot is at least as good
TARGET_FINE_TUNED, AIM_FINE_TUNED = 1 / 1.16, 1 / 1.5  # times the expert's, over the papers' workloads
LARGEST, TARGET_SECONDS = "gnmt-8", 5.0  # zero-shot, the graph captured

ZERO_SHOT, FINE_TUNED, SEARCH = "zero-shot", "fine-tuned", "search"
_PAIRS = (
    (ZERO_SHOT, BEST_CLASSICAL),
    (FINE_TUNED, BEST_CLASSICAL),
    (SEARCH, BEST_CLASSICAL),
    (ZERO_SHOT, EXPERT),
    (FINE_TUNED, EXPERT),
    (FINE_TUNED, SEARCH),
)

OnRow = Callable[[str], None]


def run(
    *,
    checkpoints: Path,
    names: Sequence[str] | None = None,
    seeds: int = 3,
    fine_tune_budget: Budget,
    out: Path | None,
    on_row: OnRow,
) -> dict[str, Any]:
    """Place each of the workloads `names` (None: all) with `seeds` seeds.

    Returns the figures as a dictionary, with `markdown` made of them. They, a plot, and every run with its plan are
    written to the directory `out` if there is one, and runs that it has from before are not made again. `on_row` is
    called with a line as each workload ends. InputError where a checkpoint is missing, RuntimeError if a plan does not
    give its figures again.
    """
    chosen = workloads.names() if names is None else tuple(names)
    if seeds < 1 or not chosen:
        raise InputError(f"bench generalization: {seeds} seeds and {len(chosen)} workloads; at least one is expected")
    found = checkpoints_in(checkpoints)
    asked = {name: choose(found, name, checkpoints) for name in chosen}
    methods.warm_up()
    rows = []
    with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
        for name in chosen:
            runs = WorkloadRuns(name, out / "runs" if out else Path(scratch), resume=out is not None)
            rows.append(_place(runs, asked[name], fine_tune_budget, seeds))
            on_row(_line(rows[-1]))
    command = f"gdp bench generalization --checkpoints {checkpoints} --seeds {seeds}"
    if str(fine_tune_budget) != "60s":
        command += f" --fine-tune-budget {fine_tune_budget}"
    if names is not None:
        command += f" --workloads {','.join(chosen)}"
    figures: dict[str, Any] = {
        "command": command,
        "machine": machine(),
        "fine_tune_budget": str(fine_tune_budget),
        "seeds": seeds,
        "rows": [row.to_document() for row in rows],
        "checkpoints": {name: _checkpoint_document(checkpoint) for name, checkpoint in asked.items()},
        "means": {
            part: {f"{name} to {other}": compare(some, name, other) for name, other in _PAIRS}
            for part, some in _parts(rows).items()
        },
        "as_good": {part: _as_good(some) for part, some in _parts(rows).items()},
    }
    figures["markdown"] = _markdown(figures, rows, asked)
    if out is not None:
        write_figures(out, "generalization", figures, _plot(rows))
    return figures


def _place(runs: WorkloadRuns, checkpoint: HeldOut, budget: Budget, seeds: int) -> MethodsRow:
    at_once = methods.zero_shot(checkpoint.path)
    trained = methods.fine_tuned(checkpoint.path, budget, max_updates=MAX_UPDATES)
    fine_tuned = tuple(runs.run(trained, seed) for seed in range(seeds))
    search = tuple(runs.run(methods.plain_search(run.cpu_seconds), seed) for seed, run in enumerate(fine_tuned))
    return MethodsRow(
        workload=runs.name,
        cluster=runs.cluster.name,
        num_ops=runs.graph.num_ops,
        lower_bound_ns=runs.lower_bound_ns,
        baselines=best_baselines([runs.run(methods.classical(), seed).baselines for seed in range(seeds)]),
        runs={
            ZERO_SHOT: tuple(runs.run(at_once, seed) for seed in range(seeds)),
            FINE_TUNED: fine_tuned,
            SEARCH: search,
        },
    )


def _parts(rows: Sequence[MethodsRow]) -> dict[str, list[MethodsRow]]:
    """The papers' workloads, the further ones, and all; parts without a workload are left out."""
    papers = [row for row in rows if row.workload in workloads.paper_names()]
    further = [row for row in rows if row not in papers]
    parts = {"the papers'": papers, "further": further, "all": list(rows)}
    return {name: some for name, some in parts.items() if some}


def _as_good(rows: Sequence[MethodsRow]) -> float:
    """Share of the workloads where zero-shot is at least as good as the best classical placer."""
    return sum(_is_as_good(row) for row in rows) / len(rows)


def _is_as_good(row: MethodsRow) -> bool:
    """Where neither has a plan that fits it is not."""
    ratio = row.ratio(ZERO_SHOT, BEST_CLASSICAL)
    return row.times_ns(ZERO_SHOT) is not None and (ratio is None or ratio <= 1.0)


def _checkpoint_document(checkpoint: HeldOut) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "held_out": sorted(checkpoint.families),
        "updates": checkpoint.updates,
        "cpu_hours": checkpoint.cpu_hours,
    }


def _line(row: MethodsRow) -> str:
    parts = [
        f"{name} {row.time_cell(name)} ms, {row.ratio_cell(name, BEST_CLASSICAL)}x the best classical"
        for name in (ZERO_SHOT, FINE_TUNED, SEARCH)
    ]
    return f"{row.workload}: {'; '.join(parts)}"


def _claims(figures: Mapping[str, Any], rows: Sequence[MethodsRow]) -> list[str]:
    """The issue's targets: what was found, and whether they are reached."""
    means, as_good = figures["means"]["all"], figures["as_good"]["all"]
    num_good = round(as_good * len(rows))
    claims = [
        mean_sentence(
            "Zero-shot", means["zero-shot to best classical"], "the best classical plan",
            TARGET_ZERO_SHOT, AIM_ZERO_SHOT,
        ),
        f"Zero-shot is at least as good as the best classical plan on **{num_good} of {len(rows)}** workloads "
        f"({verdict(as_good, TARGET_SHARE, AIM_SHARE, at_least=True, text='{:.0%}'.format)}).",
    ]  # fmt: skip
    largest = next((row for row in rows if row.workload == LARGEST), None)
    if largest is not None:
        seconds = largest.largest_of(ZERO_SHOT, "seconds")
        judged = verdict(seconds, TARGET_SECONDS, text="{:g} s".format)
        claims.append(f"Zero-shot takes at most **{seconds:.1f} s** on {LARGEST}, {largest.num_ops:,} ops ({judged}).")
    if "the papers'" in figures["means"]:
        mean = figures["means"]["the papers'"]["fine-tuned to expert"]
        claims.append(
            mean_sentence("Fine-tuned, it", mean, "the expert plan", TARGET_FINE_TUNED, AIM_FINE_TUNED)
            + " The target is the paper's 16 %."
        )
    updates, seconds = (max(row.largest_of(FINE_TUNED, field) for row in rows) for field in ("updates", "seconds"))
    claims.append(f"Fine-tuning took at most {updates:.0f} updates and {seconds:.1f} s.")
    claims.append(mean_sentence("Fine-tuned, it", means["fine-tuned to search"], "the search"))
    return claims


def _markdown(figures: Mapping[str, Any], rows: Sequence[MethodsRow], asked: Mapping[str, HeldOut]) -> str:
    seeds, num_plans = (
        figures["seeds"],
        sum(run.status == "ok" for row in rows for runs in row.runs.values() for run in runs),
    )
    main = [
        (
            row.workload, f"{row.num_ops:,}", row.cluster, milliseconds(row.lower_bound_ns),
            _with_name(row, row.best_classical), _with_name(row, row.best_expert),
            row.time_cell(ZERO_SHOT), row.ratio_cell(ZERO_SHOT, BEST_CLASSICAL),
            f"{row.largest_of(ZERO_SHOT, 'simulations'):.0f}", f"{row.mean_of(ZERO_SHOT, 'seconds'):.1f}",
            row.time_cell(FINE_TUNED), row.ratio_cell(FINE_TUNED, BEST_CLASSICAL),
            f"{row.mean_of(FINE_TUNED, 'updates'):.0f}", f"{row.mean_of(FINE_TUNED, 'seconds'):.1f}",
            row.time_cell(SEARCH), row.ratio_cell(SEARCH, BEST_CLASSICAL),
        )
        for row in rows
    ]  # fmt: skip
    header = (
        "workload", "ops", "cluster", "bound", "best classical", "expert", "zero-shot", "ratio", "simulations",
        "seconds", "fine-tuned", "ratio", "updates", "seconds", "search", "ratio",
    )  # fmt: skip
    means = [
        (
            part,
            str(len(_parts(rows)[part])),
            *(mean_cell(mean) for mean in found.values()),
            f"{figures['as_good'][part]:.0%}",
        )
        for part, found in figures["means"].items()
    ]
    means_header = ("workloads", "number", *(f"{name} / {other}" for name, other in _PAIRS), "zero-shot as good")
    held_out = [
        (
            name, checkpoint.path.name, ", ".join(sorted(checkpoint.families)), f"{checkpoint.updates:,}",
            f"{checkpoint.cpu_hours:.2f}",
        )
        for name, checkpoint in asked.items()
    ]  # fmt: skip
    parts = (
        "## Generalization",
        f"    {figures['command']}",
        f"{machine_line()}.",
        f"Step times in ms: mean over {counted(seeds, 'seed')}, range in brackets. Each workload is placed by a policy "
        "whose training had no graph of its family or of families like it. Zero-shot: the best of at most "
        f"{methods.ZERO_SHOT_SIMULATIONS} simulated placements (those of a repair come on top), nothing trained. "
        f"Fine-tuned: trained on the graph for at most {figures['fine_tune_budget']} of processor time and fewer than "
        f"{MAX_UPDATES + 1} updates. Seconds are from the graph in memory to the placement. Search: "
        "classical placers, then the search without a policy, with the processor time that fine-tuning took with the "
        "same seed. Every classical placer counts with its best seed; the best one is chosen for each workload with "
        "hindsight. Ratios are to it. Memory is enforced: OOM is no plan that fits, with every seed. "
        f"All {num_plans} plans were saved, read back and replayed: each fits and gives its own figures again.",
        markdown_table(header, main),
        "Geometric means of ratios of step times, range over seeds in brackets, and the share of workloads where "
        "zero-shot is at least as good as the best classical placer:",
        markdown_table(means_header, means),
        "\n".join(f"- {claim}" for claim in _claims(figures, rows)),
        "![Generalization](generalization.svg)",
        "### Policies",
        "What each policy has not seen, and what its training cost.",
        markdown_table(("workload", "checkpoint", "held out", "updates", "CPU hours"), held_out),
        "### Classical placers",
        "Step times in ms, each placer's best run.",
        classical_table(rows),
    )
    return "\n\n".join(parts) + "\n"


def _with_name(row: MethodsRow, placer: str | None) -> str:
    return "OOM" if placer is None else f"{row.baseline_cell(placer)} ({placer})"


def _plot(rows: Sequence[MethodsRow]) -> str:
    dots = []
    for name in (ZERO_SHOT, FINE_TUNED, SEARCH):
        ratios = [ratio for row in rows if (ratio := row.ratio(name, BEST_CLASSICAL)) is not None]
        dots.append((name, ratios))
    label = "step time over the best classical placer's; a dot for each workload"
    return dot_plot("Families that the policy was not trained on", label, dots)
