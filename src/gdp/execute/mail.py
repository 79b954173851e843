"""Mail: the mailbox of a process's worker, and what else the processes of a run say to each other.

Each common act (a step, collecting results, closing) starts with a byte from every rank to every other: a barrier, at
which ranks also see that they are about to do the same. An idle line waits for that byte, so that a process that ends
is noticed at once by its closed connections.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gdp.capture import Program
from gdp.capture.layouts import fill
from gdp.execute.lanes import CpuLane, Lane, Parcel
from gdp.execute.lines import Hub, Inward, Outward, Receipt, bytes_of
from gdp.execute.ranks import Failure, Ranks, Watch
from gdp.execute.script import Script
from gdp.execute.targets import CPU
from gdp.execute.worker import Stopped

CLOSE, STEP = 0, 1  # common acts; to STEP add 1 if it is timed, 2 if it retains

_RESULTS, _CLOCK = 5, 6  # more of them
_TOKEN, _RECORD, _PING = range(3)  # tags, from the number of tensors on; tensors have their own numbers
_NUM_PINGS = 16

Traffic = Mapping[tuple[int, int], Sequence[int]]
"""By (source, destination): the tensors that go there in a step, in order."""


class Mail:
    """The lines to and from all other ranks; the worker's mailbox."""

    def __init__(
        self, program: Program, home: Sequence[int], traffic: Traffic, ranks: Ranks, lane: Lane,
        timeout_seconds: float, window_bytes: int,
    ) -> None:  # fmt: skip
        self._first_tag = program.graph.num_tensors  # of messages that are no tensors of the graph
        self._program, self._lane, self._timeout_seconds = program, lane, timeout_seconds
        self._home = [home[op] for op in program.graph.producers.tolist()]
        self._wire_device = ranks.target.device if ranks.is_nccl else CPU
        self._rank, count = ranks.rank, len(ranks.names)
        self.peers = [peer for peer in range(count) if peer != ranks.rank]
        self._receipts = {
            peer: tuple(self._receipt(tensor, ranks.target.device) for tensor in traffic[peer, ranks.rank])
            for peer in self.peers
        }
        self._step: tuple[int, dict[int, Sequence[Receipt]]] = (STEP, {})
        groups = _pair_groups(count) if ranks.is_nccl else {}
        self.hub = Hub(window_bytes)
        self._out, self._in = {}, {}
        for peer in self.peers:
            self._out[peer] = Outward(self.hub, peer, groups.get((ranks.rank, peer)), self._dense)
            lane_in = CpuLane(ranks.target, program.memory_for)
            token = self._first_tag + _TOKEN
            self._in[peer] = Inward(self.hub, peer, groups.get((peer, ranks.rank)), lane_in, token)
        self.began_ns = 0  # when all had begun the step
        self.watch = Watch(ranks, f"beats/{ranks.num_executors}", self.hub.fail)
        for thread in self._threads:
            thread.start()

    @property
    def _threads(self) -> list[threading.Thread]:
        return [*self._out.values(), *self._in.values(), self.watch]

    def close(self) -> None:
        """End the threads; all ranks have agreed to."""
        self.watch.over.set()
        for line in self._out.values():
            line.items.put(None)
        for thread in self._threads:
            thread.join()

    def cut(self, seconds: float) -> None:
        """End the threads, and the others' wait for this rank. A process that ends under a waiting thread may abort."""
        self.watch.over.set()
        for peer in self.peers:
            self._out[peer].items.put(None)
            self._in[peer].plans.put(None)
            self._out[peer].cut()
            self._in[peer].cut()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def agree(self, act: int, receipts: Mapping[int, Sequence[Receipt]] | None) -> None:
        """Begin `act` together with all others; `receipts` are what comes of it from each; None: nothing ever again."""
        token = self._first_tag + _TOKEN
        for peer in self.peers:
            self._in[peer].plans.put(None if receipts is None else receipts.get(peer, ()))
            self._out[peer].put(Parcel(token, torch.tensor([act], dtype=torch.uint8)))
        for peer in self.peers:
            content = self.take(peer, token).content
            if content is None or int(content) != act:
                self._fail(peer, "does not do what the others do; all ranks must make the same calls")

    def take(self, peer: int, tag: int) -> Parcel:
        """What `peer` sent under `tag`, as soon as it is here."""
        parcel = self.hub.take(peer, tag, self._timeout_seconds)
        if parcel is None:
            graph, said = self._program.graph, "its part in what all do"
            if tag < self._first_tag:
                said = f"what op {graph.op_names[int(graph.producers[tag])]!r} gives"
            self._fail(peer, f"did not send {said} for {self._timeout_seconds:g} s")
        return parcel

    def collect(self, own: Mapping[int, Tensor | None], wanted: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """On the first rank, copies on the CPU of the tensors `wanted` of each rank, which has them among its `own`."""
        receipts = {peer: [self._receipt(tensor, CPU) for tensor in wanted[peer]] for peer in self.peers}
        self.agree(_RESULTS, receipts if self._rank == 0 else {})
        held: dict[int, Tensor | None] = {}
        for tensor in wanted[self._rank]:
            parcel = self._lane.pack(tensor, own[tensor], CPU)
            if self._rank != 0:
                self._out[0].put(parcel)
                continue
            if parcel.event is not None:
                parcel.event.synchronize()
            held[tensor] = None if parcel.content is None else self._copy(tensor, parcel.content)
        self.finish()
        for peer in self.peers if self._rank == 0 else ():
            held |= {tensor: self.take(peer, tensor).content for tensor in wanted[peer]}
        return {tensor: content for tensor, content in held.items() if content is not None}

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """At the end of a step, on the first rank, the numbers of each rank; nothing on others."""
        tag = self._first_tag + _RECORD
        if self._rank != 0:
            self._out[0].put(Parcel(tag, torch.tensor(numbers)))
            self.finish()
            return []
        return [list(numbers), *(self._take_numbers(peer, tag) for peer in self.peers)]

    def clock_offsets_ns(self, hosts: Sequence[str]) -> list[int]:
        """[D] on the first rank, what to add to each rank's clock to get the first's: from the quickest answers."""
        offsets_ns, far = [0] * len(hosts), [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        if not far:
            return offsets_ns
        pings = [self._first_tag + _PING + number for number in range(_NUM_PINGS)]
        partners = far if self._rank == 0 else [0] * (self._rank in far)
        self.agree(_CLOCK, {partner: [_number_receipt(tag, 1) for tag in pings] for partner in partners})
        for partner in partners:
            trips: list[tuple[int, int]] = []
            for tag in pings:
                if self._rank != 0:
                    self.take(partner, tag)
                before_ns = time.perf_counter_ns()
                self._out[partner].put(Parcel(tag, torch.tensor([before_ns])))
                if self._rank == 0:
                    (theirs_ns,), after_ns = self._take_numbers(partner, tag), time.perf_counter_ns()
                    trips.append((after_ns - before_ns, (before_ns + after_ns) // 2 - theirs_ns))
            if self._rank == 0:
                offsets_ns[partner] = min(trips)[1]
        self.finish()
        return offsets_ns

    def line_times_ns(self) -> list[int]:
        """Of this step: for each tensor sent, when it was given and its turn came; for each received, when it came."""
        times_ns: list[int] = []
        for peer in self.peers:
            times_ns += itertools.chain(*self._out[peer].times_ns[1:])  # the first was no tensor
        for peer in self.peers:
            times_ns += self._in[peer].arrivals_ns[: len(self._receipts[peer])]
        return times_ns

    def plan_step(self, act: int, record_size: Callable[[int], int]) -> None:
        """The step to come is such an act; the first rank gets that many numbers from each other after it."""
        receipts: dict[int, Sequence[Receipt]] = dict(self._receipts)
        if self._rank == 0:
            for peer in self.peers:
                receipts[peer] = *receipts[peer], _number_receipt(self._first_tag + _RECORD, record_size(peer))
        self._step = act, receipts

    # -- as Mailbox says, in the worker's thread -------------------------------------------------------------------

    def begin(self) -> None:
        for line in self._out.values():
            line.times_ns.clear()
        self.agree(*self._step)
        self.began_ns = time.perf_counter_ns()

    def send(self, tensor: int, content: Tensor | None, device: int) -> None:
        self._out[device].put(self._lane.pack(tensor, content, self._wire_device))

    def receive(self, tensor: int) -> Tensor | None:
        return self._lane.unpack(self.take(self._home[tensor], tensor))

    def finish(self) -> None:
        peer = self.hub.wait_sent(self._timeout_seconds)
        if peer is not None:
            self._fail(peer, f"did not take what was sent to it for {self._timeout_seconds:g} s")

    def _fail(self, rank: int, what: str) -> NoReturn:
        self.hub.fail(Failure(rank, what))
        raise Stopped

    def _receipt(self, tensor: int, device: torch.device) -> Receipt:
        """Of a tensor of the graph, which is to be on `device`."""
        if self._program.tensor_values[tensor] < 0:
            return Receipt(tensor)
        make = partial(self._program.memory_for, tensor, CPU if device.type == "cpu" else self._wire_device)
        return Receipt(tensor, int(self._program.graph.tensor_bytes[tensor]), make, device)

    def _take_numbers(self, peer: int, tag: int) -> list[int]:
        content = self.take(peer, tag).content
        numbers: list[int] = [] if content is None else content.tolist()
        return numbers

    def _copy(self, tensor: int, content: Tensor) -> Tensor:
        copy = self._program.memory_for(tensor, CPU)
        bytes_of(copy).copy_(bytes_of(self._dense(tensor, content)))
        return copy

    def _dense(self, tag: int, content: Tensor) -> Tensor:
        """The content laid out as `memory_for` lays out the receiver's."""
        if tag >= self._first_tag:
            return content
        if self._program.tensor_layouts[tag] is not None:
            return content.contiguous()
        made = self._program.layouts[self._program.tensor_values[tag]]
        if content.dtype == made.dtype and content.stride() == made.stride and tuple(content.shape) == made.size:
            return content
        return fill(self._program.memory_for(tag, content.device), content)


def traffic_of(all_scripts: Sequence[Script]) -> Traffic:
    traffic: dict[tuple[int, int], list[int]] = {
        pair: [] for pair in itertools.permutations(range(len(all_scripts)), 2)
    }
    for source, script in enumerate(all_scripts):
        for task in script:
            for device, tensor in task.sends:
                traffic[source, device].append(tensor)
    return traffic


def _number_receipt(tag: int, size: int) -> Receipt:
    return Receipt(tag, 0, partial(torch.empty, size, dtype=torch.int64))


def _pair_groups(count: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group for each line, so that what goes one way does not wait for what goes the other."""
    return {pair: dist.new_group(sorted(pair), backend="nccl") for pair in itertools.permutations(range(count), 2)}
