"""Chains of tiny ops, captured and run as a plan is: the time to launch an op, and to hand a tensor over."""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gdp.execute.calibrate.work import Extent, Figure, Log
from gdp.execute.forked.forked_executor import may_fork
from gdp.execute.host_executor import host_executor
from gdp.execute.plan_executor import StepRecord
from gdp.execute.targets import Target
from gdp.models.pytorch import Program, capture


class Chains(nn.Module):
    """Chains of additions, one from each input."""

    def __init__(self, num_ops: int) -> None:
        super().__init__()
        self.num_ops = num_ops

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        outputs = []
        for x in inputs:
            for _ in range(self.num_ops):
                x = torch.add(x, x)
            outputs.append(x)
        return outputs


def chain_program(num_chains: int, num_ops: int, num_bytes: int = 4) -> Program:
    """Captures chains of tensors of `num_bytes`; the ops are the inputs, then those of each chain in turn."""
    inputs = [torch.zeros(num_bytes // 4) for _ in range(num_chains)]
    return capture(Chains(num_ops), inputs, name="chains", training=False).program


def timed_steps(
    program: Program, order: Sequence[Sequence[int]], targets: Sequence[Target], num: int
) -> list[StepRecord]:
    """Runs timed steps, after one that does not count."""
    inputs = {source.tensor: program.memory_for(source.tensor).zero_() for source in program.sources.values()}
    with host_executor(program, order, targets) as executor:
        return [executor.step(inputs, is_timed=True) for _ in range(num + 1)][1:]


def _op_ns(records: Sequence[StepRecord], number: int) -> float:
    """Returns the median ns of an op of device `number`, except the first, which is a source."""
    return statistics.median(
        finish - start
        for device in (record.devices[number] for record in records)
        for start, finish in zip(device.start_ns[1:], device.finish_ns[1:], strict=True)
    )


def _chain_ns(records: Sequence[StepRecord]) -> float:
    """Returns the median ns from the end of the first device's source to that of the last op on any device."""
    return statistics.median(
        max(device.finish_ns[-1] for device in record.devices) - record.devices[0].finish_ns[0] for record in records
    )


def launches(targets: Sequence[Target], effort: Extent, log: Log) -> tuple[list[Figure], list[str]]:
    """[D] Measures the ns of a tiny op; a note compares their pace on all devices at once with that on one alone."""
    log("launch overhead on all devices at once")
    num_devices, num_ops = len(targets), effort.num_ops
    chains = [range(number * num_ops, (number + 1) * num_ops) for number in range(num_devices)]
    order = [[number, *(num_devices + op for op in chain)] for number, chain in enumerate(chains)]
    busy = timed_steps(chain_program(num_devices, num_ops), order, targets, effort.num_steps)
    figures, paces_ns = [], []
    program = chain_program(1, num_ops)
    for number, target in enumerate(targets):
        log(f"launch overhead on {target.name} alone")
        alone = timed_steps(program, [range(num_ops + 1)], [target], effort.num_steps)
        figures.append(Figure(_op_ns(busy, number), _op_ns(alone, 0)))
        paces_ns.append(_chain_ns(alone) / num_ops)
    note = (
        f"tiny ops on all devices at once: one in {_chain_ns(busy) / num_ops / 1000:.1f} us on each, alone in "
        f"{max(paces_ns) / 1000:.1f} us"
    )
    if not may_fork(targets):
        note += ", since the worker threads of one process take turns in Python"
    return figures, [note] if num_devices > 1 else []


def hop_ns(program: Program, pair: Sequence[Target], num_steps: int) -> float:
    """Measures the ns by which a hand-over lengthens a chain whose ops alternate between two devices."""
    num_ops = program.graph.num_ops
    here, there = (_chain_ns(timed_steps(program, [range(num_ops)], [target], num_steps)) for target in pair)
    both = _chain_ns(timed_steps(program, [range(0, num_ops, 2), range(1, num_ops, 2)], pair, num_steps))
    return (both - (here + there) / 2) / (num_ops - 1)
