"""Executes local programs: `python -m tests.models.shard_ranks RANKS off|on EXPERT NAME...`, over gloo.

Prints NAME, the largest difference of losses, and that of gradients, for each model. `on`: tokens are cut, too; EXPERT:
the number of ranks that have whole experts.
"""

import os
import sys
import tempfile

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gdp.models.pytorch.capture_step import _fake_copies, _isolated
from gdp.models.pytorch.shards.collectives import run_over
from gdp.models.pytorch.shards.cuts import part
from gdp.models.pytorch.shards.local_program import cut_weights
from gdp.models.pytorch.shards.plan import planned
from tests.models.shard_cases import case


def differences(name: str, rank: int, num_ranks: int, *, by_tokens: bool, expert: int) -> tuple[float, float]:
    """Returns the differences of a rank's loss, and of its gradients as parts of the largest, from the whole one."""
    model, inputs = case(name)
    loss = model(**inputs)["loss"]
    loss.backward()
    whole = {path: weight.grad for path, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    with _isolated():
        mode = FakeTensorMode()
        fake, _, fake_inputs = _fake_copies(model, (), inputs, mode)
        with mode:
            plan = planned(fake, (), fake_inputs, num_ranks, by_tokens=by_tokens, num_expert_parts=expert)
    cut_weights(model, plan, num_ranks, rank=rank, by_tokens=by_tokens)
    with run_over(torch.distributed.group.WORLD):
        local = model(**inputs)["loss"]
        local.backward()
    worst = 0.0
    for path, weight in model.named_parameters():
        if path in whole:
            expected, role = whole[path], plan.roles.get(path)
            if role is not None:
                own = rank * role.num_parts // num_ranks
                expected = part(expected, role.dim, role.num_parts, own, 1, role.segments)
            assert weight.grad is not None, path
            assert weight.grad.shape == expected.shape, path
            worst = max(worst, float((weight.grad - expected).abs().max() / whole[path].abs().max().clamp(1e-6)))
    return float((local - loss).abs()), worst


def _rank(rank: int, num_ranks: int, by_tokens: bool, expert: int, names: list[str], path: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=num_ranks)
    for name in names:
        result = torch.tensor(differences(name, rank, num_ranks, by_tokens=by_tokens, expert=expert))
        torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MAX)
        if rank == 0:
            print(name, *result.tolist(), flush=True)


def main() -> int:
    """Runs one process a rank; returns 1 if one of them fails."""
    num_ranks, by_tokens, expert, names = int(sys.argv[1]), sys.argv[2] == "on", int(sys.argv[3]), sys.argv[4:]
    with tempfile.TemporaryDirectory() as directory:
        arguments = num_ranks, by_tokens, expert, names, os.path.join(directory, "meeting")
        context = torch.multiprocessing.get_context("fork")
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main())
