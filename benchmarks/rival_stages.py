"""Two stages of a model under `torch.distributed.pipelining`, which traces it and cuts it in front of a module.

The first stage gets the batch. What the second one reads of it, such as the labels, it is given by name.
"""

import copy
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from benchmarks.training_subjects import Inputs, Subject
from gdp.arrays import I64
from gdp.graph import Graph

COUNTS = (2, 4, 8)  # of micro-batches
SCHEDULES = ("GPipe", "1F1B")
VARIANTS: Mapping[str, tuple[str, int]] = {
    f"{schedule}, {count} micro-batches": (schedule, count) for schedule in SCHEDULES for count in COUNTS
}
NUM_STAGES = 2

_SOURCES = ("parameter", "buffer", "constant", "input")  # they stand first in a graph, whichever layer reads them
_NUMBERED = re.compile(r"(?:.*\.)?[0-9]+")


class CutError(Exception):
    """A model that has no two stages; the text says why."""


class PipelinedStage(nn.Module):
    """A stage; `sources` has for each argument of `module` its place among what the stage before sends, or a name."""

    def __init__(self, module: nn.Module, sources: Sequence[int | str]) -> None:
        super().__init__()
        self.module, self.sources = module, tuple(sources)

    def forward(self, *sent: Tensor, **named: Tensor) -> Any:
        sent = tuple(map(_contiguous, sent))
        outputs = self.module(*(named[item] if isinstance(item, str) else sent[item] for item in self.sources))
        return tree_map_only(Tensor, _contiguous, outputs)


class _Contiguous(torch.autograd.Function):
    """Makes outputs of a stage, and gradients of its inputs, contiguous: it sends both."""

    @staticmethod
    def forward(_context: Any, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _contiguous(tensor: Tensor) -> Tensor:
    found: Tensor = _Contiguous.apply(tensor)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Halves:
    """Both stages of a model."""

    stages: tuple[PipelinedStage, ...]
    inputs: tuple[int, ...]  # of the model that the first stage takes, in its order
    named: Mapping[str, int]  # of the model that the second stage takes
    shared: tuple[tuple[str, ...], ...]  # parameters that both have, by their names in each stage


def balanced_cut(graph: Graph, times_ns: I64) -> str:
    """Returns the module path in front of which about half of the forward pass is done.

    It is a numbered one, such as `layers.3`, where there are some. `times_ns` [N] are the times of the ops.
    """
    done = 0
    before: dict[str, int] = {}
    for op, module in enumerate(graph.modules):
        if graph.phases[op] == "forward" and graph.kinds[op] not in _SOURCES:
            parts = module.split(".") if module else []
            for end in range(1, len(parts) + 1):
                before.setdefault(".".join(parts[:end]), done)
            done += int(times_ns[op])
    inside = {path: time for path, time in before.items() if time > 0}
    numbered = {path: time for path, time in inside.items() if _NUMBERED.fullmatch(path)}
    chosen = numbered or inside
    return min(chosen, key=lambda path: (abs(2 * chosen[path] - done), path), default="")


def halves(module: nn.Module, inputs: Inputs, cut: str) -> Halves:
    """Traces `module` with `inputs` and cuts it in front of the module `cut`. CutError where that is not possible.

    Where indices would be sent, such as those of experts, it is cut in front of the layer around: PyTorch tries stages
    out with other content, which is no index.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline

    args, kwargs = inputs
    if kwargs or not all(isinstance(item, Tensor) for item in args):
        raise CutError("it takes other inputs than tensors by position")
    if not cut:
        raise CutError("it has no modules to be cut at")
    try:
        pipe = pipeline(copy.deepcopy(module), args, split_spec={cut: SplitPoint.BEGINNING})
    except Exception as error:  # whatever the tracer meets
        raise CutError(f"torch.export cannot trace it: {type(error).__name__}") from error
    if pipe.num_stages != NUM_STAGES:
        raise CutError(f"it enters {cut} {pipe.num_stages - 1} times, so it has no two stages")
    nodes = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    roots = [node for node in pipe.split_gm.graph.nodes if node.op == "placeholder"]
    first, second = nodes
    sources = [_source(node, first, roots) for node in second.args]
    names = pipe.replicated_params
    with torch.no_grad():
        sent = pipe.get_stage_module(0)(*(args[roots.index(node)] for node in first.args))
    sent = sent if isinstance(sent, (tuple, list)) else (sent,)
    if not all(sent[item].is_floating_point() for item in sources if isinstance(item, int)):
        numbered = [path for path in _ancestors(cut) if _NUMBERED.fullmatch(path)]
        if not numbered:
            raise CutError("its first stage sends indices, with which the second one cannot be tried out")
        return halves(module, inputs, numbered[-1])
    return Halves(
        (
            PipelinedStage(pipe.get_stage_module(0), range(len(first.args))),
            PipelinedStage(pipe.get_stage_module(1), sources),
        ),
        tuple(roots.index(node) for node in first.args),
        {item: int(item.removeprefix(_INPUT)) for item in sources if isinstance(item, str)},
        tuple(tuple(f"module.{names_of[node.name]}" for node in nodes) for names_of in names if len(names_of) > 1),
    )


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


_INPUT = "input_"


def _source(node: Any, first: fx.Node, roots: Sequence[fx.Node]) -> int | str:
    if node in roots:
        return f"{_INPUT}{roots.index(node)}"
    if node is first:
        return 0
    if node.target is operator.getitem and node.args[0] is first:
        return int(node.args[1])
    raise CutError(f"its second stage reads {node.name}, which the first one does not make")


def pipeline_steps(
    subject: Subject,
    cut: str,
    rank: int,
    variant: str,
    optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> Callable[[], float | None]:
    """Returns the step of the stage `rank` under one of VARIANTS. CutError where the model has no two stages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    name, count = VARIANTS[variant]
    parts = subject.inputs(count)
    (whole,) = subject.inputs()
    cut_model = halves(subject.module(count), parts[0], cut)
    own = cut_model.stages[rank]
    optimizer = optimizer_of(own.parameters())
    parameters = dict(own.named_parameters())
    shared = [parameters[names[rank]] for names in cut_model.shared]
    specs = [_spec(tensor, part) for tensor, part in zip(whole[0], parts[0][0], strict=True)]
    schedule = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[name](
        PipelineStage(own, rank, NUM_STAGES, torch.device("cpu")),
        count,
        loss_fn=lambda output, _target: output,  # a model returns its loss
        args_chunk_spec=None if rank else tuple(specs[number] for number in cut_model.inputs),
        kwargs_chunk_spec={item: specs[number] for item, number in cut_model.named.items()} if rank else None,
    )
    args = [] if rank else [whole[0][number] for number in cut_model.inputs]
    named = {item: whole[0][number] for item, number in cut_model.named.items()} if rank else {}
    target = torch.zeros(count) if rank else None  # asked for, and not used

    def step() -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(*args, target=target, losses=losses if rank else None, return_outputs=False, **named)
        for parameter in shared:
            assert parameter.grad is not None, "both stages use it"
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return float(torch.stack([loss.detach() for loss in losses]).mean()) if rank else None

    return step


def _spec(whole: Tensor, part: Tensor) -> Any:
    """Returns how a schedule cuts an input of the model: along the dimension in which a part is smaller."""
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    dims = [dim for dim, (one, other) in enumerate(zip(whole.shape, part.shape, strict=True)) if one != other]
    if not dims:
        return _Replicate()
    return TensorChunkSpec(dims[0])  # type: ignore[no-untyped-call]
