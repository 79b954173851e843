"""`gdp export` of layouts: PyTorch runs its module, Megatron-LM and torchtitan read their options."""

import ast
import json
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_models import MODELS, graph_of
from layout_training import train

import gdp
from execute.rank_processes import start_ranks, statuses_of
from gdp.cli import main
from gdp.errors import InputError
from gdp.export.export_target import visible_cards
from gdp.export.layouts import megatron_lm, torch_fsdp, torchtitan
from gdp.export.layouts.precision import Held
from gdp.export.layouts.target import CutStep, cut_step
from gdp.export.module_chains import find_layers
from gdp.export.targets_by_name import LAYOUT_TARGETS
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.search.question import plan_of
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

Run = Callable[..., tuple[int, str, str]]
SAMPLES = 3  # of a micro-batch
PIPELINE = "data=2,stages=2,microbatches=4,zero=1,recompute=blocks"


def planned(
    layout: str, devices: str = "4xp100-pcie-16g", *, model: str = "llama", cuts: tuple[int, ...] = ()
) -> tuple[Problem, Plan]:
    """A plan of a layout whose replicas are on neighbouring devices; `cuts` are layers that begin stages."""
    graph, cluster = graph_of(model, True), gdp.Cluster.parse(devices)
    places = None
    if cuts:
        layers = find_layers(Problem.build(graph, cluster)).positions - 1
        places = np.searchsorted(cuts, layers, side="right")
    step = Step.of(graph, Layout.parse(layout), places=places)
    problem, size = Problem.build(step.graph, cluster), len(cuts) + 1
    on = np.arange(step.layout.data * size).reshape(-1, size)
    placement = step.placement(np.zeros(graph.num_ops, np.int64) if places is None else places, on)
    plan = plan_of(simulate(problem, placement), 0, "by hand", 0)
    return problem, replace(plan, layout=step.document() | {"batch": SAMPLES * step.layout.num_parts})


def cut(layout: str, *, cuts: tuple[int, ...] = (), devices: str = "4xp100-pcie-16g") -> CutStep:
    """The step of `planned` for tools with pipelines."""
    problem, plan = planned(layout, devices, cuts=cuts)
    return cut_step(problem, plan, "megatron", has_stages=True, held_by=torchtitan.held_by)


def test_fsdp_trains_as_one_device(tmp_path: Path) -> None:
    """PyTorch trains with the written module as on one device."""
    layouts = [
        "data=2",
        "data=2,microbatches=3:1,recompute=layers.1:layers.2",
        "data=2,microbatches=2,zero=1",
        "data=2,microbatches=2,zero=2,recompute=blocks",
        "data=2,microbatches=2,zero=3,recompute=blocks",
        "data=2,recompute=selective",
    ]
    layouts += ["data=2,microbatches=2", "data=2,microbatches=2,zero=2", "data=2,microbatches=2,zero=3"]
    names = [f"tied_{number}" for number in range(len(layouts))]
    for name, layout in zip(names, layouts, strict=True):
        problem, plan = planned(layout, "2xp100-pcie-16g", model="tied")
        step = cut_step(problem, plan, torch_fsdp.NAME, has_stages=False)
        assert step.simulation.step_time_ns == plan.step_time_ns
        if name in names[-3:]:  # in mixed precision
            step = replace(step, held=Held(options=("bfloat16",)))
        tmp_path.joinpath(f"{name}.py").write_text(torch_fsdp.write(step))
    assert statuses_of(start_ranks(train, tmp_path, 2, *names), patience_seconds=240) == [0, 0]
    assert (tmp_path / "equal.txt").read_text().split() == names


