"""`capture` and `capture_fn`: run one step of a model on fake tensors, record it, and build a Graph."""

import contextlib
import copy
import html
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from gdp.costs.overlap import overlapped
from gdp.errors import InputError, prefixed
from gdp.graph import Graph
from gdp.models.lora import Lora
from gdp.models.model import FLOAT32, MIXED, PRECISIONS, PURE_BF16, check_optimizer, check_precision
from gdp.models.pytorch.adapters import adapted
from gdp.models.pytorch.assemble import assemble
from gdp.models.pytorch.cards import CARD, NO_GRADIENT, OnCpu, as_if_on_a_card
from gdp.models.pytorch.explained import explained
from gdp.models.pytorch.fake_copies import check_kinds, fake_memories
from gdp.models.pytorch.loss import Loss, pick_loss
from gdp.models.pytorch.notes import notes_of, unwrapped, wrapper_notes
from gdp.models.pytorch.op_records import dtype_name
from gdp.models.pytorch.optimizers import HALF, OPTIMIZERS, UpdateRule, named_rule, rules_of
from gdp.models.pytorch.own_step import Step, has_own_step, record_own_step
from gdp.models.pytorch.program import Program, named_inputs, named_state, named_tensors
from gdp.models.pytorch.recorded_calls import Ref
from gdp.models.pytorch.recorder import Recorder
from gdp.models.pytorch.shards.cuts import OUTER, OUTPUT, STORED, TOKENS_OF, AxisCut, cut_of
from gdp.models.pytorch.shards.local_program import localise
from gdp.models.pytorch.step_calls import building
from gdp.models.shards import WHOLE, Shards, Styles
from gdp.models.stored_weights import stored_weights

OptimizerChoice = str | torch.optim.Optimizer
"""A name of `--optimizer`, or an Adam, AdamW, SGD or Adafactor of `torch.optim` over the model's parameters."""

RuleChoice = Callable[[str, Tensor], UpdateRule | None]
"""From a parameter's path, and itself, to the rule of its update; None: it is not updated."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The options of `capture`."""

    training: bool = True
    optimizer: OptimizerChoice = "adam"
    loss: Loss | None = None
    precision: str = ""
    lora: Lora | None = None
    shards: Shards = WHOLE
    rank: int = 0

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if self.lora and not self.training:
            raise InputError("--lora: adapters are trained; leave --inference (training=False) or it out")

    @property
    def remedy(self) -> str:
        """The remedy where the code of a rank's part fails; "": nothing is cut."""
        return f"its code takes whole tensors; leave {self.shards} out" if self.shards.num_ranks > 1 else ""

    def adapted(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, notes: list[str]
    ) -> nn.Module:
        """Returns `model` as one rank has it, and with adapters if some are trained: in place, on fake tensors.
        InputError if its weights are quantised and trained. `notes` gets what stays whole."""
        if self.training and (stored_weights(model)):
            raise InputError(
                f"{name}: has quantised weights, which are for inference; give --inference, or add ?weights=none, "
                "and --lora rank=16,weights=nf4 to train adapters beside quantised weights"
            )
        if self.shards.num_ranks > 1:
            if self.lora is not None:
                raise InputError(f"--lora: adapters are not cut in this version; leave {self.shards} or it out")
            with explained(name, remedy=self.remedy):
                notes += localise(model, args, kwargs, self.shards, name, training=self.training, rank=self.rank)
        return model if self.lora is None else adapted(model, self.lora, name)


@dataclass(frozen=True)
class Coverage:
    """Recorded calls whose FLOPs are estimated, or counted once."""

    unknown: Mapping[str, int]  # kind -> number of calls estimated at one FLOP per element of the result
    open_loops: Mapping[str, int] = field(default_factory=dict)  # kind -> loops counted once

    @property
    def num_unknown(self) -> int:
        return sum(self.unknown.values())


