"""Benchmark `parallel`: our choice of a layout against op placement and the parallel steps that users run today.

Each model trains on each set of devices under `gdp.place`, under op placement by `auto` with the same
budget, and under the rivals of `gdp.search.rivals`. All are scored by one simulator, memory enforced.
"""

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import model_configs
from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.comparison import BEST_CLASSICAL, MeanRatio, WorkloadRow, compare, ratio_dots
from benchmarks.figures import dot_plot
from benchmarks.rows import Rows
from benchmarks.runs import Run, require_verified
from benchmarks.workloads import model_of, workloads
from gdp.bounds.layout_bound import layout_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.models.papers import PAPERS
from gdp.models.shards import WHOLE
from gdp.notebook import size
from gdp.parallel.layout import AUTO as BEST_LAYOUT
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.planning.warm_up import warm_up
from gdp.search.batch_parts import Parts
from gdp.search.place import answer, place
from gdp.search.place_question import PlaceQuestion, SearchOptions
from gdp.search.question import BatchQuestion, plan_of
from gdp.search.rivals.rivals import RIVALS, accelerators
from gdp.simulator.plan import Baseline, Plan
from gdp.simulator.problem import Problem

HF = "hf:"  # prefix of the published configs among the models
AUTO, OPS = "auto", "op placement"
BOUND = "bound of any layout"
OTHERS = (OPS, *RIVALS)
ALL, OF_LARGE = "all", "large"
FURTHER = (
    "moe",
    "resnet-101",
    "densenet-121",
    "hrnet-w32",
    "unet-256",
    "bert-large",
    "gpt2-large",
    "vit-large",
    "clip-b16",
    "deepspeech2",
)
# a decoder, an encoder, vision, a mixture of experts, an encoder with a decoder, a diffusion model
CONFIGS = ("gpt2", "bert-base", "vit-base", "deepseek-v2-lite", "t5-base", "sd-1.5-unet")
MODELS = (*PAPERS.names(), *FURTHER, *(f"{HF}{name}" for name in CONFIGS))
# what is trained on groups of cards: with few samples, and with many
LARGE = tuple(
    f"{HF}{name}?batch={batch}{sizes}"
    for name, sizes in (
        ("llama-3.1-8b", "&sequence=4096"),
        ("llama-70b", "&sequence=4096"),
        ("mixtral-8x7b", "&sequence=4096"),
        ("qwen3-30b-a3b", "&sequence=4096"),
        ("vit-giant", ""),
        ("dit-xl-2", ""),
    )
    for batch in (4, 64)
)
LARGE_DEVICES = (
    "8xa100-sxm-80g",
    "8xa100-pcie-80g",
    "2x(8xa100-sxm-80g)@100gbit",
    "2x(8xh100-sxm-80g)@8x400gbit",
    "4x(8xh100-sxm-80g)@8x400gbit",
)
DEVICES = (
    "4xp100-pcie-16g",
    "8xp100-pcie-16g",
    "4xa100-sxm-40g",
    "8xa100-sxm-40g",
    "2x(4xl4-24g)@25gbit",
    "2x(4xl4-24g)@100gbit",
    "rtx4090-24g+2xl4-24g",
    "2xrtx4090-24g+2xl4-24g",
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The step that a method finds for a model on devices."""

    status: str  # "ok", "infeasible" or "failed"
    step_time_ns: int | None
    layout: str
    reason: str  # why there is no step that fits
    seconds: float
    plan: Plan | None


@dataclass(frozen=True, kw_only=True)
class ParallelRow(WorkloadRow):
    """A model on devices; the baselines are op placement and the rivals."""

    model: str
    is_equal: bool  # all accelerators are of one kind
    layouts: Mapping[str, str]  # by method
    reasons: Mapping[str, str]

    def times_ns(self, name: str) -> tuple[int, ...] | None:
        return (self.lower_bound_ns,) if name == BOUND else super().times_ns(name)

    @property
    def num_replayed(self) -> int:
        """The plans that were saved, read back and replayed."""
        return self.num_plans + sum(baseline.status == "ok" for baseline in self.baselines.values())

    def layout_cell(self, name: str) -> str:
        """Returns the layout of a method, or why it has no step."""
        return self.layouts[name] if self.times_ns(name) else self.reasons[name]


@dataclass(frozen=True, kw_only=True)
class ParallelBenchmark(Benchmark):
    """Each model on each set of devices, within `budget` for our choice and for op placement.

    `large` are models that need groups of cards, and devices that have them; `all` models are on `all` devices, and
    large ones on large devices.
    """

    name = "parallel"
    budget: Budget = field(default_factory=lambda: Budget(seconds=30.0))
    models: tuple[str, ...] = ("inception-v3-b32", "rnnlm-2", "bert-large")
    devices: tuple[str, ...] = ("4xp100-pcie-16g", "rtx4090-24g+2xl4-24g")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (*workloads.names(), *workloads.variant_names(), *(f"{HF}{name}" for name in model_configs.names()))
        pick(self.name, "model", [name.partition("?")[0] for name in self.models], (ALL, OF_LARGE, *known))
        for text in self.devices:
            if text not in (ALL, OF_LARGE):
                Cluster.parse(text)

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        warm_up()
        placed = []
        with tempfile.TemporaryDirectory(prefix="gdp-configs-") as directory:
            for model, names in self._asked():
                name, is_config = model.removeprefix(HF), model.startswith(HF)
                text = model_configs.write_model(name, Path(directory)) if is_config else model_of(name)
                parts = Parts.of(text)
                for devices in names:
                    placed.append(self._row(model, devices, parts, rows))
                    say(str(placed[-1]))
        kinds = {
            "equal": [row for row in placed if row.is_equal and row.model not in LARGE],
            "unequal": [row for row in placed if not row.is_equal],
            "large models": [row for row in placed if row.model in LARGE],
        }
        return {
            "rows": placed,
            "others": OTHERS,
            "num_replayed": sum(row.num_replayed for row in placed),
            "means": {
                kind: {name: compare(part, AUTO, name) for name in (BEST_CLASSICAL, *OTHERS)}
                | {BOUND: compare(part, BOUND, BEST_CLASSICAL)}
                for kind, part in kinds.items()
                if part
            },
            "mean": compare(placed, AUTO, BEST_CLASSICAL),
            "over_ops": MeanRatio.of([row.ratios(AUTO, OPS) for row in placed]),
            "worst": max(ratio_dots(placed, AUTO, BEST_CLASSICAL), default=None),
        }

    def _asked(self) -> list[tuple[str, tuple[str, ...]]]:
        """Returns each model with its devices."""
        if self.models == self.devices == (ALL,):
            return [(model, DEVICES) for model in MODELS] + [(model, LARGE_DEVICES) for model in LARGE]
        models = _named(self.models, MODELS, LARGE)
        return [(model, _named(self.devices, DEVICES, LARGE_DEVICES)) for model in models]

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {name: ratio_dots(measured["rows"], AUTO, name) for name in (BEST_CLASSICAL, *OTHERS)}
        dots["best of all"] = dots.pop(BEST_CLASSICAL)
        return dot_plot("Parallel", "step time of auto over the other's; a dot for each row", dots, logarithmic=True)

    def _row(self, model: str, devices: str, parts: Parts, rows: Rows) -> ParallelRow:
        cluster, whole = Cluster.parse(devices), parts.exact(1)
        name = f"{model}-on-{devices}"
        question = BatchQuestion(parts, cluster)
        methods: dict[str, Callable[[], Attempt]] = {
            AUTO: lambda: choose(question, self.budget),  # first, and from parts of its own: it pays for what it reads
            OPS: lambda: place_ops(question, self.budget),
            **{rival: partial(ask, rival, question) for rival in RIVALS},
        }
        bound = rows.row(f"{name}-bound", _settings(question), partial(bound_row, question))
        found = {}
        for method, make in methods.items():
            settings = _settings(question, str(self.budget) if method in (OPS, AUTO) else "")
            path = rows.directory / f"{re.sub('[^0-9A-Za-z.-]+', '_', f'{name}-{method}')}.plan.json.gz"
            found[method] = rows.row(f"{name}-{method}", settings, partial(made_row, make, path, question))
        ours = found.pop(AUTO)
        attempts = {**found, AUTO: ours}
        run = Run(ours["status"], ours["step_time_ns"], ours["seconds"], ours["seconds"], 0, 0, {})
        return ParallelRow(
            workload=name,
            cluster=devices,
            num_ops=whole.num_ops,
            lower_bound_ns=bound["bound_ns"],
            baselines={key: Baseline(row["status"], row["step_time_ns"], row["seconds"]) for key, row in found.items()},
            runs={AUTO: (run,)},
            model=model,
            is_equal=len({cluster.devices[number].kind for number in accelerators(question)}) == 1,
            layouts={key: row["layout"] for key, row in attempts.items()},
            reasons={key: row["reason"] for key, row in attempts.items()},
        )


def _named(names: tuple[str, ...], everything: tuple[str, ...], large: tuple[str, ...]) -> tuple[str, ...]:
    return everything if names == (ALL,) else large if names == (OF_LARGE,) else names


def _settings(question: BatchQuestion, budget: str = "") -> dict[str, str]:
    return {
        "graph": question.parts.exact(1).fingerprint,
        "cluster": question.cluster.fingerprint,
        "budget": budget,
        "gdp_version": version("gdp-placement"),
    }


def bound_row(question: BatchQuestion) -> dict[str, Any]:
    """Returns a time that no layout of the batch on these devices can beat, as a row."""
    question.parts.read_ahead(question.cluster.num_devices)
    return {"bound_ns": max(layout_bound(question.parts.read, question.cluster), 1)}


def made_row(make: Callable[[], Attempt], path: Path, question: BatchQuestion) -> dict[str, Any]:
    """Returns an attempt as a row; its plan is saved in `path`, read back and replayed. RuntimeError if it differs."""
    attempt = make()
    plan = attempt.plan
    if plan is not None:
        plan.save(path)
    reason = re.sub(rf"{HF}\S*/", HF, attempt.reason)  # without the directory of a config
    row = asdict(replace(attempt, plan=None, reason=reason))
    del row["plan"]
    if row["status"] == "ok":
        _verify(row, path, question)
    return row


def _verify(row: Mapping[str, Any], path: Path, question: BatchQuestion) -> None:
    """Raises RuntimeError unless the plan in `path` gives the row's figures on the graph of MODEL and its layout."""
    document = Plan.load(path).layout
    layout = Layout() if document is None else Layout.of_document(document)
    if layout.shards != WHOLE:
        question = question.on_groups(layout.shards)
    if document is None or layout.of_groups.is_whole:
        graph = question.parts.exact(1)
    else:
        graph = Step.of_document(question.parts.exact, document).graph
    require_verified(path, Problem.build(graph, question.cluster), row["step_time_ns"])


def place_ops(question: BatchQuestion, budget: Budget) -> Attempt:
    """Places the ops of the whole step."""
    began, whole = time.monotonic(), question.parts.exact(1)
    clock = Clock(budget, timer=time.process_time)
    return _attempt(place(whole, question.cluster, budget=clock), str(Layout()), began)


def choose(question: BatchQuestion, budget: Budget) -> Attempt:
    """Chooses a layout and its placement: our answer."""
    began, source = time.monotonic(), question.parts.source
    assert source is not None, "it is a MODEL"
    asked = PlaceQuestion.of(source, question.cluster, question.constraints, BEST_LAYOUT, None, SearchOptions())
    asked.prepare()
    solution = answer(asked, Clock(budget, timer=time.process_time))
    assert solution.best is not None, "it was looked for"
    assert solution.plan is not None, "it is of the best"
    return _attempt(solution.plan, str(solution.best.layout), began)


def _attempt(plan: Plan, layout: str, began: float) -> Attempt:
    seconds = time.monotonic() - began
    if plan.search is not None and plan.search.interrupted:  # the best so far is no row
        raise KeyboardInterrupt
    if plan.status == "ok":
        return Attempt("ok", plan.step_time_ns, layout, "", seconds, plan)
    assert plan.search is not None, "it was searched for"
    missing = plan.search.missing_bytes
    fullest = int(missing.argmax())
    reason = f"does not fit by {size(int(missing[fullest]))} on {plan.devices[fullest]}"
    return Attempt("infeasible", plan.step_time_ns, layout, reason, seconds, None)


def ask(rival: str, question: BatchQuestion) -> Attempt:
    began = time.monotonic()
    best = RIVALS[rival](question).best
    seconds = time.monotonic() - began
    assert best is not None, "it says at least why there is no step"
    layout = "" if best.cut is None else str(best.layout)
    if best.simulation is None:
        return Attempt("failed", None, layout, best.obstacle, seconds, None)
    if not best.fits:
        return Attempt("infeasible", best.replay.step_time_ns, layout, best.obstacle, seconds, None)
    plan = replace(plan_of(best.simulation, 0, rival, 0), layout=best.step.document())
    return Attempt("ok", best.step_time_ns, layout, "", seconds, plan)
