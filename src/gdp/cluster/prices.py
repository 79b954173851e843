"""Prices: dollars an hour and watts of kinds of devices and of clusters, from the catalogue and from a user's file.
rtx5090-32g: {dollars_per_hour: 0.69, watts: 575} my-card: {watts: 300}"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gdp.cluster.catalogue import KINDS
from gdp.cluster.cluster import Cluster
from gdp.cluster.cluster_file import read_document
from gdp.cluster.device import Device
from gdp.errors import InputError, prefixed, suggest

_KEYS = ("dollars_per_hour", "watts")
_MOST = 1e6  # of either


@dataclass(frozen=True, slots=True)
class Price:
    """The costs of a machine; None where one of its devices has no known figure."""

    dollars_per_hour: float | None
    watts: float | None

    def per_dollar(self, per_second: float | None) -> float | None:
        """Returns how many of what is done `per_second` a dollar buys."""
        return per_second * 3600 / self.dollars_per_hour if per_second and self.dollars_per_hour else None

    def per_joule(self, per_second: float | None) -> float | None:
        """Returns how many of what is done `per_second` a joule buys, if all devices draw all of their watts."""
        return per_second / self.watts if per_second and self.watts else None


UNKNOWN = Price(None, None)


@dataclass(frozen=True, slots=True)
class Prices:
    """Figures of kinds of devices; `own` go before those of the catalogue."""

    own: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def load(cls, path: str | Path) -> "Prices":
        """Reads a file of kinds: YAML, or JSON if its name ends in .json. InputError names file and place."""
        document = read_document(path, "prices")
        with prefixed(path):
            if not isinstance(document, dict) or not document:
                raise InputError("no kinds of devices; KIND: {dollars_per_hour: 1.5, watts: 300} is expected")
            for kind in document:
                if not isinstance(kind, str):
                    raise InputError(f"{kind}: is no name of a kind of device, such as rtx4090-24g; mend or quote it")
            return cls(MappingProxyType({kind: dict(_figures(kind, row)) for kind, row in document.items()}))

    def unknown(self, clusters: Iterable[Cluster]) -> list[str]:
        """Returns a sentence on each kind that is neither in the catalogue nor in one of `clusters`."""
        known = {*KINDS, *(device.kind for cluster in clusters for device in cluster.devices)}
        return [
            f"{kind}: no such kind of device; {suggest(kind, sorted(known))}" for kind in self.own if kind not in known
        ]

    def of(self, cluster: Cluster) -> Price:
        """Returns the sums over all cards. A CPU without a price is in those of the cards that it hosts."""
        has_cards = not all(device.is_cpu for device in cluster.devices)
        dollars = [self._of(device, "dollars_per_hour", device.is_cpu and has_cards) for device in cluster.devices]
        return Price(_total(dollars), _total([self._of(device, "watts") for device in cluster.devices]))

    def _of(self, device: Device, key: str, is_free: bool = False) -> float | None:
        built_in = KINDS.get(device.kind)
        known = self.own.get(device.kind, {}).get(key, None if built_in is None else getattr(built_in, key))
        return (0.0 if is_free else None) if known is None else device.num_cards * known


def _total(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return math.fsum(known) if len(known) == len(figures) else None


def _figures(kind: object, row: Any) -> Iterator[tuple[str, float]]:
    if not isinstance(row, dict) or not row or not set(row) <= set(_KEYS):
        raise InputError(f"{kind}: is {row!r:.80}; {' and '.join(_KEYS)} are expected, such as {{watts: 300}}")
    for key, value in row.items():
        if type(value) not in (int, float) or not 0 < value <= _MOST:
            raise InputError(f"{kind}: {key} is {value!r:.80}; a number above 0 and up to {_MOST:,.0f} is expected")
        yield key, float(value)
