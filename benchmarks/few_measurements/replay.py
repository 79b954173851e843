"""Benchmark `few-measurements`: the fastest of some ways to run a step, found with few measurements.

Tables of times that others measured stand for the hardware: a choice is a group of their rows, and a measurement looks
one of them up, with noise. An arm says which candidate is measured next; its answer is the fastest measured one, and
its regret how much slower that one is than the fastest of all, as the table has them.

`--file F.csv` has measurements of your own in place of the tables. A line is a candidate:

    choice,predicted,measured,micro_batch,tensor_parallel,schedule
    llama-8b on 8 cards,412.0,431.5,1,4,1f1b
    llama-8b on 8 cards,398.7,440.2,2,4,1f1b

Those of one `choice` are chosen between; times are in any unit that all have. Other columns are traits: numbers, or
texts, which are equal or not. The policy knows traits that are called like those of the tables (`NAMES` of choices.py;
numbers are logarithms to the base 2). Two further columns, `machine` and `model`, may say where a choice belongs, so
that what is learned on others is judged. Arms that need what the file lacks (an expert's rule, the peak of a sheet,
other machines) are left out.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.few_measurements.arms import ARMS
from benchmarks.few_measurements.drawn_choices import DrawnQuestion, drawn_questions
from benchmarks.few_measurements.elsewhere import ELSEWHERE, PROPOSERS, shares
from benchmarks.few_measurements.scorer import POLICIES
from benchmarks.few_measurements.trial import Arm, Lessons, Trial
from benchmarks.few_measurements.user_file import read_choices
from benchmarks.figures import Series, line_plot
from benchmarks.measured_sources.choices import PREDICTED_BY, TABLES, Choice
from benchmarks.measured_sources.source import CapturedGraphs
from benchmarks.rows import Rows, code_of
from gdp.arrays import F64

_ARMS_BY = "benchmarks/few_measurements", "gdp/tune/residual.py"
COUNTS = 1, 2, 3, 5, 10, 25, 50
_MOST = 100  # measurements of arms that may repeat one
_FOLDS = 4  # of models, one of which is held out where others of the same table teach
OURS, SHOWN = "gdp's costs, residual", 5  # counts in the drawing
WITH_COSTS = OURS, *ELSEWHERE, *POLICIES
DRAWN_LINES = "random", "Gaussian process", "HDP-like, none twice", "GDP, pre-trained, none twice", "gdp's costs", OURS
RIVALS = "HDP-like", "HDP-like, none twice", "GDP", "GDP, none twice", "GDP, pre-trained, none twice"
CONTROLS: Mapping[str, tuple[str, str]] = {
    "costs that know cards": ("gdp's costs", "naive costs"),
    "a residual of measurements": ("gdp's costs, residual", "gdp's costs"),
    "a residual with the mean and widths of other machines": ("residual of other machines", "gdp's costs, residual"),
    "a residual with those of other tables": ("residual of other tables", "gdp's costs, residual"),
    "a policy trained on drawn machines": ("policy of drawn machines", "gdp's costs"),
    "fine-tuning this policy on measured rewards": ("policy of drawn machines, fine-tuned", "policy of drawn machines"),
    "training this policy on other machines": ("policy of other machines", "policy of drawn machines"),
    "training this policy on other tables": ("policy of other tables", "policy of drawn machines"),
    "a bandit over proposers": ("bandit over proposers", "gdp's costs, residual"),
    "learning as HDP does": ("HDP-like, none twice", "random"),
    "learning as GDP does": ("GDP, none twice", "random"),
    "GDP's training on other models": ("GDP, pre-trained, none twice", "GDP, none twice"),
}
"""What is learned: the arm that has it, and its control."""


@dataclass(frozen=True, kw_only=True)
class FewMeasurementsBenchmark(Benchmark):
    """All arms on each choice of `sources`, or of a user's `file`, with measurements to within each of `noises`."""

    name = "few-measurements"
    sources: tuple[str, ...] = tuple(table.name for table in TABLES)
    file: Path | None = None
    noises: tuple[float, ...] = (0.01, 0.05)
    seeds: int = 20

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        chosen = pick(self.name, "source", self.sources, tuple(table.name for table in TABLES))
        tables = [table for table in TABLES if table.name in chosen and self.file is None]
        choices = [] if self.file is None else read_choices(self.file)
        graphs = CapturedGraphs(rows)
        for table in tables:
            choices += table.choices(rows, graphs, say)
        code = code_of(*PREDICTED_BY, "benchmarks/few_measurements/drawn_choices.py")
        made = rows.row("drawn-choices", {"code": code}, lambda: drawn_questions(graphs, say))
        taught = _lessons(choices, [DrawnQuestion.read(each) for each in made["questions"]])
        rows = replace(rows, shared={"code": code_of(*_ARMS_BY), "choices": _digest(choices, made)})
        about = {table.name: table.about for table in TABLES} | {"file": f"those of {self.file}"}
        parts = [
            self._part(about[name], own, taught, rows, say)
            for name in dict.fromkeys(choice.table for choice in choices)
            for is_set in (False, True)
            if (own := [each for each in choices if each.table == name and each.is_set == is_set])
        ]
        controls, heard = _controls(parts, self.noises), _shares(taught.values())
        idle = [what for what, (arm, _) in CONTROLS.items() if arm in WITH_COSTS and not _earns(what, controls)]
        facts = {"counts": COUNTS, "most": _MOST, "controls": controls, "idle": idle, "shares": heard}
        return {"tables": parts, **facts}

    def _part(
        self, about: str, choices: Sequence[Choice], taught: Mapping[str, Lessons], rows: Rows, say: Say
    ) -> dict[str, Any]:
        name, is_set, results = choices[0].table, choices[0].is_set, list[dict[str, Any]]()
        sizes = [len(choice.measured) for choice in choices]
        for arm in ARMS:
            if not all(_has(choice, taught, ARMS[arm].needs) for choice in choices):
                continue
            settings = {"seeds": self.seeds, "num_choices": len(choices), "noises": self.noises}
            key = f"{name}-{'set' if is_set else 'judged'}-{arm}"
            row = rows.row(key, settings, lambda arm=arm: self._arm(ARMS[arm], choices, taught))  # type: ignore[misc]
            for noise in self.noises:
                of_noise = row[str(noise)]
                say(f"{key}-{noise}: {', '.join(f'{mean:.2%}' for mean in of_noise['mean'])}")
                results.append({"arm": arm, "noise": noise, **of_noise})
        facts = {"num_choices": len(choices), "fewest": min(sizes), "most": max(sizes)}
        same = [_as_good(results, noise) for noise in self.noises]
        return {"source": name, "about": about, "is_set": is_set, **facts, "results": results, "same": same}

    def _arm(self, arm: Arm, choices: Sequence[Choice], taught: Mapping[str, Lessons]) -> dict[str, Any]:
        """Returns by noise the mean regret after each number of measurements, its deviation over seeds, the means of
        each choice, and what is needed for a regret of at most 1 %."""
        trials = [
            Trial(choice, noise, seed) for noise in self.noises for seed in range(self.seeds) for choice in choices
        ]
        shape = len(self.noises), self.seeds, len(choices), _MOST
        figures, at = {}, [count - 1 for count in COUNTS]
        for noise, regrets in zip(self.noises, regrets_of(arm, trials, taught).reshape(shape), strict=True):
            by_seed = regrets.mean(axis=1)
            means = by_seed.mean(axis=0)
            figures[str(noise)] = {
                "mean": means[at].tolist(),
                "deviation": by_seed.std(axis=0)[at].tolist(),
                "worst": regrets.mean(axis=0).max(axis=0)[at].tolist(),
                "by_choice": regrets.mean(axis=0)[:, at].tolist(),
                "curve": means.tolist(),
                "num_to_percent": _first(means, 0.01),
            }
        return figures

    def draw(self, measured: Mapping[str, Any]) -> bytes | None:
        part, noise = next(iter(measured["tables"])), self.noises[0]
        lines = {}
        for row in part["results"]:
            if row["noise"] == noise and row["arm"] in DRAWN_LINES:
                spread = zip(row["mean"], row["deviation"], strict=True)
                points = [(count, 100 * mean) for count, mean in zip(COUNTS, row["mean"], strict=True)]
                lines[row["arm"]] = Series(points[:SHOWN], [(100 * (m - d), 100 * (m + d)) for m, d in spread][:SHOWN])
        title = f"{part['about']}: regret"
        return line_plot(title, "measurements", "% slower than the fastest", lines, COUNTS[:SHOWN])


