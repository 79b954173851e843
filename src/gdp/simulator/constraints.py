"""Constraints: where ops may go, and how much memory devices give. A pin sends ops to one device, a forbid keeps ops of
a kind off some, a group keeps its ops together. Where these leave an op no device, or a device more than it can hold,
no plan exists; the error names those that are to blame. N ops, D devices."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from numbers import Integral
from typing import Any, TypedDict

import numpy as np

from gdp.arrays import I64, Bool, mask, narrow, wide
from gdp.cluster import Cluster
from gdp.cluster.quantities import parse_fraction, parse_size
from gdp.errors import InputError, prefixed, suggest
from gdp.graph import Graph
from gdp.graph.copies import HOST_COPY

_UNLIMITED = 2**62  # all sizes of a problem sum to no more (`Problem.build`)


@dataclass(frozen=True, eq=False)
class _Rule:
    """A pin or a forbid."""

    text: str  # as it is named in errors: `pin encoder=gpu0`
    ops: I64  # those that it matches, ascending
    devices: Bool  # [D] where it lets them go


class ConstraintKeywords(TypedDict, total=False):
    """The fields of `Constraints` as keyword arguments."""

    pins: "Rules"
    pin: "Rules"  # as `--pin`
    forbid: "Rules"
    max_memory_bytes: Mapping[str, int | str] | None
    max_memory: Mapping[str, int | str] | None  # as `--max-memory`
    reserve: float | str


Rules = Mapping[str, str] | Sequence[tuple[str, str] | str] | str
"""`{"encoder": "gpu0"}`, `[("encoder", "gpu0")]` or `["encoder=gpu0"]`."""

_SYNONYMS = {"pin": "pins", "max_memory": "max_memory_bytes"}


@dataclass(frozen=True, eq=False)
class Constraints:
    """Limits on where ops may go and on the memory that devices give; see `Problem.build`.

    `pins` and `forbid` may be written as a mapping, as pairs or as texts `REGEX=DEVICE`, sizes as `"12GiB"`, and
    `reserve` as `"10%"`. Raises InputError for anything else."""

    pins: Sequence[tuple[str, str]] = ()
    forbid: Sequence[tuple[str, str]] = ()
    max_memory_bytes: Mapping[str, int] | None = None
    reserve: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "pins", _pairs(self.pins, "pins"))
        object.__setattr__(self, "forbid", _pairs(self.forbid, "forbid"))
        object.__setattr__(self, "max_memory_bytes", _sizes(self.max_memory_bytes))
        if isinstance(self.reserve, str):
            object.__setattr__(self, "reserve", parse_fraction(self.reserve, "reserve"))

    @classmethod
    def of(
        cls, constraints: "Constraints | None", keywords: ConstraintKeywords, function: Callable[..., Any] | None = None
    ) -> "Constraints":
        """Returns `constraints` with the fields that `keywords` give.

        InputError for an unknown one, with similar keywords, those of `function` among them."""
        if constraints is not None and not isinstance(constraints, Constraints):
            kind = type(constraints).__name__
            raise InputError(f"constraints is a {kind}; gdp.Constraints is expected, or keywords such as pins=")
        known = (*(item.name for item in fields(cls)), *_SYNONYMS)
        own = () if function is None else tuple(signature(function).parameters)
        changes: dict[str, Any] = {}
        for name, value in keywords.items():
            field = _SYNONYMS.get(name, name)
            if name not in known:
                raise InputError(f"argument {name!r} is unknown; {suggest(name, [*own, *known])}")
            if field in changes:
                raise InputError(f"arguments {field} and {name} are the same; give one")
            changes[field] = value
        return replace(constraints or cls(), **changes)

    def times_memory(self, factor: int) -> "Constraints":
        """With `factor` times the memory."""
        limits = {name: factor * limit for name, limit in (self.max_memory_bytes or {}).items()}
        return replace(self, max_memory_bytes=limits)

    def within(self, cluster: Cluster) -> "Constraints":
        """Without limits and forbids of devices that `cluster` does not have."""
        names = {device.name for device in cluster.devices}
        limits = {name: limit for name, limit in (self.max_memory_bytes or {}).items() if name in names}
        known = names | {device.kind for device in cluster.devices}
        forbid = [(pattern, device) for pattern, device in self.forbid if device in known]
        return replace(self, max_memory_bytes=limits, forbid=forbid)

    def on_groups(self, grouped: Cluster, cluster: Cluster) -> "Constraints":
        """On groups of the cards of `cluster`: each has the limits of its cards, the least memory, a rank its part of a
        CPU's; those of cards that are in no group are left out."""
        groups = {name: group.name for group in grouped.devices for name in group.group}
        num_ranks = max(1, *(len(device.group) for device in grouped.devices))
        shared = {device.name for device in grouped.devices if not device.group}
        left_out = {device.name for device in cluster.devices} - groups.keys() - {one.name for one in grouped.devices}
        limits: dict[str, int] = {}
        for name, limit in (self.max_memory_bytes or {}).items():
            if name not in left_out:
                group, own = groups.get(name, name), limit // num_ranks if name in shared else limit
                limits[group] = min(own, limits.get(group, own))
        pins, forbid = (
            tuple((pattern, groups.get(name, name)) for pattern, name in rules) for rules in (self.pins, self.forbid)
        )
        return replace(self, pins=pins, forbid=forbid, max_memory_bytes=limits or None)

    def also_for(self, device: str, like: str) -> "Constraints":
        """With the limit of the device `like` for a further `device`."""
        limits = dict(self.max_memory_bytes or {})
        if like in limits:
            limits[device] = limits[like]
        return replace(self, max_memory_bytes=limits)


