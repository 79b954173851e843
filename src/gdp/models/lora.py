"""LoRA: `--lora rank=16,weights=nf4`, small trained matrices beside frozen linear layers. E. Hu et al., "LoRA: Low-Rank
Adaptation of Large Language Models", arXiv 2106.09685; T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized
LLMs", arXiv 2305.14314."""

import re
from dataclasses import dataclass

import numpy as np

from gdp.errors import InputError, suggest
from gdp.graph import Graph
from gdp.graph.accumulation import ELEMENT_BYTES
from gdp.graph.held_memory import HeldMemory
from gdp.graph.shapes import parsed_calls

NF4 = "nf4"
_WEIGHTS = ("bf16", NF4)
_KEYS = ("rank", "weights", "alpha", "targets")
_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # of a weight: 8 bits for 64 weights, and 4 bytes for 256 of those
_PRODUCTS = ("aten.mm", "aten.addmm")
_MOST_RANK = 2**16
_ALPHA = 8.0  # of peft 0.17, LoraConfig.lora_alpha


@dataclass(frozen=True, slots=True)
class Lora:
    """Adds adapters of `rank` to linear layers and freezes all else."""

    rank: int
    weights: str = _WEIGHTS[0]  # of the frozen linear layers: the model's half type, or NF4 with double quantisation
    alpha: float = _ALPHA  # adapters are scaled by alpha / rank
    targets: str = ""  # a regular expression for paths of linear layers; "": those of layers that a model repeats

    @classmethod
    def parse(cls, text: "str | Lora") -> "Lora | None":
        """Reads `rank=16,weights=nf4,alpha=16,targets=q_proj|v_proj`; None for "". InputError, with the remedy."""
        if isinstance(text, Lora) or not text:
            return text or None
        if not isinstance(text, str):
            raise InputError(f"lora is {text!r}; text such as 'rank=16,weights=nf4' is expected")
        values: dict[str, str] = {}
        for part in re.split(r",(?=\w+=)", text):
            key, _, value = part.strip().partition("=")
            if not value:
                raise InputError(f"--lora: {part!r} is no KEY=VALUE; rank=16[,weights=nf4] is expected")
            if key not in _KEYS or key in values:
                reason = "is given twice" if key in values else f"is unknown; {suggest(key, _KEYS)}"
                raise InputError(f"--lora: {key!r} {reason}; known: {', '.join(_KEYS)}")
            values[key] = value
        rank, weights, alpha = values.get("rank", ""), values.get("weights", _WEIGHTS[0]), values.get("alpha", "")
        if not re.fullmatch("[0-9]{1,6}", rank) or not 1 <= int(rank) <= _MOST_RANK:
            raise InputError(f"--lora: rank is {rank or 'missing'}; 1 to {_MOST_RANK:,} is expected, such as rank=16")
        if weights not in _WEIGHTS:
            raise InputError(f"--lora: weights is {weights!r}; {' or '.join(_WEIGHTS)} is expected")
        if alpha and not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", alpha):
            raise InputError(f"--lora: alpha is {alpha!r}; a number is expected, such as alpha=16")
        try:
            re.compile(values.get("targets", ""))
        except re.error as error:
            raise InputError(f"--lora: targets is no regular expression ({error}); mend it") from None
        return cls(int(rank), weights, float(alpha or _ALPHA), values.get("targets", ""))

    def held_bytes(self, graph: Graph) -> int:
        """Returns about what the training step `graph` holds with these adapters, in place of all that it trains.
        Linear weights are those that products read as they are. Frozen ones take 2 bytes, and a parameter of an adapter
        14 with Adam in mixed precision."""
        parameters, _, others = HeldMemory.by_op(graph)
        count = {
            op: int(parameters[op]) // ELEMENT_BYTES.get(graph.dtypes[op], 2)
            for op in np.flatnonzero(parameters).tolist()
        }
        sizes: dict[int, tuple[int, ...]] = {}  # of the matrix that each parameter is
        for tensor, op in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
            maker = int(graph.producers[tensor])
            for call in parsed_calls(graph.shapes[op]) if maker in count and graph.kinds[op] in _PRODUCTS else ():
                matrices = [array.size for array in call.arrays if len(array.size) == 2]
                sizes |= {maker: size for size in matrices if size[0] * size[1] == count[maker]}  # noqa: B035
        repeated = {op for op in sizes if re.search(r"(^|\.)\d+\.", graph.modules[op])} or set(sizes)
        linear = {op: sizes[op] for op in repeated if re.search(self.targets, graph.modules[op])}
        saved = sum(count[op] * (2 - _NF4_BYTES) for op in linear) if self.is_quantised else 0
        adapters = 14 * self.rank * sum(map(sum, linear.values()))
        return int(2 * sum(count.values()) + others.sum() - saved + adapters)

    @property
    def is_quantised(self) -> bool:
        """True for QLoRA."""
        return self.weights == NF4

    def __str__(self) -> str:
        """Returns the adapters as `--lora` has them, without defaults."""
        options = {"weights": NF4 if self.is_quantised else "", "targets": self.targets}
        options["alpha"] = f"{self.alpha:g}" if self.alpha != _ALPHA else ""
        return ",".join([f"rank={self.rank}", *(f"{key}={value}" for key, value in options.items() if value)])
