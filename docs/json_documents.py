"""Types of the JSON documents that gdp prints, writes and reads; `make schemas` writes their schemas to docs/schemas.

A command may print more keys later, so answers are open; gdp refuses unknown keys in the files that it reads.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from gdp.execute.run import Served
from gdp.graph.document import Op, Tensor
from gdp.policy.training.ppo import Statistics

SCHEMAS = Path(__file__).parent / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"

Index = Annotated[int, Field(ge=-1, lt=2**63)]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Ns = Size
Share = Annotated[float, Field(ge=0)]
Status = Literal["ok", "infeasible"]
Quantity = int | float | str


def d(text: str) -> Any:
    """Returns what describes a key."""
    return Field(description=text)


Range = Annotated[tuple[Ns, Ns] | None, d("where 8 of 10 measured steps of this kind are; null: not known")]
RestsOn = Annotated[str | None, d("the measured steps that the range is from")]
Mfu = Annotated[float | None, d("share of the devices' arithmetic rate that the model's FLOPs take")]


# parts


class BytesPerParameter(TypedDict):
    """Bytes of a trained parameter, on average."""

    total: float
    weights: float
    gradients: float
    master_weights: float
    optimizer_state: float
    types: str
    has_frozen: Annotated[bool, d("there are parameters without a gradient, which are not among these")]


class Graph(TypedDict):
    """A graph."""

    name: str
    num_ops: Size
    num_tensors: Size
    parameter_bytes: Annotated[Size, d("of all parameters")]
    optimizer_state_bytes: Size
    bytes_per_parameter: Annotated[BytesPerParameter | None, d("null without training")]
    fingerprint: Annotated[str, d("SHA-256 of all but the name")]


class Cluster(TypedDict):
    """The devices."""

    name: str
    devices: Annotated[list[str], d("names; lists by device elsewhere have this order")]
    fingerprint: Annotated[str, d("SHA-256 of all but the name")]


class Layout(TypedDict):
    """How a step is cut (`--parallel`)."""

    data: Annotated[int, d("replicas")]
    tensor: Annotated[int, d("cards of a group, over which ops are cut")]
    sequence: NotRequired[Annotated[bool, d("whether tokens are cut between cut ops")]]
    expert: NotRequired[Annotated[int, d("cards of a group that have experts of their own")]]
    context: NotRequired[Annotated[int, d("cards of a group, over which tokens are cut")]]
    overlap: NotRequired[Annotated[bool, d("whether sums of gradients run beside products")]]
    shares: NotRequired[Annotated[list[int], d("of each card of a group, where they differ")]]
    stages: Annotated[int | None, d("pipeline stages of a replica; null: as the placement has them")]
    microbatches: Annotated[int | list[int], d("of each replica; a list where they differ")]
    zero: Annotated[Literal[0, 1, 2, 3], d("what is cut over replicas, as in ZeRO")]
    recompute: Annotated[str | list[str], d("none, blocks, selective, auto, modules")]
    offload: NotRequired[Annotated[str | list[str], d("where activations go to the host")]]


class Serving(TypedDict):
    """A step of prefill or decode (`--phase`)."""

    phase: Literal["prefill", "decode"]
    num_sequences: int
    num_tokens: Annotated[int, d("that each sequence feeds")]
    context: Annotated[int, d("tokens that the cache has room for")]
    cache_bytes: Size
    time_to_first_token_ns: Annotated[int | None, d("of prefill; in a sweep of decode that of one prompt")]
    prompt_tokens_per_second: Annotated[float | None, d("of prefill")]
    tokens_per_second: Annotated[float | None, d("of decode, of all groups")]
    time_per_token_ns: Annotated[int | None, d("of decode")]
    groups: NotRequired[Annotated[int, d("in flight (`--batches`)")]]
    one_group: NotRequired[Annotated[dict[str, Any], d("the same figures with no other in flight")]]


class AtRate(TypedDict):
    """Mean times at a rate of requests; null beyond the largest."""

    per_second: float
    time_to_first_token_ns: float | None
    time_per_token_ns: float | None


class Requests(TypedDict):
    """Arithmetic on requests to a decoder (`?prompt=`, `--requests`)."""

    first_token_ns: Annotated[Ns, d("a prefill alone")]
    prefill_ns: Annotated[Ns, d("from one prefill to the next")]
    step_ns: Annotated[Ns, d("from one step to the next")]
    token_ns: Annotated[Ns, d("that a sequence waits for its next token")]
    num_sequences: int
    generated: Annotated[int, d("tokens of a request")]
    most_per_second: float
    at: NotRequired[AtRate]


class Baseline(TypedDict):
    """The result of another placer."""

    status: Literal["ok", "infeasible", "failed", "skipped"]
    step_time_ns: int | None
    seconds: float


class Noise(TypedDict):
    """The plan with op times that vary."""

    noise: Annotated[float, d("relative standard deviation of an op's time")]
    mean_ns: Ns
    p95_ns: Annotated[Ns, d("95 % of the steps take at most this")]
    num_draws: int


class WhatIf(TypedDict):
    """A change of the machine that was tried."""

    change: str
    detail: str
    step_time_ns: Annotated[int | None, d("null: does not fit")]
    layout: NotRequired[str]
    is_estimate: NotRequired[Annotated[bool, d("true: the layout was not simulated")]]


class Advice(TypedDict):
    """What other machines would give."""

    what_ifs: list[WhatIf]
    not_asked: Annotated[list[str], d("what there was no time for, with the reason")]


class Remedy(TypedDict):
    """A change with which a step would fit."""

    change: str
    option: Annotated[str, d("that makes the change; empty: none does")]
    step_time_ns: Annotated[int | None, d("of the first step that fits; null: bytes were counted only")]
    missing_bytes: Size


class LayoutRow(TypedDict):
    """A layout that was looked at."""

    option: Annotated[str, d("as `--parallel` takes it")]
    layout: Layout
    devices_per_replica: int
    status: str
    step_time_ns: Ns
    missing_bytes: Annotated[Size, d("on the device that lacks most")]
    peak_memory_bytes: Annotated[list[Size] | None, d("by device; null: the time is an estimate")]
    limit: Annotated[str, d("what keeps it from being faster, or from fitting")]


class Throughput(TypedDict):
    """Batches in flight, in the steady state."""

    time_per_batch_ns: Ns
    batches_per_second: float
    latency_ns: Annotated[Ns, d("of the slowest batch")]
    busy_fraction: list[Share]
    missing_bytes: list[Size]


class BatchesRow(TypedDict):
    """A way to serve that was looked at."""

    layout: dict[str, Any]
    devices: Annotated[list[list[int]], d("of each replica")]
    baseline: str | None
    status: str
    throughput: Throughput
    peak_memory_bytes: list[Size]


class Figures(TypedDict):
    """Figures of a step."""

    graph: Graph
    cluster: Cluster
    step_time_ns: Ns
    peak_memory_bytes: Annotated[list[Size], d("by device")]
    busy_fraction: Annotated[list[Share], d("by device: share of the step in which it computes")]
    host_wait_fraction: Annotated[list[Share], d("by device: share in which an op has started and its host issues it")]


# answers


class Place(Figures):
    """`gdp place --json`."""

    placer: str
    status: Status
    lower_bound_ns: Annotated[Ns, d("no placement of this graph takes less")]
    gap: Annotated[float | None, d("step time over bound, less 1; null: the bound is 0")]
    step_time_range_ns: Range
    range_rests_on: RestsOn
    mfu: Mfu
    per_second: Annotated[dict[str, float], d("samples, tokens")]
    baselines: Annotated[dict[str, Baseline], d("by placer; empty with --batches, whose layouts name them")]
    seconds: Annotated[float, d("of the search")]
    simulations: int
    plan: Annotated[str | None, d("path; null: not written")]
    microbatches: int
    order: Annotated[str, d("in which ops were started")]
    under_noise: Annotated[Noise | None, d("null with `--robust 0%`")]
    advice: Annotated[Advice | None, d("null with `--no-advice`, or without a plan that fits")]
    held_bytes: Annotated[Size, d("held for the whole step, before it is cut")]
    would_fit: Annotated[list[str], d("changes with which a plan would fit, in words; empty: it fits")]
    remedies: Annotated[list[Remedy], d("the same, with figures")]
    op_times: NotRequired[Annotated[dict[str, dict[str, int]], d("number of ops by device and source of their time")]]
    serving: NotRequired[Serving | None]
    layout: NotRequired[Annotated[dict[str, Any], d("with `--parallel`: the chosen Layout; with `--batches` its step")]]
    layouts: NotRequired[Annotated[list[LayoutRow | BatchesRow], d("that were looked at, the chosen one among them")]]
    moved_ops: NotRequired[Annotated[int, d("ops that are not on the device of their replica or stage")]]
    layout_bound_ns: NotRequired[Annotated[Ns, d("no layout of this batch takes less; 0: not known")]]
    layout_notes: NotRequired[Annotated[list[str], d("what a cut step does otherwise than the whole one")]]
    batches: NotRequired[Annotated[int, d("in flight (`--batches`)")]]
    samples_per_batch: NotRequired[int | None]
    throughput: NotRequired[Throughput]
    time_per_batch_bound_ns: NotRequired[Ns]
    requests: NotRequired[Requests]


class SweepRow(TypedDict):
    """A row of a sweep."""

    devices: NotRequired[int]
    batch: NotRequired[int]
    microbatches: NotRequired[int]
    machines: NotRequired[str]
    status: Literal["ok", "infeasible", "failed"]
    step_time_ns: int | None
    step_time_range_ns: Range
    range_rests_on: RestsOn
    mfu: Mfu
    lower_bound_ns: int | None
    peak_memory_bytes: list[Size] | None
    order: str | None
    layout: Annotated[str | None, d("as `--parallel` takes it")]
    same_plan_as: Annotated[int | str | None, d("the row whose plan it is")]
    dollars_per_hour: Annotated[float | None, d("null: the price of a device is not known")]
    watts: float | None
    samples_per_second: NotRequired[float | None]
    samples_per_dollar: NotRequired[float | None]
    samples_per_joule: NotRequired[float | None]
    tokens_per_second: NotRequired[float | None]
    tokens_per_dollar: NotRequired[float | None]
    tokens_per_joule: NotRequired[float | None]
    steps_per_second: NotRequired[float | None]
    steps_per_dollar: NotRequired[float | None]
    steps_per_joule: NotRequired[float | None]
    is_on_front: Annotated[bool, d("no other row is faster without costing more, or cheaper without being slower")]
    plan: Annotated[str | None, d("path")]
    note: str
    serving: NotRequired[Serving | None]


class Sweep(TypedDict):
    """`gdp place --sweep --json`."""

    sweep: Annotated[Literal["devices", "batch", "microbatches", "machines"], d("the key of a row's value")]
    rows: list[SweepRow]


class CompareRow(TypedDict):
    """A placer."""

    placer: str
    status: str
    step_time_ns: Annotated[int | None, d("the median over seeds")]
    step_time_range_ns: Range
    range_rests_on: RestsOn
    mfu: Mfu
    step_time_ns_by_seed: list[int | None]
    seconds: float
    simulations: int
    layout: Layout | None
    lower_bound_ns: Annotated[Ns, d("of this row's question: its batch in a layout, or placements of ops")]
    reason: Annotated[str | None, d("why there is no step")]
    serving: NotRequired[Serving | None]


class Compare(TypedDict):
    """`gdp compare --json`."""

    graph: Graph
    cluster: Cluster
    budget: str
    batches: Annotated[int | None, d("in flight, where times are per batch")]
    rows: list[CompareRow]
    lower_bound_ns: Annotated[Ns, d("the least of the rows'")]


class Simulate(Figures):
    """`gdp simulate --json`. Of a bare placement there is no `placer`, `seed` and `gdp_version`."""

    placer: NotRequired[str]
    seed: NotRequired[int]
    gdp_version: NotRequired[Annotated[str, d("that made the plan")]]
    lower_bound_ns: Ns
    gap: float | None
    step_time_range_ns: Range
    range_rests_on: RestsOn
    mfu: Mfu
    feasible: bool
    reasons: Annotated[list[str], d("why it is not feasible")]
    serving: NotRequired[Serving | None]
    throughput: NotRequired[Throughput]


class OneDevice(TypedDict):
    """The whole step on one device."""

    device: str
    step_time_ns: float
    step_time_quartiles_ns: tuple[float, float]
    step_times_ns: list[int]


class Results(TypedDict):
    """Results of the plan beside those of a reference."""

    equal: bool
    reference: str
    tensors: Annotated[int, d("that were compared")]
    bit_equal_tensors: int
    largest_relative_difference: float


class RunDevice(TypedDict):
    """A device's step."""

    name: str
    num_ops: int
    predicted_busy_ns: int
    busy_ns: int
    wait_ns: int


