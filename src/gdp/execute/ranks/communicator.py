"""Communicator: the transport of a process's worker, and all other messages between the processes of a run.

Each collective (a step, collecting results, closing) starts with a byte from every rank to every other: a barrier, at
which ranks also see that they are about to do the same. An idle connection waits for that byte, so that a process that
ends is noticed at once by its closed connections.
"""

import itertools
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gdp.execute.backends import Backend, Content, CpuBackend, SentTensor, as_tensor
from gdp.execute.ranks.connections import Groups, IncomingMessage, Receiver, Sender, TransferState, bytes_of
from gdp.execute.ranks.ranks import Failure, HeartbeatMonitor, Ranks
from gdp.execute.script import Traffic
from gdp.execute.targets import CPU
from gdp.execute.worker import Stopped
from gdp.models.pytorch import Program
from gdp.models.pytorch.strides import fill

CLOSE, STEP = 0, 1  # collectives; to STEP add 1 if it is timed, 2 if it retains

_CLOCK, _OBJECTS, _TENSORS = 5, 6, 8  # further collectives; to the last add 1 if all ranks receive
_TOKEN, _DONE, _PING = range(3)  # tags, from the number of tensors on; tensors have their own numbers
_NUM_PINGS = 16
_ITEM = _PING + _NUM_PINGS  # the first tag of tensors that are none of the graph


