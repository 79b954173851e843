"""A report as one HTML file that asks no network for anything: text, data, scripts and styles are all in it. Only the
scripts that are written here run: a Content-Security-Policy names them by their hashes and forbids all else. So any
name in a graph is text."""

import base64
import gzip
import hashlib
import html
import re
from importlib.resources import files as package_files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import orjson

from gdp import files
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import GraphSource
from gdp.planning.plan_source import simulation_of
from gdp.report.page_data import PageData, columns, summary
from gdp.report.tables import short
from gdp.simulator.plan import Plan

SCRIPTS = (
    *("core", "palette", "replicas", "timeline-rows", "timeline", "memory", "charts", "modules", "layers", "graph"),
    *("path", "main"),
)  # parts of the page's own script, `report-*.js`, in the order in which they are put together


def write_report(
    plan: Plan, path: str | Path, graph: GraphSource | None = None, cluster: Cluster | str | None = None
) -> Path:
    """Writes the page of `gdp report` to `path`, which ends in .html or .htm, and returns the path.

    A plan of `gdp.place` brings its baselines, and one from a file reads its graph and devices again; `graph` and
    `cluster` are others to be taken in their place. InputError if the plan is not of them, or the file cannot be
    written."""
    path = Path(path)
    if not path.name.endswith((".html", ".htm")):
        raise InputError(f"{path}: a name that ends in .html is expected, such as report.html")
    write_page(path, PageData(plan, simulation_of(plan, graph, cluster)))
    return path


def write_page(path: Path, data: PageData) -> None:
    """Write the report to `path`, atomically."""
    files.write_bytes(path, render(data).encode())


def render(data: PageData) -> str:
    """The HTML of a report."""
    document = summary(data)
    library = gzip.decompress(_file("echarts.min.js.gz").read_bytes()).decode()
    script = '"use strict";(() => {\n' + "\n".join(asset(f"report-{name}.js") for name in SCRIPTS) + "\n})();"
    style = asset("report.css")
    scripts = f"script-src {_digest(library)} {_digest(script)}; style-src {_digest(style)}"
    policy = f"default-src 'none'; {scripts}; img-src data:; base-uri 'none'; form-action 'none'"
    parts = {
        "policy": policy,
        "title": html.escape(f"{short(document['graph'])} on {short(document['cluster'])}: gdp report"),
        "style": style,
        "heading": html.escape(f"{short(document['graph'])} on {short(document['cluster'])}"),
        "layout": html.escape(_layout(document["layout"])),
        "layout_hidden": "" if document["layout"] else " hidden",
        "bound": html.escape(document["bound"]),
        "headline": html.escape(document["headline"]),
        "reasons": html.escape("; ".join(document["reasons"])),
        "hidden": "" if document["reasons"] else " hidden",
        "sentences": html.escape(" ".join(document["sentences"])),
        "about": html.escape(_about(document)),
        "summary": embed(document),
        "columns": columns(data),
        "library": library,
        "script": script,
        "licences": html.escape(asset("echarts-licences.txt")),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("report.html"))


def embed(document: Any) -> str:
    """JSON that may stand in a `<script>` element: nothing in it can end the element or open a comment."""
    text = orjson.dumps(document).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def asset(name: str) -> str:
    """The text of one of the package's files."""
    return _file(name).read_text(encoding="utf-8")


def _file(name: str) -> Traversable:
    return package_files("gdp.report").joinpath("assets", name)


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _about(document: dict[str, Any]) -> str:
    about = ""
    if document["simulations"] is not None:
        about = f" in {document['seconds']:.1f} s and {document['simulations']:,} simulations"
    return (
        f"{document['ops']:,} ops, {document['tensors']:,} tensors, {document['transfers']:,} transfers. Placer "
        f"{short(document['placer'])}, seed {document['seed']}{about}; gdp {short(document['version'])}."
    )


def _layout(layout: dict[str, Any] | None) -> str:
    if layout is None:
        return ""
    option = f" (--parallel {layout['option']})" if layout["option"] else ""
    return f"{layout['words'][0].upper()}{layout['words'][1:]}{option}."
