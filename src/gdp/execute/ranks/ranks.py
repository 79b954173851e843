"""Ranks: the processes of a run, one for each device of the plan, as torchrun starts them; and why they end."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from gdp.errors import InputError
from gdp.execute.backends import Target, find_targets, places_of
from gdp.execute.plan_executor import REMEDIED, ExecutionError, Stopped

INTERRUPTED = "was interrupted"
CAUSE_SECONDS = 1.0  # for a rank that knows more of a failure to write it down
SILENT_SECONDS = 10.0  # without a heartbeat; a kernel or a compiler that holds Python's lock can take some

_HEARTBEAT_SECONDS = 0.5
_NOTICE_SECONDS = 0.5  # for a failure to be noticed that led to an interrupt
_POLL_SECONDS = 0.02  # between looks at the store
_START_SECONDS = 5.0  # for the first rank to start and print its error
_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})  # that torchrun sets


class Failure(NamedTuple):
    """The cause of a run's end as this rank sees it; if it is not its own, another may know better."""

    rank: int
    what: str
    cause: BaseException | None = None
    note: str = ""
    is_own: bool = False

    @classmethod
    def gone(cls, rank: int) -> "Failure":
        """Makes the failure of a rank that cannot be reached any more."""
        return cls(rank, f"its process, rank {rank}, is gone")

    @classmethod
    def left(cls, rank: int, error: BaseException) -> "Failure":
        """Makes the failure of a rank that `error` ends, outside of the calls that all make."""
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, INTERRUPTED, is_own=True)
        return cls(rank, "left the run", error, is_own=True)

    def document(self, by: int) -> dict[str, Any]:
        """Returns the form in which rank `by` writes it down."""
        kind, text = ("", "") if self.cause is None else (type(self.cause).__name__, str(self.cause))
        if self.cause is not None and not isinstance(self.cause, RuntimeError):
            text = text if kind in REMEDIED else f"{kind}: {text}"
        return {"by": by, "rank": self.rank, "what": self.what, "note": self.note, "kind": kind, "text": text}


@dataclass(slots=True, eq=False)
class RankError(ExecutionError):
    """A rank failed or died; raised on all. `is_reporter` on the one rank that should print it, if only one does."""

    is_reporter: bool = True