class Communicator:
    """The connections to and from all other ranks; the worker's transport.

    `home` is the device of each op, `traffic` the tensors of a step on each connection. `window_bytes` is the size of
    tensors received ahead of their use.
    """

    def __init__(
        self,
        program: Program,
        home: Mapping[int, int],
        traffic: Traffic,
        ranks: Ranks,
        backend: Backend,
        *,
        timeout_seconds: float,
        window_bytes: int,
    ) -> None:
        self._first_tag = program.graph.num_tensors  # of messages that are no tensors of the graph
        self._program, self._backend, self._timeout_seconds = program, backend, timeout_seconds
        self._home = [home[op] for op in program.graph.producers.tolist()]
        self._wire_device = ranks.target.device if ranks.is_nccl else CPU
        self._rank, count = ranks.rank, len(ranks.names)
        self.peers = [peer for peer in range(count) if peer != ranks.rank]
        self._incoming = {
            peer: tuple(self._incoming_tensor(tensor, ranks.target.device) for tensor in traffic[peer, ranks.rank])
            for peer in self.peers
        }
        self._outgoing = {peer: [(tensor, peer) for tensor in traffic[ranks.rank, peer]] for peer in self.peers}
        self._step: tuple[int, Mapping[int, Sequence[IncomingMessage]]] = (STEP, {})
        pairs = _pair_groups(count) if ranks.is_nccl else {}
        self.transfers = TransferState(window_bytes)
        self._senders, self._receivers = {}, {}
        for peer in self.peers:
            there, here = (Groups(ranks.group, pairs.get(pair)) for pair in ((ranks.rank, peer), (peer, ranks.rank)))
            self._senders[peer] = Sender(self.transfers, peer, there, self._dense)
            incoming = CpuBackend(ranks.target, program.memory_for)
            self._receivers[peer] = Receiver(self.transfers, peer, here, incoming, self._first_tag + _TOKEN)
        self.began_ns = 0  # when all had begun the step
        self.heartbeats = HeartbeatMonitor(ranks, f"heartbeats/{ranks.num_executors}", self.transfers.fail)
        for thread in self._threads:
            thread.start()

    @property
    def _threads(self) -> list[threading.Thread]:
        return [*self._senders.values(), *self._receivers.values(), self.heartbeats]

    def close(self) -> None:
        """Ends the threads, after all ranks have begun CLOSE."""
        self.heartbeats.stop.set()
        for sender in self._senders.values():
            sender.items.put(None)
        for thread in self._threads:
            thread.join()

    def cut(self, seconds: float) -> None:
        """Ends the threads, and the others' wait for this rank: a process may abort if a thread waits at its end."""
        self.heartbeats.stop.set()
        for peer in self.peers:
            self._senders[peer].items.put(None)
            self._receivers[peer].expected.put(None)
            self._senders[peer].cut()
            self._receivers[peer].cut()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def begin_collective(self, kind: int, incoming: Mapping[int, Sequence[IncomingMessage]] | None) -> None:
        """Begins a collective together with all others; `incoming` are its messages from each; None: the last one."""
        token = self._first_tag + _TOKEN
        for peer in self.peers:
            self._receivers[peer].expected.put(None if incoming is None else incoming.get(peer, ()))
            self._senders[peer].put(SentTensor(token, torch.tensor([kind], dtype=torch.uint8)))
        for peer in self.peers:
            content = self.take(peer, token).content
            if content is None or int(content) != kind:
                self._fail(peer, "does not do what the others do; all ranks must make the same calls")

    def take(self, peer: int, tag: int) -> SentTensor:
        """Returns the message of `peer` with that tag as soon as it is here."""
        sent = self.transfers.take(peer, tag, self._timeout_seconds)
        if sent is None:
            graph, missing = self._program.graph, "its part in what all do"
            if tag < self._first_tag:
                missing = f"what op {graph.op_names[int(graph.producers[tag])]!r} gives"
            self._fail(peer, f"did not send {missing} for {self._timeout_seconds:g} s")
        return sent

    def collect(self, own: Mapping[Any, Tensor], *, everywhere: bool = False) -> dict[Any, Tensor]:
        """Returns on the first rank, or `everywhere`, copies on the CPU of the tensors of all ranks by key.

        Each key is on one rank.
        """
        receives, first = everywhere or self._rank == 0, self._first_tag + _ITEM
        forms_of = self.collect_values([[key, *_form_of(tensor)] for key, tensor in own.items()])
        incoming = {
            peer: [
                _incoming(first + place, tuple(shape), tuple(stride), getattr(torch, dtype))
                for place, (_, shape, stride, dtype) in enumerate(forms_of[peer])
            ]
            for peer in self.peers
        }
        copies = {key: _copy(tensor) for key, tensor in own.items()}
        sent_tensors = [SentTensor(first + place, tensor) for place, tensor in enumerate(copies.values())]
        received = self._exchange(_TENSORS + everywhere, sent_tensors, incoming if receives else {})
        held = {_key_of(forms_of[peer][tag - first][0]): content for (peer, tag), content in received.items()}
        return held | copies if receives else {}

    def collect_values(self, own: Any) -> list[Any]:
        """Returns the JSON value of each rank on all ranks."""
        text = json.dumps(own, default=int).encode()
        tag, content = self._first_tag + _ITEM, torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sizes = {peer: [_incoming(tag)] for peer in self.peers}
        lengths = self._exchange(_OBJECTS, [SentTensor(tag, torch.tensor([len(content)]))], sizes)
        texts = {peer: [_incoming(tag, (int(lengths[peer, tag]),), (1,), torch.uint8)] for peer in self.peers}
        received = self._exchange(_OBJECTS, [SentTensor(tag, content)], texts)
        received[self._rank, tag] = content
        return [json.loads(received[rank, tag].numpy().tobytes()) for rank in range(len(self.peers) + 1)]

    def _exchange(
        self, kind: int, sent_tensors: Sequence[SentTensor], incoming: Mapping[int, Sequence[IncomingMessage]]
    ) -> dict[tuple[int, int], Tensor]:
        """Sends tensors to the first rank, or to all in collectives of the kind, and returns those that come.

        By rank and tag.
        """
        self.begin_collective(kind, incoming)
        receivers = [0] * (self._rank != 0) if kind == _TENSORS else self.peers
        for sent in sent_tensors:
            for peer in receivers:
                self._senders[peer].put(sent)
        received: dict[tuple[int, int], Tensor] = {}
        for peer, messages in incoming.items():  # before the own ones have left, or windows would fill up
            for message in messages:
                content = self.take(peer, message.tag).content
                assert content is not None, "no control tensors are sent so"
                received[peer, message.tag] = content
        self.finish()
        return received

    def finish_step(self) -> None:
        """Returns on the first rank when all have done the step."""
        tag = self._first_tag + _DONE
        if self._rank != 0:
            self._senders[0].put(SentTensor(tag, None))
            self.finish()
            return
        for peer in self.peers:
            self.take(peer, tag)

    def clock_offsets_ns(self, hosts: Sequence[str]) -> list[int]:
        """[D] Returns on the first rank the offset from each rank's clock to the first's, by the quickest answers."""
        offsets_ns, far = [0] * len(hosts), [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        if not far:
            return offsets_ns
        pings = [self._first_tag + _PING + number for number in range(_NUM_PINGS)]
        partners = far if self._rank == 0 else [0] * (self._rank in far)
        self.begin_collective(_CLOCK, {partner: [_incoming(tag) for tag in pings] for partner in partners})
        for partner in partners:
            trips: list[tuple[int, int]] = []
            for tag in pings:
                if self._rank != 0:
                    self.take(partner, tag)
                before_ns = time.perf_counter_ns()
                self._senders[partner].put(SentTensor(tag, torch.tensor([before_ns])))
                if self._rank == 0:
                    theirs_ns, after_ns = int(self.take(partner, tag).content), time.perf_counter_ns()
                    trips.append((after_ns - before_ns, (before_ns + after_ns) // 2 - theirs_ns))
            if self._rank == 0:
                offsets_ns[partner] = min(trips)[1]
        self.finish()
        return offsets_ns

    def transfer_times_ns(self) -> tuple[dict[tuple[int, int], tuple[int, int]], dict[tuple[int, int], int]]:
        """Returns times of this step by (tensor, destination): of the queueing and turn of sent ones; of arrivals."""
        queued = dict[tuple[int, int], tuple[int, int]]()
        arrived = dict[tuple[int, int], int]()
        for peer in self.peers:  # the first that was sent was no tensor
            queued.update(zip(self._outgoing[peer], self._senders[peer].times_ns[1:], strict=False))
            tags = ((message.tag, self._rank) for message in self._incoming[peer])
            arrived.update(zip(tags, self._receivers[peer].arrivals_ns, strict=False))
        return queued, arrived

    def plan_step(self, kind: int) -> None:
        """Sets the collective of the next step."""
        last = (IncomingMessage(self._first_tag + _DONE),) if self._rank == 0 else ()
        self._step = kind, {peer: (*messages, *last) for peer, messages in self._incoming.items()}

    # -- methods of Transport, in the worker's thread ----------------------------------------------------------------

    def begin(self) -> None:
        for sender in self._senders.values():
            sender.times_ns.clear()
        self.begin_collective(*self._step)
        self.began_ns = time.perf_counter_ns()

    def send(self, tensor: int, content: Content, device: int) -> None:
        self._senders[device].put(self._backend.pack(tensor, as_tensor(content), self._wire_device))

    def receive(self, tensor: int) -> Content:
        return self._backend.unpack(self.take(self._home[tensor], tensor))

    def finish(self) -> None:
        peer = self.transfers.wait_sent(self._timeout_seconds)
        if peer is not None:
            self._fail(peer, f"did not take what was sent to it for {self._timeout_seconds:g} s")

    def _fail(self, rank: int, what: str) -> NoReturn:
        self.transfers.fail(Failure(rank, what))
        raise Stopped

    def _incoming_tensor(self, tensor: int, device: torch.device) -> IncomingMessage:
        """Makes the message of a tensor of the graph, which is to be on `device`."""
        if self._program.tensor_values[tensor] < 0:
            return IncomingMessage(tensor)
        make = partial(self._program.memory_for, tensor, CPU if device.type == "cpu" else self._wire_device)
        return IncomingMessage(tensor, int(self._program.graph.tensor_bytes[tensor]), make, device)

    def _dense(self, tag: int, content: Tensor) -> Tensor:
        """Lays out the content as `memory_for` lays out the receiver's."""
        if tag >= self._first_tag:
            return content
        if self._program.tensor_layouts[tag] is not None:
            return content.contiguous()
        layout = self._program.layouts[self._program.tensor_values[tag]]
        if content.dtype == layout.dtype and content.stride() == layout.stride and tuple(content.shape) == layout.size:
            return content
        return fill(self._program.memory_for(tag, content.device), content)


def _form_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch.")


def _key_of(key: Any) -> Any:
    """Returns a key of tensors as it was before JSON, which has lists for tuples."""
    return tuple(key) if isinstance(key, list) else key


def _incoming(
    tag: int, shape: Sequence[int] = (1,), stride: Sequence[int] = (1,), dtype: torch.dtype = torch.int64
) -> IncomingMessage:
    make = partial(torch.empty_strided, shape, stride, dtype=dtype)
    return IncomingMessage(tag, math.prod(shape) * dtype.itemsize, make)


def _copy(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU, which lies in memory as the tensor does."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    bytes_of(copy).copy_(bytes_of(tensor))
    return copy


def _pair_groups(count: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Makes a group for each connection, so that tensors one way do not wait for tensors the other way."""
    return {pair: dist.new_group(sorted(pair), backend="nccl") for pair in itertools.permutations(range(count), 2)}