class RunOps(TypedDict):
    """Ops of one kind, or one op."""

    name: str
    num_ops: int
    predicted_ns: int
    measured_ns: int


Transfer = TypedDict(
    "Transfer",
    {"from": str, "to": str, "num_tensors": int, "predicted_ns": int, "measured_ns": int, "median_error": float},
)


class Prediction(TypedDict):
    """Predicted beside measured times; what explains most of the error first."""

    devices: list[RunDevice]
    kinds: list[RunOps]
    ops: list[RunOps]
    transfers: list[Transfer]


class FittedNumber(TypedDict):
    """A number of a kind of device or link."""

    of: str
    number: Literal["product", "bandwidth", "issue", "rate", "latency"]
    before: Annotated[float, d("a share, FLOP or bytes per second, or ns")]
    after: float
    factor: float
    prior: Annotated[float, d("deviation of its logarithm among machines")]


class TunedPlan(TypedDict):
    """A measurement of a plan."""

    name: Annotated[str, d("its layout or placer")]
    candidate: Annotated[Size, d("its directory in DIR")]
    predicted_ns: Ns
    before_ns: Annotated[Ns, d("predicted with what was learned before it was measured")]
    after_ns: Annotated[Ns, d("and after")]
    status: Literal["ok", "out of memory", "failed", "timed out", "no time"]
    step_ns: Annotated[int | None, d("median; null: it did not run")]
    noise: Annotated[float | None, d("relative deviation of the median")]
    reason: str
    seconds: float


