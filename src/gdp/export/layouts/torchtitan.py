"""`torchtitan`: the layout as options of torchtitan 0.3, in a shell script that starts it.

    sh torchtitan.sh --module llama3 --config llama3_8b

torchtitan trains decoders of its own, whose layers are called `layers.N`; they are those of the plan. Ranks are
numbered stage by stage (torchtitan/distributed/parallel_dims.py: the mesh has pp, dp_replicate, dp_shard, tp)."""

from dataclasses import replace

from gdp.errors import InputError
from gdp.export.layouts.precision import AUTOCAST, Held, as_fsdp, precision_of
from gdp.export.layouts.reserved import reserve_note
from gdp.export.layouts.target import (
    CutStep,
    LayoutTarget,
    check_even,
    common_notes,
    ranks_of,
    recomputed_layers,
    title_of,
)
from gdp.graph import Graph
from gdp.models.model import FLOAT32, MIXED, PURE_BF16
from gdp.parallel.layout import NONE, SELECTIVE, Layout

NAME = "torchtitan"
_TYPES = {  # of weights, and of what is computed with them
    MIXED: ("float32", "bfloat16"),
    AUTOCAST: ("float32", "bfloat16"),
    PURE_BF16: ("bfloat16", "bfloat16"),
    FLOAT32: ("float32", "float32"),
}


def write(step: CutStep) -> str:
    """Writes the script. InputError for unequal micro-batches, and for some layers recomputed."""
    usage = f"torchtitan 0.3.0: sh {TARGET.file_name} --module MODULE --config CONFIG"
    return ranks_of(step, NAME).script([title_of(step), usage], options(step), "-m torchtitan.train")


def options(step: CutStep) -> list[str]:
    """Returns the options, the subcommand for recomputation last."""
    check_even(step, NAME)
    layout, count, is_cut = step.layout, step.microbatches[0], step.num_stages > 1
    if 1 < layout.shards.expert < layout.shards.tensor:
        remedy = f"place with expert={layout.shards.tensor}, or export to megatron"
        raise InputError(f"{NAME}: has no ranks that share an expert; {remedy}")
    replicas, shards = (1, layout.num_copies) if layout.zero else (layout.data, layout.shards.samples)
    values: dict[str, object] = {
        "training.local_batch_size": step.samples * (count if is_cut else 1),
        "training.global_batch_size": step.samples * layout.num_parts * layout.shards.samples,
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.data_parallel_shard_degree": shards,
    }
    for key in ("tensor", "expert", "context"):
        if (degree := getattr(layout.shards, key)) > 1:
            values[f"parallelism.{key}_parallel_degree"] = degree
    if layout.zero or _cuts_parameters(layout):
        values["parallelism.fsdp_reshard_after_forward"] = "always" if layout.zero == 3 else "never"
    options = [f"--{key} {value}" for key, value in values.items()]
    if layout.shards.sequence is False:
        options.append("--parallelism.no-enable_sequence_parallel")
    if is_cut:
        options += _pipeline(step)
    if is_cut or layout.shards.expert > 1:
        options.append("--training.disable_cuda_graphs")  # its parser asks for this
    recomputed = recomputed_layers(step, NAME)
    if recomputed and recomputed != set(step.layers):
        raise InputError(f"{NAME}: recomputes all layers or none; place with recompute=blocks, selective or none")
    options += step.held.options
    mode = SELECTIVE if step.layout.recompute == SELECTIVE else "full" if recomputed else NONE
    return [*options, f"activation-checkpoint:{mode}"]


def _cuts_parameters(layout: Layout) -> bool:
    """Returns whether FSDP cuts parameters over the ranks of a group: over those that have tokens of their own."""
    return layout.shards.context > 1 or layout.shards.samples > 1


def _pipeline(step: CutStep) -> list[str]:
    if step.microbatches[0] < step.num_stages:
        raise InputError(
            f"{NAME}: 1F1B takes as many micro-batches as stages; place with microbatches={step.num_stages} or more"
        )
    graph, placement = step.problem.graph, step.simulation.placement
    makers, readers = graph.producers[graph.edge_tensors], graph.consumers
    is_weight = (graph.is_of_kind("parameter") | graph.is_collective)[makers]  # itself, or gathered over replicas
    is_read = is_weight & (graph.is_in_phase("forward") & ~graph.is_collective)[readers]
    if (placement[makers] != placement[readers])[is_read].any():
        raise InputError(f"{NAME}: ties no weights of two stages; place with stages=1, or export to megatron")
    number = {path: position for position, path in enumerate(step.layers)}
    names = {"E": ["tok_embeddings"], "L": ["norm", "lm_head"]}
    stages = [
        ",".join(own for name in stage for own in names.get(name, [f"layers.{number.get(name)}"]))
        for stage in step.stages
    ]
    return [
        f"--parallelism.pipeline_parallel_degree {step.num_stages}",
        f"--parallelism.module_fqns_per_model_part {' '.join(stages)}",
        "--parallelism.pipeline_parallel_schedule 1F1B",
        f"--parallelism.pipeline_parallel_microbatch_size {step.samples}",
    ]


def notes(step: CutStep) -> list[str]:
    """Returns sentences on what torchtitan does otherwise than the plan."""
    zero, sentences = step.layout.zero, common_notes(step)
    if zero == 3:
        sentences.append(reserve_note(step.simulation))
    if step.layout.recompute == SELECTIVE:
        sentences.append("Which results torchtitan keeps depends on its version: 0.2 those of the plan.")
    if zero < 3 and _cuts_parameters(step.layout):
        sentences.append("torchtitan cuts parameters over ranks of a group, and gathers them before the first pass.")
    elif zero in (1, 2):
        cut = "gradients and parameters" if zero == 1 else "parameters"
        sentences.append(
            f"torchtitan has no ZeRO {zero}: FSDP cuts {cut} as well, and gathers parameters before the first pass."
        )
    if zero != 3 and step.layout.data > 1 and step.microbatches[0] > 1 and step.num_stages == 1:
        sentences.append("torchtitan sums gradients over replicas in each micro-batch, not once a step.")
    return sentences


def held_by(graph: Graph, layout: Layout) -> list[Held]:
    """Returns what torchtitan holds: float32 weights by default, and in each precision gradients summed in float32."""
    precision, held = precision_of(graph), as_fsdp(graph, layout, NAME)
    if precision == PURE_BF16:
        held = Held("torchtitan sums bf16 gradients in float32.", exchange_scale=2)
    dtype, computed = _TYPES.get(precision, ("", ""))
    options = (f"--training.dtype {dtype}", f"--training.mixed_precision_param {computed}") if dtype else ()
    return [replace(held, options=options)]


TARGET = LayoutTarget(
    NAME, "a device a replica and stage", "torchtitan.sh", True, write, notes, held_by, ("expert", "context")
)
