"""LayoutTarget: a tool that trains in layouts, with its file and what is lost in it, and the ranks of torchrun."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gdp.errors import InputError
from gdp.export.export_target import cards_of
from gdp.export.layouts.cut_step import CutStep
from gdp.export.layouts.precision import Held
from gdp.graph import Graph
from gdp.parallel.layout import BLOCKS, NONE, SELECTIVE, Layout
from gdp.simulator.problem import Problem


@dataclass(frozen=True)
class LayoutTarget:
    """A tool and the functions that write its file."""

    name: str
    level: str  # what it places: `a device a replica`
    file_name: str  # by default, beside the plan
    has_stages: bool
    write: Callable[[CutStep], str]  # InputError for what the tool has no words for
    notes: Callable[[CutStep], list[str]]  # sentences on what the tool does otherwise
    held_by: Callable[[Graph, Layout], Sequence[Held]]  # what it holds in training, the first that fits
    degrees: tuple[str, ...] = ()  # of shards beside `tensor`


@dataclass(frozen=True)
class RankOrder:
    """The GPUs [H][] of each host, by their numbers there, in the order of ranks; H hosts."""

    gpus: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem, devices: Sequence[int]) -> "RankOrder | None":
        """Returns the ranks on `devices`, those of a group one behind the other.

        None if the ranks of a host are not neighbours, or hosts have unlike numbers.
        """
        cards, runs, last = cards_of(problem), dict[str, list[int]](), None
        for host, number in (card for device in devices for card in cards[device]):
            if host != last and host in runs:
                return None
            runs.setdefault(host, []).append(number)
            last = host
        if len({len(run) for run in runs.values()}) > 1:
            return None
        return cls(tuple(map(tuple, runs.values())))

    @property
    def visible(self) -> tuple[str, ...]:
        """[H] the values of CUDA_VISIBLE_DEVICES."""
        return tuple(",".join(map(str, gpus)) for gpus in self.gpus)

    def torchrun(self, host: str = '"$NODE_RANK"', first: str = '"$MASTER_ADDR"') -> str:
        """Returns the command without a script; `host` is the number of the one it runs on, `first` host 0."""
        each = f"--nproc-per-node {len(self.gpus[0])}"
        if len(self.gpus) == 1:
            return f"torchrun --standalone {each}"
        return f"torchrun --nnodes {len(self.gpus)} --node-rank {host} --master-addr {first} {each}"

    def script(self, titles: Sequence[str], options: Sequence[str], program: str = "") -> str:
        """Returns a shell script that starts its arguments, with `options` behind them, on all ranks of a host."""
        if len(self.gpus) == 1:
            visible = [f"export CUDA_VISIBLE_DEVICES={self.visible[0]}"]
        else:
            cases = [f"  {host}) export CUDA_VISIBLE_DEVICES={gpus} ;;" for host, gpus in enumerate(self.visible)]
            visible = [
                ': "${NODE_RANK:?is the number of this host}" "${MASTER_ADDR:?is the address of host 0}"',
                'case "$NODE_RANK" in',
                *cases,
                "esac",
            ]
        command = " ".join(["exec", self.torchrun(), *([program] if program else []), '"$@"'])
        lines = [*(f"# {title}" for title in titles), *visible, " \\\n  ".join([command, *options])]
        return "\n".join(lines) + "\n"


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
    """Raises InputError for replicas with unequal micro-batches, and for adapters: these tools train all weights."""
    if any(name.endswith(".lora_A") for name in step.problem.graph.op_names):
        raise InputError(f"{target}: trains all weights, and the plan adapters (--lora); export to torch-fsdp")
    if not step.layout.is_even:
        counts = ":".join(map(str, step.microbatches))
        raise InputError(
            f"{target}: has as many micro-batches in each replica, and the plan has {counts}; "
            f"place with --parallel data={step.layout.data}, or export to torch-fsdp"
        )


def common_notes(step: CutStep) -> list[str]:
    """Returns sentences on what no tool does as the plan has it."""
    notes = [step.held.sentence] if step.held.sentence else []
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
        return set(step.layers) if modules in (BLOCKS, SELECTIVE) else set()
    others = [path for path in modules if path not in step.layers]
    if others:
        raise InputError(f"{target}: recomputes whole layers, not {others[0]}; place with recompute=blocks")
    return set(modules)
