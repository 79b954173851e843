"""`gdp report`: a plan as a page to look at."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli_inputs import (
    DimOption,
    FreeReplicasOption,
    InferenceOption,
    MaxMemoryOption,
    MicrobatchesOption,
    OpCostsOption,
    ReserveOption,
    cluster_of_plan,
    constraints_of,
    graph_of_plan,
    reading_of,
)
from gdp.cli_shared import OK, JsonOption, print_json, print_text, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.plan import Baseline
    from gdp.problem import Problem


def report(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A gdp-plan file, as `gdp place` writes it.")],
    graph: Annotated[
        str | None, typer.Option(metavar="GRAPH", help="What was placed. Default: graph.json.gz beside PLAN.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="DEVICES", help="What was placed for. Default: cluster.json beside PLAN.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: report.html beside PLAN.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Run the classical placers too, for their times.")] = False,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FILE", help="What `gdp run --json` printed of this plan.")
    ] = None,
    max_memory: MaxMemoryOption = None,
    reserve: ReserveOption = "0%",
    microbatches: MicrobatchesOption = 1,
    free_replicas: FreeReplicasOption = False,
    inference: InferenceOption = False,
    dim: DimOption = None,
    op_costs: OpCostsOption = None,
    json: JsonOption = False,
) -> int:
    """Write PLAN as one HTML file with everything in it: timeline, memory, critical path, modules."""
    from gdp import options
    from gdp.plan import Plan
    from gdp.report.run_file import read_run

    path = plan.with_name("report.html") if out is None else out
    if not path.name.endswith((".html", ".htm")):
        raise InputError(f"--out {path}: a name that ends in .html is expected")
    options.check_writable(path)
    read = Plan.load(plan)
    measured = None if run is None else read_run(run)
    reading = reading_of(microbatches, free_replicas, inference, dim, op_costs)
    cluster = cluster_of_plan(plan, devices)
    source = graph_of_plan(plan, read, cluster, graph, reading)
    from gdp.problem import Problem

    constraints = constraints_of(cluster, None, None, max_memory, reserve)
    problem = Problem.build(source, cluster, **vars(constraints))
    warm_up()
    from gdp.report.page import write_page
    from gdp.report.page_data import Told
    from gdp.simulate import replay

    try:
        simulation = replay(problem, read)
    except InputError as error:
        raise InputError(f"{plan}: {error}") from None
    write_page(path, Told(read, simulation, run=measured, compared=_baselines(problem) if compare else None))
    if json:
        print_json({"path": str(path), "step_time_ns": simulation.step_time_ns, "bytes": path.stat().st_size})
    else:
        print_text(f"Report written to {path}")
    return OK


def _baselines(problem: "Problem") -> "dict[str, Baseline]":
    """What the classical placers make of the same problem; none is begun after half a minute."""
    from gdp.budget import Budget, Clock
    from gdp.placers import CLASSICAL
    from gdp.placers.classical_runs import ClassicalRuns

    runs = ClassicalRuns(problem, Clock(Budget.parse("1m")), seed=0)
    runs.run(list(CLASSICAL), until=0.5)
    return runs.baselines
