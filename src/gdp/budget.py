"""How much a search may spend: seconds, or simulations (which makes an answer reproducible)."""

import re
import threading
import time
from dataclasses import dataclass, field

from gdp.errors import InputError

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Budget:
    """Exactly one of `seconds` and `simulations`."""

    seconds: float | None = None
    simulations: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.simulations is None):
            raise InputError("budget: give either seconds or simulations")
        if self.seconds is not None and not 0 <= self.seconds < 1e9:
            raise InputError(f"budget is {self.seconds} seconds; a time from 0 to 10^9 s is expected")
        if self.simulations is not None and self.simulations < 0:
            raise InputError(f"budget is {self.simulations} simulations; at least 0 is expected")

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """`30s`, `2m`, `1.5h`, `500ms`, or `20000sims`."""
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|min|m|h|sims)", text.strip())
        if match is None:
            raise InputError(f"budget is {text!r}; a time such as 30s or 2m, or a count such as 20000sims, is expected")
        number, unit = match.groups()
        if unit == "sims":
            if "." in number:
                raise InputError(f"budget is {text!r}; simulations come in whole numbers, such as 20000sims")
            return cls(simulations=int(number))
        return cls(seconds=float(number) * _SECONDS[unit])

    def part(self, share: float) -> "Budget":
        """A `share` of it."""
        if self.simulations is not None:
            return Budget(simulations=int(self.simulations * share))
        return Budget(seconds=(self.seconds or 0.0) * share)

    def __str__(self) -> str:
        return f"{self.simulations}sims" if self.seconds is None else f"{self.seconds:g}s"


@dataclass(eq=False)
class Clock:
    """A budget being spent. `stop` ends the search early (Ctrl-C); it is safe to set from another thread."""

    budget: Budget
    started: float = field(default_factory=time.monotonic)
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float | None:
        """Seconds left, None when the budget counts simulations."""
        return None if self.budget.seconds is None else max(self.budget.seconds - self.seconds, 0.0)
