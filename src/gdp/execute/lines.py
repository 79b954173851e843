"""Lines: how tensors go from one process of a run to another.

Between any two ranks there is a line each way: a thread that sends, one tensor after the other in the order of the
sender's script, and a thread at the other end that receives in the same order, with receives posted ahead, so that
tensors travel while both compute:

    rank a  worker   op 1   op 2   op 3
            line            send 1        send 2          what is sent is held until then
    rank b  line     post 1, post 2   1 here       2 here   into memory of its own, a window ahead of its use
            worker   op 4   op 5      await 1, op 6

This cannot deadlock. A worker waits only for tensors that it is about to read, and for its sends only at the end of a
step. Of the ops not yet run take the first in an order that the plan was simulated in: what it awaits has been given
to its line, and so has all that goes before it there; the receiver posts all of that, window or not, since its worker
awaits it; so it comes, and the op runs.
"""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gdp.execute.lanes import CpuLane, Parcel
from gdp.execute.ranks import Failure
from gdp.execute.targets import CPU
from gdp.execute.worker import Stopped

_POLL_SECONDS = 0.2  # how long a line sleeps at most between looks at what else happened
_FOREVER = timedelta(days=365)  # gloo closes a connection on which a wait ran out: the beats decide instead
_MOST_POSTED = 64  # receives on a line
_CUT = 1 << 30  # a tag that nothing is sent with


class Receipt(NamedTuple):
    """A message that is to come: its tag and size, what makes memory for it (None: a control tensor), and for where."""

    tag: int
    num_bytes: int = 0
    make: Callable[[], Tensor] | None = None
    device: torch.device = CPU


class _LostError(Exception):
    """The process at the other end of a line is gone."""


class Hub:
    """What the threads of a rank share: what came, what is on its way, and the first failure."""

    def __init__(self, window_bytes: int) -> None:
        self.failure: Failure | None = None
        self.awaited: tuple[int, int] | None = None  # (rank, tag) that this rank cannot go on without
        self._changed = threading.Condition()
        self._window_bytes = window_bytes
        self._ahead_bytes = 0  # received or to be received, and not taken
        self._here: dict[tuple[int, int], tuple[Parcel, int]] = {}  # with the bytes that it counts for
        self._num_sending: Counter[int] = Counter()  # by rank

    def fail(self, failure: Failure) -> None:
        """Wake all who wait, to stop; the first failure counts."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def is_failing(self, seconds: float) -> bool:
        """Whether something fails within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.failure is not None, seconds)

    def put(self, peer: int, parcel: Parcel, num_bytes: int) -> None:
        """It came from `peer`."""
        with self._changed:
            self._here[peer, parcel.tensor] = parcel, num_bytes
            if self.awaited == (peer, parcel.tensor):
                self._changed.notify_all()

    def take(self, peer: int, tag: int, seconds: float) -> Parcel | None:
        """What came from `peer`; None if nothing does in time."""
        with self._changed:
            if (peer, tag) not in self._here:
                self.awaited = peer, tag
                self._changed.notify_all()
                self._wait(lambda: (peer, tag) in self._here, seconds)
                self.awaited = None
            parcel, num_bytes = self._here.pop((peer, tag), (None, 0))
            self._ahead_bytes -= num_bytes
            if num_bytes:
                self._changed.notify_all()
            return parcel

    def may_post(self, num_bytes: int, is_forced: Callable[[], bool], *, wait: bool) -> bool:
        """Whether a receive of that size fits the window or is forced, now or, if `wait`, at last; it then counts."""

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
        """So many messages more, or fewer, are on their way to `peer`."""
        with self._changed:
            self._num_sending[peer] += change
            if not self._num_sending[peer]:
                self._changed.notify_all()

    def wait_sent(self, seconds: float) -> int | None:
        """Wait until all messages are sent; returns a rank that did not take its own in time."""
        with self._changed:
            self._wait(lambda: not any(self._num_sending.values()), seconds)
            return next((peer for peer, count in self._num_sending.items() if count), None)

    def _wait(self, is_ready: Callable[[], bool], seconds: float) -> bool:
        """Whether it is ready in time. Stopped after a failure."""
        self._changed.wait_for(lambda: is_ready() or self.failure is not None, seconds)
        if is_ready():
            return True
        if self.failure is not None:
            raise Stopped
        return False


