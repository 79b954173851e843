"""Connections: the threads that move tensors from one process of a run to another.

Between any two ranks there is a connection each way: a thread that sends, one tensor after the other in the order of
the sender's script, and a thread at the other end that receives in the same order. It posts receives ahead, so that
tensors travel while both compute:

    rank a  worker    op 1   op 2   op 3
            sender           send 1        send 2            a tensor is held until it is sent
    rank b  receiver  post 1, post 2   1 here       2 here   into memory of its own, a window ahead of its use
            worker    op 4   op 5      await 1, op 6

This cannot deadlock. A worker waits only for tensors that it is about to read, and for its sends only at the end of a
step. Of the ops not yet run take the first in an order that the plan was simulated in. The tensors that it awaits, and
all before them, have been given to their senders. The receivers post all of these, window or not, since their worker
awaits them; so they come, and the op runs.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gdp.execute.backends import CpuBackend, SentTensor
from gdp.execute.ranks.ranks import Failure
from gdp.execute.targets import CPU
from gdp.execute.worker import Stopped

_POLL_SECONDS = 0.2  # for which a thread sleeps at most between looks at failures
_FOREVER = timedelta(days=365)  # gloo closes a connection on which a wait ran out: heartbeats decide instead
_MAX_POSTED = 64  # receives on a connection
_UNUSED_TAG = 1 << 30


class IncomingMessage(NamedTuple):
    """A message that is to come: tag, size, a function for its memory (None: a control tensor), and its device."""

    tag: int
    num_bytes: int = 0
    make: Callable[[], Tensor] | None = None
    device: torch.device = CPU


class _PeerLostError(Exception):
    """Raised when the process at the other end of a connection is gone."""


class TransferState:
    """State that the threads of a rank share: received messages, messages on their way, and the first failure."""

    def __init__(self, window_bytes: int) -> None:
        self.failure: Failure | None = None
        self.awaited: tuple[int, int] | None = None  # (rank, tag) that this rank cannot go on without
        self._changed = threading.Condition()
        self._window_bytes = window_bytes
        self._ahead_bytes = 0  # received or to be received, and not taken
        self._received: dict[tuple[int, int], tuple[SentTensor, int]] = {}  # by (rank, tag), with bytes of the window
        self._num_sending: Counter[int] = Counter()  # by rank

    def fail(self, failure: Failure) -> None:
        """Wakes all waiting threads, which stop; the first failure counts."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def is_failing(self, seconds: float) -> bool:
        """Returns whether there is a failure, or one comes within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.failure is not None, seconds)

    def put(self, peer: int, sent: SentTensor, num_bytes: int) -> None:
        """Stores a message from `peer`."""
        with self._changed:
            self._received[peer, sent.tensor] = sent, num_bytes
            if self.awaited == (peer, sent.tensor):
                self._changed.notify_all()

    def take(self, peer: int, tag: int, seconds: float) -> SentTensor | None:
        """Returns the message of `peer` with that tag; None if it does not come in time."""
        with self._changed:
            if (peer, tag) not in self._received:
                self.awaited = peer, tag
                self._changed.notify_all()
                self._wait(lambda: (peer, tag) in self._received, seconds)
                self.awaited = None
            sent, num_bytes = self._received.pop((peer, tag), (None, 0))
            self._ahead_bytes -= num_bytes
            if num_bytes:
                self._changed.notify_all()
            return sent

    def may_post(self, num_bytes: int, is_forced: Callable[[], bool], *, wait: bool) -> bool:
        """Returns whether a receive of that size fits the window or is forced, and then counts its bytes.

        `wait` waits until it is so.
        """

        def fits() -> bool:
            return not self._ahead_bytes or self._ahead_bytes + num_bytes <= self._window_bytes or is_forced()

        with self._changed:
            while wait and not self._wait(fits, _POLL_SECONDS):
                pass
            if not fits():
                return False
            self._ahead_bytes += num_bytes
            return True

    def count_sending(self, peer: int, change: int) -> None:
        """Changes the number of messages on their way to `peer`."""
        with self._changed:
            self._num_sending[peer] += change
            if not self._num_sending[peer]:
                self._changed.notify_all()

    def wait_sent(self, seconds: float) -> int | None:
        """Waits until all messages are sent; returns a rank that did not take its own in time."""
        with self._changed:
            self._wait(lambda: not any(self._num_sending.values()), seconds)
            return next((peer for peer, count in self._num_sending.items() if count), None)

    def _wait(self, is_ready: Callable[[], bool], seconds: float) -> bool:
        """Returns whether it is ready in time. Stopped after a failure."""
        self._changed.wait_for(lambda: is_ready() or self.failure is not None, seconds)
        if is_ready():
            return True
        if self.failure is not None:
            raise Stopped
        return False


class Groups(NamedTuple):
    """The groups of processes that a connection is part of: by gloo, and by NCCL where each rank has a GPU."""

    gloo: dist.ProcessGroup | None  # None: the default group
    nccl: dist.ProcessGroup | None  # of the two ranks alone


class _Connection(threading.Thread, ABC):
    """One direction of the connection with a rank. With NCCL it has a stream and a group of its own."""

    def __init__(self, transfers: TransferState, peer: int, groups: Groups, name: str) -> None:
        super().__init__(name=f"gdp-{name}-{peer}", daemon=True)
        self._transfers, self._peer, self._groups = transfers, peer, groups
        self._stream: Any = None
        self._control = torch.zeros(1, dtype=torch.uint8)  # a control tensor is sent as this, and received into it

    def run(self) -> None:
        try:
            with torch.no_grad():
                self._run()
        except Stopped:
            pass
        except _PeerLostError:
            self._transfers.fail(Failure.gone(self._peer))
        except BaseException as error:  # whatever it is, the main thread must hear of it
            what = f"exchanging tensors with rank {self._peer}"
            self._transfers.fail(Failure(dist.get_rank(), what, error, is_own=True))

    def cut(self) -> None:
        """Breaks the connection, as gloo does when a wait runs out, so that threads waiting at both ends wake up."""
        with contextlib.suppress(_PeerLostError, RuntimeError):
            self._post(dist.irecv, self._control, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        if self._groups.nccl is not None:
            self._groups.nccl.abort()

    @abstractmethod
    def _run(self) -> None:
        """Moves messages until it is told to end."""

    def _post(self, post: Callable[..., Any], wire: Tensor, tag: int) -> Any:
        """Starts to send or to receive. Between two ranks NCCL knows the order only, no tags."""
        try:
            group, number = (self._groups.nccl, 0) if wire.is_cuda else (self._groups.gloo, tag)
            return post(wire, self._peer, group, number)
        except RuntimeError as error:
            raise _PeerLostError from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait(_FOREVER)
        except RuntimeError as error:
            raise _PeerLostError from error

    @contextlib.contextmanager
    def _on(self, device: torch.device, after: Any = None) -> Iterator[None]:
        """Waits for an event; on a GPU, the work inside is launched on the connection's stream and then waited for."""
        if device.type == "cpu":
            if after is not None:
                after.synchronize()
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield
            self._stream.synchronize()


