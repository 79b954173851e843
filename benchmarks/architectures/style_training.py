"""Training of the style scorer: styles are tried on many problems, and a network learns how they rank.

    task n:  problem --> styles, tried and ranked --> outcomes       n even: random styles
    fit:     (problem, style) --> logarithm of the rank              n odd:  also styles that the last fit prefers

That is regression, not reinforcement: each trial teaches, whether it was good or bad. The network is fitted anew each
time that there are twice as many outcomes, and at the end. Everything depends on (seed, number of the task) and on the
tasks before it, so a killed run resumes to the same parameters, and a run goes on to more tasks.
S styles tried on a problem, R rows: a style on a problem each. M features of a problem, F numbers of a style.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from scipy.stats import spearmanr
from torch import Tensor

from gdp import files
from gdp.arrays import F32, F64, I64
from gdp.errors import InputError
from gdp.policy.checkpoint import save_checkpoint
from gdp.policy.construction import Constructor
from gdp.policy.features import INITIAL_WEIGHTS
from gdp.policy.scheduler import NORMAL, SchedulerPolicy, StyleNetwork, one_thread
from gdp.policy.settings import STYLES
from gdp.policy.style_scorer import Style, StyleScores, bent, draw_styles, style_numbers, target
from gdp.policy.training.pretrain import Provenance, manifest_of
from gdp.policy.training.tasks import Tasks, TrainingTask
from gdp.policy.unit_source import problem_features
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many
from gdp.tensor_file import TensorFormat

PART = 50  # problems in a file
_COLUMNS = ("features", "numbers", "ranks", "cpu_seconds")
_WIDER = 0.5  # standard deviation of the logarithm of a scale, around a style; untuned
_POOLS = (8, 1, 3)  # styles drawn for each one that is tried, in turn; of 1 all are tried


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Styles tried on one problem."""

    features: F32  # [M] of the problem
    numbers: F32  # [S, F] of the styles
    ranks: F32  # [S] from 0, the best, to 1
    cpu_seconds: float = 0.0  # spent on them


OUTCOMES = TensorFormat(
    name="gdp-style-outcomes",
    version=1,
    fields={"run": files.is_string},
    writer="`python -m benchmarks.architectures.train`",
    remedy="delete the directory, and train again",
)


def try_styles(
    problem: Problem,
    constructor: Constructor,
    scores: StyleScores | None,
    sizes: tuple[int, int],
    rng: np.random.Generator,
) -> Outcomes:
    """Returns the outcomes of styles in groupings of `problem`; `sizes` are (groupings, styles in each).

    Half of the styles are wider than those of searches, so that the scorer knows the surroundings. With `scores` two
    of three groupings have styles that these prefer, where mistakes would cost most.
    """
    numbers, times, excess = [], [], []
    num_groupings, num_styles = sizes
    for number in range(num_groupings):
        pool = 1 if scores is None else _POOLS[number % len(_POOLS)]
        styles = draw_styles(pool * num_styles, rng)
        if number % 2:
            styles = [_widen(style, rng) for style in styles]
        first = styles[0]
        if scores is not None and pool > 1:
            first, order = scores.for_one_grouping(styles, style_numbers(styles, problem.num_devices))
            styles = [styles[position] for position in order[:num_styles]]
        styles = [replace(style, num_units=first.num_units, following=first.following) for style in styles]
        instance = constructor.grouped(problem, first.num_units, rng, following=first.following)
        step_time_ns, peaks = evaluate_many(problem, constructor.place(instance, styles, rng), num_threads=1)
        numbers.append(style_numbers(styles, problem.num_devices))
        times.append(step_time_ns)
        excess.append(np.maximum(peaks - problem.memory_limit_bytes, 0).sum(axis=1))
    ranks = _ranks(np.concatenate(times), np.concatenate(excess))
    return Outcomes(problem_features(constructor.source(problem)), np.concatenate(numbers), ranks)


def _widen(style: Style, rng: np.random.Generator) -> Style:
    """Draws a style in a wider neighbourhood of `style`, with options as likely as any."""
    return replace(
        style,
        scale=bent(style, _WIDER, rng),
        most=float(rng.choice(STYLES.most)),
        slack=float(rng.choice(STYLES.slacks)),
        passes=int(rng.choice(STYLES.passes)),
    )


def _ranks(step_time_ns: I64, excess_bytes: I64) -> F32:
    """Returns [S], ranks between 0 and 1; what fits comes first, then what exceeds memory least."""
    order = np.lexsort((step_time_ns, excess_bytes))
    ranks: F64 = np.empty(len(order))
    ranks[order] = (np.arange(len(order)) + 0.5) / len(order)
    return ranks.astype(np.float32)


