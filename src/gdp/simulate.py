"""The one scorer: what a placement costs under the machine model (docs/machine-model.md, sections 3 and 4).

`simulate` returns every start and finish, `evaluate` and `evaluate_many` only step time and peaks, for search.
N ops, T tensors, D devices, B placements. Times in ns, sizes in bytes. The compiled code is in `engine.py`.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from numba import njit

from gdp import engine, memory
from gdp.errors import InputError
from gdp.graph import I64
from gdp.levels import ranks_of
from gdp.plan import Plan
from gdp.problem import Placement, Problem

NEVER = int(engine.NEVER)


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated step, in full."""

    problem: Problem
    placement: Placement  # [N]
    op_start_ns: I64  # [N]
    op_finish_ns: I64  # [N]
    order: tuple[I64, ...]  # [D] ops of each device in the order of their starts
    transfer_tensors: I64  # [R] one row a transfer, in the order of their requests
    transfer_destinations: I64  # [R]
    transfer_start_ns: I64  # [R]
    transfer_end_ns: I64  # [R] end of channel occupancy
    transfer_arrival_ns: I64  # [R]
    step_time_ns: int
    peak_memory_bytes: I64  # [D]

    @cached_property
    def missing_bytes(self) -> I64:
        """[D] by how much the peak passes the memory limit; 0 where it fits."""
        return np.maximum(self.peak_memory_bytes - self.problem.memory_limit_bytes, 0)

    @cached_property
    def reasons(self) -> list[str]:
        """Why the plan is infeasible, one sentence each; empty when it is feasible."""
        reasons = self.problem.broken_constraints(self.placement)
        for device, missing in enumerate(self.missing_bytes.tolist()):
            if missing:
                name, limit = self.problem.cluster.devices[device].name, self.problem.memory_limit_bytes[device]
                reasons.append(
                    f"{name}: peak {self.peak_memory_bytes[device]} bytes, limit {limit}, {missing} bytes missing"
                )
        return reasons

    @property
    def feasible(self) -> bool:
        """Whether memory, groups and allowed devices are all respected."""
        return not self.reasons

    @cached_property
    def busy_fraction(self) -> npt.NDArray[np.float64]:
        """[D] share of the step in which the device computes."""
        busy = np.bincount(self.placement, self.op_finish_ns - self.op_start_ns, self.problem.num_devices)
        return np.asarray(busy / max(self.step_time_ns, 1), np.float64)


