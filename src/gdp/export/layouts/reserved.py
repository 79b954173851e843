"""Estimates what PyTorch's allocator reserves for a step of FSDP2: more than is in use at once.

c10/cuda/CUDACachingAllocator.cpp, with `expandable_segments:True`: each stream has a pool, which grows at its end; a
request takes the smallest free block that is large enough, and splits it; free neighbours are joined; nothing goes back
before a request fails. torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: a gather receives into the pool of a
stream of its own, until parameters are copied out of it; chunks of summed gradients lie in another until the end.

    compute |weights, state|....activations....|logits|..hole..|gradients|     grows to its own peak
    gathers |layer 4|layer 5|                                                  to its own
    sums    |chunk|chunk|chunk|chunk                                           to its own: the three are added up"""

import heapq
from bisect import bisect_left, insort

import numpy as np

from gdp.arrays import I64
from gdp.graph.copies import EXCHANGE_END, HOPS, HOST_RING_END, exchange_ends
from gdp.notebook import size
from gdp.simulator.simulate import NEVER, Allocations, Simulation

_UNIT = 512  # bytes: sizes of blocks are multiples


def reserve_note(simulation: Simulation) -> str:
    """Returns a sentence on what is reserved of the fullest device."""
    fullest = int(simulation.peak_memory_bytes.argmax())
    peak, reserved = int(simulation.peak_memory_bytes[fullest]), reserved_bytes(simulation, fullest)
    sentence = (
        f"PyTorch's allocator reserves about {size(reserved)} of {simulation.problem.cluster.devices[fullest].name}, "
        f"with {size(peak)} in use at once: streams have pools of their own, and pools have holes."
    )
    if reserved <= simulation.problem.memory_limit_bytes[fullest]:
        return sentence
    return f"{sentence} More than the card has: blocks are given back in between, which takes time."


def reserved_bytes(simulation: Simulation, device: int) -> int:
    """Returns the bytes that the allocator takes from `device` over the step."""
    graph, placement = simulation.problem.graph, simulation.placement
    own = Allocations.of(simulation)
    makers = graph.producers[own.tensors]
    is_sum = graph.is_in_role(EXCHANGE_END) & np.char.startswith(np.array(graph.kinds), "reduce_scatter")
    is_here = (own.devices == device) & ~graph.is_in_role(*HOPS, HOST_RING_END)[makers]  # NCCL has hops in buffers
    pools = [np.flatnonzero(is_here & (is_sum[makers] == chosen)) for chosen in (False, True)]
    is_lasting = is_sum[makers] & (graph.microbatches[makers] == 0)  # the optimizer comes when all are there
    columns = own.sizes_bytes, own.from_ns, np.where(is_lasting, NEVER, own.until_ns)
    total = int(graph.resident_bytes[placement == device].sum())
    total += sum(_pool(*(column[rows] for column in columns)) for rows in pools)
    starts, ends = exchange_ends(graph)
    is_gather = np.array([graph.kinds[op].startswith("all_gather") for op in starts.tolist()], np.bool_)
    chosen = is_gather & (placement[starts] == device)
    starts, ends = starts[chosen], ends[chosen]
    received = np.zeros(graph.num_ops, np.int64)
    is_own = graph.view_of < 0
    np.add.at(received, graph.producers[is_own], graph.tensor_bytes[is_own])
    received = received[starts] + received[ends]
    return total + _pool(received, simulation.op_start_ns[starts], simulation.op_finish_ns[ends])


def _pool(sizes_bytes: I64, from_ns: I64, until_ns: I64) -> int:
    """Returns what a pool grows to. What is freed at an instant is free for what is allocated then."""
    lasting = np.flatnonzero((until_ns > from_ns) & (sizes_bytes > 0))
    rows = lasting[np.argsort(from_ns[lasting], kind="stable")]
    used: list[tuple[int, int, int]] = []  # (until when, from where, to where)
    free: list[tuple[int, int]] = []  # (size, from where), ascending
    ends: dict[int, int] = {}  # where each free block ends, by where it begins, and the other way round
    begins: dict[int, int] = {}
    top = 0

    def take(begin: int) -> int:
        end = ends.pop(begin)
        del begins[end], free[bisect_left(free, (end - begin, begin))]
        return end

    def give(begin: int, end: int) -> None:
        if end > begin:
            insort(free, (end - begin, begin))
            ends[begin], begins[end] = end, begin

    for asked, start_ns, end_ns in zip(*(x[rows].tolist() for x in (sizes_bytes, from_ns, until_ns)), strict=True):
        while used and used[0][0] <= start_ns:
            _, begin, end = heapq.heappop(used)
            end = take(end) if end in ends else end
            if begin in begins:
                take(begin := begins[begin])
            give(begin, end)
        needed = -(-asked // _UNIT) * _UNIT
        at = bisect_left(free, (needed, 0))
        if at < len(free):
            begin = free[at][1]
            give(begin + needed, take(begin))
        else:
            begin = begins.get(top, top)
            if begin < top:
                take(begin)
            top = begin + needed
        if end_ns < NEVER:
            heapq.heappush(used, (end_ns, begin, begin + needed))
    return top
