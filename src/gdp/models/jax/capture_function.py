"""`capture_jax`: the graph of a JAX function, from its jaxpr. Nothing is allocated, compiled or run. docs/models-jax.md
says which equations become ops. JAX is imported when it is needed."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gdp.errors import InputError, first_line, suggest
from gdp.graph import Graph
from gdp.models.jax.build_graph import JaxProgram, assemble
from gdp.models.jax.equations import UNSHARDED, JaxValue, is_sharded, stacked_arguments
from gdp.models.jax.jaxpr_recorder import JaxprRecorder
from gdp.models.pytorch.capture_step import Coverage
from gdp.models.pytorch.flops import FORMULA, MOVEMENT, POINTWISE

UNROLL_LIMIT = 64  # layers of today's models; far longer loops are over time or samples


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
    the same and the update makes it (not the backward pass, as for the gradients of `jax.grad`). It is written in
    place, as when the argument is donated, by an op that shares the parameter's device. If the old value is needed
    together with the new one, both are kept.

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
    how = Counter(record.how for record in records)
    unknown = sum((record.unknown for record in records), Counter[str]())
    open_loops = sum((record.open_loops for record in records), Counter[str]())
    coverage = Coverage(
        MappingProxyType(dict(unknown)), how[FORMULA], how[POINTWISE], how[MOVEMENT], MappingProxyType(dict(open_loops))
    )
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
