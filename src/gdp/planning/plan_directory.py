"""The names of the files that lie beside a plan."""

from pathlib import Path

IN_JSON, IN_COLUMNS, CLUSTER = "graph.json.gz", "graph.safetensors", "cluster.json"
"""Those beside a `plan.json`; beside `plan-2.json` it is `graph-2.json.gz`, and so on."""


def files_beside(plan: Path) -> tuple[Path, Path, Path]:
    """Returns the paths of the graph, in JSON and in columns, and of the devices beside a plan."""
    stem = plan.name.removesuffix(".gz").removesuffix(".json")
    number = stem.removeprefix("plan") if stem.startswith("plan") else ""
    names = (name.replace(".", f"{number}.", 1) for name in (IN_JSON, IN_COLUMNS, CLUSTER))
    graph, columns, cluster = map(plan.with_name, names)
    return graph, columns, cluster