@dataclass(frozen=True, eq=False)
class Capture:
    """One step of a model: as a graph to place, as a program to execute, and how well its costs are known."""

    graph: Graph
    program: Program
    coverage: Coverage
    notes: tuple[str, ...] = ()  # what is left out, estimated or taken for granted, a sentence each
    seconds: float = 0.0  # that recording the step took, once PyTorch and the model were there
    cuts: Mapping[str, AxisCut] = field(default_factory=dict)  # of a rank: of parameters, output.NAME, tokens of that

    def __repr__(self) -> str:
        """Returns the graph's `repr`, and the number of ops of unknown cost if there are any."""
        unknown = f"; {self.coverage.num_unknown:,} calls of unknown cost" if self.coverage.num_unknown else ""
        return f"Capture({self.graph!r}{unknown})"

    def _repr_html_(self) -> str:
        """The graph's table with the notes below, as Jupyter shows them."""
        return self.graph._repr_html_() + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)


def capture(
    model: nn.Module | Step,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    training: bool = True,
    optimizer: OptimizerChoice = "adam",
    precision: str = "",
    lora: str | Lora = "",
    loss: Loss | None = None,
) -> Capture:
    """Records one step of `model(*args, **kwargs)`: forward, backward and update, or with `training=False` inference.

    Model and inputs may be real, fake or on the meta device. They are not used directly: everything runs on fake copies
    on the CPU and nothing is allocated. The model is captured in its own mode (`model.train()` or `.eval()`), inference
    under `torch.no_grad`. Global state (generators, gradient mode, default type and device) stays as it is.

    The loss is `loss(output)` if given; else the output's attribute or key `loss`; else the one float scalar among the
    outputs; else the sum of the means of the float outputs. In training the graph keeps the loss alone, in inference
    the outputs. `optimizer`, a name of `gdp.models.pytorch.optimizers.OPTIMIZERS` or an optimizer over the model's
    parameters, updates one parameter per op. The precision "mixed" keeps float32 copies of bfloat16 and float16
    parameters; "pure-bf16" and "float32" are checked. `lora`, such as "rank=16,weights=nf4", freezes the model and
    trains adapters of its linear layers. `name` is by default that of
    the module's class.

    Gradients are ordinary tensors, from the op that makes them to the update, as with `zero_grad(set_to_none=True)`;
    `resident_bytes` of a parameter are its own and its optimizer state's (Adam: two moments; the step count, one
    number, is left out), those of a buffer its own.

    `model` may be a step of the user's: a function of the arguments that runs forward, backward and its own optimizers,
    or a module with `training_step(batch)` and `configure_optimizers()`. It is called twice and recorded the second
    time; `optimizer`, `precision` and `loss` are its own. Its graph is placed, not executed.

    Raises InputError if the model fails or takes decisions from tensors' content, or if nothing in it can be trained.
    """
    return capture_step(model, args, kwargs, StepOptions(training, optimizer, loss, precision, Lora.parse(lora)), name)


def capture_step(
    model: nn.Module | Step,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: "StepOptions",
    name: str | None = None,
) -> Capture:
    """Records one step, or one rank's local program of it where `options` have shards; see `capture`."""
    if not callable(model):
        raise InputError(f"model is a {type(model).__name__}; a PyTorch module or a training step is expected")
    if name is None:
        name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "step")
    if isinstance(args, Tensor):
        args = (args,)
    if isinstance(args, Mapping):
        raise InputError(f"{name}: args is a {type(args).__name__}; give inputs by name as kwargs")
    with _isolated():
        mode = FakeTensorMode()
        if not isinstance(model, nn.Module) or is_own_step(model, options):
            return _record_own(model, args, kwargs or {}, mode, name, options)
        choice = rule_choice(options, unwrapped(model), name)
        with explained(name):
            step = _fake_copies(model, args, kwargs or {}, mode)
            with mode:
                step = options.adapted(*step, name, []), *step[1:]
        return _noted(_record(*step, mode, name, options, choice), model, options)


