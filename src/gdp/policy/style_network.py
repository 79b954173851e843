"""The style scorer (`style_scorer.py`) in PyTorch, for training.

R pairs of a problem and a style, M features of a problem, F numbers of a style, H numbers of a layer.
"""

import torch
from torch import Tensor, nn

from gdp.arrays import F32
from gdp.policy.style_scorer import StyleScorer, names, shapes

_NORMAL = ("mean", "deviation")  # of the features of problems


class StyleNetwork(nn.Module):
    """The network; before training it scores all styles alike."""

    mean: Tensor
    deviation: Tensor
    problem: Tensor
    problem_bias: Tensor
    mixing: Tensor
    style: Tensor
    bias: Tensor
    hidden: Tensor
    hidden_bias: Tensor
    out: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        for name, shape in shapes(hidden).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=name not in _NORMAL))
        with torch.no_grad():
            self.deviation.fill_(1.0)

    def reset(self, generator: torch.Generator) -> None:
        """Draws the parameters that training begins with."""
        with torch.no_grad():
            for name in names():
                if name not in _NORMAL:
                    parameter = self.get_parameter(name)
                    spread = (2 / len(parameter)) ** 0.5 if parameter.dim() == 2 else 0.0
                    parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))

    def normalize(self, mean: Tensor, deviation: Tensor) -> None:
        """Sets the mean [M] and the deviation [M] of the features of problems; they are not trained."""
        with torch.no_grad():
            self.mean.copy_(mean)
            self.deviation.copy_(deviation)

    def forward(self, problem_features: Tensor, numbers: Tensor) -> Tensor:
        """Returns the scores [R] of pairs with these features [R, M] of the problem and `numbers` [R, F]."""
        features = (problem_features - self.mean) / self.deviation
        of_problem = torch.addmm(self.problem_bias, features, self.problem).relu() @ self.mixing + self.bias
        first = torch.addmm(of_problem, numbers, self.style).relu()
        scores: Tensor = torch.addmm(self.hidden_bias, first, self.hidden).relu() @ self.out
        return scores

    def in_numpy(self) -> StyleScorer | None:
        """Returns the parameters for searches; None before training."""
        tensors: dict[str, F32] = {name: self.get_parameter(name).detach().cpu().numpy() for name in names()}
        return StyleScorer(**tensors) if tensors["out"].any() else None
