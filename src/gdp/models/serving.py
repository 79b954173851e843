"""A step of serving a decoder: the prefill of a prompt, or the decoding of one token for each sequence."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

from gdp.errors import InputError, suggest

PHASES = ("step", "prefill", "decode")

# Blocks of llama.cpp hold 32 elements with their scales: ggml/src/ggml-common.h, `block_q8_0` and its kin
_TYPES_OF_BITS = {
    32: "float32 f32",
    16: "bfloat16 bf16 float16 f16",
    8: "fp8 fp8_e4m3 fp8_e5m2 int8",
    8.5: "q8_0",
    6: "q5_1",
    5.5: "q5_0",
    5: "q4_1",
    4.5: "q4_0 iq4_nl",
}  # of an element of a cache
ELEMENT_BYTES = {name: Fraction(bits) / 8 for bits, names in _TYPES_OF_BITS.items() for name in names.split()}

_MOST_BYTES = 8  # of an element: float64


@dataclass(frozen=True, slots=True)
class Serving:
    """Options for capturing a step of serving in place of a step of training or plain inference."""

    phase: str = "step"
    cache_element_bytes: Fraction | None = None  # of keys and values in the cache; None: the type of the model

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise InputError(f"--phase is {self.phase!r}; {', '.join(PHASES)} are known")
        if self.cache_element_bytes is not None and not self.has_cache:
            raise InputError("--kv-cache: only prefill and decode have a cache; add --phase prefill or --phase decode")

    @classmethod
    def parse(cls, phase: str, kv_cache: str | None) -> "Serving":
        """Reads `--phase` and `--kv-cache`: bytes of an element, or a type. InputError for anything else."""
        return cls(phase, None if kv_cache is None else _element_bytes(kv_cache))

    @property
    def has_cache(self) -> bool:
        """True for prefill and decode."""
        return self.phase != PHASES[0]


@dataclass(frozen=True, slots=True)
class ServedStep:
    """Facts of a captured step of serving that its time is told with."""

    phase: str  # prefill or decode
    num_sequences: int
    num_tokens: int  # that each sequence feeds: its prompt, or 1
    context: int  # tokens that the cache has room for, for each sequence
    cache_bytes: int  # of keys, values and states, of all sequences

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "ServedStep":
        """Reads the fields by name. Raises KeyError, TypeError or ValueError for anything else."""
        values = {field.name: document[field.name] for field in fields(cls)}
        if values["phase"] not in PHASES[1:]:
            raise ValueError(values["phase"])
        return cls(str(values.pop("phase")), **{name: int(value) for name, value in values.items()})

    def per_second(self, step_time_ns: int) -> float | None:
        """Returns the tokens that all sequences feed per second; None for a step that takes no time."""
        return self.num_sequences * self.num_tokens * 1e9 / step_time_ns if step_time_ns else None

    def rate_text(self, step_time_ns: int | None) -> str:
        """Returns tokens per second in words; `-` without a step time."""
        rate = None if step_time_ns is None else self.per_second(step_time_ns)
        return "-" if rate is None else _digits(rate)

    def figures(self, step_time_ns: int) -> dict[str, Any]:
        """Returns the facts with the time to the first token, or with tokens per second, for a step time."""
        is_decode, per_second = self.phase == "decode", self.per_second(step_time_ns)
        return asdict(self) | {
            "time_to_first_token_ns": None if is_decode else step_time_ns,
            "prompt_tokens_per_second": None if is_decode else per_second,
            "tokens_per_second": per_second if is_decode else None,
            "time_per_token_ns": step_time_ns if is_decode else None,
        }

    def in_flight(self, groups: int, time_ns: int, latency_ns: int, alone_ns: int | None = None) -> dict[str, Any]:
        """Returns the figures with so many such steps in flight, one done every `time_ns`; each has its own cache. A
        step takes `latency_ns` among the others, and `alone_ns` where there are none."""
        together, alone = (self.figures(ns) if ns else {} for ns in (time_ns, alone_ns))
        name = "time_per_token_ns" if self.phase == "decode" else "time_to_first_token_ns"
        one = {"one_group": {**alone, name: alone_ns}} if alone_ns else {}
        return together | {"groups": groups, "cache_bytes": groups * self.cache_bytes, name: latency_ns} | one

    def sentence_in_flight(self, groups: int, time_ns: int, latency_ns: int, alone_ns: int | None = None) -> str:
        """Returns the figures of `in_flight` in words."""
        what = "sequence" if self.phase == "decode" else "prompt"
        plural, every = "" if self.num_sequences == 1 else "s", "a token each" if self.phase == "decode" else "done"
        alone = ""
        if alone_ns:
            alone = f"; one group alone: {self.rate_text(alone_ns)} tokens per second, in {_digits(alone_ns / 1e6)} ms"
        return (
            f"{self.rate_text(time_ns)} tokens per second: {groups} groups of {self.num_sequences:,} {what}{plural} in "
            f"flight, {every} in {_digits(latency_ns / 1e6)} ms at a context of {self.context:,}{alone}; "
            f"caches {_digits(groups * self.cache_bytes / 1e9)} GB"
        )

    def sentence(self, step_time_ns: int) -> str:
        """Returns the answer in words."""
        plural = "" if self.num_sequences == 1 else "s"
        cache = f"cache {_digits(self.cache_bytes / 1e9)} GB"
        if self.phase == "decode":
            return (
                f"{self.rate_text(step_time_ns)} tokens per second: {self.num_sequences:,} sequence{plural}, "
                f"a token each in {_digits(step_time_ns / 1e6)} ms at a context of {self.context:,}; {cache}"
            )
        return (
            f"First token after {_digits(step_time_ns / 1e6)} ms: {self.num_sequences:,} prompt{plural} of "
            f"{self.num_tokens:,} tokens, {self.rate_text(step_time_ns)} tokens per second; {cache}"
        )


@dataclass(frozen=True, slots=True)
class Requests:
    """Arithmetic on requests: each is a prefill and then `generated` tokens, a step of all sequences for each token. A
    device does either a prefill or a step. Prompts come at random, wait for the step that runs and for those before
    them (M/D/1: a queue with one server and fixed times), and go before further steps."""

    first_token_ns: int  # of a prefill alone
    prefill_ns: int  # from one prefill to the next
    step_ns: int  # from one step of `num_sequences` to the next
    token_ns: int  # that a sequence waits for its next token
    num_sequences: int
    generated: int

    @property
    def most_per_second(self) -> float:
        """The rate at which no device has any time left."""
        return 1e9 / (self.prefill_ns + self.generated * self.step_ns / self.num_sequences)

    def at(self, per_second: float) -> tuple[float, float] | None:
        """Returns the mean ns to the first token and for each token at this rate; None beyond the largest."""
        if per_second >= self.most_per_second:
            return None
        busy = per_second * self.prefill_ns / 1e9  # share of the time
        waits_ns = self.step_ns / 2 + busy * self.prefill_ns / (2 - 2 * busy)
        return self.first_token_ns + waits_ns, self.token_ns / (1 - busy)

    def figures(self, per_second: float | None) -> dict[str, Any]:
        """Returns the figures by name, with those at a rate where one is asked for."""
        first_ns, token_ns = (self.at(per_second) if per_second else None) or (None, None)
        at_rate = {"per_second": per_second, "time_to_first_token_ns": first_ns, "time_per_token_ns": token_ns}
        return asdict(self) | {"most_per_second": self.most_per_second} | ({"at": at_rate} if per_second else {})

    def sentence(self, prompt: int, per_second: float | None) -> str:
        """Returns the largest rate in words, and the times at a rate where one is asked for."""
        rate = ""
        if per_second:
            rate = f" {per_second:g} per second are more than that."
            if (times := self.at(per_second)) is not None:
                first, token = (_digits(ns / 1e6) for ns in times)
                rate = f" At {per_second:g} per second the first token is there after {first} ms, others in {token} ms."
        return (
            f"By arithmetic, at most {_digits(self.most_per_second)} requests per second of {prompt:,} + "
            f"{self.generated:,} tokens: a prefill every {_digits(self.prefill_ns / 1e6)} ms, and {self.generated:,} "
            f"steps of {_digits(self.step_ns / 1e6)} ms for {self.num_sequences:,} sequences at once.{rate}"
        )


def serving_entry(served: ServedStep | None, step_time_ns: int | None) -> dict[str, Any]:
    """Returns the key `serving` of an answer in JSON: {} for no served step, None in it without a step time."""
    if served is None:
        return {}
    return {"serving": None if step_time_ns is None else served.figures(step_time_ns)}


def _digits(value: float) -> str:
    """Returns `value` with four significant digits, whole ones in full: `11,390`."""
    return f"{value:.4g}" if value < 1000 else f"{float(f'{value:.4g}'):,.0f}"


def _element_bytes(text: str) -> Fraction:
    if text.lower() in ELEMENT_BYTES:
        return ELEMENT_BYTES[text.lower()]
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
        value = Fraction(text)
        if 0 < value <= _MOST_BYTES:
            return value
        raise InputError(f"--kv-cache is {text}; more than 0 and at most {_MOST_BYTES} bytes per element are expected")
    raise InputError(
        f"--kv-cache is {text!r}; bytes per element (2, 1, 0.5625) or a type are expected; "
        f"{suggest(text, tuple(ELEMENT_BYTES))}"
    )
