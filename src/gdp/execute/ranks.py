"""Ranks: the processes of a run, a device of the plan each, as torchrun starts them; and why they end."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gdp.errors import InputError
from gdp.execute.targets import Target, find_targets, places_of
from gdp.execute.worker import ExecutionError

CAUSE_SECONDS = 1.0  # for whoever knows more of a failure to write it down
SILENT_SECONDS = 10.0  # without a beat; a kernel or a compiler that holds Python's lock can take some
REMEDIED: Mapping[str, type[Exception]] = {  # the kinds of causes that ExecutionError has a remedy for
    "MemoryError": MemoryError, "OutOfMemoryError": MemoryError, "NotImplementedError": NotImplementedError,
}  # fmt: skip

_BEAT_SECONDS = 0.5
_PATIENCE_SECONDS = 5.0  # with the start of the first rank


class Failure(NamedTuple):
    """Why a run ends, as this rank sees it; if it is not its own, another may know better."""

    rank: int
    what: str
    cause: BaseException | None = None
    note: str = ""
    is_own: bool = False

    @classmethod
    def gone(cls, rank: int) -> "Failure":
        """It cannot be reached any more."""
        return cls(rank, f"its process, rank {rank}, is gone")

    def document(self, by: int) -> dict[str, Any]:
        """As it is written down by rank `by`."""
        kind, text = ("", "") if self.cause is None else (type(self.cause).__name__, str(self.cause))
        if self.cause is not None and not isinstance(self.cause, RuntimeError):
            text = text if kind in REMEDIED else f"{kind}: {text}"
        return {"by": by, "rank": self.rank, "what": self.what, "note": self.note, "kind": kind, "text": text}


class Ranks:
    """The processes of a run, a rank for each device, as `join` makes them; a context manager.

    torchrun ends all processes by SIGTERM as soon as one is dead: meanwhile that raises KeyboardInterrupt, so that
    executors can say why.
    """

    def __init__(self, targets: Sequence[Target], rank: int, hosts: Sequence[str], store: Store, *, nccl: bool) -> None:
        self.targets, self.rank, self.hosts = tuple(targets), rank, tuple(hosts)
        self.store, self.is_nccl = store, nccl
        self.num_executors = 0
        self._has_failed = self._handles_sigterm = False

    def __enter__(self) -> "Ranks":
        is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if is_default and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            self._handles_sigterm = True
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Part from the others."""
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handles_sigterm = False
        if self._has_failed:  # the connections are cut; what is left of them ends with the process
            with contextlib.suppress(RuntimeError):
                self._wait_for_readers()
        elif dist.is_initialized():
            dist.destroy_process_group()

    @property
    def names(self) -> tuple[str, ...]:
        """[D] the devices of the plan."""
        return tuple(target.name for target in self.targets)

    @property
    def target(self) -> Target:
        """This rank's own."""
        return self.targets[self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this is the one that gets results and reports."""
        return self.rank == 0

    @contextlib.contextmanager
    def saying_once(self) -> Iterator[None]:
        """What is wrong with the input is wrong on all ranks, or on one: it is said by the one that finds it first."""
        try:
            yield
        except InputError as error:
            digest = hashlib.sha256(str(error).encode()).hexdigest()
            if self.store.add(f"said/{digest}", 1) > 1:
                raise SystemExit(2) from None
            raise

    def meet(self, what: str) -> None:
        """Wait until all ranks are here. ExecutionError if one does not come."""
        with reaching_others(self.target.name):
            self.store.set(f"{what}/{self.rank}", "")
            self.store.wait([f"{what}/{rank}" for rank in range(len(self.targets))])

    def without_store(self) -> Failure:
        """The store is gone, and so is what had it."""
        if _is_store_torchruns():
            return Failure(0, "torchrun, which started its process, is gone")
        return Failure.gone(0)

    def is_told(self) -> bool:
        """Whether a rank wrote down why the run ends."""
        return bool(self.store.check(["cause"]))

    def tell(self, cause: Mapping[str, Any]) -> dict[str, Any]:
        """Write down why the run ends, unless one has; returns the first cause. RuntimeError if the store is gone."""
        self._has_failed = True
        first: dict[str, Any] = json.loads(self.store.compare_set("cause", "", json.dumps(cause)))
        self.store.add("readers", 1)
        return first

    def _wait_for_readers(self) -> None:
        """Let the others read the cause if the store ends with this process."""
        until = time.monotonic() + 2 * CAUSE_SECONDS
        if self.is_first and not _is_store_torchruns():
            while self.store.add("readers", 0) < len(self.names) and time.monotonic() < until:
                time.sleep(0.02)


def join(names: Sequence[str], on: Sequence[str] | None = None, *, timeout_seconds: float = 60.0) -> Ranks:
    """Join the processes that torchrun started, one for each device of the plan, in the order of its `names`.

    `on` says for each device where it runs, as in `find_targets`, on the host of its rank. NCCL connects ranks that
    all have a GPU of their own, gloo others; the latter's tensors pass through the hosts' memory. InputError for a
    wrong number of processes, before anything else, and for a device that is not there.
    """
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "-1"))
    if count != len(names) or rank < 0:
        devices = "1 device" if len(names) == 1 else f"{len(names)} devices"
        started = "torchrun did not start this process" if rank < 0 else f"torchrun started {count} processes"
        remedy = f"use torchrun --nproc-per-node {len(names)}"
        if int(os.environ.get("LOCAL_WORLD_SIZE", str(count))) != count:
            remedy = f"use torchrun with --nnodes times --nproc-per-node = {len(names)}"
        raise InputError(f"the plan has {devices} ({', '.join(names)}); {started}; {remedy}")
    if on is not None and len(on) != len(names):
        raise InputError(f"--on names {len(on)} devices; the plan has {len(names)}: {', '.join(names)}")
    patience = timedelta(seconds=timeout_seconds)
    with reaching_others(names[rank]):
        common, _, _ = next(iter(rendezvous("env://", timeout=patience)))
        store = PrefixStore(f"gdp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", common)
        store.set_timeout(patience)
        about: dict[str, Any] = {"host": _host()}
        try:
            (target,) = find_targets([names[rank]], [(places_of(names) if on is None else on)[rank]])
            about |= {"device": str(target.device), "cores": target.cores}
        except InputError as error:
            about["error"] = str(error)
        store.set(f"about/{rank}", json.dumps(about))
        abouts = [json.loads(store.get(f"about/{other}")) for other in range(count)]
        if errors := [item["error"] for item in abouts if "error" in item]:
            raise InputError(errors[0])
        targets = [
            Target(name, torch.device(item["device"]), tuple(item["cores"]))
            for name, item in zip(names, abouts, strict=True)
        ]
        gpus = {(item["host"], item["device"]) for item in abouts if item["device"].startswith("cuda")}
        nccl = len(gpus) == count > 1 and dist.is_nccl_available()
        if nccl:
            torch.cuda.set_device(target.device)
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        dist.init_process_group(backend, store=common, rank=rank, world_size=count, timeout=patience)
    return Ranks(targets, rank, [item["host"] for item in abouts], store, nccl=nccl)


def join_or_leave(names: Sequence[str], on: Sequence[str] | None = None) -> Ranks:
    """`join`; where that is refused to all, the first says so, and the others keep quiet until it has."""
    try:
        return join(names, on)
    except InputError:
        if int(os.environ.get("RANK", "0")):
            time.sleep(_PATIENCE_SECONDS)  # torchrun ends all as soon as one has ended
            raise SystemExit(2) from None
        raise


class Watch(threading.Thread):
    """Puts this rank's beats into the store, and looks there for the others' and for a cause to end, until `over`."""

    def __init__(self, ranks: Ranks, key: str, fail: Callable[[Failure], None]) -> None:
        super().__init__(name="gdp-watch", daemon=True)
        self._ranks, self._key, self._fail = ranks, key, fail
        self.over = threading.Event()

    def run(self) -> None:
        rank, count = self._ranks.rank, len(self._ranks.names)
        heard = {peer: (0, time.monotonic()) for peer in range(count) if peer != rank}
        try:
            store = self._ranks.store.clone()  # type: ignore[attr-defined]  # or others' waits would hold it up
            while not self.over.wait(_BEAT_SECONDS):
                store.add(f"{self._key}/{rank}", 1)
                if store.check(["cause"]):
                    self._fail(Failure(rank, "was told to end"))
                    return
                for peer, (beats, last) in heard.items():
                    latest, now = store.add(f"{self._key}/{peer}", 0), time.monotonic()
                    if latest != beats:
                        heard[peer] = latest, now
                    elif now - last > SILENT_SECONDS:
                        self._fail(Failure(peer, f"gave no sign of life for {SILENT_SECONDS:g} s"))
                        return
        except RuntimeError:
            if not self.over.is_set():
                self._fail(self._ranks.without_store())


@contextlib.contextmanager
def reaching_others(name: str) -> Iterator[None]:
    """ExecutionError if the others cannot be reached."""
    try:
        yield
    except RuntimeError as error:  # as all of torch.distributed's are
        raise ExecutionError(name, "could not join the others", error) from error


def _is_store_torchruns() -> bool:
    """Whether torchrun has the store, not the first rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _host() -> str:
    """What processes that share a clock have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()
