"""The one scorer: the step time and the memory of a placement (docs/machine-model.md, sections 3 and 4). `simulate`
returns every start and finish, `evaluate` and `evaluate_many` only step time and peaks, for search. N ops, T tensors, D
devices, B placements. Times in ns, sizes in bytes. The compiled code is in `engine.py`.

Allocations are from when until when each tensor of a simulated step, and each copy of one, is in memory (section 4);
`memory.py` has the peaks alone."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numba.extending import overload

from gdp import notebook
from gdp.arrays import I64, Bool, combined
from gdp.compiled import INLINED, inner, kernel
from gdp.costs.ranges import StepKind, StepRange, range_of
from gdp.errors import InputError
from gdp.simulator.engine import COMPLETED, DEADLOCK, run
from gdp.simulator.engine import NEVER as NEVER  # for callers
from gdp.simulator.many_devices import run_on_many
from gdp.simulator.memory import find_peaks
from gdp.simulator.mfu import mfu_of
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Devices, Placement, Problem
from gdp.simulator.records import Dispatch, ManyScratch


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated step, in full."""

    problem: Problem
    placement: Placement  # [N]
    op_start_ns: I64  # [N]
    op_begin_ns: I64  # [N] when it begins to compute: from its start on it holds its device, and waits for the host
    op_finish_ns: I64  # [N]
    order: tuple[I64, ...]  # [D] ops of each device in the order of their starts
    transfer_tensors: I64  # [R] one row a transfer, in the order of their requests
    transfer_destinations: I64  # [R]
    transfer_start_ns: I64  # [R]
    transfer_end_ns: I64  # [R] end of channel occupancy
    transfer_arrival_ns: I64  # [R]
    step_time_ns: int
    peak_memory_bytes: I64  # [D]

    def __repr__(self) -> str:
        """Returns `Simulation(13.203 ms: 'gnmt-2' on '2xl4-24g', 1,000 transfers)`, or why it is infeasible."""
        names = f"{self.problem.graph.name!r} on {self.problem.cluster.name!r}"
        transfers = notebook.count(len(self.transfer_tensors), "transfer")
        fits = "" if self.feasible else f"infeasible, {self.reasons[0]}; "
        return f"Simulation({fits}{notebook.milliseconds(self.step_time_ns)}: {names}, {transfers})"

    @cached_property
    def missing_bytes(self) -> I64:
        """[D] by how much the peak passes the memory limit; 0 where it fits."""
        return np.maximum(self.peak_memory_bytes - self.problem.memory_limit_bytes, 0)

    @cached_property
    def reasons(self) -> list[str]:
        """Reasons why the plan is infeasible, one sentence each; empty when it is feasible."""
        reasons = self.problem.broken_constraints(self.placement)
        for device, missing in enumerate(self.missing_bytes.tolist()):
            if missing:
                name, limit = self.problem.cluster.devices[device].name, self.problem.memory_limit_bytes[device]
                peak = self.peak_memory_bytes[device]
                reasons.append(f"{name}: peak {peak} bytes, limit {limit}, {missing} bytes missing")
        return reasons

    @property
    def feasible(self) -> bool:
        """True if memory, groups and allowed devices are all respected."""
        return not self.reasons

    @cached_property
    def busy_fraction(self) -> npt.NDArray[np.float64]:
        """[D] share of the step in which the device computes."""
        return self._shares(self.op_finish_ns - self.op_begin_ns)

    @cached_property
    def host_wait_fraction(self) -> npt.NDArray[np.float64]:
        """[D] share of the step in which the device waits for its host to issue the op that it has started."""
        return self._shares(self.op_begin_ns - self.op_start_ns)

    @cached_property
    def host_issue_ns(self) -> I64:
        """[2, N] when the host of its device begins to issue each op, and when it has (docs/machine-model.md, 3a)."""
        own_ns = self.problem.host_time_ns[np.arange(len(self.placement)), self.placement]
        issued_ns = np.zeros_like(own_ns)
        for ops in self.order:
            clock_ns = np.cumsum(own_ns[ops])  # of a host that waits for nothing
            waited_ns = np.where(self.problem.graph.host_waits[ops], self.op_finish_ns[ops] - clock_ns, 0)
            # an op ends after it is issued, so each wait puts off all later ops at least as long as those before
            issued_ns[ops] = clock_ns + np.append(0, np.maximum.accumulate(waited_ns))[:-1]
        return np.stack((issued_ns - own_ns, issued_ns))

    def _shares(self, times_ns: I64) -> npt.NDArray[np.float64]:
        sums = np.bincount(self.placement, times_ns, self.problem.num_devices)
        return np.asarray(sums / max(self.step_time_ns, 1), np.float64)

    @cached_property
    def step_range(self) -> StepRange | None:
        """The range of its time by measured steps of its kind; None where ops are not priced by kernels."""
        return range_of(self.problem.graph, self.problem.cluster, self.placement)

    @property
    def step_kind(self) -> StepKind | None:
        """The kind of step that the error of its time depends on; None where ops are not priced by kernels."""
        return StepKind.of(self.problem.graph, self.problem.cluster, self.placement)

    @cached_property
    def mfu(self) -> tuple[float, str] | None:
        """Model FLOPs utilisation, and the type that it is of; None without FLOPs. See `mfu_of`."""
        return mfu_of(self.problem, self.placement, self.step_time_ns)


