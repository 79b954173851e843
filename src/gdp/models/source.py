"""START HERE: MODEL as one object, with its whole step, the steps of parts of its batch, and its module.

MODEL is a built-in workload, a `gdp-graph` or ONNX file, a Transformers directory, a user's function or `Workload`.
"""

import ast
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gdp.errors import InputError, UnevenBatchError, suggest
from gdp.graph import Graph
from gdp.models import graph_cache, user_function
from gdp.models.model import GGUF, HUGGING_FACE, Microbatching, Model, Reading, even_part
from gdp.models.papers import PAPERS, Workload
from gdp.models.user_function import Example, JaxFunction, UserFunction

if TYPE_CHECKING:
    import torch

    from gdp.models.measured_times import MeasuredTimes
    from gdp.models.pytorch import Capture
    from gdp.models.pytorch.capture_step import Built


class ModelSource:
    """A MODEL and how it is read. Its methods raise InputError, with the remedy, for what cannot be read.

    A built-in workload, a `gdp-graph` or `.onnx` file, `hf:DIR`, or `package.module:function`. The function, imported
    from the current directory on, returns (module, example_inputs) or (module, args, kwargs). It is called once, under
    fake tensors, so nothing is allocated. A function of JAX arrays in place of the module is captured as it is.
    """

    def __init__(self, text: str, reading: Reading | None = None, directory: Path | None = None) -> None:
        """`directory` is where relative paths, and modules of functions, begin: by default the current one."""
        self.text, self.reading = with_prefix(text), reading or Reading()
        if directory is not None and not _is_here(directory):
            self.text = _in_directory(self.text, directory)
        self._directory = directory

    @classmethod
    def of_example(cls, example: Example, reading: Reading | None = None) -> "ModelSource":
        """Returns a module with its inputs, (module, args) or (module, args, kwargs), as one object."""
        from gdp.models.pytorch.capture_step import Built

        name = type(example[0]).__name__
        source = cls(f"{name}:inputs", reading)
        source._named, source._built = example[0], Built.by(lambda: example, name).copied()
        return source

    def whole(self) -> Model:
        """Returns the step of the whole batch, split into the micro-batches of the reading.

        A file is the step of one micro-batch.
        """
        microbatching = self.reading.microbatching
        model = self.part(microbatching.count)
        return replace(model, graph=microbatching.apply(model.graph))

    def part(self, num_parts: int) -> Model:
        """Returns the step of 1 / `num_parts` of the batch; of a file all of it."""
        return self.reading.finish(self._part(num_parts))

    def split(self, microbatches: int, samples_by: int = 1) -> Graph:
        """Returns the step in this number of micro-batches, of 1 / `samples_by` of the batch."""
        microbatching = replace(self.reading.microbatching, count=microbatches)
        return microbatching.apply(self.part(microbatches * samples_by).graph)

    def capture(self) -> "Capture":
        """Returns the graph of the whole batch with the program that executes its ops."""
        self.check_runnable("executed")
        if self.reading.serving.has_cache:
            self._check_phase()
            return self._capture_served(1)[0]
        captured = self._capture(1)
        if isinstance(captured, JaxFunction):
            raise InputError(_is_jax(self.text))
        return captured

    def timed(self, times: "MeasuredTimes", device_kinds: Iterable[str]) -> Model:
        """Returns the whole step with the known times of its ops on these kinds of devices."""
        from gdp.models.measured_times import measured_noise, with_measured_times
        from gdp.models.pytorch.signature import LIBRARY, signatures

        self.check_runnable("measured")
        kinds, microbatching = list(device_kinds), self.reading.microbatching
        captured = self._capture(microbatching.count)
        if isinstance(captured, JaxFunction):
            raise InputError(_is_jax(self.text))
        op_signatures = signatures(captured.program)
        graph = with_measured_times(captured.graph, op_signatures, times, kinds, LIBRARY)
        noise = measured_noise(op_signatures, times, kinds, LIBRARY)
        notes = self._notes(captured)
        model = Model(graph, captured.coverage.unknown, is_captured=True, noise=noise, notes=notes)
        model = self.reading.finish(model)
        return replace(model, graph=microbatching.apply(model.graph))

    def build(self, num_parts: int = 1) -> Example:
        """Builds (module, args, kwargs), with the inputs of the first of `num_parts` parts of the batch.

        In training, the inputs of a Transformers model have labels. Under fake tensors nothing is allocated. InputError
        for a file, which has no model, and for a JAX function.
        """
        answer = self._builder(num_parts)()
        if isinstance(answer, JaxFunction):
            raise InputError(_is_jax(self.text))
        if num_parts == 1 or self._is_workload:
            return answer
        from torch.utils._pytree import tree_map

        module, args, kwargs = answer
        split = self._splitter(answer, num_parts)
        return module, tree_map(split, args), tree_map(split, kwargs)

    def sizes_of_part(self, num_parts: int) -> "Mapping[str, torch.Size] | None":
        """Returns the sizes of inputs with 1 / `num_parts` of the batch; None where the first dimension is cut."""
        if not self._is_workload:
            return None
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        from gdp.models.pytorch.program import named_inputs

        with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
            _, args, *kwargs = self.build(num_parts)
        return {name: tensor.shape for name, tensor in named_inputs(args, kwargs[0] if kwargs else {})}

    @property
    def is_file(self) -> bool:
        """True for a graph or ONNX file, whose batch cannot be split."""
        return _is_graph_file(self.text) or _is_onnx(self.text)

    @cached_property
    def batch_size(self) -> int | None:
        """The number of samples in the batch; None where it cannot be split."""
        if self.is_file or self.reading.serving.has_cache:
            return None
        if self._is_function:
            answer = self._built.answer
            return None if isinstance(answer, JaxFunction) or _is_own_step(answer[0]) else _first_size(answer)
        if self.text.startswith(HUGGING_FACE):
            from gdp.models.hugging_face import build

            return build.parse(self.text)[1].batch
        return self._workload.batch_size

    @property
    def assumes_batch(self) -> bool:
        """True where the batch is taken to be the first dimension of inputs: of a user's function."""
        return self._is_function

    def is_kept(self, num_parts: int) -> bool:
        """Returns whether 1 / `num_parts` of the batch was captured before, and need not be again."""
        entry = graph_cache.model_entry(self.text, self.reading, num_parts)
        return entry is not None and entry.is_file()

    def check_runnable(self, verb: str) -> None:
        """Raises InputError for a MODEL that is placed only: a file, or a model with quantised weights."""
        if _is_graph_file(self.text):
            raise InputError(f"{self.text}: a gdp-graph file does not say what its ops execute; name the model itself")
        if _is_onnx(self.text):
            raise InputError(
                f"{self.text}: an ONNX file is placed, not {verb}; name the PyTorch model as module:function"
            )
        if self.text.startswith(HUGGING_FACE):
            from gdp.models.hugging_face import build

            if build.has_quantised_weights(self.text):
                raise InputError(
                    f"{self.text}: has quantised weights; such a model is placed, not {verb}: add ?weights=none for "
                    "its dtype"
                )

    # Reads

    def _part(self, num_parts: int) -> Model:
        text, reading = self.text, self.reading
        self._check_phase()
        _check_no_python_file(text)
        if reading.dims and not _is_onnx(text):
            raise InputError(f"--dim: {text} has no symbolic dimensions; they are those of .onnx files")
        if _is_graph_file(text):
            self._check_update(f"{text} is a gdp-graph file, whose updates are in it")
            if reading.dtype:
                raise InputError(
                    f"--dtype: {text} is a graph, whose ops have their types; capture its model with --dtype"
                )
            return Model(Graph.load(text), {}, is_captured=False)
        if _is_onnx(text):
            self._check_update(f"{text} is an ONNX file, which is inference")
            if reading.dtype:
                raise InputError(
                    f"--dtype: {text} has its types in it; convert the file, as onnxconverter-common does to float16, "
                    "or export the model in that type"
                )
            return _read_onnx(text, reading.dims)
        entry = graph_cache.model_entry(text, reading, num_parts)
        if (model := graph_cache.read(entry)) is None:
            if reading.serving.has_cache:
                model = self._capture_served(num_parts)[1]
            else:
                captured = self._capture(num_parts)
                if isinstance(captured, JaxFunction):
                    return self._read_jax(captured)
                unknown, seconds = captured.coverage.unknown, captured.seconds
                model = Model(captured.graph, unknown, True, None, self._notes(captured), None, seconds, seconds)
            graph_cache.write(entry, model)
        return model

    def _read_jax(self, function: JaxFunction) -> Model:
        """Reads the step of a JAX function as it is; InputError for options that would change it."""
        text, training = self.text, self.reading.training
        self._check_update(f"{text} is a JAX function, which has its optimizer in it or none")
        if self.reading.dtype:
            raise InputError(
                f"--dtype: {text} is a JAX function, which computes in the types of its arguments; cast them"
            )
        with user_function.printing_to_stderr():
            captured = function.capture()
        has_gradients = not {"backward", "update"}.isdisjoint(captured.graph.phases)
        if has_gradients and not training:
            raise InputError(
                f"--inference: {text} is a JAX function that takes gradients, captured as it is; name its forward pass"
            )
        notes = list(captured.notes)
        if training and not has_gradients:
            notes.insert(0, f"{text} is a JAX function without gradients, captured as it is: a forward pass")
        return Model(captured.graph, captured.coverage.unknown, is_captured=True, notes=tuple(notes))

    def _capture(self, num_parts: int) -> "Capture | JaxFunction":
        """Records the step of a part of the batch; returns a JAX function as it is."""
        from gdp.models.pytorch.capture_step import Built, StepOptions

        reading = self.reading
        options = StepOptions(reading.training, reading.optimizer, master_weights=reading.master_weights)
        with user_function.printing_to_stderr(), without_tracebacks():
            built = self._unused if self._is_function else Built.by(self._builder(num_parts), self.text)
            if num_parts > 1 and not self._is_workload:
                built = built.with_inputs(self._splitter(built.answer, num_parts))
            return built.capture(self.text, options)

    def _capture_served(self, num_parts: int) -> "tuple[Capture, Model]":
        """Captures a prefill or decode step, also as a `Model`."""
        from gdp.models.hugging_face.build import ServedBuild
        from gdp.models.hugging_face.kv_cache_bytes import finish
        from gdp.models.pytorch.capture_step import Built, StepOptions

        serving = self.reading.serving
        build = ServedBuild(self.text, serving, num_parts)
        with user_function.printing_to_stderr(), without_tracebacks():
            captured = Built.by(build, self.text).capture(self.text, StepOptions(self.reading.training))
        assert build.room is not None, "the capture built the model"
        captured, served = finish(captured, serving, build.room)
        notes = (*self._notes(captured), *build.notes)
        return captured, Model(captured.graph, captured.coverage.unknown, is_captured=True, notes=notes, served=served)

    def _notes(self, captured: "Capture") -> tuple[str, ...]:
        """Returns the differences between a model and its source, a sentence each; of workloads, docs/ tells them."""
        if not self.text.startswith(HUGGING_FACE):
            return captured.notes if ":" in self.text else ()
        from gdp.models.hugging_face import build

        return (*build.notes(self.text), *captured.notes)

    # Builds

    @property
    def _is_function(self) -> bool:
        is_other = self.is_file or self.text.startswith(HUGGING_FACE)
        is_named = not is_other and re.fullmatch(user_function.PATTERN, self.text) is not None
        return is_named and not isinstance(self._named, Workload)

    @property
    def _is_workload(self) -> bool:
        return not (self.is_file or self._is_function or self.text.startswith(HUGGING_FACE))

    @cached_property
    def _named(self) -> Any:
        """The object that `module:name` names: a function or a `Workload`."""
        return user_function.named(self.text, self._directory)

    @cached_property
    def _function(self) -> UserFunction:
        return UserFunction(self.text, self._directory)

    @cached_property
    def _built(self) -> "Built":
        """The answer of the user's function under fake tensors, which no capture has changed."""
        from gdp.models.pytorch.capture_step import Built

        with user_function.printing_to_stderr(), without_tracebacks():
            return Built.by(self._builder(), self.text)

    @property
    def _unused(self) -> "Built":
        """A model of the user's function that no capture has changed: a copy, or another one if it cannot be copied."""
        from gdp.models.pytorch.capture_step import Built

        built = self._built
        if isinstance(built.answer, JaxFunction) or _is_own_step(built.answer[0]):
            return built
        try:
            return built.copied()
        except Exception:  # of code of the user's: modules may refuse to be copied
            return Built.by(self._builder(), self.text)

    @property
    def _workload(self) -> Workload:
        name = self.text
        workload = self._named if re.fullmatch(user_function.PATTERN, name) else PAPERS.find(name)
        if isinstance(workload, Workload):
            return workload
        if os.path.isdir(name):
            raise InputError(f"{name}: is a directory; name a gdp-graph file")
        if name.partition("/")[0] in PAPERS.family_names():
            raise InputError(f"model {name!r}: no variant of that name; `gdp workloads --variants` lists them")
        if os.sep in name:
            raise InputError(f"{name}: no such file; check the path")
        raise InputError(
            f"model {name!r}: no built-in workload, gdp-graph file (.json, .json.gz, .safetensors) or module:function; "
            f"{suggest(name, PAPERS.names())}"
        )

    def _builder(self, num_parts: int = 1) -> Callable[[], Example | JaxFunction]:
        """Returns a function that builds the model: a workload with a part of its batch, others with all of it."""
        text, dtype = self.text, self.reading.dtype
        if self.is_file:
            self.check_runnable("executed")
        if text.startswith(HUGGING_FACE):
            from gdp.models.hugging_face import build

            sized = f"{text}{'&' if '?' in text else '?'}dtype={dtype}" if dtype else text
            return build.builder(sized, training=self.reading.training)
        if self._is_function:
            return _converted(self._function, dtype)
        workload = self._workload
        return _converted(partial(workload.build, even_part(workload.batch_size, num_parts, text)), dtype)

    def _splitter(self, answer: Example | JaxFunction, num_parts: int) -> Callable[[Any], Any]:
        """Returns a function that cuts the first of `num_parts` out of each input that begins with the batch."""
        from torch import Tensor

        if isinstance(answer, JaxFunction):
            raise UnevenBatchError(
                f"--microbatches: {self.text} is a JAX function, which is not split; gdp capture the step of one "
                "micro-batch, and give that file"
            )
        if _is_own_step(answer[0]):
            raise UnevenBatchError(
                f"--microbatches: {self.text} is a training step of your own, which is not split; give its module with "
                "--optimizer"
            )
        size = _first_size(answer)
        if size is None:
            raise InputError(f"{self.text}: no input is a tensor with a batch dimension; micro-batches need one")
        part = even_part(size, num_parts, self.text)

        def split(leaf: Any) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size
            return leaf[:part].clone() if is_batch else leaf

        return split

    # Checks

    def _check_update(self, reason: str) -> None:
        """Raises InputError, with the reason, if an optimizer is asked for that MODEL does not take."""
        if self.reading.changes_update:
            raise InputError(f"{self.reading.optimizer_option}: {reason}; leave it out")

    def _check_phase(self) -> None:
        if self.reading.serving.has_cache and not self.text.startswith(HUGGING_FACE):
            raise InputError(
                f"--phase: {self.text} is read as it is; prefill and decode are steps of hf:DIR, a Transformers config"
            )


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
    """Returns the graph of MODEL alone; see `ModelSource`. `dtype`: that MODEL is converted to, such as "bfloat16"."""
    reading = Reading(training, optimizer, Microbatching(microbatches), dims, None, master_weights, dtype)
    return ModelSource(text, reading).whole().graph


