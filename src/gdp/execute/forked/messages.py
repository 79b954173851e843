"""Messages of tensors through the pipe between a process and the one that it has forked."""

from collections.abc import Hashable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from gdp.execute.ranks.connections import bytes_of


def send_tensors(connection: Connection, tensors: Mapping[Any, Tensor]) -> None:
    """Sends tensors of the CPU by key."""
    connection.send([(key, item.dtype, tuple(item.shape), item.stride()) for key, item in tensors.items()])
    for item in tensors.values():
        if item.numel():
            connection.send_bytes(bytes_of(item.detach()).numpy().data)


def receive_tensors(connection: Connection) -> dict[Any, Tensor]:
    """Returns what `send_tensors` sent, in memory of its own."""
    found: dict[Hashable, Tensor] = {}
    for key, dtype, size, stride in connection.recv():
        found[key] = memory = torch.empty_strided(size, stride, dtype=dtype)
        if memory.numel():
            connection.recv_bytes_into(bytes_of(memory).numpy().data)
    return found