def simulate(
    problem: Problem,
    placement: npt.ArrayLike,
    *,
    priority: npt.ArrayLike | None = None,
    order: Sequence[npt.ArrayLike] | None = None,
    op_time_ns: I64 | None = None,
) -> Simulation:
    """One step under `placement` [N]. Ready ops start by `priority` [N] (default: the b-level), or, when `order` is
    given ([D] lists of ops), each device starts its ops in that order: the replay of a plan.

    `op_time_ns` [N, D] replaces the problem's times (of devices that can run an op; priorities stay).

    InputError for a placement where an op cannot run, and for an order that deadlocks or does not list each op once."""
    began = time.perf_counter()
    devices = problem.check_placement(placement)
    num_devices = problem.num_devices
    simulator = problem.simulator
    times_ns = simulator.time_table_ns if op_time_ns is None else op_time_ns.view()
    times_ns.setflags(write=False)  # Numba would compile everything anew for a writable one
    step_time_ns, peaks = np.zeros(1, np.int64), np.zeros((1, num_devices), np.int64)
    if order is None:
        dispatch = simulator.dispatch(problem.order, priority)
    else:
        dispatch = _replaying(simulator.dispatch(problem.order), order, devices)
    with simulator.workspace() as workspace:
        run_batch(simulator.arrays, times_ns[None], devices[None], dispatch, NEVER, 0, workspace, step_time_ns, peaks)
        schedule = workspace.schedule
        done = schedule.orders()
        if step_time_ns[0] == DEADLOCK:
            stuck = _stuck_op(order or (), done)
            raise InputError(
                f"order: deadlock, op {stuck} waits for an op that comes later on its own or another device; reorder"
            )
        placed = devices.astype(np.int64)
        sent = slice(0, int(schedule.num_transfers[0]))
        finish_ns = schedule.finish_ns.copy()
        begin_ns = finish_ns - times_ns[np.arange(len(placed)), placed if times_ns.shape[1] > 1 else 0]
        simulator.time(time.perf_counter() - began)
        return Simulation(
            problem=problem,
            placement=placed,
            op_start_ns=schedule.start_ns.copy() if simulator.has_hosts else begin_ns,
            op_begin_ns=begin_ns,
            op_finish_ns=finish_ns,
            order=done,
            transfer_tensors=simulator.tensor_numbers[schedule.transfer_tensor[sent]],
            transfer_destinations=schedule.transfer_route[sent].astype(np.int64) % num_devices,
            transfer_start_ns=schedule.transfer_start_ns[sent].copy(),
            transfer_end_ns=schedule.transfer_end_ns[sent].copy(),
            transfer_arrival_ns=schedule.arrival_ns[sent].copy(),
            step_time_ns=int(step_time_ns[0]),
            peak_memory_bytes=peaks[0],
        )


def mean_step_time_ns(simulation: Simulation, op_times_ns: I64) -> int:
    """Replays the order of `simulation` under each of `op_times_ns` [K, N, D]; returns the mean time, rounded down.
    InputError for an order that deadlocks."""
    problem, simulator = simulation.problem, simulation.problem.simulator
    devices = problem.check_placement(simulation.placement)
    dispatch = _replaying(simulator.dispatch(problem.order), simulation.order, devices)
    time_ns = np.zeros(1, np.int64)
    tables = op_times_ns.view()
    tables.setflags(write=False)  # Numba would compile everything anew for writable ones
    with simulator.workspace() as workspace:
        no_peaks = np.zeros((1, 0), np.int64)
        run_batch(simulator.arrays, tables, devices[None], dispatch, NEVER, 0, workspace, time_ns, no_peaks)
    if time_ns[0] == DEADLOCK:
        raise InputError("order: deadlock under other op times; reorder")
    return int(time_ns[0])


