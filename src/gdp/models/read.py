"""MODEL -> Graph: a built-in workload, a `gdp-graph` or ONNX file, a Transformers directory, or a user's function."""

import ast
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
from gdp.models.model import GGUF, HUGGING_FACE, Microbatching, Model, Reading, check_dtype, even_part
from gdp.models.user_function import Build, Example, JaxFunction

if TYPE_CHECKING:
    from gdp.models.measured_times import MeasuredTimes
    from gdp.models.pytorch import Capture


_NO_PARTS = 2**40  # more than any batch has samples


def read_model(text: str, reading: Reading | None = None) -> Model:
    """Returns the graph of `text`: a built-in workload, a `gdp-graph` or `.onnx` file, `hf:DIR` or
    `package.module:function`.

    The function, imported from the current directory on, returns (module, example_inputs) or (module, args, kwargs). It
    runs under fake tensors, so nothing is allocated. A function of JAX arrays in place of the module is captured as it
    is. The batch of a model is split evenly into micro-batches; a file is the step of one micro-batch. InputError, with
    the remedy, for anything else.
    """
    text = with_prefix(text)
    reading = reading or Reading()
    model = reading.finish(_read_one(text, reading, reading.microbatching.count))
    return replace(model, graph=reading.microbatching.apply(model.graph))


def with_prefix(text: str) -> str:
    """Returns MODEL with the prefix of Transformers models if it is a `.gguf` file, which is read as one."""
    return f"{HUGGING_FACE}{text}" if re.fullmatch(rf".*{re.escape(GGUF)}(\?.*)?", text, re.DOTALL) else text


def check_runnable(text: str, verb: str) -> None:
    """Raises InputError for a MODEL that is placed only: an ONNX file, or a model with quantised weights."""
    text = with_prefix(text)
    if _is_onnx(text):
        raise InputError(f"{text}: an ONNX file is placed, not {verb}; name the PyTorch model as module:function")
    if text.startswith(HUGGING_FACE):
        from gdp.models.hugging_face import build

        if build.has_quantised_weights(text):
            raise InputError(
                f"{text}: has quantised weights; such a model is placed, not {verb}: add ?weights=none for its dtype"
            )


def has_samples(text: str) -> bool:
    """Returns whether MODEL has a batch that can be split; a file has none."""
    return not (_is_graph_file(text) or _is_onnx(text))


def read_part(text: str, reading: Reading, num_parts: int) -> Graph:
    """Reads MODEL with 1 / `num_parts` of its batch (a file: whole)."""
    return read_part_model(text, reading, num_parts).graph


def read_part_model(text: str, reading: Reading, num_parts: int) -> Model:
    """Reads MODEL with 1 / `num_parts` of its batch (a file: whole), with what is known of its costs."""
    return reading.finish(_read_one(with_prefix(text), reading, num_parts))


def is_kept(text: str, reading: Reading, num_parts: int) -> bool:
    """Returns whether 1 / `num_parts` of the batch of MODEL was captured before, and need not be again."""
    entry = graph_cache.model_entry(with_prefix(text), reading, num_parts)
    return entry is not None and entry.is_file()


def batch_size(text: str, reading: Reading) -> int | None:
    """Returns the number of samples in the batch of MODEL; None where it cannot be split."""
    if not has_samples(text) or reading.serving.has_cache:
        return None
    try:
        read_part(text, reading, _NO_PARTS)  # builds the model, and goes no further
    except UnevenBatchError as error:
        return error.batch_size
    return None


def _read_one(text: str, reading: Reading, num_microbatches: int) -> Model:
    """Reads the step of one of `num_microbatches` micro-batches."""
    _check_phase(text, reading)
    _check_no_python_file(text)
    if reading.dims and not _is_onnx(text):
        raise InputError(f"--dim: {text} has no symbolic dimensions; they are those of .onnx files")
    if _is_graph_file(text):
        _check_update(reading, f"{text} is a gdp-graph file, whose updates are in it")
        if reading.dtype:
            raise InputError(f"--dtype: {text} is a graph, whose ops have their types; capture its model with --dtype")
        return Model(Graph.load(text), {}, is_captured=False)
    if _is_onnx(text):
        _check_update(reading, f"{text} is an ONNX file, which is inference")
        if reading.dtype:
            raise InputError(
                f"--dtype: {text} has its types in it; convert the file, as onnxconverter-common does to float16, or "
                "export the model in that type"
            )
        return _read_onnx(text, reading.dims)
    entry = graph_cache.model_entry(text, reading, num_microbatches)
    if (model := graph_cache.read(entry)) is None:
        if reading.serving.has_cache:
            _, model = _capture_served(text, reading, num_microbatches)
            graph_cache.write(entry, model)
            return model
        build = _builder_of(text, num_microbatches, reading.training, reading.dtype)
        answer = _capture(build, text, reading)
        if isinstance(answer, JaxFunction):
            return _read_jax(text, answer, reading, num_microbatches)
        notes, unknown = _notes(text, answer), answer.coverage.unknown
        seconds = answer.seconds
        model = Model(answer.graph, unknown, is_captured=True, notes=notes, seconds=seconds, captured_s=seconds)
        graph_cache.write(entry, model)
    return model


