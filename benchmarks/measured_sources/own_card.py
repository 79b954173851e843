"""Steps that `benchmarks.card` measured on a card of ours: the sum of their kernels, which is the device's time alone.

A step is captured as `benchmarks.card` makes it. Its host was slow: step times tell of that host, kernel times do not.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.measured_sources.image_models import kind_of
from benchmarks.measured_sources.source import (
    DATA,
    CapturedGraphs,
    MeasuredRow,
    MeasuredSource,
    PredictedRow,
    cluster_of,
    read_table,
)
from benchmarks.torchvision_stand_in import torchvision_stand_in
from gdp.cluster import Cluster
from gdp.costs.op_times import op_times
from gdp.graph import Graph

if TYPE_CHECKING:
    from benchmarks.card_steps import StepCase

_COLUMNS = "model", "phase", "batch", "precision", "memory_format", "runtime", "optimizer"
_OPTIMIZERS = {"sgd": "sgd-momentum,foreach", "": "adam"}  # of inference none
_WORDS = {"loop": "for-loop"}


class CardSteps(MeasuredSource):
    """The rows of the files `*steps.csv` in the source's directory, on a card of kind `card`."""

    card: ClassVar[str]

    def rows(self) -> Sequence[MeasuredRow]:
        """Returns the rows without an error."""
        from benchmarks.card_steps import StepCase

        found = []
        lines = (line for path in self.paths() for line in read_table(path, (*_COLUMNS, "kernel_ms", "error")))
        for line in lines:
            values: dict[str, Any] = {name: line[name] for name in _COLUMNS}
            case = StepCase(**values | {"batch": int(line["batch"])})
            key = "-".join(line[name] for name in _COLUMNS if line[name])
            if not line["error"]:
                time_ms = float(line["kernel_ms"])
                found.append(MeasuredRow(key, time_ms, self.card, case, case.runtime, case.phase, model=case.model))
        return [replace(row, amount=row.case.batch) for row in sorted(found, key=lambda row: _graph_name(row.case))]

    def paths(self) -> Sequence[Path]:
        """Returns the files."""
        return sorted((DATA.parent / self.name).glob("*steps.csv"))

    def predict(self, row: MeasuredRow, graphs: CapturedGraphs) -> PredictedRow:
        """Sums up what the ops of the step take on the card."""
        graph = graphs.read(_graph_name(row.case), lambda: capture(row.case))
        kind = kind_of(graph) if row.case.model.startswith("timm:") else "text"
        time_ns = int(op_times(graph, _without_gaps(cluster_of(row.card, row.runtime)))[:, 0].sum())
        return PredictedRow(row, time_ns / 1e6, f"{kind}, {row.case.precision}, {row.case.phase}")


class H200Steps(CardSteps):
    """Steps on an H200."""

    name, card = "h200", "h200-sxm-141g"
    about = "kernels of steps on one H200, PyTorch 2.11; some rules, and what its cache holds, were read from them"


class H100Steps(CardSteps):
    """Steps on an H100."""

    name, card = "h100", "h100-sxm-80g"
    about = "kernels of steps on one H100, most of models that no other source has: its single ops set, no step of it"


def _without_gaps(cluster: Cluster) -> Cluster:
    """Returns the cluster where no time passes between kernels."""
    devices = (replace(device, achieved={**device.achieved, "gap_ns": 0.0}) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def _graph_name(case: "StepCase") -> str:
    values = (str(getattr(case, each.name)) for each in fields(case) if each.name != "runtime")
    return "-".join(filter(None, ("card", *values)))


def capture(case: "StepCase") -> Graph:
    """Captures the step."""
    import torch

    from gdp.models.pytorch import capture_fn

    training, before = case.phase == "train", torch.get_float32_matmul_precision()
    kind, _, how = case.optimizer.partition("-")
    optimizer = _OPTIMIZERS.get(case.optimizer) or f"{kind},{_WORDS.get(how, how)}"
    if case.model.startswith("timm:"):
        with torchvision_stand_in():
            import_module("timm")
    torch.set_float32_matmul_precision("high")
    try:
        return capture_fn(partial(_built, case), name=_graph_name(case), training=training, optimizer=optimizer).graph
    finally:
        torch.set_float32_matmul_precision(before)


def _class_loss(scores: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(scores.float(), torch.zeros(len(scores), dtype=torch.int64))


def _built(case: "StepCase") -> Any:
    """Returns the module, its inputs and its further inputs, as `benchmarks.card.measure_step` runs them."""
    import torch

    from benchmarks.card_steps import MODELS
    from gdp.models.model import Reading
    from gdp.models.source import ModelSource

    model: Any
    loss_of: Callable[[Any], Any]
    if case.model.startswith("timm:"):
        side = 299 if "inception" in case.model else 224
        text = f"{case.model}?batch={case.batch}&image={side}"
        model, inputs, _ = ModelSource(text, Reading(training=False)).build()  # without a loss of its own
        loss_of = _class_loss
    else:
        model, inputs, loss_of, _ = MODELS[case.model](case.batch)
    dtype = torch.bfloat16 if case.precision == "bfloat16" else None
    form = torch.channels_last if case.memory_format == "nhwc" else torch.preserve_format
    model = model.to(dtype).to(memory_format=form).train(case.phase == "train")
    inputs = tuple(x.to(dtype=dtype if x.is_floating_point() else None, memory_format=form) for x in inputs)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            with torch.autocast("cuda", torch.bfloat16, enabled=case.precision == "mixed"):
                found = self.model(*inputs)
                return loss_of(found) if case.phase == "train" else found

    return Step(), inputs, {}
