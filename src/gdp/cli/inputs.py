"""Reads and checks the inputs of commands: graphs, plans, placers, checkpoints."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gdp.cli.shared import log
from gdp.cluster import Cluster
from gdp.errors import InputError, UnevenBatchError, WrongBatchError, prefixed
from gdp.export import accelerate_maps
from gdp.export.accelerate_maps import NAMES, PREFIX
from gdp.graph import Graph
from gdp.models.hugging_face.sizes import without_context
from gdp.models.model import Model
from gdp.models.source import ModelSource
from gdp.planning.compare import DEFAULT_PLACERS, Rival
from gdp.planning.options import LIMITS, READING
from gdp.planning.plan_directory import files_beside
from gdp.planning.plan_source import PlanSource
from gdp.report.progress import live
from gdp.search.batch_parts import Parts
from gdp.search.question import BatchQuestion
from gdp.search.rivals.rivals import RIVALS, SERVERS
from gdp.search.solvers import SOLVERS, solver_of
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem


def read_graph(source: ModelSource) -> Model:
    """Reads MODEL, and says in notes where its graph may not be the one that the user means."""
    text, count = source.text, source.reading.microbatches
    with live(f"reading {text}"):
        try:
            model = source.whole()
        except (UnevenBatchError, WrongBatchError):
            raise
        except InputError as error:
            if count > 1 and source.assumes_batch:
                dimension = source.reading.cut_dimension
                raise InputError(f"{error}; --microbatches splits inputs along their {dimension}") from error
            raise
    for note in model.notes:
        log(f"gdp: note: {note}")
    if count > 1 and source.assumes_batch:
        dimension = source.reading.cut_dimension
        log(f"gdp: note: {text}: micro-batches are parts of inputs along the {dimension}, that of the first tensor")
    if count > 1 and not model.is_captured:
        log(f"gdp: note: {text} is the step of one micro-batch, the whole step has {count} times its work")
    return model


def build_problem(graph: Graph, cluster: Cluster, constraints: Constraints) -> Problem:
    """Builds the problem of `graph` on `cluster`; raises InputError for constraints that cannot be met."""
    with live(f"preparing {graph.name} on {cluster.name}"):
        return Problem.build(graph, cluster, constraints)


def check_placers(names: Iterable[str]) -> None:
    """Raises InputError for an unknown placer."""
    for name in names:
        solver_of(name)


def split_rivals(source: ModelSource, placers: str | None) -> tuple[list[str], list[str]]:
    """Returns (placers of gdp, rivals: modes of accelerate and parallel steps) that `--placers` names. The modes are
    among the defaults for Transformers models, except with micro-batches: accelerate has none."""
    if placers is None:
        is_whole_model = source.text.startswith("hf:") and source.reading.microbatches == 1
        has_rivals = is_whole_model and find_spec("accelerate") is not None
        return list(DEFAULT_PLACERS), list(NAMES) if has_rivals else []
    names = [name.strip() for name in placers.split(",")]
    for name in names:
        if name.startswith(PREFIX) and name not in NAMES:
            raise InputError(f"placer {name!r} is unknown; of accelerate there are {', '.join(NAMES)}")
    if len(set(names)) < len(names):
        raise InputError(f"--placers {placers}: name each once")
    rivals = (*NAMES, *RIVALS, *SERVERS)
    return [name for name in names if name not in rivals], [name for name in names if name in rivals]


def find_rivals(
    names: Sequence[str], source: ModelSource, cluster: Cluster, constraints: Constraints
) -> dict[str, Rival]:
    """Returns the rivals `names` for MODEL: modes of accelerate, and the parallel steps of other tools. The modes need
    a PyTorch model of one batch, the parallel steps a training step whose batch can be split, servers no backward."""
    parallel = [name for name in names if name not in NAMES]
    return {
        **_accelerate_modes([name for name in names if name in NAMES], source),
        **(_parallel_steps(parallel, source, cluster, constraints) if parallel else {}),
    }


def check_rivals(names: Sequence[str], source: ModelSource) -> None:
    """Raises InputError for parallel steps where MODEL's batch cannot be split, before the graph is captured."""
    if source.reading.training and set(names) & set(SERVERS):
        raise InputError(f"--placers {','.join(SERVERS)}: is a way to serve; add --inference or --phase decode")
    label = f"--placers {','.join(name for name in names if name in RIVALS)}"
    if not set(names) & set(RIVALS):
        return
    if source.is_file:
        raise InputError(
            f"{label}: cuts the batch, and {source.text} is a file, whose batch cannot be split; name its model"
        )
    if not source.reading.training:
        raise InputError(f"{label}: is a way to train; leave out --inference")
    if source.reading.microbatches > 1:
        raise InputError(f"{label}: chooses its own micro-batches; leave out --microbatches")


