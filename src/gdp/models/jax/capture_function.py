"""`capture_jax`: the graph of a JAX function, from its jaxpr, with liveness, phases, names and updates in place.
Nothing is allocated, compiled or run. docs/models-jax.md says which equations become ops. JAX is imported when it is
needed."""

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gdp.errors import InputError, first_line, suggest
from gdp.graph import Graph, Op, Tensor
from gdp.graph.builder import UniqueNames, topological_order, write_after_read
from gdp.models.jax import primitive_costs as costs
from gdp.models.jax.equations import UNSHARDED, Constant, Equation, JaxOp, JaxValue, is_sharded, stacked_arguments
from gdp.models.jax.jaxpr_recorder import JaxprRecorder
from gdp.models.pytorch.capture_step import Coverage

UNROLL_LIMIT = 64  # layers of today's models; far longer loops are over time or samples


@dataclass(frozen=True, eq=False)
class JaxProgram:
    """The computation of each op of a graph: equations that make values, which have numbers. N ops."""

    equations: tuple[tuple[Equation, ...], ...]  # [N] in turn; views that an op reads are among its equations
    sources: Mapping[int, tuple[int, int]]  # by op: the number of an array among the arguments' leaves, its part or -1
    constants: Mapping[int, Any]  # by op: arrays that the function's code holds
    source_values: Mapping[int, int]  # by op: the value of a parameter, input or constant
    results: tuple[tuple[tuple[Equation, ...], "int | Constant"], ...]  # of each result: views of it, and its value


def assemble(
    name: str, records: Sequence[JaxOp], results: Sequence[JaxValue], updates: Mapping[JaxValue, JaxValue]
) -> tuple[Graph, JaxProgram, list[JaxOp]]:
    """Returns graph, program and ops as recorded. `updates` maps a parameter's new value to the one it replaces."""
    live = _live(records, results)
    _mark_updates(live, {value.source for value in results})
    kept = {value.source for value in results if value.source is not None}
    in_place = _in_place(updates, kept)
    if _without_late_readers(in_place, live) != in_place:
        live = _writers_last(live, {new.op for new in in_place})
        in_place = _without_late_readers(in_place, live)
    numbers = {record: number for number, record in enumerate(live)}
    consumers: dict[JaxValue, set[int]] = defaultdict(set)
    for record in live:
        for value in record.reads:
            consumers[value].add(numbers[record])
    groups = [-1] * len(live)
    for group, (new, old) in enumerate(in_place.items()):
        assert new.op is not None
        assert old.op is not None
        maker = numbers[new.op]  # of one new value or several
        groups[numbers[old.op]] = groups[maker] = group if groups[maker] < 0 else groups[maker]
    rows = [
        Tensor(
            producer=numbers[record],
            consumers=tuple(sorted(consumers.get(value, ()))),
            bytes=costs.num_bytes(value.aval),
            resident=record.source in _HELD or value in in_place,
            keep=value in kept,
        )
        for record in live
        for value in record.outputs
        if value in consumers or value in kept or record.source
    ]
    made = ((new.op, old) for new, old in in_place.items() if new.op is not None)
    overwrites = ((reader, numbers[op]) for op, old in made for reader in consumers.get(old, ()))
    rows += write_after_read(len(live), rows, overwrites)
    names = _names(live)
    ops = [
        Op(
            names[number],
            record.kind,
            record.flops,
            record.bytes_accessed,
            record.dtype,
            sum(costs.num_bytes(value.aval) for value in record.outputs) if record.source in _HELD else 0,
            record.phase,
            record.module,
            groups[number],
            shapes=record.shapes,
        )
        for number, record in enumerate(live)
    ]
    program = JaxProgram(
        equations=tuple(tuple(record.equations) for record in live),
        sources={numbers[record]: record.origin for record in live if record.source in ("parameter", "input")},
        constants={numbers[record]: record.constant for record in live if record.source == "constant"},
        source_values={numbers[record]: record.outputs[0].number for record in live if record.source},
        results=tuple((value.equations, value.operand) for value in results),
    )
    return Graph.build(name, ops, rows), program, live


_HELD = ("parameter", "constant")


def _live(records: Sequence[JaxOp], results: Sequence[JaxValue]) -> list[JaxOp]:
    """Leaves out ops that no result needs: XLA drops them, too."""
    needed = {value.source for value in results}
    live: list[JaxOp] = []
    for record in reversed(records):
        if record.source in ("parameter", "input") or any(value in needed for value in record.outputs):
            needed.update(record.reads)
            live.append(record)
    return live[::-1]


