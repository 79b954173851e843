"""LoRA: `--lora rank=16,weights=nf4`, small trained matrices beside frozen linear layers.

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685; T. Dettmers et al., "QLoRA:
Efficient Finetuning of Quantized LLMs", arXiv 2305.14314.
"""

import re
from dataclasses import dataclass

from gdp.errors import InputError, suggest

NF4 = "nf4"
_WEIGHTS = ("bf16", NF4)
_KEYS = ("rank", "weights", "alpha", "targets")
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

    @property
    def is_quantised(self) -> bool:
        """True for QLoRA."""
        return self.weights == NF4

    def __str__(self) -> str:
        """Returns the adapters as `--lora` has them, without defaults."""
        options = {"weights": NF4 if self.is_quantised else "", "targets": self.targets}
        options["alpha"] = f"{self.alpha:g}" if self.alpha != _ALPHA else ""
        return ",".join([f"rank={self.rank}", *(f"{key}={value}" for key, value in options.items() if value)])
