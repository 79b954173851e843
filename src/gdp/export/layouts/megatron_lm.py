"""`megatron`: the layout as options of Megatron-LM, in a shell script that starts it.

    sh megatron.sh pretrain_gpt.py --num-layers 32 ...

Ranks are numbered stage by stage, with `--use-tp-pp-dp-mapping` replica by replica (megatron/core/parallel_state.py);
those of a group follow each other."""

from gdp.errors import InputError
from gdp.export import megatron
from gdp.export.layouts.precision import AUTOCAST, Held, precision_of
from gdp.export.layouts.target import (
    CutStep,
    LayoutTarget,
    RankOrder,
    check_even,
    common_notes,
    ranks_of,
    recomputed_layers,
    title_of,
)
from gdp.graph import Graph
from gdp.graph.parameter_bytes import ParameterBytes
from gdp.models.model import FLOAT32, MIXED, PURE_BF16
from gdp.parallel.layout import SELECTIVE, Layout

NAME = "megatron"
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def write(step: CutStep) -> str:
    """Writes the script. InputError for unequal micro-batches, and for layers recomputed that are not first."""
    by_stage = step.devices.T.ravel().tolist()
    by_replica, shards = RankOrder.of(step.problem, by_stage) is None, step.layout.shards
    if by_replica and step.num_stages > 1 and (shards.context > 1 or shards.samples > 1):
        raise InputError(
            f"{NAME}: numbers no ranks replica by replica beside context or ranks with samples of their own; place "
            "without them, or with another number of stages"
        )
    ranks = ranks_of(step, NAME, by_replica=by_replica)
    usage = f"Megatron-LM (megatron-core 0.16): sh {TARGET.file_name} pretrain_gpt.py OPTIONS"
    mapping = ["--use-tp-pp-dp-mapping"] if by_replica else []
    return ranks.script([title_of(step), usage], options(step) + mapping, environment=_environment(step.layout))


def _environment(layout: Layout) -> list[str]:
    """Returns what Megatron-LM refuses to cut ops or tokens without, on cards before Blackwell (its arguments.py)."""
    is_cut = layout.shards.tensor > 1 or layout.shards.context > 1
    return ["CUDA_DEVICE_MAX_CONNECTIONS=1"] if is_cut and layout.zero < 2 else []


def options(step: CutStep) -> list[str]:
    """Returns the options of the layout, without those of the model."""
    check_even(step, NAME)
    layout = step.layout
    is_mixture = any("grouped_mm" in kind for kind in step.problem.graph.kinds)
    if is_mixture and layout.shards.tensor > 1 and not layout.shards.sequence:
        raise InputError(
            f"{NAME}: trains experts beside tensor parallelism with tokens cut alone; place with sequence=on"
        )
    found = [
        f"--tensor-model-parallel-size {layout.shards.tensor}",
        f"--pipeline-model-parallel-size {step.num_stages}",
        f"--micro-batch-size {step.samples}",
        f"--global-batch-size {step.samples * layout.num_parts * layout.shards.samples}",
    ]
    if step.num_stages > 1:
        found.append(f"--pipeline-model-parallel-layout '{megatron.layout_of(step.stages)}'")
    if layout.shards.sequence:
        found.append("--sequence-parallel")
    if layout.shards.context > 1:
        found.append(f"--context-parallel-size {layout.shards.context}")
    if layout.shards.expert > 1:
        found.append(f"--expert-model-parallel-size {layout.shards.expert}")
        found.append(f"--expert-tensor-parallel-size {max(layout.shards.tensor // layout.shards.expert, 1)}")
    if layout.num_copies > 1:
        found.append("--overlap-grad-reduce")
    if layout.zero:
        found += ["--use-distributed-optimizer", "--overlap-param-gather"]
    if layout.zero >= 2 and step.num_stages > 1:
        raise InputError(f"{NAME}: Megatron-FSDP has no pipelines; place with zero=1, or export to torchtitan")
    if layout.zero >= 2:
        strategy = f"--data-parallel-sharding-strategy {_STRATEGIES[layout.zero]}"
        found += ["--use-megatron-fsdp", strategy, "--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor"]
    return [*found, *step.held.options, *_recomputation(step)]


def _recomputation(step: CutStep) -> list[str]:
    """Returns options for all layers, or for as many first ones of each stage."""
    recomputed = recomputed_layers(step, NAME)
    if step.layout.recompute == SELECTIVE:
        raise InputError(f"{NAME}: selectively recomputes attention alone; place with recompute=blocks or auto")
    if not recomputed:
        return []
    method, count = "uniform", 1  # as many layers as run again at a time
    if recomputed != set(step.layers):
        of_stages = [[name in recomputed for name in stage if name not in ("E", "L")] for stage in step.stages]
        method, count = "block", max(map(sum, of_stages))
        if any(flags != [place < count for place in range(len(flags))] for flags in of_stages):
            raise InputError(
                f"{NAME}: recomputes as many first layers of each stage, not those of the plan; "
                "place with recompute=blocks"
            )
    return ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {count}"]


def notes(step: CutStep) -> list[str]:
    """Returns sentences on what Megatron-LM does otherwise than the plan."""
    sentences = common_notes(step)
    if step.layout.shards.tensor > 1 and not step.layout.shards.overlap:
        sentences.append("Megatron-LM sums gradients over ranks beside products: place with overlap=on.")
    if step.layout.zero >= 2:
        sentences.append("Megatron-FSDP needs CUDA_DEVICE_MAX_CONNECTIONS other than 1.")
    return sentences


def held_by(graph: Graph, layout: Layout) -> list[Held]:
    """Returns what Megatron-LM holds: float32 gradients in a buffer, in mixed precision beside bf16 weights. Where that
    does not fit, the buffer is in bf16."""
    precision, each = precision_of(graph), ParameterBytes.of(graph)
    if each is None:
        return [Held()]
    shares = layout.data if layout.zero == 2 else 1
    if precision == FLOAT32:
        return [Held("Megatron-LM keeps the memory of gradients for the whole step.", 4 / shares, gradient_scale=0)]
    # copies where the plan has none, cut as the optimizer's state is, and state in float32
    copies, scale = (0, 1) if precision == MIXED else (4, 2 if precision == PURE_BF16 else 1)
    weights, halves = (-2, 1) if precision == AUTOCAST else (0, 2)
    total = 2 + 4 + each.master_weights + copies + each.optimizer_state * scale
    resident = weights + copies / (layout.data if layout.zero in (1, 2) else 1)
    text = "Megatron-LM holds bf16 weights, float32 {}copies and state: {:.3g} bytes a parameter, {:.3g} in the plan."
    options: list[tuple[str, ...]] = [("--bf16",), ("--bf16", "--grad-reduce-in-bf16")]
    if "float16" in graph.dtypes:
        text, options = text.replace("bf16", "fp16"), [("--fp16", "--accumulate-allreduce-grads-in-fp32"), ("--fp16",)]
    wide, narrow = text.format("gradients, ", total, each.total), text.format("", total - 2, each.total)
    return [
        Held(wide, resident + 4 / shares, scale, 0, halves, options[0]),
        Held(narrow, resident + 2 / shares, scale, 0, 1, options[1]),
    ]


TARGET = LayoutTarget(
    NAME, "a device a replica and stage", "megatron.sh", True, write, notes, held_by, ("expert", "context", "overlap")
)
