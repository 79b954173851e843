"""MODEL -> Graph: a built-in workload, a `gdp-graph` file, or a function of the user's that returns a PyTorch model.

Graphs of workloads are kept in the user's cache directory under a name that changes with the code which makes them, so
a second run starts at once and without importing PyTorch.
"""

import contextlib
import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from gdp import files
from gdp.devices import suggest
from gdp.errors import InputError, UnevenBatchError
from gdp.graph import Graph
from gdp.microbatches import accumulated, check_count

if TYPE_CHECKING:
    from gdp.capture import Capture
    from gdp.measured_times import MeasuredTimes

FORMAT, VERSION = "gdp-captured", 1
OPTIMIZERS = ("adam", "sgd")


Build = Callable[[], tuple[Any, ...]]
"""Returns (module, args, kwargs)."""


@dataclass(frozen=True, eq=False)
class Model:
    """What MODEL stands for."""

    graph: Graph
    unknown_costs: Mapping[str, int]  # kind -> number of ops whose FLOPs were estimated from the size of their result
    is_captured: bool  # False: the graph was read from a `gdp-graph` file
    noise: float | None = None  # relative standard deviation of measured op times; None: not measured


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


ONE_BATCH = Microbatching()


def read_model(
    text: str, *, training: bool = True, optimizer: str = "adam", microbatching: Microbatching = ONE_BATCH
) -> Model:
    """The graph of `text`: a built-in workload's name, the path of a `gdp-graph` file, or `package.module:function`.

    The function, looked for from the current directory on, returns (module, example_inputs) or (module, args, kwargs);
    it runs under fake tensors, so nothing is allocated. The batch of a model is split evenly into micro-batches; a
    `gdp-graph` file is the step of one micro-batch. Raises InputError with the remedy for anything else.
    """
    model = _read_one(text, training, optimizer, microbatching.count)
    return replace(model, graph=microbatching.apply(model.graph))


def has_samples(text: str) -> bool:
    """Whether MODEL has a batch that can be split: a `gdp-graph` file has not."""
    return not _is_graph_file(text)


def read_part(text: str, num_parts: int) -> Graph:
    """The training step of a part of the batch of MODEL, one of so many equal ones; of a `gdp-graph` file all of it."""
    return _read_one(text, True, "adam", num_parts).graph


def _read_one(text: str, training: bool, optimizer: str, num_microbatches: int) -> Model:
    """The step of one of so many micro-batches."""
    check_optimizer(optimizer)
    if _is_graph_file(text):
        return Model(Graph.load(text), {}, is_captured=False)
    build = builder_of(text, num_microbatches)
    entry = None if ":" in text else _cache_entry(text, training, optimizer, num_microbatches)
    if entry is not None and entry.is_file():
        with contextlib.suppress(InputError):  # damaged: captured anew below
            return _read_entry(entry)
    made = _capture(build, text, training, optimizer)
    model = Model(made.graph, made.coverage.unknown, is_captured=True)
    if entry is not None:
        document = {
            "format": FORMAT,
            "version": VERSION,
            "graph": model.graph.to_document(),
            "unknown": dict(model.unknown_costs),
        }
        with contextlib.suppress(InputError):  # a cache that cannot be written costs time, no more
            files.write_json(entry, document)
    return model


def read_capture(text: str, *, training: bool = True, optimizer: str = "adam") -> "Capture":
    """As `read_model`, with the program that says what each op executes; InputError for a `gdp-graph` file."""
    check_optimizer(optimizer)
    return _capture(builder_of(text), text, training, optimizer)


def read_timed_model(
    text: str, times: "MeasuredTimes", device_kinds: Iterable[str], microbatching: Microbatching = ONE_BATCH
) -> Model:
    """As `read_model`, of a training step, with what is known of its ops on these kinds of devices."""
    from gdp.capture.signature import LIBRARY, signatures
    from gdp.measured_times import measured_noise, with_measured_times

    kinds = list(device_kinds)
    made = _capture(builder_of(text, microbatching.count), text, True, "adam")
    known = signatures(made.program)
    graph = with_measured_times(made.graph, known, times, kinds, LIBRARY)
    noise = measured_noise(known, times, kinds, LIBRARY)
    return Model(microbatching.apply(graph), made.coverage.unknown, is_captured=True, noise=noise)


