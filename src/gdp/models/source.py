"""START HERE: MODEL as one object, with its whole step, the steps of parts of its batch, and its module.

MODEL is a built-in workload, a graph or ONNX file, a Transformers directory, a timm model, a user's function."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from gdp.errors import InputError, WrongBatchError, prefixed, suggest
from gdp.graph import Graph
from gdp.graph.accumulation import accumulated
from gdp.models import graph_cache, user_function
from gdp.models.batch_dimension import other_count, other_dimension
from gdp.models.hugging_face import sizes
from gdp.models.model import HUGGING_FACE, PUBLISHED, Model, Reading, even_part
from gdp.models.model_text import check_no_python_file, in_directory, is_graph_file, is_onnx, with_prefix
from gdp.models.papers import PAPERS, Workload
from gdp.models.serving import ServedStep, Serving
from gdp.models.shards import Shards, Styles
from gdp.models.unequal import UnequalStep
from gdp.models.user_function import Example, JaxFunction, UserFunction, in_order

if TYPE_CHECKING:
    import torch

    from gdp.cluster import Cluster
    from gdp.models.measured_times import MeasuredTimes, OpTimer
    from gdp.models.pytorch import Capture
    from gdp.models.pytorch.capture_step import Built

_Answer = TypeVar("_Answer")


class ModelSource:
    """A MODEL and how it is read. Its methods raise InputError, with the remedy, for what cannot be read. A built-in
    workload, a `gdp-graph` or `.onnx` file, `hf:DIR`, `timm:NAME`, or `package.module:function`. The function, imported
    from the current directory on, returns (module, example_inputs) or (module, args, kwargs). It is called once, under
    fake tensors, so nothing is allocated. A function of JAX arrays is captured as it is."""

    def __init__(self, text: str, reading: Reading | None = None, directory: Path | None = None) -> None:
        """`directory` is where relative paths, and modules of functions, begin: by default the current one."""
        self.text, self.reading = with_prefix(text), reading or Reading()
        if self.reading.batch is not None and self._is_published:
            self.text = sizes.with_batch(self.text, self.reading.batch)
        if self.text.startswith(HUGGING_FACE) and self.reading.training and not self.reading.serving.has_cache:
            self.reading = sizes.as_published(self.text, self.reading)
        if self.reading.lora is not None:
            self.text, self.reading = sizes.with_adapters(self.text, self.reading)
        if directory is not None and directory.resolve() != Path.cwd():
            self.text = in_directory(self.text, directory)
        self._directory = directory
        self._timer: OpTimer | None = None  # None: times of ops are modelled
        self._timed_parts: dict[int, Model] = {}  # with times measured with as many samples
        self.unequal: UnequalStep | None = None  # of cards with shares of their own, which have no other parts
        self._time_steps: dict[int, list[int]] = {}  # of recurrent layers, by the number of parts

    @classmethod
    def of_example(cls, example: Example, reading: Reading | None = None) -> "ModelSource":
        """Returns a module with its inputs, (module, args) or (module, args, kwargs), as one object."""
        from gdp.models.pytorch.capture_step import Built

        name = type(example[0]).__name__ if example else "model"
        answer = in_order(example, name)
        if isinstance(answer, JaxFunction):
            raise InputError(f"{name}: is a JAX function; give gdp.capture_jax(function, ...) instead")
        source = cls(f"{name}:inputs", reading)
        source._named, source._built = answer[0], Built.by(lambda: answer, name).copied().changed(source._changed)
        return source

    def whole(self) -> Model:
        """Returns the step of the whole batch, in the micro-batches of the reading. A file is the step of one."""
        if self.unequal is not None:
            return self.unequal.model
        count = self.reading.microbatches
        model = self.part(count)
        self._check_microbatch(count, model.graph)
        return replace(model, graph=accumulated(model.graph, count))

    def part(self, num_parts: int) -> Model:
        """Returns the step of 1 / `num_parts` of the batch; of a file all of it."""
        return self.reading.finish(self._part(num_parts) if self._timer is None else self._timed(num_parts))

    def split(self, microbatches: int, samples_by: int = 1) -> Graph:
        """Returns the step in this number of micro-batches, of 1 / `samples_by` of the batch."""
        return accumulated(self.part(microbatches * samples_by).graph, microbatches)

    def capture(self) -> "Capture":
        """Returns the graph of the whole batch with the program that executes its ops."""
        self.check_runnable("executed")
        if self.reading.serving.has_cache:
            self._check_phase()
            return self._capture_served(1)[0]
        return self._no_jax(self._capture(1))

    def timed(self, times: "MeasuredTimes", cluster: "Cluster") -> "ModelSource":
        """Returns the same MODEL, whose steps have the known times of their ops on the kinds of these devices."""
        from gdp.models.measured_times import OpTimer

        self.check_runnable("measured")
        source = copy(self)
        source._timer, source._timed_parts = OpTimer(times, cluster), {}
        return source

    def sharded(self, shards: Shards, cluster: "Cluster | None" = None) -> "ModelSource":
        """Returns the same MODEL as one rank runs it, with unequal shares as the cards of `cluster` do. InputError for
        a file, and for options that do not go with it."""
        if self.is_file:
            raise InputError(f"{self.text}: a file has its ops as they are; name the PyTorch model to cut them")
        if shards.shares and (cluster is None or self.is_timed or self.reading.microbatches > 1):
            raise InputError(f"{shards}: unequal shares take modelled times of a whole step on cards that are named")
        source = copy(self)
        by_tokens = self.reading.training and (shards.tensor == 1 or self._plans_tokens)
        source.reading = replace(self.reading, shards=shards.settled(training=by_tokens))
        source._timed_parts, source._time_steps = {}, {}
        source.unequal = UnequalStep.of(self, shards, cluster) if shards.shares and cluster else None
        return source

    def styles(self, shards: Shards, layers: Sequence[str], name: str) -> Styles:
        """Returns (paths, style) of the modules that PyTorch's `parallelize_module` cuts over ranks. InputError, with
        the `name` of the tool, for a file, and for modules that it does not cut."""
        source = self.sharded(shards)
        if source.reading.lora is not None:
            raise InputError(f"{name}: cuts no adapters (--lora); leave tensor out of --parallel")
        with user_function.printing_to_stderr():
            built = source._unused if source._is_function else source._built
            return built.styles(source.reading.shards, layers, name)

    @property
    def _plans_tokens(self) -> bool:
        """False for a model whose own plan of `parallelize_module` cuts no tokens."""
        from gdp.models.pytorch.shards.given_styles import given_cuts

        if self._is_published or self._is_workload:
            return True
        with prefixed(self.text):
            given = given_cuts(self._built.answer[0]) if self._built.is_model else None
        return given is None or given.by_tokens

    @property
    def num_key_heads(self) -> int | None:
        """The heads of keys of a model of Transformers; None where no config tells."""
        if self._is_published and self.reading.serving.has_cache:  # whose attention reads the cache as it is
            return None
        return self.num_heads[1]

    @property
    def num_heads(self) -> tuple[int | None, int | None]:
        """The heads of queries and of keys of a model of Transformers; None where no config tells."""
        source = self
        if self._is_published and self.reading.serving.has_cache:  # whose module is built without one
            source = ModelSource(sizes.without_requests(self.text), replace(self.reading, serving=Serving()))
        config = getattr(source._built.answer[0], "config", None)
        config = getattr(config, "get_text_config", lambda: config)()
        queries, keys = (getattr(config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
        return queries, keys

    @property
    def has_tensor_plan(self) -> bool:
        """True for a model that Transformers cuts by a plan of its own."""
        config = getattr(self._built.answer[0], "config", None)
        return getattr(config, "base_model_tp_plan", None) is not None

    def _timed(self, num_parts: int) -> Model:
        """Returns the step of a part of the batch with the times of its ops, measured with as many samples or others.
        Other numbers are those that the file of times has of MODEL, where they divide the batch."""
        timer, batch_size, others = self._timer, self.batch_size, dict[int, Graph]()
        model = self._timed_parts[num_parts] = self._timed_parts.get(num_parts) or self._part(num_parts)
        if timer is None or not batch_size or not timer.lacks(model.graph):
            return model
        for samples in timer.times.samples(self.text):
            if batch_size % samples == 0 and samples * num_parts != batch_size:
                count = batch_size // samples
                with contextlib.suppress(InputError):  # a layer may fail with so few samples
                    other = self._timed_parts[count] = self._timed_parts.get(count) or self._part(count)
                    others[samples] = other.graph
        return replace(model, graph=timer.between(model.graph, batch_size // num_parts, others))

    def build(self, num_parts: int = 1) -> Example:
        """Builds (module, args, kwargs), with the inputs of the first of `num_parts` parts of the batch. In training,
        the inputs of a Transformers model have labels. Under fake tensors nothing is allocated. InputError for a file,
        which has no model, and for a JAX function."""
        answer = self._no_jax(self._builder(num_parts)())
        if self.reading.lora is not None:
            from gdp.models.pytorch.adapters import adapted

            adapted(answer[0], self.reading.lora, self.text)
        if num_parts == 1 or self._is_workload:
            return answer
        from gdp.models.example import first_part

        return first_part(answer, num_parts, self.text, self.reading.batch_dim or 0)

    def sizes_of_part(self, num_parts: int) -> "Mapping[str, torch.Size] | None":
        """Returns the sizes of inputs with 1 / `num_parts` of the batch; None where the first dimension is cut."""
        if not self._is_workload and not self.reading.batch_dim:
            return None
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        from gdp.models.pytorch.program import named_inputs
        from gdp.models.pytorch.step_calls import building

        with building([]), FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
            _, args, *kwargs = self.build(num_parts)
        return {name: tensor.shape for name, tensor in named_inputs(args, kwargs[0] if kwargs else {})}

    @property
    def is_file(self) -> bool:
        """True for a graph or ONNX file, whose batch cannot be split."""
        return is_graph_file(self.text) or is_onnx(self.text)

    @property
    def is_timed(self) -> bool:
        """True if the times of ops were measured."""
        return self._timer is not None

    @cached_property
    def batch_size(self) -> int | None:
        """The number of samples in the batch; None where it cannot be split."""
        if self.is_file or self.reading.serving.has_cache:
            return None
        if self._is_function:
            from gdp.models import example

            answer = self._built.answer
            return (
                None
                if isinstance(answer, JaxFunction) or example.is_own_step(answer[0])
                else example.batch_size(answer, self.reading.batch_dim or 0)
            )
        if self._is_published:
            return sizes.parse(self.text)[1].batch
        return self.reading.batch or self._workload.batch_size

    @property
    def served(self) -> ServedStep | None:
        """The facts of a step of serving; None of other steps."""
        return self.whole().served if self.reading.serving.has_cache else None

    def amounts(self, served: ServedStep | None = None) -> dict[str, int]:
        """Returns the numbers of `samples` and `tokens` of a step, those that are known; `served`: what it serves."""
        if served is not None:
            return {"samples": served.num_sequences, "tokens": served.num_sequences * served.num_tokens}
        if (samples := self.batch_size) is None:
            return {}
        sequence = sizes.parse(self.text)[1].sequence if self.text.startswith(HUGGING_FACE) else None
        return {"samples": samples} | ({} if sequence is None else {"tokens": samples * sequence})

    @property
    def assumes_batch(self) -> bool:
        """True where the batch is taken to be the first dimension of inputs: of a user's function."""
        return self._is_function

    def check_part(self, whole: Graph, part: Graph, counts: tuple[int, int]) -> None:
        """Raises WrongBatchError if the steps of 1/counts[0] and 1/counts[1] say that no batch was cut."""
        if not self._is_function or self.reading.batch_dim is not None:
            return
        one, other = (self._time_steps.get(count, []) for count in counts)
        if reason := other_dimension(whole, part, counts[1] // counts[0], (one, other)):
            name = next(name for name, kind in zip(whole.op_names, whole.kinds, strict=True) if kind == "input")
            raise WrongBatchError(
                f"dimension 0 of {name}, of size {self.batch_size}, is not the batch: {reason}; put the batch first, "
                "or say where it is with --batch-dim 1 (if it is the first, --batch-dim 0)"
            )

    def is_kept(self, num_parts: int) -> bool:
        """Returns whether 1 / `num_parts` of the batch was captured before, and need not be again."""
        entry = graph_cache.model_entry(self.text, self.reading, num_parts)
        return self._timer is None and entry is not None and entry.is_file()

    def check_runnable(self, verb: str) -> None:
        """Raises InputError for a MODEL that is placed only: a file, or a model with quantised weights."""
        if is_graph_file(self.text):
            raise InputError(f"{self.text}: a gdp-graph file does not say what its ops execute; name the model itself")
        if is_onnx(self.text):
            raise InputError(
                f"{self.text}: an ONNX file is placed, not {verb}; name the PyTorch model as module:function"
            )
        if self.reading.lora is not None and self.reading.lora.is_quantised:
            raise InputError(f"--lora: NF4 weights are placed, not {verb}; leave weights=nf4 out")
        if self._is_published:
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
        check_no_python_file(text)
        if reading.batch_dim is not None and not self._is_function:
            raise InputError(f"--batch-dim: it is known where {text} has its batch; leave it out")
        if reading.batch is not None and self.is_file:
            raise InputError(f"--batch: {text} is a file, whose batch stays as it is; name the model itself")
        if reading.dims and not is_onnx(text):
            raise InputError(f"--dim: {text} has no symbolic dimensions; they are those of .onnx files")
        if is_graph_file(text):
            self._check_update(f"{text} is a gdp-graph file, whose updates are in it")
            if reading.dtype:
                raise InputError(
                    f"--dtype: {text} is a graph, whose ops have their types; capture its model with --dtype"
                )
            graph = Graph.load(text)
            if not reading.training and not {"backward", "update"}.isdisjoint(graph.phases):
                raise InputError(f"--inference: {text} is a training step; capture its model with --inference")
            return Model(graph, {}, is_captured=False)
        if is_onnx(text):
            self._check_update(f"{text} is an ONNX file, which is inference")
            if reading.dtype:
                raise InputError(
                    f"--dtype: {text} has its types in it; convert the file, as onnxconverter-common does to float16, "
                    "or export the model in that type"
                )
            return _read_onnx(text, reading.dims)
        entry = graph_cache.model_entry(text, reading, num_parts)
        model = graph_cache.read(entry) if self._timer is None else None  # whose signatures are not kept
        if model is None:
            if reading.serving.has_cache:
                captured, model = self._capture_served(num_parts)
            else:
                step = self._capture(num_parts)
                if isinstance(step, JaxFunction):
                    return self._read_jax(step if self._timer is None else self._no_jax(step))
                captured, unknown = step, step.coverage.unknown
                model = Model(step.graph, unknown, True, None, self._notes(step), None, step.seconds, step.seconds)
            graph_cache.write(entry, model)
            if self._timer is not None:
                from gdp.models.pytorch.signature import LIBRARY, signatures

                model = self._timer.measured(model, signatures(captured.program), LIBRARY)
        return model

    def _read_jax(self, function: JaxFunction) -> Model:
        """Reads the step of a JAX function as it is; InputError for options that would change it."""
        text, training = self.text, self.reading.training
        self._check_update(f"{text} is a JAX function, which has its optimizer in it or none")
        if self.reading.shards.num_ranks > 1:
            raise InputError(
                f"{text} is a JAX function, which is not cut over groups of cards; leave {self.reading.shards} out"
            )
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
        from gdp.models.example import is_own_step, note_time_steps, splitter
        from gdp.models.pytorch.capture_step import Built, StepOptions

        reading = self.reading
        options = StepOptions(
            reading.training, reading.optimizer, None, reading.precision, reading.lora, reading.shards
        )
        with user_function.printing_to_stderr():
            built = self._unused if self._is_function else Built.by(self._builder(num_parts), self.text)
            if num_parts > 1 and not self._is_workload:
                built = built.with_inputs(splitter(built.answer, num_parts, self.text, reading.batch_dim or 0))
            if self._is_function and not (isinstance(built.answer, JaxFunction) or is_own_step(built.answer[0])):
                self._time_steps[num_parts] = []
                note_time_steps(built.answer[0], self._time_steps[num_parts])
            return built.capture(self.text, options)

    def _capture_served(self, num_parts: int) -> "tuple[Capture, Model]":
        """Captures a prefill or decode step, also as a `Model`."""
        from gdp.models.hugging_face.build import ServedBuild
        from gdp.models.hugging_face.kv_cache_bytes import finish
        from gdp.models.pytorch.capture_step import Built, StepOptions

        serving = self.reading.serving
        build = ServedBuild(self._typed_text, serving, num_parts, self.reading.shards)
        with user_function.printing_to_stderr():
            captured = Built.by(build, self.text).capture(self.text, StepOptions(self.reading.training))
        assert build.room is not None, "the capture built the model"
        captured, served = finish(captured, serving, build.room, build.share)
        notes = (*self._notes(captured), *build.notes)
        return captured, Model(captured.graph, captured.coverage.unknown, is_captured=True, notes=notes, served=served)

    def _notes(self, captured: "Capture") -> tuple[str, ...]:
        """Returns the differences between a model and its source, a sentence each; of workloads, docs/ tells them."""
        if not self._is_published:
            return captured.notes if ":" in self.text else ()
        from gdp.models.hugging_face import build

        return (*build.notes(self.text), *captured.notes)

    # Builds

    @property
    def _is_published(self) -> bool:
        return self.text.startswith(PUBLISHED)

    @property
    def _is_function(self) -> bool:
        is_other = self.is_file or self._is_published
        is_named = not is_other and re.fullmatch(user_function.PATTERN, self.text) is not None
        return is_named and not isinstance(self._named, Workload)

    @property
    def _is_workload(self) -> bool:
        return not (self.is_file or self._is_function or self._is_published)

    @cached_property
    def _named(self) -> Any:
        """The object that `module:name` names: a function or a `Workload`."""
        return user_function.named(self.text, self._directory)

    @cached_property
    def _built(self) -> "Built":
        """The answer of the user's function under fake tensors, which no capture has changed."""
        from gdp.models.pytorch.capture_step import Built

        with user_function.printing_to_stderr():
            return Built.by(self._builder(), self.text)

    @property
    def _unused(self) -> "Built":
        """A model of the user's function that no capture has changed: a copy, or another one if it cannot be copied."""
        from gdp.models.example import is_own_step
        from gdp.models.pytorch.capture_step import Built

        built = self._built
        if isinstance(built.answer, JaxFunction) or is_own_step(built.answer[0]):
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
            raise InputError(f"{name}: is a directory; name a gdp-graph file, or hf:{name} for its config.json")
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
        text = self.text
        if self.is_file:
            self.check_runnable("executed")
        if self._is_published:
            from gdp.models.hugging_face import build

            return build.builder(self._typed_text, training=self.reading.training, precision=self.reading.precision)
        make: Callable[[], Example | JaxFunction]
        if self._is_function:
            make = UserFunction(text, self._directory)
        else:
            make = partial(
                self._workload.build, even_part(self.reading.batch or self._workload.batch_size, num_parts, text)
            )
        return lambda: self._changed(make())

    @property
    def _typed_text(self) -> str:
        """The text of a published model with the type of the reading among its sizes."""
        text, dtype = self.text, self.reading.dtype
        return f"{text}{'&' if '?' in text else '?'}dtype={dtype}" if dtype else text

    def _changed(self, answer: Any) -> Any:
        """Returns the answer of a workload or function with the batch and the type of the reading."""
        reading = self.reading
        if reading.batch and self._is_function:
            from gdp.models.example import with_batch

            answer = with_batch(answer, reading.batch, self.text, reading.batch_dim or 0)
        if dtype := reading.weight_dtype:
            from gdp.models.example import converted

            answer = converted(answer, dtype)
        return answer

    # Checks

    def _check_update(self, reason: str) -> None:
        """Raises InputError, with the reason, if an optimizer is asked for that MODEL does not take."""
        if self.reading.changes_update:
            raise InputError(f"{self.reading.optimizer_option}: {reason}; leave it out")

    def _check_microbatch(self, count: int, graph: Graph) -> None:
        """Raises WrongBatchError if a part of another size says that `graph`, of 1/`count`, is no part of a batch."""
        size = self.batch_size if count > 1 and self._is_function and self.reading.batch_dim is None else None
        if size is None:
            return
        other = other_count(count, size)
        try:
            graphs = {count: graph, other: self.part(other).graph}
        except InputError:  # a layer may fail with so few samples
            return
        fewer, more = sorted(graphs)
        self.check_part(graphs[fewer], graphs[more], (fewer, more))

    def _no_jax(self, answer: _Answer | JaxFunction) -> _Answer:
        """Returns `answer`. InputError for a JAX function."""
        if isinstance(answer, JaxFunction):
            raise InputError(
                f"{self.text}: is a JAX function, which is placed, not executed or measured; name a PyTorch model"
            )
        return answer

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
    precision: str = "",
    microbatches: int = 1,
    dims: Mapping[str, int] = MappingProxyType({}),
    dtype: str = "",
) -> Graph:
    """Returns the graph of MODEL alone; see `ModelSource`. `dtype`: that MODEL is converted to, such as "bfloat16"."""
    reading = Reading(training, optimizer, microbatches, dims, None, precision, dtype)
    return ModelSource(text, reading).whole().graph


def _read_onnx(text: str, dims: Mapping[str, int]) -> Model:
    path = Path(text)
    entry = graph_cache.onnx_entry(path, dims)
    if (model := graph_cache.read(entry)) is None:
        with prefixed(path):
            from gdp.models.onnx.onnx_model import read_onnx

        parsed = read_onnx(path, dims)
        model = Model(parsed.graph, parsed.unknown, is_captured=False, notes=parsed.notes)
        if parsed.is_alone:
            graph_cache.write(entry, model)
    return model