def capture_fn(
    build: Callable[[], tuple[Any, ...]],
    *,
    name: str | None = None,
    training: bool = True,
    optimizer: str = "adam",
    precision: str = "",
    lora: str | Lora = "",
    loss: Loss | None = None,
) -> Capture:
    """Records one step of the model that `build()` returns: (module, args) or (module, args, kwargs); see `capture`.

    `build` runs under `FakeTensorMode`: it allocates nothing, and cannot read tensors' content."""
    if not callable(build):
        raise InputError(f"build is a {type(build).__name__}; a function that returns (module, args) is expected")
    name = getattr(build, "__name__", type(build).__name__) if name is None else name
    captured = Built.by(build, name).capture(name, StepOptions(training, optimizer, loss, precision, Lora.parse(lora)))
    if not isinstance(captured, Capture):
        kind = type(captured).__name__
        raise InputError(f"{name}: build() returned {kind}; (module, args) or (module, args, kwargs) is expected")
    return captured


@dataclass(frozen=True, eq=False)
class Built:
    """The answer of a function that builds a model: on fake tensors, so nothing is allocated."""

    answer: Any
    mode: FakeTensorMode
    optimizers: Sequence[torch.optim.Optimizer]  # that the function made
    dtype: torch.dtype  # the default type that the function left
    has_card: bool  # the function has named a card
    name: str = ""
    notes: tuple[str, ...] = ()  # on wrappers that a copy leaves out

    @classmethod
    def by(cls, build: Callable[[], Any], name: str) -> "Built":
        """Calls `build` under fake tensors. InputError, with `name`, where it reads their content."""
        with _isolated() as on_cpu:
            mode, optimizers = _BuildMode(), list[torch.optim.Optimizer]()
            with explained(name), copies_allowed(), building(optimizers), mode:
                answer = build()
            return cls(answer, mode, optimizers, torch.get_default_dtype(), on_cpu.has_card, name)

    @property
    def is_model(self) -> bool:
        """True for (module, args) and (module, args, kwargs)."""
        return isinstance(self.answer, tuple) and len(self.answer) in (2, 3) and callable(self.answer[0])

    def _example(self) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
        return self.answer if len(self.answer) == 3 else (*self.answer, {})

    def capture(self, name: str, options: StepOptions) -> Capture | Any:
        """Returns the recorded step, or the answer itself if it is no model. The model may have changed by then."""
        if not self.is_model:
            return self.answer
        with _isolated(self.dtype, has_card=self.has_card):
            model, args, kwargs = self._example()
            if is_own_step(model, options):
                return _record_own(model, args, kwargs, self.mode, name, options, self.optimizers)
            built = model
            tensors = (*named_state(model), *named_inputs(args, kwargs))
            with explained(name):
                check_kinds(model, tensors)
            if not all(isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode for _, tensor in tensors):
                with explained(name):
                    model, args, kwargs = _fake_copies(model, args, kwargs, self.mode)
            notes = list(self.notes)
            with self.mode:
                model = options.adapted(model, args, kwargs, name, notes)
            began = time.process_time()  # a busy machine does not make a capture seem long
            recorded = _record(model, args, kwargs, self.mode, name, options, rule_choice(options, model, name))
            return _noted(replace(recorded, seconds=time.process_time() - began), built, options, notes)

    def copied(self) -> "Built":
        """Returns a copy of a module and its inputs, on fake tensors of its own."""
        with _isolated(), copies_allowed(), explained(self.name):
            notes = tuple(wrapper_notes(self.answer[0]))
            return replace(self, answer=_fake_copies(*self._example(), self.mode), notes=notes)

    def styles(self, shards: Shards, layers: Sequence[str], name: str) -> Styles:
        """Returns the local program in the terms of PyTorch, see `gdp.models.pytorch.shards.styles`."""
        from gdp.models.pytorch.shards.styles import styles

        with _isolated(self.dtype, has_card=self.has_card), explained(name), self.mode:
            return styles(lambda: self.copied()._example(), shards, layers, name)

    def with_inputs(self, change: Callable[[Any], Any]) -> "Built":
        """Returns the same model with other inputs: `change` makes each from the one that is there."""
        model, args, kwargs = self._example()
        return self.changed(lambda _: (model, tree_map(change, args), tree_map(change, kwargs)))

    def changed(self, change: Callable[[Any], Any]) -> "Built":
        """Returns what `change` makes of the answer, under the same fake tensors."""
        with _isolated(), self.mode:
            return replace(self, answer=change(self.answer))


