"""Plans that reports are made of."""

from collections.abc import Sequence

import numpy as np

from gdp.cluster import Cluster
from gdp.costs.ranges import StepRange
from gdp.graph import Graph, Op, Tensor
from gdp.report.page_data import PageData
from gdp.search.place import Progress, place
from gdp.simulator.plan import Baseline, Search
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import replay

SCRIPT = "</script><script>window.broken = 1</script>"
HOSTILE = (
    SCRIPT,
    '<img src=x onerror="window.broken = 2">',
    "\"double\" 'single' `back` \\ & &lt; {{columns}} ${broken} {a|b} %s",
    "emoji 🦊👩‍🚀 \u202eright to left\u202c \u2028 line \u0000 nul \r\n <!-- comment",
    "__proto__",
    "x" * 10_000,
)


def two_towers(names: Sequence[str] = (), layers: int = 6) -> Graph:
    """Two towers of `layers` layers with parameters, joined by a head; `names` go to ops, modules and kinds."""
    ops, tensors = [Op("input", "input")], [Tensor(0, (1, 3), 2**20)]
    for layer in range(layers):
        for tower, side in enumerate(("left", "right")):
            parameter = 1 + 4 * layer + 2 * tower
            module = f"tower_{side}.layers.{layer}"
            ops.append(Op(f"{module}.weight", "parameter", resident_bytes=2**24, module=module, phase="forward"))
            kind = names[(2 * layer + tower) % len(names)] if names else "aten.mm"
            flops = (layer + 1) * 4_000_000_000
            ops.append(Op(f"{module}.mm", kind, flops, 2**22, module=module, phase="forward"))
            tensors.append(Tensor(parameter, (parameter + 1,), 2**24, resident=True))
    num = len(ops)
    for layer in range(layers):
        for tower in range(2):
            number = 2 + 4 * layer + 2 * tower
            after = number + 4 if layer + 1 < layers else num
            tensors.append(Tensor(number, (after,), 2**22))
    tensors[0] = Tensor(0, (2, 4), 2**20)
    ops.append(Op("head.mm", "aten.mm", 10**9, 2**20, module="head", phase="forward"))
    for number, name in enumerate(names):
        ops.append(Op(name, name, 2 * 10**9, 2**20, module=f"head.{name}", phase="backward"))
        tensors.append(Tensor(num + number, (num + number + 1,), 2**21))
    return Graph.build(names[0] if names else "two-towers", ops, tensors)


def page_data(graph: Graph, devices: str = "2xp100-pcie-16g", cluster: Cluster | None = None) -> PageData:
    """A plan of `graph` with all that `gdp place` knows of it; all but the step is made up."""
    cluster = cluster or Cluster.parse(devices)
    plan = place(graph, cluster, placer="heft", budget="50sims")
    simulation = replay(Problem.build(graph, cluster), plan)
    vars(simulation)["step_range"] = StepRange(0.9, 1.25, "made-up steps")
    best_ns = plan.step_time_ns
    search = Search(
        seconds=2.0,
        simulations=50,
        busy_fraction=simulation.busy_fraction,
        missing_bytes=np.zeros(len(plan.devices)),
        baselines={
            "single": Baseline("infeasible", 3 * best_ns, 0.1),
            "expert": Baseline("ok", 2 * best_ns, 0.1),
            "metis": Baseline("ok", best_ns * 3 // 2, 0.5),
            "m-sct": Baseline("skipped", None, 0.0),
        },
    )
    progress = [
        Progress(best_ns * part // 4, True, plan.lower_bound_ns, 10 * part, 2.0 / part, None) for part in (8, 6, 5, 4)
    ]
    object.__setattr__(plan, "search", search)
    arm = {"step_time_ns": 2 * best_ns, "step_time_quartiles_ns": [best_ns, 3 * best_ns]}
    op = {"name": HOSTILE[0], "num_ops": 1, "predicted_ns": 1000, "measured_ns": 2000}
    device = {"name": HOSTILE[1], "num_ops": 1, "predicted_busy_ns": 1000, "busy_ns": 2000, "wait_ns": 3000}
    way = {"from": HOSTILE[0], "to": HOSTILE[1], "num_tensors": 2, "predicted_ns": 10, "measured_ns": 20}
    run = {
        **arm,
        "predicted_step_time_ns": best_ns,
        "one_device": {**arm, "device": HOSTILE[2]},
        "steps": 5,
        "equal": True,
        "reference": HOSTILE[3],
        "prediction": {"devices": [device], "kinds": [op], "ops": [op], "transfers": [way]},
    }
    return PageData(plan, simulation, progress, run=run)
