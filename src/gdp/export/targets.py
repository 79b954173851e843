"""The targets by name."""

from gdp.devices import suggest
from gdp.errors import InputError
from gdp.export import hf_device_map, llama_cpp, megatron, onnxruntime, openvino, torch_pipelining, vllm
from gdp.export.target import Target

_ALL = (
    hf_device_map.TARGET, torch_pipelining.TARGET, onnxruntime.TARGET, openvino.TARGET, llama_cpp.TARGET, vllm.TARGET,
    megatron.TARGET,
)  # fmt: skip
TARGETS = {target.name: target for target in _ALL}
_ALIASES = {"device-map": hf_device_map.NAME, "llama.cpp": llama_cpp.NAME}


def find_target(name: str) -> Target:
    """The target called `name`, `hf_device_map` and the like as well. InputError with near names for an unknown one."""
    written = name.replace("_", "-").lower()
    target = TARGETS.get(_ALIASES.get(written, written))
    if target is None:
        raise InputError(f"target {name!r} is unknown; {suggest(written, list(TARGETS))}")
    return target
