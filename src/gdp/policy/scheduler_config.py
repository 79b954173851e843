"""The configuration of the default policy; reading one needs no PyTorch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes, and switches for the ablation."""

    hidden: int = 64
    num_graph_layers: int = 3
    num_placer_layers: int = 2
    num_heads: int = 4
    segment: int = 64  # units
    num_units: tuple[int, ...] = (50, 100, 200)  # drawn from for each instance
    refining: float = 0.6  # share of training instances that refine an incumbent
    attention: bool = True
    superposition: bool = True
    position: bool = True  # where a unit is in the step
    device_features: bool = True  # the features that know devices: loads, start times, speeds, memory
    network: bool = False  # without: one weight vector for all units; docs/notes/policy.md says why
    style_scorer: int = 0  # numbers of each hidden layer of the style scorer; none: styles are random

    def __post_init__(self) -> None:
        if not self.num_units or min(self.num_units) < 1:
            raise ValueError(f"num_units is {self.num_units}; numbers of at least 1 are expected")
        if self.style_scorer < 0:
            raise ValueError(f"style_scorer is {self.style_scorer}; at least 0 is expected")