def _parallel_steps(
    names: Sequence[str], source: ModelSource, cluster: Cluster, constraints: Constraints
) -> dict[str, Rival]:
    parts = Parts(lambda num_parts: source.part(num_parts).graph, source.batch_size or 1, source=source)
    question = BatchQuestion(parts, cluster, constraints)
    known = {**RIVALS, **SERVERS}
    return {name: partial(lambda rival, problem: rival(question), known[name]) for name in names}


def _accelerate_modes(names: Sequence[str], source: ModelSource) -> dict[str, Rival]:
    if not names:
        return {}
    if source.reading.microbatches > 1:
        raise InputError(f"--placers {','.join(names)}: accelerate has no micro-batches; leave out --microbatches")
    if source.reading.serving.has_cache:  # accelerate maps modules, which have no cache when it does
        source = ModelSource(without_context(source.text), source.reading)
    module = accelerate_maps.module_of(source)
    prefix, step = accelerate_maps.PREFIX, accelerate_maps.best_step
    return {name: partial(step, module, mode=name.removeprefix(prefix)) for name in names}


def check_checkpoint(checkpoint: str | None, placers: Sequence[str]) -> None:
    """Raises InputError for a checkpoint that is damaged or not used, before the graph is captured."""
    if checkpoint is None:
        return
    asking = [name for name, solver in SOLVERS.items() if solver.takes_checkpoint]
    if not set(placers) & set(asking):
        others = f"{', '.join(asking[:-1])} or {asking[-1]}"
        raise InputError(f"--checkpoint: {', '.join(placers)} takes none; use it with --placer {others}")
    from gdp.policy.checkpoint import load_checkpoint

    load_checkpoint(checkpoint)


def open_plan(path: Path, given: Mapping[str, Any], model: str | None = None, devices: str | None = None) -> PlanSource:
    """Reads the plan in `path`, with what is `given` on the command line in place of what was asked."""
    if not path.exists() and re.fullmatch(r"[\w.]+:[\w.]+|hf:.+", str(path)):
        raise InputError(f"{path}: is a MODEL, and a gdp-plan file is expected; gdp place makes one")
    options = {name: value for name, value in given.items() if name in (*READING, *LIMITS)}
    return PlanSource(Plan.load(path), model=model or "", devices=devices or "", options=options)


def read_planned(source: PlanSource) -> tuple[Model, Problem]:
    """Reads the step that a plan places, and the problem that it solves. InputError names the plan."""
    path = source.plan.path
    with prefixed(path):
        with live(f"reading the step of {path}"):
            cluster, model = source.cluster, source.read()
        for note in model.notes:
            log(f"gdp: note: {note}")
        return model, build_problem(model.graph, cluster, source.constraints)


def check_spares_plan(option: str, path: Path, plan: Path) -> None:
    """Raises InputError if writing `path` would overwrite the plan or the files that are read beside it."""
    if os.path.realpath(path) in set(map(os.path.realpath, (plan, *files_beside(plan)))):
        raise InputError(f"{option} {path}: the plan needs that file; name another one")
