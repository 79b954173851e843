"""Shows the rows of a sweep: as a table, as JSON, and as a picture of what is fastest at each cost."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gdp.cluster.groups import members_of
from gdp.models.serving import ServedStep, serving_entry
from gdp.notebook import digits, format_gib
from gdp.planning.advice import AS_FAST
from gdp.planning.sweep import BATCH, DEVICES, MACHINES, MICROBATCHES, SweepRow
from gdp.report.documents import range_entry
from gdp.report.tables import format_ms, format_range, new_table
from gdp.report.timeline import drawn, line_colour
from gdp.simulator.plan import Plan

_MOST_LAYOUT = 48  # characters


class SweepAnswer:
    """The rows of a sweep over `what`, whose steps do samples or tokens (`noun`); all of them, if it `is_whole`.
    `served` are the facts of the steps of a decoder or a prefill."""

    def __init__(
        self,
        what: str,
        rows: Sequence[SweepRow],
        noun: str = "samples",
        served: Sequence[ServedStep | None] = (),
        *,
        is_whole: bool = True,
    ) -> None:
        self.what, self.rows, self._is_whole = what, rows, is_whole
        self._served = list(served) or [None] * len(rows)
        self._decodes = any(each is not None and each.phase == "decode" for each in self._served)
        self.noun = noun if any(row.work for row in rows) else "steps"
        self.fitting = [row for row in rows if row.is_ok]
        self._has_layouts = any(row.layout for row in rows)

    def report(self) -> Iterator[RenderableType]:
        """Yields the table, the best row in bold, and sentences on the smallest value that does and on the cheapest."""
        noun, has_dollars = self.noun, any(row.price.dollars_per_hour for row in self.fitting)
        has_watts = any(row.price.watts for row in self.fitting)
        costs = [">$/hour", f">{noun}/$"] * has_dollars + [f">{noun}/J"] * has_watts
        values = self.what if self.what == MACHINES else f">{self.what}"
        columns = [values, ">step time", f">{noun}/s", ">above bound", ">fullest device", "plan"]
        if self._decodes:
            columns = [values, ">time per token", f">{noun}/s", ">first token", ">cache", ">fullest device"]
            columns += ["layout"] * self._has_layouts
        notes = list(map(_note, self.rows))
        table = new_table(*columns, *costs, *["note"] * any(notes))
        for row, note, served in zip(self.rows, notes, self._served, strict=True):
            plan = row.plan
            if plan is None or plan.search is None or not row.is_ok:
                table.add_row(str(row.value), *["-"] * (len(columns) - 1 + len(costs)), note)
                continue
            price, rate = row.price, row.per_second
            sums = [price.dollars_per_hour, price.per_dollar(rate)] * has_dollars + [price.per_joule(rate)] * has_watts
            table.add_row(
                str(row.value),
                format_range(plan.step_time_ns, plan.step_range),
                _figure(rate),
                *self._middle(row, plan, plan.search.order, served),
                *map(_figure, sums),
                *[note] * any(notes),
                style="bold" if row is self._fastest else None,
            )
        yield table
        if self.fitting:
            yield ""
            yield Text(" ".join(self._sentences()))

    def _middle(self, row: SweepRow, plan: Plan, order: str, served: ServedStep | None) -> tuple[str, ...]:
        """Returns the cells between the rate and the costs."""
        fullest = format_gib(int(plan.peak_memory_bytes.max()))
        if self._decodes:
            first = "-" if row.first_token_ns is None else format_ms(row.first_token_ns)
            cache = "-" if served is None else format_gib(served.cache_bytes)
            return first, cache, fullest, *[row.layout or "layers"] * self._has_layouts
        above = f"{plan.step_time_ns / row.bound_ns - 1:.1%}" if row.bound_ns else "-"
        layout = row.layout or (order if self.what == MICROBATCHES else "ops")
        return above, fullest, f"{layout:.{_MOST_LAYOUT}}"

    def document(self, out: Path | None) -> dict[str, Any]:
        """Returns the rows as in `--json`; those of served steps tell their speed. `out` has their plans."""
        on_front = self._on_front()
        entries = []
        for number, row in enumerate(self.rows):
            plan, price, rate = row.plan, row.price, row.per_second
            rates = {"second": rate, "dollar": price.per_dollar(rate), "joule": price.per_joule(rate)}
            entry = {
                self.what: row.value,
                "status": "failed" if plan is None else plan.status,
                "step_time_ns": row.step_time_ns,
                **range_entry(row.step_time_ns, None if plan is None else plan.step_range),
                "mfu": None if plan is None or not row.is_ok else plan.mfu,
                "lower_bound_ns": None if plan is None else row.bound_ns,
                "peak_memory_bytes": None if plan is None else plan.peak_memory_bytes.tolist(),
                "order": None if plan is None or plan.search is None else plan.search.order,
                "layout": row.layout or None,
                "same_plan_as": row.same_as,
                "dollars_per_hour": price.dollars_per_hour,
                "watts": price.watts,
                **{f"{self.noun}_per_{unit}": rate for unit, rate in rates.items()},
                "is_on_front": row in on_front,
                "plan": str(out / plan_file(self.what, row.value)) if out and row.is_ok and row.is_written else None,
                "note": row.note,
            }
            serving = serving_entry(self._served[number], row.step_time_ns)
            if row.first_token_ns is not None:
                serving["serving"] |= {"time_to_first_token_ns": row.first_token_ns}
            entries.append(entry | serving)
        return {"sweep": self.what, "rows": entries}

    def figure(self, kind: str = "svg") -> bytes:
        """Returns a picture of what each row does a second against its cost, with a line through the best ones."""
        label, points = self._costs()

        def draw(figure: Any) -> None:
            axes = figure.subplots()
            rates = [row.per_second for row in self.fitting]
            axes.scatter(points, rates, s=16, color="0.6")
            pairs = zip(self.fitting, points, strict=True)
            best = sorted((cost, row.per_second) for row, cost in pairs if row in self._on_front())
            axes.plot(*zip(*best, strict=True), marker="o", markersize=4, linewidth=1, color=line_colour(0))
            for row, cost, rate in zip(self.fitting, points, rates, strict=True):
                axes.annotate(str(row.value), (cost, rate), (4, -9), textcoords="offset points", fontsize=7)
            axes.set_xlim(0, 1.3 * max(points))  # names have room beside the last one
            axes.set_ylim(bottom=0)
            axes.set_xlabel(label)
            axes.set_ylabel(f"{self.noun}/s")

        return drawn((4.5, 3.0), kind, draw)

    @property
    def _fastest(self) -> SweepRow:
        return max(self.fitting, key=lambda row: row.per_second or 0.0)

    def _sentences(self) -> Iterator[str]:
        if not self._is_whole:
            return
        most, noun = self._fastest.per_second or 0.0, self.noun
        first = next(row for row in self.fitting if AS_FAST * (row.per_second or 0.0) >= most)
        enough = _num_used(first) if self.what == DEVICES else first.value
        if self.what == MACHINES:
            yield f"Fastest: {self._fastest.value}."
        elif self.what == BATCH:
            yield f"The smallest batch within 1 % of the most {noun} per second: {enough}."
        else:
            yield f"The fewest {self.what} within 1 % of the fastest: {enough}."
        for unit in ("dollar", "joule") if self.what in (DEVICES, MACHINES) else ():  # others run on one machine
            bought = [(getattr(row.price, f"per_{unit}")(row.per_second) or 0.0, row.value) for row in self.fitting]
            if len(bought) > 1 and min(amount for amount, _ in bought) > 0:
                yield f"The most {noun} per {unit}: {max(bought, key=lambda item: item[0])[1]}."

    def _costs(self) -> tuple[str, list[float]]:
        """Returns the name of what is paid for speed, and its amount for each row that fits."""
        dollars = [row.price.dollars_per_hour for row in self.fitting]
        plans = [row.plan for row in self.fitting if row.plan is not None]
        if self.what == BATCH:
            name = "time per token in ms" if self._decodes else "step time in ms"
            return name, [plan.step_time_ns / 1e6 for plan in plans]
        if self.what == MICROBATCHES:
            return "GiB of the fullest device", [int(plan.peak_memory_bytes.max()) / 2**30 for plan in plans]
        if None in dollars:
            return "devices", [float(len(set(plan.cards))) for plan in plans]
        return "dollars per hour", [float(amount or 0.0) for amount in dollars]

    def _on_front(self) -> list[SweepRow]:
        """Returns the rows that no other one beats in speed without costing more, or in cost without being slower."""
        _, costs = self._costs()
        pairs = [(-cost, row.per_second or 0.0) for cost, row in zip(costs, self.fitting, strict=True)]
        beaten = [any(a >= c and b >= r and (a, b) != (c, r) for a, b in pairs) for c, r in pairs]
        return [row for row, is_beaten in zip(self.fitting, beaten, strict=True) if not is_beaten]


def plan_file(what: str, value: int | str) -> Path:
    """Returns the plan file of a value, in a directory of its own."""
    name = "".join(each if each.isalnum() or each in "-_." else "-" for each in str(value))
    return Path(f"{what}-{name}") / "plan.json"


def outcome(row: SweepRow) -> str:
    """Returns the step time of a row in words, or why it has none."""
    if row.plan is None or row.plan.search is None:
        return row.note
    if row.is_ok:
        return format_ms(row.plan.step_time_ns)
    return f"does not fit, {format_gib(int(row.plan.search.missing_bytes.sum()))} missing"


def _note(row: SweepRow) -> str:
    """Returns why a row has no plan, or whose plan it has, and how many of the devices that uses."""
    if row.plan is None or not row.is_ok:
        return outcome(row)
    num_used, num_devices = _num_used(row), row.num_devices
    notes = ["" if row.same_as is None else f"the plan of {row.same_as}"]
    notes.append("" if num_used == num_devices else f"uses {num_used} of {num_devices}")
    return ", ".join(filter(None, notes))


def _num_used(row: SweepRow) -> int:
    """Returns the number of devices that hold ops, all cards of a group."""
    plan = row.plan
    names = set() if plan is None else {plan.devices[number] for number in plan.placement.tolist()}
    return 0 if plan is None else len({card for name in names for card in members_of(name, plan.num_ranks)})


def _figure(value: float | None) -> str:
    return "-" if value is None else digits(value, 4 if value >= 1000 else 3)
