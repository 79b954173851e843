"""Shards: how the ops of a step are cut over the ranks of a group of alike cards, which run one local program."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from gdp.errors import InputError

Styles = list[tuple[str, str]]
"""Modules, by paths with `*` for any number, and how `parallelize_module` of PyTorch cuts each, in Python."""

MAX_RANKS = 64  # of a group: as many cards as one island of fast links has today


@dataclass(frozen=True, slots=True)
class Shards:
    """The degrees of a local program: that of one of `num_ranks` ranks. InputError for numbers that make no sense.
    Each expert lies on `tensor` / `expert` ranks, which have a part of its columns each; with 1 on all ranks. With one
    rank of tensors and tokens, `expert` ranks have samples of their own."""

    tensor: int = 1
    sequence: bool | None = None  # tokens are cut over the tensor ranks between cut ops; None: in training
    expert: int = 1
    context: int = 1  # parts of a sequence: ranks have tokens of their own in all layers
    overlap: bool = False  # sums of gradients over ranks run beside what makes gradients of weights
    shares: tuple[int, ...] = ()  # of heads and columns, of each of `tensor` cards in turn; (): equal ones

    def __post_init__(self) -> None:
        if self.shares and (min(self.shares) < 1 or self.tensor != len(self.shares) or len(set(self.shares)) == 1):
            raise InputError(
                f"tensor={':'.join(map(str, self.shares))}: a share of at least 1 for each card is expected"
            )
        if self.shares and (self.sequence or self.expert > 1 or self.context > 1 or self.overlap):
            raise InputError(f"{self}: unequal shares go with no other degree; leave others out")
        for key in ("tensor", "expert", "context"):
            if not 1 <= getattr(self, key) <= MAX_RANKS:
                raise InputError(f"{key} is {getattr(self, key)}; 1 to {MAX_RANKS} ranks are expected")
        if self.sequence and self.tensor == 1:
            raise InputError("sequence cuts tokens over tensor ranks, and there is one; add tensor=2 or more")
        if self.overlap and self.tensor == 1:
            raise InputError("overlap is of exchanges between tensor ranks, and there is one; add tensor=2 or more")
        if self.tensor % self.expert and self.samples == 1:
            remedy = f"let it divide tensor={self.tensor}" if self.tensor > 1 else "leave context out"
            raise InputError(f"expert={self.expert} places experts on ranks of tensors, or of samples; {remedy}")

    def settled(self, *, training: bool) -> "Shards":
        """Returns the same shards, which say whether tokens are cut between cut ops: by default in training."""
        is_cut = training and not self.shares
        return replace(self, sequence=is_cut) if self.sequence is None and self.tensor > 1 else self

    @property
    def num_ranks(self) -> int:
        """The number of cards of a group."""
        return self.tensor * self.context * self.samples

    @property
    def samples(self) -> int:
        """The number of ranks that have samples of their own: replicas but for experts, of which each has a part."""
        return self.expert if self.tensor == self.context == 1 else 1

    def document(self) -> dict[str, Any]:
        """Returns the degrees as in `--json` and in plan files: `tensor`, and others that are used."""
        degrees = {"expert": self.expert, "context": self.context}
        cut: dict[str, Any] = {} if self.sequence is None else {"sequence": self.sequence}
        cut |= {"overlap": True} if self.overlap else {}
        cut |= {"shares": list(self.shares)} if self.shares else {}
        return {"tensor": self.tensor} | cut | {key: degree for key, degree in degrees.items() if degree > 1}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "Shards":
        """Returns the shards of a layout's document; TypeError for values that are no numbers."""
        numbers = [document.get(key, 1) for key in ("tensor", "expert", "context")]
        is_cut, overlaps, shares = document.get("sequence"), document.get("overlap", False), document.get("shares", [])
        is_told = type(is_cut) in (bool, type(None)) and type(overlaps) is bool
        if any(type(number) is not int for number in (*numbers, *shares)) or not is_told:
            raise TypeError("degrees are whole numbers")
        return cls(numbers[0], is_cut, numbers[1], numbers[2], overlaps, tuple(shares))

    def __str__(self) -> str:
        """Returns the degrees as `--parallel` takes them: `tensor=4,sequence=on`; "" where nothing is cut."""
        parts = [f"{key}={getattr(self, key)}" for key in ("tensor", "expert", "context") if getattr(self, key) > 1]
        cut = [] if self.sequence is None else [f"sequence={'on' if self.sequence else 'off'}"]
        if self.shares:
            return f"tensor={':'.join(map(str, self.shares))}"
        return ",".join(parts[:1] + cut + parts[1:] + ["overlap=on"] * self.overlap)


def in_shares(tensor: int, *shares: int) -> tuple[int, tuple[int, ...]]:
    """Returns the ranks, and their shares in lowest terms; equal ones are ()."""
    every = (tensor, *shares)
    if shares and not any(every):  # refused, as a share of 0 is
        return len(every), every
    lowest = tuple(share // max(gcd(*every), 1) for share in every)
    return (len(every), lowest if len(set(lowest)) > 1 else ()) if shares else (tensor, ())


WHOLE = Shards()