@pytest.mark.filterwarnings("ignore::UserWarning:megatron", "ignore::DeprecationWarning")
def test_options_of_megatron_core() -> None:
    """Megatron-Core reads the options as the layout that was meant."""
    step = cut(PIPELINE, cuts=(3,))
    options = dict(option.partition(" ")[::2] for option in megatron_lm.options(step))
    assert options["--pipeline-model-parallel-layout"] == "'Et*3|tL'"
    # replica 0 is on GPUs 0 and 1, replica 1 on 2 and 3; ranks are numbered stage by stage
    assert "export CUDA_VISIBLE_DEVICES=0,2,1,3\n" in megatron_lm.write(step)
    calculator = pytest.importorskip("megatron.core.num_microbatches_calculator")
    sizes = int(options["--global-batch-size"]), int(options["--micro-batch-size"])
    assert sizes[1] == SAMPLES
    assert calculator.ConstantNumMicroBatchesCalculator(*sizes, 2, False, 0).get() == 4
    state = pytest.importorskip("megatron.core.parallel_state")
    ranks = state.RankGenerator(tp=1, ep=1, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    assert [[[0, 2, 1, 3][rank] for rank in group] for group in ranks.get_ranks("pp")] == [[0, 1], [2, 3]]
    transformer = pytest.importorskip("megatron.core.transformer")
    config = transformer.TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        pipeline_dtype=np.float32,
        pipeline_model_parallel_size=int(options["--pipeline-model-parallel-size"]),
        pipeline_model_parallel_layout=options["--pipeline-model-parallel-layout"].strip("'"),
        recompute_granularity=options["--recompute-granularity"],
        recompute_method=options["--recompute-method"],
        recompute_num_layers=int(options["--recompute-num-layers"]),
    )
    assert [len(rank[0]) for rank in config.pipeline_model_parallel_layout.layout] == [4, 2]


@pytest.mark.parametrize(("zero", "strategy"), [(2, "optim_grads"), (3, "optim_grads_params")])
def test_strategies_of_megatron_fsdp(zero: int, strategy: str) -> None:
    """Megatron-FSDP has the strategy of the stage of ZeRO."""
    options = megatron_lm.options(cut(f"data=4,zero={zero}"))
    assert f"--data-parallel-sharding-strategy {strategy}" in options
    assert {"--use-megatron-fsdp", "--use-distributed-optimizer"} < set(options)
    with pytest.raises(InputError, match="Megatron-FSDP has no pipelines; place with zero=1"):
        megatron_lm.options(cut(f"data=2,stages=2,microbatches=4,zero={zero}", cuts=(2,)))


def test_other_optimizers_are_told() -> None:
    """The captured optimizer is Adam: tools need no note; of SGD without momentum there is no state."""
    step = cut("data=4")
    assert not any("optimizer" in note for note in torchtitan.TARGET.notes(step))
    model, args = MODELS["llama"]()
    graph = gdp.capture(model, args, optimizer="sgd").graph
    step = replace(step, problem=Problem.build(graph, step.problem.cluster))
    assert "The plan's optimizer has 0 bytes of state" in " ".join(torchtitan.TARGET.notes(step))


@pytest.mark.parametrize("layout", [PIPELINE, "data=4,microbatches=2,zero=3", "data=4", "data=4,recompute=selective"])
def test_options_of_torchtitan(layout: str) -> None:
    """torchtitan parses the options as the layout that was meant."""
    step = cut(layout, cuts=(3,) if "stages" in layout else ())
    words = shlex.split(" ".join(torchtitan.options(step)))
    manager = pytest.importorskip("torchtitan.config.manager")
    config = manager.ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_8b", *words])
    parallel, training = config.parallelism, config.training
    degrees = parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree
    assert degrees == ((1, step.layout.data) if step.layout.zero else (step.layout.data, 1))
    assert training.global_batch_size == SAMPLES * step.layout.num_parts
    assert (training.dtype, training.mixed_precision_param) == ("float32", "float32")
    accumulated = training.global_batch_size // (training.local_batch_size * step.layout.data)
    if layout == PIPELINE:
        assert (accumulated, parallel.pipeline_parallel_degree, parallel.pipeline_parallel_schedule) == (1, 2, "1F1B")
        assert training.local_batch_size // parallel.pipeline_parallel_microbatch_size == 4
        first, last = ["tok_embeddings", "layers.0", "layers.1", "layers.2"], ["layers.3", "norm", "lm_head"]
        assert parallel.module_fqns_per_model_part == [first, last]
    else:
        assert (accumulated, training.local_batch_size) == (step.microbatches[0], SAMPLES)
    recomputes = {PIPELINE: "FullAC.Config", "data=4,recompute=selective": "SelectiveAC.Config"}
    name = type(config.activation_checkpoint).__qualname__
    assert recomputes.get(layout, name) == name
    assert name not in set(recomputes.values()) - {recomputes.get(layout)}


