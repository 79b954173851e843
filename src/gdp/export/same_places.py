"""Another step of the same model, its layers where a plan has them: the prefill of a server that decodes."""

import numpy as np

from gdp.errors import InputError
from gdp.export.adapt import simulated
from gdp.export.export_target import ExportTarget
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation


def in_same_places(target: ExportTarget, problem: Problem, placement: Placement, other: Problem) -> Simulation:
    """Returns the step of `other`, each unit of `target` where `placement` [N] of `problem` has the one of its name.

    InputError where they have different units.
    """
    units, others = target.read_units(problem), target.read_units(other)
    devices = units.devices_of(placement)
    if devices is None or units.members != others.members:
        raise InputError(f"graph {other.graph.name!r}: has other {target.level} than {problem.graph.name!r}")
    return simulated(other, others.place(np.asarray(devices)))
