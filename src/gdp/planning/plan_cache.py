"""Plans that were found before: an identical question is answered at once.

What is identical: graph, cluster, constraints, every option that a search depends on, gdp's code and the policy that
comes with it, and the libraries that a search computes with. D devices.
"""

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
from gdp.planning.advice import Advice, WhatIf
from gdp.search.place import Progress
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Baseline, NoisyTimes, Plan, Search

FORMAT, VERSION = "gdp-found-plan", 3
_LIBRARIES = ("numpy", "numba", "scipy", "pymetis", "torch")


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer of `gdp place`: a plan, the progress of its search, and advice."""

    plan: Plan
    advice: Advice | None
    progress: tuple[Progress, ...]  # the news of the search that told of a better placement
    layouts: Mapping[str, Any] | None = None  # that were looked at, as in `--json`; None: op placement was asked for


def entry(graph: Graph, cluster: Cluster, constraints: Constraints, options: Mapping[str, object]) -> Path | None:
    """Returns the file that keeps the answer; `options` are all others that it depends on."""
    question = (graph.fingerprint, cluster.fingerprint, asdict(constraints), options)
    versions = [version(name) for name in ("gdp-placement", *_LIBRARIES)]
    package = Path(__file__).parents[1]
    code = [*package.rglob("*.py"), *package.rglob("*.safetensors")]
    return cache.entry("plans", graph.name, (FORMAT, VERSION, versions, *question), code)


def load(path: Path | None, graph_of: Callable[[Plan], Graph], cluster: Cluster) -> KeptAnswer | None:
    """Returns the answer kept in `path`; None if there is none that can be read.

    `graph_of` returns the graph that a plan should be of; a plan of another one is found anew.
    """
    document = cache.read(path, FORMAT, VERSION)
    if document is None:
        return None
    with contextlib.suppress(InputError, KeyError, TypeError, ValueError, AttributeError):  # damaged: found anew
        plan = replace(Plan.from_document(document["plan"]), search=_search(document["search"]))
        plan.check_belongs(graph_of(plan), cluster)
        told = document["advice"]
        progress = tuple(Progress(**news) for news in document["progress"])
        return KeptAnswer(plan, None if told is None else _advice(told, plan), progress, document["layouts"])
    return None


def store(path: Path | None, answer: KeptAnswer) -> None:
    """Keeps an answer."""
    plan, advice = answer.plan, answer.advice
    assert plan.search is not None
    kept = None
    if advice is not None:
        kept = {
            "what_ifs": [asdict(item) for item in advice.what_ifs],
            "not_asked": list(advice.not_asked),
            "memory_matters": advice.memory_matters,
        }
    search = asdict(replace(plan.search, baselines=dict(plan.search.baselines)))
    document = {"format": FORMAT, "version": VERSION, "plan": plan.to_document(), "search": search, "advice": kept}
    progress = [asdict(news) for news in answer.progress]
    cache.write(path, {**document, "progress": progress, "layouts": answer.layouts})


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
