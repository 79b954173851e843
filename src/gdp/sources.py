"""MODEL -> Graph: a built-in workload, a `gdp-graph` or ONNX file, a Transformers directory, or a user's function.

Graphs of what can be known to be unchanged are kept in the user's cache under a name that changes with it and with the
code that captures, so a second run starts at once and without importing PyTorch.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from gdp import cache, files, user_functions
from gdp.devices import suggest
from gdp.errors import InputError, UnevenBatchError
from gdp.graph import Graph
from gdp.microbatches import accumulated, check_count
from gdp.user_functions import Build, JaxFunctionError

if TYPE_CHECKING:
    from gdp.capture import Capture
    from gdp.measured_times import MeasuredTimes
    from gdp.op_costs import OpCosts

FORMAT, VERSION = "gdp-captured", 3
OPTIMIZERS = ("adam", "sgd")


@dataclass(frozen=True, eq=False)
class Model:
    """What MODEL stands for."""

    graph: Graph
    unknown_costs: Mapping[str, int]  # kind -> number of ops whose FLOPs were estimated from the size of their result
    is_captured: bool  # False: the graph was read from a `gdp-graph` file
    noise: float | None = None  # relative standard deviation of measured op times; None: not measured
    notes: tuple[str, ...] = ()  # what the reader of MODEL decided by itself


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How many micro-batches a step accumulates gradients over, and whether the replicas of an op may be apart."""

    count: int = 1
    free_replicas: bool = False

    def __post_init__(self) -> None:
        check_count(self.count, "microbatches")

    def apply(self, graph: Graph) -> Graph:
        """The step of all micro-batches, of one of which `graph` is the step."""
        return accumulated(graph, self.count, free_replicas=self.free_replicas)


@dataclass(frozen=True, slots=True)
class Reading:
    """How MODEL becomes a graph."""

    training: bool = True  # False: the forward pass alone
    optimizer: str = "adam"
    microbatching: Microbatching = field(default_factory=Microbatching)
    dims: Mapping[str, int] = field(default_factory=dict)  # of an ONNX file, by the name of a symbolic dimension
    op_costs: "OpCosts | None" = None  # what the user knows of ops

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)

    def finish(self, model: Model) -> Model:
        """The step of one micro-batch, with the costs that the user gives."""
        costs = self.op_costs
        if costs is None:
            return model
        unknown = costs.still_unknown(model.graph, model.unknown_costs)
        return replace(model, graph=costs.apply(model.graph), unknown_costs=unknown)


def read_model(text: str, reading: Reading | None = None) -> Model:
    """The graph of `text`: a built-in workload's name, the path of a `gdp-graph` or `.onnx` file, `hf:DIR` or
    `package.module:function`.

    The function, looked for from the current directory on, returns (module, example_inputs) or (module, args, kwargs);
    it runs under fake tensors, so nothing is allocated. In place of the module there may be a function of JAX arrays,
    which is captured as it is. The batch of a model is split evenly into micro-batches; a
    file is the step of one micro-batch. Raises InputError with the remedy for anything else.
    """
    reading = reading or Reading()
    model = reading.finish(_read_one(text, reading, reading.microbatching.count))
    return replace(model, graph=reading.microbatching.apply(model.graph))


def has_samples(text: str) -> bool:
    """Whether MODEL has a batch that can be split: a file has not."""
    return not (_is_graph_file(text) or _is_onnx(text))


def read_part(text: str, reading: Reading, num_parts: int) -> Graph:
    """The step of a part of the batch of MODEL, one of so many equal ones; of a file all of it."""
    return reading.finish(_read_one(text, reading, num_parts)).graph


def _read_one(text: str, reading: Reading, num_microbatches: int) -> Model:
    """The step of one of so many micro-batches."""
    if reading.dims and not _is_onnx(text):
        raise InputError(f"--dim: {text} has no symbolic dimensions; they are those of .onnx files")
    if _is_graph_file(text):
        return Model(Graph.load(text), {}, is_captured=False)
    if _is_onnx(text):
        return _read_onnx(text, reading.dims)
    entry = _cache_entry(text, reading, num_microbatches)
    if (model := _read_entry(entry)) is None:
        build = builder_of(text, num_microbatches, training=reading.training)
        try:
            made = _capture(build, text, reading.training, reading.optimizer)
        except JaxFunctionError as found:
            return _read_jax(text, found, reading, num_microbatches)
        model = Model(made.graph, made.coverage.unknown, is_captured=True, notes=_notes(text))
        _write_entry(entry, model)
    return model