def regrets_of(arm: Arm, trials: Sequence[Trial], taught: Mapping[str, Lessons]) -> F64:
    """Returns the regret [R, `_MOST`] of trials after 1, 2, ... measurements. `taught` has what is learned before, by
    the name of `_class_of` the choice."""
    regrets = np.empty((len(trials), _MOST))
    order = sorted(range(len(trials)), key=lambda place: _class_of(trials[place].choice))
    for name, group in groupby(order, key=lambda place: _class_of(trials[place].choice)):
        places = list(group)
        for place, answers in zip(places, arm.run([trials[each] for each in places], taught[name]), strict=True):
            times = trials[place].choice.measured
            own = times[answers[:_MOST]] / times.min() - 1
            regrets[place] = np.append(own, np.full(_MOST - len(own), own[-1]))
    return regrets


def _digest(choices: Iterable[Choice], drawn: Mapping[str, Any]) -> str:
    """Returns a digest of what all arms choose from and learn from, predicted times among it."""
    values = [getattr(choice, each.name) for choice in choices for each in fields(choice)]
    exact = [each.tolist() if isinstance(each, np.ndarray) else each for each in values]
    return hashlib.sha256(repr([exact, drawn]).encode()).hexdigest()[:16]


def _class_of(choice: Choice) -> str:
    """Returns a name for choices that are taught by the same others: of one machine, and one fold of models."""
    return f"{choice.table}/{choice.machine}/{sum(choice.model.encode()) % _FOLDS}"


