"""What each term of the costs brings: errors of predictions without it, nothing else fitted anew."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from gdp.cluster import Cluster, Device
from gdp.cluster.achieved import NUMBERS

Change = Callable[[Device], Device]
_without: ContextVar[str] = ContextVar("without", default="")


def _less(*names: str) -> Change:
    """Returns the change to a device that does not tell these figures."""
    return lambda device: replace(
        device, achieved={name: value for name, value in device.achieved.items() if name not in names}
    )


TERMS: Mapping[str, Change] = {
    "hosts that issue kernels": lambda device: replace(device, issue_ns=0),
    "tiles, waves and depths of products": _less("multiprocessors"),
    "shares of the sheet": lambda device: replace(
        device, achieved={name: value for name, value in device.achieved.items() if name in NUMBERS}
    ),
    "copies between layouts": lambda device: replace(device, achieved={**device.achieved, "transpose": 100.0}),
    "gaps and floors": lambda device: replace(
        device,
        achieved={**device.achieved, **{name: 0.0 for name in NUMBERS if name.endswith(("_floor_ns", "gap_ns"))}},
    ),
    "what caches hold": _less("cache_bytes"),
    "all of it: the roofline of the sheet": lambda device: replace(device, issue_ns=0, achieved={}),
}
"""What is left out, and the device without it."""


@contextmanager
def without(term: str) -> Iterator[None]:
    """Leaves a term out of the predictions made in the block; "" leaves out nothing."""
    token = _without.set(term)
    try:
        yield
    finally:
        _without.reset(token)


def term_left_out() -> str:
    """Returns the term that is left out now."""
    return _without.get()


def less(cluster: Cluster, term: str) -> Cluster:
    """Returns the cluster whose devices lack a term."""
    return replace(cluster, devices=tuple(map(TERMS[term], cluster.devices))) if term else cluster