def _notes(text: str) -> tuple[str, ...]:
    """What a model is not as its source has it."""
    if not text.startswith(_HUGGING_FACE):
        return ()
    from gdp.capture import huggingface

    return huggingface.notes(text)


def _read_jax(text: str, found: JaxFunctionError, reading: Reading, num_microbatches: int) -> Model:
    """The step that a JAX function is by itself; InputError for options that would make another one of it."""
    if num_microbatches > 1:
        raise UnevenBatchError(
            f"--microbatches: {text} is a JAX function, which is not split; gdp capture the step of one micro-batch, "
            "and give that file"
        )
    if reading.optimizer != OPTIMIZERS[0]:
        raise InputError(f"--optimizer: {text} is a JAX function, which has its optimizer in it or none; leave it out")
    with user_functions.printing_to_stderr():
        made = found.capture()
    has_gradients = not {"backward", "update"}.isdisjoint(made.graph.phases)
    if has_gradients and not reading.training:
        raise InputError(
            f"--inference: {text} is a JAX function that takes gradients, captured as it is; name its forward pass"
        )
    notes = list(made.notes)
    if reading.training and not has_gradients:
        notes.insert(0, f"{text} is a JAX function without gradients, captured as it is: a forward pass")
    return Model(made.graph, made.coverage.unknown, is_captured=True, notes=tuple(notes))


def _read_onnx(text: str, dims: Mapping[str, int]) -> Model:
    path = Path(text)
    code = _package().glob("capture/onnx*.py")
    depends_on = (FORMAT, VERSION, files.digest(path), sorted(dims.items()), _installed("onnx"))
    entry = cache.entry("graphs", path.name, depends_on, [_package() / "graph.py", *code])
    if (model := _read_entry(entry)) is None:
        from gdp.capture.onnx_model import read_onnx

        made = read_onnx(path, dims)
        model = Model(made.graph, made.unknown, is_captured=False, notes=made.notes)
        if made.is_alone:
            _write_entry(entry, model)
    return model


def read_capture(text: str, reading: Reading | None = None) -> "Capture":
    """As `read_model`, with the program that says what each op executes; InputError for a file."""
    reading = reading or Reading()
    build = builder_of(text, training=reading.training)
    return _capture(build, text, reading.training, reading.optimizer)


def read_timed_model(text: str, times: "MeasuredTimes", device_kinds: Iterable[str], reading: Reading) -> Model:
    """As `read_model`, with what is known of its ops on these kinds of devices."""
    from gdp.capture.signature import LIBRARY, signatures
    from gdp.measured_times import measured_noise, with_measured_times

    kinds = list(device_kinds)
    build = builder_of(text, reading.microbatching.count, training=reading.training)
    made = _capture(build, text, reading.training, reading.optimizer)
    known = signatures(made.program)
    graph = with_measured_times(made.graph, known, times, kinds, LIBRARY)
    noise = measured_noise(known, times, kinds, LIBRARY)
    model = reading.finish(Model(graph, made.coverage.unknown, is_captured=True, noise=noise))
    return replace(model, graph=reading.microbatching.apply(model.graph))


def builder_of(text: str, num_microbatches: int = 1, *, training: bool = True) -> Build:
    """What builds the model that `text` names, with example inputs, on whatever device is the default; with the inputs
    of the first of `num_microbatches`. Labels are among the inputs of a Transformers model for `training`.

    InputError for a file, which has no model, and for what is unknown.
    """
    if _is_graph_file(text):
        raise InputError(f"{text}: a gdp-graph file does not say what its ops execute; name the model itself")
    if _is_onnx(text):
        raise InputError(f"{text}: an ONNX file is placed, not executed; name the PyTorch model as module:function")
    if text.startswith(_HUGGING_FACE):
        from gdp.capture import huggingface

        return _first_microbatch(huggingface.builder(text, training=training), text, num_microbatches)
    if re.fullmatch(user_functions.PATTERN, text):
        return _first_microbatch(user_functions.user_function(text), text, num_microbatches)
    return _workload(text, num_microbatches)


def load(
    text: str,
    *,
    training: bool = True,
    optimizer: str = "adam",
    microbatches: int = 1,
    dims: Mapping[str, int] = MappingProxyType({}),
) -> Graph:
    """The graph of MODEL alone; see `read_model`."""
    return read_model(text, Reading(training, optimizer, Microbatching(microbatches), dims)).graph


_HUGGING_FACE = "hf:"


def _is_onnx(text: str) -> bool:
    return text.endswith(".onnx") and not text.startswith(_HUGGING_FACE)


def _is_graph_file(text: str) -> bool:
    if text.startswith(_HUGGING_FACE):
        return False
    return (os.path.isfile(text) and not text.endswith(".onnx")) or text.endswith((".json", ".gz"))