def _check_update(reading: Reading, reason: str) -> None:
    """Raises InputError, with the reason, if an optimizer is asked for that MODEL does not take."""
    if reading.changes_update:
        raise InputError(f"{reading.optimizer_option}: {reason}; leave it out")


def _check_phase(text: str, reading: Reading) -> None:
    if reading.serving.has_cache and not text.startswith(HUGGING_FACE):
        raise InputError(
            f"--phase: {text} is read as it is; prefill and decode are steps of hf:DIR, a Transformers config"
        )


def _capture_served(text: str, reading: Reading, num_microbatches: int) -> "tuple[Capture, Model]":
    """Captures a prefill or decode step, also as a `Model`."""
    from gdp.models.hugging_face.build import ServedBuild

    build = ServedBuild(text, reading.serving, num_microbatches)
    captured = _capture(build, text, reading)
    from gdp.models.hugging_face.kv_cache_bytes import finish

    assert build.room is not None, "the capture built the model"
    captured, served = finish(captured, reading.serving, build.room)
    notes = (*_notes(text, captured), *build.notes)
    return captured, Model(captured.graph, captured.coverage.unknown, is_captured=True, notes=notes, served=served)


def _notes(text: str, captured: "Capture") -> tuple[str, ...]:
    """Returns the differences between a model and its source, a sentence each; of workloads, docs/ tells them."""
    if not text.startswith(HUGGING_FACE):
        return captured.notes if ":" in text else ()
    from gdp.models.hugging_face import build

    return (*build.notes(text), *captured.notes)


def _read_jax(text: str, function: JaxFunction, reading: Reading, num_microbatches: int) -> Model:
    """Reads the step of a JAX function as it is; InputError for options that would change it."""
    if num_microbatches > 1:
        raise UnevenBatchError(
            f"--microbatches: {text} is a JAX function, which is not split; gdp capture the step of one micro-batch, "
            "and give that file",
            batch_size=1,
        )
    _check_update(reading, f"{text} is a JAX function, which has its optimizer in it or none")
    if reading.dtype:
        raise InputError(f"--dtype: {text} is a JAX function, which computes in the types of its arguments; cast them")
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


def _check_no_python_file(text: str) -> None:
    """Raises InputError for a Python file, and for a module without a function, with the functions that are there."""
    from gdp.models import workloads

    path = Path(text if text.endswith(".py") else f"{text.replace('.', os.sep)}.py")
    if (
        (os.path.isfile(text) and not text.endswith(".py"))
        or not os.path.isfile(path)
        or workloads.find(text) is not None
    ):
        return
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError):
        raise InputError(f"{text}: {path} is a Python file with an error; python {path} shows it") from None
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    there = f"; functions there: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ""
    raise InputError(
        f"{text}: {path} is a Python file; name a function in it that returns (module, example_inputs), such as "
        f"{'.'.join(path.with_suffix('').parts)}:{names[0] if names else 'function'}{there}"
    )


def _read_onnx(text: str, dims: Mapping[str, int]) -> Model:
    path = Path(text)
    entry = graph_cache.onnx_entry(path, dims)
    if (model := graph_cache.read(entry)) is None:
        from gdp.models.onnx.onnx_model import read_onnx

        parsed = read_onnx(path, dims)
        model = Model(parsed.graph, parsed.unknown, is_captured=False, notes=parsed.notes)
        if parsed.is_alone:
            graph_cache.write(entry, model)
    return model


def read_capture(text: str, reading: Reading | None = None) -> "Capture":
    """Returns the graph of `text` with the program that executes its ops; InputError for a file."""
    text = with_prefix(text)
    reading = reading or Reading()
    check_runnable(text, "executed")
    if reading.serving.has_cache:
        _check_phase(text, reading)
        return _capture_served(text, reading, 1)[0]
    return _capture(builder_of(text, training=reading.training, dtype=reading.dtype), text, reading)


def read_timed_model(text: str, times: "MeasuredTimes", device_kinds: Iterable[str], reading: Reading) -> Model:
    """Reads the model `text` with the known times of its ops on these kinds of devices; see `read_model`."""
    text = with_prefix(text)
    from gdp.models.measured_times import measured_noise, with_measured_times
    from gdp.models.pytorch.signature import LIBRARY, signatures

    check_runnable(text, "measured")
    kinds = list(device_kinds)
    build = builder_of(text, reading.microbatching.count, training=reading.training, dtype=reading.dtype)
    captured = _capture(build, text, reading)
    op_signatures = signatures(captured.program)
    graph = with_measured_times(captured.graph, op_signatures, times, kinds, LIBRARY)
    noise = measured_noise(op_signatures, times, kinds, LIBRARY)
    model = Model(graph, captured.coverage.unknown, is_captured=True, noise=noise, notes=_notes(text, captured))
    model = reading.finish(model)
    return replace(model, graph=reading.microbatching.apply(model.graph))