class Workspace:
    """A thread's working memory for simulating placements of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        num_ops, num_devices = problem.num_ops, problem.num_devices
        num_tensors, num_edges = problem.graph.num_tensors, len(problem.graph.consumers)
        num_routes = num_devices * num_devices
        words = [num_ops]
        for _ in range(3):
            words.append((words[-1] + 63) // 64)
        self.scratch = engine.Scratch(
            missing=np.zeros(num_ops, np.int32),
            bits0=np.zeros((num_devices, words[1]), np.uint64),
            bits1=np.zeros((num_devices, words[2]), np.uint64),
            bits2=np.zeros((num_devices, words[3]), np.uint64),
            running=np.zeros(num_devices, np.uint32),
            until_ns=np.zeros(num_devices, np.int64),
            remaining_ns=np.zeros(num_devices, np.int64),
            channel_free_ns=np.zeros(len(problem.cluster.channels), np.int64),
            queues=engine.Queues(
                last=np.zeros(num_routes, np.int32),
                num_waiting=np.zeros(num_routes, np.int32),
                heap_ns=np.zeros(num_routes + num_edges, np.int64),
                heap_item=np.zeros(num_routes + num_edges, np.int32),
            ),
        )
        self.schedule = engine.Schedule(
            finish_ns=np.zeros(num_ops, np.int64),
            ops=np.zeros((num_devices, num_ops), np.uint32),
            num_ops=np.zeros(num_devices, np.int64),
            transfer_tensor=np.zeros(num_edges, np.uint32),
            transfer_route=np.zeros(num_edges, np.uint32),
            transfer_start_ns=np.zeros(num_edges, np.int64),
            transfer_end_ns=np.zeros(num_edges, np.int64),
            arrival_ns=np.zeros(num_edges, np.int64),
            first=np.zeros(num_routes, np.int32),
            following=np.zeros(num_edges, np.int32),
            num_transfers=np.zeros(1, np.int64),
        )
        self.by_rank = engine.Order(np.zeros(num_devices + 1, np.int64), np.zeros(0, np.uint32))
        self.memory = memory.Memory(
            freed_ns=np.zeros(num_tensors, np.int64),
            freed_by=np.zeros(num_tensors, np.int32),
            op_frees_bytes=np.zeros(num_ops, np.int64),
            transfer_frees_bytes=np.zeros(num_edges, np.int64),
            last_there=np.zeros(num_devices, np.uint32),
            heap_ns=np.zeros(2 * num_devices + num_edges, np.int64),
            heap_item=np.zeros(2 * num_devices + num_edges, np.int64),
            peak_bytes=np.zeros(num_devices, np.int64),
        )

    @classmethod
    def borrow(cls, problem: Problem) -> "Workspace":
        """One that was given back, or a new one: making one takes as long as a simulation."""
        try:
            workspace: Workspace = problem.spare_workspaces.pop()
        except IndexError:
            workspace = cls(problem)
        return workspace

    def give_back(self) -> None:
        """Let others borrow it; the one who does so has copied what is needed."""
        self._problem.spare_workspaces.append(self)


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

    Raises InputError for a placement on a device that cannot run the op, and for an order that deadlocks or does not
    list each device's ops once.
    """
    devices = problem.check_placement(placement)
    num_devices = problem.num_devices
    rank, op_of_rank = problem.ranks if priority is None else ranks_of(priority)
    times = problem.time_table_ns if op_time_ns is None else op_time_ns
    workspace = Workspace.borrow(problem)
    schedule = workspace.schedule
    status, step_time_ns = _run(
        problem.arrays,
        times,
        devices,
        rank,
        op_of_rank,
        NEVER,
        workspace.scratch,
        schedule,
        workspace.by_rank if order is None else _flat_order(order, devices, num_devices),
        workspace.memory,
    )
    done = tuple(
        ops[:count].astype(np.int64) for ops, count in zip(schedule.ops, schedule.num_ops.tolist(), strict=True)
    )
    if status == engine.DEADLOCK:
        stuck = _stuck_op(order or (), done)
        raise InputError(
            f"order: deadlock, op {stuck} waits for an op that comes later on its own or another device; reorder"
        )
    placed = devices.astype(np.int64)
    sent = slice(0, int(schedule.num_transfers[0]))
    finish_ns = schedule.finish_ns.copy()
    simulation = Simulation(
        problem=problem,
        placement=placed,
        op_start_ns=finish_ns - times[np.arange(len(placed)), placed if times.shape[1] > 1 else 0],
        op_finish_ns=finish_ns,
        order=done,
        transfer_tensors=problem.tensor_numbers[schedule.transfer_tensor[sent]],
        transfer_destinations=schedule.transfer_route[sent].astype(np.int64) % num_devices,
        transfer_start_ns=schedule.transfer_start_ns[sent].copy(),
        transfer_end_ns=schedule.transfer_end_ns[sent].copy(),
        transfer_arrival_ns=schedule.arrival_ns[sent].copy(),
        step_time_ns=int(step_time_ns),
        peak_memory_bytes=workspace.memory.peak_bytes.copy(),
    )
    workspace.give_back()
    return simulation


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
    """(step times [B] in ns, peaks [B, D] in bytes) of `placements` [B, N], over threads without the GIL.

    A run stops early once its step time must reach `stop_ns`: its time is then a lower bound of at least `stop_ns`, and
    its peaks are 0.
    """
    batch = np.stack([problem.check_placement(placement) for placement in np.asarray(placements)])
    rank, op_of_rank = problem.ranks if priority is None else ranks_of(priority)
    times = np.zeros(len(batch), np.int64)
    peaks = np.zeros((len(batch), problem.num_devices), np.int64)
    num_threads = min(num_threads or default_threads(), len(batch))
    shares = np.array_split(np.arange(len(batch)), num_threads)
    workspaces = [Workspace.borrow(problem) for _ in shares]

    def work(share: npt.NDArray[np.intp], workspace: Workspace) -> None:
        _run_batch(
            problem.arrays,
            problem.time_table_ns,
            batch,
            share,
            rank,
            op_of_rank,
            stop_ns,
            workspace.scratch,
            workspace.schedule,
            workspace.by_rank,
            workspace.memory,
            times,
            peaks,
        )

    if num_threads == 1:
        work(shares[0], workspaces[0])
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(work, shares, workspaces))
    for workspace in workspaces:
        workspace.give_back()
    return times, peaks


def default_threads() -> int:
    """How many threads work at once unless the caller says otherwise: the processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def replay(problem: Problem, plan: Plan) -> Simulation:
    """The simulation of `plan` with its own order. InputError if its graph or cluster is another, or it deadlocks."""
    plan.check_belongs(problem.graph, problem.cluster)
    return simulate(problem, plan.placement, order=plan.order)


def verify(problem: Problem, plan: Plan) -> list[str]:
    """What is wrong with `plan`: figures that a replay does not give, reasons why it is infeasible. Empty if none."""
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


@njit(cache=True, nogil=True)
def _run(arrays, op_time_ns, placement, rank, op_of_rank, stop_ns, scratch, schedule, order, memory_scratch):  # type: ignore[no-untyped-def]
    # `stop_ns` is an argument since Numba would compile `engine.run` once more for a constant
    status, step_time_ns = engine.run(
        arrays, op_time_ns, placement, rank, op_of_rank, stop_ns, scratch, schedule, order
    )
    if status == engine.COMPLETED:
        memory.find_peaks(arrays, op_time_ns, placement, schedule, memory_scratch)
    else:
        memory_scratch.peak_bytes[:] = 0
    return status, step_time_ns


@njit(cache=True, nogil=True)
def _run_batch(  # type: ignore[no-untyped-def]
    arrays, op_time_ns, placements, share, rank, op_of_rank, stop_ns, scratch, schedule, order, memory_scratch,
    times, peaks,
):  # fmt: skip
    for index in share:
        _, times[index] = _run(
            arrays, op_time_ns, placements[index], rank, op_of_rank, stop_ns, scratch, schedule, order, memory_scratch
        )
        peaks[index] = memory_scratch.peak_bytes


def _flat_order(order: Sequence[npt.ArrayLike], devices: npt.NDArray[np.uint8], num_devices: int) -> engine.Order:
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
    return engine.Order(
        np.concatenate(([0], np.cumsum([len(ops) for ops in lists]))).astype(np.int64), flat.astype(np.uint32)
    )


def _stuck_op(order: Sequence[npt.ArrayLike], done: Sequence[I64]) -> int:
    """The first op of the first device that has not started all its ops."""
    return next(
        int(np.asarray(ops)[len(there)])
        for ops, there in zip(order, done, strict=True)
        if len(there) < len(np.asarray(ops))
    )