def _pairs(rules: Rules, name: str) -> tuple[tuple[str, str], ...]:
    """Returns `rules` as pairs of a regular expression and a device."""
    items = rules.items() if isinstance(rules, Mapping) else [rules] if isinstance(rules, str) else rules
    pairs: list[tuple[str, str]] = []
    if not isinstance(items, Iterable):
        raise InputError(f"{name} is {rules!r}; pairs (REGEX, DEVICE) are expected, such as {{'encoder': 'gpu0'}}")
    for item in items:
        if isinstance(item, str):
            pair = tuple(item.rpartition("=")[::2]) if "=" in item else (item,)
        else:
            pair = tuple(item) if isinstance(item, Iterable) else ()
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair) or not pair[1]:
            raise InputError(
                f"{name} has {item!r}; (REGEX, DEVICE) or 'REGEX=DEVICE' is expected, such as ('encoder', 'gpu0')"
            )
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def _sizes(limits: Mapping[str, int | str] | None) -> dict[str, int] | None:
    """Returns `limits` in bytes."""
    if limits is None:
        return None
    if not isinstance(limits, Mapping):
        raise InputError(f"max_memory is {limits!r}; sizes by device are expected, such as {{'gpu0': '12GiB'}}")
    return {
        name: int(limit) if isinstance(limit, Integral) else parse_size(limit, f"max-memory {name}")
        for name, limit in limits.items()
    }


