"""LayoutTarget: a tool that trains in layouts, with its file and what is lost in it."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from gdp.errors import InputError
from gdp.export.layouts.cut_step import CutStep
from gdp.export.layouts.ranks import RankOrder
from gdp.parallel.layout import BLOCKS, NONE


@dataclass(frozen=True)
class LayoutTarget:
    """A tool and the functions that write its file."""

    name: str
    level: str  # what it places: `a device a replica`
    file_name: str  # by default, beside the plan
    has_stages: bool
    write: Callable[[CutStep], str]  # InputError for what the tool has no words for
    notes: Callable[[CutStep], list[str]]  # sentences on what the tool does otherwise


def title_of(step: CutStep) -> str:
    """Returns `gpt2 in the layout data=4`, of letters that end no comment: names of graphs are any text."""
    return re.sub(r"[^\w ?=&:./,@+-]", "_", f"{step.problem.graph.name} in the layout {step.layout}", flags=re.ASCII)


def ranks_of(step: CutStep, target: str, *, by_replica: bool = False) -> RankOrder:
    """Returns the ranks stage by stage, or replica by replica; InputError if torchrun cannot number them so."""
    devices = step.devices if by_replica else step.devices.T
    ranks = RankOrder.of(step.problem, devices.ravel().tolist())
    if ranks is None:
        raise InputError(
            f"{target}: numbers ranks host by host, and the plan has replicas or stages in turns on hosts; "
            "place with another number of stages, or on as many cards of each host"
        )
    return ranks


def check_even(step: CutStep, target: str) -> None:
    """Raises InputError for replicas with unequal micro-batches."""
    if not step.layout.is_even:
        counts = ":".join(map(str, step.microbatches))
        raise InputError(
            f"{target}: has as many micro-batches in each replica, and the plan has {counts}; "
            f"place with --parallel data={step.layout.data}, or export to torch-fsdp"
        )


def common_notes(step: CutStep) -> list[str]:
    """Returns sentences on what no tool does as the plan has it."""
    notes = []
    if step.num_moved:
        notes.append(
            f"{step.num_moved:,} ops that the plan has on other devices are on those of their replica and stage."
        )
    if step.layout.data > 1:
        notes.append("NCCL chooses its own rings and buckets for sums over replicas.")
    if step.layout.recompute != NONE and any("batch_norm" in kind for kind in step.problem.graph.kinds):
        notes.append("Running statistics of batch normalisation in recomputed modules are updated twice.")
    if step.num_stages > 1:
        notes.append("The order of micro-batches is 1F1B.")
    return notes


def recomputed_layers(step: CutStep, target: str) -> set[str]:
    """Returns the paths of the layers that are recomputed.

    InputError for other modules, which a tool of decoder layers does not recompute.
    """
    modules = step.layout.recompute
    if isinstance(modules, str):
        return set(step.layers) if modules == BLOCKS else set()
    others = [path for path in modules if path not in step.layers]
    if others:
        raise InputError(f"{target}: recomputes whole layers, not {others[0]}; place with recompute=blocks")
    return set(modules)
