"""MODEL -> Graph: a built-in workload, a `gdp-graph` or ONNX file, a Transformers directory, or a user's function."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gdp.errors import InputError, UnevenBatchError, suggest
from gdp.graph import Graph
from gdp.models import graph_cache, user_function
from gdp.models.model import HUGGING_FACE, Microbatching, Model, Reading
from gdp.models.user_function import Build, Example, JaxFunction

if TYPE_CHECKING:
    from gdp.models.measured_times import MeasuredTimes
    from gdp.models.pytorch import Capture


def read_model(text: str, reading: Reading | None = None) -> Model:
    """Returns the graph of `text`: a built-in workload, a `gdp-graph` or `.onnx` file, `hf:DIR` or
    `package.module:function`.

    The function, imported from the current directory on, returns (module, example_inputs) or (module, args, kwargs). It
    runs under fake tensors, so nothing is allocated. A function of JAX arrays in place of the module is captured as it
    is. The batch of a model is split evenly into micro-batches; a file is the step of one micro-batch. InputError, with
    the remedy, for anything else.
    """
    reading = reading or Reading()
    model = reading.finish(_read_one(text, reading, reading.microbatching.count))
    return replace(model, graph=reading.microbatching.apply(model.graph))


def has_samples(text: str) -> bool:
    """Returns whether MODEL has a batch that can be split; a file has none."""
    return not (_is_graph_file(text) or _is_onnx(text))


def read_part(text: str, reading: Reading, num_parts: int) -> Graph:
    """Reads MODEL with 1 / `num_parts` of its batch (a file: whole)."""
    return reading.finish(_read_one(text, reading, num_parts)).graph


def _read_one(text: str, reading: Reading, num_microbatches: int) -> Model:
    """Reads the step of one of `num_microbatches` micro-batches."""
    if reading.dims and not _is_onnx(text):
        raise InputError(f"--dim: {text} has no symbolic dimensions; they are those of .onnx files")
    if _is_graph_file(text):
        _check_update(reading, f"{text} is a gdp-graph file, whose updates are in it")
        return Model(Graph.load(text), {}, is_captured=False)
    if _is_onnx(text):
        _check_update(reading, f"{text} is an ONNX file, which is inference")
        return _read_onnx(text, reading.dims)
    entry = graph_cache.model_entry(text, reading, num_microbatches)
    if (model := graph_cache.read(entry)) is None:
        answer = _capture(_builder_of(text, num_microbatches, reading.training), text, reading)
        if isinstance(answer, JaxFunction):
            return _read_jax(text, answer, reading, num_microbatches)
        model = Model(answer.graph, answer.coverage.unknown, is_captured=True, notes=_notes(text) + answer.notes)
        graph_cache.write(entry, model)
    return model


def _check_update(reading: Reading, reason: str) -> None:
    """Raises InputError, with the reason, if an optimizer is asked for that MODEL does not take."""
    if reading.changes_update:
        raise InputError(f"{reading.optimizer_option}: {reason}; leave it out")


def _notes(text: str) -> tuple[str, ...]:
    """Returns the differences between a model and its source, a sentence each."""
    if not text.startswith(HUGGING_FACE):
        return ()
    from gdp.models.hugging_face import build

    return build.notes(text)


def _read_jax(text: str, function: JaxFunction, reading: Reading, num_microbatches: int) -> Model:
    """Reads the step of a JAX function as it is; InputError for options that would change it."""
    if num_microbatches > 1:
        raise UnevenBatchError(
            f"--microbatches: {text} is a JAX function, which is not split; gdp capture the step of one micro-batch, "
            "and give that file"
        )
    _check_update(reading, f"{text} is a JAX function, which has its optimizer in it or none")
    with user_function.printing_to_stderr():
        captured = function.capture()
    has_gradients = not {"backward", "update"}.isdisjoint(captured.graph.phases)
    if has_gradients and not reading.training:
        raise InputError(
            f"--inference: {text} is a JAX function that takes gradients, captured as it is; name its forward pass"
        )
    notes = list(captured.notes)
    if reading.training and not has_gradients:
        notes.insert(0, f"{text} is a JAX function without gradients, captured as it is: a forward pass")
    return Model(captured.graph, captured.coverage.unknown, is_captured=True, notes=tuple(notes))


def _read_onnx(text: str, dims: Mapping[str, int]) -> Model:
    path = Path(text)
    entry = graph_cache.onnx_entry(path, dims)
    if (model := graph_cache.read(entry)) is None:
        from gdp.models.onnx.model import read_onnx

        parsed = read_onnx(path, dims)
        model = Model(parsed.graph, parsed.unknown, is_captured=False, notes=parsed.notes)
        if parsed.is_alone:
            graph_cache.write(entry, model)
    return model


def read_capture(text: str, reading: Reading | None = None) -> "Capture":
    """Returns the graph of `text` with the program that executes its ops; InputError for a file."""
    reading = reading or Reading()
    return _capture(builder_of(text, training=reading.training), text, reading)


def read_timed_model(text: str, times: "MeasuredTimes", device_kinds: Iterable[str], reading: Reading) -> Model:
    """Reads the model `text` with the known times of its ops on these kinds of devices; see `read_model`."""
    from gdp.models.measured_times import measured_noise, with_measured_times
    from gdp.models.pytorch.signature import LIBRARY, signatures

    kinds = list(device_kinds)
    build = builder_of(text, reading.microbatching.count, training=reading.training)
    captured = _capture(build, text, reading)
    op_signatures = signatures(captured.program)
    graph = with_measured_times(captured.graph, op_signatures, times, kinds, LIBRARY)
    noise = measured_noise(op_signatures, times, kinds, LIBRARY)
    model = reading.finish(Model(graph, captured.coverage.unknown, is_captured=True, noise=noise))
    return replace(model, graph=reading.microbatching.apply(model.graph))


def builder_of(text: str, num_microbatches: int = 1, *, training: bool = True) -> Build:
    """Returns a function that builds the PyTorch model `text`, with example inputs, on the default device.

    The inputs are those of the first of `num_microbatches`; in `training`, those of a Transformers model have labels.
    InputError for a file, which has no model, for unknown names and, when it builds, for a JAX function.
    """
    return user_function.pytorch_only(_builder_of(text, num_microbatches, training), text)


def _builder_of(text: str, num_microbatches: int, training: bool) -> Callable[[], Example | JaxFunction]:
    if _is_graph_file(text):
        raise InputError(f"{text}: a gdp-graph file does not say what its ops execute; name the model itself")
    if _is_onnx(text):
        raise InputError(f"{text}: an ONNX file is placed, not executed; name the PyTorch model as module:function")
    if text.startswith(HUGGING_FACE):
        from gdp.models.hugging_face import build

        return _first_microbatch(build.builder(text, training=training), text, num_microbatches)
    if re.fullmatch(user_function.PATTERN, text):
        return _first_microbatch(user_function.read_user_function(text), text, num_microbatches)
    return _workload(text, num_microbatches)


def load(
    text: str,
    *,
    training: bool = True,
    optimizer: str = "adam",
    master_weights: bool = False,
    microbatches: int = 1,
    dims: Mapping[str, int] = MappingProxyType({}),
) -> Graph:
    """Returns the graph of MODEL alone; see `read_model`."""
    microbatching = Microbatching(microbatches)
    return read_model(text, Reading(training, optimizer, microbatching, dims, master_weights=master_weights)).graph


def _is_onnx(text: str) -> bool:
    return text.endswith(".onnx") and not text.startswith(HUGGING_FACE)


def _is_graph_file(text: str) -> bool:
    if text.startswith(HUGGING_FACE):
        return False
    return (os.path.isfile(text) and not text.endswith(".onnx")) or text.endswith((".json", ".gz"))


def _workload(name: str, num_microbatches: int) -> Build:
    from gdp.models import workloads

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
    """Returns the samples of a micro-batch. InputError if micro-batches would differ in size."""
    if batch_size % num_microbatches:
        counts = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        near = sorted(sorted(counts, key=lambda count: abs(count - num_microbatches))[:4])
        raise UnevenBatchError(
            f"{name}: a batch of {batch_size} has no {num_microbatches} equal micro-batches; "
            f"take {', '.join(map(str, near))}"
        )
    return batch_size // num_microbatches


def _first_microbatch(
    build: Callable[[], Example | JaxFunction], name: str, num_microbatches: int
) -> Callable[[], Example | JaxFunction]:
    """Returns `build` with the first part of each input tensor that has the first input tensor's first dimension."""
    if num_microbatches == 1:
        return build

    def build_part() -> Example | JaxFunction:
        from torch import Tensor, nn
        from torch.utils._pytree import tree_leaves, tree_map

        from gdp.models.pytorch.own_step import has_own_step

        answer = build()
        if isinstance(answer, JaxFunction):
            return answer
        module, args, kwargs = answer
        if not isinstance(module, nn.Module) or has_own_step(module):
            raise UnevenBatchError(
                f"--microbatches: {name} is a training step of your own, which is not split; give its module with "
                "--optimizer"
            )
        sizes = [leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        if not sizes:
            raise InputError(f"{name}: no input is a tensor with a batch dimension; micro-batches need one")
        part = _even_part(sizes[0], num_microbatches, name)

        def split(leaf: Any) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == sizes[0]
            return leaf[:part].clone() if is_batch else leaf

        return module, tree_map(split, args), tree_map(split, kwargs)

    return build_part


def _capture(build: Callable[[], Any], name: str, reading: Reading) -> "Capture | Any":
    """Returns the captured step, or the answer of `build` if that is no PyTorch model."""
    from gdp.models.pytorch.step import StepOptions, capture_or_answer

    with user_function.printing_to_stderr(), _without_tracebacks():
        options = StepOptions(reading.training, reading.optimizer, master_weights=reading.master_weights)
        return capture_or_answer(build, name, options)


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Silences the traceback that PyTorch logs, besides raising, when an operator fails on fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
