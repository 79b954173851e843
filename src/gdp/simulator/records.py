"""Records of arrays that the compiled simulator takes. N ops, T tensors (sorted by producer), E consumers, D devices, C
channels, R = D * D routes, W words of 64 bits with a bit for each device. Kernels unpack records by position, once:
`tests/test_engine.py` guards the order of the fields."""

from typing import Annotated, Any, NamedTuple

import numpy as np

from gdp.arrays import I64, zeros

_OPS_PER_SLICE, _FEWEST_SLICES = 2, 16  # of time, of each device, for peaks
MOST_INPUTS = 2**26  # of an op: the count of missing ones shares a word of 32 bits with the number of a device


class Readers(NamedTuple):
    """Lists of the ops that read memory, L of them, by their lengths: `simulator.py` says why and has the lists."""

    frees_bytes: Any  # int64 [N] freed when an op ends, under any placement
    lengths: Any  # uint32 [G] of the lists, in ascending order
    offsets: Any  # uint32 [G + 1] lists of equal length
    producers: Any  # uint32 [L] op that makes what is read
    owned_bytes: Any  # int64 [L] freed with the last reader on the producer's device
    copy_bytes: Any  # int64 [L] freed with the last reader on another device
    ops: Any  # uint32 [sum of lengths over lists] the readers, list by list
    list_of: Any  # uint32 [T] the list of a tensor that owns its memory; L: none
    lone_reader: Any  # uint32 [T] op that frees a tensor's copy if it is sent; N + E: a list has its readers


class MemoryArrays(NamedTuple):
    """The figures of a graph that peaks of memory depend on."""

    resident_bytes: Any  # int64 [N]
    alloc_bytes: Any  # int64 [N] allocated on its device when the op starts
    owner: Any  # uint32 [T] the tensor that owns the memory: itself, or the base of a view
    owned_bytes: Any  # int64 [T] given back when the owner is freed; 0 for views and for resident and kept tensors
    copy_bytes: Any  # int64 [T] bytes of a copy on another device
    producers: Any  # uint32 [T]
    input_offsets: Any  # uint32 [N + 1]
    inputs: Any  # uint32 [E] the tensors that an op consumes
    input_producers: Any  # uint32 [E] and their producers
    residents: Any  # uint32 [num_residents] ops with resident bytes
    readers: Readers


class Arrays(NamedTuple):
    """A graph on a cluster, as all placements share it."""

    num_inputs: Any  # int32 [N]
    sources: Any  # uint32 [num_sources] ops without inputs
    tensor_offsets: Any  # uint32 [N + 1] tensors of op v are tensor_offsets[v]:tensor_offsets[v + 1]
    consumer_offsets: Any  # uint32 [T + 1]
    consumers: Any  # uint32 [E]
    occupancy_ns: Any  # int64 [T, num_rates]
    route_rate: Any  # uint32 [D, D] column of occupancy_ns
    latency_ns: Any  # int64 [D, D]
    route_offsets: Any  # uint32 [R + 1]
    route_channels: Any  # uint32 [sum of channels over routes]
    tail_ns: Any  # int64 [N] shortest possible time from an op's start to the step's end
    memory: MemoryArrays
    host_time_ns: Any  # int64 [N, D] or [N, 1], -1 less it where the host waits for the op; [0, 1] costs runs nothing


class Dispatch(NamedTuple):
    """Says that a device starts its ready op of lowest rank, or else the next op of an order to replay."""

    rank: Any  # uint32 [N]
    op_of_rank: Any  # uint32 [N]
    successor_offsets: Any  # uint32 [N + 1] by rank; empty for more devices than are bits of a word
    successors: Any  # uint32 [E] the ranks of the consumers of all that the op of a rank makes; empty likewise
    order_offsets: Any  # int64 [D + 1]
    order_ops: Any  # uint32 [N] each device's ops in the order of their starts; empty: by rank
    host_time_ns: Any  # as that of `Arrays`, by rank


