"""MODEL as a graph, and the options for reading it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from gdp.errors import InputError, UnevenBatchError
from gdp.graph import Graph
from gdp.graph.microbatches import check_count
from gdp.models.lora import Lora
from gdp.models.serving import ServedStep, Serving
from gdp.models.shards import WHOLE, Shards

if TYPE_CHECKING:
    from gdp.models.op_costs import OpCosts

OPTIMIZERS = ("adam", "adamw", "sgd", "sgd-momentum", "adafactor", "adam-8bit")
IMPLEMENTATIONS = ("foreach", "fused", "for-loop")
"""How torch.optim computes Adam, AdamW and SGD: behind a comma of an optimizer's name; its default on cards first."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
MIXED, PURE_BF16, FLOAT32 = "mixed", "pure-bf16", "float32"
PRECISIONS = MappingProxyType({MIXED: ("bfloat16", "float16"), PURE_BF16: ("bfloat16",), FLOAT32: ("float32",)})
"""The values of `--precision`, each with the types that weights may have beside it."""
GGUF = ".gguf"  # suffix of llama.cpp's files, which are read as `hf:FILE.gguf`
HUGGING_FACE = "hf:"  # prefix of the name of a Transformers or Diffusers directory
TIMM = "timm:"  # prefix of the name of a model of timm
PUBLISHED = (HUGGING_FACE, TIMM)


@dataclass(frozen=True, eq=False)
class Model:
    """The graph of MODEL, and how well its costs are known."""

    graph: Graph
    unknown_costs: Mapping[str, int]  # kind -> number of ops whose FLOPs were estimated from the size of their result
    is_captured: bool  # False: the graph was read from a `gdp-graph` file
    noise: float | None = None  # relative standard deviation of measured op times; None: not measured
    notes: tuple[str, ...] = ()  # assumptions and differences, a sentence each
    served: ServedStep | None = None  # of a prefill or decode step
    seconds: float = 0.0  # of the processor that capturing it took; 0: it was read from a file
    captured_s: float = 0.0  # the same, also where it was kept from an earlier command; 0: not known


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for turning MODEL into a graph."""

    training: bool = True  # False: the forward pass alone
    optimizer: str = "adam"
    microbatches: int = 1  # over which gradients are accumulated
    dims: Mapping[str, int] = field(default_factory=dict)  # of an ONNX file, by the name of a symbolic dimension
    op_costs: "OpCosts | None" = None  # costs from the user
    precision: str = ""  # of training, of `PRECISIONS`; "": as the model is written, of `hf:` mixed
    dtype: str = ""  # that the model is converted to; "": none
    serving: Serving = field(default_factory=Serving)
    batch_dim: int | None = None  # of the inputs of a user's function; None: the first, if nothing says otherwise
    batch: int | None = None  # samples, in place of those that MODEL has
    lora: Lora | None = None  # adapters that are trained in place of the weights
    shards: Shards = WHOLE  # how the ops are cut: the step is that of one rank

    def __post_init__(self) -> None:
        if self.batch is not None and not 0 < self.batch < 2**31:
            raise InputError(f"--batch is {self.batch}; a number of samples from 1 to 2^31 - 1 is expected")
        if self.batch_dim is not None and self.batch_dim < 0:
            raise InputError(f"--batch-dim is {self.batch_dim}; the number of a dimension is expected, 0 for the first")
        check_count(self.microbatches, "microbatches")
        check_optimizer(self.optimizer)
        check_dtype(self.dtype)
        check_precision(self.precision, self.dtype)
        if not self.training and self.changes_update:
            raise InputError(f"{self.optimizer_option}: inference updates no parameters; leave it or --inference out")

    @property
    def cut_dimension(self) -> str:
        """Returns the name of the dimension of inputs that is cut, for a message."""
        return f"dimension {self.batch_dim}" if self.batch_dim else "first dimension"

    @property
    def changes_update(self) -> bool:
        """Returns whether the update of parameters is another than the default."""
        return self.optimizer != OPTIMIZERS[0] or bool(self.precision) or self.lora is not None

    @property
    def optimizer_option(self) -> str:
        """Returns the option that changes the update, for a message."""
        named = {"--lora": self.lora is not None, "--optimizer": self.optimizer != OPTIMIZERS[0]}
        return next((option for option, is_given in named.items() if is_given), "--precision")

    @property
    def weight_dtype(self) -> str:
        """Returns the type that the model is converted to; "" for none."""
        return self.dtype or ("" if self.precision in ("", MIXED) else PRECISIONS[self.precision][0])

    def finish(self, model: Model) -> Model:
        """Returns the step of one micro-batch, with the costs that the user gives."""
        costs = self.op_costs
        if costs is None:
            return model
        unknown = costs.still_unknown(model.graph, model.unknown_costs)
        return replace(model, graph=costs.apply(model.graph), unknown_costs=unknown)


def check_dtype(dtype: str) -> None:
    """Raises InputError for a type that models are not converted to; "" is no conversion."""
    if dtype and dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; one of {', '.join(DTYPES)} is expected")


def check_precision(precision: str, dtype: str = "") -> None:
    """Raises InputError for a precision that is not known, and for one that weights in `dtype` do not have."""
    if precision and precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}; one of {', '.join(PRECISIONS)} is expected")
    if precision and dtype and dtype not in PRECISIONS[precision]:
        raise InputError(
            f"precision {precision} has weights in {' or '.join(PRECISIONS[precision])}, and the dtype is {dtype}; "
            "leave one of them out"
        )


def even_part(batch_size: int, num_microbatches: int, name: str) -> int:
    """Returns the samples of a micro-batch. InputError if micro-batches would differ in size."""
    if batch_size % num_microbatches:
        counts = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        near = sorted(sorted(counts, key=lambda count: abs(count - num_microbatches))[:4])
        raise UnevenBatchError(
            f"{name}: a batch of {batch_size} has no {num_microbatches} equal micro-batches; "
            f"take {', '.join(map(str, near))}"
        )
    return batch_size // num_microbatches


def check_optimizer(optimizer: str) -> None:
    """Raises InputError for an optimizer that captures do not know."""
    name, comma, implementation = optimizer.partition(",")
    if name not in OPTIMIZERS:
        raise InputError(f"optimizer is {optimizer!r}; one of {', '.join(OPTIMIZERS)} is expected")
    if comma and (implementation not in IMPLEMENTATIONS or name in OPTIMIZERS[4:]):
        ways = f"{', '.join(IMPLEMENTATIONS)} of {', '.join(OPTIMIZERS[:4])}"
        raise InputError(f"optimizer is {optimizer!r}; behind the comma, one of {ways} is expected")