def test_ops_elsewhere_go_to_their_replica() -> None:
    """Replica 1 has a third of its ops on the device of replica 0."""
    problem, plan = planned("data=2", "2xp100-pcie-16g")
    placement = plan.placement.copy()
    rng = np.random.default_rng(0)
    groups = problem.graph.groups
    chosen = np.flatnonzero((placement == 1) & (groups < 0))
    moved = rng.choice(chosen, len(chosen) // 3, replace=False)
    placement[moved] = 0
    mixed = replace(plan_of(simulate(problem, placement), 0, "by hand", 0), layout=plan.layout)
    step = cut_step(problem, mixed, torch_fsdp.NAME, has_stages=False)
    assert np.array_equal(step.simulation.placement, plan.placement)
    assert step.num_moved == len(moved)
    assert any(note.startswith(f"{len(moved):,} ops") for note in torch_fsdp.notes(step))


def test_pipelines_are_alike_in_all_replicas() -> None:
    """A pipeline of free ops is cut into stages of layers, alike in all replicas."""
    problem, plan = planned("data=2,microbatches=4", cuts=(2,))
    placement = plan.placement.copy()
    rng = np.random.default_rng(0)
    groups = problem.graph.groups
    moved = np.isin(groups, rng.choice(groups.max(), groups.max() // 20, replace=False))
    placement[moved] ^= 1  # within its replica
    mixed = replace(plan_of(simulate(problem, placement), 0, "by hand", 0), layout=plan.layout)
    step = cut_step(problem, mixed, "megatron", has_stages=True)
    assert sorted(step.devices.ravel()) == [0, 1, 2, 3]
    assert [set(row) for row in step.devices.tolist()] == [{0, 1}, {2, 3}]
    assert [name for stage in step.stages for name in stage][1:-1] == [f"model.layers.{n}" for n in range(4)]
    assert not problem.broken_constraints(step.simulation.placement)


def test_ranks_of_two_hosts() -> None:
    """Ranks of two hosts are numbered host by host."""
    hosts = "2x(2xp100-pcie-16g)@10gbit"
    script = torchtitan.write(cut("data=4", devices=hosts))
    cases = "".join(f"  {host}) export CUDA_VISIBLE_DEVICES=0,1 ;;  # host{host}\n" for host in (0, 1))
    assert f'case "$NODE_RANK" in\n{cases}esac\n' in script
    assert "torchrun --nnodes 2 " in script
    problem, plan = planned("data=4", hosts)
    module = torch_fsdp.write(cut_step(problem, plan, torch_fsdp.NAME, has_stages=False))
    command = "torchrun --nnodes 2 --node-rank 1 --master-addr HOST0 --nproc-per-node 2 TRAIN.py  # on host1\n"
    assert f"    CUDA_VISIBLE_DEVICES=0,1 {command}" in module
    # stage by stage the ranks of a pipeline a host are in turns on hosts; Megatron-LM numbers them replica by replica
    step = cut("data=2,stages=2,microbatches=4", cuts=(2,), devices=hosts)
    assert megatron_lm.write(step).endswith("  --use-tp-pp-dp-mapping\n")
    with pytest.raises(InputError, match="numbers ranks host by host"):
        torchtitan.write(step)


@pytest.mark.parametrize(("name", "cards"), [("local", "7,4"), ("local:cuda-graphs", "7,4"), ("file.json", "0,1")])
def test_cards_of_this_machine(name: str, cards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards of `local` are those that the user lets gdp see, whatever the shell of the script has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,4")
    problem, plan = planned("data=2", "2xp100-pcie-16g")
    problem = replace(problem, cluster=replace(problem.cluster, name=name))
    step = cut_step(problem, plan, "tool", has_stages=True)
    assert f"export CUDA_VISIBLE_DEVICES={cards}\n" in torchtitan.write(step)
    assert f" CUDA_VISIBLE_DEVICES={cards} torchrun" in torch_fsdp.write(step)
    assert visible_cards(problem, [1, 0]) == cards[::-1]


@pytest.mark.parametrize(
    ("write", "layout", "cuts", "message"),
    [
        (megatron_lm.write, "data=2,microbatches=3:1", (), "place with --parallel data=2, or export to torch-fsdp"),
        (torchtitan.write, "data=2,microbatches=3:1", (), "place with --parallel data=2, or export to torch-fsdp"),
        (torchtitan.write, "data=2,stages=2", (2,), "1F1B takes as many micro-batches as stages; place with microb"),
        (torchtitan.write, "data=2,recompute=model.layers.0", (), "recomputes all layers or none"),
        (torchtitan.write, "data=2,recompute=model.embed_tokens", (), "recomputes whole layers, not model.embed"),
        (megatron_lm.write, "data=2,recompute=selective", (), "selectively recomputes attention alone; place with rec"),
        (megatron_lm.write, "data=2,recompute=model.layers.1", (), "recomputes as many first layers of each stage"),
    ],
)
def test_layouts_a_tool_lacks(
    write: Callable[[CutStep], str], layout: str, cuts: tuple[int, ...], message: str
) -> None:
    """A layout that a tool cannot express is refused."""
    with pytest.raises(InputError, match=message):
        write(cut(layout, cuts=cuts))


@pytest.mark.parametrize("zero", [0, 3])
def test_tied_weights_of_two_stages(zero: int) -> None:
    """torchtitan refuses a pipeline whose head is its embedding, also where replicas gather it."""
    problem, plan = planned(f"data=2,stages=2,microbatches=4,zero={zero}", model="tied", cuts=(2,))
    step = cut_step(problem, plan, torchtitan.NAME, has_stages=True)
    with pytest.raises(InputError, match="ties no weights of two stages; place with stages=1, or export to megatron"):
        torchtitan.write(step)


def test_names_run_no_code() -> None:
    """Names of graphs and modules run no code."""
    problem, plan = planned("data=2,recompute=layers.1", "2xp100-pcie-16g", model="tied")
    for name in ("x\nexit 3\n", 'x"""\nexit(3)\n"""', "$(exit 3)", "'`exit 3`"):
        graph = replace(problem.graph, name=name)
        step = cut_step(replace(problem, graph=graph), plan, "megatron", has_stages=False)
        compile(module := torch_fsdp.write(step), "parallel_step.py", "exec")
        assert "exit(3)" not in module
        assert ast.get_docstring(ast.parse(module)) is not None


def test_recomputed_blocks_of_megatron() -> None:
    """Megatron recomputes the first layers of each stage by its option for blocks."""
    step = cut("data=2,stages=2,microbatches=2,recompute=model.layers.0:model.layers.2", cuts=(2,))
    assert megatron_lm.options(step)[-3:] == [
        "--recompute-granularity full",
        "--recompute-method block",
        "--recompute-num-layers 1",
    ]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str, str]:
        status = main(args)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def save(problem: Problem, plan: Plan) -> None:
    problem.graph.save("graph.json.gz")
    problem.cluster.save("cluster.json")
    plan.save("plan.json")


def test_the_command(run: Run) -> None:
    """The command writes a script that starts the tool."""
    save(*planned("data=4,microbatches=2,zero=1"))
    status, out, _ = run("export", "plan.json", "--to", "megatron", "--json")
    document = json.loads(out)
    assert (status, document["loss"], document["moved_ops"]) == (0, 0.0, 0)
    assert Path("megatron.sh").read_text() == document["content"]
    Path("torchrun").write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $@"\n')
    Path("torchrun").chmod(0o755)
    path = f"{Path.cwd()}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "megatron.sh", "pretrain_gpt.py", "--bf16"],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("0,1,2,3 --standalone --nproc-per-node 4 pretrain_gpt.py --bf16 --tensor-model-par")
    for name, target in LAYOUT_TARGETS.items():
        status, out, err = run("export", "plan.json", "--to", name)
        if name == "transformers":  # cuts no graph
            assert (status, "takes models of hf:" in err) == (2, True)
            continue
        assert status == 0
        assert f"{target.level}: " in out
        assert Path(target.file_name).is_file()


def test_plans_of_other_targets(run: Run) -> None:
    """Plans and targets that do not go together are one line."""
    problem, plan = planned("data=2,stages=2,microbatches=2", cuts=(2,))
    save(problem, plan)
    without = replace(plan, layout={key: value for key, value in plan.layout.items() if key != "batch"})
    without.save("old.json")
    replace(plan, layout=None).save("ops.json")
    cases = [
        ("plan.json", "torch-fsdp", "place with --parallel data=2,stages=1,microbatches=2, or export to torchtitan"),
        ("plan.json", "hf-device-map", "which hf-device-map does not take; export to torch-fsdp"),
        ("old.json", "megatron", "does not say how many samples"),
        ("ops.json", "torchtitan", "place with --parallel, such as data=2"),
        ("plan.json", "torch-fsdpp", "did you mean torch-fsdp"),
    ]
    before = set(Path().iterdir())
    for path, target, message in cases:
        status, out, err = run("export", path, "--to", target)
        assert (status, out) == (2, "")
        assert message in err.splitlines()[-1]
    status, _, err = run("place", "graph.json.gz", "--devices", "cluster.json", "--for", "torchtitan")
    assert status == 2
    assert "place with --parallel, then export the plan" in err.splitlines()[-1]
    assert set(Path().iterdir()) == before