def _mark_updates(records: Sequence[JaxOp], results: set[JaxValue | None]) -> None:
    """Marks as update the ops that follow from backward ops and lead to none, and the ops that only these need."""
    leads_to_backward: set[JaxOp] = set()
    for record in reversed(records):
        if record.phase == "backward" or record in leads_to_backward:
            leads_to_backward.update(value.op for value in record.reads if value.op is not None)
    follows: set[JaxOp] = set()
    for record in records:
        makers = [value.op for value in record.reads]
        if any(maker in follows or (maker is not None and maker.phase == "backward") for maker in makers):
            follows.add(record)
            if record.phase == "forward" and record not in leads_to_backward:
                record.phase = "update"
    readers: dict[JaxOp, set[str]] = defaultdict(set)
    for record in reversed(records):
        is_result = any(value in results for value in record.outputs)
        if record.phase == "forward" and not record.source and readers[record] == {"update"} and not is_result:
            record.phase = "update"
        for value in record.reads:
            if value.op is not None:
                readers[value.op].add(record.phase)


def _in_place(updates: Mapping[JaxValue, JaxValue], kept: set[JaxValue]) -> dict[JaxValue, JaxValue]:
    """Maps new values to the parameters that they replace, one for each, if an op of the update makes them, or one of
    the forward pass that writes a part of the old value, as to a cache."""
    replacements: dict[JaxValue, JaxValue] = {}
    for new, old in updates.items():
        source = new.source
        maker = None if source is None else source.op
        is_made = maker is not None and (maker.phase == "update" or _writes_part(maker, old))
        is_free = source not in replacements and old.op is not None and old not in replacements.values()
        if is_made and is_free and source in kept:
            assert source is not None
            replacements[source] = old
    return replacements


def _writes_part(op: JaxOp, old: JaxValue) -> bool:
    is_writer = op.kind == "dynamic_update_slice" or op.kind.startswith("scatter")
    return is_writer and op.phase == "forward" and next(iter(op.reads), None) is old


def _without_late_readers(in_place: Mapping[JaxValue, JaxValue], records: Sequence[JaxOp]) -> dict[JaxValue, JaxValue]:
    """Drops updates in place of values that an op reads after the new value is made: both are needed at once."""
    last: dict[JaxValue, JaxOp] = {}
    for record in records:
        last.update(dict.fromkeys(record.reads, record))
    place = {record: number for number, record in enumerate(records)}
    return {
        new: old
        for new, old in in_place.items()
        if new.op is not None and (old not in last or place[last[old]] <= place[new.op])
    }


def _writers_last(records: Sequence[JaxOp], writers: set[JaxOp | None]) -> list[JaxOp]:
    """Returns the ops in a topological order in which `writers` come as late as they can."""
    numbers = {record: number for number, record in enumerate(records)}
    makers = [{numbers[value.op] for value in record.reads if value.op is not None} for record in records]
    return [records[number] for number in topological_order(makers, lambda number: records[number] in writers)]


def _names(records: Sequence[JaxOp]) -> list[str]:
    """Names ops `encoder.layer_3.dot_general_0`, `encoder.layer_3.dot_general_backward_1`, ...; sources have names."""
    names, unique = [], UniqueNames()
    for record in records:
        suffix = "" if record.phase == "forward" else f"_{record.phase}"
        names.append(unique.of(record.name, f"{record.module}.{record.kind}{suffix}"))
    return names


@dataclass(frozen=True, eq=False)
class JaxCapture:
    """One call of a JAX function: a graph to place, the computation of its ops, and how well its costs are known."""

    graph: Graph
    program: JaxProgram
    coverage: Coverage  # counts ops, not calls
    notes: tuple[str, ...]  # approximations, such as long loops, a sentence each

    def __repr__(self) -> str:
        """Returns the graph's `repr`."""
        return f"JaxCapture({self.graph!r})"


