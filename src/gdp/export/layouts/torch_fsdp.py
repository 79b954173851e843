"""`torch-fsdp`: a Python module with the layout in terms of PyTorch's DDP, ZeroRedundancyOptimizer and `fully_shard`.

It is `training_step.py` with the constants of the layout.
"""

import re
from pathlib import Path

from gdp.export.checks import check_modules
from gdp.export.layouts.cut_step import CutStep
from gdp.export.layouts.target import LayoutTarget, common_notes, ranks_of
from gdp.graph.layers import LayerPaths
from gdp.parallel.blocks import block_paths
from gdp.parallel.layout import NONE

NAME = "torch-fsdp"
_TEMPLATE = Path(__file__).with_name("training_step.py")
_USAGE = '''"""{title}

{commands}

with, in TRAIN.py:

    device = parallel_step.start()
    model = parallel_step.parallelize(model, device)
    optimizer = parallel_step.optimizer(model, torch.optim.AdamW, lr=1e-4)
    for batch in batches:
        samples = parallel_step.share(batch).to(device)
        loss = parallel_step.backward(model, lambda model, part: loss_of(model(part)), samples)
        optimizer.step()
        optimizer.zero_grad()
"""
'''


def write(step: CutStep) -> str:
    """Writes the module. InputError for a graph without modules of PyTorch."""
    graph, layout = step.problem.graph, step.layout
    check_modules(graph, "modules")
    layers = LayerPaths.of(graph)
    lists = [path for path, of_list in zip(layers.names, layers.lists, strict=True) if of_list]
    constants = {
        "MICROBATCHES": step.microbatches,
        "ZERO": layout.zero,
        "SHARDED": tuple(lists) if layout.zero >= 2 else (),
        "RECOMPUTED": () if layout.recompute == NONE else tuple(block_paths(graph, layout.recompute)),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, value in constants.items():
        text, count = re.subn(rf"(?m)^({name}(?::[^=]*)? = )[^#\n]*?(  #.*)$", rf"\g<1>{_written(value)}\g<2>", text)
        assert count == 1, f"the template has one {name}"
    end = text.index("\n\n") + 1
    return _USAGE.format(title=_title(step), commands=_commands(step)) + text[end:]


def _title(step: CutStep) -> str:
    return f"{step.problem.graph.name} in the layout {step.layout}, for PyTorch 2.13. Start it with"


def _commands(step: CutStep) -> str:
    ranks = ranks_of(step, NAME)
    several = len(ranks.gpus) > 1
    return "\n".join(
        f"    {f'NODE_RANK={host} MASTER_ADDR=... ' if several else ''}CUDA_VISIBLE_DEVICES={gpus} "
        f"{ranks.torchrun} TRAIN.py"
        for host, gpus in enumerate(ranks.visible)
    )


def _written(value: object) -> str:
    """Returns a constant in Python, long tuples with an item a line."""
    text = repr(value).replace("'", '"')
    if isinstance(value, tuple) and len(text) > 60:
        return "(\n" + "".join(f"    {item!r},\n" for item in value).replace("'", '"') + ")"
    return text


def notes(step: CutStep) -> list[str]:
    """Returns sentences on what PyTorch does otherwise than the plan."""
    sentences = common_notes(step)
    if step.layout.zero == 1:
        sentences.append(
            "ZeroRedundancyOptimizer gives each rank whole parameters to update, and sums whole gradients (all-reduce)."
        )
    if step.layout.zero == 2:
        sentences.append("fully_shard cuts parameters as well, and gathers them before the first pass of a step.")
    if step.layout.zero >= 2:
        sentences.append("Parameters outside of lists of layers are gathered together, for the whole pass.")
    return sentences


TARGET = LayoutTarget(NAME, "a device a replica", "parallel_step.py", False, write, notes)
