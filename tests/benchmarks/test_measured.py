"""Predictions against what others measured: figures that changes must not make worse, a user's file, and statistics."""

import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measured import MeasuredBenchmark, predicted
from benchmarks.measured_sources.exchanges import ExchangeTable
from benchmarks.measured_sources.gpt import VTRAIN, GPTSteps, GPTTensorSteps, read_steps
from benchmarks.measured_sources.image_models import ImageInference, ImageTraining
from benchmarks.measured_sources.mpt import MPTSteps, capture
from benchmarks.measured_sources.op_tables import AttentionTable, ProductTable
from benchmarks.measured_sources.own_card import H200Steps
from benchmarks.measured_sources.ranges import CORE_CELLS, coverage, table_of, text_of
from benchmarks.measured_sources.source import (
    SET_ROWS,
    CapturedGraphs,
    MeasuredRow,
    MeasuredSource,
    PredictedRow,
    read_table,
)
from benchmarks.measured_sources.statistics import figures, speed_ups
from benchmarks.rows import Rows
from benchmarks.torchvision_stand_in import torchvision_stand_in
from gdp.costs.ranges import StepKind, range_on
from gdp.errors import InputError

POINT = 0.01


def _samples_of_ranks(row: MeasuredRow) -> int:
    return int(row.case.micro_batch * row.case.tensor_parallel)


RECORDED = {  # error of the fixed part in percent: median, 90th percentile; a failing test says what to write here
    "products": (7.0, 22.3),
    "attention": (10.9, 42.7),
    "exchanges": (4.7, 24.6),
    "gpt": (0.5, 1.1),
    "gpt-tensor": (12.3, 14.8),
    "mpt": (0.7, 1.0),
    "timm-training": (1.8, 2.4),
    "timm-inference": (5.4, 15.0),
    "h200": (11.2, 30.1),
}
FIXED_ROWS: dict[str, tuple[MeasuredSource, Callable[[int, MeasuredRow], bool]]] = {  # few captures, of small models
    "products": (ProductTable(), lambda number, _: number % 25 == 0),
    "attention": (AttentionTable(), lambda number, _: number % 25 == 0),
    "exchanges": (ExchangeTable(), lambda number, _: number % 8 == 0),
    "gpt": (GPTSteps(), lambda _, row: (row.case.gpus, row.case.micro_batch, row.case.layers) == (2, 2, 12)),
    "gpt-tensor": (GPTTensorSteps(), lambda _, row: row.case.layers == 12 and _samples_of_ranks(row) == 16),
    "mpt": (MPTSteps(), lambda _, row: row.key.startswith("125m-2048")),
    "timm-training": (ImageTraining(), lambda _, row: row.case.model in ("resnet18", "mobilenetv2_100")),
    "timm-inference": (ImageInference(), lambda _, row: row.case.model in ("resnet18", "vit_tiny_patch16_224")),
    "h200": (H200Steps(), lambda _, row: row.case.phase == "infer" and row.case.model in ("hf:gpt2", "timm:resnet50")),
}


@pytest.mark.parametrize("name", RECORDED)
def test_predictions_stay_as_good(name: str, tmp_path: Path) -> None:
    """Errors on a fixed part of each source are those recorded, within a point."""
    if name.startswith("timm"):
        with torchvision_stand_in():
            pytest.importorskip("timm")
    source, is_fixed = FIXED_ROWS[name]
    rows = [row for number, row in enumerate(source.rows()) if is_fixed(number, row)]
    predictions, left_out = predicted(source, rows, CapturedGraphs(Rows(tmp_path, keep=False)))
    assert predictions
    assert not left_out
    of = figures(predictions)
    errors = of["median_error"], of["ninetieth_error"]
    now = ", ".join(f"{100 * error:.1f}" for error in errors)
    assert errors == pytest.approx([percent / 100 for percent in RECORDED[name]], abs=POINT), (
        f'predictions have changed; if that is meant, and no source is worse: "{name}": ({now}),'
    )


