"""Calibration: what is here is found by its name, figures are those of this machine, and their file is a cluster."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from gdp.cli import main
from gdp.cluster import Cluster, Device, Route
from gdp.cluster.achieved import share
from gdp.cluster.catalogue import BY_REFERENCE_BYTES_PER_SECOND
from gdp.cluster.detect import detect
from gdp.cluster.detect.host import available_cores, memory_bytes
from gdp.execute.backends import Target, backend_of, find_targets, target_of
from gdp.execute.calibrate import measured_routes, work
from gdp.execute.calibrate.calibrate import as_alike, as_card, calibrate, with_exchange
from gdp.models.pytorch import Program

US, MS = 1_000, 1_000_000
NO_GPU = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="cores are one device where there is a GPU")


# what is here


@NO_GPU
def test_local_devices_are_found_by_name() -> None:
    """A plan for the local devices finds its targets by their names."""
    devices = detect().devices
    assert find_targets([device.name for device in devices]) == tuple(map(target_of, devices))
    assert [target_of(device).cores for device in devices] == [(core,) for core in available_cores()[:16]]
    assert len({device.kind for device in devices}) == 1
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*-1core", devices[0].kind)
    assert 0 < sum(device.memory_bytes for device in devices) <= memory_bytes()


# figures


@NO_GPU
def test_measured_devices(tmp_path: Path) -> None:
    """Measured devices have sane figures, and their file gives the same cluster."""
    devices, num_threads = detect().devices[:2], torch.get_num_threads()
    found = calibrate(devices, quick=True)
    cluster = found.cluster
    assert torch.get_num_threads() == num_threads
    for name in ("local.yaml", "local.json"):
        cluster.save(tmp_path / name)
        assert Cluster.load(tmp_path / name).fingerprint == cluster.fingerprint
    for local, device in zip(devices, cluster.devices, strict=True):
        assert (device.name, device.kind, device.memory_bytes) == (local.name, local.kind, local.memory_bytes)
        assert US <= device.launch_ns <= MS
        assert 1e9 < device.flops_per_second["float32"] < 1e14  # a core: 1 GFLOP/s is no SIMD, 100 TFLOP/s none has
        assert 1e8 < device.memory_bytes_per_second < 1e13
    if len(devices) == 2:
        for pair in ((0, 1), (1, 0)):
            route = cluster.route(*pair)
            assert US <= route.latency_ns <= 10 * MS
            assert 1e8 < route.bytes_per_second < 1e12
            assert route.channels == ()
        assert any("in memory that both share" in note for note in found.notes)


def test_work_that_fails() -> None:
    """Work that a device cannot do is None; a mistake is raised, not waited for."""
    backend = backend_of(find_targets(["any"], ["cpu"])[0], work.copy_memory)
    time_ns = 5

    def fails(error: Exception) -> Callable[[], work.Once]:
        def prepare() -> work.Once:
            raise error

        return prepare

    jobs = [(backend, lambda: lambda: time_ns), (backend, fails(NotImplementedError("no kernel")))]
    assert work.together(jobs, 0.01) == [5, None]
    with pytest.raises(KeyError, match="mistake"):
        work.together([*jobs, (backend, fails(KeyError("mistake")))], 0.01)


def test_a_measured_card_keeps_its_cost_model() -> None:
    """A card that was measured at 0.9 of what products and passes of its kind reach has all of its classes of kernels,
    at 0.9 of their shares; one without a data sheet reaches what was measured, and has a host, too."""
    (card,) = Cluster.parse("rtx4090-24g").devices
    products = round(0.9 * share(card.achieved, "product") * card.flops_per_second["bfloat16"])
    rates = {"float32": 10**12, "bfloat16": products}
    passes = round(0.9 * share(card.achieved, "pointwise") * card.memory_bytes_per_second)
    found = as_card(Device("cuda0", "rtx4090-24g", 2**34, rates, passes, 9000))
    assert found.flops_per_second == card.flops_per_second
    assert (found.issue_ns, found.memory_bytes, found.name) == (card.issue_ns, 2**34, "cuda0")
    for name in ("product", "convolution", "pointwise", "norm"):
        assert share(found.achieved, name) == pytest.approx(0.9 * share(card.achieved, name), rel=1e-6)
    other = as_card(Device("cuda0", "nvidia-new", 2**34, rates, passes, 9000))
    assert (share(other.achieved, "product"), share(other.achieved, "pointwise")) == pytest.approx((1, 1))
    assert other.issue_ns > 0
    core = Device("cpu0", "amd-epyc-1core", 2**34, rates, passes, 9000)
    assert as_card(core) is core


def test_measured_cards_of_a_kind_are_alike() -> None:
    """Measurements of equal cards differ; the cards have the medians, since groups and replicas take equal ones."""
    cards = [
        as_card(Device(f"cuda{n}", "rtx4090-24g", 2**34, {"float32": 10**12, "bfloat16": rate}, passes, 9000 + n))
        for n, (rate, passes) in enumerate([(10**14, 9 * 10**11), (11 * 10**13, 8 * 10**11), (9 * 10**13, 7 * 10**11)])
    ]
    core = Device("cpu0", "amd-epyc-1core", 2**34, {"float32": 10**11}, 10**10, 9000)
    *found, cpu = as_alike([*cards, core])
    assert cpu is core
    assert [card.name for card in found] == ["cuda0", "cuda1", "cuda2"]
    assert len({(share(card.achieved, "product"), share(card.achieved, "norm"), card.launch_ns) for card in found}) == 1
    assert share(found[0].achieved, "product") == share(cards[0].achieved, "product")
    assert share(found[2].achieved, "pointwise") == share(cards[1].achieved, "pointwise")
    routes = {pair: Route(5770, 24 * 10**9, (), "pcie4") for pair in permutations(range(3), 2)}
    assert [Cluster.build("local", devices, routes).group_sizes() for devices in (cards, found)] == [(), (2, 3)]


def test_measured_links_exchange_as_known_ones() -> None:
    """Copies of one process are not NCCL's: exchanges keep their figures, at a rate of copies that is far lower."""
    known = Route(5770, 24 * 10**9, ("a.up", "b.down"), "pcie4")
    assert with_exchange(Route(90_000, 22 * 10**9, ("x",)), known) == known
    assert with_exchange(Route(90_000, 6 * 10**9, ("x",)), known) == replace(known, bytes_per_second=6 * 10**9)
    measured = Route(90_000, 22 * 10**9, ("x",))
    assert with_exchange(measured, None) == with_exchange(measured, Route(1, 10**9, ())) == measured


