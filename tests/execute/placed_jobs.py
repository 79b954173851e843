"""Trainings that ranks do together, each in a process of its own; what came of one is a JSON file for each rank."""

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import gdp
from execute.rank_jobs import before_op
from execute.test_loss_scale import Autocast
from execute.test_placed_layouts import MODELS, Dropping, batches, built, placed, points, scheduled, sgd
from gdp import InputError
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.search.question import plan_of

SAVED, LOSSES = "training.safetensors", "losses.txt"


def train(
    name: str,
    text: str,
    steps: Sequence[int],
    *,
    resume: Path | None = None,
    saves: Path | None = None,
    clip_norm: float | None = None,
    scale: float | None = None,
) -> dict[str, Any]:
    """Trains a model of MODELS, or one in float16, in a layout, and saves it at the end.

    Returns losses, states and the model's weights. `scale` is that of the loss in the first step.
    """
    build, make, optimizer_of, own_norm = (MODELS | {"float16": (Autocast, points, sgd, None)})[name]
    model, data = built(build), batches(make, max(steps) + 1)
    optimizer = optimizer_of(model)
    norm = own_norm if clip_norm is None else clip_norm
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    options = {"optimizer": optimizer, "clip_norm": norm, "resume": resume, "scaler": scaler}
    losses = []
    with placed(model, data[0], text, **options) as trained:
        for step in steps:
            assert trained.num_steps == step
            scheduled(optimizer, step)
            losses.append(float(trained(*data[step])).hex())
        if saves is not None:
            trained.save(saves)
        state, moments = trained.state_dict(), trained.optimizer_state_dict()
    weights = {key: tensor.tolist() for key, tensor in model.state_dict().items()}
    return {
        "losses": losses,
        "state": {key: tensor.tolist() for key, tensor in state.items()},
        "moments": {key: {name: item.tolist() for name, item in by.items()} for key, by in moments.items()},
        "weights": weights,
        "scale": None if scaler is None else scaler.get_scale(),
    }


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.8)


def eager_training(name: str, steps: range) -> tuple[list[float], torch.nn.Module]:
    """Trains a model of `shard_cases` in plain PyTorch; returns losses, and the model."""
    from tests.models.shard_cases import case

    model, inputs = case(name)
    optimizer, losses = momentum(model), []
    for _ in steps:
        optimizer.zero_grad()
        loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def train_sharded(
    name: str, num_cards: int, text: str, steps: Sequence[int], *, resume: Path | None = None, saves: Path | None = None
) -> dict[str, Any]:
    """Trains a model of `shard_cases` on cores in a layout; returns losses, the state, and the model's weights."""
    from tests.models.shard_cases import case  # with Transformers, which other jobs do without

    model, inputs = case(name)
    source = ModelSource.of_example((model, (), inputs), Reading(optimizer="sgd-momentum"))
    clusters = gdp.Cluster.parse(f"{num_cards}xcpu-16core")
    plan = gdp.place(source, clusters, parallel=text, budget="30sims", num_threads=1)
    losses = []
    with gdp.placed(model, plan, on=["cpu"] * num_cards, optimizer=momentum(model), resume=resume) as trained:
        for step in steps:
            assert trained.num_steps == step
            losses.append(float(trained(**inputs)))
        if saves is not None:
            trained.save(saves)
        state = trained.state_dict()
    weights = {key: tensor.tolist() for key, tensor in model.state_dict().items()}
    return {"losses": losses, "state": {key: tensor.tolist() for key, tensor in state.items()}, "weights": weights}


# Jobs: (out, what to write down, arguments)


def trains(out: Path, say: dict[str, Any], cases: Sequence[dict[str, Any]]) -> None:
    """Does trainings, one after the other, in one group of processes."""
    say["done"] = [train(**case) for case in cases]


def proves(out: Path, say: dict[str, Any], cases: Sequence[tuple[str, str]]) -> None:
    """Runs a plan of each model and trains two steps with it, in one group of processes."""
    from gdp.cli import main
    from tests.models.shard_cases import case

    os.chdir(out)
    count = int(os.environ["WORLD_SIZE"])
    for name, directory in cases:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            on = ",".join(["cpu"] * count)
            status = main(["run", f"{directory}/plan.json", "--on", on, "--steps", "1", "--json"])
        losses, eager = eager_training(name, range(2))
        model, inputs = case(name)
        plan = gdp.Plan.load(f"{directory}/plan.json")
        with gdp.placed(model, plan, on=["cpu"] * count, optimizer=momentum(model)) as trained:
            found, state = [float(trained(**inputs)) for _ in losses], trained.state_dict()
        expected = eager.state_dict()
        assert state.keys() == expected.keys()
        # a bias of keys, which starts at 0 and gets the gradient 0, is rounding: it is measured by 0.001
        pairs = [(state[key], weight, max(float(weight.abs().max()), 0.001)) for key, weight in expected.items()]
        say[directory] = {
            "run": [status, printed.getvalue()],
            "losses": [found, losses],
            "state": max(float((here - there).abs().max()) / scale for here, there, scale in pairs),
        }


def in_a_group(out: Path, say: dict[str, Any], case: dict[str, Any]) -> None:
    """Trains beside collectives of the script's own group, which stays as it is."""
    torch.distributed.init_process_group("gloo")
    ones = torch.ones(3)
    torch.distributed.all_reduce(ones)
    say["done"] = train(**case)
    torch.distributed.all_reduce(ones)
    say["sum"] = ones.tolist()
    torch.distributed.destroy_process_group()


