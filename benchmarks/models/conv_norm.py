"""The convolution that the further image models share."""

# mypy: disable-error-code=no-any-return

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]


class ConvNorm(nn.Module):
    """Convolution padded to keep the size, batch normalisation, and an activation unless it is None."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        *,
        groups: int = 1,
        activation: Activation | None = functional.relu,
    ) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x))
        return x if self.activation is None else self.activation(x)
