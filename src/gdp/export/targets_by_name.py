"""The targets by name."""

import contextlib

from gdp.arrays import I64
from gdp.errors import InputError, suggest
from gdp.export import hf_device_map, llama_cpp, megatron, onnxruntime, openvino, servers, torch_pipelining
from gdp.export.export_target import ExportTarget, is_cpu
from gdp.export.layouts import megatron_lm, torch_fsdp, torchtitan, transformers_tp
from gdp.export.layouts.target import LayoutTarget
from gdp.simulator.problem import Problem

_MODULES = (hf_device_map, torch_pipelining, onnxruntime, openvino, llama_cpp, megatron)
TARGETS: dict[str, ExportTarget] = {
    target.name: target for target in (*(module.TARGET for module in _MODULES), *servers.TARGETS)
}
LAYOUT_TARGETS: dict[str, LayoutTarget] = {
    module.NAME: module.TARGET for module in (torch_fsdp, torchtitan, megatron_lm, transformers_tp)
}
_ALIASES = {"device-map": hf_device_map.NAME, "accelerate": hf_device_map.NAME, "llama.cpp": llama_cpp.NAME}
_ALIASES |= dict.fromkeys(("trtllm", "trt-llm", "tensorrtllm"), servers.TENSORRT_LLM.name)


def find_target(name: str, *, context: int | None = None, split_layers: bool = False) -> ExportTarget:
    """Returns the target called `name`, also with underscores; InputError with near names for an unknown one. `context`
    (--ctx) and `split_layers` are options of llama-cpp; InputError for any other target."""
    written = name.replace("_", "-").lower()
    target = TARGETS.get(_ALIASES.get(written, written))
    if target is None and written in LAYOUT_TARGETS:
        raise InputError(f"{written}: takes layouts; place with --parallel, then export the plan")
    if target is None:
        raise InputError(
            f"target {name!r} is unknown; {suggest(written, list(dict.fromkeys([*TARGETS, *LAYOUT_TARGETS])))}"
        )
    if context is None and not split_layers:
        return target
    if target is not llama_cpp.TARGET:
        option = "--split-layers" if context is None else "--ctx"
        raise InputError(f"{option}: is for {llama_cpp.NAME}, not for {target.name}; leave it out")
    return llama_cpp.LlamaCpp(context, split_layers).target()


def serving_target(problem: Problem) -> ExportTarget | None:
    """Returns the tool for servers that can express the best plans of a decoder; None where none can run it. vLLM cuts
    layers over groups of GPUs; llama.cpp may leave feed-forward parts, experts above all, to a CPU."""
    is_on_groups = any(device.group for device in problem.cluster.devices)
    in_parts, whole = (llama_cpp.LlamaCpp(split_layers=are_split).target() for are_split in (True, False))
    vllm = servers.TARGETS[0]
    tools: list[ExportTarget] = [in_parts] if is_cpu(problem).any() else [vllm, whole]
    for target in (vllm,) if is_on_groups else (*tools, hf_device_map.TARGET):
        with contextlib.suppress(InputError):
            target.read_units(problem)
            return target
    return None


def server_units(problem: Problem) -> I64 | None:
    """Returns the unit [N] that each op is in where servers run a decoder; None where none can run it."""
    target = serving_target(problem)
    return None if target is None else target.read_units(problem).index


def find_layout_target(name: str, *, is_cut: bool) -> LayoutTarget | None:
    """Returns the target called `name` for a plan that is cut (`is_cut`); None if this is for other targets. InputError
    for a plan without a layout where the tool needs one."""
    target = LAYOUT_TARGETS.get(name.replace("_", "-").lower())
    if target is None or (not is_cut and target is megatron_lm.TARGET):
        return None
    if not is_cut:
        raise InputError(
            f"{target.name}: the plan places the ops of one copy of the model, and {target.name} takes a layout; "
            "place with --parallel, such as data=2"
        )
    return target
