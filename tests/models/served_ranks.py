"""Executes served steps of local programs: `python -m tests.models.served_ranks RANKS PHASE=TEXT...`, over gloo.

Prints PHASE=TEXT and the largest difference from the logits of the whole model, as a part of the largest of them.
"""

import os
import sys
import tempfile
import zlib
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gdp.models.hugging_face.build import ServedBuild
from gdp.models.pytorch.shards import local_program
from gdp.models.pytorch.shards.collectives import OF_ALL_RANKS
from gdp.models.pytorch.shards.cuts import cut_of, part
from gdp.models.serving import Serving
from gdp.models.shards import WHOLE, Shards


class OverGloo(TorchDispatchMode):
    """Computes exchanges from what all ranks send."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in OF_ALL_RANKS:
            return func(*args, **(kwargs or {}))
        x, num_ranks, *options = args
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(num_ranks)]
        torch.distributed.all_gather(parts, x.contiguous())
        return OF_ALL_RANKS[func](torch.distributed.get_rank(), parts, *options)


def logits(text: str, phase: str, shards: Shards, rank: int) -> Tensor:
    """Returns the logits of a rank, whose weights and cache are its part of those that are drawn."""
    torch.manual_seed(1)
    own = partial(local_program.localise, rank=rank)
    with torch.no_grad(), patch.object(local_program, "localise", own):
        model, _, inputs = ServedBuild(text, Serving(phase), 1, shards)()
        for name, buffer in model.named_buffers():
            if "_cache" in name:
                place = cut_of(buffer)
                drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                content = torch.randn(buffer.shape if place is None else place.shape, generator=drawn)
                if place is not None:
                    own_part = rank * place.num_parts // shards.num_ranks
                    content = part(content, place.dim, place.num_parts, own_part, place.outer, place.segments)
                buffer.copy_(content)
        result: Tensor = model(**inputs).logits
        return result


def _rank(rank: int, num_ranks: int, steps: list[str], path: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=num_ranks)
    for step in steps:
        phase, _, text = step.partition("=")
        whole = logits(text, phase, WHOLE, 0)
        with OverGloo():
            local = logits(text, phase, Shards(num_ranks), rank)
        worst = (local - whole).abs().max() / whole.abs().max()
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        if rank == 0:
            print(step, float(worst), flush=True)


def main() -> int:
    """Runs one process a rank; returns 1 if one of them fails."""
    num_ranks, steps = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as directory:
        arguments = num_ranks, steps, os.path.join(directory, "meeting")
        context = torch.multiprocessing.get_context("fork")
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main())
