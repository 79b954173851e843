"""Options that several commands have, each defined once; groups of them become one parameter of a command."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.cluster import Cluster
    from gdp.export.export_target import ExportTarget
    from gdp.models.model import Reading
    from gdp.simulator.constraints import Constraints

_MODEL = "A built-in workload, a gdp-graph or .onnx file, hf:DIR, timm:NAME, or package.module:function."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A gdp-plan file, as `gdp place` writes it.")]
PlanOrModelArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="A gdp-plan file, which knows its MODEL; or a MODEL, with --plan.")
]
PlanOption = Annotated[
    Path | None, typer.Option(metavar="PLAN", help="The plan, where another MODEL is named than it was made for.")
]
DevicesOption = Annotated[
    str | None,
    typer.Option(metavar="DEVICES", help="Such as 4xp100-pcie-16g or 2xl4-24g+cpu-16core, a cluster file, or local."),
]
PlacedDevicesOption = Annotated[
    str | None, typer.Option(metavar="DEVICES", help="The devices of the plan. Default: those it was asked for.")
]
PlacedGraphOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="The graph or MODEL of the plan. Default: the one it was asked for.")
]
_RUNTIME = "How GPUs run the step: eager, compile or cuda-graphs; also behind DEVICES: 4xa100-sxm-80g:compile."
RuntimeOption = Annotated[str | None, typer.Option(metavar="NAME", help=_RUNTIME)]
BudgetOption = Annotated[str, typer.Option(help="A time (30s, 2m) or a number of simulations (20000sims).")]
CheckpointOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="A policy of your own, for auto and the learned placers.")
]
InferenceOption = Annotated[bool, typer.Option("--inference", help="Forward only, instead of a training step.")]
BatchesOption = Annotated[
    int | None, typer.Option(metavar="N", help="Serve a forward pass with N batches in flight: throughput and latency.")
]
OptimizerOption = Annotated[
    str, typer.Option(metavar="NAME", help="adam, adamw, sgd, sgd-momentum, adafactor or adam-8bit.")
]
PrecisionOption = Annotated[
    str, typer.Option(metavar="NAME", help="Of training: mixed (default of hf:DIR), pure-bf16 or float32.")
]
LoraOption = Annotated[
    str,
    typer.Option(metavar="rank=R", help="Train adapters of rank R: rank=16[,weights=nf4][,alpha=..][,targets=REGEX]."),
]
DtypeOption = Annotated[
    str, typer.Option(metavar="DTYPE", help="Convert MODEL to bfloat16, float16, float32 or float64.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Group = TypeVar("Group", bound="ReadingOptions | MemoryOptions | TargetOptions")

ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads to search with; default: all processors.")]


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Says how MODEL is read."""

    microbatches: Annotated[
        int, typer.Option(metavar="M", help="Accumulate gradients over M parts of the batch, pipelined.")
    ] = 1
    inference: InferenceOption = False
    optimizer: OptimizerOption = "adam"
    precision: PrecisionOption = ""
    lora: LoraOption = ""
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

    batch_dim: Annotated[
        int | None,
        typer.Option(metavar="N", help="The dimension of inputs that is the batch. Default: the first, 0, if it can."),
    ] = None
    batch: Annotated[int | None, typer.Option(metavar="N", help="Samples of the batch. Default: as MODEL has.")] = None

    def reading(self) -> "Reading":
        """Returns the options as a `Reading`, checked."""
        from gdp.planning.options import reading_of

        return reading_of(asdict(self))


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Limits the memory of devices."""

    max_memory: Annotated[
        list[str] | None, typer.Option(metavar="DEVICE=SIZE", help="Use less of a device's memory. Repeatable.")
    ] = None
    reserve: Annotated[str, typer.Option(metavar="SHARE", help="Keep this share of each device's memory free.")] = "0%"

    def constraints(self, cluster: "Cluster") -> "Constraints":
        """Returns the options as `Constraints`, checked."""
        from gdp.planning.options import constraints_of

        return constraints_of(asdict(self), cluster)


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions(MemoryOptions):
    """Limits the memory of devices, and the devices of ops."""

    pin: Annotated[
        list[str] | None, typer.Option(metavar="REGEX=DEVICE", help="The device of matching ops. Repeatable.")
    ] = None
    forbid: Annotated[
        list[str] | None, typer.Option(metavar="REGEX=DEVICE", help="Kinds of ops that stay off a device. Repeatable.")
    ] = None


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


class GroupedCommand(TyperCommand):
    """A command whose help has its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then each group of options that the command has."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *_GROUPS, "Search and output")}
        *_, others = sections
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                group = next((name for name, options in _GROUPS.items() if parameter.name in options), others)
                sections["Arguments" if parameter.param_type_name == "argument" else group].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


_GROUPS = {  # of a long help, by names of parameters; what is in none of them is of the search
    "Model": ("plan", "graph", *(item.name for item in fields(ReadingOptions))),
    "Layout": ("parallel", "batches", "target", *(item.name for item in fields(TargetOptions))),
    "Machine": ("devices", "runtime", "prices", "times", *(item.name for item in fields(ConstraintOptions))),
}


class Given(dict[str, Any]):
    """The options that stand on the command line, by the names of their parameters, with plain values."""


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Replaces each parameter of `command` that is a group of options by these options, for Typer to see. A parameter
    `given: Given` gets the options that stand on the command line."""
    signature = inspect.signature(command)
    pairs = signature.parameters.items()
    groups: dict[str, Any] = {name: each.annotation for name, each in pairs if is_dataclass(each.annotation)}
    takes_given = "given" in signature.parameters

    @wraps(command)
    def call(context: typer.Context, **values: Any) -> int:
        if takes_given:
            there = {name: value for name, value in values.items() if _is_given(context, name)}
            values["given"] = Given(
                {name: str(value) if isinstance(value, Path) else value for name, value in there.items()}
            )
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, parameter in signature.parameters.items():
        if name in groups:
            parameters += [
                inspect.Parameter(
                    item.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if item.default is MISSING else item.default,
                    annotation=item.type,
                )
                for item in fields(groups[name])
            ]
        elif name != "given":
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def group_of(group: type[Group], options: Mapping[str, Any]) -> Group:
    """Returns a group of options with their values in `options`, and defaults for others."""
    names = {item.name for item in fields(group)}
    return group(**{name: value for name, value in options.items() if name in names})


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
