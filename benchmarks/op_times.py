"""Times of the ops of a step, measured on all devices at once: a placed step loads the machine so."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torch import Tensor

from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.execute.backends import Target
from gdp.execute.executable import Executable
from gdp.execute.measurement import Measurement, Order, PlacedProgram, measure_programs, one_device_order
from gdp.graph import Graph
from gdp.models.measured_times import with_times
from gdp.models.pytorch import Program


def measure_in_turn(
    program: Program,
    content: Mapping[int, Tensor],
    orders: Mapping[str, Order],
    targets: Sequence[Target],
    *,
    steps: int,
) -> dict[str, Measurement]:
    """Measures one program in several orders, by name; see `measure_programs`."""
    programs = {name: PlacedProgram(program, content, order) for name, order in orders.items()}
    return measure_programs(programs, targets, steps=steps)


def op_times(executables: Mapping[str, Executable], targets: Sequence[Target], steps: int) -> dict[str, I64]:
    """Returns int64[N, D] by name: the median time of each op on each device, while all devices run whole steps. The
    steps take turns, since the pace of a machine that others share drifts."""
    contents = {name: executable.content() for name, executable in executables.items()}

    def measure(target: Target) -> dict[str, I64]:
        programs = {}
        for name, executable in executables.items():
            program = executable.capture.program
            programs[name] = PlacedProgram(program, contents[name], one_device_order(program.graph.num_ops, 0, 1))
        measured = measure_programs(programs, [target], steps=steps)
        return {name: of_program.op_medians_ns()[0] for name, of_program in measured.items()}

    with ThreadPoolExecutor(len(targets)) as pool:
        of_targets = list(pool.map(measure, targets))
    return {name: np.stack([times[name] for times in of_targets], axis=1) for name in executables}


def with_op_times(executable: Executable, cluster: Cluster, times_ns: I64) -> Graph:
    """Returns the graph of a step with the times [N, D] of its ops on the devices of `cluster`. As in a file of times,
    ops of one signature have one time on devices of one kind: their median. Else a search would find that ops are
    faster on one of two alike cores, which is noise."""
    kinds = [device.kind for device in cluster.devices]
    ops = dict[str, list[int]]()
    for op, signature in enumerate(executable.signatures()):
        ops.setdefault(signature, []).append(op)
    tables: list[dict[str, int]] = [{} for _ in times_ns]
    for kind in dict.fromkeys(kinds):
        of_kind = times_ns[:, [number for number, other in enumerate(kinds) if other == kind]]
        for alike in ops.values():
            median_ns = int(np.median(of_kind[alike]))
            for op in alike:
                tables[op][kind] = median_ns
    return with_times(executable.capture.graph, tables)
