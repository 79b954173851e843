"""What GPUs compute in place of operators that only CPUs have, checked on the CPU against those operators."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gdp.models.pytorch import replacements
from gdp.models.pytorch.replacements import ATTENTION, ATTENTION_BACKWARD, LSTM, LSTM_BACKWARD, function_for

GPU = torch.device("cuda", 0)  # it only chooses the function


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_key_heads", [4, 2])
@pytest.mark.parametrize(
    "options", [(False, None, None), (True, None, 0.3), (False, "mask", None)], ids=["plain", "causal", "masked"]
)
def test_attention(num_key_heads: int, options: tuple[bool, str | None, float | None]) -> None:
    """The replacement of attention computes what the CPU's operator computes."""
    torch.manual_seed(0)
    is_causal, mask, scale = options
    query, gradient = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    key, value = torch.randn(2, num_key_heads, 6, 8), torch.randn(2, num_key_heads, 6, 8)
    args = query, key, value, 0.0, is_causal
    keywords = {"attn_mask": None if mask is None else torch.randn(2, 1, 6, 6), "scale": scale}
    output, sums = ATTENTION(*args, **keywords)
    here, no_sums = function_for(ATTENTION, GPU)(*args, **keywords)
    assert_close([here], [output])
    assert (no_sums.shape, no_sums.dtype) == (sums.shape, sums.dtype)
    backward = gradient, query, key, value
    expected = ATTENTION_BACKWARD(*backward, output, sums, 0.0, is_causal, **keywords)
    for forward_on in ((output, sums), (here, no_sums)):  # a plan may put one pass on a GPU and the other on a CPU
        for device in (GPU, None):
            found = function_for(ATTENTION_BACKWARD, device)(*backward, *forward_on, 0.0, is_causal, **keywords)
            assert_close(found, expected)


@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("given", ["output", "states", "all"])
@pytest.mark.parametrize("train", [False, True])
def test_lstm_layer(is_reverse: bool, has_biases: bool, given: str, train: bool) -> None:
    """The replacement of an LSTM layer computes what the CPU's operator computes."""
    torch.manual_seed(0)
    steps, batch, width, hidden = 5, 4, 6, 3
    weights = [torch.randn(4 * hidden, width), torch.randn(4 * hidden, hidden)]
    biases = [torch.randn(4 * hidden), torch.randn(4 * hidden)] if has_biases else weights  # as PyTorch gives none
    inputs = torch.randn(steps, batch, width), *weights, *biases, torch.randn(batch, hidden), torch.randn(batch, hidden)
    args = *inputs, is_reverse, [], 2, hidden, 1, has_biases, False, False, train
    with torch.enable_grad():
        *results, workspace = LSTM(*args)
        *here, no_workspace = function_for(LSTM, GPU)(*args)
    assert_close(here, results)
    assert no_workspace.numel() == replacements.workspace_bytes(inputs[0], hidden)
    gradients: list[Any] = [torch.randn_like(result) for result in results]
    if given != "all":
        kept = {0} if given == "output" else {1, 2}
        gradients = [gradient if number in kept else None for number, gradient in enumerate(gradients)]
    rest = is_reverse, 2, hidden, 1, has_biases, train, False, [], False
    with torch.no_grad():
        expected = LSTM_BACKWARD(*inputs, *results, *gradients, *rest, workspace)
        used = [0, 1, 2, 3, 4, 5, 6] if has_biases else [0, 1, 2, 5, 6]
        for forward_on in ((results, workspace), (here, no_workspace)):
            for device in (GPU, None):
                found = function_for(LSTM_BACKWARD, device)(*inputs, *forward_on[0], *gradients, *rest, forward_on[1])
                assert_close([found[number] for number in used], [expected[number] for number in used])