def test_work_on_a_gpu_is_launched_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of 50 us, before which the host takes 20 us for a launch, has the rate of its own 50."""

    class Gpu:
        busy_ns = 0

        def now(self) -> int:
            return self.busy_ns

        def times_ns(self, moments: list[int]) -> list[int]:
            return [0, 20_000 + moments[1] - moments[0]]

    gpu, target = Gpu(), Target("cuda0", torch.device("cuda", 0))
    monkeypatch.setattr(work, "backend_of", lambda *_: gpu)

    def launch() -> torch.Tensor:
        gpu.busy_ns += 50_000
        return torch.empty(0)

    _, prepare = work.job_of(target, work.Work(1, lambda *_: launch), torch.float32)
    assert prepare()() == pytest.approx(50_000, rel=0.01)


def test_a_copy_rate_is_the_slope_of_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 us and 0.1 ns a byte: 10 GB/s, whatever a copy costs to begin with."""
    monkeypatch.setattr(measured_routes, "_copy", lambda _source, _target, num_bytes: num_bytes)
    monkeypatch.setattr(measured_routes, "time_alone", lambda num_bytes, *_: 20 * US + num_bytes / 10)
    target = find_targets(["any"], ["cpu"])[0]
    assert measured_routes._copy_rate(target, target, work.QUICK) == pytest.approx(10**10)
    monkeypatch.setattr(measured_routes, "time_alone", lambda *_: 20 * US)  # nothing is copied
    assert measured_routes._copy_rate(target, target, work.QUICK) == BY_REFERENCE_BYTES_PER_SECOND


