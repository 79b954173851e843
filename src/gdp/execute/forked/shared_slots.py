"""SharedSlots: hands tensors from one forked process to another.

Each tensor that goes to another device has a slot in shared memory, into which its device copies it. Readers use it
there. A semaphore for each pair of devices counts the tensors that are ready, which go in the order of the sender's
script:

    cpu0   mm -> copy into the slot of a, release   mm -> copy into the slot of b, release
    cpu1                         acquire, op on a                      acquire, op on b

A slot is written again in the next step, which begins when all devices have done this one."""

import os
from collections.abc import Mapping
from multiprocessing.synchronize import Semaphore

from torch import Tensor

from gdp.execute.backends import Content, ExchangedRows
from gdp.execute.script import Traffic
from gdp.execute.worker import Transport
from gdp.models.pytorch.strides import fill

_SPINS = 3000  # looks at a semaphore before the process sleeps, about 1 ms: to wake it up again takes 0.1 ms
_POLL_SECONDS = 0.5  # for which it sleeps at most between looks at its parent


class SharedSlots(Transport):
    """The transport of device `number`. `slots` has a tensor in shared memory for each tensor of `traffic` with
    content, `semaphores` one for each pair."""

    def __init__(
        self,
        number: int,
        traffic: Traffic,
        slots: Mapping[int, Tensor],
        semaphores: Mapping[tuple[int, int], Semaphore],
    ) -> None:
        self._slots = slots
        self._to = {to: semaphore for (source, to), semaphore in semaphores.items() if source == number}
        self._from = {source: semaphore for (source, to), semaphore in semaphores.items() if to == number}
        own = [(source, tensors) for (source, to), tensors in traffic.items() if to == number]
        self._places = {tensor: (source, place) for source, tensors in own for place, tensor in enumerate(tensors)}
        self._num_arrived: dict[int, int] = {}
        self._copied: set[int] = set()
        self._parent = os.getpid()

    def begin(self) -> None:
        self._num_arrived = dict.fromkeys(self._from, 0)
        self._copied.clear()

    def send(self, tensor: int, content: Content, device: int) -> None:
        if content is not None and tensor not in self._copied:
            self._copied.add(tensor)
            if isinstance(content, ExchangedRows):
                content.copy_to(self._slots[tensor])
            else:
                fill(self._slots[tensor], content)
        self._to[device].release()

    def receive(self, tensor: int) -> Content:
        source, place = self._places[tensor]
        while self._num_arrived[source] <= place:
            self._await(self._from[source])
            self._num_arrived[source] += 1
        return self._slots.get(tensor)

    def _await(self, semaphore: Semaphore) -> None:
        for _ in range(_SPINS):
            if semaphore.acquire(False):
                return
            os.sched_yield()
        while not semaphore.acquire(True, _POLL_SECONDS):
            if os.getppid() != self._parent:
                os._exit(1)