def evaluate(problem: Problem, placement: npt.ArrayLike, *, priority: npt.ArrayLike | None = None) -> tuple[int, I64]:
    """(step time in ns, peak memory in bytes [D]) of `placement`."""
    times, peaks = evaluate_many(problem, np.asarray(placement)[None], priority=priority, num_threads=1)
    return int(times[0]), peaks[0]


def evaluate_many(
    problem: Problem,
    placements: npt.ArrayLike,
    *,
    priority: npt.ArrayLike | None = None,
    stop_ns: int = NEVER,
    num_threads: int | None = None,
) -> tuple[I64, I64]:
    """(step times [B] in ns, peaks [B, D] in bytes) of `placements` [B, N], over threads without the GIL. A run stops
    early once its step time must reach `stop_ns`: its time is then a lower bound of at least `stop_ns`, and its peaks
    are 0."""
    batch = np.stack([problem.check_placement(placement) for placement in np.asarray(placements)])
    simulator = problem.simulator
    dispatch = simulator.dispatch(problem.order, priority)
    times = np.zeros(len(batch), np.int64)
    peaks = np.zeros((len(batch), problem.num_devices), np.int64)
    num_threads = min(num_threads or default_threads(), len(batch))
    ends = np.linspace(0, len(batch), num_threads + 1).astype(np.int64).tolist()

    def work(share: slice) -> None:
        with simulator.workspace() as workspace:
            own = batch[share], dispatch, stop_ns, 0, workspace, times[share], peaks[share]
            run_batch(simulator.arrays, simulator.time_table_ns[None], *own)

    shares = [slice(*share) for share in pairwise(ends)]
    if num_threads == 1:
        work(shares[0])
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(work, shares))
    return times, peaks


def default_threads() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def replay(problem: Problem, plan: Plan) -> Simulation:
    """The simulation of `plan` with its own order. InputError if its graph or cluster is another, or it deadlocks."""
    plan.check_belongs(problem.graph, problem.cluster)
    return simulate(problem, plan.placement, order=plan.order)


def verify(problem: Problem, plan: Plan) -> list[str]:
    """Returns the faults of `plan`: figures that a replay does not give, and reasons why it is infeasible."""
    simulation = replay(problem, plan)
    wrong = list(simulation.reasons)
    if simulation.step_time_ns != plan.step_time_ns:
        wrong.append(f"step_time_ns is {plan.step_time_ns}; the replay gives {simulation.step_time_ns}")
    if not np.array_equal(simulation.peak_memory_bytes, plan.peak_memory_bytes):
        wrong.append(
            f"peak_memory_bytes is {plan.peak_memory_bytes.tolist()}; "
            f"the replay gives {simulation.peak_memory_bytes.tolist()}"
        )
    if plan.lower_bound_ns > simulation.step_time_ns:
        wrong.append(f"lower_bound_ns is {plan.lower_bound_ns}, above the step time {simulation.step_time_ns}")
    return wrong


def _run(arrays, op_time_ns, placement, dispatch, stop_ns, scratch, schedule):
    """Runs `engine.run`, or `run_on_many` where there are more devices than bits in a word."""
    chosen = run_on_many if isinstance(scratch, ManyScratch) else run
    return chosen(arrays, op_time_ns, placement, dispatch, stop_ns, scratch, schedule)


@overload(_run, jit_options=INLINED)
def _choose_run(arrays, op_time_ns, placement, dispatch, stop_ns, scratch, schedule):
    """Chooses when it is compiled, by the type of the working memory."""
    chosen = run_on_many if scratch.instance_class is ManyScratch else run
    return lambda arrays, op_time_ns, placement, dispatch, stop_ns, scratch, schedule: chosen(
        arrays, op_time_ns, placement, dispatch, stop_ns, scratch, schedule
    )


@inner
def mean_step_time(arrays, op_times_ns, placement, dispatch, stop_ns, floor_ns, workspace):
    """Returns (status, mean step time) over the tables `op_times_ns` [K, N, D], rounded down; a lower bound of at least
    `stop_ns` once it must reach that. `floor_ns` is a lower bound under every table: what the runs still to come take
    at least. The last run's schedule stays in the workspace."""
    num_tables = len(op_times_ns)
    left_ns = stop_ns * num_tables if stop_ns < NEVER // num_tables else NEVER
    total_ns = 0
    for table in range(num_tables):
        others_ns = (num_tables - 1 - table) * floor_ns
        status, step_time_ns = _run(
            arrays, op_times_ns[table], placement, dispatch, left_ns - total_ns - others_ns, workspace[0], workspace[1]
        )
        total_ns += step_time_ns
        if status != COMPLETED:
            return status, (total_ns + others_ns) // num_tables
    return COMPLETED, total_ns // num_tables