class Ranks:
    """The processes of a run, one rank for each device, as `join` makes them; a context manager. torchrun ends all
    processes by SIGTERM as soon as one is dead: meanwhile that raises KeyboardInterrupt, so that executors can say why.
    `group` connects them; None: the default group, which is theirs alone."""

    def __init__(
        self,
        targets: Sequence[Target],
        rank: int,
        hosts: Sequence[str],
        store: Store,
        *,
        nccl: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.targets, self.rank, self.hosts = tuple(targets), rank, tuple(hosts)
        self.store, self.is_nccl, self.group = store, nccl, group
        self.error: RankError | None = None  # that ended the run
        self.monitor = HeartbeatMonitor(self)
        self.ends: list[Callable[[], None]] = []  # what the error ends
        self._num_shared = 0  # texts
        self._handles_sigterm = False

    def __enter__(self) -> Self:
        is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if is_default and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            self._handles_sigterm = True
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the group of processes."""
        self.monitor.stop.set()
        if self._handles_sigterm:  # a failure is told before torchrun's signal ends the process
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.error else signal.SIG_DFL)
            self._handles_sigterm = False
        if self.error:  # the connections are cut; what is left of them ends with the process
            self._await_readers()
        elif dist.is_initialized():
            dist.destroy_process_group(self.group)

    @property
    def names(self) -> tuple[str, ...]:
        """[D] The devices of the plan."""
        return tuple(target.name for target in self.targets)

    @property
    def target(self) -> Target:
        """Returns this rank's own target."""
        return self.targets[self.rank]

    @property
    def is_first(self) -> bool:
        """Returns whether this is the rank that gets results and reports."""
        return self.rank == 0

    @contextlib.contextmanager
    def reporting_once(self) -> Iterator[None]:
        """Lets only the rank that finds an InputError first report it; other ranks with the same error exit."""
        try:
            yield
        except InputError as error:
            with contextlib.suppress(RuntimeError):  # the store is gone: better told twice than never
                if not self.is_first_to_say(str(error)):
                    raise SystemExit(2) from None
            raise

    def is_first_to_say(self, text: str) -> bool:
        """Returns whether no other rank has said so. RuntimeError without store."""
        key = f"said/{hashlib.sha256(text.encode()).hexdigest()}"
        return bool(within(SILENT_SECONDS, partial(self.store.add, key, 1)) == 1)

    def share(self, text: str) -> list[str]:
        """[D] Returns the texts of all ranks, which make this call together. RankError where a rank, or the store, is
        gone, ExecutionError if one does not come."""
        self._num_shared += 1
        keys = [f"shared/{self._num_shared}/{rank}" for rank in range(len(self.targets))]
        try:
            self.store.set(keys[self.rank], text)
            self._await(keys, self.store.timeout.total_seconds())  # type: ignore[attr-defined]
            return [self.store.get(key).decode() for key in keys]
        except RuntimeError:
            self.monitor.fail(self.store_lost())
            raise self.end() from None

    def check_alike(self, digest: str, what: str) -> None:
        """Waits for all ranks, and raises InputError on all unless their digests are those of the first rank."""
        digests = self.share(digest)
        for name, own in zip(self.names, digests, strict=True):
            if own != digests[0]:
                self._await_readers()
                raise InputError(f"device {name!r}: {what}")

    def act_once(self, act: Callable[[], None]) -> None:
        """Acts on the first rank, while the others wait; an InputError of the act is raised on all."""
        text, *_ = self.share(message_of(act) if self.is_first else "")
        if text:
            self._await_readers()
            raise InputError(text)

    def _await(self, keys: Sequence[str], patience_seconds: float) -> None:
        """Waits until the store has all keys. RankError after a failure, ExecutionError if they do not come."""
        until = time.monotonic() + patience_seconds
        while not within(SILENT_SECONDS, partial(self.store.check, list(keys))):
            if self.has_cause():
                self.monitor.fail(Failure(self.rank, "was told to end"))
                raise self.end()
            if time.monotonic() > until:
                raise ExecutionError(self.target.name, "could not join the others")
            time.sleep(_POLL_SECONDS)

    def store_lost(self) -> Failure:
        """Makes the failure of a store that is gone, and its owner with it."""
        if _is_store_torchruns():
            return Failure(0, "torchrun, which started its process, cannot be reached")
        return Failure.gone(0)

    def has_cause(self) -> bool:
        """Returns whether a rank wrote down the cause of the run's end."""
        return bool(self.store.check(["cause"]))

    @contextlib.contextmanager
    def ending(self, doing: str) -> Iterator[None]:
        """Tells the others of a failure or an interrupt here, or learns of one there, and raises it."""
        if self.error is not None:
            raise self.error
        try:
            yield
        except KeyboardInterrupt as interrupt:
            self.leave(interrupt)
            raise
        except Stopped:
            raise self.end() from None
        except BaseException as error:
            failure = Failure(self.rank, doing, error, is_own=True)
            if isinstance(error, ExecutionError):
                failure = Failure(self.rank, error.what, error.cause, error.note, is_own=True)
            self.monitor.fail(failure)
            raise self.end() from error

    def leave(self, error: BaseException) -> None:
        """Tells the others that `error` ends this rank, or raises the failure elsewhere that led to an interrupt."""
        if error is self.error:
            return
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if not (is_interrupt and self.monitor.failed.wait(_NOTICE_SECONDS)):
            self.monitor.fail(Failure.left(self.rank, error))
        end = self.end()
        if is_interrupt and end.what != INTERRUPTED:
            raise end from None

    def end(self) -> RankError:
        """Ends the run of this rank after a failure, and makes the error of it."""
        if self.error is None:
            assert self.monitor.failure is not None
            self.error = self._error_of(self.monitor.failure)
            for act in self.ends:
                act()
        return self.error

    def _error_of(self, failure: Failure) -> RankError:
        """Agrees with the others on the cause of the run's end, and makes the error of it."""
        mine = failure.document(self.rank)

        def settle() -> dict[str, Any]:
            """Writes down the cause, unless a rank has, and returns the first."""
            until = time.monotonic() + (0 if failure.is_own else CAUSE_SECONDS)
            while not self.has_cause() and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            first: dict[str, Any] = json.loads(self.store.compare_set("cause", "", json.dumps(mine)))
            return first

        try:
            first = within(3 * CAUSE_SECONDS, settle)
        except RuntimeError:
            first = mine if failure.is_own else self.store_lost().document(self.rank)
        cause = REMEDIED.get(first["kind"], RuntimeError)(first["text"]) if first["text"] else None
        is_reporter = first["by"] == self.rank
        return RankError(self.names[first["rank"]], first["what"], cause, first["note"], is_reporter=is_reporter)

    def _await_readers(self) -> None:
        """Waits until the others have read the cause of the end, if the store ends with this process."""
        if self.is_first and not _is_store_torchruns():
            time.sleep(2 * CAUSE_SECONDS)


def is_rank() -> bool:
    """Returns whether torchrun, or a launcher that sets its variables, started this process."""
    return os.environ.keys() >= _VARIABLES


def join(
    names: Sequence[str],
    on: Sequence[str] | None = None,
    *,
    option: str = "on",
    timeout_seconds: float = 60.0,
    in_script: bool = False,
) -> Ranks:
    """Joins the processes that torchrun started, one for each device of the plan, in the order of its `names`. `on`
    says for each device where it runs, as in `find_targets`, on the host of its rank. NCCL connects ranks if each has a
    GPU of its own; otherwise gloo does, through the hosts' memory. `in_script` the default group stays when these ranks
    are closed, since others may join, and the script may use it. InputError for a wrong number of processes, before
    anything else, and for a device that is not there."""
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "-1"))
    if count != len(names) or rank < 0:
        devices = "1 device" if len(names) == 1 else f"{len(names)} devices"
        started = "torchrun did not start this process" if rank < 0 else f"torchrun started {count} processes"
        remedy = f"use torchrun --nproc-per-node {len(names)}"
        if int(os.environ.get("LOCAL_WORLD_SIZE", str(count))) != count:
            remedy = f"use torchrun with --nnodes times --nproc-per-node = {len(names)}"
        raise InputError(f"the plan has {devices} ({', '.join(names)}); {started}; {remedy}")
    if on is not None and len(on) != len(names):
        raise InputError(f"{option} names {len(on)} devices; the plan has {len(names)}: {', '.join(names)}")
    patience, has_group = timedelta(seconds=timeout_seconds), dist.is_initialized()
    with reaching_others(names[rank]):
        store = _fresh_store(rank, patience)
        about: dict[str, Any] = {"host": _host()}
        try:
            places = places_of(names, option) if on is None else on
            (target,) = find_targets([names[rank]], [places[rank]], option=option)
            about |= {"device": str(target.device), "cores": target.cores}
        except InputError as error:
            about["error"] = str(error)
        store.set(f"about/{rank}", json.dumps(about))
        abouts = [json.loads(store.get(f"about/{other}")) for other in range(count)]
        if errors := [item["error"] for item in abouts if "error" in item]:
            raise InputError(errors[0])
        pairs = zip(names, abouts, strict=True)
        targets = [Target(name, torch.device(item["device"]), tuple(item["cores"])) for name, item in pairs]
        gpus = {(item["host"], item["device"]) for item in abouts if item["device"].startswith("cuda")}
        nccl = len(gpus) == count > 1 and dist.is_nccl_available()
        if nccl:
            torch.cuda.set_device(target.device)
        if not has_group:
            backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
            shared = PrefixStore("group", store)
            dist.init_process_group(backend, store=shared, rank=rank, world_size=count, timeout=patience)
        group = dist.new_group(backend="gloo", timeout=patience) if has_group or in_script else None
    return Ranks(targets, rank, [item["host"] for item in abouts], store, nccl=nccl, group=group)