def fails(out: Path, say: dict[str, Any], how: str) -> None:
    """The second rank fails in the third step, or before the first one, or all do."""
    (x, y), is_second = batches(points, 1)[0], os.environ["RANK"] == "1"
    with placed(built(Dropping), (x, y), "data=2", stop_at_nan=True) as trained:
        if how == "early" and is_second:
            raise RuntimeError("no such sample")
        for step in range(8):
            if step == 2 and is_second and how in ACTS:
                ACTS[how]()
            trained(x * float("nan") if step == 2 and how == "nan" else x, y)
            say["steps"] = trained.num_steps
            if step == 1:
                trained.save(out / SAVED)


def fail_in_data() -> None:
    """Fails where a script reads its data."""
    raise ValueError("sample 7 has no label")


def fail_in_op() -> None:
    """Fails in an op of the next step."""

    def act() -> None:
        raise NotImplementedError("no such kernel")

    before_op(3, act)


def die_in_op() -> None:
    """Dies in an op of the next step."""
    before_op(3, lambda: os.kill(os.getpid(), signal.SIGKILL))


def die() -> None:
    """Dies between steps."""
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    """Is interrupted between steps."""
    os.kill(os.getpid(), signal.SIGINT)


ACTS: dict[str, Callable[[], None]] = {
    "data": fail_in_data,
    "op": fail_in_op,
    "dies in op": die_in_op,
    "dies": die,
    "interrupted": interrupt,
}


def saves(out: Path, say: dict[str, Any], num_steps: int) -> None:
    """Trains up to a step from the last file, saves each step, and writes down its loss."""
    (out / f"{os.environ.get('RANK', '')}.pid").write_text(str(os.getpid()))
    data, path = batches(points, num_steps), out / SAVED
    with placed(built(Dropping), data[0], "data=2,zero=1", resume=path if path.exists() else None) as trained:
        while trained.num_steps < num_steps:
            loss = trained(*data[trained.num_steps])
            if os.environ.get("RANK", "0") == "0":
                with open(out / LOSSES, "a") as lines:
                    lines.write(f"{trained.num_steps} {loss.item().hex()}\n")
            trained.save(path)


def never_closes(out: Path, say: dict[str, Any]) -> None:
    """Takes two steps, and ends without closing anything."""
    (batch,) = batches(points, 1)
    trained = placed(built(Dropping), batch, "data=2")
    trained(*batch)
    trained(*batch)


def differs(out: Path, say: dict[str, Any], how: str) -> None:
    """The second rank starts with other weights, another batch or another learning rate."""
    (batch,), rank = batches(points, 1), int(os.environ["RANK"])
    model, rate = built(Dropping), 0.1
    if how == "weights":
        torch.manual_seed(rank)
        model = Dropping()
    elif how == "batch":
        batch = next(iter(DataLoader([tuple(item) for item in zip(*batch, strict=True)], 8, shuffle=True)))  # type: ignore[arg-type]
        batch = tuple(batch)
        if rank:
            batch = tuple(tensor.flip(0) for tensor in batch)
    elif how == "rate":
        rate += rank
    with placed(model, batch, "data=2", learning_rate=rate) as trained:
        trained(*batch)


def cannot_write(out: Path, say: dict[str, Any]) -> None:
    """The first rank cannot write a file, once; all go on."""
    (batch,) = batches(points, 1)
    with placed(built(Dropping), batch, "data=2") as trained:
        trained(*batch)
        own = os.fsync

        def full(_file: Any) -> None:
            raise OSError(28, "No space left on device")

        os.fsync = full
        try:
            trained.save(out / SAVED)
        except InputError as error:
            say["error"] = str(error)
        os.fsync = own
        say["files"] = sorted(path.name for path in out.glob(f"*{SAVED}*"))
        trained(*batch)
        trained.save(out / SAVED)
        say["is_there"] = (out / SAVED).exists()


def serves(out: Path, say: dict[str, Any]) -> None:
    """Has the outputs of a forward pass."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
    plan = inference_plan(model, x)
    with gdp.placed(model, plan, on=["cpu"] * 2, training=False) as trained:
        outputs: dict[str, Tensor] = trained(x)
    say["outputs"] = {name: tensor.tolist() for name, tensor in outputs.items()}


def inference_plan(model: torch.nn.Module, x: Tensor) -> gdp.Plan:
    """Returns a plan of a forward pass whose ops are on two devices."""
    graph = gdp.capture(model, (x,), name="Linear", training=False).graph
    problem = gdp.Problem.build(graph, gdp.Cluster.parse("2xp100-pcie-16g"))
    return plan_of(gdp.simulate(problem, np.arange(graph.num_ops) % 2), 0, "given", 0)


JOBS: dict[str, Callable[..., None]] = {
    job.__name__: job for job in (trains, proves, in_a_group, fails, saves, never_closes, differs, cannot_write, serves)
}


def start(out: Path, environment: dict[str, str], job: str, *args: Any) -> None:
    """Does a rank's part of a job as a script does: errors that it does not catch are told by the hook."""
    os.environ.update(environment)
    rank = environment["RANK"]
    torch.set_num_threads(1)
    os.dup2(os.open(out / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    say: dict[str, Any] = {}
    status = 0
    try:
        JOBS[job](out, say, *args)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    (out / f"{rank}.json").write_text(json.dumps(say))
    sys.exit(status)


if __name__ == "__main__":  # of torchrun
    torch.set_num_threads(1)
    JOBS[sys.argv[2]](Path(sys.argv[1]), {}, *map(json.loads, sys.argv[3:]))