def test_set_rows_are_few_and_there() -> None:
    """Costs may be fitted to 25 models of timm, on one card, and to 24 steps of GPT; all of them are rows."""
    keys: dict[str, set[str]] = {}
    for line in read_table(SET_ROWS, ("source", "key")):
        keys.setdefault(line["source"], set()).add(line["key"])
    training, inference, gpt = (
        {row.key: row for row in source.rows()} for source in (ImageTraining(), ImageInference(), GPTSteps())
    )
    assert set(keys) == {"timm-training", "timm-inference", "gpt"}
    images = [training[key] for key in keys["timm-training"]] + [inference[key] for key in keys["timm-inference"]]
    assert len({row.case.model for row in images}) == 25
    assert {row.card for row in images} == {"rtx3090-24g"}
    assert len(keys["gpt"] & gpt.keys()) == len(keys["gpt"]) == 24


def test_samples_of_files_have_models_in_common() -> None:
    """The same models are drawn from all files, as far as these have them, and always the same."""
    rows = ImageInference(20).rows()
    assert len(rows) == 5 * 20
    assert len({row.case.model for row in rows}) < 60
    assert {row.key for row in rows} <= {row.key for row in ImageInference(21).rows()}


def test_statistics_of_a_group() -> None:
    """Three rows are predicted at 0.5, 1 and 1.5 of 10, 30 and 20 ms: 5, 30 and 30 ms.

    Errors 50, 0, 50 %. Ranks 1, 2.5, 2.5 and 1, 3, 2 have a correlation of 0.866. The first is chosen, the fastest.
    """
    predictions = [
        PredictedRow(MeasuredRow(str(ms), ms, "l4-24g", None, ranked_with="a", chosen_from="b"), predicted_ms, "op")
        for ms, predicted_ms in ((10, 5), (30, 30), (20, 30))
    ]
    of = figures(predictions)
    assert (of["median_error"], of["median_ratio"], of["mean_regret"]) == (0.5, 1, 0)
    assert of["rank_correlation"] == pytest.approx(0.866, abs=0.001)
    of = figures(predictions[1:])  # the first of two that are predicted alike takes 30 ms, the other 20
    assert (of["mean_regret"], of["rank_correlation"]) == (0.5, None)


def test_mpt_has_its_parameters() -> None:
    """MPT of 125 million parameters is as large as llm-foundry says, with 2,048 tokens of a sample."""
    step = next(row.case for row in MPTSteps().rows() if row.case.model == "125m" and row.case.sequence == 2048)
    graph = capture(step, 1)
    weights = [kind == "parameter" for kind in graph.kinds]
    assert graph.resident_bytes[weights].sum() == 14 * 125_311_488  # halves, float32 masters and two moments


def test_a_file_of_your_own(tmp_path: Path) -> None:
    """Rows of a user's file are predicted alone, of any degree of tensor parallelism; kept graphs are read."""
    header = VTRAIN.read_text().splitlines()[0]
    own = tmp_path / "own.csv"
    own.write_text(f"{header}\n2,4,1,64,2,2,16,1,2,1,3.5\n2,4,1,64,2,2,16,1,1,2,4.5\n2,4,1,64,2,2,16,2,1,1,5.5\n")
    document = MeasuredBenchmark(runs=own, card="l4-24g").run(out=tmp_path / "out")
    (table,) = document["tables"]
    assert table["source"] == "runs"
    assert [each["measured_ms"] for each in table["predictions"]] == [3.5, 4.5, 5.5]
    assert [each["kind"] for each in table["predictions"]][1:] == ["micro-batch of 1", "tensor=2, micro-batch of 1"]
    assert table["parts"].keys() == {"judged"}
    assert list((tmp_path / "out" / "rows" / "graphs").iterdir())
    again = MeasuredBenchmark(runs=own, card="l4-24g").run(rows=tmp_path / "out" / "rows")
    assert again["tables"] == document["tables"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2,4,1,64,2,2,16,1,2,1", "line 2: whole numbers and a time in ms"),
        ("2,4,1,64,2,2,16,1,2,1,0", "line 2: has a number that is not above 0"),
        ("2,4,1,64,2,2,16,1,1,1,3", "line 2: gpus is 2, not the product"),
        ("2,3,1,64,2,2,16,1,2,1,3", "line 2: the batch has no equal micro-batches"),
    ],
)
def test_errors_of_a_file(line: str, message: str, tmp_path: Path) -> None:
    """A line that is no measured step is named."""
    path = tmp_path / "own.csv"
    path.write_text(f"{VTRAIN.read_text().splitlines()[0]}\n{line}\n")
    with pytest.raises(InputError, match=message):
        read_steps(path)
    path.write_text("gpus\n2\n")
    with pytest.raises(InputError, match="no column global_batch"):
        read_steps(path)


