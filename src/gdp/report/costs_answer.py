"""The answer of `gdp costs`: where a step's time goes, for people and as a document."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gdp.costs.breakdown import Breakdown, CostRow
from gdp.notebook import digits
from gdp.report.tables import format_ms, new_table, short

_LONGEST = 100  # characters of an op's shapes


def costs_report(breakdowns: Sequence[Breakdown], top: int) -> Iterator[RenderableType]:
    """Yields, for each kind of device, its kernels by class and the ops that take longest."""
    for number, each in enumerate(breakdowns):
        device, total_ns = each.device, each.time_ns
        yield Text(
            f"{'' if number == 0 else chr(10)}{each.graph.name} on {device.kind}, {device.runtime}: kernels take "
            f"{format_ms(round(total_ns))} one after the other, and the host {format_ms(round(each.host_ns))} to issue "
            "them; memory and exchanges are not looked at"
        )
        headings = "kernels", ">count", ">time", ">share", ">TFLOP/s", ">GB/s", "bound by"
        yield new_table(*headings, rows=[(row.name, *_figures(row, total_ns)) for row in each.by_class()])
        if rows := each.by_op(top):
            yield ""
            rows_of_ops = [(short(row.name, _LONGEST), *_figures(row, total_ns), row.rule) for row in rows]
            yield new_table("equal ops", *headings[1:], "rule", rows=rows_of_ops)


def costs_document(breakdowns: Sequence[Breakdown], top: int) -> dict[str, Any]:
    """Returns the same as a document."""
    return {"graph": breakdowns[0].graph.name, "devices": [_document(each, top) for each in breakdowns]}


def _document(each: Breakdown, top: int) -> Mapping[str, Any]:
    return {
        "kind": each.device.kind,
        "runtime": each.device.runtime,
        "kernels_ns": round(each.time_ns),
        "host_ns": round(each.host_ns),
        "classes": [_row(row) for row in each.by_class()],
        "ops": [_row(row) | {"rule": row.rule} for row in each.by_op(top)],
    }


def _row(row: CostRow) -> dict[str, Any]:
    figures = {"flops": row.flops, "bytes": row.bytes, "limit": row.limit}
    return {"name": row.name, "count": row.count, "time_ns": round(row.time_ns), **figures}


def _figures(row: CostRow, total_ns: float) -> tuple[str, ...]:
    rates = (digits(amount / row.time_ns / unit, 3) for amount, unit in ((row.flops, 1e3), (row.bytes, 1)))
    return f"{row.count:,}", format_ms(round(row.time_ns)), f"{row.time_ns / total_ns:.1%}", *rates, row.limit
