"""Interleaved stages: each device gets several shorter stages in turn, so that it waits less at the ends of a pipeline.

    2 devices, 2 stages each    gpu0 | stage 0 |         | stage 2 |
                                gpu1 |         | stage 1 |         | stage 3 |

D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, section
2.2. They are starts for a search over micro-batches; more transfers are the price.
"""

import numpy as np

from gdp.placers.base import device_subsets
from gdp.placers.contiguous import module_chain, stages
from gdp.simulator.problem import Placement, Problem
from gdp.units.forward_units import forward_units
from gdp.units.units import Units

_STAGES_PER_DEVICE = (2, 3, 4)


def interleaved_stages(problem: Problem) -> list[Placement]:
    """Returns placements [N] with 2, 3 and 4 stages a device, in the order of modules; none without micro-batches."""
    if problem.microbatch.max() < 1:
        return []
    units = Units.of(problem, forward_units(problem))
    devices = device_subsets(problem, smallest=problem.num_devices)[0]
    chains = [module_chain(problem, units, whole_layers=whole) for whole in (False, True)]
    return [
        units.place_allowed(stages(problem, units, chain, np.tile(devices, count)))
        for chain in chains
        for count in _STAGES_PER_DEVICE
    ]
