"""`llama-cpp`: `--override-tensor` (`-ot`) patterns of llama.cpp, which say where the tensors of each layer are kept.

    -ot '^blk\\.(0|1|2)\\..*=CUDA0'

llama.cpp computes an op where its weights are. The first pattern that is found in a GGUF tensor's name counts. Units
are the attention and the feed-forward part of each layer, with their norms, the embedding, the last norm and the head.
"""

import re

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.export.chains import Layers, find_layers
from gdp.export.checks import check_inference, check_one_batch
from gdp.export.devices import gpu_numbers
from gdp.export.target import ExportTarget, wrong_content
from gdp.export.units import ExportUnits
from gdp.placers.base import inherit
from gdp.simulator.problem import Problem

NAME = "llama-cpp"

# Modules of Llama and its relatives in Transformers and the GGUF tensors that they become
# (gguf-py/gguf/tensor_mapping.py).
IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def read_units(problem: Problem) -> ExportUnits:
    """Makes the units of a graph with the module names of Llama.

    InputError for other names, a training step and micro-batches.
    """
    check_inference(problem, NAME)
    check_one_batch(problem, NAME)
    layers = find_layers(problem)
    _check_names(problem, layers)
    names: dict[str, int] = {}
    by_module = {module: _unit_name(module, layers) for module in set(problem.graph.modules)}
    labels = []
    for module in problem.graph.modules:
        name = by_module[module]
        labels.append(names.setdefault(name, len(names)) if name else -1)
    return ExportUnits.build(problem, inherit(problem, labels), list(names))


def _unit_name(module: str, layers: Layers) -> str:
    """Returns `blk.3.attn`, `output`; "" for a module that belongs to no unit."""
    prefix = layers.path.rpartition(".")[0]
    if not module.startswith(f"{layers.path}."):
        inner = module.removeprefix(f"{prefix}.")
        return next((name for path, name in OUTSIDE.items() if path in (inner, module)), "")
    number, _, inner = module[len(layers.path) + 1 :].partition(".")
    if inner.startswith(("self_attn", "input_layernorm")):
        return f"blk.{number}.attn"
    return f"blk.{number}.ffn" if inner.startswith(("mlp", "post_attention_layernorm")) else ""


def _check_names(problem: Problem, layers: Layers) -> None:
    graph = problem.graph
    prefix = layers.path.rpartition(".")[0]
    for op, module in enumerate(graph.modules):
        if graph.kinds[op] != "parameter":
            continue
        inner = module.removeprefix(f"{prefix}.")
        if module.startswith(f"{layers.path}."):
            inner = module[len(layers.path) + 1 :].partition(".")[2]
            known = inner in IN_LAYERS
        else:
            known = inner in OUTSIDE or module in OUTSIDE
        if not known:
            raise InputError(
                f"graph {graph.name!r}: llama-cpp knows no GGUF tensor for the parameters of {module!r}; it takes "
                "models with the module names of Llama (model.layers.0.self_attn.q_proj, ...)"
            )


def write(problem: Problem, units: ExportUnits, devices: I64) -> str:
    """Writes one `-ot` a line, for `xargs llama-cli -m MODEL.gguf -ngl 999 < FILE`."""
    numbers = gpu_numbers(problem)
    place = {name: int(devices[unit]) for unit, members in enumerate(units.members) for name in members}
    patterns: list[str] = []
    for device in dict.fromkeys(place.values()):
        where = "CPU" if numbers[device] < 0 else f"CUDA{numbers[device]}"
        here = {name for name, other in place.items() if other == device}
        blocks = sorted({int(name.split(".")[1]) for name in here if name.startswith("blk.")})
        both = [block for block in blocks if {f"blk.{block}.attn", f"blk.{block}.ffn"} <= here]
        attn, ffn = (
            [block for block in blocks if block not in both and f"blk.{block}.{part}" in here]
            for part in ("attn", "ffn")
        )
        for tensors, numbered in ((".*", both), ("attn_.*", attn), ("ffn_.*", ffn)):
            if numbered:
                patterns.append(rf"^blk\.({'|'.join(map(str, numbered))})\.{tensors}={where}")
        patterns += [rf"^{name}\..*={where}" for name in sorted(here) if not name.startswith("blk.")]
    return "".join(f"-ot '{pattern}'\n" for pattern in patterns)


def parse(text: str, problem: Problem, units: ExportUnits) -> I64:
    """[U] Inverts `write`: a unit is on the device of a tensor in it."""
    numbers = gpu_numbers(problem)
    rules = [tuple(line.removeprefix("-ot ").strip("'").rsplit("=", 1)) for line in text.splitlines()]
    devices = np.empty(units.num_units, np.int64)
    for unit, members in enumerate(units.members):
        tensor = f"{members[0]}_norm.weight" if members[0].startswith("blk.") else f"{members[0]}.weight"
        where = next((device for pattern, device in rules if re.search(pattern, tensor)), None)
        if where is None:
            raise wrong_content(NAME, f"no pattern is found in {tensor}")
        devices[unit] = numbers.index(-1 if where == "CPU" else int(where.removeprefix("CUDA")))
    return devices


TARGET = ExportTarget(
    NAME, "attention and feed-forward parts of layers", "override_tensor.txt", read_units, write, parse
)