def builder_of(text: str, num_microbatches: int = 1, *, training: bool = True, dtype: str = "") -> Build:
    """Returns a function that builds the PyTorch model `text`, with example inputs, on the default device.

    The inputs are those of the first of `num_microbatches`; in `training`, those of a Transformers model have labels.
    With a `dtype`, such as "bfloat16", the module and its inputs are converted to it.
    InputError for a file, which has no model, for unknown names and, when it builds, for a JAX function.
    """
    check_dtype(dtype)
    text = with_prefix(text)
    return user_function.pytorch_only(_builder_of(text, num_microbatches, training, dtype), text)


def _builder_of(text: str, num_microbatches: int, training: bool, dtype: str) -> Callable[[], Example | JaxFunction]:
    if _is_graph_file(text):
        raise InputError(f"{text}: a gdp-graph file does not say what its ops execute; name the model itself")
    if _is_onnx(text):
        raise InputError(f"{text}: an ONNX file is placed, not executed; name the PyTorch model as module:function")
    if text.startswith(HUGGING_FACE):
        from gdp.models.hugging_face import build

        sized = f"{text}{'&' if '?' in text else '?'}dtype={dtype}" if dtype else text
        return _first_microbatch(build.builder(sized, training=training), text, num_microbatches)
    if re.fullmatch(user_function.PATTERN, text):
        return _converted(_first_microbatch(user_function.read_user_function(text), text, num_microbatches), dtype)
    return _converted(_workload(text, num_microbatches), dtype)


def load(
    text: str,
    *,
    training: bool = True,
    optimizer: str = "adam",
    master_weights: bool = False,
    microbatches: int = 1,
    dims: Mapping[str, int] = MappingProxyType({}),
    dtype: str = "",
) -> Graph:
    """Returns the graph of MODEL alone; see `read_model`. `dtype`: that MODEL is converted to, such as "bfloat16"."""
    microbatching = Microbatching(microbatches)
    return read_model(text, Reading(training, optimizer, microbatching, dims, None, master_weights, dtype)).graph


def _is_onnx(text: str) -> bool:
    return text.endswith(".onnx") and not text.startswith(HUGGING_FACE)


def _is_graph_file(text: str) -> bool:
    if text.startswith(HUGGING_FACE):
        return False
    return (os.path.isfile(text) and not text.endswith(".onnx")) or text.endswith((".json", ".gz", ".safetensors"))


def _workload(name: str, num_microbatches: int) -> Build:
    from gdp.models import workloads

    workload = workloads.find(name)
    if workload is not None:
        return partial(workload.build, even_part(workload.batch_size, num_microbatches, name))
    if os.path.isdir(name):
        raise InputError(f"{name}: is a directory; name a gdp-graph file")
    if name.partition("/")[0] in workloads.family_names():
        raise InputError(f"model {name!r}: no variant of that name; `gdp workloads --variants` lists them")
    if os.sep in name:
        raise InputError(f"{name}: no such file; check the path")
    raise InputError(
        f"model {name!r}: no built-in workload, gdp-graph file (.json, .json.gz, .safetensors) or module:function; "
        f"{suggest(name, workloads.names())}"
    )


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
                "--optimizer",
                batch_size=1,
            )
        sizes = [leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        if not sizes:
            raise InputError(f"{name}: no input is a tensor with a batch dimension; micro-batches need one")
        part = even_part(sizes[0], num_microbatches, name)

        def split(leaf: Any) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == sizes[0]
            return leaf[:part].clone() if is_batch else leaf

        return module, tree_map(split, args), tree_map(split, kwargs)

    return build_part


def _converted(build: Callable[[], Example | JaxFunction], dtype: str) -> Callable[[], Example | JaxFunction]:
    """Returns `build` with floats of the module and its inputs in `dtype`, as `module.to(dtype)` makes them."""
    if not dtype:
        return build

    def build_converted() -> Example | JaxFunction:
        import torch
        from torch.utils._pytree import tree_map

        def convert(leaf: Any) -> Any:
            is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(getattr(torch, dtype)) if is_float else leaf

        answer = build()
        if isinstance(answer, JaxFunction):
            return answer
        module, args, kwargs = answer if len(answer) == 3 else (*answer, {})
        return module._apply(convert), tree_map(convert, args), tree_map(convert, kwargs)

    return build_converted


def _capture(build: Callable[[], Any], name: str, reading: Reading) -> "Capture | Any":
    """Returns the captured step, or the answer of `build` if that is no PyTorch model."""
    from gdp.models.pytorch.capture_step import StepOptions, capture_or_answer

    with user_function.printing_to_stderr(), without_tracebacks():
        options = StepOptions(reading.training, reading.optimizer, master_weights=reading.master_weights)
        return capture_or_answer(build, name, options)


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Silences the traceback that PyTorch logs, besides raising, when an operator fails on fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