def write_part(directory: Path, number: int, run: str, outcomes: Sequence[Outcomes]) -> None:
    """Writes part `number` of the outcomes of `run`, from which an interrupted run goes on."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.stack([getattr(outcome, name) for outcome in outcomes]) for name in _COLUMNS}
    files.write_bytes(_path(directory, number), save(tensors, OUTCOMES.header(run=run)))


def read_parts(directory: Path, run: str) -> list[Outcomes]:
    """Reads the whole parts of `run` in `directory`, as far as they go. Raises InputError for those of another run."""
    outcomes: list[Outcomes] = []
    for number in range(len(list(directory.glob("*.safetensors"))) if directory.is_dir() else 0):
        path = _path(directory, number)
        with OUTCOMES.opened(path, "numpy") as (header, file):
            if header["run"] != run:
                raise InputError("is of a run with other options; delete the directory, or choose another --out")
            *columns, cpu_seconds = (file.get_tensor(name) for name in _COLUMNS)
        outcomes += [Outcomes(*row) for row in zip(*columns, cpu_seconds.tolist(), strict=True)]
    return outcomes


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:05}.safetensors"


_VALIDATION = 2**32 - 1  # in the place of a task's number; no task has it


@dataclass(frozen=True, slots=True, kw_only=True)
class StyleTrainingConfig:
    """Numbers of a run: with the same tasks they give the same parameters."""

    seed: int = 0
    num_tasks: int = 2000
    first_fit: int = 25  # tasks before the first fit; further ones follow after twice as many, and so on
    num_groupings: int = 24  # of each task's problem
    num_styles: int = 8  # in each grouping, as in searches
    epochs: int = 12
    batch: int = 1024  # rows
    learning_rate: float = 3e-3  # the highest; it rises for a third of the epochs and falls to nothing
    weight_decay: float = 0.01
    noise: float = 0.3  # deviation of noise on features of problems, in theirs: new problems are unlike all others

    def __post_init__(self) -> None:
        for name in ("num_tasks", "first_fit", "num_groupings", "num_styles", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is expected")

    @property
    def sizes(self) -> tuple[int, int]:
        """The groupings of a problem, and the styles in each."""
        return self.num_groupings, self.num_styles

    def last_fit(self, num_tasks: int) -> int:
        """Returns the number of tasks that the last fit before task number `num_tasks` had; 0 before the first."""
        if num_tasks < self.first_fit:
            return 0
        return self.first_fit << ((num_tasks // self.first_fit).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class StyleProgress:
    """The state of a training run."""

    update: int  # problems done
    updates: int
    cpu_hours: float  # of the runs before this one, too
    rank_correlation: float | None  # on the validation problems

    def __str__(self) -> str:
        correlation = "" if self.rank_correlation is None else f" | rank correlation {self.rank_correlation:.3f}"
        return f"update {self.update}/{self.updates}{correlation}"


def train_styles(
    policy: SchedulerPolicy,
    tasks: Tasks,
    config: StyleTrainingConfig,
    out: Path,
    *,
    validation: Sequence[TrainingTask] = (),
    provenance: Provenance | None = None,
    resume: bool = False,
    stop: threading.Event | None = None,
    on_update: Callable[[StyleProgress], None] = lambda progress: None,
) -> StyleProgress:
    """Trains the style scorer of `policy` in place; writes the checkpoint `out` after the last task.

    The outcomes of tasks are kept beside it, in `outcomes_path(out)`; a run that resumes goes on from them, and one of
    fewer tasks can be continued. The rank correlation on the `validation` problems is noted after each fit. Raises
    InputError for outcomes of another run, and for those of more tasks.
    """
    assert policy.styles is not None
    network = policy.styles
    fit_seconds, fitted_on = 0.0, 0
    correlation: float | None = None
    provenance = provenance or Provenance()
    arguments = {"training": asdict(config), "tasks": tasks.to_document(), "from": provenance.origin}
    lasting = {"training": {**asdict(config), "num_tasks": None}, "style_scorer": policy.config.style_scorer}
    directory, key = outcomes_path(out), files.fingerprint(arguments | lasting)
    outcomes = read_parts(directory, key) if resume else []
    if (done := len(outcomes)) > config.num_tasks:
        raise InputError(f"{directory}: {done} updates were made already; --updates of at least {done} is expected")
    constructor = Constructor.of(np.array(INITIAL_WEIGHTS, np.float32))

    def progress() -> StyleProgress:
        cpu_hours = (sum(one.cpu_seconds for one in outcomes) + fit_seconds) / 3600
        return StyleProgress(len(outcomes), config.num_tasks, cpu_hours, correlation)

    def keep() -> None:
        if outcomes:
            first = (len(outcomes) - 1) // PART * PART
            write_part(directory, first // PART, key, outcomes[first:])

    def fit_to(num_tasks: int) -> None:
        nonlocal correlation, fit_seconds, fitted_on
        before = time.process_time()
        fit(network, outcomes[:num_tasks], config)
        fit_seconds += time.process_time() - before
        fitted_on, correlation = num_tasks, _correlation(network, checks)
        on_update(progress())

    with one_thread():
        checks = [
            try_styles(task.problem, constructor, None, config.sizes, np.random.default_rng([_VALIDATION, number]))
            for number, task in enumerate(validation)
        ]
        while (number := len(outcomes)) < config.num_tasks:
            if stop is not None and stop.is_set():
                keep()
                return progress()
            if fitted_on != (last := config.last_fit(number)):
                fit_to(last)
            before = time.process_time()
            task, rng = tasks.draw(number, 0, 1)
            proposes = bool(fitted_on) and number % 2 == 1
            scores = policy.constructor.scores(task.problem) if proposes else None
            outcome = try_styles(task.problem, constructor, scores, config.sizes, rng)
            outcomes.append(replace(outcome, cpu_seconds=time.process_time() - before))
            if len(outcomes) % PART == 0 or len(outcomes) == config.num_tasks:
                keep()
            on_update(progress())
        fit_to(config.num_tasks)
    figures: dict[str, Any] = {"rank_correlation": correlation, "num_trials": sum(len(one.ranks) for one in outcomes)}
    manifest = manifest_of(tasks, provenance, arguments, updates=len(outcomes), cpu_hours=progress().cpu_hours)
    save_checkpoint(out, policy, manifest | figures)
    return progress()


def outcomes_path(out: Path) -> Path:
    """Returns the directory of the outcomes of tasks: `NAME.outcomes`."""
    return out.with_suffix(".outcomes")


def reset(network: StyleNetwork, generator: torch.Generator) -> None:
    """Draws the parameters that training begins with."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name not in NORMAL:
                spread = (2 / len(parameter)) ** 0.5 if parameter.dim() == 2 else 0.0
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))


