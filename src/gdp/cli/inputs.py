"""What several commands are given: a model's graph, constraints, micro-batches, placers; options, and reading them."""

import os
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.shared import log
from gdp.errors import InputError, UnevenBatchError

if TYPE_CHECKING:
    from gdp.cluster import Cluster
    from gdp.compare import Rival
    from gdp.constraints import Constraints
    from gdp.graph import Graph
    from gdp.plan import Plan
    from gdp.sources import Model, Reading

PinOption = Annotated[list[str] | None, typer.Option(metavar="REGEX=DEVICE", help="Where matching ops go. Repeatable.")]
ForbidOption = Annotated[
    list[str] | None, typer.Option(metavar="REGEX=DEVICE", help="Kinds of ops that stay off a device. Repeatable.")
]
MaxMemoryOption = Annotated[
    list[str] | None, typer.Option(metavar="DEVICE=SIZE", help="Use less of a device's memory. Repeatable.")
]
NO_RESERVE = "0%"
ReserveOption = Annotated[str, typer.Option(metavar="SHARE", help="Keep this share of each device's memory free.")]
MicrobatchesOption = Annotated[
    int, typer.Option(metavar="M", help="Accumulate gradients over M parts of the batch, pipelined.")
]
FreeReplicasOption = Annotated[
    bool, typer.Option("--free-replicas", help="Let the micro-batches of an op be on different devices.")
]
InferenceOption = Annotated[bool, typer.Option("--inference", help="Forward only, instead of a training step.")]
DimOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=SIZE", help="A symbolic dimension of an .onnx file. Repeatable.")
]
OpCostsOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What you know of ops: FLOPs or times by kind or name.")
]


def reading_of(
    microbatches: int, free_replicas: bool, inference: bool, dim: list[str] | None, op_costs: Path | None,
    optimizer: str = "adam",
) -> "Reading":  # fmt: skip
    """How MODEL is to be read, from the options that say so."""
    from gdp import options
    from gdp.op_costs import OpCosts
    from gdp.sources import Microbatching, Reading

    if free_replicas and microbatches == 1:
        raise InputError("--free-replicas: there are no replicas without micro-batches; give --microbatches as well")
    if inference and microbatches > 1:
        raise InputError("--microbatches: gradients are accumulated in training; leave out --inference")
    try:
        microbatching = Microbatching(microbatches, free_replicas)
    except InputError as error:
        raise InputError(f"--{error}") from None
    costs = None if op_costs is None else OpCosts.load(op_costs)
    return Reading(not inference, optimizer, microbatching, options.parse_dims(dim or ()), costs)


def read_graph(text: str, reading: "Reading | None" = None) -> "Model":
    """MODEL, read so."""
    from gdp.report.progress import live
    from gdp.sources import Reading, read_model

    reading = reading or Reading()
    count = reading.microbatching.count
    is_split = count > 1 and ":" in text
    with live(f"reading {text}"):
        try:
            model = read_model(text, reading)
        except UnevenBatchError:
            raise
        except InputError as error:
            if is_split:
                raise InputError(f"{error}; --microbatches splits inputs along their first dimension") from None
            raise
    for note in model.notes:
        log(f"gdp: note: {note}")
    if is_split:
        log(f"gdp: note: {text}: micro-batches are parts of inputs along the first dimension, that of the first tensor")
    if count > 1 and not model.is_captured:
        log(f"gdp: note: {text} is the step of one micro-batch, the whole step has {count} times its work")
    return model


def read_timed(text: str, times: Path, cluster: "Cluster", reading: "Reading") -> "Model":
    """MODEL with the measured times of its ops on the kinds of devices in `cluster`."""
    from gdp.measured_times import MeasuredTimes
    from gdp.report.progress import live
    from gdp.sources import read_timed_model

    known = MeasuredTimes(times)
    with live(f"capturing {text}"):
        return read_timed_model(text, known, [device.kind for device in cluster.devices], reading)


def constraints_of(
    cluster: "Cluster", pin: list[str] | None, forbid: list[str] | None, max_memory: list[str] | None, reserve: str
) -> "Constraints":
    """From their options."""
    from gdp import options
    from gdp.constraints import Constraints

    return Constraints(
        pins=options.parse_pins(pin or (), cluster),
        forbid=options.parse_forbid(forbid or (), cluster),
        max_memory_bytes=options.parse_max_memory(max_memory or (), cluster),
        reserve=options.parse_fraction(reserve, "--reserve"),
    )


def limit_words(
    pin: list[str] | None, forbid: list[str] | None, max_memory: list[str] | None, reserve: str
) -> list[str]:
    """The options of `constraints_of` for another command."""
    given = {"--pin": pin or (), "--forbid": forbid or (), "--max-memory": max_memory or ()}
    words = [word for option, values in given.items() for value in values for word in (option, value)]
    return words if reserve == NO_RESERVE else [*words, "--reserve", reserve]


