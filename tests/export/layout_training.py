"""Trains a model of `export_models` one step with each exported module `MODEL_NUMBER`, on ranks, and compares.

Gradients and weights after the step are to be those of PyTorch's own step of the whole batch on one device.
"""

import copy
import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from export_models import MODELS
from torch import Tensor, nn


def check_rounded(found: Tensor, expected: Tensor) -> None:
    """Checks a gradient of products in bfloat16: on one device they are up to 7 % from those in float32."""
    assert (found - expected).norm() <= 0.1 * expected.norm()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    logits = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def train(out: Path, environment: dict[str, str], *names: str) -> None:
    """Trains with the modules in `out`, as a rank; the first writes the names of those that agree to `equal.txt`."""
    os.environ.update(environment)
    sys.path.insert(0, str(out))
    device = importlib.import_module(names[0]).start()
    tokens = torch.arange(64).reshape(8, 8) * 7 % 50
    for name in names:
        exported = importlib.import_module(name)
        plain, _ = MODELS[name.partition("_")[0]]()
        model = exported.parallelize(copy.deepcopy(plain), device)
        losses = [loss_of(plain, tokens)]
        losses[0].backward()
        losses.append(exported.backward(model, loss_of, exported.share(tokens)))
        close = check_rounded if exported.COMPUTED_IN else torch.testing.assert_close
        close(losses[1], losses[0].detach())
        expected = dict(plain.named_parameters())
        names = [
            path.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
            for path, _ in model.named_parameters()
        ]
        assert names == list(expected)
        for path, parameter in zip(names, model.parameters(), strict=True):
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            close(whole(parameter.grad), expected[path].grad)
        settings = {"lr": 0.1, "momentum": 0.9}
        torch.optim.SGD(plain.parameters(), **settings).step()
        exported.optimizer(model, torch.optim.SGD, **settings).step()
        for path, parameter in zip(names, model.parameters(), strict=True):
            close(whole(parameter.detach()), expected[path].detach())
        dist.barrier()
        if dist.get_rank() == 0:
            with (out / "equal.txt").open("a") as equal:
                print(name, file=equal)
    dist.destroy_process_group()
    os._exit(0)  # threads of PyTorch that still run when Python ends now and then abort the process