class Tune(TypedDict):
    """`gdp tune --json`."""

    num_candidates: Size
    measurements: list[TunedPlan]
    best: Annotated[str | None, d("null: none ran")]
    step_time_ns: int | None
    plan: Annotated[str | None, d("path")]
    machine: Annotated[str | None, d("path of the cluster with what was learned")]
    numbers: list[FittedNumber]
    ended: Annotated[str, d("why")]


class Run(TypedDict):
    """`gdp run --json`; `gdp report --run` reads it."""

    graph: str
    devices: list[str]
    places: Annotated[list[str], d("where each ran")]
    steps: int
    step_time_ns: Annotated[float, d("median")]
    step_time_quartiles_ns: tuple[float, float]
    step_times_ns: list[int]
    predicted_step_time_ns: int
    error: Annotated[float, d("predicted over measured, less 1")]
    notes: list[str]
    one_device: OneDevice | None
    speedup: float | None
    results: Results
    layout: str | None
    batches: Served | None
    whole_batch_difference: Annotated[float | None, d("of loss and gradients, where the batch is cut")]
    prediction: NotRequired[Annotated[Prediction, d("where devices are known")]]


class Report(TypedDict):
    """`gdp report --json`."""

    step_time_ns: Ns
    written: list[str]


class Capture(Graph):
    """`gdp capture --json`."""

    unknown_costs: Annotated[dict[str, int], d("number of ops with estimated costs, by kind")]
    path: str


