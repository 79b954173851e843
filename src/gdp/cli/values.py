"""Parses the values of options: `10%`, `REGEX=DEVICE`, `DEVICE=SIZE`, files to write."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from gdp.cluster import Cluster
from gdp.cluster.quantities import parse_fraction as parse_fraction
from gdp.cluster.quantities import parse_size
from gdp.errors import InputError


def parse_pins(texts: Sequence[str], cluster: Cluster) -> list[tuple[str, str]]:
    """Returns (regular expression, device) of each `REGEX=DEVICE`, split at the last `=`."""
    return [_parse_rule(text, "--pin", "encoder.*", cluster.device_number, cluster) for text in texts]


def parse_forbid(texts: Sequence[str], cluster: Cluster) -> list[tuple[str, str]]:
    """Returns (regular expression, device or kind of device) of each `REGEX=DEVICE`, split at the last `=`."""
    return [_parse_rule(text, "--forbid", "aten.mm", cluster.devices_called, cluster) for text in texts]


def _parse_rule(
    text: str, option: str, example: str, find: Callable[[str], object], cluster: Cluster
) -> tuple[str, str]:
    pattern, equals, device = text.rpartition("=")
    if not equals or not pattern:
        raise InputError(
            f"{option} is {text!r}; REGEX=DEVICE is expected, such as '{example}={cluster.devices[0].name}'"
        )
    _check_device(device, f"{option} {text}", find)
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"{option} {text}: {pattern!r} is no regular expression ({error}); mend it") from None
    return pattern, device


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Returns the size by symbolic dimension of each `NAME=SIZE`."""
    dims: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not name or not re.fullmatch(r"[1-9][0-9]{0,8}", size):
            raise InputError(
                f"--dim is {text!r}; NAME=SIZE with a size from 1 to 999999999 is expected, such as batch=8"
            )
        if name in dims:
            raise InputError(f"--dim {text}: {name} has a size already; give each dimension one")
        dims[name] = int(size)
    return dims


def parse_max_memory(texts: Sequence[str], cluster: Cluster) -> dict[str, int]:
    """Returns the bytes by device of each `DEVICE=SIZE`."""
    limits: dict[str, int] = {}
    for text in texts:
        device, equals, size = text.rpartition("=")
        if not equals or not device:
            raise InputError(
                f"--max-memory is {text!r}; DEVICE=SIZE is expected, such as {cluster.devices[0].name}=12GiB"
            )
        _check_device(device, f"--max-memory {text}", cluster.device_number)
        if device in limits:
            raise InputError(f"--max-memory {text}: {device} has a limit already; give each device one")
        limits[device] = parse_size(size, f"--max-memory {device}")
    return limits


def check_writable(path: Path) -> None:
    """Raises InputError unless a file can be written to `path`, so that no search is in vain."""
    parent = path.absolute().parent
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a directory; name a file")
        while not parent.exists():
            parent = parent.parent
    except OSError as error:  # a directory that may not be looked into, a name too long
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    if not parent.is_dir():
        raise InputError(f"{path}: cannot be written, {parent} is no directory; choose another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot be written, no permission to write to {parent}; choose another place")


def _check_device(name: str, option: str, find: Callable[[str], object]) -> None:
    try:
        find(name)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