@kernel
def run_batch(arrays, op_times_ns, placements, dispatch, stop_ns, floor_ns, workspace, times_ns, peak_bytes):
    """Fills `times_ns` [B] with the mean step times of `placements` [B, N] (see `mean_step_time`), or DEADLOCK, and
    `peak_bytes` [B, D] with the peaks under the last table. A run that stops early has no peaks: its row stays as it
    is. With `peak_bytes` [B, 0] no peaks are found."""
    for index in range(len(placements)):
        status, times_ns[index] = mean_step_time(
            arrays, op_times_ns, placements[index], dispatch, stop_ns, floor_ns, workspace
        )
        if status == COMPLETED and peak_bytes.shape[1] > 0:
            find_peaks(arrays, op_times_ns[-1], placements[index], workspace[1], workspace[2])
            for device in range(peak_bytes.shape[1]):
                peak_bytes[index, device] = workspace[2].peak_bytes[device]
        elif status == DEADLOCK:
            times_ns[index] = DEADLOCK


def _replaying(dispatch: Dispatch, order: Sequence[npt.ArrayLike], devices: Devices) -> Dispatch:
    """Returns `dispatch` with `order` [D][] to replay. InputError unless each op is once there, on its device."""
    num_devices = len(dispatch.order_offsets) - 1
    lists = [np.asarray(ops, np.int64) for ops in order]
    if len(lists) != num_devices:
        raise InputError(f"order has {len(lists)} lists; one per device, {num_devices}, is expected")
    flat = np.concatenate(lists)
    owner = np.repeat(np.arange(num_devices), [len(ops) for ops in lists])
    if len(flat) != len(devices) or not np.array_equal(np.sort(flat), np.arange(len(devices))):
        raise InputError(f"order lists {len(flat)} ops; each of the {len(devices)} ops exactly once is expected")
    if (devices[flat] != owner).any():
        op = int(flat[np.argmax(devices[flat] != owner)])
        raise InputError(f"order: op {op} is listed on another device than its own, {devices[op]}; list it there")
    offsets = np.concatenate(([0], np.cumsum([len(ops) for ops in lists]))).astype(np.int64)
    return dispatch._replace(order_offsets=offsets, order_ops=flat.astype(np.uint32))


def _stuck_op(order: Sequence[npt.ArrayLike], done: Sequence[I64]) -> int:
    """The first op of the first device that has not started all its ops."""
    pairs = zip(map(np.asarray, order), done, strict=True)
    return next(int(ops[len(there)]) for ops, there in pairs if len(there) < len(ops))


@dataclass(frozen=True, eq=False)
class Allocations:
    """Holds tensors and their copies, one row each: on which device, from when, until when."""

    devices: I64
    tensors: I64
    is_copy: Bool
    sizes_bytes: I64
    from_ns: I64
    until_ns: I64  # NEVER: to the end of the step

    @classmethod
    def of(cls, simulation: Simulation) -> "Allocations":
        """Returns the allocations of a simulated step, without resident bytes."""
        graph, placement = simulation.problem.graph, simulation.placement
        num_devices = simulation.problem.num_devices
        freed_ns = simulation.op_finish_ns[graph.producers].copy()
        consumed_ns, tensors = simulation.op_finish_ns[graph.consumers], graph.edge_tensors
        here = placement[graph.producers[tensors]] == placement[graph.consumers]
        np.maximum.at(freed_ns, graph.base[tensors[here]], consumed_ns[here])
        np.maximum.at(freed_ns, graph.base[simulation.transfer_tensors], simulation.transfer_end_ns)
        freed_ns[graph.base[graph.is_kept]] = NEVER
        owned = np.flatnonzero((graph.view_of < 0) & ~graph.is_resident)
        copied = tensors[~here] * num_devices + placement[graph.consumers[~here]]
        copies, of_edge = np.unique(copied, return_inverse=True)
        copies_ns = combined(np.maximum, of_edge, consumed_ns[~here], len(copies))
        sent, to = simulation.transfer_tensors, simulation.transfer_destinations
        return cls(
            devices=np.concatenate((placement[graph.producers[owned]], to)),
            tensors=np.concatenate((owned, sent)),
            is_copy=np.repeat([False, True], [len(owned), len(sent)]),
            sizes_bytes=np.concatenate((graph.tensor_bytes[owned], graph.tensor_bytes[sent])),
            from_ns=np.concatenate((simulation.op_start_ns[graph.producers[owned]], simulation.transfer_start_ns)),
            until_ns=np.concatenate((freed_ns[owned], copies_ns[np.searchsorted(copies, sent * num_devices + to)])),
        )
