"""Messages between the ranks of a run, by `torch.distributed`: the tensors of a step, and what all exchange.

A rank posts the receives of a step in the order in which it reads them, as far ahead as a window allows, so that
tensors travel while both ends compute:

    rank a   op 1   send 1   op 2   send 2                       a tensor is held until it is sent
    rank b   post 1, post 2   op 4   op 5   await 1, op 6        into memory of its own

This cannot deadlock. A worker waits only for tensors that it is about to read, and for its sends only at the end of a
step. Of the ops not yet run take the first in an order that the plan was simulated in. The tensors that it awaits have
been sent, and its worker posts them, window or not; so they come, and the op runs.

Messages have the numbers of their tensors as tags. NCCL has no tags: between two ranks it has a group for each way, in
which messages go in the order of the sender's script."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from queue import Queue
from threading import Thread
from typing import Any, NoReturn

import orjson
import torch
import torch.distributed as dist
from torch import Tensor

from gdp.execute.backends import CPU, Backend, Content, CpuBackend, SentTensor, as_tensor
from gdp.execute.plan_executor import Stopped
from gdp.execute.ranks.ranks import Failure, Ranks
from gdp.execute.script import Script, Traffic
from gdp.models.pytorch import Program
from gdp.models.pytorch.strides import bytes_of, fill

_COLLECTED = 1 << 29  # the first tag of tensors that are none of a step
_EXCHANGE, _CUT = (1 << 30) - 1, 1 << 30
_NUM_PINGS = 16


class Messages:
    """Exchanges of all ranks. A rank that is gone, or keeps this one waiting, is a failure of the run."""

    def __init__(self, ranks: Ranks, timeout_seconds: float) -> None:
        self.ranks, self._timeout_seconds = ranks, timeout_seconds
        self.group, self._nccl_groups = ranks.group, dict[tuple[int, int], Any]()
        self._peers = [peer for peer in range(len(ranks.names)) if peer != ranks.rank]

    def connect(self, traffic: Traffic) -> None:
        """Makes the groups for NCCL, pair by pair, and sends a message in each: the first one of a group waits on the
        host for both ends, which a step would wait for in another order. All ranks have the same order of pairs."""
        if self.ranks.is_nccl:
            for pair in [pair for pair, tensors in traffic.items() if tensors]:
                group = dist.new_group(sorted(pair), backend="nccl")
                if self.ranks.rank in pair:
                    self._nccl_groups[pair] = group
                    function, peer = (dist.isend, pair[1]) if self.ranks.rank == pair[0] else (dist.irecv, pair[0])
                    wire = torch.zeros(1, device=self.ranks.target.device)
                    self.wait(self.post(function, wire, peer, 0), peer, "connect to it")

    def post(self, function: Callable[..., Any], wire: Tensor, peer: int, tag: int) -> Any:
        """Starts to send (`dist.isend`) or to receive (`dist.irecv`)."""
        own = self.ranks.rank
        pair = (own, peer) if function is dist.isend else (peer, own)
        group, number = (self._nccl_groups[pair], 0) if wire.is_cuda else (self.group, tag)
        try:
            return function(wire, peer, group, number)
        except RuntimeError as error:  # of NCCL: it may also lack memory or a way between the cards
            self.fail(Failure(peer, "cannot be reached by NCCL", error) if wire.is_cuda else Failure.gone(peer))

    def wait(self, work: Any, peer: int, what: str, *, by_stream: bool = False) -> None:
        """Waits for a message; `by_stream` the GPU's stream does, and not the host, as NCCL has it without a limit.
        `what` says what the peer has not done in time."""
        began = time.monotonic()
        try:
            _ = work.wait() if by_stream else work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError:
            is_late = time.monotonic() - began >= self._timeout_seconds
            late = Failure(peer, f"did not {what} for {self._timeout_seconds:g} s")
            self.fail(late if is_late else Failure.gone(peer))

    def fail(self, failure: Failure) -> NoReturn:
        """Ends the run of this rank for a failure, unless there is one."""
        self.ranks.monitor.fail(failure)
        raise Stopped

    def cut(self) -> None:
        """Breaks the connections, as gloo does when a wait runs out, so that threads waiting at both ends wake up."""
        for peer in self._peers:
            with contextlib.suppress(RuntimeError, Stopped):
                work = self.post(dist.irecv, torch.zeros(1, dtype=torch.uint8), peer, _CUT)
                work.wait(timedelta(milliseconds=1))
        for group in self._nccl_groups.values():
            group.abort()

    def exchange(self, own: Tensor, theirs: Mapping[int, Tensor]) -> None:
        """Sends a tensor to all ranks, and receives one from each."""
        works = [(peer, self.post(dist.irecv, wire, peer, _EXCHANGE)) for peer, wire in theirs.items()]
        works += [(peer, self.post(dist.isend, own, peer, _EXCHANGE)) for peer in theirs]
        for peer, work in works:
            self.wait(work, peer, "send its part in what all do")

    def meet(self, kind: int) -> None:
        """Waits for all ranks to do the same, which `kind` says."""
        kinds = {peer: torch.zeros(1, dtype=torch.uint8) for peer in self._peers}
        self.exchange(torch.tensor([kind], dtype=torch.uint8), kinds)
        for peer, other in kinds.items():
            if int(other) != kind:
                self.fail(Failure(peer, "does not do what the others do; all ranks must make the same calls"))

    def gather(self, own: Any) -> list[Any]:
        """Returns the value of each rank, one of JSON, on all ranks, which have met."""
        content = torch.frombuffer(bytearray(orjson.dumps(own)), dtype=torch.uint8)
        sizes = {peer: torch.zeros(1, dtype=torch.int64) for peer in self._peers}
        self.exchange(torch.tensor([len(content)]), sizes)
        contents = {peer: torch.empty(int(size), dtype=torch.uint8) for peer, size in sizes.items()}
        self.exchange(content, contents)
        contents[self.ranks.rank] = content
        return [orjson.loads(contents[rank].numpy().tobytes()) for rank in range(len(contents))]

    def collect(self, own: Mapping[Any, Tensor], *, everywhere: bool) -> dict[Any, Tensor]:
        """Returns on the first rank, or `everywhere`, copies on the CPU of the tensors of all ranks, which have met. By
        key, each of which is on one rank."""
        held: dict[Any, Tensor] = {}
        works: list[tuple[int, Any]] = []
        forms = self.gather([(key, tuple(item.shape), item.stride(), str(item.dtype)) for key, item in own.items()])
        rows = [(source, *form) for source, of_rank in enumerate(forms) for form in of_rank]
        for tag, (source, name, size, stride, dtype) in enumerate(rows, _COLLECTED):
            key = tuple(name) if isinstance(name, list) else name
            is_own, takes = source == self.ranks.rank, everywhere or self.ranks.is_first
            if is_own or takes:
                plain = getattr(torch, dtype.removeprefix("torch."))
                held[key] = memory = torch.empty_strided(size, stride, dtype=plain)
            if is_own:
                bytes_of(memory).copy_(bytes_of(own[key]))
                takers = self._peers if everywhere else [0] * (source != 0)
                works += [(peer, self.post(dist.isend, bytes_of(memory), peer, tag)) for peer in takers]
            elif takes:
                works.append((source, self.post(dist.irecv, bytes_of(memory), source, tag)))
        for peer, work in works:
            self.wait(work, peer, "send or take tensors")
        return held if everywhere or self.ranks.is_first else {}

    def clock_offsets_ns(self) -> list[int]:
        """[D] Returns on the first rank the offset from each rank's clock to the first's, by the quickest answers."""
        hosts, own = self.ranks.hosts, self.ranks.rank
        offsets_ns = [0] * len(hosts)
        for rank in [rank for rank, host in enumerate(hosts) if host != hosts[0] and own in (0, rank)]:
            peer, trips = 0 if own else rank, list[tuple[int, int]]()
            for _ in range(_NUM_PINGS):
                moment = torch.zeros(1, dtype=torch.int64)
                before_ns = time.perf_counter_ns()
                for function in (dist.irecv, dist.isend) if own else (dist.isend, dist.irecv):
                    self.wait(self.post(function, moment, peer, _EXCHANGE), peer, "tell its clock")
                    if own:
                        moment.fill_(time.perf_counter_ns())
                after_ns = time.perf_counter_ns()
                trips.append((after_ns - before_ns, (before_ns + after_ns) // 2 - int(moment)))
            offsets_ns[rank] = min(trips)[1]
        return offsets_ns


class RankTransport:
    """The transport of a rank's worker with its `script`; `window_bytes` is received ahead of use."""

    def __init__(
        self,
        program: Program,
        script: Script,
        traffic: Traffic,
        messages: Messages,
        backend: Backend,
        window_bytes: int,
    ) -> None:
        self._program, self._messages, self._backend, self._window_bytes = program, messages, backend, window_bytes
        ranks = messages.ranks
        self._wire_device = ranks.target.device if ranks.is_nccl else CPU
        self._incoming = CpuBackend(ranks.target, program.memory_for)
        self._awaited = [tensor for task in script for tensor in task.awaited]
        self._sizes = program.graph.tensor_bytes.tolist()
        self._from = {peer: tensors for (peer, to), tensors in traffic.items() if to == ranks.rank}
        pairs = self._from.items()
        self._places = {tensor: (peer, place) for peer, tensors in pairs for place, tensor in enumerate(tensors)}
        self._pending = deque[tuple[int, SentTensor]]()  # for gloo, whose ops a GPU has not yet done
        self._sent_by_nccl = deque[tuple[int, Any]]()
        self.sent: Queue[tuple[int, Any, Tensor] | None] = Queue()
        self.thread = Thread(target=self._release, name="gdp-sent", daemon=True)
        self.thread.start()

    def begin(self) -> None:
        self._posted: dict[int, tuple[Tensor | None, Any]] = {}
        self._num_posted = dict.fromkeys(self._from, 0)
        self._next, self._ahead_bytes = 0, 0
        self._post_ahead()

    def send(self, tensor: int, content: Content, device: int) -> None:
        sent = self._backend.pack(tensor, as_tensor(content), self._wire_device)
        if isinstance(sent.content, Tensor) and sent.content.is_cuda:
            wire = bytes_of(self._dense(tensor, sent.content))
            self._sent_by_nccl.append((device, self._messages.post(dist.isend, wire, device, tensor)))
            while self._sent_by_nccl and self._sent_by_nccl[0][1].is_completed():  # its memory is free
                self._sent_by_nccl.popleft()
        else:
            self._pending.append((device, sent))
        self._send_pending(wait=False)

    def receive(self, tensor: int) -> Content:
        peer = self._post_up_to(tensor)
        memory, work = self._posted.pop(tensor)
        on_gpu = memory is not None and memory.is_cuda
        self._send_pending(wait=not on_gpu)
        names, producers = self._program.graph.op_names, self._program.graph.producers
        what = f"send what op {names[int(producers[tensor])]!r} gives"
        self._messages.wait(work, peer, what, by_stream=on_gpu)
        self._ahead_bytes -= self._sizes[tensor]
        self._post_ahead()
        target = self._backend.target.device
        if memory is None or memory.device == target:
            return memory
        return self._backend.unpack(self._incoming.pack(tensor, memory, target))

    def finish(self) -> None:
        self._send_pending(wait=True)
        for peer, work in self._sent_by_nccl:
            self._messages.wait(work, peer, "take what was sent to it")
        self._sent_by_nccl.clear()
        self.sent.join()
        if self._messages.ranks.monitor.failure is not None:
            raise Stopped

    def _post_ahead(self) -> None:
        """Posts receives in the order of their use, as many as fit the window."""
        while self._next < len(self._awaited):
            tensor = self._awaited[self._next]
            if self._ahead_bytes and self._ahead_bytes + self._sizes[tensor] > self._window_bytes:
                break
            self._post_up_to(tensor)
            self._next += 1

    def _post_up_to(self, awaited: int) -> int:
        """Posts the receives from a peer, which is returned, up to that tensor: NCCL knows the order only."""
        peer, place = self._places[awaited]
        for tensor in self._from[peer][self._num_posted[peer] : place + 1]:
            memory = None
            if self._program.tensor_values[tensor] >= 0:
                memory = self._program.memory_for(tensor, self._wire_device)
            wire = torch.zeros(1, dtype=torch.uint8) if memory is None else bytes_of(memory)
            self._posted[tensor] = memory, self._messages.post(dist.irecv, wire, peer, tensor)
            self._ahead_bytes += self._sizes[tensor]
        self._num_posted[peer] = max(self._num_posted[peer], place + 1)
        return peer

    def _send_pending(self, *, wait: bool) -> None:
        """Sends by gloo what is ready, or all, waiting for it."""
        while self._pending:
            peer, (tensor, content, event) = self._pending[0]
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            self._pending.popleft()
            wire = torch.zeros(1, dtype=torch.uint8) if content is None else bytes_of(self._dense(tensor, content))
            self.sent.put((peer, self._messages.post(dist.isend, wire, peer, tensor), wire))

    def _release(self) -> None:
        """Frees what gloo has sent, in a thread of its own: gloo tells of it only to who waits."""
        while (item := self.sent.get()) is not None:
            with contextlib.suppress(Stopped):
                self._messages.wait(item[1], item[0], "take what was sent to it")
            del item
            self.sent.task_done()

    def _dense(self, tensor: int, content: Tensor) -> Tensor:
        """Lays out the content as `memory_for` lays out the receiver's."""
        if self._program.tensor_layouts[tensor] is not None:
            return content.contiguous()
        layout = self._program.layouts[self._program.tensor_values[tensor]]
        if content.dtype == layout.dtype and content.stride() == layout.stride and tuple(content.shape) == layout.size:
            return content
        return fill(self._program.memory_for(tensor, content.device), content)
