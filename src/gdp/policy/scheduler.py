"""The `default` policy: a learned list scheduler over the units of a problem.

    units --features--> graph embedding --> segment placer (superposition) --> weight vectors for each unit
                                                                                         |
    roll-out (compiled): each unit in turn scores every device by its weights and the device's state, and draws one

The network runs once for a problem, the roll-outs see devices only through features that are the same functions for all
of them (`rollout.py`): one set of parameters serves any number and mix of devices. A style (`styles.py`) bends the
weights of each sample, so that samples differ on purpose. The roll-outs record the features, so log-probabilities of
their choices can be computed again with gradients: logits [S, P, U, D] = weights [., U, K] . features [S, P, U, D, K].
A learned list scheduler over device features is also the idea of DOPPLER (arXiv 2505.23131), there for single ops of
one graph; graph network, segment attention and superposition are GDP's (arXiv 1910.01578).

S samples, P passes, U units, D devices, F unit features, K features of a unit on a device, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn

from gdp.graph import I64
from gdp.policy.base import Instance, Policy, Rollouts
from gdp.policy.graph_embedding import GraphEmbedding, GraphEmbeddingConfig
from gdp.policy.placement_network import SegmentTransformer, SegmentTransformerConfig
from gdp.policy.rollout import DEVICE_FEATURES, NUM_FEATURES, Orders, Record, RolloutArrays, roll_out
from gdp.policy.styles import Style, draw_refinement, draw_style, orders_of
from gdp.policy.superposition import Superposition
from gdp.policy.units import NUM_UNIT_FEATURES, POSITION_FEATURES, UnitGraph, UnitSource
from gdp.problem import Placement, Problem
from gdp.simulate import Simulation, evaluate_many, simulate

_LARGEST_CHANGE = 4.0  # of a weight by the network: no graph, however strange, turns the scheduler upside down
_NUM_TRIED = 4  # placements of each step that leads to a training incumbent
_FREED = (0.08, 0.6)  # share of the units that choose again when an incumbent is refined
_MANY, _ALIKE = 16, 4  # of so many samples so many are alike: their differences are due to choices alone
_TRAINING_PASSES = 2  # at most: a record of more takes time and memory, and the weights are the same
# what a plain list scheduler would weigh, in the order of `rollout.FEATURES`, in powers of two, by hand: where training
# begins, for units that see what came before them and for units that see all others
_INITIAL = (
    (4, 0, 2, 1, -1, -1, -4, 0, -1, -1, -2, -4, 1, -1, 1, -1, -8, -4, -8, -1, 0, -4, 4, 1),
    (4, 0, 2, 1, -1, -1, -4, 0, -1, -1, -2, -4, 1, -1, 1, -1, -8, -4, -8, -1, 2, -4, 4, 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes, and what the ablation leaves out."""

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
    device_features: bool = True  # loads, start times, speeds and memory, not only what is where
    network: bool = True  # without: one weight vector for all units and problems

    def __post_init__(self) -> None:
        if not self.num_units or min(self.num_units) < 1:
            raise ValueError(f"num_units is {self.num_units}; numbers of at least 1 are expected")


@dataclass(frozen=True, eq=False)
class UnitInstance(Instance):
    """A problem in units."""

    units: UnitGraph
    arrays: RolloutArrays
    features: Tensor  # float32 [U, F]
    edge_index: Tensor  # int64 [2, 2E] both ways

    @property
    def refines(self) -> bool:
        """Whether there is an incumbent."""
        return int(self.units.incumbent[0]) >= 0


@dataclass(frozen=True, eq=False)
class Choices:
    """What was seen and chosen."""

    device: Tensor  # int64 [S, P, U]
    features: Tensor  # float32 [S, P, U, D, K] scaled by the sample's style
    mask: Tensor  # bool [S, P, U, D]
    row: Tensor  # int64 [S, P] which weights were used


@dataclass(eq=False)
class _Sources:
    """The last problems seen, so that drawing another grouping of one is cheap."""

    limit: int = 256
    known: dict[int, tuple[Problem, UnitSource]] = field(default_factory=dict)

    def of(self, problem: Problem) -> UnitSource:
        if id(problem) not in self.known:
            while len(self.known) >= self.limit:
                self.known.pop(next(iter(self.known)))
            self.known[id(problem)] = (problem, UnitSource.of(problem))
        return self.known[id(problem)][1]


