"""Options that several commands have, each defined once; groups of them become one parameter of a command."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.cluster import Cluster
    from gdp.export.export_target import ExportTarget
    from gdp.models.model import Reading
    from gdp.simulator.constraints import Constraints

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A built-in workload, a gdp-graph or .onnx file, hf:DIR, or package.module:function."
    ),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A gdp-plan file, as `gdp place` writes it.")]
DevicesOption = Annotated[
    str,
    typer.Option(metavar="DEVICES", help="Such as 4xp100-pcie-16g or 2xl4-24g+cpu-16core, a cluster file, or local."),
]
PlacedDevicesOption = Annotated[
    str | None, typer.Option(metavar="DEVICES", help="The devices of the plan. Default: cluster.json beside PLAN.")
]
PlacedGraphOption = Annotated[
    str | None, typer.Option(metavar="GRAPH", help="The graph of the plan. Default: graph.json.gz beside PLAN.")
]
BudgetOption = Annotated[str, typer.Option(help="A time (30s, 2m) or a number of simulations (20000sims).")]
CheckpointOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="A policy of your own, for auto and the learned placers.")
]
InferenceOption = Annotated[bool, typer.Option("--inference", help="Forward only, instead of a training step.")]
BatchesOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Serve a forward pass with N batches in flight: throughput and latency."),
]
OptimizerOption = Annotated[
    str, typer.Option(metavar="NAME", help="adam, adamw, sgd, sgd-momentum, adafactor or adam-8bit.")
]
MasterWeightsOption = Annotated[
    bool, typer.Option("--master-weights", help="Keep float32 copies of bfloat16 and float16 parameters.")
]
DtypeOption = Annotated[
    str, typer.Option(metavar="DTYPE", help="Convert MODEL to bfloat16, float16, float32 or float64.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads to search with; default: all processors.")]

_NO_RESERVE = "0%"


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Says how MODEL is read."""

    microbatches: Annotated[
        int, typer.Option(metavar="M", help="Accumulate gradients over M parts of the batch, pipelined.")
    ] = 1
    free_replicas: Annotated[
        bool, typer.Option("--free-replicas", help="Let the micro-batches of an op be on different devices.")
    ] = False
    inference: InferenceOption = False
    optimizer: OptimizerOption = "adam"
    master_weights: MasterWeightsOption = False
    dtype: DtypeOption = ""
    phase: Annotated[
        str, typer.Option(help="Of hf:DIR: step, or prefill or decode with a cache of keys and values (inference).")
    ] = "step"
    kv_cache: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Bytes of an element of the cache (2, 1), or a type (fp8, q8_0)."),
    ] = None
    dim: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SIZE", help="A symbolic dimension of an .onnx file. Repeatable.")
    ] = None
    op_costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Known costs of ops: FLOPs or times by kind or name.")
    ] = None

    def reading(self) -> "Reading":
        """Returns the options as a `Reading`, checked."""
        from gdp.cli import values
        from gdp.models.model import Microbatching, Reading, check_dtype
        from gdp.models.op_costs import OpCosts
        from gdp.models.serving import Serving

        serving = Serving.parse(self.phase, self.kv_cache)
        is_inference = self.inference or serving.has_cache
        if self.free_replicas and self.microbatches == 1:
            raise InputError(
                "--free-replicas: there are no replicas without micro-batches; give --microbatches as well"
            )
        if is_inference and self.microbatches > 1:
            option = "--phase" if serving.has_cache else "--inference"
            raise InputError(f"--microbatches: gradients are accumulated in training; leave out {option}")
        try:
            check_dtype(self.dtype)
            microbatching = Microbatching(self.microbatches, self.free_replicas)
        except InputError as error:
            raise InputError(f"--{error}") from None
        costs = None if self.op_costs is None else OpCosts.load(self.op_costs)
        dims = values.parse_dims(self.dim or ())
        return Reading(
            not is_inference,
            self.optimizer,
            microbatching,
            dims,
            costs,
            self.master_weights,
            self.dtype,
            serving,
        )

    def check_has_model(self, graph: str | None) -> None:
        """Raises InputError for any of the options where there is no MODEL to read, only the `graph` of a plan."""
        options = {
            "--microbatches": self.microbatches > 1,
            "--inference": self.inference,
            "--optimizer": self.optimizer != "adam",
            "--master-weights": self.master_weights,
            "--dtype": self.dtype,
            "--phase": self.phase != "step",
            "--kv-cache": self.kv_cache is not None,
            "--dim": self.dim,
            "--op-costs": self.op_costs,
        }
        if graph is None and (names := [name for name, value in options.items() if value]):
            raise InputError(
                f"{names[0]}: says how the MODEL of --graph is read; graph.json.gz beside the plan has it already"
            )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Limits the memory of devices."""

    max_memory: Annotated[
        list[str] | None, typer.Option(metavar="DEVICE=SIZE", help="Use less of a device's memory. Repeatable.")
    ] = None
    reserve: Annotated[str, typer.Option(metavar="SHARE", help="Keep this share of each device's memory free.")] = (
        _NO_RESERVE
    )

    def constraints(self, cluster: "Cluster") -> "Constraints":
        """Returns the options as `Constraints`, checked."""
        from gdp.cli import values
        from gdp.simulator.constraints import Constraints

        return Constraints(
            max_memory_bytes=values.parse_max_memory(self.max_memory or (), cluster),
            reserve=values.parse_fraction(self.reserve, "--reserve"),
        )


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions(MemoryOptions):
    """Limits the memory of devices, and the devices of ops."""

    pin: Annotated[
        list[str] | None, typer.Option(metavar="REGEX=DEVICE", help="The device of matching ops. Repeatable.")
    ] = None
    forbid: Annotated[
        list[str] | None, typer.Option(metavar="REGEX=DEVICE", help="Kinds of ops that stay off a device. Repeatable.")
    ] = None

    def constraints(self, cluster: "Cluster") -> "Constraints":
        """Returns the options as `Constraints`, checked."""
        from dataclasses import replace

        from gdp.cli import values

        return replace(
            super().constraints(cluster),
            pins=values.parse_pins(self.pin or (), cluster),
            forbid=values.parse_forbid(self.forbid or (), cluster),
        )

    def words(self) -> list[str]:
        """Returns the options as they are written on a command line."""
        repeated = {"--pin": self.pin, "--forbid": self.forbid, "--max-memory": self.max_memory}
        words = [word for option, texts in repeated.items() for text in texts or () for word in (option, text)]
        return words if self.reserve == _NO_RESERVE else [*words, "--reserve", self.reserve]


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Says how a target runs."""

    ctx: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", help="For llama-cpp: leave room for a cache of so many tokens. Default: 4096; 0: none."
        ),
    ] = None
    split_layers: Annotated[
        bool,
        typer.Option("--split-layers", help="For llama-cpp: attention and feed-forward part of a layer may be apart."),
    ] = False

    def target(self, name: str) -> "ExportTarget":
        """Returns the target of that name with these options, checked."""
        from gdp.export.targets_by_name import find_target

        return find_target(name, context=self.ctx, split_layers=self.split_layers)

    def check_unused(self) -> None:
        """Raises InputError for any of the options where there is no target."""
        if self.ctx is not None or self.split_layers:
            raise InputError(f"{'--split-layers' if self.ctx is None else '--ctx'}: needs --for llama-cpp")


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Replaces each parameter of `command` that is a group of options by these options, for Typer to see."""
    signature = inspect.signature(command)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    @wraps(command)
    def call(**values: Any) -> int:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    parameters = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        parameters += [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in fields(groups[name])
        ]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