class _Line(threading.Thread):
    """One direction of the connection with a rank. With NCCL it has a stream and a group of its own."""

    def __init__(self, hub: Hub, peer: int, group: dist.ProcessGroup | None, name: str) -> None:
        super().__init__(name=f"gdp-{name}-{peer}", daemon=True)
        self._hub, self._peer, self._group = hub, peer, group
        self._stream: Any = None
        self._control = torch.zeros(1, dtype=torch.uint8)  # a control tensor is sent as this, and received into it

    def run(self) -> None:
        try:
            with torch.no_grad():
                self._run()
        except Stopped:
            pass
        except _LostError:
            self._hub.fail(Failure.gone(self._peer))
        except BaseException as error:  # whatever it is, the main thread must hear of it
            what = f"exchanging tensors with rank {self._peer}"
            self._hub.fail(Failure(dist.get_rank(), what, error, is_own=True))

    def cut(self) -> None:
        """Break the connection, so that whoever waits on it, here or there, wakes up: gloo does if a wait runs out."""
        with contextlib.suppress(_LostError, RuntimeError):
            self._post(dist.irecv, self._control, _CUT).wait(timedelta(milliseconds=1))
        if self._group is not None:
            self._group.abort()

    def _run(self) -> None:
        raise NotImplementedError

    def _post(self, post: Callable[..., Any], wire: Tensor, tag: int) -> Any:
        """Start to send or to receive. Between two ranks NCCL knows the order only, no tags."""
        try:
            return post(wire, self._peer, self._group, 0) if wire.is_cuda else post(wire, self._peer, None, tag)
        except RuntimeError as error:
            raise _LostError from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait(_FOREVER)
        except RuntimeError as error:
            raise _LostError from error

    @contextlib.contextmanager
    def _on(self, device: torch.device, after: Any = None) -> Iterator[None]:
        """After an event, work on the line's stream of a GPU until that is done; on the CPU, just work."""
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


class Outward(_Line):
    """Sends to `peer` what is put, in order; `times_ns` has when each was put and when its turn came."""

    def __init__(
        self, hub: Hub, peer: int, group: dist.ProcessGroup | None, dense: Callable[[int, Tensor], Tensor]
    ) -> None:
        super().__init__(hub, peer, group, "to")
        self._dense = dense
        self.items: SimpleQueue[tuple[Parcel, int] | None] = SimpleQueue()
        self.times_ns: list[tuple[int, int]] = []

    def put(self, parcel: Parcel) -> None:
        """Returns before it is sent; the content must not change until then."""
        self._hub.count_sending(self._peer, 1)
        self.items.put((parcel, time.perf_counter_ns()))

    def _run(self) -> None:
        while self._send_next():  # a call of its own, which holds no tensor longer than it takes
            self._hub.count_sending(self._peer, -1)

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


class Inward(_Line):
    """Receives from `peer` what `plans` says of each act, after its token; `arrivals_ns` has when each came."""

    def __init__(self, hub: Hub, peer: int, group: dist.ProcessGroup | None, lane: CpuLane, token: int) -> None:
        super().__init__(hub, peer, group, "from")
        self._lane, self._token = lane, token
        self.plans: SimpleQueue[Sequence[Receipt] | None] = SimpleQueue()
        self.arrivals_ns: list[int] = []

    def _run(self) -> None:
        while True:
            token = torch.zeros(1, dtype=torch.uint8)
            self._wait(self._post(dist.irecv, token, self._token))
            plan = self.plans.get()
            self.arrivals_ns = []
            self._hub.put(self._peer, Parcel(self._token, token), 0)
            if plan is None:
                return
            self._receive(plan)

    def _receive(self, plan: Sequence[Receipt]) -> None:
        places = {(self._peer, receipt.tag): place for place, receipt in enumerate(plan)}
        posted: deque[tuple[Receipt, Tensor | None, Any]] = deque()
        place = 0

        def is_forced() -> bool:
            return self._hub.awaited is not None and places.get(self._hub.awaited, -1) >= place

        while place < len(plan) or posted:
            while place < len(plan) and len(posted) < _MOST_POSTED:
                if not self._hub.may_post(plan[place].num_bytes, is_forced, wait=not posted):
                    break
                posted.append(self._start(plan[place]))
                place += 1
            self._end(*posted.popleft())

    def _start(self, receipt: Receipt) -> tuple[Receipt, Tensor | None, Any]:
        memory = None if receipt.make is None else receipt.make()
        wire = self._control if memory is None else bytes_of(memory)
        with self._on(wire.device):
            return receipt, memory, self._post(dist.irecv, wire, receipt.tag)

    def _end(self, receipt: Receipt, memory: Tensor | None, work: Any) -> None:
        with self._on(CPU if memory is None else memory.device):
            self._wait(work)
        parcel = Parcel(receipt.tag, memory)
        if memory is not None and memory.device != receipt.device:
            parcel = self._lane.pack(receipt.tag, memory, receipt.device)
            parcel.event.synchronize()
        self.arrivals_ns.append(time.perf_counter_ns())
        self._hub.put(self._peer, parcel, receipt.num_bytes)


def bytes_of(memory: Tensor) -> Tensor:
    """The bytes that a tensor spans, gaps and all; one byte of none."""
    if memory.numel() == 0:
        return torch.zeros(1, dtype=torch.uint8, device=memory.device)
    size, dims = memory.element_size(), zip(memory.shape, memory.stride(), strict=True)
    num_bytes = size * (1 + sum((length - 1) * stride for length, stride in dims))
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return whole.set_(memory.untyped_storage(), size * memory.storage_offset(), (num_bytes,), (1,))
