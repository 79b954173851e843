"""gdp's arm of benchmark `execution-against`: layouts of a subject, chosen by measured times and run on this host.

parts of the batch --captured, ops measured--> Parts --place--> plan --step_program--> host_executor
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from benchmarks.op_times import op_times, with_op_times
from benchmarks.rival_processes import TrainedStep
from benchmarks.training_subjects import Inputs, Subject
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.execute.backends import Target
from gdp.execute.executable import Executable
from gdp.execute.host_executor import host_executor
from gdp.execute.layouts.step_program import step_program
from gdp.execute.measurement import Order
from gdp.graph import Graph
from gdp.models.pytorch import Program, capture
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.search.batch_parts import Parts
from gdp.simulator.plan import Plan


class MeasuredSubject:
    """The steps of the parts of a subject's batch, with op times measured on `targets`, the devices of `cluster`.

    With no steps to measure ops in, the cluster alone tells their times. All parts are read and measured at once, so
    that a search for a layout spends its time on the search, and compares times that were measured in turn.
    """

    def __init__(self, subject: Subject, cluster: Cluster, targets: Sequence[Target], *, num_steps: int) -> None:
        self.subject, self.cluster, self.targets = subject, cluster, tuple(targets)
        self._executables: dict[int, Executable] = {}
        for count in subject.counts():
            with contextlib.suppress(InputError):  # a layer may fail with so few samples
                self._executables[count] = self._captured(count)
        named = {str(count): executable for count, executable in self._executables.items()}
        self._times_ns = op_times(named, targets, num_steps) if num_steps else {}
        self.parts = Parts(self._read, subject.batch_size)
        for count in self._executables:
            self.parts.exact(count)

    def program(self, step: Step) -> Program:
        """Returns the program of `step`. InputError for a layout that cannot be run."""
        program = self._executables[step.layout.num_parts].capture.program
        return program if step.layout.is_whole else step_program(program, step)

    def content(self, program: Program) -> dict[int, Tensor]:
        """Copies parameters, buffers and the inputs of the whole batch, by tensor of `program`."""
        module, (args, kwargs) = self._start
        return program.bind_state(module) | program.bind_inputs(args, kwargs)

    @cached_property
    def _start(self) -> tuple[nn.Module, Inputs]:
        """The module and the inputs that all ways to train begin with."""
        return self.subject.module(), self.subject.inputs()[0]

    def step(self, plan: Plan) -> Step:
        """Returns the step that `plan` places."""
        return Step.of_document(self.parts.exact, plan.layout or Layout().document())

    def _captured(self, num_parts: int) -> Executable:
        subject = self.subject
        module, (args, kwargs) = subject.module(num_parts), subject.inputs(num_parts)[0]
        return Executable(capture(module, args, kwargs, name=subject.name), module, args, kwargs)

    def _read(self, num_parts: int) -> Graph:
        if num_parts not in self._executables:
            raise InputError(f"{self.subject.name}: {num_parts} parts were not measured; take another number")
        executable, times_ns = self._executables[num_parts], self._times_ns.get(str(num_parts))
        return executable.capture.graph if times_ns is None else with_op_times(executable, self.cluster, times_ns)


@dataclass(eq=False)
class OwnSteps:
    """A program that trains step after step, in one order; a context manager."""

    program: Program
    order: Order
    content: Mapping[int, Tensor]
    targets: Sequence[Target]

    def __enter__(self) -> Self:
        self._executor = host_executor(self.program, self.order, self.targets)
        self._executor.load(self.content)
        return self

    def __exit__(self, *_error: object) -> None:
        self._executor.close()

    def step(self) -> TrainedStep:
        """Trains a step. ExecutionError if an op fails."""
        record = self._executor.step(self.content)
        loss = self._executor.loss(record)
        assert isinstance(loss, torch.Tensor), "it trains"
        return TrainedStep(record.finish_ns - record.start_ns, float(loss))
