"""Recording of jaxprs: calls inlined, loops unrolled, views and repeated values resolved, stacks kept in parts.

A value is made by an op, or it is *lazy*: equations away from at most one value that an op makes. Lazy values are views
(reshape, transpose, ...), values repeated by `broadcast_in_dim`, whose consumers read the original, and scalars
known from constants alone. Equations of a lazy value belong to each op that reads it. A consumer that needs a repeated
value in memory (a scatter, its operand) makes it an op.

A *stack* is the result of an unrolled scan, or a parameter that one reads. It is in parts, one for each iteration;
element-wise primitives work on the parts, and only a consumer of the whole makes an op that joins them.

    scan over w[L, ...]      w[0], w[1], ... are parameters, each reading op belongs to one iteration"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gdp.errors import InputError
from gdp.models.jax import primitive_costs as costs
from gdp.models.jax.equations import (
    IDENTITIES,
    ON_CARD,
    UNSHARDED,
    Constant,
    Equation,
    JaxOp,
    JaxValue,
    Scope,
    called_jaxpr,
    has_sharding,
    index_jaxpr,
    is_sent_to_host,
    opened,
    part_aval,
    stack_jaxpr,
)


class JaxprRecorder:
    """Records the ops of jaxprs; scans of up to `unroll_limit` iterations are unrolled."""

    def __init__(self, function_name: str, unroll_limit: int, own_function: Callable[[str], bool]) -> None:
        self.function_name, self.unroll_limit, self.own_function = function_name, unroll_limit, own_function
        self.records: list[JaxOp] = []
        self.notes: dict[str, None] = {}
        self._num_values = 0
        self._constants: dict[int, JaxValue] = {}  # by identity, so that each is there once
        self._kept_alive: list[Any] = []

    def add_source(self, kind: str, name: str, aval: Any, origin: tuple[int, int], split: bool) -> JaxValue:
        """Adds a parameter, input or constant; with `split`, one op for each part along the first dimension."""
        value = self._value(aval)
        if split:
            part = part_aval(aval)
            value.parts = tuple(
                self.add_source(kind, f"{name}[{index}]", part, (origin[0], index), False)
                for index in range(aval.shape[0])
            )
            return value
        module, dtype = "" if kind == "input" else name.rpartition(".")[0], costs.dtype_name("", (), (aval,))
        record = JaxOp(kind, module=module, name=name, dtype=dtype, source=kind, origin=origin)
        return self._made_by(record, value)

    def run(
        self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[JaxValue], scopes: list[Scope]
    ) -> list[JaxValue]:
        """Records the equations of a jaxpr; returns its results."""
        values: dict[Any, JaxValue] = dict(
            zip(jaxpr.constvars, map(self._constant, constants, (v.aval for v in jaxpr.constvars)), strict=True)
        )
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def read(item: Any) -> JaxValue:
            if hasattr(item, "val"):
                return self._literal(item.val, item.aval)
            return values[item]

        for equation in jaxpr.eqns:
            stack = equation.source_info.name_stack.stack
            here = scopes + [(str(scope.name), type(scope).__name__ == "Transform") for scope in stack]
            results = self._record(equation, [read(item) for item in equation.invars], here)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(item) for item in jaxpr.outvars]

    # -- one equation ----------------------------------------------------------------------------------------------

    def _record(self, equation: Any, inputs: list[JaxValue], scopes: list[Scope]) -> list[JaxValue]:
        name, params = equation.primitive.name, equation.params
        outputs = [variable.aval for variable in equation.outvars]
        if any(hasattr(value.aval, "inner_aval") for value in inputs) or any(hasattr(a, "inner_aval") for a in outputs):
            raise InputError(f"{name} works on an array that is changed in place (jax Ref); return new arrays instead")
        if has_sharding(name, params):
            self.note(UNSHARDED)
        if name == "device_put" and is_sent_to_host(params):
            self.note(ON_CARD)
        if name == "shard_map":
            self.note("a shard_map (or pmap) is one op with the costs of all its shards")
        if name in IDENTITIES and len(inputs) == len(outputs):
            return inputs
        callee = called_jaxpr(name, params)
        if callee is not None:
            jaxpr, constants = opened(callee)
            if len(jaxpr.invars) == len(inputs):
                return self.run(jaxpr, constants, inputs, scopes + self._called(params, jaxpr))
        if name == "scan" and int(params["length"]) <= self.unroll_limit:
            return self._unrolled(params, inputs, outputs, scopes)
        if name == "scan":
            self.note(f"a scan of {params['length']} iterations is one op; unroll_limit={params['length']} unrolls it")
        if name == "cond":
            self.note("branches of a cond are one op with the costs of the most expensive one")
        return self._apply(equation.primitive, params, inputs, outputs, scopes)

    def _apply(
        self,
        primitive: Any,
        params: Mapping[str, Any],
        inputs: Sequence[JaxValue],
        outputs: Sequence[Any],
        scopes: list[Scope],
    ) -> list[JaxValue]:
        name = primitive.name
        avals = [value.aval for value in inputs]
        is_elementwise = name in costs.POINTWISE_PRIMITIVES or name in costs.CONVERSIONS
        if is_elementwise:
            parts = self._matching_parts(inputs, outputs[0])
            if parts is not None:
                aval = part_aval(outputs[0])
                rows = [self._apply(primitive, params, row, [aval], scopes)[0] for row in zip(*parts, strict=True)]
                return [self._stack_of(outputs[0], rows)]
        is_view = costs.is_view(name, params, avals, outputs)
        is_repeated = name in ("broadcast_in_dim", "iota") and not is_view
        if is_view or is_repeated or self._is_folded(name, is_elementwise, inputs, outputs):
            return [self._lazy(primitive, params, inputs, outputs[0], is_repeated, scopes)]
        record = self._new_op(name, scopes, costs.rounded(costs.dtype_name(name, avals, outputs), name, params))
        bytes_read: list[int] = []
        for position, value in enumerate(inputs):
            bytes_read.append(self._read(record, value, costs.keeps_operand_whole(name, position), scopes))
        cost = costs.costs_of(name, params, avals, outputs, bytes_read)
        for loop in cost.open_loops:
            self.note(f"{record.module}: the trip count of a {loop} loop is unknown; its body is counted once")
        record.flops, record.bytes_accessed = cost.flops, cost.bytes_accessed
        record.shapes = costs.product_shapes(name, params, avals, outputs)
        record.unknown, record.open_loops = cost.unknown, cost.open_loops
        values = [self._made_by(record, self._value(aval), append=False) for aval in outputs]
        record.equations[self._equation(primitive, params, inputs, values)] = None
        self.records.append(record)
        return values

    def _is_folded(self, name: str, is_elementwise: bool, inputs: Sequence[JaxValue], outputs: Sequence[Any]) -> bool:
        """Returns whether the result is a scalar computed from constants alone."""
        is_scalar = len(outputs) == 1 and costs.num_elements(outputs[0]) == 1
        return is_elementwise and is_scalar and all(value.is_known for value in inputs)

    def _lazy(
        self,
        primitive: Any,
        params: Mapping[str, Any],
        inputs: Sequence[JaxValue],
        aval: Any,
        is_repeated: bool,
        scopes: list[Scope],
    ) -> JaxValue:
        for value in inputs:
            self._settle(value, scopes)
        result = self._value(aval)
        bases = [value.source for value in inputs if value.source is not None]
        equations = dict.fromkeys(step for value in inputs for step in value.equations)
        equations[self._equation(primitive, params, inputs, [result])] = None
        result.base, result.equations = next(iter(bases), None), tuple(equations)
        result.is_repeated = is_repeated or any(value.is_repeated for value in inputs)
        return result

    def _read(self, record: JaxOp, value: JaxValue, whole: bool, scopes: list[Scope]) -> int:
        """Makes `record` a reader of `value`; returns the bytes read."""
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

    def _materialise(self, value: JaxValue, scopes: list[Scope]) -> None:
        """Makes a lazy value an op."""
        name, dtype = value.equations[-1].primitive.name, costs.dtype_name("", (), (value.aval,))
        record = self._new_op(name, scopes, dtype)
        record.bytes_accessed = costs.num_bytes(value.aval) + (costs.num_bytes(value.base.aval) if value.base else 0)
        record.equations = dict.fromkeys(value.equations)
        if value.base is not None:
            record.reads[value.base] = None
        self._made_by(record, value)
        value.base, value.equations, value.is_repeated = None, (), False

    # -- stacks ----------------------------------------------------------------------------------------------------

    def _unrolled(
        self, params: Mapping[str, Any], inputs: list[JaxValue], outputs: Sequence[Any], scopes: list[Scope]
    ) -> list[JaxValue]:
        """Returns the results of a scan: the carried values, then stacks of the results of each iteration."""
        jaxpr, constants = opened(params["jaxpr"])
        num_consts, num_carried, length = params["num_consts"], params["num_carry"], int(params["length"])
        shared, carried = inputs[:num_consts], inputs[num_consts : num_consts + num_carried]
        columns = [self._parts(value, length, scopes) for value in inputs[num_consts + num_carried :]]
        rows: list[list[JaxValue]] = [[] for _ in range(length)]
        for index in reversed(range(length)) if params["reverse"] else range(length):
            parts = [column[index] for column in columns]
            results = self.run(jaxpr, constants, [*shared, *carried, *parts], scopes)
            carried, rows[index] = results[:num_carried], results[num_carried:]
        stacks = outputs[num_carried:]
        return [*carried, *(self._stack_of(aval, [row[i] for row in rows]) for i, aval in enumerate(stacks))]

    def _stack_of(self, aval: Any, parts: Sequence[JaxValue]) -> JaxValue:
        value = self._value(aval)
        if parts:
            value.parts = tuple(parts)
        else:  # no iteration: nothing
            value.constant = Constant(np.zeros(aval.shape, aval.dtype))
        return value

    def _parts(self, value: JaxValue, length: int, scopes: list[Scope]) -> list[JaxValue]:
        """Returns the parts of `value` along its first dimension: those of a stack, or slices, which are ops."""
        if value.parts is not None:
            return list(value.parts)
        if value.op is None and value.is_repeated:
            return [self._lazy_part(value, index) for index in range(length)]
        jaxprs = [index_jaxpr(value.aval.shape, value.aval.dtype, index) for index in range(length)]
        return [self.run(jaxpr, (), [value], scopes)[0] for jaxpr in jaxprs]

    def _matching_parts(self, inputs: Sequence[JaxValue], aval: Any) -> list[list[JaxValue]] | None:
        """Returns the inputs by parts, if one is a stack of the result's shape and all others are too, or are lazy."""
        if not any(value.parts is not None and value.aval.shape == aval.shape for value in inputs):
            return None
        length = aval.shape[0]
        columns: list[list[JaxValue]] = []
        for value in inputs:
            if value.parts is not None:
                columns.append(list(value.parts))
            elif value.aval.shape == ():
                columns.append([value] * length)
            elif value.op is None and value.is_repeated and value.aval.shape == aval.shape:
                columns.append([self._lazy_part(value, index) for index in range(length)])
            else:
                return None
        return columns

    def _lazy_part(self, value: JaxValue, index: int) -> JaxValue:
        """Returns a part of a repeated value, itself repeated."""
        current = value
        for equation in index_jaxpr(value.aval.shape, value.aval.dtype, index).eqns:
            current = self._lazy(equation.primitive, equation.params, [current], equation.outvars[0].aval, True, [])
        return current

    def _settle(self, value: JaxValue, scopes: list[Scope]) -> None:
        """Joins the parts of a stack, for a consumer of the whole."""
        if value.parts is None or value.base is not None or value.equations:
            return
        part = value.parts[0].aval
        whole = self.run(stack_jaxpr(part.shape, part.dtype, len(value.parts)), (), value.parts, scopes)[0]
        value.base, value.equations, value.number = whole.source, whole.equations, whole.number
        value.is_repeated = whole.is_repeated

    # -- parts of the above ----------------------------------------------------------------------------------------

    def results(self, values: Iterable[JaxValue]) -> list[JaxValue]:
        """Returns the results of the step: repeated values in memory, stacks by parts."""
        settled: list[JaxValue] = []
        for value in values:
            if value.parts is not None:
                settled.extend(self.results(value.parts))
                continue
            if value.base is not None and value.is_repeated:
                self._materialise(value, [])
            settled.append(value)
        return settled

    def _value(self, aval: Any) -> JaxValue:
        self._num_values += 1
        return JaxValue(self._num_values - 1, aval)

    def _new_op(self, kind: str, scopes: list[Scope], dtype: str) -> JaxOp:
        phase = "backward" if ("transpose", True) in scopes else "forward"
        return JaxOp(kind, self._module(scopes), phase, dtype=dtype)

    def _made_by(self, record: JaxOp, value: JaxValue, append: bool = True) -> JaxValue:
        value.op = record
        record.outputs.append(value)
        if append:
            self.records.append(record)
        return value

    def _literal(self, content: Any, aval: Any) -> JaxValue:
        value = self._value(aval)
        value.constant = Constant(content)
        return value

    def _constant(self, content: Any, aval: Any) -> JaxValue:
        """Returns an array that the function's code holds: an op that owns it, unless it is a single number."""
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
        self, primitive: Any, params: Mapping[str, Any], inputs: Sequence[JaxValue], outputs: Sequence[JaxValue]
    ) -> Equation:
        return Equation(primitive, params, tuple(x.operand for x in inputs), tuple(x.number for x in outputs))

    def note(self, text: str) -> None:
        """Adds a sentence to the notes, once."""
        self.notes[text] = None

    def _called(self, params: Mapping[str, Any], jaxpr: Any) -> list[Scope]:
        """Returns the scope of a jitted function of the user's own."""
        name = str(params.get("name", ""))
        place = str(getattr(getattr(jaxpr, "debug_info", None), "func_src_info", ""))
        is_own = name.isidentifier() and name != self.function_name and self.own_function(place)
        return [(name, False)] if is_own else []

    def _module(self, scopes: Sequence[Scope]) -> str:
        """Returns `encoder.layer_3` for the scopes around an op; transformations repeat the scopes before them."""
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