def with_prefix(text: str) -> str:
    """Returns MODEL with the prefix of Transformers models if it is a `.gguf` file, which is read as one."""
    return f"{HUGGING_FACE}{text}" if re.fullmatch(rf".*{re.escape(GGUF)}(\?.*)?", text, re.DOTALL) else text


def _is_here(directory: Path) -> bool:
    return directory.resolve() == Path.cwd()


def _in_directory(text: str, directory: Path) -> str:
    """Returns MODEL with its path, if it has a relative one, from `directory` on."""
    if text.startswith(HUGGING_FACE):
        return f"{HUGGING_FACE}{directory / text.removeprefix(HUGGING_FACE)}"
    is_file = (directory / text).is_file() or text.endswith((".json", ".gz", ".safetensors", ".onnx"))
    return str(directory / text) if is_file else text


def _is_jax(text: str) -> str:
    return f"{text}: is a JAX function, which is placed, not executed or measured; name a PyTorch model"


def _is_own_step(model: Any) -> bool:
    """Returns whether a user's function gave a training step of its own, which is captured as it is."""
    from torch import nn

    from gdp.models.pytorch.own_step import has_own_step

    return not isinstance(model, nn.Module) or has_own_step(model)


def _first_size(example: Example) -> int | None:
    """Returns the first dimension of the first input tensor that has one."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    sizes = (leaf.shape[0] for leaf in tree_leaves(example[1:]) if isinstance(leaf, Tensor) and leaf.dim())
    return next(sizes, None)


def _is_onnx(text: str) -> bool:
    return text.endswith(".onnx") and not text.startswith(HUGGING_FACE)


def _is_graph_file(text: str) -> bool:
    if text.startswith(HUGGING_FACE):
        return False
    return (os.path.isfile(text) and not text.endswith(".onnx")) or text.endswith((".json", ".gz", ".safetensors"))


def _check_no_python_file(text: str) -> None:
    """Raises InputError for a Python file, and for a module without a function, with the functions that are there."""
    path = Path(text if text.endswith(".py") else f"{text.replace('.', os.sep)}.py")
    if (os.path.isfile(text) and not text.endswith(".py")) or not os.path.isfile(path) or PAPERS.find(text) is not None:
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
