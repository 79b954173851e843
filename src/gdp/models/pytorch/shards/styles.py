"""The local program as styles of `torch.distributed.tensor.parallel.parallelize_module`, one for each cut module.

A module that hands its input to linear layers cut by columns alone gets it whole once, for all of them, and so sums
its gradient once. Where tokens are cut, they are from the input of the first layer of a list to the result of the last
one: what models compute of sizes before and after is of all tokens.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from gdp.errors import InputError
from gdp.models.pytorch.shards.cuts import SEQUENCE, AxisCut, cut_of, path_of
from gdp.models.pytorch.shards.local_run import LocalRun
from gdp.models.pytorch.shards.plan import CutPlan, Role, pattern_of, planned
from gdp.models.shards import Shards, Styles

Copies = Callable[[], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]]
_WHOLE = "Replicate()"
_PARALLEL = "place with sequence=off"
_OTHER = "export to megatron or torchtitan, or leave tensor out of --parallel"


def styles(copies: Copies, shards: Shards, layers: Sequence[str], name: str) -> Styles:
    """Returns the styles of the modules that are cut, in the order in which to apply them.

    `copies` makes models on fake tensors, with their inputs. InputError, with `name`, where they cannot be cut so.
    """
    model, args, kwargs = copies()
    calls, reasons = _Calls(model, args, kwargs, shards, layers, name), list[str]()
    for is_shared in (True, False):
        found = list(calls.styles(is_shared=is_shared))
        reasons.append(_failure(copies, found, shards.tensor))
        if not reasons[-1]:
            return _by_pattern(found, [path for path, _ in model.named_modules()])
    remedy = _PARALLEL if shards.sequence else _OTHER
    text = "the model does not run on the parts that parallelize_module makes"
    raise InputError(f"{name}: {text}: {reasons[0]}; {remedy}")


class _Calls:
    """The calls of modules in a forward pass on parts: what they got, and what they returned the first time."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shards: Shards,
        layers: Sequence[str],
        name: str,
    ) -> None:
        self.num_ranks, self.by_tokens = shards.tensor, bool(shards.sequence)
        self.layers, self.name, self.modules = layers, name, dict(model.named_modules())
        self.plan: CutPlan = planned(model, args, kwargs, self.num_ranks, by_tokens=self.by_tokens)
        self._run(model, args, kwargs)
        if self.by_tokens:
            if not layers:
                raise InputError(f"{name}: tokens are cut in a list of layers, and there is none; {_PARALLEL}")
            key, _ = self._hidden(layers[0])
            if cut_of(dict(self.arguments(layers[0]))[key]) is None:  # as behind a small table
                self._run(model, args, kwargs, key)

    def _run(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], key: int | str = -1) -> None:
        """Notes the calls; the first layer gets its part of the argument `key`, if that is one."""
        inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        run = LocalRun(self.num_ranks, by_tokens=self.by_tokens, gathered=self.plan.gathered, plan=self.plan)

        def before(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if key != -1 and path == self.layers[0]:
                x = kwargs[key] if isinstance(key, str) else args[key]
                tokens = AxisCut(tuple(x.shape), self._hidden(path)[1], self.num_ranks, sources=frozenset({SEQUENCE}))
                own = run.own(x, tokens.dim, tokens)
                args = tuple(own if other is x else other for other in args)
                kwargs = {name: own if other is x else other for name, other in kwargs.items()}
            inputs.setdefault(path, (args, dict(kwargs)))
            return args, kwargs

        def after(path: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            outputs.setdefault(path, output)

        handles, outputs = [], dict[str, Any]()
        for path, module in self.modules.items():
            handles.append(module.register_forward_pre_hook(partial(before, path), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(after, path)))
        self.plan.begin()
        try:
            with torch.no_grad(), run.running():
                output = model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        cuts = [cut_of(tensor) for tensor in torch.utils._pytree.tree_leaves(output)]
        sources = (cut.sources for cut in cuts if cut is not None and not cut.is_partial)
        self.heads = frozenset(map(path_of, frozenset().union(*sources)))
        self.inputs, self.outputs = inputs, outputs

    def arguments(self, path: str) -> Iterator[tuple[int | str, Tensor]]:
        """Yields the tensors among the arguments of a module, by place or name."""
        args, kwargs = self.inputs.get(path, ((), {}))
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in given:
            if isinstance(value, Tensor):
                yield key, value

    def tokens_of(self, tensor: Tensor) -> int | None:
        """Returns the dimension along which tokens are cut, or will be as soon as the tensor is summed."""
        cut = cut_of(tensor)
        if cut is None or not self.by_tokens:
            return None
        if cut.is_partial:
            dim = max(tensor.dim() - 2, 0)
            return None if tensor.dim() < 2 or tensor.shape[dim] % self.num_ranks else dim
        return cut.dim if SEQUENCE in cut.sources else None

    def styles(self, *, is_shared: bool) -> Iterator[tuple[str, str]]:
        """Yields (path, style); `is_shared`: modules get their input whole for all linear layers in them that do."""
        roles = self._roles()
        readers = {path for path, role in roles.items() if _is_by_columns(self.modules[path], role)}
        if self.by_tokens:
            key, dim = self._hidden(self.layers[0])
            yield self.layers[0], self._input(self.layers[0], key, _WHOLE, f"Shard({dim})", is_local=True)
        given = set[str]()  # linear layers that get their input whole
        for parent in dict.fromkeys(path.rpartition(".")[0] for path in roles if path in readers and is_shared):
            for key, tensor in self.arguments(parent):
                children = [f"{parent}.{child}" for child, _ in self.modules[parent].named_children()]
                reads = {path for path in children if any(own is tensor for _, own in self.arguments(path))}
                if len(reads) > 1 and reads <= readers:
                    place = self._placed(tensor, children[0])
                    yield parent, self._input(parent, key, place, _WHOLE, is_local=False)
                    given |= reads
        for path in roles:
            if path in readers:
                first = next(self.arguments(path), None)
                place = _WHOLE if first is None or path in given else self._placed(first[1], path)
                yield path, self._columns(path, place)
            else:
                place = self._placed(self.outputs[path], path)
                options = ["input_layouts=Replicate()"] * isinstance(self.modules[path], nn.Embedding)
                options += [f"output_layouts={place}"] * (place != _WHOLE)
                yield path, f"RowwiseParallel({', '.join(options)})"
        yield from self._whole_modules(roles)
        if self.by_tokens:
            result, dim = self.outputs[self.layers[-1]], self._hidden(self.layers[-1])[1]
            count = len(result) if isinstance(result, tuple) else 0
            own, whole = (_tuple(0, count, place) if count else place for place in (f"Shard({dim})", _WHOLE))
            yield self.layers[-1], f"PrepareModuleOutput(output_layouts={own}, desired_output_layouts={whole})"

    def _columns(self, path: str, place: str) -> str:
        options = [f"input_layouts={place}"] * (place != _WHOLE)
        weight = next(key for key, weight in self.plan.weights.items() if weight is self.modules[path].weight)
        if weight in self.plan.gathered:
            options.append("output_layouts=Replicate()")
        elif weight in self.heads:
            options.append("use_local_output=False")
        return f"ColwiseParallel({', '.join(options)})"

    def _placed(self, tensor: Tensor, path: str) -> str:
        dim = self.tokens_of(tensor) if self._is_inside(path) else None
        return _WHOLE if dim is None else f"Shard({dim})"

    def _is_inside(self, path: str) -> bool:
        return any(path.startswith(f"{layer}.") for layer in self.layers)

    def _roles(self) -> dict[str, Role]:
        """Returns the roles of the weights of modules. InputError for one that the styles do not cut."""
        by_weight = {id(self.plan.weights[path]): role for path, role in self.plan.roles.items()}
        roles: dict[str, Role] = {}
        for path, module in self.modules.items():
            for key, parameter in module._parameters.items():
                role = by_weight.get(id(parameter))
                if role is None:
                    continue
                reason = ""
                if not isinstance(module, (nn.Linear, nn.Embedding)) or not path:
                    reason = f"is of a {type(module).__name__}"
                elif len(role.segments) > 1:
                    reason = f"has {len(role.segments)} segments"
                elif role.num_parts < self.num_ranks:
                    reason = f"has {role.num_parts} heads for {self.num_ranks} ranks"
                if reason:
                    raise InputError(
                        f"{self.name}: {path}.{key} {reason}, which parallelize_module does not cut; {_OTHER}"
                    )
                if key == "weight":
                    roles[path] = role
        return roles

    def _whole_modules(self, roles: Mapping[str, Role]) -> Iterator[tuple[str, str]]:
        """Yields the styles of modules with whole parameters that work on parts: their gradients are summed."""
        for path, module in self.modules.items():
            tensor = next(self.arguments(path), (0, None))[1]
            if path in roles or not module._parameters or tensor is None:
                continue
            cut: AxisCut | None = cut_of(tensor)
            dim = self.tokens_of(tensor)
            if dim is None and cut is not None and not cut.is_partial and SEQUENCE not in cut.sources:
                dim = cut.dim
            elif not self._is_inside(path):
                dim = None
            if dim is None:
                continue
            if next(module.children(), None) is not None:
                raise InputError(f"{self.name}: {path} has parameters beside its modules, and works on parts; {_OTHER}")
            yield path, f"SequenceParallel(sequence_dim={dim}, use_local_output=True)"

    def _hidden(self, layer: str) -> tuple[int | str, int]:
        """Returns the argument that a layer changes, and the dimension of its tokens, which are cut in the result."""
        output = self.outputs.get(layer)
        result: Any = output[0] if isinstance(output, tuple) and output else output
        dim = self.tokens_of(result) if isinstance(result, Tensor) else None
        shape = _shape(result) if dim is not None else ()
        found = [key for key, tensor in self.arguments(layer) if _shape(tensor) == shape]
        tokens = 0 if dim is None else shape[dim]
        if dim is None or not found or tokens % self.num_ranks or tokens == self.num_ranks:
            raise InputError(f"{self.name}: tokens of {layer} are not cut from its input to its result; {_PARALLEL}")
        return found[0], dim

    def _input(self, path: str, key: int | str, own: str, desired: str, *, is_local: bool) -> str:
        if isinstance(key, str):
            values = f"input_kwarg_layouts={{{key!r}: {own}}}, desired_input_kwarg_layouts={{{key!r}: {desired}}}"
        else:
            count = len(self.inputs[path][0])
            values = f"input_layouts={_tuple(key, count, own)}, desired_input_layouts={_tuple(key, count, desired)}"
        return f"PrepareModuleInput({values}{', use_local_output=True' if is_local else ''})"


def _tuple(place: int, count: int, entry: str) -> str:
    entries = [entry if number == place else "None" for number in range(count)]
    return f"({', '.join(entries)}{',' if count == 1 else ''})"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    cut = cut_of(tensor)
    return tuple(tensor.shape) if cut is None else cut.shape


def _is_by_columns(module: nn.Module, role: Role) -> bool:
    return role.dim == (0 if isinstance(module, nn.Linear) else 1)


def _failure(copies: Copies, found: Sequence[tuple[str, str]], num_ranks: int) -> str:
    """Returns why the model does not run with the styles, as the first of ranks that exchange nothing; "" if it does.

    Returns "" as well in a process that is a rank of others.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        return ""
    model, args, kwargs = copies()
    _clear_sharding_prop_cache()  # it knows meshes by their shapes, and may keep one whose groups are gone
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with unset_fake_temporarily():
            mesh = init_device_mesh("cpu", (num_ranks,))
        # the very text that is exported is tried: calls of these names, written above
        names = {**vars(parallel), "Shard": Shard, "Replicate": Replicate, "__builtins__": {}}
        for path, style in found:
            parallel.parallelize_module(model, mesh, {path: eval(style, names)}, src_data_rank=None)
        with torch.no_grad(), parallel.loss_parallel():
            model(*args, **kwargs)
    except Exception as error:  # of the user's code on parts
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
    return ""


def _by_pattern(found: Sequence[tuple[str, str]], paths: Sequence[str]) -> Styles:
    """Joins the styles of all modules whose paths differ in numbers alone."""
    alike, of_style = dict[str, int](), dict[tuple[str, str], int]()
    for path in paths:
        alike[pattern_of(path)] = alike.get(pattern_of(path), 0) + 1
    for path, style in found:
        of_style[pattern_of(path), style] = of_style.get((pattern_of(path), style), 0) + 1
    joined = [
        (pattern_of(path) if of_style[pattern_of(path), style] == alike[pattern_of(path)] else path, style)
        for path, style in found
    ]
    return list(dict.fromkeys(joined))