class Scratch(NamedTuple):
    """Working memory of one run on up to 64 devices. An op that is ready when its last input arrives waits in the queue
    of its device, in the order in which they become ready, or else in the heap."""

    waiting: Annotated[Any, "uint32 [N]"]  # by rank: the op's device, and the number of its inputs not yet there
    duration_ns: Annotated[Any, "int64 [N]"]  # by rank, on the op's device
    bits0: Annotated[Any, "uint64 [D, W0]"]  # ready ops by rank
    bits1: Annotated[Any, "uint64 [D, W1]"]  # which words of bits0 are not 0
    bits2: Annotated[Any, "uint64 [D, W2]"]  # which words of bits1 are not 0
    lowest: Annotated[Any, "uint64 [D]"]  # the first word of bits0 that is not 0
    running: Annotated[Any, "uint32 [D]"]  # rank
    until_ns: Annotated[Any, "int64 [D]"]  # end of the running op; when idle the next time in its queue, or NEVER
    remaining_ns: Annotated[Any, "int64 [D]"]  # work not yet started
    channel_free_ns: Annotated[Any, "int64 [C]"]
    first_edge: Annotated[Any, "uint32 [D]"]  # where the running op begins in the dispatch's `successors`
    end_edge: Annotated[Any, "uint32 [D]"]  # and where it ends
    ready_ns: Annotated[Any, "int64 [N]"]  # by rank: the latest arrival of an input from another device, so far
    following: Annotated[Any, "uint32 [N + D]"]  # the next rank in the queue; entry N + d begins that of device d
    taken: Annotated[Any, "uint32 [D]"]  # the last one that has left the queue, N + d if none has
    newest: Annotated[Any, "uint32 [D]"]  # the last one in the queue
    newest_ns: Annotated[Any, "int64 [D]"]  # when that is ready
    soonest_ns: Annotated[Any, "int64 [D]"]  # when the first one in the queue is ready, NEVER if there is none
    heap_ns: Annotated[Any, "int64 [N]"]  # when an op is ready
    heap_item: Annotated[Any, "int64 [N]"]  # its rank
    host_ns: Annotated[Any, "int64 [D]"]  # the clock of each device's host


class ManyScratch(NamedTuple):
    """Working memory of one run on many devices: nothing of it grows with ops times devices."""

    missing: Annotated[Any, "int32 [N]"]  # inputs neither on the op's device nor on their way
    ready_ns: Annotated[Any, "int64 [N]"]  # the latest arrival of an input from another device, so far
    ready: Annotated[Any, "uint32 [N]"]  # the ranks of ready ops: a heap for each device, where its ops begin
    num_ready: Annotated[Any, "int64 [D]"]
    is_idle: Annotated[Any, "uint8 [D]"]
    changed: Annotated[Any, "uint32 [D + 1]"]  # devices that may be able to start an op
    is_changed: Annotated[Any, "uint8 [D]"]
    remaining_ns: Annotated[Any, "int64 [D]"]  # work not yet started
    channel_free_ns: Annotated[Any, "int64 [C]"]
    destinations: Annotated[Any, "uint64 [W]"]  # of what an op sends, as bits
    end_ns: Annotated[Any, "int64 [D]"]  # a heap of running ops, by their ends
    end_item: Annotated[Any, "int64 [D]"]  # op
    heap_ns: Annotated[Any, "int64 [N]"]  # when an op is ready
    heap_item: Annotated[Any, "int64 [N]"]  # its number
    host_ns: Annotated[Any, "int64 [D]"]  # the clock of each device's host