def _lessons(choices: Sequence[Choice], drawn: Iterable[DrawnQuestion]) -> dict[str, Lessons]:
    """Returns what each class of choices is taught by: no choice of its models, its machine or its table."""
    known, taught = tuple(drawn), dict[str, Lessons]()
    for choice in choices:
        name = _class_of(choice)
        if name not in taught:
            fold = name.rpartition("/")[2]
            taught[name] = Lessons(
                known,
                tuple(c for c in choices if c.table == choice.table and _class_of(c).rpartition("/")[2] != fold),
                tuple(c for c in choices if c.machine != choice.machine),
                tuple(c for c in choices if c.table != choice.table),
            )
    return taught


def _has(choice: Choice, taught: Mapping[str, Lessons], needs: str) -> bool:
    if needs == "sheet":
        return choice.table != "file"
    return not needs or bool(getattr(taught[_class_of(choice)], needs))


def _first(means: F64, bound: float) -> int | None:
    """Returns the least number of measurements with a regret of at most `bound`; None: there is none."""
    return int(np.argmax(means <= bound)) + 1 if (means <= bound).any() else None


def _as_good(results: Sequence[Mapping[str, Any]], noise: float) -> dict[str, Any]:
    """Returns how many measurements rivals need to be as good as ours after 1, 2 and 3."""
    curves = {row["arm"]: np.array(row["curve"]) for row in results if row["noise"] == noise}
    bounds = curves[OURS][:3]
    needs = {name: [_first(curves[name], bound + 1e-4) for bound in bounds] for name in RIVALS if name in curves}
    return {"noise": noise, "regrets": bounds.tolist(), "needs": needs}


def _controls(parts: Sequence[Mapping[str, Any]], noises: Sequence[float]) -> list[dict[str, Any]]:
    """Returns what each thing learned brings over its control: the mean difference of regrets after 2, 3 and 5
    measurements over all judged choices, and its standard error."""
    found, at = list[dict[str, Any]](), [COUNTS.index(count) for count in (2, 3, 5)]
    for what, (arm, control) in CONTROLS.items():
        for noise in noises:
            differences = list[float]()
            for part in parts:
                by_arm = {row["arm"]: np.array(row["by_choice"]) for row in part["results"] if row["noise"] == noise}
                if not part["is_set"] and arm in by_arm and control in by_arm:
                    differences += (by_arm[arm] - by_arm[control])[:, at].mean(axis=1).tolist()
            if len(differences) > 1:
                mean, error = float(np.mean(differences)), float(np.std(differences) / len(differences) ** 0.5)
                verdict = "earns" if mean < -2 * error else "costs" if mean > 2 * error else "nothing certain"
                row = {"what": what, "arm": arm, "control": control, "noise": noise}
                found.append({**row, "mean": mean, "error": error, "verdict": verdict})
    return found


def _shares(taught: Iterable[Lessons]) -> dict[str, float]:
    """Returns the shares that the bandit begins with, means over what is held out."""
    means = [shares(lessons) for lessons in taught if lessons.other_machines]
    return dict(zip(PROPOSERS, np.mean(means, axis=0).tolist(), strict=True)) if means else {}


def _earns(what: str, controls: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["what"] == what and row["verdict"] == "earns" for row in controls)
