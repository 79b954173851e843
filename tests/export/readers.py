"""Readers of exported files: the devices [U] of units, as the file has them."""

import json
import re
from collections.abc import Callable, Mapping

import numpy as np

from gdp.arrays import I64
from gdp.export.export_target import ExportUnits, gpu_numbers, is_cpu
from gdp.export.modules import enclosing
from gdp.simulator.problem import Problem


def read_devices(name: str, text: str, problem: Problem, units: ExportUnits) -> I64:
    """[U] Reads the file `text` of the target called `name`."""
    return np.array(_READERS[name](text, problem, units), np.int64)


def _device_map(text: str, problem: Problem, units: ExportUnits) -> list[int]:
    """A unit is on the device of its entry, or of the entry around it."""
    content = json.loads(text)
    by_name: dict[int | str, int] = {number: device for device, number in enumerate(gpu_numbers(problem))}
    by_name["cpu"] = int(np.argmax(is_cpu(problem)))
    devices = []
    for members in units.members:
        (entry,) = {content[path] for root in members for path in ("", *enclosing(root)) if path in content}
        devices.append(by_name[entry])
    return devices


def _stages(text: str, problem: Problem, units: ExportUnits) -> list[int]:
    content = json.loads(text)
    cuts = [unit for unit, members in enumerate(units.members) if members[0] in content["split_spec"]]
    assert len(cuts) == len(content["split_spec"])
    numbers = [problem.cluster.device_number(name) for name in content["devices"]]
    return [numbers[stage] for stage in np.searchsorted(cuts, np.arange(units.num_units), side="right")]


def _nodes(placed: Mapping[str, str], problem: Problem, units: ExportUnits) -> list[int]:
    """Names end with the number of a GPU, or are those of the CPU."""
    numbers = gpu_numbers(problem)
    found = [re.search(r"\d+$", placed[members[0]]) for members in units.members]
    return [numbers.index(int(number[0]) if number else -1) for number in found]


def _patterns(text: str, problem: Problem, units: ExportUnits) -> list[int]:
    """A unit is on the device of a tensor in it."""
    numbers, devices = gpu_numbers(problem), []
    rules = re.findall(r"^-ot '(.*)=(?:CPU|CUDA)(\d*)'$", text, flags=re.MULTILINE)
    for member, *_ in units.members:
        name = f"{member}.attn" if member.count(".") == 1 else member
        tensor = f"{name}_norm.weight" if name.startswith("blk.") else f"{name}.weight"
        devices.append(numbers.index(next(int(gpu or -1) for pattern, gpu in rules if re.search(pattern, tensor))))
    return devices


def _ranks(variable: str, sizes_of: Callable[[str], list[int]]) -> Callable[[str, Problem, ExportUnits], list[int]]:
    """Reads files of ranks; `sizes_of` reads the number of layers of each rank from the value of `variable`."""

    def read(text: str, problem: Problem, units: ExportUnits) -> list[int]:
        values = dict(
            line.removeprefix("export ").split("=", 1) for line in text.splitlines() if not line.startswith("#")
        )
        numbers = gpu_numbers(problem)
        ranks = [numbers.index(int(number)) for number in values["CUDA_VISIBLE_DEVICES"].split(",")]
        by_layer = np.repeat(ranks, sizes_of(values[variable]))
        ends = np.cumsum([len(layers) for layers in units.members])
        assert len(by_layer) == ends[-1]
        return [int(by_layer[end - 1]) for end in ends]

    return read


def _as_variables(text: str) -> str:
    """Returns the lines of a YAML file, and the variable in its first one, as variables."""
    first, *lines = text.splitlines()
    return "\n".join([first.split()[1], *(line.replace(": ", "=") for line in lines)])


def _sizes_of_megatron(stages: str) -> list[int]:
    unrolled = re.sub(r"(.)\*(\d+)", lambda run: run[1] * int(run[2]), stages.strip("'"))
    return list(map(len, unrolled.split("|")))


_READERS: Mapping[str, Callable[[str, Problem, ExportUnits], list[int]]] = {
    "hf-device-map": _device_map,
    "torch-pipelining": _stages,
    "onnxruntime": lambda text, *about: _nodes(json.loads(text)["annotations"], *about),
    "openvino": lambda text, *about: _nodes(json.loads(text), *about),
    "llama-cpp": _patterns,
    "vllm": _ranks("VLLM_PP_LAYER_PARTITION", lambda sizes: list(map(int, sizes.split(",")))),
    "sglang": _ranks("SGLANG_PP_LAYER_PARTITION", lambda sizes: list(map(int, sizes.split(",")))),
    "tensorrt-llm": lambda text, *about: _ranks("pp_partition", json.loads)(_as_variables(text), *about),
    "megatron": _ranks("PIPELINE_LAYOUT", _sizes_of_megatron),
}
