"""MeasuredTimes: measured times of ops, by device kind, library and signature, in an SQLite file.

`gdp run --times FILE` fills it, `gdp place --times FILE` reads it. Transactions are atomic, and several processes may
use a file at once.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from gdp.errors import InputError, prefixed
from gdp.files import check_version
from gdp.graph import Graph

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
        rows = [
            (device_kind, library, time.signature, time.median_ns, time.spread_ns, time.num_samples) for time in times
        ]
        with self._explained(), closing(self._connect()) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO op_times VALUES (?, ?, ?, ?, ?, ?)", rows)

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

    def count(self) -> dict[tuple[str, str], int]:
        """Returns the number of known ops, by device kind and library."""
        with self._explained(), closing(self._connect()) as connection:
            rows = connection.execute("SELECT device_kind, library, count(*) FROM op_times GROUP BY 1, 2").fetchall()
        return {(kind, library): number for kind, library, number in rows}

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


def with_measured_times(
    graph: Graph, signatures: Sequence[str], times: MeasuredTimes, device_kinds: Iterable[str], library: str
) -> Graph:
    """Returns `graph` with the measured times of its ops on these kinds of devices; other times stay."""
    tables: list[dict[str, int]] = [dict(table) for table in graph.times_ns]
    for kind in dict.fromkeys(device_kinds):
        op_times = times.find(kind, library, signatures)
        for table, signature in zip(tables, signatures, strict=True):
            if signature in op_times:
                table[kind] = op_times[signature].median_ns
    return with_times(graph, tables)


def measured_noise(
    signatures: Sequence[str], times: MeasuredTimes, device_kinds: Iterable[str], library: str
) -> float | None:
    """Returns the relative standard deviation of op times on these kinds of devices, weighted by time; None if unknown.

    Half the distance between quartiles is 0.6745 standard deviations of a normal distribution.
    """
    median_ns, spread_ns = 0, 0
    for kind in dict.fromkeys(device_kinds):
        op_times = times.find(kind, library, signatures)
        samples = [op_times[signature] for signature in signatures if signature in op_times]
        median_ns += sum(time.median_ns for time in samples if time.num_samples > 1)
        spread_ns += sum(time.spread_ns for time in samples if time.num_samples > 1)
    return spread_ns / 0.6745 / median_ns if median_ns else None


def with_times(graph: Graph, tables: Sequence[Mapping[str, int]]) -> Graph:
    """Returns `graph` with other times: [N] by device name or kind, in ns."""
    return replace(graph, times_ns=tuple(MappingProxyType(dict(table)) for table in tables))
