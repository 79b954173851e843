"""`transformers`: the layout as a `DistributedConfig` of Transformers, whose models know how their layers are cut.

config = DistributedConfig(**json.load(open("distributed.json")))
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, distributed_config=config)"""

import json
from functools import partial

from gdp.errors import InputError
from gdp.export.layouts.precision import precision_of
from gdp.export.layouts.target import CutStep, LayoutTarget, check_even, common_notes, ranks_of
from gdp.export.layouts.torch_fsdp import held_by
from gdp.models.model import HUGGING_FACE, PURE_BF16
from gdp.parallel.layout import BLOCKS, NONE

NAME = "transformers"


def write(step: CutStep) -> str:
    """Writes the degrees. InputError for a MODEL without a plan of its own, and for tokens that are cut."""
    layout, source = step.layout, step.source
    ranks_of(step, NAME)
    check_even(step, NAME)
    if layout.shards.sequence:
        raise InputError(f"{NAME}: cuts no tokens; place with sequence=off, or export to torch-fsdp")
    if layout.recompute not in (NONE, BLOCKS):
        raise InputError(f"{NAME}: recomputes all layers or none; place with recompute=blocks or none")
    if source is None or not source.text.startswith(HUGGING_FACE) or not source.has_tensor_plan:
        raise InputError(f"{NAME}: takes models of hf: whose config has a base_model_tp_plan; export to torch-fsdp")
    degrees = {"fsdp_size": layout.data} if layout.zero else {"fsdp_size": 1, "dp_replicate_size": layout.data}
    degrees |= {"fsdp_mixed_precision": True} if step.held.options else {}
    tensor = {"tp_size": layout.shards.tensor, "tp_plan": "auto"} if layout.shards.tensor > 1 else {}
    return json.dumps(tensor | (degrees if layout.data > 1 else {}), indent=2) + "\n"


def notes(step: CutStep) -> list[str]:
    """Returns sentences on what Transformers does otherwise than the plan, and on options that it takes elsewhere."""
    sentences, layout = common_notes(step), step.layout
    sentences += [f"Start it with {command}." for command in ranks_of(step, NAME).commands("TRAIN.py")]
    if precision := precision_of(step.problem.graph):  # by default the type of the checkpoint
        cast = ", and give Trainer bf16=True" if step.held.options and layout.data == 1 else ""
        sentences.append(f"Load MODEL with dtype=torch.{'bfloat16' if precision == PURE_BF16 else 'float32'}{cast}.")
    if layout.shards.tensor > 1:
        sentences.append(
            "Transformers sums the gradient of an input for each linear layer that reads it: five all-reduces a layer "
            "in backward of a Llama, where the plan has two."
        )
        sentences.append(
            "tp_plan is that of the model's config: what it does not name, as attention of DeepSeek, is whole on each "
            "card there, and so is what it gathers, as the logits of most models and QKV of Phi-3."
        )
    if layout.zero in (1, 2):
        sentences.append("FSDP cuts parameters as well, and gathers them in each pass.")
    if max(step.microbatches) > 1:
        sentences.append(f"Give Trainer gradient_accumulation_steps={step.microbatches[0]}.")
    if layout.recompute == BLOCKS:
        sentences.append("Give Trainer gradient_checkpointing=True.")
    return sentences


TARGET = LayoutTarget(NAME, "a device a replica", "distributed.json", False, write, notes, partial(held_by, tool=NAME))
