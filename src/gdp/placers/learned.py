"""The learned placers that need PyTorch, by their names, with the policy that comes with gdp or another."""

from gdp.budget import Clock
from gdp.placers.fine_tune import FineTuneConfig, fine_tune
from gdp.placers.zero_shot import Answer, OnProgress, ZeroShotConfig, zero_shot
from gdp.policy.checkpoint import load_checkpoint, new_policy
from gdp.policy.pretrained import shipped
from gdp.policy.processes import one_thread
from gdp.problem import Problem

__all__ = ["Answer", "FineTuneConfig", "ZeroShotConfig", "ask", "fine_tune", "one_thread", "shipped", "zero_shot"]


def ask(
    name: str,
    problem: Problem,
    clock: Clock,
    *,
    seed: int = 0,
    checkpoint: str | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Answer:
    """What the placer called `name`, which trains a policy on `problem`, answers: `gdp-finetune` begins with the policy
    in the file `checkpoint` (None: the one that comes with gdp), `gdp-one` with an untrained one.

    Raises InputError for a bad checkpoint.
    """
    policy = new_policy("default", seed=seed) if name == "gdp-one" else load_checkpoint(checkpoint or shipped())
    with one_thread():
        return fine_tune(problem, policy, clock, seed=seed, num_threads=num_threads, on_progress=on_progress)