class CostRow(TypedDict):
    """Kernels of one class, or of equal ops."""

    name: Annotated[str, d("the class, or the kind of the ops with their shapes")]
    count: Annotated[int, d("of kernels, or of ops")]
    time_ns: Ns
    flops: int
    bytes: Annotated[int, d("that the kernels move")]
    limit: Annotated[
        Literal["arithmetic", "memory", "launch", "latency", "link", "given"], d("what bounds most of the time")
    ]
    rule: NotRequired[Annotated[str, d("of ops: what says of which kernels they are")]]


class KindCosts(TypedDict):
    """A step on a device of one kind."""

    kind: str
    runtime: Literal["eager", "compile", "cuda-graphs"]
    kernels_ns: Annotated[Ns, d("of all kernels, one after the other")]
    host_ns: Annotated[Ns, d("to issue them")]
    classes: list[CostRow]
    ops: Annotated[list[CostRow], d("the `--top` sets of equal ops")]


class Costs(TypedDict):
    """`gdp costs --json`."""

    graph: str
    devices: list[KindCosts]


class Train(TypedDict):
    """`gdp train --json`."""

    checkpoint: str
    policy: str
    num_parameters: int
    updates: int
    done: bool
    interrupted: bool
    seconds: float
    cpu_hours: float
    statistics: Statistics | None