def _noted(captured: Capture, model: nn.Module, options: StepOptions, more: Sequence[str] = ()) -> Capture:
    """Adds notes on the `model` as the user gave it, and those that are known already."""
    notes = (*captured.notes, *more, *notes_of(model, captured.program, is_training=options.training))
    return replace(captured, notes=tuple(dict.fromkeys(notes)))


class _BuildMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that all tensors share, also after `build` copies modules, as `nn.TransformerEncoder` does. The copy
    of a fake tensor would have a copy of its mode, and two modes do not mix."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_BuildMode":
        return self


@contextlib.contextmanager
def copies_allowed() -> Iterator[None]:
    """Silences a warning: when PyTorch copies a fake tensor, it looks for memory that the tensor does not have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def _record(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    name: str,
    options: StepOptions,
    choice: RuleChoice,
) -> Capture:
    stored = stored_weights(model)
    recorder = Recorder(mode, stored)
    parameters = dict(model.named_parameters())
    recorder.memories.add_module(model)
    for parameter in parameters.values():
        parameter.grad = None
    for path, tensor in named_inputs(args, kwargs):
        recorder.memories.add_source("input", path, tensor)
    handles = recorder.running.watch(model)
    gradients: dict[str, Ref] = {}
    loss_ref: Ref | None = None
    try:
        with mode, recorder, torch.set_grad_enabled(options.training), explained(name, recorder, options.remedy):
            output = model(*args, **kwargs)
            if options.training:
                value = _loss_of(output, options.loss, name, recorder)
                recorder.phases.current = "backward"
                value.backward()  # type: ignore[no-untyped-call]
                recorder.phases.current = "update"
                for path, parameter in parameters.items():
                    rule = choice(path, parameter)
                    if parameter.requires_grad and parameter.grad is not None and rule is not None:
                        gradients[path] = recorder.record_update(path, parameter, rule)
                loss_ref = recorder.memories.ref(value)
            outputs = {path: recorder.memories.ref(tensor) for path, tensor in named_tensors(output, "")}
            results = [(OUTPUT + path, tensor) for path, tensor in named_tensors(output, "")]
            results += model.named_parameters(remove_duplicate=False)
            cuts = {path: cut for path, tensor in results if (cut := getattr(tensor, STORED, cut_of(tensor)))}
            cuts |= {TOKENS_OF + path: cut for path, tensor in results if (cut := getattr(tensor, OUTER, None))}
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters.values():
            parameter.grad = None
    if options.training and not gradients:
        raise InputError(
            f"{name}: no parameter gets a gradient from the loss; let one require it or capture with training=False"
        )
    if options.training:
        _check_precision(options.precision, [parameters[path] for path in gradients], recorder, name)
    graph, program = assemble(recorder, name, outputs, loss_ref, gradients)
    graph = overlapped(graph) if options.shards.overlap else graph
    if not options.training:
        recorder.notes.pop(NO_GRADIENT, None)
    return Capture(graph, program, Coverage(recorder.uncovered), tuple(recorder.notes), cuts=cuts)


def _check_precision(precision: str, trained: Sequence[Tensor], recorder: Recorder, name: str) -> None:
    """Raises InputError if a step does not have its precision; notes weights in half precision that have no copies."""
    half = sorted({dtype_name([parameter]) for parameter in trained if parameter.dtype in HALF})
    computed = next((record for record in recorder.memories.records if record.dtype in PRECISIONS[MIXED]), None)
    if precision == MIXED and computed is None:
        raise InputError(
            f"{name}: precision mixed has weights in bfloat16 or float16 with float32 copies, or autocast, and here "
            "all is in other types; leave it out, or give the model in bfloat16 (--dtype bfloat16)"
        )
    if precision == PURE_BF16 and any(parameter.dtype != torch.bfloat16 for parameter in trained):
        raise InputError(f"{name}: precision pure-bf16 is for weights in bfloat16; give the model in bfloat16")
    if precision == FLOAT32 and computed is not None:
        raise InputError(
            f"{name}: precision float32, and {computed.module or name} computes in {computed.dtype} as it is written "
            f"({computed.kind}); take autocast and casts out of the model, or leave the option out"
        )
    if half and not precision:
        recorder.notes[
            f"weights are trained in {' and '.join(half)} as the model is written, without float32 copies; "
            "precision mixed adds them"
        ] = None


def _loss_of(output: Any, loss: Loss | None, name: str, recorder: Recorder) -> Tensor:
    """Calls `pick_loss`; the error names the cause where a checkpoint has cut off the gradients."""
    try:
        return pick_loss(output, loss, name)
    except InputError:
        if NO_GRADIENT in recorder.notes:
            raise InputError(f"{name}: {NO_GRADIENT}") from None
        raise


def is_own_step(model: Any, options: StepOptions) -> bool:
    """Returns whether `model` is a training step of the user's, instead of a module that gdp trains."""
    return (options.training and has_own_step(model)) or (callable(model) and not isinstance(model, nn.Module))