def builder_of(text: str, num_microbatches: int = 1) -> Build:
    """What builds the model that `text` names, with example inputs, on whatever device is the default; with the inputs
    of the first of `num_microbatches`.

    InputError for a `gdp-graph` file, which has no model, and for what is unknown.
    """
    if _is_graph_file(text):
        raise InputError(f"{text}: a gdp-graph file does not say what its ops execute; name the model itself")
    if text.startswith("hf:"):
        raise InputError(
            f"{text}: this version reads no Transformers directories; "
            "write a function that returns (model, args, kwargs) and give it as module:function"
        )
    if text.endswith(".onnx"):
        raise InputError(f"{text}: this version reads no ONNX files; capture the PyTorch model as module:function")
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", text):
        return _first_microbatch(_user_function(text), text, num_microbatches)
    return _workload(text, num_microbatches)


def load(text: str, *, training: bool = True, optimizer: str = "adam", microbatches: int = 1) -> Graph:
    """The graph of MODEL alone; see `read_model`."""
    microbatching = Microbatching(microbatches)
    return read_model(text, training=training, optimizer=optimizer, microbatching=microbatching).graph


def _is_graph_file(text: str) -> bool:
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

    with contextlib.redirect_stdout(sys.stderr), _without_tracebacks():  # what a model prints is no part of our answer
        return capture_fn(build, name=name, training=training, optimizer=cast(Literal["adam", "sgd"], optimizer))


# The cache


def cache_directory() -> Path | None:
    """Where captured graphs are kept; it may be deleted at any time. None if there is no home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "gdp" / "graphs"
    except RuntimeError:
        return None


def _cache_entry(name: str, training: bool, optimizer: str, num_microbatches: int) -> Path | None:
    """The file of a workload's graph: its name has a hash of all that the graph depends on."""
    directory = cache_directory()
    if directory is None:
        return None
    digest = hashlib.sha256(
        repr((FORMAT, VERSION, name, training, optimizer, num_microbatches, version("torch"))).encode()
    )
    package = Path(__file__).parent
    for source in sorted([package / "graph.py", *package.glob("capture/*.py"), *package.glob("workloads/*.py")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return directory / f"{name.replace('/', '.')}-{digest.hexdigest()[:32]}.json.gz"


def _is_counts(value: object) -> bool:
    """a mapping from kinds to numbers"""
    return type(value) is dict and all(files.is_size(count) for count in value.values())


def _is_document(value: object) -> bool:
    """a gdp-graph document"""
    return type(value) is dict


_ENTRY_FIELDS = {"format": files.is_string, "version": files.is_size, "graph": _is_document, "unknown": _is_counts}


def _read_entry(path: Path) -> Model:
    content = files.require_header(files.read_json(path), FORMAT, VERSION)
    files.require_keys(content, "entry", _ENTRY_FIELDS, set(_ENTRY_FIELDS))
    return Model(Graph.from_document(content["graph"]), content["unknown"], is_captured=True)


# The user's functions


def _user_function(text: str) -> Build:
    """The user's function, its answer put in order as (module, args, kwargs), its errors as one line."""
    module_name, _, path = text.partition(":")
    with _explained(text, f"module {module_name} cannot be imported"), _importable_here():
        found: Any = import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise InputError(f"{text}: module {module_name} has no {path}; check the name")
        found = getattr(found, name)
    if not callable(found):
        kind = type(found).__name__
        raise InputError(f"{text}: is no function but {kind}; one that returns (module, example_inputs) is expected")

    def build() -> tuple[Any, ...]:
        with _explained(text, "the function failed"), _importable_here():
            return _module_and_inputs(found(), text)

    return build


def _module_and_inputs(answer: Any, text: str) -> tuple[Any, ...]:
    from torch import Tensor, nn

    if not isinstance(answer, tuple) or len(answer) not in (2, 3) or not isinstance(answer[0], nn.Module):
        kinds = ", ".join(type(item).__name__ for item in (answer if isinstance(answer, tuple) else (answer,)))
        raise InputError(f"{text}: returned {kinds}; (module, example_inputs) or (module, args, kwargs) is expected")
    inputs, kwargs = answer[1], answer[2] if len(answer) == 3 else {}
    if len(answer) == 2 and isinstance(inputs, Mapping):
        return answer[0], (), dict(inputs)
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, tuple | list) or not isinstance(kwargs, Mapping):
        raise InputError(
            f"{text}: inputs are {type(inputs).__name__} and {type(kwargs).__name__}; "
            "a tensor, a tuple or a dict of keyword inputs is expected"
        )
    return answer[0], tuple(inputs), dict(kwargs)


@contextlib.contextmanager
def _explained(text: str, what: str) -> Iterator[None]:
    """Whatever the user's code raises as one line with the last line of the exception."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        if type(error).__module__ == "torch._subclasses.fake_tensor":
            raise  # the capture knows what to do about these
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__
        raise InputError(f"{text}: {what} ({reason}); run it by itself to see more") from error


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


@contextlib.contextmanager
def _importable_here() -> Iterator[None]:
    """The current directory comes first where modules are looked for."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
