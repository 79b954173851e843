"""Layouts: how one step is cut over devices, in the words of `--parallel`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gdp.errors import InputError, prefixed, suggest
from gdp.graph.microbatches import check_count
from gdp.models.shards import WHOLE, Shards, in_shares

MAX_REPLICAS = 1024  # as many as there may be devices
NONE, BLOCKS, AUTO = "none", "blocks", "auto"  # what is recomputed; AUTO: as many blocks as memory asks for
SELECTIVE = "selective"  # all blocks, but for attention and every second product
_SHARDS = ("tensor", "sequence", "expert", "context", "overlap")
_KEYS = ("data", *_SHARDS, "stages", "microbatches", "zero", "recompute", "offload")
# what plan files have besides the layout
_BESIDE = ("batch", "places", "ring", "hosts", "exchanges", "whole", "groups", "shares")
# what users of other tools write; the docs have the table
_MEANT = {"dp": "data", "ddp": "data", "pp": "stages", "tp": "tensor", "sp": "sequence", "ep": "expert"}
_MEANT |= {"cp": "context", "ac": "recompute", "checkpointing": "recompute"}
_MEANT |= {"ga": "microbatches", "gradient_accumulation": "microbatches"}
_FLAGS = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
_SEQUENCE = _FLAGS | {AUTO: None}
_HELP = "such as data=4,tensor=2,microbatches=8,zero=1,recompute=auto,stages=2"


@dataclass(frozen=True, slots=True)
class Layout:
    """Cuts a step into replicas of the model and micro-batches; R replicas.

    All micro-batches have the same number of samples: the batch is cut into `num_parts`. `stages` is a constraint on
    the placement: the blocks of a replica lie on so many devices in order. InputError for numbers that make no sense.
    """

    microbatches: tuple[int, ...] = (1,)  # [R] of each replica
    zero: int = 0  # 1: optimizer state is cut over replicas, 2: gradients as well, 3: parameters as well
    recompute: str | tuple[str, ...] = NONE  # NONE, BLOCKS, SELECTIVE, AUTO, or paths of modules
    stages: int | None = None  # None: ops are placed freely
    offload: str | tuple[str, ...] = NONE  # activations of blocks that wait on a CPU: NONE, BLOCKS, AUTO, or paths
    shards: Shards = WHOLE  # how ops are cut over the cards of a group; each replica lies on groups then

    def __post_init__(self) -> None:
        if not 1 <= self.data <= MAX_REPLICAS:
            raise InputError(f"data is {self.data}; 1 to {MAX_REPLICAS:,} replicas are expected")
        for count in self.microbatches:
            check_count(count, "microbatches")
        if self.zero not in (0, 1, 2, 3):
            raise InputError(f"zero is {self.zero}; 0, 1, 2 or 3 is expected")
        if self.zero and self.data == 1:
            fewest, of_ranks = 2 * self.shards.samples, f" of {self.num_copies} ranks" * (self.num_copies > 1)
            raise InputError(
                f"zero={self.zero} cuts state over replicas{of_ranks}, and there is one; add data={fewest} or more"
            )
        if self.zero == 3 and not self.is_even:
            raise InputError("zero=3 gathers parameters for all replicas at once; give each as many micro-batches")
        if self.stages is not None and self.stages < 1:
            raise InputError(f"stages is {self.stages}; at least 1 is expected")
        if self.offload == SELECTIVE:
            raise InputError("offload=selective: whole blocks wait on a CPU; take offload=blocks or auto")
        if self.offload != NONE and self.recompute != NONE:
            raise InputError("recompute and offload are two ways to hold fewer activations; take one of them")
        if self.shards.shares and not self.of_groups.is_whole:
            raise InputError(f"{self.shards} is one group of cards, which runs the whole step; leave other keys out")
        if self.offload != NONE and self.zero == 3:
            raise InputError("offload does not go with zero=3; take zero=2 or less, or recompute")

    @property
    def data(self) -> int:
        """The number of replicas."""
        return len(self.microbatches)

    @property
    def num_copies(self) -> int:
        """The number of replicas, where ranks of a group that have samples of their own are one each."""
        return self.data * self.shards.samples

    @property
    def num_parts(self) -> int:
        """The number of micro-batches of all replicas, into which the batch is cut."""
        return sum(self.microbatches)

    @property
    def is_even(self) -> bool:
        """True if all replicas have as many micro-batches."""
        return len(set(self.microbatches)) == 1

    @property
    def of_groups(self) -> "Layout":
        """The layout over groups of cards: what is left beside the shards."""
        return self if self.shards == WHOLE else replace(self, shards=WHOLE)

    @property
    def is_whole(self) -> bool:
        """True if nothing is cut: the step as captured."""
        return self == Layout()

    def document(self) -> dict[str, Any]:
        """Returns the layout as in `--json` and in plan files; `offload` is there if it is used."""
        counts = self.microbatches
        offload = {} if self.offload == NONE else {"offload": _listed(self.offload)}
        return offload | {
            "data": self.num_copies,
            **self.shards.document(),
            "stages": self.stages,
            "microbatches": counts[0] if self.is_even else list(counts),
            "zero": self.zero,
            "recompute": _listed(self.recompute),
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "Layout":
        """Returns the layout that `document` describes; InputError for anything else."""
        try:
            counts, modules = document["microbatches"], [document["recompute"], document.get("offload", NONE)]
            recompute, offload = (each if isinstance(each, str) else tuple(map(str, each)) for each in modules)
            numbers = [document["data"], document["zero"], *(counts if isinstance(counts, list) else [counts])]
            numbers += [] if document["stages"] is None else [document["stages"]]
            if unknown := sorted(set(document) - {*_KEYS, *_BESIDE}):
                raise InputError(f"layout: unknown keys {', '.join(map(repr, unknown))}; leave them out")
            if any(type(number) is not int for number in numbers):
                raise TypeError
            shards = Shards.of_document(document)
            data = _num_groups(int(document["data"]), shards)
            each = tuple(map(int, counts)) if isinstance(counts, list) else (int(counts),) * data
            stages = None if document["stages"] is None else int(document["stages"])
            return cls(each, int(document["zero"]), recompute, stages, offload, shards)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"layout: {dict(document)!r} is none; {_HELP} makes one") from None

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Reads `data=4,microbatches=8`; unequal counts are `microbatches=3:1:1`, modules `recompute=encoder:head`.

        `fsdp=4` is `data=4,zero=3`, and other tools' words for keys are understood.
        InputError, with the remedy, for anything else."""
        values: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = part.strip().partition("=")
            key = key.lower()
            if not equals or not value:
                raise InputError(f"--parallel: {part.strip()!r} is no KEY=VALUE; auto, none or {_HELP} is expected")
            if key == "hsdp":
                raise InputError("--parallel: hsdp: parameters are cut over all replicas; take data=N,zero=3")
            if key == "fsdp":
                if "zero" in values:
                    raise InputError("--parallel: zero is given twice; fsdp=N is data=N,zero=3")
                values["zero"], key = "3", "data"
            key = _MEANT.get(key, key)
            value = BLOCKS if (key, value) == ("recompute", "full") else value
            if key not in _KEYS:
                raise InputError(f"--parallel: {key!r} is unknown; {suggest(key, _KEYS)}")
            if key in values:
                raise InputError(f"--parallel: {key} is given twice; leave one out")
            values[key] = value
        recompute, offload = (_modules(values.get(key, NONE)) for key in ("recompute", "offload"))
        sequence = values.get("sequence", AUTO).lower()
        if sequence not in _SEQUENCE:
            raise InputError(f"--parallel: sequence is {sequence!r}; on, off or auto (on in training) is expected")
        if (overlap := values.get("overlap", "off").lower()) not in _FLAGS:
            raise InputError(f"--parallel: overlap is {overlap!r}; on or off is expected")
        with prefixed("--parallel"):
            counts = tuple(_number("microbatches", item) for item in values.get("microbatches", "1").split(":"))
            tensor, parts = in_shares(*(_number("tensor", item) for item in values.get("tensor", "1").split(":")))
            expert, context = (_integer(values, key, 1) for key in ("expert", "context"))
            shards = Shards(tensor, _SEQUENCE[sequence], expert, context, _FLAGS[overlap], parts)
            data = _num_groups(_integer(values, "data", len(counts) * shards.samples), shards)
            if not 1 <= data <= MAX_REPLICAS:
                raise InputError(f"data is {data}; 1 to {MAX_REPLICAS:,} replicas are expected")
            if len(counts) not in (1, data):
                raise InputError(
                    f"microbatches has {len(counts)} numbers for {data} replicas; one, or one each, is expected"
                )
            even, zero = counts if len(counts) == data else counts * data, _integer(values, "zero", 0)
            stages = _integer(values, "stages", 0) if "stages" in values else None
            return cls(even, zero, recompute, stages, offload, shards)

    def __str__(self) -> str:
        """Returns the layout as `--parallel` takes it: `data=4,microbatches=2,zero=1`; `none` for the whole step."""
        counts = self.microbatches
        parts = [f"data={self.num_copies}"] if self.num_copies > 1 else []
        parts += [str(self.shards)] if self.shards != WHOLE else []
        parts += [f"stages={self.stages}"] if self.stages is not None else []
        parts += [f"microbatches={':'.join(map(str, counts[:1] if self.is_even else counts))}"] * (max(counts) > 1)
        parts += [f"zero={self.zero}"] if self.zero else []
        for key, modules in (("recompute", self.recompute), ("offload", self.offload)):
            if modules != NONE:
                parts.append(f"{key}={modules if isinstance(modules, str) else ':'.join(modules)}")
        return ",".join(parts) or NONE


def _num_groups(data: int, shards: Shards) -> int:
    """Returns the replicas of groups of so many replicas in all. InputError where groups would be of several."""
    if data % shards.samples:
        remedy = f"take a multiple of {shards.samples} for data, or add tensor={shards.expert}"
        raise InputError(f"expert={shards.expert} places experts on as many of data={data} replicas; {remedy}")
    return data // shards.samples


def _listed(modules: str | tuple[str, ...]) -> str | list[str]:
    return modules if isinstance(modules, str) else list(modules)


def _modules(text: str) -> str | tuple[str, ...]:
    """Returns NONE, BLOCKS, SELECTIVE, AUTO, or the paths in `text`."""
    return text if text in (NONE, BLOCKS, SELECTIVE, AUTO) else tuple(text.split(":"))


def _integer(values: Mapping[str, str], key: str, default: int) -> int:
    return _number(key, values[key]) if key in values else default


def _number(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise InputError(f"{key} is {text!r}; a whole number is expected")
    return int(text)
