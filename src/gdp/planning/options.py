"""Options as they are typed on a command line and kept in plan files -> `Reading`, `Constraints`. An option is known by
its name with _ for -; one that is absent has its default."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdp.cluster import Cluster
from gdp.cluster.device import CUDA_GRAPHS, RUNTIMES, split_runtime
from gdp.cluster.quantities import parse_fraction, parse_size
from gdp.errors import InputError, prefixed, suggest
from gdp.graph.microbatches import check_count
from gdp.models.lora import Lora
from gdp.models.model import Reading, check_dtype, check_precision
from gdp.models.op_costs import OpCosts
from gdp.models.serving import Serving
from gdp.simulator.constraints import Constraints

READING = (
    *("microbatches", "inference", "optimizer", "precision", "dtype", "phase", "kv_cache", "dim", "op_costs"),
    *("batch_dim", "batch", "lora"),
)  # the options that say how MODEL is read
LIMITS = ("pin", "forbid", "max_memory", "reserve")  # those that limit placements


def reading_of(options: Mapping[str, Any]) -> Reading:
    """Returns how `options` say that MODEL is read. InputError for values that make no sense."""
    count = options.get("microbatches", 1)
    serving = Serving.parse(options.get("phase", "step"), options.get("kv_cache"))
    is_inference = options.get("inference", False) or serving.has_cache
    if is_inference and count > 1:
        option = "--phase" if serving.has_cache else "--inference"
        raise InputError(f"--microbatches: gradients are accumulated in training; leave out {option}")
    dtype, precision = options.get("dtype", ""), options.get("precision", "")
    try:
        check_dtype(dtype)
        check_precision(precision, dtype)
        check_count(count, "microbatches")
    except InputError as error:
        raise InputError(f"--{error}") from None
    op_costs = options.get("op_costs")
    update = options.get("optimizer", "adam"), count, _dims(options.get("dim") or ())
    costs = None if op_costs is None else OpCosts.load(op_costs)
    batch = options.get("batch_dim"), options.get("batch"), Lora.parse(options.get("lora", ""))
    return Reading(not is_inference, *update, costs, precision, dtype, serving, *batch)


def constraints_of(options: Mapping[str, Any], cluster: Cluster) -> Constraints:
    """Returns the limits that `options` set on `cluster`. InputError for devices that it does not have."""
    pins = [_rule(text, "--pin", "encoder.*", cluster.device_number, cluster) for text in options.get("pin") or ()]
    find, forbidden = cluster.devices_called, options.get("forbid") or ()
    forbid = [_rule(text, "--forbid", "aten.mm", find, cluster) for text in forbidden]
    limits = _max_memory(options.get("max_memory") or (), cluster)
    return Constraints(pins, forbid, limits, parse_fraction(options.get("reserve", "0%"), "--reserve"))


def in_directory(text: str, directory: str) -> str:
    """Returns the file `text` as it is found from `directory` on; any other text as it is."""
    file = split_runtime(text)[0]
    path = Path(directory) / file
    is_there = directory and Path(directory) != Path.cwd() and path.is_file()
    return f"{path}{text.removeprefix(file)}" if is_there else text


def _rule(text: str, option: str, example: str, find: Callable[[str], object], cluster: Cluster) -> tuple[str, str]:
    """Returns (regular expression, device) of `REGEX=DEVICE`, split at the last `=`."""
    pattern, equals, device = text.rpartition("=")
    if not equals or not pattern:
        raise InputError(
            f"{option} is {text!r}; REGEX=DEVICE is expected, such as '{example}={cluster.devices[0].name}'"
        )
    with prefixed(f"{option} {text}"):
        find(device)
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"{option} {text}: {pattern!r} is no regular expression ({error}); mend it") from None
    return pattern, device


def _dims(texts: Sequence[str]) -> dict[str, int]:
    """Returns the size by symbolic dimension of each `NAME=SIZE`."""
    dims: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not name or not re.fullmatch(r"[1-9][0-9]{0,8}", size):
            raise InputError(
                f"--dim is {text!r}; NAME=SIZE with a size from 1 to 999999999 is expected, such as batch=8"
            )
        if name in dims:
            raise InputError(f"--dim {text}: {name} has a size already; give each dimension one")
        dims[name] = int(size)
    return dims


def _max_memory(texts: Sequence[str], cluster: Cluster) -> dict[str, int]:
    """Returns the bytes by device of each `DEVICE=SIZE`."""
    limits: dict[str, int] = {}
    for text in texts:
        device, equals, size = text.rpartition("=")
        if not equals or not device:
            raise InputError(
                f"--max-memory is {text!r}; DEVICE=SIZE is expected, such as {cluster.devices[0].name}=12GiB"
            )
        with prefixed(f"--max-memory {text}"):
            cluster.device_number(device)
        if device in limits:
            raise InputError(f"--max-memory {text}: {device} has a limit already; give each device one")
        limits[device] = parse_size(size, f"--max-memory {device}")
    return limits


def run_by(devices: str, runtime: str | None, serving: Serving) -> str:
    """Returns DEVICES with the runtime that `--runtime` names behind them, or that servers have: they replay steps of
    decode from CUDA graphs. InputError for an unknown one."""
    if runtime is None:
        is_open = serving.phase == "decode" and devices and split_runtime(devices)[1] is None
        return f"{devices}:{CUDA_GRAPHS}" if is_open else devices
    if runtime not in RUNTIMES:
        raise InputError(f"--runtime is {runtime!r}; {suggest(runtime, RUNTIMES)}")
    return f"{split_runtime(devices)[0]}:{runtime}"
