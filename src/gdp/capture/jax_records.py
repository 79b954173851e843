"""From a jaxpr to records: calls inlined, loops unrolled, views and repeated values resolved, stacks kept in parts.

A value is made by an op, or it is *lazy*: equations away from at most one value that an op makes. Lazy are views
(reshape, transpose, ...), values repeated by `broadcast_in_dim`, which consumers read as they were before, and scalars
known from constants alone. Equations of a lazy value belong to each op that reads it. What needs a repeated value in
memory (the operand of a scatter) makes it an op.

A *stack* is the result of an unrolled scan, or a parameter that one reads: it is in parts, one an iteration, element-
wise primitives work on the parts, and only what reads it as a whole makes an op that puts it together.

    scan over w[L, ...]      w[0], w[1], ... are parameters, each reading op belongs to one iteration
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gdp.capture import jax_costs as costs
from gdp.capture.flops import MOVEMENT
from gdp.capture.jax_calls import called_jaxpr, is_identity, opened
from gdp.capture.jax_loops import known_number
from gdp.capture.jax_stacks import index_jaxpr, part_aval, stack_jaxpr
from gdp.capture.jax_values import Constant, Equation, Record, Scope, Value
from gdp.errors import InputError


class Recorder:
    """Records the ops of jaxprs; scans of up to `unroll_limit` iterations are unrolled."""

    def __init__(self, function_name: str, unroll_limit: int, own_function: Callable[[str], bool]) -> None:
        self.function_name, self.unroll_limit, self.own_function = function_name, unroll_limit, own_function
        self.records: list[Record] = []
        self.notes: dict[str, None] = {}
        self._num_values = 0
        self._constants: dict[int, Value] = {}  # by identity, so that each is there once
        self._kept_alive: list[Any] = []
        self._helpers: dict[Any, Any] = {}

    def add_source(self, kind: str, name: str, aval: Any, origin: tuple[int, int], split: bool) -> Value:
        """A parameter, input or constant; if it is `split`, one op for each part along the first dimension."""
        value = self._value(aval)
        if split:
            part = part_aval(aval)
            value.parts = tuple(
                self.add_source(kind, f"{name}[{index}]", part, (origin[0], index), False)
                for index in range(aval.shape[0])
            )
            return value
        record = Record(
            kind,
            module="" if kind == "input" else name.rpartition(".")[0],
            name=name,
            dtype=costs.dtype_name("", (), (aval,)),
            source=kind,
            origin=origin,
        )
        return self._made_by(record, value)

    def run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Value], scopes: list[Scope]) -> list[Value]:
        """Record the equations of a jaxpr; returns its results."""
        known: dict[Any, Value] = dict(
            zip(jaxpr.constvars, map(self._constant, constants, (v.aval for v in jaxpr.constvars)), strict=True)
        )
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(item: Any) -> Value:
            if hasattr(item, "val"):
                return self._literal(item.val, item.aval)
            return known[item]

        for equation in jaxpr.eqns:
            stack = equation.source_info.name_stack.stack
            here = scopes + [(str(scope.name), type(scope).__name__ == "Transform") for scope in stack]
            results = self._record(equation, [read(item) for item in equation.invars], here)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(item) for item in jaxpr.outvars]

    # -- one equation ----------------------------------------------------------------------------------------------

    def _record(self, equation: Any, inputs: list[Value], scopes: list[Scope]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        outputs = [variable.aval for variable in equation.outvars]
        if any(hasattr(value.aval, "inner_aval") for value in inputs) or any(hasattr(a, "inner_aval") for a in outputs):
            raise InputError(f"{name} works on an array that is changed in place (jax Ref); return new arrays instead")
        if is_identity(name) and len(inputs) == len(outputs):
            return inputs
        callee = called_jaxpr(name, params)
        if callee is not None:
            jaxpr, constants = opened(callee)
            if len(jaxpr.invars) == len(inputs):
                return self.run(jaxpr, constants, inputs, scopes + self._called(params, jaxpr))
        if name == "scan" and int(params["length"]) <= self.unroll_limit:
            return self._unrolled(params, inputs, outputs, scopes)
        if name == "scan":
            self._note(f"a scan of {params['length']} iterations is one op; unroll_limit={params['length']} unrolls it")
        if name == "cond":
            self._note("branches of a cond are one op with the costs of the most expensive one")
        return self._apply(equation.primitive, params, inputs, outputs, scopes)

    def _apply(
        self, primitive: Any, params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Any],
        scopes: list[Scope],
    ) -> list[Value]:  # fmt: skip
        name = primitive.name
        avals = [value.aval for value in inputs]
        is_elementwise = name in costs.POINTWISE_PRIMITIVES or name in costs.CONVERSIONS
        if is_elementwise:
            parts = self._matching_parts(inputs, outputs[0])
            if parts is not None:
                return [self._stack_of(outputs[0], [
                    self._apply(primitive, params, row, [part_aval(outputs[0])], scopes)[0]
                    for row in zip(*parts, strict=True)
                ])]  # fmt: skip
        is_view = costs.is_view(name, params, avals, outputs)
        is_repeated = name in ("broadcast_in_dim", "iota") and not is_view
        if is_view or is_repeated or self._is_folded(name, is_elementwise, inputs, outputs):
            return [self._lazy(primitive, params, inputs, outputs[0], is_repeated, scopes)]
        record = Record(
            name,
            module=self._module(scopes),
            phase="backward" if ("transpose", True) in scopes else "forward",
            dtype=costs.dtype_name(name, avals, outputs),
        )
        bytes_read: list[int] = []
        for position, value in enumerate(inputs):
            bytes_read.append(self._read(record, value, costs.keeps_operand_whole(name, position), scopes))
        numbers = [self._number(value) if name == "while" else None for value in inputs]
        found = costs.costs_of(name, params, avals, outputs, bytes_read, numbers)
        for loop in found.open_loops:
            self._note(f"{record.module}: the trip count of a {loop} loop is unknown; its body is counted once")
        record.flops, record.bytes_accessed = found.flops, found.bytes_accessed
        record.how, record.unknown, record.open_loops = found.how, found.unknown, found.open_loops
        values = [self._made_by(record, self._value(aval), append=False) for aval in outputs]
        record.equations[self._equation(primitive, params, inputs, values)] = None
        self.records.append(record)
        return values

    def _is_folded(self, name: str, is_elementwise: bool, inputs: Sequence[Value], outputs: Sequence[Any]) -> bool:
        """A scalar, computed from constants alone."""
        is_scalar = len(outputs) == 1 and costs.num_elements(outputs[0]) == 1
        return is_elementwise and is_scalar and all(value.is_known for value in inputs)

    def _lazy(
        self, primitive: Any, params: Mapping[str, Any], inputs: Sequence[Value], aval: Any, is_repeated: bool,
        scopes: list[Scope],
    ) -> Value:  # fmt: skip
        for value in inputs:
            self._settle(value, scopes)
        made = self._value(aval)
        bases = [value.source for value in inputs if value.source is not None]
        equations = dict.fromkeys(step for value in inputs for step in value.equations)
        equations[self._equation(primitive, params, inputs, [made])] = None
        made.base, made.equations = next(iter(bases), None), tuple(equations)
        made.is_repeated = is_repeated or any(value.is_repeated for value in inputs)
        return made

    def _read(self, record: Record, value: Value, whole: bool, scopes: list[Scope]) -> int:
        """Have `record` read `value`; returns the bytes read."""
        self._settle(value, scopes)
        if whole and value.is_repeated and costs.num_elements(value.aval) > 1:
            self._materialise(value, scopes)
        source = value.source
        if value.op is None:
            record.equations.update(dict.fromkeys(value.equations))
        if source is None or source in record.reads:
            return 0
        record.reads[source] = None
        return costs.num_bytes(source.aval) if value.is_repeated else costs.num_bytes(value.aval)

    def _materialise(self, value: Value, scopes: list[Scope]) -> None:
        """Make an op of a lazy value."""
        record = Record(
            value.equations[-1].primitive.name,
            module=self._module(scopes),
            phase="backward" if ("transpose", True) in scopes else "forward",
            dtype=costs.dtype_name("", (), (value.aval,)),
            bytes_accessed=costs.num_bytes(value.aval) + (costs.num_bytes(value.base.aval) if value.base else 0),
            how=MOVEMENT,
        )
        record.equations = dict.fromkeys(value.equations)
        if value.base is not None:
            record.reads[value.base] = None
        self._made_by(record, value)
        value.base, value.equations, value.is_repeated = None, (), False

    # -- stacks ----------------------------------------------------------------------------------------------------

    def _unrolled(
        self, params: Mapping[str, Any], inputs: list[Value], outputs: Sequence[Any], scopes: list[Scope]
    ) -> list[Value]:
        """The results of a scan: what is carried, then stacks of what each iteration gives."""
        jaxpr, constants = opened(params["jaxpr"])
        num_consts, num_carried, length = params["num_consts"], params["num_carry"], int(params["length"])
        shared, carried = inputs[:num_consts], inputs[num_consts : num_consts + num_carried]
        columns = [self._parts(value, length, scopes) for value in inputs[num_consts + num_carried :]]
        rows: list[list[Value]] = [[] for _ in range(length)]
        for index in reversed(range(length)) if params["reverse"] else range(length):
            given = [column[index] for column in columns]
            results = self.run(jaxpr, constants, [*shared, *carried, *given], scopes)
            carried, rows[index] = results[:num_carried], results[num_carried:]
        stacks = outputs[num_carried:]
        return [*carried, *(self._stack_of(aval, [row[i] for row in rows]) for i, aval in enumerate(stacks))]

    def _stack_of(self, aval: Any, parts: Sequence[Value]) -> Value:
        value = self._value(aval)
        if parts:
            value.parts = tuple(parts)
        else:  # no iteration: nothing
            value.constant = Constant(_zeros(aval))
        return value

    def _parts(self, value: Value, length: int, scopes: list[Scope]) -> list[Value]:
        """The parts of `value` along its first dimension: those of a stack, or slices, which are ops."""
        if value.parts is not None:
            return list(value.parts)
        if value.op is None and value.is_repeated:
            return [self._lazy_part(value, index, length) for index in range(length)]
        return [self._helper(("index", index, length), value.aval, [value], scopes) for index in range(length)]

    def _matching_parts(self, inputs: Sequence[Value], aval: Any) -> list[list[Value]] | None:
        """The inputs by parts, if one is a stack of the result's shape and all others are too, or are lazy."""
        if not any(value.parts is not None and value.aval.shape == aval.shape for value in inputs):
            return None
        length = aval.shape[0]
        columns: list[list[Value]] = []
        for value in inputs:
            if value.parts is not None:
                columns.append(list(value.parts))
            elif value.aval.shape == ():
                columns.append([value] * length)
            elif value.op is None and value.is_repeated and value.aval.shape == aval.shape:
                columns.append([self._lazy_part(value, index, length) for index in range(length)])
            else:
                return None
        return columns

    def _lazy_part(self, value: Value, index: int, length: int) -> Value:
        """Part of a repeated value, itself one."""
        jaxpr = self._helper_jaxpr(("index", index, length), value.aval, 1)
        current = value
        for equation in jaxpr.eqns:
            current = self._lazy(equation.primitive, equation.params, [current], equation.outvars[0].aval, True, [])
        return current

    def _settle(self, value: Value, scopes: list[Scope]) -> None:
        """Put a stack together, once something reads it as a whole."""
        if value.parts is None or value.base is not None or value.equations:
            return
        made = self._helper(("stack", len(value.parts)), value.parts[0].aval, value.parts, scopes)
        value.base, value.equations, value.number = made.source, made.equations, made.number
        value.is_repeated = made.is_repeated

    def _helper(self, key: tuple[Any, ...], aval: Any, inputs: Sequence[Value], scopes: list[Scope]) -> Value:
        """Record the ops of a small function of the recorder's own."""
        jaxpr = self._helper_jaxpr(key, aval, len(inputs))
        return self.run(jaxpr, (), inputs, scopes)[0]

    def _helper_jaxpr(self, key: tuple[Any, ...], aval: Any, num_inputs: int) -> Any:
        known = (*key, aval.shape, aval.dtype, num_inputs)
        if known not in self._helpers:
            self._helpers[known] = index_jaxpr(aval, key[1]) if key[0] == "index" else stack_jaxpr(aval, num_inputs)
        return self._helpers[known]

    # -- parts of the above ----------------------------------------------------------------------------------------

    def results(self, values: Iterable[Value]) -> list[Value]:
        """The results of the step: what is repeated is in memory, a stack is its parts."""
        settled: list[Value] = []
        for value in values:
            if value.parts is not None:
                settled.extend(self.results(value.parts))
                continue
            if value.base is not None and value.is_repeated:
                self._materialise(value, [])
            settled.append(value)
        return settled

    def _value(self, aval: Any) -> Value:
        self._num_values += 1
        return Value(self._num_values - 1, aval)

    def _made_by(self, record: Record, value: Value, append: bool = True) -> Value:
        value.op = record
        record.outputs.append(value)
        if append:
            self.records.append(record)
        return value

    def _literal(self, content: Any, aval: Any) -> Value:
        value = self._value(aval)
        value.constant = Constant(content)
        return value

    def _number(self, value: Value) -> int | None:
        """The integer that a scalar is, if it follows from constants."""
        if not value.is_known or value.aval.shape != ():
            return None
        if value.constant is not None:
            return known_number(value.constant.value)
        made: dict[int, Any] = {}
        for equation in value.equations:  # of scalars: computing them takes nothing
            made.update(zip(equation.outputs, equation.apply(made), strict=True))
        return known_number(made[value.number])

    def _constant(self, content: Any, aval: Any) -> Value:
        """An array that the function's code holds: an op that owns it, unless it is a single number."""
        if id(content) not in self._constants:
            self._kept_alive.append(content)
            if costs.num_elements(aval) <= 1:
                self._constants[id(content)] = self._literal(content, aval)
            else:
                count = sum(record.source == "constant" for record in self.records)
                value = self.add_source("constant", f"constant_{count}", aval, (-1, -1), False)
                assert value.op is not None
                value.op.constant = content
                self._constants[id(content)] = value
        return self._constants[id(content)]

    def _equation(
        self, primitive: Any, params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> Equation:
        return Equation(
            primitive, params, tuple(value.operand for value in inputs), tuple(value.number for value in outputs)
        )

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def _called(self, params: Mapping[str, Any], jaxpr: Any) -> list[Scope]:
        """The scope of a jitted function of the user's own."""
        name = str(params.get("name", ""))
        place = str(getattr(getattr(jaxpr, "debug_info", None), "func_src_info", ""))
        is_own = name.isidentifier() and name != self.function_name and self.own_function(place)
        return [(name, False)] if is_own else []

    def _module(self, scopes: Sequence[Scope]) -> str:
        """`encoder.layer_3` of the scopes around an op; transformations repeat those that they began with."""
        path: list[str] = []
        segment: list[str] = []
        for name, is_transform in (*scopes, ("", True)):
            if not is_transform:
                # einsum opens a scope that is called like its subscripts
                segment += [part for part in name.split("/") if part not in _NO_MODULES and "->" not in part]
                continue
            path = segment if segment[: len(path)] == path else path + segment
            segment = []
        return ".".join(part.replace(".", "_") for part in path) or self.function_name


_NO_MODULES = ("", "checkpoint", "rematted_computation")


def _zeros(aval: Any) -> Any:
    import numpy as np

    return np.zeros(aval.shape, aval.dtype)
