"""`vllm`, `sglang`, `tensorrt-llm`: decoder layers by pipeline rank, and ranks in groups, as servers take them.

`VLLM_PP_LAYER_PARTITION` gives the number of layers of each rank (vllm/distributed/utils.py, get_pp_indices), and so do
SGLang's variable (sglang/srt/distributed/utils.py) and the `pp_partition` of TensorRT-LLM (LlmArgs). The embedding is
on the first rank, the last norm and the head are on the last. The ranks of a group follow each other. Experts lie whole
on each rank, beside parts of attention or requests of its own (docs.vllm.ai, expert parallel deployment).
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import I64, Bool, unique
from gdp.errors import InputError
from gdp.export.export_target import ExportTarget, ExportUnits, cards_of, check_inference, gpus, visible_cards
from gdp.export.module_chains import find_layers
from gdp.models.shards import WHOLE, Shards
from gdp.models.source import ModelSource
from gdp.simulator.problem import Problem

CACHE_BYTES = None, 1, 2
"""Of an element in a cache, that servers keep; None: those of the model's dtype."""
_RESERVE = 0.08  # vLLM's gpu_memory_utilization is 0.92 by default (vllm/config/cache.py; 0.9 in earlier versions)


@dataclass(frozen=True)
class Server:
    """A tool that serves decoders, and its words."""

    name: str
    command: str
    tensor: str  # the option for the ranks of a group
    stages: str
    variable: str  # with the layers of each rank
    memory: str = ""  # the option for the share of memory; "": the tool chooses
    port: int = 8000  # of the first server, by default
    is_yaml: bool = False  # options are in a file
    note: str = ""
    experts: tuple[str, ...] = ()  # options for whole experts on each of N ranks,
    samples: tuple[str, ...] = ()  # and where these have requests of their own, in place of the one for a group
    by_samples: bool = False  # ranks with requests of their own have stages of their own (vLLM, get_device_indices)
    length: str = ""  # the option for the tokens of a sequence
    small_cache: str = ""  # that for a cache of a byte an element
    model: tuple[str, ...] = ()  # options of the planned sizes
    shards: Shards = WHOLE  # of the plan

    def read_units(self, problem: Problem) -> ExportUnits:
        """Makes a unit of each decoder layer; ops before them go with the first, ops after them with the last. The
        layers of each replica follow those of the one before. InputError for a training step."""
        check_inference(problem, self.name)
        layers, replicas = find_layers(problem), problem.graph.replicas
        count = len(layers.names)
        positions = np.clip(layers.positions - 1, 0, count - 1) + count * replicas
        names = layers.names * (int(replicas.max()) + 1)
        return ExportUnits.chain(problem, positions, names, devices=gpus(problem, self.name))

    def write(self, problem: Problem, units: ExportUnits, devices: I64) -> str:
        """Writes `VLLM_PP_LAYER_PARTITION=10,11,11` and the GPUs in the order of ranks; of replicas a command each."""
        used = unique(devices)
        share = self._share(problem, used)
        num_cards = problem.cluster.devices[used[0]].num_cards
        servers, parts = self._servers(problem, units, devices), []
        for number, ranks in enumerate(servers):
            sizes = [sum(len(units.members[unit]) for unit in np.flatnonzero(own)) for own in ranks.values()]
            visible = f"CUDA_VISIBLE_DEVICES={self._visible(problem, list(ranks))}"
            group = [*self._group(num_cards), *self.model]
            hosts = {cards_of(problem)[device][0][0] for device in ranks}
            if len(hosts) > 1:
                raise InputError(
                    f"{self.name}: a server is on {len(hosts)} hosts, and its file starts one; place on one"
                )
            if self.is_yaml:
                lines = [*group, f"{self.stages}: {len(sizes)}", f"{self.variable}: {sizes}"]
                return "\n".join((f"# {visible} {self.command} {self.file_name}", *lines, ""))
            limit = [f"{self.memory} {share:.4g}"] if self.memory else []
            command = " ".join((self.command, *group, f"{self.stages} {len(sizes)}", *limit))
            partition = f"{self.variable}={','.join(map(str, sizes))}"
            if len(servers) == 1:
                return "\n".join((f"# {command}", partition, visible, ""))
            parts += [f"# on {host}:" for host in hosts if host]
            parts.append(f"{partition} {visible} {command} --port {self.port + number}")
        return "\n".join((f"# {len(servers)} servers", *parts, ""))

    def _visible(self, problem: Problem, ranks: Sequence[int]) -> str:
        """Returns the cards of pipeline ranks in the order in which the tool numbers them: stage by stage, or, where
        ranks of `by_samples` have requests of their own, the stages of each such rank."""
        cards = [visible_cards(problem, [device]).split(",") for device in ranks]
        if self.by_samples and self.shards.samples > 1:
            cards = [list(own) for own in zip(*cards, strict=True)]
        return ",".join(number for own in cards for number in own)

    def _share(self, problem: Problem, used: I64) -> float:
        """Returns the share of memory that the tool takes of each card. InputError where limits have several."""
        memory = [problem.cluster.devices[device].memory_bytes for device in used]
        shares = problem.memory_limit_bytes[used] / memory
        if self.memory and shares.max() > shares.min() + 0.01:
            remedy = f"place with --reserve {1 - shares.min():.0%}, without limits of single cards"
            raise InputError(f"{self.name}: takes the same share of the memory of all cards; {remedy}")
        return float(shares.max())

    def of_model(self, source: ModelSource) -> ExportTarget:
        """Returns the tool with the context and the cache that a step of `source` has, without the context where MODEL
        is elsewhere now. InputError for other caches."""
        element_bytes, options = source.reading.serving.cache_element_bytes, list[str]()
        if element_bytes is not None and element_bytes not in CACHE_BYTES:
            raise InputError(
                f"{self.name}: keeps 1 or 2 bytes of an element in its cache, and the plan {float(element_bytes):g}; "
                "place with --kv-cache fp8 or bf16, or export to llama-cpp"
            )
        with contextlib.suppress(InputError):
            if (served := source.served) is not None:
                options.append(self._worded(f"{self.length} {served.context}"))
        if element_bytes == 1:
            options.append(self._worded(self.small_cache))
        return replace(self, model=tuple(options)).target

    def _worded(self, option: str) -> str:
        return option.replace(" ", ": ", 1) if self.is_yaml else option

    def _group(self, num_cards: int) -> list[str]:
        """Returns options for the ranks of a group."""
        texts = (*self.samples, *self.experts) if self.shards.samples > 1 else (f"{self.tensor} N",)
        if self.shards.expert == self.shards.tensor > 1:
            texts = (*texts, *self.experts)
        if num_cards == 1 and not self.is_yaml:
            return []
        return [re.sub(r"\bN\b", str(num_cards), text).replace(" ", ": " if self.is_yaml else " ", 1) for text in texts]

    def _servers(self, problem: Problem, units: ExportUnits, devices: I64) -> list[dict[int, Bool]]:
        """Returns each replica's units [U] by device, in the order of ranks. InputError where two share a device."""
        replica = problem.graph.replicas[units.first_op]
        servers = [
            {
                int(device): (replica == own) & (devices == device)
                for device in dict.fromkeys(devices[replica == own].tolist())
            }
            for own in range(int(replica.max()) + 1)
        ]
        if sum(map(len, servers)) > len(unique(devices)):
            raise InputError(
                f"{self.name}: replicas are servers, and two of them share a device; place with fewer --batches"
            )
        return servers

    def notes(self, problem: Problem, units: ExportUnits, devices: I64) -> list[str]:
        """Returns sentences on the servers of a plan of replicas, and on the tool."""
        servers = self._servers(problem, units, devices)
        names = [device.name for device in problem.cluster.devices]
        each = [", ".join(names[device] for device in ranks) for ranks in servers]
        notes = [f"{len(each)} servers, a line of the file each: on {'; on '.join(each)}."] if len(each) > 1 else []
        return [*notes, self.note] if self.note else notes

    @property
    def file_name(self) -> str:
        """The name of the file, beside the plan."""
        return f"{self.name}.{'yaml' if self.is_yaml else 'env'}"

    @property
    def target(self) -> ExportTarget:
        """The tool among those that plans are exported for."""
        return ExportTarget(
            self.name,
            "whole decoder layers by rank",
            self.file_name,
            self.read_units,
            self.write,
            reserve=_RESERVE,
            notes=self.notes,
            layers=_layers,
            takes_replicas=not self.is_yaml,
            takes_shards=True,
            with_experts=lambda shards: replace(self, shards=shards).target,
            with_model=self.of_model,
        )


