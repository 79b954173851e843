"""Sizes, rates, times and numbers in the notation of users: `1.5GiB`, `12GB/s`, `10us`, `9.3e12`."""

import math
import re
import reprlib
from collections.abc import Mapping
from fractions import Fraction

from gdp.errors import InputError

_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*([^\s0-9.+-]*)")
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_RATES = {unit and f"{unit}/s": factor for unit, factor in _SIZES.items()}
_TIMES = {"": 1, "ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


def parse_size(value: object, where: str) -> int:
    """Returns the bytes of `1.5GiB`, `16e9` or a bare number, rounded up exactly; an error names `where`."""
    return _quantity(value, where, _SIZES, "1.5GiB")


def parse_fraction(value: object, where: str, below: float = 1.0) -> float:
    """Returns 0.1 for `10%`, `0.1` or the number 0.1; at least 0 and less than `below`; an error names `where`."""
    text = str(value).strip() if type(value) in (int, float, str) else ""
    match = re.fullmatch(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-[0-9]+)?)\s*(%?)", text)
    fraction = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= fraction < below:
        raise InputError(
            f"{where} is {reprlib.repr(value)}; a share of at least 0 % and below {100 * below:g} % is expected, "
            "such as 10% or 0.1"
        )
    return fraction


def parse_rate(value: object, where: str) -> int:
    """Returns the bytes per second of `12.5GB/s` or a bare number, rounded up exactly."""
    return _quantity(value, where, _RATES, "12.5GB/s")


def parse_time(value: object, where: str) -> int:
    """Returns the nanoseconds of `0.5us` or a bare number, rounded up exactly."""
    return _quantity(value, where, _TIMES, "0.5us")


def parse_number(value: object, where: str) -> int:
    """Returns the integer of `9.3e12`, given as a number or as text, rounded up exactly."""
    return _quantity(value, where, {"": 1}, "9.3e12")


def _quantity(value: object, where: str, units: Mapping[str, int], example: str) -> int:
    text = str(value).strip() if type(value) in (int, float, str) else ""  # str of a float is its shortest decimal form
    match = _NUMBER.fullmatch(text) if len(text) <= 64 else None
    if match is None or match[2] not in units:
        choice = f" with one of {', '.join(unit for unit in units if unit)}" if len(units) > 1 else ""
        raise InputError(f"{where} is {reprlib.repr(value)}; a number{choice} is expected, such as {example}")
    exact = Fraction(match[1]) * units[match[2]]
    if not 0 <= exact < 2**63:
        raise InputError(
            f"{where} is {reprlib.repr(value)}; at least 0 and less than 2^63 is expected, such as {example}"
        )
    return math.ceil(exact)