def join_or_leave(names: Sequence[str], on: Sequence[str] | None = None, **options: Any) -> Ranks:
    """Joins; if all are refused, the first rank raises InputError, and the others exit after it."""
    try:
        return join(names, on, **options)
    except InputError:
        if int(os.environ.get("RANK", "0")):
            time.sleep(_START_SECONDS)  # torchrun ends all as soon as one has ended
            raise SystemExit(2) from None
        raise


class HeartbeatMonitor(threading.Thread):
    """Writes this rank's heartbeats to the store, looks there for the others' and for a cause to end, and keeps it."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(name="gdp-heartbeats", daemon=True)
        self._ranks = ranks
        self.failure: Failure | None = None  # the first one that any thread has noticed
        self.failed, self.stop = threading.Event(), threading.Event()

    def fail(self, failure: Failure) -> None:
        """Notes a failure."""
        self.failure = self.failure or failure
        self.failed.set()

    def run(self) -> None:
        latest = {peer: (0, time.monotonic()) for peer in range(len(self._ranks.names)) if peer != self._ranks.rank}
        try:
            store = self._ranks.store.clone()  # type: ignore[attr-defined]  # or others' waits would hold it up
            while not self.stop.wait(_HEARTBEAT_SECONDS):
                has_cause, counts = within(SILENT_SECONDS, partial(self._beat, store, list(latest)))
                if has_cause:
                    self.fail(Failure(self._ranks.rank, "was told to end"))
                    return
                for (peer, (count_before, since)), count in zip(list(latest.items()), counts, strict=True):
                    now = time.monotonic()
                    if count != count_before:
                        latest[peer] = count, now
                    elif now - since > SILENT_SECONDS:
                        self.fail(Failure(peer, f"gave no sign of life for {SILENT_SECONDS:g} s"))
                        return
        except RuntimeError:  # also of a store whose host cannot be reached
            if not self.stop.is_set():
                self.fail(self._ranks.store_lost())

    def _beat(self, store: Store, peers: Sequence[int]) -> tuple[bool, list[int]]:
        """Returns whether there is a cause to end, and the number of heartbeats of each peer."""
        store.add(f"heartbeats/{self._ranks.rank}", 1)
        return store.check(["cause"]), [store.add(f"heartbeats/{peer}", 0) for peer in peers]


def message_of(act: Callable[[], None]) -> str:
    """Acts and returns the message of the InputError that it raises; "" if it does not."""
    try:
        act()
    except InputError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def reaching_others(name: str) -> Iterator[None]:
    """Raises ExecutionError if the others cannot be reached."""
    try:
        yield
    except RuntimeError as error:  # as all of torch.distributed's are
        raise ExecutionError(name, "could not join the others", error) from error


def _fresh_store(rank: int, patience: timedelta) -> Store:
    """Returns a store with nothing in it that all ranks have; each time that they join another."""
    if dist.is_initialized():
        common = _get_default_store().clone()  # type: ignore[attr-defined]
    else:
        common, _, _ = next(iter(rendezvous("env://", timeout=patience)))
    attempt = PrefixStore(f"gdp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", common)
    store = PrefixStore(str(attempt.add(f"joins/{rank}", 1)), attempt)
    store.set_timeout(patience)
    return store


def _is_store_torchruns() -> bool:
    """Returns whether torchrun owns the store, not the first rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _host() -> str:
    """Returns a name that processes have in common if they share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def within(seconds: float, act: Callable[[], Any]) -> Any:
    """Returns the answer of `act`. RuntimeError if there is none in time: the host of a store may be gone."""
    future = Future[Any]()

    def answer() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise RuntimeError(f"no answer for {seconds:g} s") from None
