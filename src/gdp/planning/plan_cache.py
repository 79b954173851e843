"""Plans that were found before: an identical question is answered at once. What is identical: graph, cluster,
constraints, every option that a search depends on, gdp's code and the policy that comes with it, and the libraries that
a search computes with. D devices."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gdp import cache
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.layout import Layout
from gdp.planning.advice import Advice, WhatIf
from gdp.planning.layout_answer import LayoutAnswer, LayoutRow
from gdp.search.place import Progress
from gdp.search.question import Solution
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Baseline, NoisyTimes, Plan, Search
from gdp.simulator.problem import Problem

FORMAT, VERSION = "gdp-found-plan", 4
_LIBRARIES = ("numpy", "numba", "scipy", "pymetis", "torch")


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer of `gdp place`: a plan, the progress of its search, and advice."""

    plan: Plan
    advice: Advice | None = None
    progress: tuple[Progress, ...] = ()  # the news of a search of ops that told of a better placement
    layouts: LayoutAnswer | None = None  # that were looked at; None: the ops of the step were placed
    batches: Solution | None = None  # for batches in flight, whose answers are not kept
    notes: tuple[str, ...] = ()  # what was not looked at, and what the tool that runs it costs


def entry(graph: Graph, cluster: Cluster, constraints: Constraints, options: Mapping[str, object]) -> Path | None:
    """Returns the file that keeps the answer; `options` are all others that it depends on."""
    question = (graph.fingerprint, cluster.fingerprint, asdict(constraints), options)
    versions = [version(name) for name in ("gdp-placement", *_LIBRARIES)]
    package = Path(__file__).parents[1]
    code = [file for kind in ("py", "toml", "safetensors") for file in package.rglob(f"*.{kind}")]
    return cache.entry("plans", graph.name, (FORMAT, VERSION, versions, *question), code)


def load(path: Path | None, problem_of: Callable[[Plan], Problem]) -> KeptAnswer | None:
    """Returns the answer kept in `path`; None if there is none that can be read.

    `problem_of` returns the problem that a plan should solve; a plan of another one is found anew."""
    document = cache.read(path, FORMAT, VERSION)
    if document is None:
        return None
    with contextlib.suppress(InputError, KeyError, TypeError, ValueError, AttributeError):  # damaged: found anew
        plan = Plan.from_document(document["plan"])
        problem = problem_of(plan)
        plan.check_belongs(problem.graph, problem.cluster)
        plan = replace(plan, search=_search(document["search"]), problem=problem)
        advice, layouts = document["advice"], document["layouts"]
        progress = tuple(Progress(**news) for news in document["progress"])
        told = None if advice is None else _advice(advice, plan)
        rows, notes = None if layouts is None else _layouts(layouts), tuple(document["notes"])
        return KeptAnswer(plan, told, progress, rows, notes=notes)
    return None


def store(path: Path | None, answer: KeptAnswer) -> None:
    """Keeps an answer."""
    plan, advice, layouts = answer.plan, answer.advice, answer.layouts
    assert plan.search is not None
    document = {
        "format": FORMAT,
        "version": VERSION,
        "plan": plan.to_document(),
        "search": asdict(replace(plan.search, baselines=dict(plan.search.baselines))),
        "advice": None,
        "progress": [asdict(news) for news in answer.progress],
        "layouts": None,
        "notes": answer.notes,
    }
    if advice is not None:
        what_ifs, not_asked = [asdict(item) for item in advice.what_ifs], list(advice.not_asked)
        matters = advice.memory_matters
        document["advice"] = {"what_ifs": what_ifs, "not_asked": not_asked, "memory_matters": matters}
    if layouts is not None:
        rows = [asdict(row) | {"layout": row.layout.document()} for row in layouts.rows]
        document["layouts"] = asdict(layouts) | {"rows": rows}
    cache.write(path, document)


def _search(kept: Mapping[str, Any]) -> Search:
    noisy = kept["under_noise"]
    return Search(
        seconds=float(kept["seconds"]),
        simulations=int(kept["simulations"]),
        baselines={name: Baseline(**baseline) for name, baseline in kept["baselines"].items()},
        busy_fraction=np.array(kept["busy_fraction"], np.float64),
        missing_bytes=np.array(kept["missing_bytes"], np.int64),
        under_noise=None if noisy is None else NoisyTimes(**noisy),
        order=str(kept["order"]),
    )


def _advice(kept: Mapping[str, Any], plan: Plan) -> Advice:
    what_ifs = tuple(WhatIf(**item) for item in kept["what_ifs"])
    return Advice(what_ifs, tuple(kept["not_asked"]), bool(kept["memory_matters"]), plan)


def _layouts(kept: Mapping[str, Any]) -> LayoutAnswer:
    return LayoutAnswer(**{**kept, "rows": tuple(map(_layout_row, kept["rows"])), "notes": tuple(kept["notes"])})


def _layout_row(kept: Mapping[str, Any]) -> LayoutRow:
    peaks = kept["peak_memory_bytes"]
    layout = Layout.of_document(kept["layout"])
    return LayoutRow(**{**kept, "layout": layout, "peak_memory_bytes": None if peaks is None else tuple(peaks)})