def allowed_devices(
    graph: Graph, cluster: Cluster, runnable: Bool, constraints: Constraints, limits_bytes: I64
) -> Bool:
    """[N, D] where ops may go: where they are `runnable` [N, D], as `pins` and `forbid` ask, groups as one. InputError
    for a pin or a forbid that matches nothing or names no device, where no device is left for an op, and where a
    device's pins ask for more resident bytes than its limit of `limits_bytes` [D]."""
    pin_rules = _read_pins(graph, cluster, constraints.pins)
    forbid_rules = _read_forbid(graph, cluster, constraints.forbid)
    rules = (*pin_rules, *forbid_rules)
    host_copies, is_cpu = np.flatnonzero(graph.is_in_role(HOST_COPY)), np.array([d.is_cpu for d in cluster.devices])
    keeps_copies = bool(len(host_copies)) and bool(is_cpu.any()) and not bool(is_cpu.all())
    allowed = np.array(runnable if rules or keeps_copies else narrow(runnable))
    for rule in rules:
        allowed[rule.ops] &= rule.devices
    if keeps_copies:  # unless a rule asks for a card
        on_cpus = allowed[host_copies] & is_cpu
        allowed[host_copies] = np.where(on_cpus.any(axis=1, keepdims=True), on_cpus, allowed[host_copies])
    intersect_groups(graph, allowed)
    if not allowed.any(axis=1).all():
        op = int(np.argmin(allowed.any(axis=1)))
        raise InputError(_no_device(graph, cluster, runnable, pin_rules, forbid_rules, op))
    _check_pins_fit(graph, cluster, pin_rules, limits_bytes)
    return wide(allowed, cluster.num_devices)


def memory_limits(cluster: Cluster, constraints: Constraints) -> I64:
    """[D] the lower of `max_memory_bytes` by name and the device's own memory less the share `reserve`."""
    names = [device.name for device in cluster.devices]
    max_memory_bytes, reserve = constraints.max_memory_bytes or {}, constraints.reserve
    for name, limit in max_memory_bytes.items():
        if name not in names:
            raise InputError(f"max-memory {name}: no such device in {cluster.name!r}; devices: {', '.join(names)}")
        if limit < 0:
            raise InputError(f"max-memory {name}: is {limit} bytes; at least 0 is expected")
    if not 0 <= reserve < 1:
        raise InputError(f"reserve is {reserve}; a fraction of at least 0 and below 1 is expected, such as 0.1 or 10%")
    return np.array(
        [
            min(device.memory_bytes - int(device.memory_bytes * reserve), max_memory_bytes.get(device.name, _UNLIMITED))
            for device in cluster.devices
        ],
        np.int64,
    )


def _read_pins(graph: Graph, cluster: Cluster, pins: Sequence[tuple[str, str]]) -> list[_Rule]:
    """InputError for a pin that matches nothing, names no device or contradicts another."""
    names = [device.name for device in cluster.devices]
    rules: list[_Rule] = []
    pinned_by: dict[int, int] = {}  # the first pin of each op
    for number, (pattern, device) in enumerate(pins):
        text = f"pin {pattern}={device}"
        if device not in names:
            raise InputError(f"{text}: no device {device!r} in {cluster.name!r}; devices: {', '.join(names)}")
        search = _compile(pattern, text).search
        ops = [op for op in range(graph.num_ops) if search(graph.modules[op]) or search(graph.op_names[op])]
        if not ops:
            raise InputError(f"{text}: matches no module path and no op name; see the graph's names")
        for op in ops:
            earlier = pins[pinned_by.setdefault(op, number)]
            if earlier[1] != device:
                raise InputError(
                    f"{text}: op {graph.op_names[op]!r} is pinned to {earlier[1]} by pin {'='.join(earlier)}; drop one"
                )
        rules.append(_Rule(text, np.array(ops, np.int64), np.array([name == device for name in names], np.bool_)))
    return rules


def _read_forbid(graph: Graph, cluster: Cluster, forbid: Sequence[tuple[str, str]]) -> list[_Rule]:
    """InputError for a forbid that matches no op's kind or names no device and no kind of device."""
    rules: list[_Rule] = []
    for pattern, device in forbid:
        text = f"forbid {pattern}={device}"
        with prefixed(text):
            numbers = cluster.devices_called(device)
        search = _compile(pattern, text).search
        matched = {kind for kind in set(graph.kinds) if search(kind)}
        if not matched:
            raise InputError(f"{text}: matches no op's kind; {_kinds(graph)}")
        devices = np.ones(cluster.num_devices, np.bool_)
        devices[numbers] = False
        ops = [op for op in range(graph.num_ops) if graph.kinds[op] in matched]
        rules.append(_Rule(text, np.array(ops, np.int64), devices))
    return rules