def capture_jax(
    function: Callable[..., Any],
    *args: Any,
    name: str | None = None,
    parameters: int | str | Sequence[int | str] | None = None,
    unroll_limit: int = UNROLL_LIMIT,
    **kwargs: Any,
) -> JaxCapture:
    """Returns the graph of `function(*args, **kwargs)`: inference, a loss with `jax.grad`, or a whole training step.

    Arguments are pytrees of arrays or of `jax.ShapeDtypeStruct`; only shapes and types are read. Leaves that are no
    arrays (numbers, flags, text) are constants. `parameters` names the arguments, or gives their positions, that stay
    on devices for the whole step: weights, optimizer state. By default that is the first argument, if there are others;
    `()` is none. Results are kept.

    The new value of an argument among `parameters` is the first result with the same structure, if shapes and types are
    the same and the update makes it (not the backward pass, as for the gradients of `jax.grad`), or the forward pass
    writes a part of the old value, as of a cache. It is written in place, as when the argument is donated, by an op
    that shares the parameter's device. If the old value is needed together with the new one, both are kept.

    Scans of at most `unroll_limit` iterations are unrolled. `phase` is backward within `transpose(...)`, update for ops
    that follow from the backward pass, else forward. `module` is the path of `jax.named_scope`s and of jitted
    functions.

    Raises InputError if JAX is missing, the function fails, takes decisions from arrays' content, or returns no arrays.
    """
    name = getattr(function, "__name__", type(function).__name__) if name is None else name
    with _explained(name):
        import jax
    if not callable(function):
        raise InputError(f"{name}: function is a {type(function).__name__}; a function of arrays is expected")
    if type(unroll_limit) is not int or unroll_limit < 0:
        raise InputError(f"{name}: unroll_limit is {unroll_limit!r}; an integer of at least 0 is expected")
    arguments = _arguments(function, args, kwargs, name)
    held = _held(parameters, arguments, name)
    leaves, treedef = jax.tree_util.tree_flatten((args, kwargs))
    examples = {place: _example(leaf, name) for place, leaf in enumerate(leaves) if _is_array(leaf)}
    structures: list[Any] = []  # the structure of the function's results

    def of_arrays(*arrays: Any) -> list[Any]:
        by_place = dict(zip(examples, arrays, strict=True))
        args, kwargs = jax.tree_util.tree_unflatten(treedef, [by_place.get(at, leaf) for at, leaf in enumerate(leaves)])
        returned = function(*args, **kwargs)
        results, structure = jax.tree_util.tree_flatten(returned)
        for result in results:
            if not _is_array(result) and type(result) not in (int, float, complex, bool):
                raise InputError(f"{name}: the function returns {type(result).__name__}; let it return arrays alone")
        structures[:] = [_children(structure, returned)]
        return results

    with _explained(name):
        closed = jax.make_jaxpr(of_arrays)(*examples.values())
    if not closed.jaxpr.outvars:
        raise InputError(f"{name}: the function returns no arrays; return what the step computes")
    function_name = getattr(function, "__name__", name)
    recorder = JaxprRecorder(function_name if function_name.isidentifier() else name, unroll_limit, _is_own)
    if any(is_sharded(getattr(leaf, "sharding", None)) for leaf in leaves):
        recorder.note(UNSHARDED)
    stacked = stacked_arguments(closed.jaxpr, unroll_limit)
    values: dict[int, JaxValue] = {}  # by leaf
    for (place, _), variable, is_stacked in zip(examples.items(), closed.jaxpr.invars, stacked, strict=True):
        path, is_held = arguments.leaves[place], arguments.owner[place] in held
        kind = "parameter" if is_held else "input"
        values[place] = recorder.add_source(kind, path, variable.aval, (place, -1), is_held and is_stacked)
    with _explained(name):
        results = recorder.run(closed.jaxpr, closed.consts, list(values.values()), [])
        flat = recorder.results(results)
        updates, sentences = _updates(arguments, held, values, results, structures[0])
    graph, program, records = assemble(name, recorder.records, flat, updates)
    unknown = sum((record.unknown for record in records), Counter[str]())
    open_loops = sum((record.open_loops for record in records), Counter[str]())
    coverage = Coverage(MappingProxyType(dict(unknown)), MappingProxyType(dict(open_loops)))
    return JaxCapture(graph, program, coverage, (*recorder.notes, *sentences))


# Arguments


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a call, in the order of (args, kwargs), and where their leaves are."""

    names: tuple[str, ...]
    positions: tuple[int, ...]  # of each, -1 by keyword
    structures: tuple[Any, ...]
    leaves: tuple[str, ...]  # path of each leaf: params.encoder.kernel
    owner: tuple[int, ...]  # the argument of each leaf


def _arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> _Arguments:
    import jax

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        named = [f"argument_{number}" for number in range(len(args))]
    else:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{name}: the function does not take these arguments ({error}); give it others") from None
        named = _positional_names(signature, len(args))
    items = [*zip(named, range(len(args)), args, strict=True), *((key, -1, kwargs[key]) for key in sorted(kwargs))]
    leaves: list[str] = []
    owner: list[int] = []
    for number, (label, _, value) in enumerate(items):
        for path, _leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            leaves.append(".".join([label, *map(_key_name, path)]))
            owner.append(number)
    counts = Counter(leaves)
    leaves = [f"{path}#{place}" if counts[path] > 1 else path for place, path in enumerate(leaves)]
    labels, positions, values = zip(*items, strict=True) if items else ((), (), ())
    return _Arguments(labels, positions, tuple(map(jax.tree_util.tree_structure, values)), tuple(leaves), tuple(owner))


def _positional_names(signature: inspect.Signature, count: int) -> list[str]:
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}.{number}" for number in range(count - len(names))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]


def _key_name(key: Any) -> str:
    """Returns `kernel` for a key of a dictionary, an attribute or a place in a list."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")