def check_optimizer(optimizer: str) -> None:
    """InputError for one that captures do not know."""
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer is {optimizer!r}; one of {', '.join(OPTIMIZERS)} is expected")


def _workload(name: str, num_microbatches: int) -> Build:
    from gdp import workloads

    workload = workloads.find(name)
    if workload is not None:
        return partial(workload.build, _even_part(workload.batch_size, num_microbatches, name))
    if os.path.isdir(name):
        raise InputError(f"{name}: is a directory; name a gdp-graph file")
    if name.partition("/")[0] in workloads.family_names():
        raise InputError(f"model {name!r}: no variant of that name; `gdp workloads --variants` lists them")
    if os.sep in name:
        raise InputError(f"{name}: no such file; check the path")
    raise InputError(
        f"model {name!r}: no built-in workload, gdp-graph file (.json, .json.gz) or module:function; "
        f"{suggest(name, workloads.names())}"
    )


def _even_part(batch_size: int, num_microbatches: int, name: str) -> int:
    """The samples of a micro-batch. InputError if they would not all have as many."""
    if batch_size % num_microbatches:
        counts = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        near = sorted(sorted(counts, key=lambda count: abs(count - num_microbatches))[:4])
        raise UnevenBatchError(
            f"{name}: a batch of {batch_size} has no {num_microbatches} equal micro-batches; "
            f"take {', '.join(map(str, near))}"
        )
    return batch_size // num_microbatches


def _first_microbatch(build: Build, name: str, num_microbatches: int) -> Build:
    """`build` with the first part of its inputs: of every tensor whose first dimension is that of the first tensor."""
    if num_microbatches == 1:
        return build

    def build_part() -> tuple[Any, ...]:
        from torch import Tensor
        from torch.utils._pytree import tree_leaves, tree_map

        module, args, kwargs = build()
        sizes = [leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        if not sizes:
            raise InputError(f"{name}: no input is a tensor with a batch dimension; micro-batches need one")
        part = _even_part(sizes[0], num_microbatches, name)

        def split(leaf: Any) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == sizes[0]
            return leaf[:part].clone() if is_batch else leaf

        return module, tree_map(split, args), tree_map(split, kwargs)

    return build_part


def _capture(build: Build, name: str, training: bool, optimizer: str) -> "Capture":
    from gdp.capture import capture_fn

    with user_functions.printing_to_stderr(), _without_tracebacks():
        return capture_fn(build, name=name, training=training, optimizer=cast(Literal["adam", "sgd"], optimizer))


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """PyTorch logs a traceback when an operator fails on fake tensors, besides raising: one line says it all."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# The cache


def _package() -> Path:
    return Path(__file__).parent


def _cache_entry(text: str, reading: Reading, num_microbatches: int) -> Path | None:
    """The file of the graph of a workload or a Transformers directory; None for a function, which may have changed, and
    where the caller has registered FLOPs, which are functions too."""
    formulas = sys.modules.get("gdp.capture.flops")
    if formulas is not None and formulas.has_registered():
        return None
    known: tuple[object, ...] = ()
    if text.startswith(_HUGGING_FACE):
        config = Path(text.removeprefix(_HUGGING_FACE).partition("?")[0]) / "config.json"
        if not os.path.isfile(config):  # unreadable, a name too long: the reader says so
            return None
        known = (files.read_bytes(config), *map(_installed, ("transformers", "diffusers")))
    elif ":" in text:
        return None
    package = _package()
    code = [package / "graph.py", *package.glob("capture/*.py"), *package.glob("workloads/*.py")]
    depends_on = (FORMAT, VERSION, text, known, reading.training, reading.optimizer, num_microbatches, version("torch"))
    return cache.entry("graphs", text, depends_on, code)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _is_counts(value: object) -> bool:
    """a mapping from kinds to numbers"""
    return type(value) is dict and all(files.is_size(count) for count in value.values())


def _read_entry(path: Path | None) -> Model | None:
    content = cache.read(path, FORMAT, VERSION)
    if content is None or not _is_counts(content.get("unknown")):
        return None
    with contextlib.suppress(InputError, KeyError, TypeError, ValueError):
        graph = Graph.from_columns(content["graph"])
        notes = tuple(map(str, content.get("notes", ())))
        return Model(graph, content["unknown"], is_captured=bool(content.get("captured")), notes=notes)
    return None


def _write_entry(path: Path | None, model: Model) -> None:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "graph": model.graph.to_columns(),
        "unknown": dict(model.unknown_costs),
        "captured": model.is_captured,
        "notes": list(model.notes),
    }
    cache.write(path, document)