def check_placers(names: Iterable[str]) -> None:
    """InputError for an unknown one."""
    from gdp.placers.portfolio import PLACERS

    for name in names:
        if name not in PLACERS:
            raise InputError(f"placer {name!r} is unknown; one of {', '.join(PLACERS)} is expected")


def split_rivals(model: str, placers: str | None, microbatches: int) -> tuple[list[str], list[str]]:
    """(placers of gdp, modes of accelerate) that `--placers` names; by default the modes for Transformers models, but
    not for micro-batches, which accelerate has not."""
    from gdp.accelerate_maps import NAMES, PREFIX
    from gdp.compare import DEFAULT_PLACERS

    if placers is None:
        has_rivals = model.startswith("hf:") and microbatches == 1 and find_spec("accelerate") is not None
        return list(DEFAULT_PLACERS), list(NAMES) if has_rivals else []
    names = [name.strip() for name in placers.split(",")]
    for name in names:
        if name.startswith(PREFIX) and name not in NAMES:
            raise InputError(f"placer {name!r} is unknown; of accelerate there are {', '.join(NAMES)}")
    if len(set(names)) < len(names):
        raise InputError(f"--placers {placers}: name each once")
    return [name for name in names if name not in NAMES], [name for name in names if name in NAMES]


def find_rivals(names: Sequence[str], model: str, reading: "Reading") -> "dict[str, Rival]":
    """What accelerate does in those modes with MODEL, which must be a PyTorch model of one batch."""
    if not names:
        return {}
    from gdp import accelerate_maps

    if reading.microbatching.count > 1:
        raise InputError(f"--placers {','.join(names)}: accelerate has no micro-batches; leave out --microbatches")
    module = accelerate_maps.module_of(model, training=reading.training)
    return {
        name: partial(accelerate_maps.best_step, module, mode=name.removeprefix(accelerate_maps.PREFIX))
        for name in names
    }


def check_checkpoint(checkpoint: str | None, placers: Sequence[str]) -> None:
    """A bad file is better known now than after the graph's capture."""
    if checkpoint is None:
        return
    from gdp.placers.portfolio import WITH_POLICY

    if not set(placers) & set(WITH_POLICY):
        raise InputError(
            f"--checkpoint: {', '.join(placers)} asks no policy; use it with --placer {' or '.join(WITH_POLICY)}"
        )
    if "guided" in placers:
        from gdp.policy.pretrained import read_constructor

        read_constructor(checkpoint)
    else:
        from gdp.policy.checkpoint import load_checkpoint

        load_checkpoint(checkpoint)


def cluster_of_plan(plan: Path, devices: str | None) -> "Cluster":
    """What `plan` was placed for: `devices`, or cluster.json beside it."""
    from gdp.cluster import Cluster

    beside = plan.with_name("cluster.json")
    if devices is None and not os.path.isfile(beside):
        raise InputError(f"{plan}: no cluster.json beside it; name what it was placed for with --devices")
    return Cluster.parse(devices or str(beside))


def graph_of_plan(path: Path, plan: "Plan", cluster: "Cluster", graph: str | None, reading: "Reading") -> "Graph":
    """What the `plan` in `path` places on `cluster`: `graph`, or graph.json.gz beside it."""
    beside = path.with_name("graph.json.gz")
    if graph is None and not os.path.isfile(beside):
        raise InputError(f"{path}: no graph.json.gz beside it; name what was placed with --graph")
    source = read_graph(graph or str(beside), reading).graph
    try:
        plan.check_belongs(source, cluster)
    except InputError as error:
        raise InputError(f"{path}: {error}; or name its own with --graph and --devices") from None
    return source


def check_spares_plan(option: str, path: Path, plan: Path) -> None:
    """InputError if writing `path` would overwrite the plan or what is read beside it."""
    needed = {os.path.realpath(plan.with_name(name)) for name in (plan.name, "graph.json.gz", "cluster.json")}
    if os.path.realpath(path) in needed:
        raise InputError(f"{option} {path}: the plan needs that file; name another one")


def check_reads_model(graph: str | None, reading: "Reading") -> None:
    """InputError for options that say how a model is read where there is only a graph to read."""
    given = {
        "--microbatches": reading.microbatching.count > 1, "--inference": not reading.training,
        "--dim": reading.dims, "--op-costs": reading.op_costs,
    }  # fmt: skip
    if graph is None and (names := [name for name, value in given.items() if value]):
        raise InputError(
            f"{names[0]}: says how the MODEL of --graph is read; graph.json.gz beside the plan has it already"
        )