def test_ranges_have_what_they_say() -> None:
    """Of models that ranges were not made from, 70 to 90 % of the rows are in their range; few rows have a wide one."""
    rows, random = [], np.random.default_rng(0)
    for number in range(400):  # steps take 1.1 times as long as predicted, with a deviation of 10 %
        is_rare = number % 100 == 0
        kind = StepKind(is_trained=not is_rare, runtime="eager", exchanges="cards", is_of_products=True, is_thin=False)
        row = MeasuredRow(str(number), 1.1 * random.lognormal(0, 0.1), "a100-sxm-80g", None, model=str(number // 4))
        rows.append(PredictedRow(row, 1.0, "step", step_kind=kind))
    of = coverage({"steps": rows}, table_of({"steps": rows}))["steps"]
    assert all(0.7 <= of[name] <= 0.9 for name in ("told", "other_models"))
    table = tomllib.loads(text_of(table_of({"steps": rows}), "python -m benchmarks measured"))
    rare, often, *on_cores = table["cells"]
    assert (rare["rows"], often["rows"]) == (4, 396)
    assert on_cores == tomllib.loads((files("gdp.costs") / "ranges.toml").read_text())["cells"][-len(CORE_CELLS) :]
    # the median is 1.1, and 80 % are within a factor of exp(1.28 * 0.1) = 1.14 of it; the prediction is in the range
    assert often["factors"] == pytest.approx([0.97, 1.25], abs=0.05)
    assert rare["factors"][0] < often["factors"][0]


def test_ranges_of_the_fixed_part(tmp_path: Path) -> None:
    """Most steps of GPT of the fixed part are in the range that gdp tells of them."""
    source, is_fixed = FIXED_ROWS["gpt"]
    rows = [row for number, row in enumerate(source.rows()) if is_fixed(number, row)]
    predictions, _ = predicted(source, rows, CapturedGraphs(Rows(tmp_path, keep=False)))
    ranges = [range_on(each.step_kind, [each.row.card]) for each in predictions if each.step_kind is not None]
    inside = [of.low <= 1 / each.ratio <= of.high for of, each in zip(ranges, predictions, strict=True)]
    assert sum(inside) >= 0.7 * len(inside)


def test_speed_ups_of_compiled_steps() -> None:
    """Rows of one model, compiled and not, are pairs; a row without the other one is left out."""
    times = {"a": (10, 5, 12, 5), "b": (10, 4, 10, 4), "c": (10, 8, 10, 8)}  # predicted eager, compiled, then measured
    rows = [
        PredictedRow(
            MeasuredRow(f"nchw-{runtime}-{model}", times[model][2 + place], "t4-16g", None, runtime), value, ""
        )
        for model in times
        for place, runtime in enumerate(("eager", "compile"))
        for value in [times[model][place]]
    ]
    found = speed_ups([*rows, PredictedRow(MeasuredRow("nchw-compile-d", 1, "t4-16g", None, "compile"), 1, "")])
    assert found == {"count": 3, "rank_correlation": pytest.approx(1.0), "median_error": 0.0}
    assert speed_ups(rows[:4]) is None
