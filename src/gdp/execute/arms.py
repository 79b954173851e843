"""Arms: ways to run one program, measured in turn, so that what else the machine does falls on all alike."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gdp.capture import Program
from gdp.execute.targets import Target
from gdp.execute.threads import StepRecord, ThreadExecutor
from gdp.graph import I64

Order = Sequence[npt.ArrayLike]
"""[D] the ops of each device, in the order of their starts."""


@dataclass(eq=False)
class Arm:
    """What steps of a program placed in one way took. N ops, S steps; times in ns."""

    name: str
    order: Order
    step_ns: list[int] = field(default_factory=list)  # [S]
    op_ns: list[I64] = field(default_factory=list)  # [S] of [N]
    op_wait_ns: list[I64] = field(default_factory=list)  # [S] of [N] waiting for tensors from elsewhere
    records: list[StepRecord] = field(default_factory=list)  # [S]

    def add(self, record: StepRecord, num_ops: int) -> None:
        """One more step; what it made is not kept."""
        record = replace(record, devices=tuple(replace(device, held={}) for device in record.devices))
        op_ns, wait_ns = np.zeros(num_ops, np.int64), np.zeros(num_ops, np.int64)
        for device in record.devices:
            ops = list(device.ops)
            op_ns[ops] = np.subtract(device.finish_ns, device.start_ns)
            wait_ns[ops] = device.wait_ns
        self.step_ns.append(record.finish_ns - record.start_ns)
        self.op_ns.append(op_ns)
        self.op_wait_ns.append(wait_ns)
        self.records.append(record)

    @property
    def median_step_ns(self) -> int:
        return int(np.median(self.step_ns))

    @property
    def step_quartiles_ns(self) -> tuple[int, int]:
        """The first and the third quartile of the step times."""
        low, high = np.percentile(self.step_ns, (25, 75))
        return int(low), int(high)

    def median_op_ns(self) -> I64:
        """[N] the median of each op's times."""
        return np.asarray(np.median(self.op_ns, axis=0), np.int64)


def run_arms(
    program: Program,
    content: Mapping[int, Tensor],
    orders: Mapping[str, Order],
    targets: Sequence[Target],
    *,
    steps: int,
    warm_up_steps: int = 2,
) -> dict[str, Arm]:
    """Steps of every arm in turn, by name; `content` is what `Program.bind` gives, and is not changed.

    Every arm has its own parameters for as long as this runs. Garbage is collected between steps, not within them.
    ExecutionError if an op fails.
    """
    arms = {name: Arm(name, order) for name, order in orders.items()}
    num_ops = program.graph.num_ops
    with ExitStack() as stack:
        executors: dict[str, ThreadExecutor] = {}
        for name, order in orders.items():
            executors[name] = stack.enter_context(ThreadExecutor(program, order, targets))
            executors[name].load(content)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            for number in range(-warm_up_steps, steps):
                for name, executor in executors.items():
                    record = executor.step(content, is_timed=True)
                    if number >= 0:
                        arms[name].add(record, num_ops)
                gc.collect(0)
        finally:
            if was_enabled:
                gc.enable()
    return arms


def on_one_device(num_ops: int, device: int, num_devices: int) -> list[I64]:
    """[D] the order of all ops on one device, as they are numbered."""
    nothing, all_ops = np.zeros(0, np.int64), np.arange(num_ops, dtype=np.int64)
    return [all_ops if number == device else nothing for number in range(num_devices)]