class Export(Figures):
    """`gdp export --json`."""

    target: str
    level: Annotated[str, d("what the target places: layers, modules, ...")]
    layout: NotRequired[Layout]
    devices: NotRequired[Annotated[list[list[int]], d("of each replica")]]
    moved_ops: NotRequired[Annotated[int, d("ops of the plan on other devices than here")]]
    offloads: NotRequired[bool]
    num_units: NotRequired[int]
    program_order_step_time_ns: NotRequired[int | None]
    status: Status
    plan_step_time_ns: Ns
    throughput: Annotated[Throughput | None, d("of batches in flight, of whose run the step times are")]
    loss: Annotated[float, d("step time over the plan's, less 1")]
    content: Annotated[Any, d("of the file")]
    path: str | None
    notes: list[str]


class Workload(TypedDict):
    """A built-in model."""

    name: str
    family: str
    devices: str
    batch: int
    description: str


class Workloads(TypedDict):
    """`gdp workloads --json`."""

    workloads: list[Workload]


class DetectedDevice(TypedDict):
    """A device of this machine; a GPU has the other keys, too."""

    name: str
    kind: str
    memory_bytes: Size
    on: str
    gpu: NotRequired[str]
    uuid: NotRequired[str | None]
    total_memory_bytes: NotRequired[Size]
    free_memory_bytes: NotRequired[Size | None]
    used_by_others_bytes: NotRequired[Size | None]
    pcie_generation: NotRequired[int | None]
    pcie_width: NotRequired[int | None]


class DetectedLink(TypedDict):
    """A link between two GPUs."""

    devices: tuple[str, str]
    ancestor: str | None
    nvlinks: int
    is_switched: bool
    has_peer_copies: bool
    bytes_per_second: int | None


class Detect(TypedDict):
    """`gdp devices detect --json`."""

    devices: list[DetectedDevice]
    links: list[DetectedLink]
    memory_bytes: Size
    notes: list[str]
    torch: str
    cuda: str | None
    cores: list[int]
    path: NotRequired[str]


# files


class GroupLink(TypedDict):
    """The link between the cards of a group."""

    bandwidth: Quantity
    latency: Quantity
    exchange: NotRequired[Annotated[str, d("as of links")]]


class ClusterDevice(TypedDict):
    """A device; a kind that is built in has the other figures."""

    name: str
    kind: str
    memory: NotRequired[Quantity]
    flops: NotRequired[Annotated[dict[str, Quantity], d("by dtype, per second")]]
    memory_bandwidth: NotRequired[Quantity]
    launch: NotRequired[Quantity]
    issue: NotRequired[Annotated[Quantity, d("of its host, for each kernel")]]
    achieved: NotRequired[Annotated[dict[str, float], d("shares of the sheet by class of kernel, and numbers")]]
    runtime: NotRequired[Literal["eager", "compile", "cuda-graphs"]]
    group: NotRequired[Annotated[list[str], d("the equal cards that it stands for, each with these figures")]]
    link: NotRequired[Annotated[GroupLink, d("between them, while other groups exchange")]]
    measured_steps: NotRequired[
        Annotated[dict[str, list[float]], d("measured over predicted times, one a model, by kind of step")]
    ]


