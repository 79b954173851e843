"""Small models of reported faults; each function returns a module and its inputs."""

import torch
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Tensor, ...]]
_ROWS = 20_000_000


def bag() -> Example:
    """Returns a table of 4.8 GiB of which 82k rows are read."""
    return nn.EmbeddingBag(_ROWS, 64, mode="sum"), (torch.zeros(4096, 20, dtype=torch.long),)


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(_ROWS, 64, mode="sum") for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([bag(ids) for bag in self.bags], 1)


def bags() -> Example:
    """Returns four such tables."""
    return _Bags(), (torch.zeros(4096, 20, dtype=torch.long),)


def rms() -> Example:
    """Returns one norm in bfloat16."""
    return nn.RMSNorm(4096, dtype=torch.bfloat16), (torch.randn(16384, 4096, dtype=torch.bfloat16),)


def rms8() -> Example:
    """Returns eight norms with a product after each."""
    layers = [layer for _ in range(8) for layer in (nn.RMSNorm(2048), nn.Linear(2048, 2048))]
    return nn.Sequential(*layers).bfloat16(), (torch.randn(16384, 2048, dtype=torch.bfloat16),)


class _Float8(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        one = torch.ones(())
        return torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def fp8() -> Example:
    """Returns a product of float8 matrices."""
    matrix = torch.zeros(8192, 8192, dtype=torch.float8_e4m3fn)
    return _Float8(), (matrix, matrix)


class _Int8(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch._int_mm(x, weight)


def int8() -> Example:
    """Returns a product of int8 matrices."""
    matrix = torch.zeros(8192, 8192, dtype=torch.int8)
    return _Int8(), (matrix, matrix)


class _Time(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for step in x:
            state = self.cell(step, state)
        return state


def time_first() -> Example:
    """Returns a recurrent cell over [time, batch, features]."""
    return _Time(), (torch.randn(64, 32, 1024),)


class _Offload(nn.Module):
    def __init__(self, *, is_pinned: bool = False) -> None:
        super().__init__()
        self.is_pinned = is_pinned
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 1024)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=self.is_pinned):
            for layer in self.layers:
                x = x + layer(x)
            return x.mean()


def host() -> Example:
    """Returns a model that keeps its activations on the host."""
    return _Offload(), (torch.randn(16384, 1024),)


def pinned() -> Example:
    """Returns the same in pinned memory."""
    return _Offload(is_pinned=True), (torch.randn(16384, 1024),)


class _Body(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = _Body(), nn.Linear(1024, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))  # type: ignore[no-any-return]


def nested() -> Example:
    """Returns layers beside a buffer of their container."""
    return _Net(), (torch.randn(64, 1024),)


def root() -> Example:
    """Returns layers beside a buffer of the model."""
    return _Body(), (torch.randn(64, 1024),)


def drop() -> Example:
    """Returns eight layers with dropout."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.Dropout(0.1))]
    return nn.Sequential(*layers), (torch.randn(65536, 1024),)


class _Cond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]


def cond() -> Example:
    """Returns two branches, one of which runs."""
    return _Cond(), (torch.randn(8),)


class _Sparse(nn.Module):
    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, x)  # type: ignore[no-any-return]


def sparse() -> Example:
    """Returns a product with a sparse input."""
    return _Sparse(), (torch.eye(100).to_sparse(), torch.ones(100, 8))


def meta() -> Example:
    """Returns a model made on the meta device."""
    with torch.device("meta"):
        net = nn.Linear(8, 8)
    return net, (torch.ones(4, 8),)


def empty() -> Example:
    """Returns one that got storage after that."""
    return nn.Linear(8, 8, device="meta").to_empty(device="cpu"), (torch.ones(4, 8),)


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(512, 512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, x)  # type: ignore[no-any-return]


def bilinear() -> Example:
    """Returns a bilinear product: 2 * 1024 * 64 * 512 * 513 FLOPs."""
    return _Bilinear(), (torch.randn(1024, 512),)


class _Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(768, 1000)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            tokens = self.patches(images).flatten(2).transpose(1, 2)
            return self.head(self.encoder(tokens).mean(1)).float().logsumexp(1).mean()  # type: ignore[no-any-return]


def vit() -> Example:
    """Returns ViT-B/16 in mixed precision with 256 images."""
    return _Vit(), (torch.randn(256, 3, 224, 224),)
