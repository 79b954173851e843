"""HDP, the learned baseline: a grouper and a placer that are trained together, from scratch, on one problem.

    features of ops --grouper (MLP, softmax)--> a group for each op --sums--> features of groups
        --placer (bidirectional LSTM, LSTM with attention, softmax)--> a device for each group --simulate--> rewards

Both learn by REINFORCE from the same rewards. Source: Mirhoseini, Goldie, Pham, Steiner, Le, Dean, "A Hierarchical
Model for Device Placement", ICLR 2018. "The release" is its authors' hierarchical controller in TensorFlow's grappler,
which settles some points that the paper leaves open. Differences here: graphs know the bytes of outputs and not their
shapes, so logarithms of bytes take the place of shapes; ops that must share a device (units) are one op to the grouper;
groups without ops are left out of the placer's sequence, where they cost time and add nothing but noise; devices where
a group may not go are masked.

N ops, U units, K op kinds, D devices, G groups of the grouper, F features, S samples of the placer, H hidden.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.arrays import I64
from gdp.budget import Clock
from gdp.search.candidate import Candidate, Figures
from gdp.search.question import Question, Solution
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import NEVER, evaluate_many
from gdp.units.units import Units

_LOG_OF_1_GIB = 30 * math.log(2.0)  # logarithms of bytes are in this unit, so that they are about 1
_CHUNK = 4  # steps of the decoder whose attention is computed at once: a few MB, which stay in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class HdpConfig:
    """Sizes and rates: those of the paper, where no comment says otherwise.

    The paper's learning rate, 0.1, ends on one device after a few updates. Best step times in ms after 15 CPU-s on two
    P100s, mean of 3 seeds with at most 40 groups, where one device takes 336 and 148.5:

        learning rate           0.1   0.01  0.001 0.0003 0.0001
        rnnlm-2               333.4  332.6  301.1  293.2  295.5
        inception-v3-b32      148.5  148.4  147.7  146.7  146.2

    With 256 groups, on these and four workloads on four P100s, 0.001 was 10 % better than 0.0003 (geometric mean).
    """

    num_groups: int = 256
    grouper_hidden: int = 64
    kind_size: int = 20  # of the embedding of op kinds
    num_outputs: int = 6  # of an op, as features
    num_neighbours: int = 6  # likewise, incoming and outgoing each
    # The paper has none and reads raw op numbers, which all but decide an op's group from the start. Here they are
    # shares of N, and this decides as much; at 1 groups are random, and every placement is about as bad as the next.
    grouper_temperature: float = 0.02
    placer_hidden: int = 256
    tanh_constant: float = 5.0  # bounds the placer's logits
    temperature: float = 10.0  # of the placer
    num_samples: int = 4  # of the placer for each of the grouper
    learning_rate: float = 0.001
    max_gradient_norm: float = 1.0
    baseline_decay: float = 0.9  # the release's; the paper says "moving average"
    invalid_reward: float = -10.0  # where memory is exceeded
    num_invalid_updates: int = 1000  # the release's: updates after which only valid placements are learnt from

    def __post_init__(self) -> None:
        counts = self.num_groups, self.kind_size, self.num_outputs, self.num_neighbours, self.num_samples
        widths = self.grouper_hidden, self.placer_hidden
        temperatures = self.grouper_temperature, self.tanh_constant, self.temperature
        if min(counts + widths) < 1 or self.placer_hidden % 2 or self.num_invalid_updates < 0:
            raise ValueError(f"{self}: counts of at least 1 and an even placer_hidden are expected")
        if min(*temperatures, self.learning_rate, self.max_gradient_norm) <= 0 or not 0 <= self.baseline_decay < 1:
            raise ValueError(f"{self}: positive rates and a baseline_decay of at least 0 and below 1 are expected")


class _Features:
    """The features of a problem for both networks."""

    def __init__(self, problem: Problem, config: HdpConfig) -> None:
        graph, num_ops = problem.graph, problem.num_ops
        self.units = Units.of(problem)
        names, kinds = np.unique(graph.kinds, return_inverse=True)
        self.num_kinds = len(names)
        producers = graph.producers[graph.edge_tensors]
        sources, targets = np.divmod(np.unique(producers * num_ops + graph.consumers), num_ops)
        readers, read = np.divmod(np.unique(graph.consumers * num_ops + producers), num_ops)
        by_producer = problem.simulator.tensor_numbers
        sizes = _first_of_each(
            graph.producers[by_producer], graph.tensor_bytes[by_producer], num_ops, config.num_outputs, 0
        )
        neighbours = torch.cat(
            (
                _first_of_each(readers, read, num_ops, config.num_neighbours, -1),
                _first_of_each(sources, targets, num_ops, config.num_neighbours, -1),
            ),
            dim=1,
        )
        self.kinds, self.sources, self.targets = map(torch.from_numpy, (kinds, sources, targets))  # [N], [E], [E]
        self.output_bytes = sizes  # [N, num_outputs]
        first_op = torch.from_numpy(self.units.first_op)
        self.unit_kinds = self.kinds[first_op]  # [U]
        numbers = torch.cat((_log_size(sizes), neighbours / num_ops), dim=1)
        self.unit_numbers = numbers[first_op]  # [U, num_outputs + 2 num_neighbours]
        self.op_unit = torch.from_numpy(self.units.index)  # [N]
        self.forbidden = torch.from_numpy(~self.units.allowed).float()  # [U, D]

    def of_groups(self, unit_group: Tensor, num_groups: int) -> Tensor:
        """Returns [G, F]: numbers of ops by kind, sums of output sizes, and adjacency of groups."""
        group = unit_group[self.op_unit]
        counts = torch.bincount(group * self.num_kinds + self.kinds, minlength=num_groups * self.num_kinds)
        sizes = torch.zeros(num_groups, self.output_bytes.shape[1]).index_add_(0, group, self.output_bytes)
        adjacency = torch.zeros(num_groups, num_groups)
        adjacency[group[self.sources], group[self.targets]] = 1.0
        return torch.cat((counts.reshape(num_groups, -1).log1p(), _log_size(sizes), adjacency), dim=1)

    def allowed_of_groups(self, unit_group: Tensor, num_groups: int) -> Tensor:
        """Returns [G, D]: the devices on which the fewest units of each group, mostly none, are forbidden."""
        num_forbidden = torch.zeros(num_groups, self.forbidden.shape[1]).index_add_(0, unit_group, self.forbidden)
        return num_forbidden == num_forbidden.min(dim=1, keepdim=True).values


def _first_of_each(rows: I64, values: I64, num_rows: int, width: int, padding: int) -> Tensor:
    """Returns the first `values` of each row, [num_rows, width]; `rows` is sorted."""
    column = np.arange(len(rows)) - np.searchsorted(rows, rows)
    table = np.full((num_rows, width), padding, np.float32)
    inside = column < width
    table[rows[inside], column[inside]] = values[inside]
    return torch.from_numpy(table)


def _log_size(num_bytes: Tensor) -> Tensor:
    return num_bytes.log1p() / _LOG_OF_1_GIB


class _Grouper(nn.Module):
    def __init__(self, num_kinds: int, num_numbers: int, num_groups: int, config: HdpConfig) -> None:
        super().__init__()
        self.kind = nn.Embedding(num_kinds, config.kind_size)
        self.hidden = nn.Linear(config.kind_size + num_numbers, config.grouper_hidden)
        self.out = nn.Linear(config.grouper_hidden, num_groups)
        self.temperature = config.grouper_temperature

    def forward(self, kinds: Tensor, numbers: Tensor) -> Tensor:
        """Returns log-probabilities [U, G]."""
        hidden = functional.relu(self.hidden(torch.cat((self.kind(kinds), numbers), dim=1)))
        return torch.log_softmax(self.out(hidden) / self.temperature, dim=1)


class _Placer(nn.Module):
    """The attention is that of Bahdanau, Cho, Bengio (ICLR 2015); it does not feed back into the decoder, so that the
    log-probabilities of given devices take one pass."""

    def __init__(self, num_features: int, num_devices: int, config: HdpConfig) -> None:
        super().__init__()
        size = config.placer_hidden
        self.config = config
        self.encoder = nn.LSTM(num_features, size // 2, bidirectional=True)
        self.device = nn.Embedding(num_devices + 1, size)  # the last one starts the decoder
        self.decoder = nn.LSTM(size, size)
        self.key = nn.Linear(size, size, bias=False)
        self.query = nn.Linear(size, size, bias=False)
        self.score = nn.Linear(size, 1, bias=False)
        self.out = nn.Linear(2 * size, num_devices)

    def forward(
        self, groups: Tensor, allowed: Tensor, num_samples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Returns (devices [G, S], log-probability of each sample [S], with gradients) for `groups` [G, F]."""
        memory, carry = self.encoder(groups)
        keys = self.key(memory)
        carry = tuple(part.reshape(1, 1, -1).repeat(1, num_samples, 1) for part in carry)
        mask = torch.where(allowed, 0.0, -math.inf)[:, None]  # [G, 1, D]
        with torch.no_grad():
            inputs = self._sample(memory, keys, carry, mask, generator)
        states, _ = self.decoder(self.device(inputs[:-1]), carry)
        log_prob = torch.log_softmax(self._logits(states, memory, keys) + mask, dim=2)
        return inputs[1:], log_prob.gather(2, inputs[1:, :, None]).sum(dim=(0, 2))

    def _sample(
        self, memory: Tensor, keys: Tensor, carry: tuple[Tensor, Tensor], mask: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Draws the decoder's inputs [1 + G, S]: the start and the devices."""
        (state,), (cell,) = carry
        num_groups, num_samples = len(memory), len(state)
        weights = tuple(self.decoder.parameters())
        noise = mask - torch.empty(num_groups, num_samples, mask.shape[2]).exponential_(generator=generator).log()
        inputs = torch.full((1 + num_groups, num_samples), self.device.num_embeddings - 1)
        for group in range(num_groups):
            state, cell = torch.lstm_cell(self.device(inputs[group]), (state, cell), *weights)
            logits = self._logits(state[None], memory, keys)[0]
            inputs[group + 1] = (logits + noise[group]).argmax(dim=1)  # the largest after Gumbel noise is a sample
        return inputs

    def _logits(self, states: Tensor, memory: Tensor, keys: Tensor) -> Tensor:
        """Returns logits [L, S, D] of the decoder's `states` [L, S, H]."""
        contexts = []
        for query in self.query(states).split(_CHUNK):
            scores = self.score(torch.tanh(keys + query[:, :, None])).squeeze(3)
            contexts.append(torch.softmax(scores, dim=2) @ memory)
        logits = self.out(torch.cat((states, torch.cat(contexts)), dim=2))
        return self.config.tanh_constant * torch.tanh(logits / self.config.temperature)


class HdpPolicy(nn.Module):
    """The grouper and the placer for one problem. Parameters are drawn from torch's global generator."""

    def __init__(self, problem: Problem, config: HdpConfig) -> None:
        super().__init__()
        self._features = features = _Features(problem, config)
        self.num_groups = min(config.num_groups, features.units.num_units)
        self.grouper = _Grouper(features.num_kinds, features.unit_numbers.shape[1], self.num_groups, config)
        self.placer = _Placer(features.num_kinds + config.num_outputs + self.num_groups, problem.num_devices, config)

    def sample(self, num_samples: int, generator: torch.Generator) -> tuple[I64, Tensor]:
        """Draws (`num_samples` placements [S, N] under one grouping, their log-probabilities [S] with gradients).

        Placements obey groups of the problem and allowed devices: an op goes to its own
        fastest device if its group's is not allowed.
        """
        features = self._features
        log_prob = self.grouper(features.unit_kinds, features.unit_numbers)
        noise = torch.empty_like(log_prob).exponential_(generator=generator).log()
        group = (log_prob.detach() - noise).argmax(dim=1)
        used, place_of_unit = torch.unique(group, return_inverse=True)
        of_groups = features.of_groups(group, self.num_groups)[used]
        allowed = features.allowed_of_groups(group, self.num_groups)[used]
        devices, device_log_prob = self.placer(of_groups, allowed, num_samples, generator)
        placements = np.stack([features.units.place_allowed(row) for row in devices.T[:, place_of_unit].numpy()])
        return placements, log_prob.gather(1, group[:, None]).sum() + device_log_prob


Evaluate = Callable[[Problem, I64], tuple[I64, I64]]
"""From a problem and placements [S, N] to step times [S] and peaks [S, D]."""


def hdp(
    question: Question,
    clock: Clock,
    *,
    config: HdpConfig | None = None,
    max_updates: int | None = None,
    evaluate: Evaluate = evaluate_many,
) -> Solution:
    """Returns the best placement met while HDP trains on the reduced problem, until the clock or `max_updates` ends it.

    The same seed gives the same answer after the same number of updates.
    """
    config, problem = config or HdpConfig(), question.reduction.problem
    first_seed, second_seed = np.random.SeedSequence(question.seed).generate_state(2, np.uint64).tolist()
    generator = torch.Generator().manual_seed(second_seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(first_seed)
        policy = HdpPolicy(problem, config)
    parameters = list(policy.parameters())
    optimizer = torch.optim.Adam(parameters, config.learning_rate)
    best: Candidate | None = None
    num_updates = 0
    baseline: float | None = None
    while num_updates != max_updates and not clock.is_up:
        placements, log_prob = policy.sample(clock.at_most(config.num_samples), generator)
        times, peaks = evaluate(problem, placements)
        clock.spend(len(placements))
        fits = np.all(peaks <= problem.memory_limit_bytes, axis=1)
        rewards = np.where(fits, -np.sqrt(times * 1e-9), config.invalid_reward)
        counts = fits | (num_updates < config.num_invalid_updates)
        if counts.any():
            mean = float(rewards[counts].mean())
            baseline = mean if baseline is None else baseline
            advantages = torch.from_numpy(np.where(counts, rewards - baseline, 0.0)).float()
            baseline += (1.0 - config.baseline_decay) * (mean - baseline)
            optimizer.zero_grad()
            torch.autograd.backward(-(advantages * log_prob).mean())
            nn.utils.clip_grad_norm_(parameters, config.max_gradient_norm)
            optimizer.step()
        num_updates += 1
        fastest = int(np.argmin(np.where(fits, times, NEVER)))
        if fits[fastest] and (best is None or times[fastest] < best.step_time_ns):
            best = Candidate(placements[fastest], Figures(0, int(times[fastest])), order=problem.order)
            question.tell(best)
    return Solution(None if best is None else question.replay(best), num_updates=num_updates)
