"""The targets by name."""

from gdp.errors import InputError, suggest
from gdp.export import hf_device_map, llama_cpp, megatron, onnxruntime, openvino, torch_pipelining, vllm
from gdp.export.target import ExportTarget

_MODULES = (hf_device_map, torch_pipelining, onnxruntime, openvino, llama_cpp, vllm, megatron)
TARGETS: dict[str, ExportTarget] = {module.NAME: module.TARGET for module in _MODULES}
_ALIASES = {"device-map": hf_device_map.NAME, "llama.cpp": llama_cpp.NAME}


def find_target(name: str) -> ExportTarget:
    """Returns the target called `name`, also with underscores; InputError with near names for an unknown one."""
    written = name.replace("_", "-").lower()
    target = TARGETS.get(_ALIASES.get(written, written))
    if target is None:
        raise InputError(f"target {name!r} is unknown; {suggest(written, list(TARGETS))}")
    return target
