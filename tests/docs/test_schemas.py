"""The JSON Schemas of docs/schemas: up to date, and what gdp prints, writes and reads."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from torch import Tensor, nn

from gdp.cli import main
from gdp.cluster import Cluster
from problems import recurrent

DOCS = Path(__file__).parents[2] / "docs"
GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.append(str(DOCS))

import json_documents  # noqa: E402, beside the schemas that it writes

NAMES = [*json_documents.ANSWERS, *json_documents.FILES]
QUICK = ("--threads", "1", "--no-cache")


def net() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns a small model, which can be captured and run."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]), (torch.ones(4, 8),)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, list[Any]]]:
    """Yields what each command prints, in a directory with the files that it wrote."""
    before, directory = os.getcwd(), tmp_path_factory.mktemp("schemas")
    os.chdir(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield _answers(directory)
    os.chdir(before)


def _answers(directory: Path) -> dict[str, list[Any]]:
    model, two, cards = "test_schemas:net", "2xcpu-16core", "2xp100-pcie-16g"
    recurrent().save("graph.json")
    Cluster.parse(cards).save("cluster.json")
    Path("prices.json").write_text(json.dumps({"p100-pcie-16g": {"dollars_per_hour": 0.7, "watts": 250}}))
    timed = {"match": ".", "time": {"p100-pcie-16g": "95us"}}
    Path("costs.json").write_text(json.dumps({"format": "gdp-op-costs", "version": 1, "ops": [timed]}))
    Path("runs.csv").write_text("model,ms,devices\ngraph.json,3,l4-24g\n")
    place = ("place", "--budget", "20sims", *QUICK)
    few = (*place, "--no-advice")
    names = recurrent().op_names
    Path("placement.json").write_text(json.dumps(dict.fromkeys(names, "gpu0")))
    served = ("hf:hf?batch=2&context=16", "--phase", "decode", "--inference")
    Path("hf").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30, "max_position_embeddings": 64}
    Path("hf/config.json").write_text(json.dumps(config | sizes))
    commands = {
        "place": (
            (*place, "graph.json", "--devices", "cluster.json", "--robust", "2%", "--out", "plan"),
            (*few, "graph.json", "--devices", cards, "--op-costs", "costs.json", "--out", "timed"),
            (*place, model, "--devices", cards, "--parallel", "data=2,microbatches=2", "--out", "layout"),
            (*few, model, "--devices", "2xl4-24g", "--parallel", "tensor=2", "--out", "group"),
            (*few, model, "--devices", cards, "--inference", "--batches", "2", "--out", "batches"),
            (
                *(*few, f"{served[0]}&prompt=8", *served[1:], "--devices", cards),
                *("--batches", "2", "--requests", "1", "--out", "requests"),
            ),
            (*few, *served, "--devices", cards),  # plan.json, without its graph
            (*few, "graph.json", "--devices", cards, "--max-memory", "gpu0=1KiB", "--max-memory", "gpu1=1KiB"),
            (*few, model, "--devices", two, "--placer", "single", "--out", "run"),
        ),
        "place-sweep": (
            (*few, "graph.json", "--devices", cards, "--sweep", "devices=1..2", "--prices", "prices.json"),
            (*few, *served, "--devices", cards, "--sweep", "devices=1..2"),
            (*few, model, "--devices", cards, "--sweep", "batch=4,8"),
        ),
        "compare": (
            (
                "compare",
                "graph.json",
                "--devices",
                cards,
                "--placers",
                "single,metis",
                "--seeds",
                "1",
                "--budget",
                "9sims",
            ),
            ("compare", model, "--devices", cards, "--placers", "ddp,single", "--seeds", "1", "--budget", "9sims"),
        ),
        "simulate": (
            ("simulate", "plan/plan.json"),
            ("simulate", "plan.json"),
            ("simulate", "batches/plan.json"),
            ("simulate", "group/plan.json"),
            ("simulate", "graph.json", "--devices", cards, "--placement", "placement.json"),
        ),
        "run": (("run", "run/plan.json", "--on", "cpu,cpu", "--steps", "1", "--devices", two, "--times", "times.db"),),
        "tune": (
            (
                *("tune", model, "--measure", 'echo {\\"step_time_ms\\": 1.5}', "--devices", two, "--search", "20sims"),
                *("--threads", "1", "--steps", "3", "--out", "tuned"),
            ),
        ),
        "report": (("report", "plan/plan.json", "--out", "r.html"),),
        "export": (
            ("export", "layout/plan.json", "--to", "torch-fsdp", "--out", "fsdp"),
            ("export", "plan.json", "--to", "hf-device-map", "--out", "map.json"),
        ),
        "costs": (("costs", "test_schemas:net", "--devices", "l4-24g"),),
        "capture": (("capture", model, "--out", "captured.json"),),
        "train": (
            ("train", "graph.json", "--devices", cards, "--out", "p.safetensors", "--updates", "1", "--samples", "2"),
        ),
        "workloads": (("workloads",),),
        "devices-detect": (("devices", "detect", "--out", "local.yaml"),),
        "devices-measure": (("devices", "measure", "--quick", "--devices", "cpu0", "--out", "measured.json"),),
        "devices-fit": (("devices", "fit", "--runs", "runs.csv", "--out", "mine.yaml"),),
        "cluster": (("devices", "show", "2x(2xp100-pcie-16g)@100gbit"),),
    }
    return {name: [_printed(directory, *words) for words in listed] for name, listed in commands.items()}


def _printed(directory: Path, *words: str) -> Any:
    out = directory / "printed"
    with out.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.syspath_prepend(str(Path(__file__).parent))
        status = main([*words, "--json"])
    assert status in (0, 3), " ".join(words)
    return json.loads(out.read_text())


def closed(schema: Any) -> Any:
    """Returns the schema without other keys than those that it lists."""
    schema = deepcopy(schema)
    for part in [schema, *schema.get("$defs", {}).values()]:
        if "properties" in part:
            part["additionalProperties"] = False
    return schema


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_up_to_date(name: str) -> None:
    """Each file is what the types give, and valid itself; `make schemas` writes them anew."""
    assert (DOCS / "schemas" / f"{name}.json").read_text() == json_documents.text(name)
    Draft202012Validator.check_schema(json_documents.schema(name))


@pytest.mark.parametrize("name", json_documents.ANSWERS)
def test_answers_are_as_their_schemas_say(answers: Mapping[str, list[Any]], name: str) -> None:
    """Every key that a command prints is listed, and every key that it prints always is there."""
    validator = Draft202012Validator(closed(json_documents.schema(name)))
    for answer in answers[name]:
        validator.validate(answer)


def test_every_key_of_an_answer_is_printed_by_some_command(answers: Mapping[str, list[Any]]) -> None:
    """No schema lists a key that commands print no longer, but for those of GPUs."""
    for name in json_documents.ANSWERS:
        known = set(json_documents.schema(name)["properties"])
        assert known == set().union(*answers[name]), name


def test_files_are_as_their_schemas_say(answers: Mapping[str, list[Any]]) -> None:
    """Written files are valid, and so are those of other versions that gdp reads."""
    files = {
        "graph": ["graph.json", "captured.json", *GOLDEN.glob("graph*.json")],
        "cluster": ["cluster.json", "measured.json", *GOLDEN.glob("cluster*.json")],
        "plan": ["plan/plan.json", "layout/plan.json", "batches/plan.json", "plan.json", *GOLDEN.glob("plan*.json")],
        "op-costs": ["costs.json", *GOLDEN.glob("op-costs*.json")],
        "prices": ["prices.json"],
        "tune-log": ["tune-log.json"],
        "placement": ["placement.json"],
    }
    Path("tune-log.json").write_text(Path("tuned/log.jsonl").read_text().partition("\n")[0])
    for name, paths in files.items():
        for path in paths:
            Draft202012Validator(json_documents.schema(name)).validate(json.loads(Path(path).read_text()))
    Draft202012Validator(json_documents.schema("cluster")).validate(answers["cluster"][0])
