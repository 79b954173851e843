"""The style scorer (`style_scorer.py`) in PyTorch, for training.

R pairs of a problem and a style, M features of a problem, F numbers of a style, H numbers of a layer.
"""

import torch
from torch import Tensor, nn

from gdp.arrays import F32
from gdp.policy.style_scorer import StyleScorer, shapes

_NORMAL = ("mean", "deviation")  # of the features of problems


class StyleNetwork(nn.Module):
    """The network; before training it scores all styles alike."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        for name, shape in shapes(hidden).items():
            first = torch.full(shape, 1.0 if name == "deviation" else 0.0)
            self.register_parameter(name, nn.Parameter(first, requires_grad=name not in _NORMAL))

    def reset(self, generator: torch.Generator) -> None:
        """Draws the parameters that training begins with."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name not in _NORMAL:
                    spread = (2 / len(parameter)) ** 0.5 if parameter.dim() == 2 else 0.0
                    parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))

    def normalize(self, mean: Tensor, deviation: Tensor) -> None:
        """Sets the mean [M] and the deviation [M] of the features of problems; they are not trained."""
        with torch.no_grad():
            self.get_parameter("mean").copy_(mean)
            self.get_parameter("deviation").copy_(deviation)

    def forward(self, problem_features: Tensor, numbers: Tensor) -> Tensor:
        """Returns the scores [R] of pairs with these features [R, M] of the problem and `numbers` [R, F]."""
        own = dict(self.named_parameters())
        features = (problem_features - own["mean"]) / own["deviation"]
        layer = torch.addmm(own["problem_bias"], features, own["problem"]).relu()
        first = torch.addmm(layer @ own["mixing"] + own["bias"], numbers, own["style"]).relu()
        scores: Tensor = torch.addmm(own["hidden_bias"], first, own["hidden"]).relu() @ own["out"]
        return scores

    def in_numpy(self) -> StyleScorer | None:
        """Returns the parameters for searches; None before training."""
        tensors: dict[str, F32] = {
            name: parameter.detach().cpu().numpy() for name, parameter in self.named_parameters()
        }
        return StyleScorer(**tensors) if tensors["out"].any() else None
