"""Places candidates on the machine as it is known, and writes each into a directory of its own for a command.

machine --find_candidates--> plans --export--> steps as the tool runs them --> their times, and how these follow
the numbers of the machine, in logarithms: what a measured step says of the machine needs no search, and no graph"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import exp, inf, log
from pathlib import Path

import numpy as np

from gdp import files
from gdp.arrays import unique
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.cluster.device import EAGER, split_runtime
from gdp.errors import InputError
from gdp.export.exportable_plan import answer_for
from gdp.export.exported_plan import exported, target_for
from gdp.export.layouts.target import CutStep, ranks_of
from gdp.export.targets_by_name import find_layout_target, find_target
from gdp.models.source import ModelSource
from gdp.parallel.layout import Layout
from gdp.planning.machine_fit import STEP, Number, known_numbers, with_factors
from gdp.planning.plan_directory import files_beside
from gdp.search.place import answer
from gdp.search.place_question import PlaceQuestion
from gdp.simulator.plan import Asked, Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, replay, simulate
from gdp.tune.candidates import PlannedCandidate, find_candidates, in_turn
from gdp.tune.tuning import LoggedCandidate

RUNTIME, RANKS = "GDP_RUNTIME", "GDP_RANKS"
"""Environment variables of a command: how the step is to be run, and the number of its processes on a host."""
_MOST_CANDIDATES = 100  # of a search
_ORDERED = 10  # that are predicted to be the fastest come in other orders, too. Untuned


@dataclass(frozen=True, eq=False, kw_only=True)
class Placing:
    """Places candidates on a machine, anew whenever it is known better."""

    question: Callable[[Cluster], PlaceQuestion]
    cluster: Cluster  # the machine as it was known at first
    source: ModelSource
    asked: Asked
    directory: Path
    budget: Budget  # of a search; as long again at most to learn how times follow the machine
    target: str = ""  # of exports; "": plans alone
    runtimes: Sequence[str] = ()  # in which each plan is measured, that of the cluster first
    has_orders: bool = False  # what runs plans starts ops in the order that they have: executors of gdp
    say: Callable[[str], None] = lambda text: None

    @cached_property
    def numbers(self) -> list[Number]:
        """The numbers of the machine that are learned."""
        return list(known_numbers(self.cluster))

    def candidates(
        self, factors: Mapping[Number, float], known: Sequence[LoggedCandidate] = ()
    ) -> list[LoggedCandidate]:
        """Returns the candidates that are not `known`, on the machine with its numbers multiplied by `factors`, each
        written into the directory of its number. InputError where TARGET can express none of all."""
        found = self._found(factors)
        inverse = {number: 1 / factor for number, factor in factors.items()}
        keys, reasons = {row.key for row in known}, dict[str, None]()
        rows, steps = list[LoggedCandidate](), list[Simulation]()
        for each in found:
            try:
                step, content, environment = self._exported(each.plan)
            except InputError as error:
                if str(error) not in reasons:
                    self.say(f"{each.name} is left out: {error}")
                reasons[str(error)] = None
                continue
            environment |= {RUNTIME: each.runtime}
            key, placed = (
                hashlib.sha256(repr((content or plan.key, environment)).encode()).hexdigest()
                for plan in (each, replace(each, order=""))
            )
            if key in keys:
                continue
            keys.add(key)
            path = self.directory / str(len(known) + len(rows)) / "plan.json"
            for name, text in content.items():
                files.write_bytes(path.with_name(name), text.encode())
            replace(each.plan, asked=self._asked(each)).save(path)
            assert each.plan.problem is not None
            each.plan.problem.cluster.save(files_beside(path)[2])
            time_ns = _time_ns(step, inverse) if factors else step.step_time_ns
            first = each.comes_first and not known
            row = LoggedCandidate(each.name, time_ns, each.spread, first, each.traits, key)
            names = [path.name, files_beside(path)[2].name, *content]
            kind = str(step.step_kind or "")
            rows.append(replace(row, environment=environment, placed=placed, files=names, step_kind=kind))
            steps.append(step)
        if found and not rows and not known:
            raise InputError(f"--to {self.target}: expresses none of {len(found)} plans; the last: {[*reasons][-1]}")
        if known:
            self.say(f"placed anew on the machine as it is known now: {len(rows)} more plans")
        return self._with_slopes(rows, steps, inverse, known)

    def _found(self, factors: Mapping[Number, float]) -> list[PlannedCandidate]:
        question = self.question(with_factors(self.cluster, factors) if factors else self.cluster)
        find = answer
        if self.target and find_layout_target(self.target, is_cut=True) is None:
            find = partial(answer_for, find_target(self.target))
        say = (lambda text: None) if factors else self.say
        found = find_candidates(question, Clock(self.budget), _MOST_CANDIDATES, find, say)
        first, *others = self.runtimes or [next((d.runtime for d in self.cluster.devices if not d.is_cpu), EAGER)]
        found = [replace(each, runtime=first) for each in found]
        again = [each.run_by(runtime) for runtime in others for each in found]
        found += [each for each in again if each.plan.status == "ok"]
        if self.has_orders:
            fastest = sorted(found, key=lambda each: each.plan.step_time_ns)[:_ORDERED]
            found = in_turn([*found, *(other for each in fastest for other in each.in_other_orders())])
        names = (f"{each.name}, {each.runtime}" if others else each.name for each in found)
        return [replace(each, name=name) for each, name in zip(found, names, strict=True)]

    def _asked(self, candidate: PlannedCandidate) -> Asked:
        devices = split_runtime(self.asked.cluster)[0]
        has_several = len(self.runtimes) > 1
        return replace(self.asked, cluster=f"{devices}:{candidate.runtime}") if has_several else self.asked

    def _exported(self, plan: Plan) -> tuple[Simulation, dict[str, str], dict[str, str]]:
        """Returns the step as it is run, the tool's file by its name, and the environment. InputError where the tool
        does not run it."""
        problem = plan.problem
        assert problem is not None
        if not self.target:
            return replay(problem, plan), {}, {RANKS: str(len(plan.cards))}
        if plan.layout is None and len(unique(plan.placement)) == 1:  # one replica, to tools that take layouts
            whole = Layout().document() | {"batch": self.source.batch_size}
            plan = replace(plan, layout=whole) if find_layout_target(self.target, is_cut=True) else plan
        target = target_for(plan, self.target)
        export, environment = exported(problem, plan, target, self.source), {RANKS: str(len(plan.cards))}
        if not export.fits:
            raise InputError(f"the step does not fit as {target.name} runs it")
        if isinstance(export.step, CutStep):
            ranks = ranks_of(export.step, target.name)
            environment[RANKS] = str(len(ranks.gpus[0]))
            if len(ranks.gpus) == 1:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ranks.gpus[0]))
        return export.simulation, {target.file_name: export.content}, environment

    def _with_slopes(
        self,
        rows: Sequence[LoggedCandidate],
        steps: Sequence[Simulation],
        inverse: Mapping[Number, float],
        known: Sequence[LoggedCandidate],
    ) -> list[LoggedCandidate]:
        """Returns `rows` with how their times follow the machine; where there is no time for it as others do."""
        ends_s, slopes = time.monotonic() + (self.budget.seconds or inf), list[list[float]]()
        for row, step in zip(rows, steps, strict=True):
            if time.monotonic() > ends_s:
                break
            times_ns = (
                _time_ns(step, {**inverse, number: inverse.get(number, 1.0) * exp(STEP)}) for number in self.numbers
            )
            slopes.append([round(log(max(time_ns, 1) / max(row.predicted_ns, 1)) / STEP, 4) for time_ns in times_ns])
        all_known = [*(row.slopes for row in known), *slopes] or [[0.0] * len(self.numbers)]
        slopes += [np.mean(all_known, axis=0).round(4).tolist()] * (len(rows) - len(slopes))
        return [replace(row, slopes=own) for row, own in zip(rows, slopes, strict=True)]


def _time_ns(step: Simulation, factors: Mapping[Number, float]) -> int:
    """Returns the time of `step`, in its order of ops, with the numbers of its machine multiplied by `factors`."""
    problem = Problem.build(step.problem.graph, with_factors(step.problem.cluster, factors))
    return simulate(problem, step.placement, order=step.order).step_time_ns
