"""MeasuredTimes: measured times of ops, by device kind, library and signature, in an SQLite file. `gdp run --times
FILE` and `gdp times import` fill it, `gdp place --times FILE` reads it. Several processes may use a file at once."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from gdp.cluster import Cluster
from gdp.costs.fusion import joins_ops
from gdp.costs.op_times import op_time_classes
from gdp.errors import InputError, prefixed
from gdp.files import check_version
from gdp.graph import Graph
from gdp.graph.interpolation import have_same_ops, time_between
from gdp.models.model import Model

_APPLICATION_ID, _VERSION = 0x67647074, 1  # "gdpt"
_LONGEST_WAIT_SECONDS = 10.0  # for another process that writes
_MAX_VARIABLES = 500  # of one query; SQLite takes at least 999


@dataclass(frozen=True, slots=True)
class OpTime:
    """The median of `num_samples` runs of an op and half the distance between the quartiles, in ns."""

    signature: str
    median_ns: int
    spread_ns: int
    num_samples: int

    @classmethod
    def of(cls, signature: str, times_ns: Sequence[int]) -> "OpTime":
        """Returns what runs that took these times say."""
        low, median, high = np.percentile(times_ns, (25, 50, 75))
        return cls(signature, int(median), int(high - low) // 2, len(times_ns))


class MeasuredTimes:
    """The file `path`. InputError, with the file and the remedy, if it is not a file of measured times or is locked."""

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise InputError(f"{path}: is a directory; name a file")
        if not create and not self.path.is_file():
            raise InputError(f"{path}: no such file of measured times; `gdp run --times {path}` makes one")
        with closing(self._connect(create=create)) as connection:
            self._check(connection, create)

    def store(self, device_kind: str, library: str, times: Iterable[OpTime]) -> None:
        """Stores the times of ops on a kind of device, in place of earlier times of the same ops."""
        rows = [(device_kind, library, at.signature, at.median_ns, at.spread_ns, at.num_samples) for at in times]
        with self._explained(), closing(self._connect()) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO op_times VALUES (?, ?, ?, ?, ?, ?)", rows)

    def note_samples(self, model: str, samples: int) -> None:
        """Notes that steps of MODEL were measured with this number of samples."""
        with self._explained(), closing(self._connect()) as connection, connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS steps (model TEXT, samples INTEGER, PRIMARY KEY (model, samples))"
            )
            connection.execute("INSERT OR REPLACE INTO steps VALUES (?, ?)", (model, samples))

    def samples(self, model: str) -> list[int]:
        """Returns the numbers of samples that steps of MODEL were measured with, ascending."""
        with self._explained(), closing(self._connect()) as connection:
            if not connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'steps'").fetchone()[0]:
                return []
            rows = connection.execute("SELECT samples FROM steps WHERE model = ?", (model,)).fetchall()
        return sorted(samples for (samples,) in rows if type(samples) is int and samples > 0)

    def find(self, device_kind: str, library: str, signatures: Iterable[str]) -> dict[str, OpTime]:
        """Returns the known times of these ops on a kind of device, by signature."""
        names = list(dict.fromkeys(signatures))
        times: dict[str, OpTime] = {}
        with self._explained(), closing(self._connect()) as connection:
            for first in range(0, len(names), _MAX_VARIABLES):
                part = names[first : first + _MAX_VARIABLES]
                rows = connection.execute(
                    "SELECT signature, median_ns, spread_ns, num_samples FROM op_times WHERE device_kind = ?"
                    f" AND library = ? AND signature IN ({', '.join('?' * len(part))})",
                    (device_kind, library, *part),
                )
                times.update((row[0], OpTime(*row)) for row in map(self._checked, rows))
        return times

    def _checked(self, row: tuple[str, int, int, int]) -> tuple[str, int, int, int]:
        """Returns a row of times; SQLite keeps values of any type in any column."""
        if any(type(number) is not int or number < 0 for number in row[1:]):
            raise InputError(f"{self.path}: {row[0]:.60} has {row[1:]!r:.60} for times; measure the op again")
        return row

    def _connect(self, *, create: bool = False) -> sqlite3.Connection:
        try:
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            return sqlite3.connect(self.path, timeout=_LONGEST_WAIT_SECONDS)
        except (sqlite3.Error, OSError) as error:
            raise InputError(f"{self.path}: cannot be opened ({error}); choose another place") from None

    def _check(self, connection: sqlite3.Connection, create: bool) -> None:
        with self._explained():
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            is_empty = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if is_empty and application == 0 and create:
                with connection:
                    connection.execute(
                        "CREATE TABLE IF NOT EXISTS op_times (device_kind TEXT, library TEXT, signature TEXT,"
                        " median_ns INTEGER, spread_ns INTEGER, num_samples INTEGER,"
                        " PRIMARY KEY (device_kind, library, signature))"
                    )
                    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version = {_VERSION}")
                return
        if application != _APPLICATION_ID:
            raise InputError(f"{self.path}: is no file of measured times; `gdp run --times FILE` makes one")
        with prefixed(self.path):
            check_version(version, "measured times", _VERSION, _VERSION)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns SQLite's errors into InputErrors."""
        try:
            yield
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"{self.path}: cannot be used as a file of measured times ({reason}); name another"
            ) from None


