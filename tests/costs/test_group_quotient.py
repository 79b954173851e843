"""A group is its ranks: local programs on groups beside the same programs rank by rank, in the plain-Python reference.

A collective of T ranks becomes its hops, each with the latency and the rate of the group's link:

    all_reduce     begin ~> hop ~> ... ~> end      2 (T - 1) transfers of a T-th of the bytes to the next rank
    all_to_all     begin ~> end                    a T-th of the bytes to each other rank, the next one first

All of them take no time on a device; a rank starts its ops in the order in which the group starts those of the program,
so it waits for its collectives.
"""

import random
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import reference_simulator as reference
from gdp.cluster import Cluster, Route
from gdp.costs.op_times import op_times
from gdp.graph import Graph, Op, Tensor
from hand_cases import make_cluster

LATENCY_NS, RATE = 500, 2**30
UNIT, UNIT_NS = 2**21, 1_953_125  # bytes, and what they take at that rate


def ranks(num_groups: int, num_ranks: int) -> Cluster:
    """Cards with a port towards their own group and one towards the others."""
    cards = range(num_groups * num_ranks)
    return make_cluster(
        len(cards),
        {
            (a, b): Route(LATENCY_NS, RATE, (f"d{a}.{'near' if a // num_ranks == b // num_ranks else 'far'}",))
            for a in cards
            for b in cards
            if a != b
        },
    )


@dataclass
class Expanded:
    """A program rank by rank."""

    num_ranks: int
    ops: list[Op] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)  # producer and bytes of each tensor
    readers: list[list[int]] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)  # tensors
    parts: dict[int, list[list[int]]] = field(default_factory=dict)  # [T] ops of each rank, by op of the program

    def op(self, card: int, time_ns: int = 0) -> int:
        self.ops.append(Op(f"op{len(self.ops)}", "any", time_ns={"test-device": time_ns}))
        self.place.append(card)
        return len(self.ops) - 1

    def tensor(self, producer: int, num_bytes: int, *readers: int) -> int:
        self.made.append((producer, num_bytes))
        self.readers.append(list(readers))
        return len(self.made) - 1

    def collective(self, cards: list[int], exchange: str, num_bytes: int, result_bytes: int) -> list[list[int]]:
        """Adds the hops of an exchange; returns the ops of each rank."""
        count = self.num_ranks
        num_sends = 1 if exchange == "send" else (count - 1) * (2 if exchange == "all_reduce" else 1)
        own = [[self.op(card)] for card in cards]
        for _ in range(num_sends):
            for rank, card in enumerate(cards):
                own[rank].append(self.op(card))
        for rank in range(count):
            self.tensor(own[rank][0], result_bytes, own[rank][-1])  # its result is there from its start
            for turn, sender in enumerate(own[rank][:-1]):
                distance, place = (turn + 1, -1) if exchange == "all_to_all" else (1, turn + 1)
                chunk = num_bytes if exchange == "send" else num_bytes // count
                self.in_flight.append(self.tensor(sender, chunk, own[(rank + distance) % count][place]))
        return own

    def graph(self, bytes_in_flight: bool = True) -> Graph:
        hidden = set() if bytes_in_flight else set(self.in_flight)
        made = zip(self.made, self.readers, strict=True)
        tensors = [
            Tensor(producer, tuple(sorted(set(readers))), 0 if number in hidden else num_bytes)
            for number, ((producer, num_bytes), readers) in enumerate(made)
        ]
        return Graph.build("ranks", self.ops, tensors)


def expand(program: Graph, placement: list[int], num_ranks: int) -> Expanded:
    """Returns the ops of all ranks of a program."""
    found = Expanded(num_ranks)
    copies: dict[tuple[int, int], int] = {}
    for op in range(program.num_ops):
        cards = [placement[op] * num_ranks + rank for rank in range(num_ranks)]
        own = [tensor for tensor in range(program.num_tensors) if program.producers[tensor] == op]
        result_bytes = sum(int(program.tensor_bytes[tensor]) for tensor in own)
        exchange = program.kinds[op].removeprefix("collective.")
        if exchange == program.kinds[op]:
            found.parts[op] = [[found.op(card, program.times_ns[op]["test-device"])] for card in cards]
        else:
            found.parts[op] = found.collective(cards, exchange, int(program.bytes_accessed[op]), result_bytes)
        for rank, ops in enumerate(found.parts[op]):
            for tensor in range(program.num_tensors):
                if op in program.consumers_of(tensor):
                    found.readers[copies[tensor, rank]] += [ops[0], ops[-1]]
            for tensor in own:
                copies[tensor, rank] = found.tensor(ops[-1], int(program.tensor_bytes[tensor]))
    return found


def peaks(inputs: reference.Inputs, schedule: reference.Schedule) -> list[int]:
    held = reference.holdings(inputs, schedule.op_start_ns, schedule.op_finish_ns, schedule.transfers)
    totals = [[0] for _ in range(inputs.num_devices)]
    for at in held:
        here = [each for each in held if each.device == at.device]
        totals[at.device].append(sum(e.bytes for e in here if e.allocated_ns <= at.allocated_ns < e.freed_ns))
    return [max(each) for each in totals]


