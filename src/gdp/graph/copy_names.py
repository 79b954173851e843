"""Names of copies: `x@m` is the op `x` of micro-batch m, `x#d` that of replica d, and `x@m#d` both."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64

NUM_MICROBATCHES, NUM_REPLICAS = 10_000, 1000  # numbers in names are below these
_MICROBATCHES = {str(number): number for number in range(1, NUM_MICROBATCHES)}
_REPLICAS = {str(number): number for number in range(1, NUM_REPLICAS)}


def split_name(name: str) -> tuple[str, int, int]:
    """Returns the name without its ends, the number of the micro-batch and that of the replica; 0 for none."""
    microbatch = replica = 0
    if "#" in name:
        stem, _, number = name.rpartition("#")
        if stem and number in _REPLICAS:
            name, replica = stem, _REPLICAS[number]
    if "@" in name:
        stem, _, number = name.rpartition("@")
        if stem and number in _MICROBATCHES:
            name, microbatch = stem, _MICROBATCHES[number]
    return name, microbatch, replica


@dataclass(frozen=True, eq=False)
class CopyNames:
    """The parts of names of ops. N ops, B names without their ends."""

    bases: Sequence[str]  # [B] distinct
    base: I64  # [N] the number of each op's name in `bases`
    microbatch: I64  # [N] 0 for none
    replica: I64  # [N] 0 for none

    @classmethod
    def of(cls, names: Sequence[str]) -> "CopyNames":
        """Splits `names` [N]."""
        numbers: dict[str, int] = {}
        base, microbatch, replica = (np.zeros(len(names), np.int64) for _ in range(3))
        ends: list[tuple[int, int, int]] = []
        plain: list[int] = []
        for op, name in enumerate(names):
            if "#" in name or "@" in name:
                stem, own_microbatch, own_replica = split_name(name)
                ends.append((op, own_microbatch, own_replica))
                name = stem
            plain.append(numbers.setdefault(name, len(numbers)))
        base[:] = plain
        if ends:
            ops, microbatches, replicas = np.array(ends, np.int64).T
            microbatch[ops], replica[ops] = microbatches, replicas
        for column in (base, microbatch, replica):
            column.setflags(write=False)
        return cls(tuple(numbers), base, microbatch, replica)