class SchedulerPolicy(Policy):
    """The policy; see the module's text."""

    name = "default"
    seen: Tensor  # [F] 0 for the unit features that are left out
    used: Tensor  # [K] 0 for the device features that are left out

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.base = nn.Parameter(torch.tensor(_INITIAL, dtype=torch.float32))  # [2, K]
        if config.network:
            self.encode = nn.Sequential(nn.Linear(NUM_UNIT_FEATURES, hidden), nn.LayerNorm(hidden), nn.ReLU())
            self.embed = GraphEmbedding(
                hidden,
                GraphEmbeddingConfig(num_layers=config.num_graph_layers, hidden=hidden, pool="relu", residual=True),
            )
            self.embed_norm = nn.LayerNorm(hidden)
            body = SegmentTransformerConfig(
                num_layers=config.num_placer_layers, d_model=hidden, num_heads=config.num_heads,
                feed_forward=2 * hidden, segment=config.segment, norm="pre", attention=config.attention,
            )  # fmt: skip
            self.placer = Superposition(body) if config.superposition else SegmentTransformer(body)
            self.head = nn.Linear(hidden, 2 * NUM_FEATURES)
            nn.init.zeros_(self.head.weight)  # before training every unit has the base weights
            nn.init.zeros_(self.head.bias)
        position = torch.ones(NUM_UNIT_FEATURES)
        if not config.position:
            position[list(POSITION_FEATURES)] = 0.0
        self.register_buffer("seen", position, persistent=False)
        used = torch.ones(NUM_FEATURES)
        if not config.device_features:
            used[list(DEVICE_FEATURES)] = 0.0
        self.register_buffer("used", used, persistent=False)
        self._sources = _Sources()

    def instance(self, problem: Problem, rng: np.random.Generator) -> UnitInstance:
        """Units drawn by `rng`: how many, how they join, and whether backward ops go with their forward ops.

        A share `refining` of the instances has an incumbent: the policy's own best of a few placements, refined up to
        three times, so that it trains on what it will meet.
        """
        sizes = np.array(self.config.num_units)
        instance = self.grouped(problem, int(rng.choice(sizes)), rng)
        if rng.random() >= self.config.refining:
            return instance
        best: tuple[tuple[int, int], Placement] | None = None
        for _ in range(int(rng.integers(1, 5))):
            styles = [self._training_style(instance, rng) for _ in range(_NUM_TRIED)]
            placements = self.place(instance, styles, rng)
            step_time_ns, peaks = evaluate_many(problem, placements, num_threads=1)
            excess = np.maximum(peaks - problem.memory_limit_bytes, 0).sum(axis=1)
            first = int(np.lexsort((step_time_ns, excess))[0])
            key = int(excess[first]), int(step_time_ns[first])
            if best is None or key < best[0]:
                best = key, placements[first]
            incumbent = simulate(problem, best[1])
            instance = self.grouped(problem, int(rng.choice(sizes)), rng, incumbent=incumbent)
        return instance

    def grouped(
        self,
        problem: Problem,
        num_units: int,
        rng: np.random.Generator,
        *,
        following: bool | None = None,
        incumbent: Simulation | None = None,
    ) -> UnitInstance:
        """An instance of about `num_units` units, to place or, with `incumbent`, to refine; see `UnitSource.draw`."""
        source = self._sources.of(problem)
        units = source.draw(num_units, rng, following=following, incumbent=incumbent)
        edges = torch.from_numpy(np.stack((units.sources, units.targets)))
        return UnitInstance(
            problem=problem,
            units=units,
            arrays=RolloutArrays.of(problem, units, source.equal_before),
            features=torch.from_numpy(units.features).to(self.device),
            edge_index=torch.cat((edges, edges.flip(0)), dim=1).to(self.device),
        )

    def weights(self, instance: UnitInstance) -> Tensor:
        """[2, U, K] how each unit weighs the features of devices: one that sees what came before it, or all others."""
        num_units = instance.units.num_units
        weights = self.base[:, None].expand(2, num_units, NUM_FEATURES)
        if self.config.network:
            x = self.encode(instance.features * self.seen)
            x = self.embed_norm(self.embed(x, instance.edge_index))
            change = self.head(self.placer(x)).view(num_units, 2, NUM_FEATURES).transpose(0, 1)
            weights = weights + _LARGEST_CHANGE * torch.tanh(change / _LARGEST_CHANGE)
        scaled: Tensor = weights * self.used
        return scaled

    def place(self, instance: UnitInstance, styles: Sequence[Style], rng: np.random.Generator) -> I64:
        """[S, N] a placement in each of `styles`, in the units of `instance`; nothing is recorded to learn from."""
        return self._roll_out(instance, styles, rng, num_recorded=0)[0]

    def sample(
        self, instance: Instance, num_samples: int, rng: np.random.Generator, *, temperature: float = 1.0
    ) -> Rollouts:
        """See `Policy.sample`. Samples have styles drawn for training: few have one each, of many four share one."""
        assert isinstance(instance, UnitInstance)
        alike = _ALIKE if num_samples >= _MANY else 1
        group = np.arange(num_samples) // alike
        drawn = [self._training_style(instance, rng) for _ in range(int(group[-1]) + 1)]
        styles = [replace(drawn[number], temperature=temperature) for number in group]
        placements, weights, orders, record = self._roll_out(instance, styles, rng, num_recorded=num_samples)
        num_passes = record.devices.shape[1]
        row = np.repeat(orders.row, (1, num_passes - 1), axis=1) if num_passes > 1 else orders.row[:, :1]
        choices = Choices(*(torch.from_numpy(array).to(self.device) for array in (*record, row)))
        with torch.no_grad():
            log_prob = log_probabilities(weights, choices).gather(3, choices.device[..., None])[..., 0]
        return Rollouts(placements, log_prob.flatten(1), choices, group if alike > 1 else None)

    def score(self, instance: Instance, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """See `Policy.score`."""
        assert isinstance(instance, UnitInstance)
        choices: Choices = rollouts.record
        log_prob = log_probabilities(self.weights(instance), choices)
        entropy = -(log_prob.exp() * log_prob.masked_fill(~choices.mask, 0.0)).sum(dim=3).mean()
        return log_prob.gather(3, choices.device[..., None])[..., 0].flatten(1), entropy

    def _training_style(self, instance: UnitInstance, rng: np.random.Generator) -> Style:
        style = draw_refinement(rng) if instance.refines else draw_style(rng)
        return replace(style, passes=min(style.passes, _TRAINING_PASSES))

    def _roll_out(
        self, instance: UnitInstance, styles: Sequence[Style], rng: np.random.Generator, num_recorded: int
    ) -> tuple[I64, Tensor, Orders, Record]:
        """(placements [S, N], weights, what was asked for, the record of the first `num_recorded` samples)."""
        num_units, num_devices = instance.units.num_units, instance.problem.num_devices
        with torch.no_grad():
            weights = self.weights(instance)
        orders = orders_of(styles, num_devices, refines=instance.refines)
        num_passes = int(orders.passes.max())
        record = Record.empty(num_recorded, num_passes, num_units, num_devices)
        devices = np.empty((len(styles), num_units), np.int64)
        roll_out(
            instance.arrays,
            weights.cpu().numpy(),
            orders,
            _fixed(instance, len(styles), rng),
            instance.units.incumbent,
            rng.random((len(styles), num_passes, num_units)),
            devices,
            record,
        )
        return devices[:, instance.units.unit_of_op], weights, orders, record


def _fixed(instance: UnitInstance, num_samples: int, rng: np.random.Generator) -> I64:
    """[S, U] the device of each unit that stays, -1 for those that choose: all, or, to refine an incumbent, a part.

    The part is drawn for each sample: units alone, a stretch of the step, or a unit with those nearest to it.
    """
    incumbent, near = instance.units.incumbent, instance.arrays.near
    num_units = len(incumbent)
    fixed = np.repeat(incumbent[None], num_samples, axis=0)
    if not instance.refines:
        return fixed
    received = csr_array((near.shares, near.units, near.offsets), shape=(num_units, num_units)).T
    for sample in range(num_samples):
        share = rng.uniform(*_FREED)
        count = max(round(share * num_units), 1)
        kind = rng.integers(3)
        if kind == 0:
            freed = rng.choice(num_units, count, replace=False)
        elif kind == 1:
            freed = (rng.integers(num_units) + np.arange(count)) % num_units
        else:
            closeness = np.zeros(num_units)
            closeness[rng.integers(num_units)] = 1.0
            for _ in range(3):  # its neighbours, theirs, and so on
                closeness = closeness + received @ closeness
            freed = np.argsort(-closeness, kind="stable")[:count]
        fixed[sample, freed] = -1
    return fixed


def log_probabilities(weights: Tensor, choices: Choices) -> Tensor:
    """[S, P, U, D] of every device for every unit; -inf where it may not go. `weights` [2, U, K]."""
    logits = torch.einsum("spuk,spudk->spud", weights[choices.row], choices.features)
    return logits.masked_fill(~choices.mask, -torch.inf).log_softmax(dim=3)