def _held(parameters: Any, arguments: _Arguments, name: str) -> set[int]:
    """Returns the numbers of the arguments that stay on devices."""
    if parameters is None:
        return {0} if len(arguments.names) > 1 else set()
    choices = [parameters] if isinstance(parameters, int | str) else list(parameters)
    held: set[int] = set()
    for item in choices:
        if isinstance(item, str) and item in arguments.names:
            held.add(arguments.names.index(item))
        elif type(item) is int and item >= 0 and item in arguments.positions:
            held.add(arguments.positions.index(item))
        else:
            remedy = suggest(str(item), arguments.names) if arguments.names else "there are no arguments"
            raise InputError(f"{name}: parameters has {item!r}, which is no argument of the function; {remedy}")
    return held


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _example(leaf: Any, name: str) -> Any:
    import jax

    try:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
    except TypeError:
        raise InputError(
            f"{name}: an argument is a {type(leaf).__module__}.{type(leaf).__name__} of {leaf.dtype}, "
            "which JAX does not know; give a jax.ShapeDtypeStruct or a NumPy array"
        ) from None


# Results


def _children(structure: Any, returned: Any) -> list[Any]:
    """Returns the structures of a returned tuple's items, or that of a single result."""
    is_tuple = type(returned) in (tuple, list)
    return list(structure.children()) if is_tuple else [structure]


def _updates(
    arguments: _Arguments,
    held: set[int],
    values: Mapping[int, JaxValue],
    results: Sequence[JaxValue],
    structures: list[Any],
) -> tuple[dict[JaxValue, JaxValue], list[str]]:
    """Maps the new value of a parameter to the one that it replaces, by parts if both are stacks; and returns notes. An
    argument's new value is the first free result of the same structure, if types are the same."""
    spans: list[tuple[Any, Sequence[JaxValue]]] = []
    start = 0
    for structure in structures:
        spans.append((structure, results[start : start + structure.num_leaves]))
        start += structure.num_leaves
    updates: dict[JaxValue, JaxValue] = {}
    odd: list[str] = []
    for number in sorted(held):
        places = [place for place, owner in enumerate(arguments.owner) if owner == number]
        old = [values[place] for place in places if place in values]
        for span in spans:
            structure, new = span
            if not len(old) == len(new) == len(places) or structure != arguments.structures[number]:
                continue
            spans.remove(span)
            if all(_type(a) == _type(b) for a, b in zip(old, new, strict=True)):
                for before, after in zip(old, new, strict=True):
                    updates |= dict(_by_parts(after, before))
            else:
                name = arguments.names[number]
                odd.append(f"a result has the structure of {name} with other shapes or types: {name} is not replaced")
            break
    return updates, odd


def _type(value: JaxValue) -> tuple[Any, Any]:
    return value.aval.shape, value.aval.dtype


def _by_parts(new: JaxValue, old: JaxValue) -> Iterable[tuple[JaxValue, JaxValue]]:
    if new.parts is not None and old.parts is not None:
        return zip(new.parts, old.parts, strict=True)
    return [(new, old)] if new.parts is None and old.parts is None else []


# Errors


def _is_own(place: str) -> bool:
    """Returns whether a function, `name at FILE:LINE`, is the user's: helpers of libraries are no modules."""
    path = Path(place.rpartition(" at ")[2].rpartition(":")[0])
    return not {"site-packages", "dist-packages"} & set(path.parts)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns exceptions of JAX or the function into InputErrors of one line."""
    try:
        yield
    except InputError:
        raise
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise InputError(f"{name}: {error}; install it") from None
        raise InputError(f"{name}: JAX is not installed; pip install 'gdp-placement[jax]'") from None
    except Exception as error:
        reason = first_line(error)
        if _needs_content(error):
            raise InputError(
                f"{name}: the function depends on an array's content, which a capture does not have ({reason}); "
                "use jax.lax.cond, jax.numpy.where or shapes instead"
            ) from error
        raise InputError(
            f"{name}: the function failed ({type(error).__name__}: {reason}); check its arguments"
        ) from error


def _needs_content(error: Exception) -> bool:
    """Returns whether an error of JAX is about Python code that uses the content of a traced array."""
    from jax import errors

    kinds = (
        errors.ConcretizationTypeError,
        errors.TracerArrayConversionError,
        errors.TracerIntegerConversionError,
        errors.NonConcreteBooleanIndexError,
    )
    return isinstance(error, kinds)