def compare(program: Graph, placement: list[int], num_groups: int, num_ranks: int) -> tuple[int, list[int]]:
    """Returns step time and peaks of a program on groups, which are those of each of their ranks."""
    cards = ranks(num_groups, num_ranks)
    groups = cards.grouped(num_ranks)
    step = reference.run(program, groups, op_times(program, groups), placement)
    found = expand(program, placement, num_ranks)
    order = [
        [part for op in step.order[card // num_ranks] for part in found.parts[op][card % num_ranks]]
        for card in range(cards.num_devices)
    ]
    graph, quiet = found.graph(), found.graph(bytes_in_flight=False)
    times = op_times(graph, cards)
    rank_step = reference.replay(graph, cards, times, found.place, order)
    assert rank_step.step_time_ns == step.step_time_ns
    # the memory of chunks in flight is NCCL's
    rank_peaks = peaks(reference.read_inputs(quiet, cards, times, found.place), rank_step)
    assert rank_peaks == list(np.repeat(step.peak_memory_bytes, num_ranks))
    return step.step_time_ns, step.peak_memory_bytes


def compute(name: str, time_ns: int) -> Op:
    return Op(name, "mm", time_ns={"test-device": time_ns})


def exchange(name: str, kind: str, num_bytes: int) -> Op:
    return Op(name, f"collective.{kind}", bytes_accessed=num_bytes)


def test_a_row_linear_by_hand() -> None:
    """A product, the sum over four ranks, a product: 10 ms, six hops of a quarter, 5 ms."""
    ops = [compute("column", 10_000_000), exchange("sum", "all_reduce", 4 * UNIT), compute("row", 5_000_000)]
    tensors = [Tensor(0, (1,), 4 * UNIT), Tensor(1, (2,), 4 * UNIT), Tensor(2, (), UNIT)]
    # 2 (4 - 1) hops of one unit each: 6 x (1,953,125 + 500)
    # the most is held while the sum runs: what it reads and what it makes
    assert compare(Graph.build("linear", ops, tensors), [0, 0, 0], 1, 4) == (
        15_000_000 + 6 * (UNIT_NS + LATENCY_NS),
        [8 * UNIT],
    )


def test_two_stages_by_hand() -> None:
    """What a stage gathers goes to the next one rank by rank, each over its own port."""
    ops = [compute("first", 1000), exchange("gather", "all_gather", 2 * UNIT), compute("second", 3000)]
    tensors = [Tensor(0, (1,), UNIT), Tensor(1, (2,), 2 * UNIT), Tensor(2, (), 0)]
    # one hop of half of the gathered bytes, and two units to the other group
    assert compare(Graph.build("stages", ops, tensors), [0, 0, 1], 2, 2) == (
        1000 + UNIT_NS + LATENCY_NS + 2 * UNIT_NS + LATENCY_NS + 3000,
        [3 * UNIT, 2 * UNIT],
    )


def test_a_shared_port_by_hand() -> None:
    """Two ranks that share the port of their host take turns: the group's transfer takes twice as long."""
    cards = ranks(2, 2)
    shared = Cluster.build(
        "shared",
        cards.devices,
        {
            (a, b): replace(cards.route(a, b), channels=(f"host{a // 2}",)) if a // 2 != b // 2 else cards.route(a, b)
            for a in range(4)
            for b in range(4)
            if a != b
        },
    )
    program = Graph.build("send", [compute("make", 1000), compute("use", 3000)], [Tensor(0, (1,), 4 * UNIT)])
    groups = shared.grouped(2)
    step = reference.run(program, groups, op_times(program, groups), [0, 1])
    found = expand(program, [0, 1], 2)
    rank_step = reference.run(found.graph(), shared, op_times(found.graph(), shared), found.place)
    assert step.step_time_ns == rank_step.step_time_ns == 1000 + 8 * UNIT_NS + LATENCY_NS + 3000


def programs(seed: int, num_groups: int, num_ranks: int) -> tuple[Graph, list[int]]:
    """Returns a program of ops and collectives, and a placement."""
    rng = random.Random(seed)
    ops, readers = list[Op](), list[list[int]]()
    for number in range(rng.randint(2, 9)):
        if number and rng.random() < 0.5:
            kind = rng.choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"])
            ops.append(exchange(f"c{number}", kind, rng.randint(1, 3) * UNIT * num_ranks))
        else:
            ops.append(compute(f"m{number}", rng.choice([0, 1_000_000, 3_000_000])))
        for before in rng.sample(range(number), min(number, rng.randint(1, 2))):
            readers[before].append(number)
        readers.append([])
    tensors = [Tensor(op, tuple(each), rng.randint(0, 4) * UNIT) for op, each in enumerate(readers)]
    return Graph.build("program", ops, tensors), [rng.randrange(num_groups) for _ in ops]


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3]), st.sampled_from([2, 4]))
def test_groups_are_their_ranks(seed: int, num_groups: int, num_ranks: int) -> None:
    """Step time and the peak of each member are those of the program rank by rank."""
    compare(*programs(seed, num_groups, num_ranks), num_groups, num_ranks)