def test_hand_overs_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 us and 0.2 ns a byte: 5 GB/s; large tensors of a chain exceed the caches."""
    chains: list[tuple[int, int]] = []

    def hop_ns(program: Program, _pair: object, _num_steps: int) -> float:
        num_bytes = int(program.graph.tensor_bytes[0])
        chains.append((num_bytes, program.graph.num_ops - 1))
        return 3 * US + num_bytes / 5

    monkeypatch.setattr(measured_routes, "hop_ns", hop_ns)
    monkeypatch.setattr(measured_routes, "cache_bytes", lambda: 40 * work.MIB)
    targets = find_targets(["a", "b"], ["cpu", "cpu"])
    rate, (note,) = measured_routes._between_cpus(targets, [(0, 1), (1, 0)], work.QUICK, str)  # type: ignore[arg-type]
    assert rate == pytest.approx(5 * 10**9)
    assert note.endswith("in memory that both share, at 5.0 GB/s")
    assert {num_bytes * count for num_bytes, count in chains if num_bytes >= work.MIB} == {80 * work.MIB}
    assert {count for num_bytes, count in chains if num_bytes < work.MIB} == {work.QUICK.num_ops}
    monkeypatch.setattr(
        measured_routes, "hop_ns", lambda *_: 3 * US
    )  # on a busy machine: no faster than copies of one core
    monkeypatch.setattr(measured_routes, "_copy_here", lambda _target, num_bytes: num_bytes)
    monkeypatch.setattr(measured_routes, "time_alone", lambda num_bytes, *_: 20 * US + num_bytes / 20)
    rate, _ = measured_routes._between_cpus(targets, [(0, 1)], work.QUICK, str)  # type: ignore[arg-type]
    assert rate == pytest.approx(20 * 10**9)


def test_rival_routes_share_a_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bus into b that two routes share; a copy into c is slowed down by one into b, but does not slow it down."""
    pairs = [(0, 1), (2, 1), (0, 2)]

    def together(jobs: list[tuple[int, int]], _seconds: float) -> list[float]:
        return [2.0 if all(job[1] == 1 for job in jobs) or job == (0, 2) else 1.1 for job in jobs]

    monkeypatch.setattr(measured_routes, "_copy", lambda source, target, _size: (source, target))
    monkeypatch.setattr(measured_routes, "time_alone", lambda *_: 1.0)
    monkeypatch.setattr(measured_routes, "together", together)
    rivals = measured_routes._rivals(range(3), pairs, work.QUICK, str)  # type: ignore[arg-type]
    assert rivals == {frozenset({(0, 1), (2, 1)})}
    assert measured_routes._channels("abc", pairs, rivals) == {(0, 1): ("b.in",), (2, 1): ("b.in",), (0, 2): ("a->c",)}
    # a route that is the rival of two which are no rivals of each other has a channel with each
    rivals = {frozenset({(0, 1), (0, 2)}), frozenset({(0, 1), (2, 1)})}
    channels = {(0, 1): ("a.out", "b.in"), (0, 2): ("a.out",), (2, 1): ("b.in",)}
    assert measured_routes._channels("abc", pairs, rivals) == channels


# the command line


@NO_GPU
def test_detect(capsys: pytest.CaptureFixture[str]) -> None:
    """The command lists the devices that are here."""
    assert main(["devices", "detect", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    devices = [
        {"name": device.name, "kind": device.kind, "memory_bytes": device.memory_bytes, "on": device.place}
        for device in detect().devices
    ]
    assert answer.pop("notes")[-1] == "gdp devices measure --out local.yaml gives measured figures"
    assert answer == {
        "devices": devices,
        "links": [],
        "memory_bytes": memory_bytes(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": list(available_cores()),
    }
    assert main(["devices", "detect"]) == 0
    assert devices[0]["kind"] in capsys.readouterr().out


@NO_GPU
def test_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command measures a cluster and writes a file that `gdp devices show` reads."""
    name, path = detect().devices[0].name, tmp_path / "new" / "local.yaml"
    assert main(["devices", "measure", "--out", str(path), "--devices", name, "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "gdp: measuring float32 on all devices at once\n" in err
    assert out.count("\n") == 1
    answer = json.loads(out)
    assert list(answer) == ["cluster", "fingerprint", "notes", "path"]
    assert answer["path"] == str(path)
    assert answer["cluster"] == Cluster.parse(str(path)).to_document()
    assert answer["fingerprint"] == Cluster.parse(str(path)).fingerprint
    assert main(["devices", "show", str(path)]) == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "fragments"),
    [
        (["--out", "."], ["is a directory"]),
        (["--out", "file/local.yaml"], ["cannot be written", "file is no directory"]),
        (["--out", "a.yaml", "--devices", "cpu999"], ["--devices 'cpu999'", "no such device here", "cpu0"]),
        (["--out", "a.yaml", "--devices", "{0},{0}"], ["named twice"]),
        ([], ["Missing option '--out'"]),
    ],
)
def test_bad_devices(
    args: list[str],
    fragments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A device that cannot be measured is one line."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["devices", "measure", *(text.format(detect().devices[0].name) for text in args)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(fragment in err for fragment in fragments)
    assert not Path("a.yaml").exists()
