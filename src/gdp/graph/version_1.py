"""Version 1 of `gdp-graph` files: names of ops told what each op is a copy of. Nothing else knows these names.

x@1#2   the copy of op x for micro-batch 1 and replica 2       all_reduce.3.add.0   a hop of exchange all_reduce.3
x!      x once more, for the backward pass                     x.host               an activation of x on the host
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gdp.arrays import I64, Bool
from gdp.graph import copies

_END = re.compile(r"(.+?)(?:@([1-9][0-9]{0,3}))?(?:#([1-9][0-9]{0,2}))?", re.DOTALL)
_EXCHANGES = ("all_reduce.", "reduce_scatter.", "all_gather.")  # what kinds begin with
_HOP_ROLES = {"add": copies.RING_SUM, "copy": copies.RING_COPY}
_HOST_ROLES = {"add": copies.HOST_RING_SUM, "copy": copies.HOST_RING_COPY}
_END_ROLES = {"ready": copies.EXCHANGE_START, "done": copies.EXCHANGE_END, "joined": copies.HOST_RING_END}


def copy_columns(
    names: Sequence[str], kinds: Sequence[str], phases: Sequence[str], groups: Sequence[int]
) -> dict[str, list[Any]]:
    """Returns the fields `origin`, `microbatch`, `replica` and `role` [N] of ops that are so called.

    Names count only where all replicas, and all micro-batches of each, have copies of the same ops.
    """
    ends = [_split(name) for name in names]
    stems = [stem for stem, _, _ in ends]
    roles = [_role(stem, kind) for stem, kind in zip(stems, kinds, strict=True)]
    microbatch, replica = (np.array([end[part] for end in ends], np.int64) for part in (1, 2))
    sorts = np.unique([f"{kind}\n{phase}" for kind, phase in zip(kinds, phases, strict=True)], return_inverse=True)[1]
    base = np.unique(stems, return_inverse=True)[1]
    is_exchange = np.array([role in copies.EXCHANGE for role in roles], np.bool_)
    is_sum = np.array([role == copies.ACCUMULATE for role in roles], np.bool_)
    if not _are_replicas(replica, base, sorts, is_exchange | is_sum):
        replica = np.zeros_like(replica)
    if not _are_microbatches(microbatch, replica, base, sorts, is_sum | is_exchange):
        microbatch = np.zeros_like(microbatch)
    for op, (stem, own_microbatch, own_replica) in enumerate(ends):
        if (own_microbatch, own_replica) != (microbatch[op], replica[op]):
            stem = names[op] if not microbatch[op] and not replica[op] else stem
            stems[op], roles[op] = stem, _role(stem, kinds[op])
    number = {name: op for op, name in enumerate(names)}
    for op, role in enumerate(roles):
        source = number.get(stems[op][:-1] + names[op][len(stems[op]) :], -1)
        if role == copies.RECOMPUTED and (source < 0 or kinds[source] != kinds[op]):
            roles[op] = copies.MODEL
    columns = {"microbatch": microbatch.tolist(), "replica": replica.tolist(), "role": roles}
    return columns | {"origin": _origins(stems, columns, phases, groups)}


def _split(name: str) -> tuple[str, int, int]:
    """Returns a name without its ends, its micro-batch and its replica; 0 for none."""
    match = _END.fullmatch(name)
    return (match[1], int(match[2] or 0), int(match[3] or 0)) if match else (name, 0, 0)


def _role(stem: str, kind: str) -> str:
    if kind.startswith(_EXCHANGES):
        step = kind.rpartition(".")[2]
        hops = _HOST_ROLES if ".host." in stem else _HOP_ROLES
        return _END_ROLES.get(step) or hops.get(step, copies.MODEL)
    if kind == "host.copy":
        return copies.HOST_COPY
    if kind == "batch.done":
        return copies.BATCH_END
    if ".accumulate" in stem:
        return copies.ACCUMULATE
    return copies.RECOMPUTED if stem.endswith("!") else copies.MODEL


def _are_replicas(replica: I64, base: I64, sorts: I64, is_made: Bool) -> bool:
    """Tells whether each replica has a copy, of its kind and phase, of every op of the first one."""
    code = (sorts * (int(base.max()) + 1) + base)[~is_made]
    copies_of = [np.unique(code[replica[~is_made] == own]) for own in range(int(replica.max()) + 1)]
    return all(np.array_equal(own, copies_of[0]) for own in copies_of)


def _are_microbatches(microbatch: I64, replica: I64, base: I64, sorts: I64, is_made: Bool) -> bool:
    """Tells whether each op of a replica that is repeated has a copy of its kind and phase for each micro-batch."""
    key = np.unique(np.stack((replica, base)), axis=1, return_inverse=True)[1].reshape(-1)
    is_later = microbatch > 0
    copies_of = np.bincount(key[is_later], minlength=int(key.max()) + 1)
    last = np.zeros(int(replica.max()) + 1, np.int64)
    np.maximum.at(last, replica, microbatch)
    has_first = np.zeros(len(copies_of), np.bool_)
    has_first[key[~is_later | is_made]] = True
    sort = np.zeros(len(copies_of), np.int64)
    sort[key] = sorts
    is_repeated = copies_of[key] > 0
    is_odd = (copies_of[key] != last[replica]) | ~has_first[key] | (sort[key] != sorts)
    return not (is_odd & is_repeated & ~(is_made & ~is_later)).any()


def _origins(
    stems: Sequence[str], columns: Mapping[str, Sequence[Any]], phases: Sequence[str], groups: Sequence[int]
) -> list[int]:
    """Returns the op [N] that each is a copy of, or made for."""
    first: dict[tuple[str, str], int] = {}
    in_order = sorted(range(len(stems)), key=lambda op: (columns["replica"][op], columns["microbatch"][op], op))
    for op in in_order:
        first.setdefault((stems[op], columns["role"][op]), op)
    of_group: dict[int, int] = {}  # its first update, else its first op
    for op in sorted(in_order, key=lambda op: phases[op] != "update"):
        if groups[op] >= 0 and columns["role"][op] == copies.MODEL:
            of_group.setdefault(groups[op], op)
    origins = []
    for op, (stem, role) in enumerate(zip(stems, columns["role"], strict=True)):
        origin = first[stem, role]
        if role in (*copies.HOPS, copies.HOST_RING_END) or (origin == op and role == copies.EXCHANGE_END):
            origin = first[".".join([*stem.split(".")[:2], "ready"]), copies.EXCHANGE_START]
        elif origin == op and role == copies.RECOMPUTED:
            origin = first.get((stem[:-1], copies.MODEL), op)
        elif origin == op and role == copies.HOST_COPY:
            origin = first.get((stem.removesuffix(".host"), copies.MODEL), op)
        elif origin == op and role == copies.BATCH_END:
            origin = op - 1
        elif origin == op and role in (copies.ACCUMULATE, copies.EXCHANGE_START):
            update = stem.partition(".accumulate")[0]
            updates = (first.get((name, copies.MODEL)) for name in (f"{update}.update", update))
            origin = next((update for update in updates if update is not None), of_group.get(groups[op], op))
        origins.append(-1 if origin == op else origin)
    return origins
