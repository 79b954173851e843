"""gdp places the operators of a neural network on devices so that one step is as fast as possible within memory.

The public names, loaded on first use: `import gdp` alone imports neither NumPy nor PyTorch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdp.advice import Advice as Advice
    from gdp.advice import advise as advise
    from gdp.bounds import lower_bound as lower_bound
    from gdp.budget import Budget as Budget
    from gdp.capture import Capture as Capture
    from gdp.capture import capture as capture
    from gdp.capture import capture_fn as capture_fn
    from gdp.capture import capture_jax as capture_jax
    from gdp.capture import register_flops as register_flops
    from gdp.cluster import Cluster as Cluster
    from gdp.cluster import Device as Device
    from gdp.cluster import Route as Route
    from gdp.compare import Comparison as Comparison
    from gdp.compare import compare as compare
    from gdp.constraints import Constraints as Constraints
    from gdp.errors import InputError as InputError
    from gdp.execute.models import run as run
    from gdp.execute.placed import Placed as Placed
    from gdp.execute.placed import placed as placed
    from gdp.graph import Graph as Graph
    from gdp.graph import Op as Op
    from gdp.graph import Tensor as Tensor
    from gdp.microbatches import accumulated as accumulated
    from gdp.op_costs import OpCosts as OpCosts
    from gdp.place import Progress as Progress
    from gdp.place import place as place
    from gdp.plan import Plan as Plan
    from gdp.problem import Problem as Problem
    from gdp.simulate import Simulation as Simulation
    from gdp.simulate import simulate as simulate
    from gdp.simulate import verify as verify
    from gdp.sources import load as load

_HOME = {
    "Advice": "advice",
    "advise": "advice",
    "lower_bound": "bounds",
    "Budget": "budget",
    "Capture": "capture",
    "capture": "capture",
    "capture_fn": "capture",
    "capture_jax": "capture",
    "register_flops": "capture",
    "Cluster": "cluster",
    "Device": "cluster",
    "Route": "cluster",
    "Comparison": "compare",
    "compare": "compare",
    "Constraints": "constraints",
    "InputError": "errors",
    "Placed": "execute.placed",
    "placed": "execute.placed",
    "run": "execute.models",
    "Graph": "graph",
    "Op": "graph",
    "Tensor": "graph",
    "accumulated": "microbatches",
    "OpCosts": "op_costs",
    "Progress": "place",
    "place": "place",
    "Plan": "plan",
    "Problem": "problem",
    "Simulation": "simulate",
    "simulate": "simulate",
    "verify": "simulate",
    "load": "sources",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gdp-placement")
    if name not in _HOME:
        raise AttributeError(f"module 'gdp' has no attribute {name!r}")
    value = getattr(import_module(f"gdp.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `gdp.place` and the like functions: importing the module of that name would put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_own_module = isinstance(value, ModuleType) and _HOME.get(name) == name
        super().__setattr__(name, getattr(value, name) if is_own_module else value)


sys.modules[__name__].__class__ = _Package