def check_runtimes(cluster: Cluster, *, is_trained: bool) -> None:
    """Raises InputError for devices whose runtime joins ops, as measured times are of single ones."""
    runtimes = [device.runtime for device in cluster.devices if not device.is_cpu]
    if (name := next((each for each in runtimes if joins_ops(each, is_trained=is_trained)), None)) is not None:
        raise InputError(
            f"--times: are of ops that run one by one, and --runtime {name} joins them; add --runtime eager, or place "
            "without --times"
        )


@dataclass(frozen=True, eq=False)
class OpTimer:
    """The measured times that the steps of a MODEL have on the kinds of devices of a cluster."""

    times: MeasuredTimes
    cluster: Cluster

    @property
    def device_kinds(self) -> dict[str, int]:
        """The kinds, each with one of its devices."""
        return {device.kind: number for number, device in enumerate(self.cluster.devices)}

    def lacks(self, graph: Graph) -> bool:
        """Returns whether an op that does anything has no time on one of the kinds of devices."""
        active = ((graph.flops > 0) | (graph.bytes_accessed > 0)).nonzero()[0].tolist()
        return any(kind not in graph.times_ns[op] for op in active for kind in self.device_kinds)

    def measured(self, model: Model, signatures: Sequence[str], library: str) -> Model:
        """Returns the step with the times that were measured of its ops; other times stay. Its noise is the relative
        standard deviation of these times, weighted by time; None if it is not known. Half the distance between
        quartiles is 0.6745 standard deviations of a normal distribution."""
        tables: list[dict[str, int]] = [dict(table) for table in model.graph.times_ns]
        median_ns, spread_ns = 0, 0
        for kind in self.device_kinds:
            op_times = self.times.find(kind, library, signatures)
            for table, signature in zip(tables, signatures, strict=True):
                if (op_time := op_times.get(signature)) is not None:
                    table[kind] = op_time.median_ns
                    median_ns += op_time.median_ns if op_time.num_samples > 1 else 0
                    spread_ns += op_time.spread_ns if op_time.num_samples > 1 else 0
        noise = spread_ns / 0.6745 / median_ns if median_ns else None
        return replace(model, graph=with_times(model.graph, tables), noise=noise)

    def between(self, graph: Graph, samples: int, others: Mapping[int, Graph]) -> Graph:
        """Returns `graph`, a step of `samples`, with times of ops that have none from `others`, by numbers of samples.
        An op that was measured with two numbers or more has a time on the line through those around `samples`, else the
        nearest ones; with one number, a time in proportion to what the cost model says of both steps."""
        steps = {count: step for count, step in others.items() if have_same_ops(graph, step)}
        if not steps:
            return graph
        tables = [dict(table) for table in graph.times_ns]
        counted = (*steps.items(), (samples, graph))
        modelled = {x: op_time_classes(with_times(step, [{}] * step.num_ops), self.cluster) for x, step in counted}
        device_class = modelled[samples][1]
        for kind, device in self.device_kinds.items():
            for op, table in enumerate(tables):
                known = {count: step.times_ns[op][kind] for count, step in steps.items() if kind in step.times_ns[op]}
                if kind in table or not known:
                    continue
                if len(known) > 1:
                    one, other = _around(samples, known)
                    table[kind] = time_between((one, known[one]), (other, known[other]), samples)
                else:
                    ((count, time_ns),) = known.items()
                    own_ns, other_ns = (int(modelled[size][0][op, device_class[device]]) for size in (samples, count))
                    table[kind] = -(-time_ns * own_ns // other_ns) if min(time_ns, own_ns, other_ns) > 0 else time_ns
        return with_times(graph, tables)


def with_times(graph: Graph, tables: Sequence[Mapping[str, int]]) -> Graph:
    """Returns `graph` with other times: [N] by device name or kind, in ns."""
    return replace(graph, times_ns=tuple(MappingProxyType(dict(table)) for table in tables))


def _around(samples: int, known: Mapping[int, int]) -> tuple[int, int]:
    """Returns two numbers of `known`: those next to `samples` on both sides, else the nearest."""
    counts = np.array(sorted(known, key=lambda count: abs(count - samples)))
    beyond = counts[np.sign(counts - samples) != np.sign(counts[0] - samples)]
    return int(counts[0]), int(beyond[0] if len(beyond) else counts[1])