ClusterLink = TypedDict(
    "ClusterLink",
    {
        "from": str | list[str],
        "to": str | list[str],
        "bandwidth": Quantity,
        "latency": Quantity,
        "both": NotRequired[bool],
        "channels": NotRequired[Annotated[list[str], d("that transfers share")]],
        "exchange": NotRequired[Annotated[str, d("the link whose exchanges NCCL's model has, such as nvlink3")]],
    },
)


class ClusterFile(TypedDict):
    """`gdp-cluster`: what `--devices` reads and `gdp devices show --json` prints; YAML or JSON."""

    format: Literal["gdp-cluster"]
    version: Literal[1]
    name: str
    devices: list[ClusterDevice]
    links: NotRequired[list[ClusterLink]]


class Measure(TypedDict):
    """`gdp devices measure --json`."""

    cluster: ClusterFile
    fingerprint: str
    notes: list[str]
    path: str


class FittedStep(TypedDict):
    """Errors of a measured step, as shares of its time."""

    row: int
    model: str
    measured_ms: float
    before: float
    after: float
    left_out: Annotated[float, d("with numbers that the other rows set")]
    disagrees: bool


class Fit(TypedDict):
    """`gdp devices fit --json`."""

    cluster: ClusterFile
    fingerprint: str
    numbers: list[FittedNumber]
    rows: list[FittedStep]
    path: str


class GraphFile(TypedDict):
    """`gdp-graph`, as JSON; [columns](machine-model.md#6-files) have the same fields."""

    format: Literal["gdp-graph"]
    version: Literal[1, 2]
    name: str
    ops: list[Op]
    tensors: list[Tensor]


class Asked(TypedDict):
    """The question, as it was typed."""

    model: str
    options: dict[str, Any]
    cluster: str
    directory: Annotated[str, d("where relative paths begin")]


class PlanFile(TypedDict):
    """`gdp-plan`."""

    format: Literal["gdp-plan"]
    version: Literal[2]
    graph: Annotated[str, d("fingerprint")]
    cluster: Annotated[str, d("fingerprint")]
    devices: list[str]
    placement: Annotated[list[Size], d("device of each op")]
    order: Annotated[list[list[Size]], d("by device: its ops in the order of their starts")]
    step_time_ns: Ns
    peak_memory_bytes: list[Size]
    lower_bound_ns: Ns
    placer: str
    seed: Size
    gdp_version: str
    asked: Asked
    layout: NotRequired[Annotated[dict[str, Any], d("a Layout, and where its parts are")]]


class TuneCandidate(TypedDict):
    """A plan that may be measured, in the directory of its number."""

    name: str
    predicted_ns: Ns
    spread: Annotated[float, d("relative deviation of the prediction")]
    comes_first: bool
    traits: list[float]
    key: Annotated[str, d("by which it is known again")]
    slopes: Annotated[list[float], d("of the logarithm of its time in those of `numbers`")]
    environment: Annotated[dict[str, str], d("of the command")]
    placed: Annotated[str, d("equal for candidates that differ in the order of ops alone")]
    step_kind: Annotated[str, d("whose range its time narrows; empty: it has none")]
    files: Annotated[list[str], d("in its directory, but for what a command writes")]


class TuneLog(TypedDict):
    """`gdp-tune`, the first line of `log.jsonl`; others are measurements, or further candidates (`placed_after`)."""

    format: Literal["gdp-tune"]
    version: Literal[3]
    question: dict[str, Any]
    numbers: Annotated[list[tuple[str, str]], d("of the machine: a kind of device or link, and its number")]
    candidates: list[TuneCandidate]


class OpCost(TypedDict):
    """Costs of the ops of a kind, or with a name or module that a regular expression finds."""

    kind: NotRequired[str]
    match: NotRequired[str]
    flops: NotRequired[Quantity]
    flops_per_output_element: NotRequired[Quantity]
    time: NotRequired[Annotated[dict[str, Quantity], d("by name or kind of device")]]