class Sender(_Connection):
    """Sends tensors to `peer` in order; `times_ns` has the times when each was put and when its turn came."""

    def __init__(
        self, transfers: TransferState, peer: int, groups: Groups, dense: Callable[[int, Tensor], Tensor]
    ) -> None:
        super().__init__(transfers, peer, groups, "to")
        self._dense = dense
        self.items: SimpleQueue[tuple[SentTensor, int] | None] = SimpleQueue()
        self.times_ns: list[tuple[int, int]] = []

    def put(self, sent: SentTensor) -> None:
        """Queues a sent; the content must not change until it is sent."""
        self._transfers.count_sending(self._peer, 1)
        self.items.put((sent, time.perf_counter_ns()))

    def _run(self) -> None:
        while self._send_next():  # a call of its own, which holds no tensor longer than it takes
            self._transfers.count_sending(self._peer, -1)

    def _send_next(self) -> bool:
        item = self.items.get()
        if item is None:
            return False
        (tag, content, event), put_ns = item
        with self._on(CPU if content is None else content.device, event):
            start_ns = time.perf_counter_ns()
            wire = self._control if content is None else bytes_of(self._dense(tag, content))
            self._wait(self._post(dist.isend, wire, tag))
        self.times_ns.append((put_ns, start_ns))
        return True


class Receiver(_Connection):
    """Receives from `peer` the messages that `expected` lists for each collective, after its token.

    `arrivals_ns` has the times when they came; None instead of a list ends the thread.
    """

    def __init__(self, transfers: TransferState, peer: int, groups: Groups, backend: CpuBackend, token: int) -> None:
        super().__init__(transfers, peer, groups, "from")
        self._backend, self._token = backend, token
        self.expected: SimpleQueue[Sequence[IncomingMessage] | None] = SimpleQueue()
        self.arrivals_ns: list[int] = []

    def _run(self) -> None:
        while True:
            token = torch.zeros(1, dtype=torch.uint8)
            self._wait(self._post(dist.irecv, token, self._token))
            messages = self.expected.get()
            self.arrivals_ns = []
            self._transfers.put(self._peer, SentTensor(self._token, token), 0)
            if messages is None:
                return
            self._receive(messages)

    def _receive(self, messages: Sequence[IncomingMessage]) -> None:
        places = {(self._peer, message.tag): place for place, message in enumerate(messages)}
        posted: deque[tuple[IncomingMessage, Tensor | None, Any]] = deque()
        place = 0

        def is_forced() -> bool:
            return self._transfers.awaited is not None and places.get(self._transfers.awaited, -1) >= place

        while place < len(messages) or posted:
            while place < len(messages) and len(posted) < _MAX_POSTED:
                if not self._transfers.may_post(messages[place].num_bytes, is_forced, wait=not posted):
                    break
                posted.append(self._start(messages[place]))
                place += 1
            self._end(*posted.popleft())

    def _start(self, message: IncomingMessage) -> tuple[IncomingMessage, Tensor | None, Any]:
        memory = None if message.make is None else message.make()
        wire = self._control if memory is None else bytes_of(memory)
        with self._on(wire.device):
            return message, memory, self._post(dist.irecv, wire, message.tag)

    def _end(self, message: IncomingMessage, memory: Tensor | None, work: Any) -> None:
        with self._on(CPU if memory is None else memory.device):
            self._wait(work)
        sent = SentTensor(message.tag, memory)
        if memory is not None and memory.device != message.device:
            sent = self._backend.pack(message.tag, memory, message.device)
            sent.event.synchronize()
        self.arrivals_ns.append(time.perf_counter_ns())
        self._transfers.put(self._peer, sent, message.num_bytes)


def bytes_of(memory: Tensor) -> Tensor:
    """Returns the bytes that a tensor spans, gaps included; one byte for an empty tensor."""
    if memory.numel() == 0:
        return torch.zeros(1, dtype=torch.uint8, device=memory.device)
    size, dims = memory.element_size(), zip(memory.shape, memory.stride(), strict=True)
    num_bytes = size * (1 + sum((length - 1) * stride for length, stride in dims))
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return whole.set_(memory.untyped_storage(), size * memory.storage_offset(), (num_bytes,), (1,))