def normalize(network: StyleNetwork, mean: Tensor, deviation: Tensor) -> None:
    """Sets the mean [M] and the deviation [M] of the features of problems; they are not trained."""
    with torch.no_grad():
        network.get_parameter("mean").copy_(mean)
        network.get_parameter("deviation").copy_(deviation)


def scores_of(network: StyleNetwork, problem_features: Tensor, numbers: Tensor) -> Tensor:
    """Returns the scores [R] of pairs with these features [R, M] of the problem and `numbers` [R, F]."""
    own = dict(network.named_parameters())
    features = (problem_features - own["mean"]) / own["deviation"]
    layer = torch.addmm(own["problem_bias"], features, own["problem"]).relu()
    first = torch.addmm(layer @ own["mixing"] + own["bias"], numbers, own["style"]).relu()
    scores: Tensor = torch.addmm(own["hidden_bias"], first, own["hidden"]).relu() @ own["out"]
    return scores


def fit(network: StyleNetwork, outcomes: Sequence[Outcomes], config: StyleTrainingConfig) -> None:
    """Trains `network` anew on `outcomes`, to predict the logarithms of ranks."""
    generator = torch.Generator().manual_seed(config.seed)
    reset(network, generator)
    features = torch.from_numpy(np.stack([outcome.features for outcome in outcomes]))
    normalize(network, features.mean(dim=0), features.std(dim=0, correction=0).clamp(min=1e-3))
    numbers = torch.from_numpy(np.concatenate([outcome.numbers for outcome in outcomes]))
    ranks = np.concatenate([outcome.ranks for outcome in outcomes])
    targets = torch.from_numpy(target(ranks)).float()
    problem = torch.repeat_interleave(
        torch.arange(len(outcomes)), torch.tensor([len(outcome.ranks) for outcome in outcomes])
    )
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, config.learning_rate, weight_decay=config.weight_decay)
    num_steps = config.epochs * -(-len(ranks) // config.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=num_steps)
    for _ in range(config.epochs):
        for rows in torch.split(torch.randperm(len(ranks), generator=generator), config.batch):
            seen = features[problem[rows]]
            seen = seen + config.noise * network.get_parameter("deviation") * torch.randn(
                seen.shape, generator=generator
            )
            error = scores_of(network, seen, numbers[rows]) - targets[rows]
            optimizer.zero_grad()
            (error**2).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()


def _correlation(network: StyleNetwork, outcomes: Sequence[Outcomes]) -> float | None:
    """Returns the mean over problems of Spearman's correlation of scores and ranks."""
    if not outcomes:
        return None
    with torch.no_grad():
        scores = [
            scores_of(network, torch.from_numpy(one.features).expand(len(one.ranks), -1), torch.from_numpy(one.numbers))
            for one in outcomes
        ]
    return float(np.mean([spearmanr(score, one.ranks).statistic for score, one in zip(scores, outcomes, strict=True)]))