class OpCostsFile(TypedDict):
    """`gdp-op-costs`, for `--op-costs`; YAML or JSON."""

    format: Literal["gdp-op-costs"]
    version: Literal[1]
    ops: list[OpCost]


class Price(TypedDict):
    """Figures of a kind of device."""

    dollars_per_hour: NotRequired[Annotated[float, Field(gt=0, le=1e6)]]
    watts: NotRequired[Annotated[float, Field(gt=0, le=1e6)]]


ANSWERS: Mapping[str, Any] = {
    "place": Place,
    "place-sweep": Sweep,
    "compare": Compare,
    "simulate": Simulate,
    "run": Run,
    "tune": Tune,
    "report": Report,
    "export": Export,
    "capture": Capture,
    "costs": Costs,
    "train": Train,
    "workloads": Workloads,
    "devices-detect": Detect,
    "devices-measure": Measure,
    "devices-fit": Fit,
}
"""What `--json` prints, by command."""
FILES: Mapping[str, Any] = {
    "graph": GraphFile,
    "cluster": ClusterFile,
    "plan": PlanFile,
    "tune-log": TuneLog,
    "op-costs": OpCostsFile,
    "prices": Annotated[dict[str, Price], d("`--prices`, by kind of device; YAML or JSON")],
    "placement": Annotated[dict[str, str], d("`gdp simulate --placement`: the device of each op")],
}


def schema(name: str) -> dict[str, Any]:
    """Returns the JSON Schema of an answer or file; that of a file allows no other keys."""
    document = TypeAdapter(ANSWERS.get(name) or FILES[name]).json_schema()
    for part in [document, *document.get("$defs", {}).values()] if name in FILES else ():
        if "properties" in part:
            part["additionalProperties"] = False
    return {"$schema": DRAFT, "$id": f"{name}.json", **_without_titles(document)}


def _without_titles(part: Any) -> Any:
    """Leaves out titles, which repeat keys."""
    if isinstance(part, list):
        return [_without_titles(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: {name: _without_titles(item) for name, item in value.items()}
        if key == "properties"
        else _without_titles(value)
        for key, value in part.items()
        if key != "title" or not isinstance(value, str)
    }


def text(name: str) -> str:
    """Returns the content of a schema's file."""
    return json.dumps(schema(name), indent=1) + "\n"


def tables() -> Iterator[str]:
    """Yields the lines of the page that lists all keys."""
    parts: dict[str, Any] = {}
    for title, names in (("Answers of --json", ANSWERS), ("Files", FILES)):
        yield f"## {title}\n"
        for name in names:
            document = schema(name)
            parts |= document.get("$defs", {})
            yield f"### {name}\n\n[Schema](schemas/{name}.json). {document.get('description', '')}\n"
            yield from _table(document)
    yield "## Parts\n"
    for name in sorted(parts):
        yield f"### {name}\n\n{' '.join(parts[name].get('description', '').split())}\n"
        yield from _table(parts[name])


def _table(document: Mapping[str, Any]) -> Iterator[str]:
    if "properties" not in document:
        return
    yield "| key | type | meaning |\n|---|---|---|"
    for key, value in document["properties"].items():
        optional = "" if key in document.get("required", ()) else ", optional"
        yield f"| `{key}` | {_kind(value)}{optional} | {value.get('description', '')} |"
    yield ""


def _kind(value: Mapping[str, Any]) -> str:
    """Returns a type in words; parts are links."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(map(_kind, value["anyOf"])))
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return " or ".join(f"`{json.dumps(item)}`" for item in value["enum"])
    if value.get("type") == "array":
        return f"list of {_kind(value.get('items') or value['prefixItems'][0])}"
    if value.get("type") == "object" and isinstance(value.get("additionalProperties"), dict):
        return f"object of {_kind(value['additionalProperties'])}"
    return str(value.get("type", "any"))


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for path in SCHEMAS.glob("*.json"):
        path.unlink()
    for name in (*ANSWERS, *FILES):
        (SCHEMAS / f"{name}.json").write_text(text(name))
    sys.stdout.write(f"{len(ANSWERS) + len(FILES)} schemas written to {SCHEMAS}\n")