def _layers(units: ExportUnits) -> range:
    return range(0 if units.problem.graph.replicas.any() else units.num_units)


VLLM = Server(
    "vllm",
    "vllm serve MODEL",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "VLLM_PP_LAYER_PARTITION",
    "--gpu-memory-utilization",
    experts=("--enable-expert-parallel",),
    length="--max-model-len",
    small_cache="--kv-cache-dtype fp8",
    samples=("--data-parallel-size N",),
    by_samples=True,
)
SGLANG = Server(
    "sglang",
    "python -m sglang.launch_server --model-path MODEL",
    "--tp-size",
    "--pp-size",
    "SGLANG_PP_LAYER_PARTITION",
    port=30000,
    note="SGLang chooses its share of memory (--mem-fraction-static).",
    experts=("--ep-size N",),
    length="--context-length",
    small_cache="--kv-cache-dtype fp8_e4m3",
    samples=("--tp-size N", "--dp-size N", "--enable-dp-attention"),
)
TENSORRT_LLM = Server(
    "tensorrt-llm",
    "trtllm-serve MODEL --extra_llm_api_options",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "pp_partition",
    is_yaml=True,
    note="TensorRT-LLM takes a share of the memory that weights leave for its cache (free_gpu_memory_fraction).",
    experts=("moe_expert_parallel_size N",),
    length="max_seq_len",
    small_cache="kv_cache_config {dtype: fp8}",
    samples=("tensor_parallel_size N", "enable_attention_dp true"),
)
TARGETS = tuple(server.target for server in (VLLM, SGLANG, TENSORRT_LLM))