def _record_own(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    name: str,
    options: StepOptions,
    built: Sequence[torch.optim.Optimizer] = (),
) -> Capture:
    """Captures a user's own step."""
    if not options.training:
        raise InputError(f"{name}: is a training step of your own; give its module for inference")
    if options.shards.num_ranks > 1:
        raise InputError(f"{name}: is a training step of your own, which is not cut; leave {options.shards} out")
    is_changed = options.precision or options.lora
    if options.optimizer != "adam" or is_changed or options.loss is not None:
        raise InputError(f"{name}: is a training step of your own, which has its optimizers in it; leave options out")
    explain = partial(explained, name)
    try:
        model = getattr(model, "_orig_mod", model) if isinstance(model, nn.Module) else model
        recorder, outputs, calls = record_own_step(model, args, kwargs, mode, built, explain)
    except InputError as error:
        raise error if str(error).startswith(name) else InputError(f"{name}: {error}") from error
    graph, program = assemble(recorder, name, outputs, None, {})
    return Capture(graph, program, Coverage(recorder.uncovered), (*recorder.notes, *calls.notes))


def rule_choice(options: StepOptions, model: nn.Module, name: str) -> RuleChoice:
    """Returns the rule of each parameter of `model`; InputError for an optimizer that is not known."""
    optimizer = options.optimizer
    with prefixed(name):
        if isinstance(optimizer, torch.optim.Optimizer):
            if options.precision == MIXED:
                raise InputError(f"master weights need the name of an optimizer; give one of {', '.join(OPTIMIZERS)}")
            rules = rules_of(optimizer, {id(parameter): path for path, parameter in model.named_parameters()})
            return lambda path, _parameter: rules.get(path)
        check_optimizer(str(optimizer))
    return named_rule(str(optimizer), master_weights=options.precision == MIXED)


def _fake_copies(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns the model and its inputs with fake tensors in place of all tensors, shared memory still shared."""
    model = unwrapped(model)
    named = list(named_state(model)), list(named_inputs(args, kwargs))
    check_kinds(model, (*named[0], *named[1]))
    state, inputs = ([tensor for _, tensor in tensors] for tensors in named)
    memo = fake_memories(state, mode) | fake_memories(inputs, mode) | {id(CARD): CARD}
    return (
        copy.deepcopy(model, dict(memo)),
        copy.deepcopy(tuple(args), dict(memo)),
        copy.deepcopy(dict(kwargs), dict(memo)),
    )


@contextlib.contextmanager
def _isolated(default: torch.dtype | None = None, *, has_card: bool = False) -> Iterator[OnCpu]:
    """Restores global state after a capture; a default device or inference mode does not reach it. `default` is the
    default type inside, and `has_card` says that the code has named a card before."""
    dtype = torch.get_default_dtype()
    try:
        if default is not None:
            torch.set_default_dtype(default)
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            as_if_on_a_card(has_card=has_card) as on_cpu,
        ):
            yield on_cpu
    finally:
        torch.set_default_dtype(dtype)