def _kinds(graph: Graph) -> str:
    """The kinds of ops that a regular expression could match, a few of many."""
    kinds = sorted(set(graph.kinds) - {""})
    if not kinds:
        return f"no op of graph {graph.name!r} has one"
    return f"kinds of {graph.name!r}: {', '.join(kinds[:8])}{f' and {len(kinds) - 8} more' if len(kinds) > 8 else ''}"


def _compile(pattern: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"{text}: {pattern!r} is not a regular expression ({error}); mend it") from None


def intersect_groups(graph: Graph, allowed: Bool) -> None:
    """Let every op of a group go only where all of them may."""
    grouped = np.flatnonzero(graph.groups >= 0)
    if not len(grouped) or allowed[grouped].all():
        return
    _, index = np.unique(graph.groups[grouped], return_inverse=True)
    common = np.ones((int(index.max()) + 1, allowed.shape[1]), np.bool_)
    np.logical_and.at(common, index, allowed[grouped])
    allowed[grouped] = common[index]


def _no_device(
    graph: Graph, cluster: Cluster, runnable: Bool, pins: Sequence[_Rule], forbid: Sequence[_Rule], op: int
) -> str:
    """Why no device is left for `op` or its group: as few reasons as leave none."""
    group = int(graph.groups[op])
    members = np.array([op]) if group < 0 else np.flatnonzero(graph.groups == group)
    reasons: list[tuple[str, Bool]] = []
    runs, first = np.unique(runnable[members], axis=0, return_index=True)
    for row, position in zip(runs, first.tolist(), strict=True):
        if not row.all():
            names = ", ".join(cluster.devices[device].name for device in np.flatnonzero(row))
            reasons.append((f"op {graph.op_names[members[position]]!r} runs on {names} only", row))
    for rule in (*forbid, *pins):
        matched = np.intersect1d(members, rule.ops)
        if len(matched):
            of = f" of op {graph.op_names[matched[0]]!r}" if group >= 0 else ""
            reasons.append((f"{rule.text}{of}", rule.devices))
    needed = list(reasons)
    for reason in reasons:
        others = [other for other in needed if other is not reason]
        if others and not np.logical_and.reduce([devices for _, devices in others]).any():
            needed = others
    texts = [text for text, _ in needed]
    where = f"op {op} {graph.op_names[op]!r}"
    if group >= 0:
        return (
            f"{where}: no device can hold its whole group {group}: {', '.join(texts)}; "
            "relax one of these, split the group or add a device"
        )
    words = [word for word in ("pin", "forbid") if any(text.startswith(f"{word} ") for text in texts)]
    return (
        f"{where}: its {'s and '.join(words)}s leave no device that can run it: {', '.join(texts)}; "
        f"relax --{' or --'.join(words)}"
    )


def _check_pins_fit(graph: Graph, cluster: Cluster, pins: Sequence[_Rule], limits_bytes: I64) -> None:
    """InputError where what is resident of pinned ops, with their groups, is more than their device's limit."""
    for device, limit in enumerate(limits_bytes.tolist()):
        here = [rule for rule in pins if rule.devices[device]]
        if not here:
            continue
        pinned = mask(np.concatenate([rule.ops for rule in here]), graph.num_ops)
        groups = graph.groups[pinned & (graph.groups >= 0)]
        pinned |= np.isin(graph.groups, groups)
        needed = int(graph.resident_bytes[pinned].sum())
        if needed > limit:
            name, texts = cluster.devices[device].name, ", ".join(dict.fromkeys(rule.text for rule in here))
            raise InputError(
                f"{texts}: {name} must hold {needed} bytes for the whole step, resident_bytes of {int(pinned.sum())} "
                f"ops with their groups, and its memory limit is {limit}; pin fewer ops there or give it more memory"
            )
