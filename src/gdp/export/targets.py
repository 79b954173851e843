"""The targets by name."""

from gdp.devices import suggest
from gdp.errors import InputError
from gdp.export import hf_device_map, torch_pipelining
from gdp.export.target import Target

TARGETS = {target.name: target for target in (hf_device_map.TARGET, torch_pipelining.TARGET)}


def find_target(name: str) -> Target:
    """The target called `name`. InputError with near names for an unknown one."""
    target = TARGETS.get(name.replace("_", "-").lower())
    if target is None:
        raise InputError(f"target {name!r} is unknown; {suggest(name, list(TARGETS))}")
    return target
