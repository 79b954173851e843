"""`torch-fsdp`: a Python module with the layout in terms of PyTorch's DDP, `fully_shard` and `parallelize_module`.

It is `training_step.py` with the constants of the layout."""

import json
import re
from dataclasses import replace
from pathlib import Path

from gdp.errors import InputError
from gdp.export.export_target import check_modules
from gdp.export.layouts.precision import HALF, Held, as_fsdp
from gdp.export.layouts.reserved import reserve_note
from gdp.export.layouts.target import CutStep, LayoutTarget, common_notes, ranks_of, title_of
from gdp.graph import Graph
from gdp.graph.layers import LayerPaths
from gdp.models.shards import WHOLE, Styles
from gdp.parallel.blocks import block_paths
from gdp.parallel.layout import NONE, SELECTIVE, Layout

NAME = "torch-fsdp"
_TEMPLATE = Path(__file__).with_name("training_step.py")
_USAGE = '''"""{title}, for PyTorch 2.13. Start it with

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
        "TENSOR": layout.shards.tensor,
        "STYLES": _styles(step, lists),
        "ZERO": layout.zero,
        "COMPUTED_IN": step.held.options[0] if step.held.options else "",
        "SHARDED": tuple(lists) if layout.zero >= 2 or (layout.shards.tensor > 1 and layout.data > 1) else (),
        "SELECTIVE": layout.recompute == SELECTIVE,
        "RECOMPUTED": () if layout.recompute == NONE else tuple(block_paths(graph, layout.recompute)),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, value in constants.items():
        found = re.search(rf"(?m)^{name}(?::[^=]*)? = (?P<value>.*?)  #", text)
        assert found is not None, f"the template has {name}"
        text = text[: found.start("value")] + _written(value) + text[found.end("value") :]
    end = text.index("\n\n") + 1
    commands = "\n".join(f"    {command}" for command in ranks_of(step, NAME).commands("TRAIN.py"))
    return _USAGE.format(title=title_of(step), commands=commands) + text[end:]


def _written(value: object) -> str:
    """Returns a constant in Python, paths of modules with one a line."""
    if isinstance(value, list):
        return "(\n" + "".join(f"    ({json.dumps(path)}, {style}),\n" for path, style in value) + ")"
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return "(\n" + "".join(f"    {json.dumps(path)},\n" for path in value) + ")"
    return repr(value)


def _styles(step: CutStep, layers: list[str]) -> Styles | tuple[()]:
    if step.layout.shards == WHOLE:
        return ()
    if step.source is None:
        raise InputError(f"{NAME}: asks the MODEL how its layers are cut, and the plan is of a graph; name MODEL")
    return step.source.styles(step.layout.shards, layers, NAME)


def notes(step: CutStep) -> list[str]:
    """Returns sentences on what PyTorch does otherwise than the plan."""
    sentences, is_cut = common_notes(step), step.layout.shards != WHOLE
    if is_cut and step.layout.zero < 2 and step.layout.data > 1:
        also = ", and cuts gradients and parameters as well" if step.layout.zero else ""
        sentences.append(f"fully_shard sums gradients over replicas, in place of DDP, which takes no cut layers{also}.")
    if step.layout.shards.sequence:
        sentences.append("Tokens are cut from the first layer to the last; embedding, last norm and head have all.")
    if step.layout.zero == 1 and not is_cut:
        sentences.append(
            "ZeroRedundancyOptimizer gives each rank whole parameters to update, and sums whole gradients (all-reduce)."
        )
    if step.layout.zero == 2:
        sentences.append("fully_shard cuts parameters as well, and gathers them before the first pass of a step.")
    if step.layout.zero >= 2:
        sentences.append("Parameters outside of lists of layers are gathered together, for the whole pass.")
    if step.layout.zero == 3:
        sentences.append(reserve_note(step.simulation))
    return sentences


def held_by(graph: Graph, layout: Layout, tool: str = NAME) -> list[Held]:
    """Returns what PyTorch holds: of a model in mixed precision what FSDP and autocast do, of others the same."""
    held = as_fsdp(graph, layout, tool)
    computed = next((dtype for dtype in HALF if dtype in graph.dtypes), "")
    held = replace(held, keeps_rest=layout.zero == 3)
    return [replace(held, options=(computed,)) if held.sentence else held]


TARGET = LayoutTarget(NAME, "a device a replica", "parallel_step.py", False, write, notes, held_by)
