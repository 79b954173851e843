"""The residual scorer (`residual.py`) in PyTorch, for training.

M pairs of a turn and a device, U units, F unit features, K features of a unit on a device, H numbers of a hidden layer.
"""

import torch
from torch import Tensor, nn

from gdp.policy.residual import ResidualParameters, names, shapes


class ResidualScorer(nn.Module):
    """The network; before training it adds nothing.

    `seen` [F] and `used` [K] are 0 for the features of units and of devices that are left out.
    """

    seen: Tensor
    used: Tensor
    unit: Tensor
    row: Tensor
    device: Tensor
    hidden: Tensor
    bias: Tensor
    out: Tensor

    def __init__(self, hidden: int, seen: Tensor, used: Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", seen[:, None], persistent=False)
        self.register_buffer("used", used[:, None], persistent=False)
        sizes = shapes(hidden)
        num_inputs = sizes["unit"][0] + sizes["device"][0]
        for name, shape in sizes.items():
            spread = {"unit": (2 / num_inputs) ** 0.5, "device": (2 / num_inputs) ** 0.5, "hidden": (2 / hidden) ** 0.5}
            self.register_parameter(name, nn.Parameter(spread.get(name, 0.0) * torch.randn(shape)))

    def forward(self, unit_features: Tensor, unit: Tensor, row: Tensor, device_features: Tensor) -> Tensor:
        """Returns the additions [M] to scores, of `unit_features` [U, F], the `unit` and `row` [M] of each pair, and
        its `device_features` [M, K]."""
        of_unit = (unit_features @ (self.seen * self.unit) + self.row[:, None]).flatten(0, 1)
        first = (of_unit[row * len(unit_features) + unit] + device_features @ (self.used * self.device)).relu()
        additions: Tensor = torch.addmm(self.bias, first, self.hidden).relu() @ self.out
        return additions

    def parameters_in_numpy(self) -> ResidualParameters:
        """Returns the parameters for the compiled roll-out."""
        parameters = {name: self.get_parameter(name).detach() for name in names()}
        parameters |= {"unit": self.seen * parameters["unit"], "device": self.used * parameters["device"]}
        return ResidualParameters(**{name: tensor.cpu().numpy() for name, tensor in parameters.items()})