class Schedule(NamedTuple):
    """The times of a run. Transfers are in the order of their requests."""

    finish_ns: Annotated[Any, "int64 [N]"]
    ops: Annotated[Any, "uint32 [Q, N]"]  # ops of each device, a row, as they start; on many devices all in one row
    num_ops: Annotated[Any, "int64 [D]"]  # and how many
    transfer_tensor: Annotated[Any, "uint32 [E]"]
    transfer_route: Annotated[Any, "uint32 [E]"]  # source * D + destination
    transfer_start_ns: Annotated[Any, "int64 [E]"]
    transfer_end_ns: Annotated[Any, "int64 [E]"]  # end of occupancy
    arrival_ns: Annotated[Any, "int64 [E]"]
    num_transfers: Annotated[Any, "int64 [1]"]
    begins: Annotated[Any, "int64 [D]"]  # where each device's ops begin in their row
    start_ns: Annotated[Any, "int64 [N]"]  # where hosts take time; else it follows from the ends

    def orders(self) -> tuple[I64, ...]:
        """Returns the ops of each device [D] in the order of their starts."""
        rows = self.ops if len(self.ops) > 1 else np.broadcast_to(self.ops, (len(self.num_ops), self.ops.shape[1]))
        spans = zip(rows, self.begins.tolist(), self.num_ops.tolist(), strict=True)
        return tuple(row[begin : begin + count].astype(np.int64) for row, begin, count in spans)


class Memory(NamedTuple):
    """Working memory of `find_peaks`. Its events are starts and ends of transfers: 2 * transfer, and 1 more for an end.
    Each device has K of the S slices of time, slice k of device d at d * K + k."""

    freed_ns: Annotated[Any, "int64 [L + 1]"]  # when the memory that a list reads is freed on its producer's device
    freed_by: Annotated[Any, "uint32 [L + 1]"]  # the op that ends then, or N + the transfer that does; N + E: neither
    frees_bytes: Annotated[Any, "int64 [N + E + 1]"]  # freed when an op ends, then when a transfer ends, on its source
    copied: Annotated[Any, "uint32 [L]"]  # lists with readers on other devices
    last_ns: Annotated[Any, "int64 [D]"]  # when the last reader there ends
    allocated_bytes: Annotated[Any, "int64 [S]"]  # allocated in each slice
    used_bytes: Annotated[Any, "int64 [S]"]  # freed in it, then what is in use before it
    last_event: Annotated[Any, "int32 [S]"]  # 1 + an event in the slice, 0: none; -1: the slice does not matter
    event_before: Annotated[Any, "int32 [E + E]"]  # the same for another event of the slice
    heap_ns: Annotated[Any, "int64 [E]"]  # events of a slice
    heap_item: Annotated[Any, "int64 [E]"]  # event
    peak_bytes: Annotated[Any, "int64 [D]"]  # the answer


class Workspace(NamedTuple):
    """The working memory of a thread, with the schedule and the peaks of its last run."""

    scratch: Scratch | ManyScratch
    schedule: Schedule
    memory: Memory

    @classmethod
    def of(cls, arrays: Arrays, *, is_for_many: bool) -> "Workspace":
        """Returns a workspace for runs over `arrays`."""
        num_ops, num_devices, num_edges = len(arrays.num_inputs), len(arrays.latency_ns), len(arrays.consumers)
        words = [num_ops]
        for _ in range(3):
            words.append((words[-1] + 63) // 64)
        sizes = {
            "N": num_ops,
            "D": num_devices,
            "E": num_edges,
            "L": len(arrays.memory.readers.producers),
            "C": int(arrays.route_channels.max(initial=0)) + 1,
            "S": num_devices * max(_FEWEST_SLICES, num_ops // (_OPS_PER_SLICE * num_devices)),
            "W": (num_devices + 63) // 64,
            "Q": 1 if is_for_many else num_devices,
            **{f"W{level}": count for level, count in enumerate(words[1:])},
        }
        kind: type[Scratch | ManyScratch] = ManyScratch if is_for_many else Scratch
        return cls(zeros(kind, **sizes), zeros(Schedule, **sizes), zeros(Memory, **sizes))
