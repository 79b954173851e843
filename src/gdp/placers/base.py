"""The common ground of classical placers: the contract, the choice of units, comparison of candidates, repair.

N ops, T tensors, U units (groups of ops that share a device, and each other op for itself), D devices.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64
from gdp.compiled import kernel
from gdp.placers.memory_repair import excess_bytes, fit_memory
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import evaluate_many
from gdp.units.forward_units import forward_units
from gdp.units.units import Units

Placer = Callable[[Problem, int], Placement | None]
"""From a problem and a seed to a placement int64 [N] that obeys groups and allowed devices; None if there is none.

The same problem and seed give the same answer. A placement that does not fit in memory is returned only if the placer
found none that fits.
"""

_NUM_REPAIRS = 3  # candidates that are repaired when none of them fits


def unit_choices(problem: Problem) -> list[Units]:
    """The problem's units and, first, if they are others, those in which backward ops follow."""
    choices = [Units.of(problem)]
    following = forward_units(problem)
    if int(following.max()) + 1 < choices[0].num_units:
        choices.insert(0, Units.of(problem, following))
    return choices


def devices_by_speed(problem: Problem) -> I64:
    """[D] the devices that may run the most ops first, then the faster ones, then by number."""
    allowed = problem.allowed
    work_ns = np.where(allowed, problem.op_time_ns, 0).sum(axis=0)
    return np.lexsort((np.arange(problem.num_devices), work_ns, -allowed.sum(axis=0)))


def device_subsets(problem: Problem, smallest: int) -> list[I64]:
    """The best k devices in ascending order, for k from all down to `smallest`: each k up to 8, then powers of two."""
    num_devices, by_speed = problem.num_devices, devices_by_speed(problem)
    counts = {num_devices, *(k for k in range(smallest, num_devices) if k <= 8 or k & (k - 1) == 0)}
    return [np.sort(by_speed[:count]) for count in sorted(counts, reverse=True)]


def best_of(
    problem: Problem, candidates: Sequence[Placement], smaller: Callable[[], Sequence[Placement]] | None = None
) -> Placement:
    """Returns the fastest of `candidates` [N] that fits in memory.

    If none fits, `smaller` makes further candidates; if none of those fits either, the nearest ones are repaired.
    """
    if not candidates:
        raise ValueError("best_of: no candidates")
    batch = _distinct(candidates)
    times, peaks = evaluate_many(problem, batch)
    excess = excess_bytes(problem, peaks)
    if smaller is not None and excess.min() > 0:
        return best_of(problem, [*batch, *smaller()])
    order = np.lexsort((times, excess))
    if excess[order[0]] == 0:
        return batch[order[0]]
    fastest = np.lexsort((excess, times))
    chosen = list(dict.fromkeys([order[0], fastest[0], *order[1:]]))[:_NUM_REPAIRS]
    repaired = np.array([fit_memory(problem, batch[number]) for number in chosen])
    times, peaks = evaluate_many(problem, repaired)
    best: Placement = repaired[np.lexsort((times, excess_bytes(problem, peaks)))[0]]
    return best


def _distinct(candidates: Sequence[Placement]) -> list[Placement]:
    """Returns the placements without repetitions."""
    return list({np.asarray(placement, np.int64).tobytes(): placement for placement in candidates}.values())


def inherit(problem: Problem, labels: npt.ArrayLike) -> I64:
    """[N] `labels` with each -1 replaced: a source takes its consumers' lowest label, another op that of the producer
    of its largest input (the highest, if several are), and what is still left that of a consumer; 0 if nothing is
    labelled."""
    filled = np.array(labels, np.int64)
    _inherit(problem.simulator.arrays, filled)
    return np.maximum(filled, 0)


@kernel
def _inherit(arrays, labels):
    tensor_offsets, consumer_offsets, consumers = arrays[2:5]
    tensor_bytes, _, input_offsets, inputs, input_producers = arrays[11][4:]
    num_ops = len(labels)
    for sweep in range(3):
        for step in range(num_ops):
            op = step if sweep == 1 else num_ops - 1 - step
            if labels[op] >= 0:
                continue
            if sweep == 1:
                largest = np.int64(-1)
                for index in range(input_offsets[op], input_offsets[op + 1]):
                    label = labels[input_producers[index]]
                    size = np.int64(tensor_bytes[inputs[index]])
                    if label >= 0 and (size > largest or (size == largest and label > labels[op])):
                        largest, labels[op] = size, label
            elif sweep == 2 or input_offsets[op] == input_offsets[op + 1]:
                for tensor in range(tensor_offsets[op], tensor_offsets[op + 1]):
                    for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
                        label = labels[consumers[index]]
                        if label >= 0 and (labels[op] < 0 or label < labels[op]):
                            labels[op] = label
