"""Draws architectures: number n of a seed is a function of these two and the families."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from benchmarks.architectures.families import (
    cells,
    mixtures,
    recurrent,
    residual,
    tables,
    transformers,
    u_shapes,
    unrolled,
    wired,
)
from benchmarks.architectures.families.parts import Draws, Example
from benchmarks.architectures.likeness import MAX_LIKENESS, BuiltIns
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.pytorch import capture_fn

VERSION = 1  # of the graphs: raise it with every change that makes other graphs of a seed
MIN_OPS, MAX_OPS = 300, 3000
MAX_BYTES = 256 * 2**30  # of parameters, optimizer state and what the forward pass makes: 16 devices of 16 GiB
FAMILIES: Mapping[str, Callable[[Draws, int], Example]] = MappingProxyType(
    {
        "cells": cells.build,
        "residual": partial(residual.build, trunk=residual.ResidualTrunk),
        "dense": partial(residual.build, trunk=residual.DenseTrunk),
        "wired": wired.build,
        "u-shapes": u_shapes.build,
        "recurrent": recurrent.build,
        "encoders": partial(transformers.build_stack, is_causal=False),
        "decoders": partial(transformers.build_stack, is_causal=True),
        "encoder-decoders": transformers.build_encoder_decoder,
        "experts": transformers.build_experts,
        "tables": tables.build,
        "towers": mixtures.build_towers,
        "mixtures": mixtures.build_mixture,
        "unrolled": unrolled.build,
    }
)
FURTHER = ("unrolled",)  # drawn where they are named, so that a number of a seed stays the same graph without them
DEFAULT = tuple(family for family in FAMILIES if family not in FURTHER)
TARGET_OPS = (400, 2500)  # log-uniform; families come near it, some of their draws outside the limits
TARGETS: Mapping[str, tuple[int, int]] = MappingProxyType({"unrolled": (1000, 2900)})  # where they are others
_OPTIMIZERS = ("adam", "adam", "adamw", "sgd-momentum", "sgd")
_BFLOAT16_SHARE = 0.3
_MAX_DRAWS = 100


@dataclass(frozen=True, eq=False)
class DrawnGraph:
    """The step of a drawn architecture, and the number of draws before it that were rejected, by reason."""

    graph: Graph
    family: str
    rejected: Mapping[str, int]


def draw(seed: int, number: int, families: Sequence[str], built_ins: BuiltIns) -> DrawnGraph:
    """Draws architecture `number` of `seed`; families take turns.

    A draw is rejected that has too few or too many ops, is too large, cannot run with the sizes drawn, or is like a
    built-in workload. Raises InputError if that goes on.
    """
    family = families[number % len(families)]
    rejected: Counter[str] = Counter()
    for attempt in range(_MAX_DRAWS):
        rng = np.random.default_rng([seed, number, attempt])
        try:
            graph = captured(family, f"{family}-{seed}-{number}", rng, TARGETS.get(family, TARGET_OPS))
        except InputError:
            rejected["cannot run"] += 1
            continue
        reason = _reason(graph, built_ins)
        if not reason:
            return DrawnGraph(graph, family, dict(rejected))
        rejected[reason] += 1
    raise InputError(f"family {family!r}: none of {_MAX_DRAWS} draws is wanted ({dict(rejected)}); leave it out")


def captured(family: str, name: str, rng: np.random.Generator, target_ops: tuple[int, int] = TARGET_OPS) -> Graph:
    """Returns the step of one draw, called `name`, whatever it is; InputError if it cannot run with the sizes drawn."""
    draws = Draws(rng)
    num_ops = draws.size(*target_ops, multiple=1)
    optimizer, is_half = draws.one_of(*_OPTIMIZERS), draws.chance(_BFLOAT16_SHARE)
    dtype = torch.bfloat16 if is_half else torch.float32
    build = partial(_built, FAMILIES[family], draws, num_ops, dtype)
    return capture_fn(build, name=name, optimizer=optimizer).graph


def _built(build: Callable[[Draws, int], Example], draws: Draws, num_ops: int, dtype: torch.dtype) -> Example:
    """Builds a model with parameters and inputs of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build(draws, num_ops)
    finally:
        torch.set_default_dtype(before)


def _reason(graph: Graph, built_ins: BuiltIns) -> str:
    """Returns the reason for rejecting `graph`; "" for none."""
    if graph.num_ops < MIN_OPS:
        return "too few ops"
    if graph.num_ops > MAX_OPS:
        return "too many ops"
    if forward_bytes(graph) + graph.resident_bytes.sum() > MAX_BYTES:
        return "too large"
    return "like a built-in workload" if built_ins.nearest(graph)[1] > MAX_LIKENESS else ""


def forward_bytes(graph: Graph) -> int:
    """Returns the bytes of the tensors that the forward pass makes."""
    is_made = graph.is_in_phase("forward")[graph.producers] & (graph.view_of < 0)
    return int(graph.tensor_bytes[is_made].sum())
