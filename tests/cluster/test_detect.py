"""gdp.cluster.detect: cards as NVML and CUDA name them, as a cluster; the host; `local` on the command line."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_nvml import CALLS, H100, L4, MIB, P100, Card, FakeNvml
from gdp.cli import main
from gdp.cluster import Cluster, Route
from gdp.cluster.catalogue import EXCHANGES, GB, GIB, KINDS
from gdp.cluster.detect import Machine, detect, host
from gdp.cluster.detect import machine as detection
from gdp.cluster.detect.gpu_figures import KIND_BY_NAME
from gdp.cluster.detect.machine import Visible
from gdp.cluster.detect.nvml import Gpu
from gdp.cluster.detect.topology import pcie_bytes_per_second
from gdp.execute.backends import find_targets, target_of

UUIDS = [f"GPU-{number}0000000-0000-0000-0000-000000000000" for number in range(4)]
UNKNOWN = Card(
    "NVIDIA RTX A2000",
    total_mib=6138,
    reserved_mib=0,
    pcie=(4, 8),
    capability=(8, 6),
    num_cores=3328,
    mhz=(2100, 6001),
    bus_width=192,
)


@pytest.fixture(autouse=True)
def _pytorch_has_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PyTorch these tests run with; four cores, one memory."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(host, "available_cores", lambda: (0, 2, 3, 4))
    monkeypatch.setattr(host, "memory_bytes", lambda: 64 * GIB)


def all_of(gpus: Sequence[Gpu]) -> Visible:
    """All cards that NVML knows, in its order."""
    return {f"cuda{number}": gpu for number, gpu in enumerate(gpus)}, []


def machine_of(
    cards: list[Card], ancestors: dict[tuple[int, int], int] | None = None, order: tuple[int, ...] = ()
) -> Machine:
    """The machine of these cards, which PyTorch has in that order of NVML's numbers."""
    return detect(lambda gpus: all_of([gpus[number] for number in order] or gpus), nvml=FakeNvml(cards, ancestors))


def routes_of(machine: Machine) -> dict[str, Route]:
    cluster = Cluster.of_machine(machine)
    names = [device.name for device in cluster.devices]
    pairs = [(a, b) for a in range(len(names)) for b in range(len(names)) if a != b]
    return {f"{names[a]}>{names[b]}": cluster.route(a, b) for a, b in pairs}


# devices and links


def test_two_linked_cards() -> None:
    """12 active NVLinks of 25 GB/s, a thirteenth is off, others lead to a card that is not ours."""
    cards = [Card(H100, ends=[*[end] * 12, "off", "elsewhere"]) for end in (1, 0)]
    machine = machine_of(cards, {(0, 1): 40})
    assert [device.name for device in machine.devices] == ["cuda0", "cuda1", "cpu0"]
    assert str(machine.links["cuda0", "cuda1"]) == "12 NVLinks, 300 GB/s; one NUMA node"
    gpu, _, cpu = Cluster.of_machine(machine).devices
    kind = KINDS["h100-sxm-80g"]
    assert (gpu.kind, gpu.flops_per_second, gpu.launch_ns) == ("h100-sxm-80g", kind.flops_per_second, kind.launch_ns)
    # what the driver keeps is not free, nor is CUDA's context
    assert gpu.memory_bytes == (81_000 - 512) * MIB // (256 * MIB) * (256 * MIB)
    assert (cpu.memory_bytes, machine.devices[2].place) == (64 * GIB, "cpu:2-4")
    linked = EXCHANGES["nvlink4"].latency_ns, 350 * GB * 12 // 18  # exchanges, with 12 links of a generation's 18
    assert routes_of(machine) == {
        "cuda0>cuda1": Route(*linked, ("cuda0->cuda1",), "nvlink4"),
        "cuda1>cuda0": Route(*linked, ("cuda1->cuda0",), "nvlink4"),
        "cuda0>cpu0": Route(10_000, 55 * GB, ("cuda0.pcie.up",)),
        "cpu0>cuda0": Route(10_000, 55 * GB, ("cuda0.pcie.down",)),
        "cuda1>cpu0": Route(10_000, 55 * GB, ("cuda1.pcie.up",)),
        "cpu0>cuda1": Route(10_000, 55 * GB, ("cuda1.pcie.down",)),
    }
    assert not any("cuda" in note for note in machine.notes)  # nothing is estimated, assumed or in use


@pytest.mark.parametrize(("capability", "factor"), [((6, 1), None), ((7, 5), 4), ((8, 0), 16), ((8, 6), 2)])
def test_halves_of_cards_that_are_not_built_in(capability: tuple[int, int], factor: int | None) -> None:
    """Tensor cores multiply halves in a multiple of float32's rate, which the compute capability tells."""
    (gpu, _) = Cluster.of_machine(machine_of([Card("NVIDIA New 1", capability=capability)])).devices
    rates = gpu.flops_per_second
    assert rates.get("float16") == (None if factor is None else factor * rates["float32"])
    assert ("bfloat16" in rates) == ("tf32" in rates) == (capability >= (8, 0))


@pytest.mark.parametrize("end", ["switch", "hidden"])
def test_nvlink_switches(end: str) -> None:
    """Cards on an NVLink switch share its ports, though a virtual machine hides it; they exchange as a preset's do."""
    routes = routes_of(machine_of([Card(H100, ends=[end] * 18), Card(H100, ends=[end] * 18)]))
    preset = Cluster.parse("2xh100-sxm-80g").route(0, 1)
    assert routes["cuda0>cuda1"] == replace(preset, channels=("cuda0.nvlink.out", "cuda1.nvlink.in"))


def test_cards_without_peer_to_peer_copies() -> None:
    """Where the driver refuses copies between cards, they exchange over the host's memory: half as fast in 8 lanes."""
    cards = [Card(L4, pcie=(4, width)) for width in (16, 16, 8)]
    nvml = FakeNvml(cards, {(0, 1): 40, (0, 2): 40, (1, 2): 40}, without_copies=((0, 1), (1, 2)))
    machine = detect(all_of, nvml=nvml)
    assert str(machine.links["cuda0", "cuda1"]) == "PCIe without peer-to-peer copies, 24 GB/s; one NUMA node"
    assert str(machine.links["cuda0", "cuda2"]) == "PCIe, 12 GB/s; one NUMA node"
    routes, host = routes_of(machine), EXCHANGES["pcie4-host"]
    found = [(routes[name].exchange, routes[name].bytes_per_second) for name in ("cuda0>cuda1", "cuda1>cuda2")]
    assert found == [("pcie4-host", host.rate(3)), ("pcie4-host", round(host.rate(3) / 2))]
    assert (routes["cuda0>cuda2"].exchange, routes["cuda0>cuda2"].bytes_per_second) == ("pcie4", 12 * GB)


def test_links_of_other_cards() -> None:
    """Links of a gaming card are narrower, and those of older cards slower."""
    for capability, rate in {(6, 0): 20 * GB, (7, 0): 25 * GB, (8, 6): 14_062_500_000, (10, 0): 50 * GB}.items():
        machine = machine_of([Card(H100, capability=capability, ends=[end]) for end in (1, 0)])
        assert machine.links["cuda0", "cuda1"].bytes_per_second == rate


def test_pcie_switches() -> None:
    """cuda0 and cuda1 below a switch, cuda2 in a slot of eight lanes of its own: 12 GB/s x 8 / 16."""
    cards = [Card(P100, pcie=(3, 16)), Card(P100, pcie=(3, 16)), Card(P100, pcie=(3, 8))]
    machine = machine_of(cards, {(0, 1): 10, (0, 2): 30, (1, 2): 30})
    routes = routes_of(machine)
    over_switch = ("cuda0.pcie.up", "cuda2.pcie.down", "switch0.pcie.up")
    assert routes["cuda0>cuda1"] == Route(5_770, 12 * GB, ("cuda0.pcie.up", "cuda1.pcie.down"), "pcie3")
    assert routes["cuda0>cuda2"] == Route(5_770, 6 * GB, over_switch, "pcie3")
    assert routes["cuda2>cuda1"].channels == ("cuda1.pcie.down", "cuda2.pcie.up", "switch0.pcie.down")
    assert routes["cuda1>cpu0"].channels == ("cuda1.pcie.up", "switch0.pcie.up")
    assert routes["cpu0>cuda1"].channels == ("cuda1.pcie.down", "switch0.pcie.down")
    assert routes["cpu0>cuda2"].channels == ("cuda2.pcie.down",)
    assert [str(link) for link in machine.links.values()] == [
        "PCIe, 12 GB/s; one PCIe switch",
        "PCIe, 6 GB/s; one host bridge",
        "PCIe, 6 GB/s; one host bridge",
    ]


def test_numa_nodes() -> None:
    """Cards on two NUMA nodes share the link between the sockets."""
    cards = [Card(H100)] * 4
    ancestors = {(0, 1): 40, (2, 3): 10} | {(a, b): 50 for a in (0, 1) for b in (2, 3)}
    routes = routes_of(machine_of(cards, ancestors))
    over_nodes = ("cuda1.pcie.up", "cuda2.pcie.down", "node0.upi.out", "node1.upi.in", "switch0.pcie.down")
    assert routes["cuda0>cuda1"] == Route(5_770, 55 * GB, ("cuda0.pcie.up", "cuda1.pcie.down"), "pcie5")
    assert routes["cuda1>cuda2"] == Route(5_770, 41_600_000_000, over_nodes, "pcie5")


def test_unknown_cards() -> None:
    """3328 cores x 2.1 GHz x 2 FLOP; 2 x 6001 MHz x 192 bits / 8."""
    machine = machine_of([UNKNOWN])
    gpu = Cluster.of_machine(machine).devices[0]
    assert (gpu.kind, gpu.memory_bytes) == ("nvidia-rtx-a2000", 5376 * MIB)
    halves = {"float16": 27_955_200_000_000, "bfloat16": 27_955_200_000_000}  # twice as many, on a card as GeForce's
    assert gpu.flops_per_second == {"float32": 13_977_600_000_000, "tf32": 13_977_600_000_000} | halves
    assert gpu.memory_bytes_per_second == 288_048_000_000
    assert routes_of(machine)["cuda0>cpu0"].bytes_per_second == 12 * GB  # PCIe 4, 8 lanes
    assert any("cuda0: figures are estimates: 3328 CUDA cores x 2100 MHz x 2" in note for note in machine.notes)


def test_free_memory() -> None:
    """Memory is the part that others and CUDA's context leave free; what this process holds is its own."""
    machine = machine_of([Card(L4, total_mib=23034, reserved_mib=458, others_mib=8192, own_mib=1024)])
    gpu = machine.gpus["cuda0"]
    assert (gpu.free_bytes, gpu.others_bytes) == ((23034 - 458 - 8192) * MIB, 8192 * MIB)
    assert machine.devices[0].memory_bytes == 13_824 * MIB  # 54 times 256 MiB, which leave 560
    assert any("cuda0: others use 8.0 GiB of its memory now" in note for note in machine.notes)


def test_known_names() -> None:
    """Every known name is that of a built-in kind, with or without its maker."""
    unknown_to_nvml = {name for name, kind in KINDS.items() if kind.is_cpu or kind.port == "thunderbolt4"}
    assert set(KIND_BY_NAME.values()) == set(KINDS) - unknown_to_nvml
    for name, kind in KIND_BY_NAME.items():
        assert [device.kind for device in machine_of([Card(name), Card(f"NVIDIA {name}")]).devices[:2]] == [kind, kind]
    assert machine_of([Card("NVIDIA H800 PCIe")]).devices[0].kind == "nvidia-h800-pcie"


def test_pcie_rates() -> None:
    """PCIe rates double with each generation."""
    rates = [pcie_bytes_per_second(generation, 16) // GB for generation in range(1, 7)]
    assert rates == [3, 6, 12, 24, 55, 110]
    assert pcie_bytes_per_second(4, 4) == 6 * GB


def test_renumbered_cards() -> None:
    """Links follow the cards when they are numbered anew."""
    cards = [Card(H100), Card(H100, ends=[2]), Card(H100, ends=[1])]
    machine = machine_of(cards, {(0, 1): 50, (0, 2): 50, (1, 2): 10}, order=(2, 0, 1))
    words = {names: str(link) for names, link in machine.links.items()}
    assert not any(link.is_switched for link in machine.links.values())
    assert words["cuda0", "cuda2"] == "1 NVLink, 25 GB/s; one PCIe switch"
    assert words["cuda0", "cuda1"] == "PCIe, 41.6 GB/s; different NUMA nodes"


# what does not answer


@given(st.sets(st.sampled_from(CALLS)), st.booleans())
def test_failing_calls(refused: set[str], is_known: bool) -> None:
    """A call that fails costs the fact that it asks for, and no more."""
    cards = [Card(H100, ends=[1, 1, "switch"]) if is_known else UNKNOWN, Card(H100, ends=[0, 0, "switch"])]
    nvml = FakeNvml(cards, {(0, 1): 50}, refused)
    machine = detect(all_of, nvml=nvml)
    cluster = Cluster.of_machine(machine)  # checks itself
    lost = refused & {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
    assert len(machine.gpus) == (0 if lost else 2)
    assert bool(machine.found_notes) == bool(lost)
    assert cluster.devices[-1].name.startswith("cpu")
    if not lost and "nvmlDeviceGetName" not in refused:
        assert "cuda1" in [device.name for device in cluster.devices]  # of its kind, much is known without NVML
    assert "nvmlShutdown" in nvml.asked or "nvmlInit" in refused
    assert all(str(link) for link in machine.links.values())


def test_calls_of_nvml() -> None:
    """Every call is one that the library has."""
    nvml = FakeNvml([Card(H100, ends=[1, "switch"]), Card(H100, ends=[0, "switch"])], {(0, 1): 30})
    detect(all_of, nvml=nvml)
    assert nvml.asked == set(CALLS)
    assert all(callable(getattr(pynvml, name)) for name in CALLS)
    constants = (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM, pynvml.NVML_FEATURE_ENABLED, pynvml.NVML_TOPOLOGY_SYSTEM)
    assert constants == (1, 2, 1, 50)
    assert (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU) == (0, 1)


@pytest.mark.parametrize("code", ["NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED", "NVML_ERROR_UNKNOWN"])
def test_without_a_driver(code: str) -> None:
    """Without a driver there are cores alone, with a note if the driver is there but broken."""

    def fail() -> None:
        raise pynvml.NVMLError(getattr(pynvml, code))

    machine = detect(all_of, nvml=SimpleNamespace(nvmlInit=fail))
    assert [device.name for device in machine.devices] == ["cpu0", "cpu2", "cpu3", "cpu4"]
    assert bool(machine.found_notes) == (code == "NVML_ERROR_UNKNOWN")


# the host


CPUINFO = """\
processor	: {0}
model name	: {model}
cpu MHz		: 1234.5
physical id	: 0
core id		: {core}
flags		: {flags}
"""


@pytest.mark.parametrize(
    ("model", "flags", "clocks", "float32"),
    [
        ("Intel(R) Xeon(R) Gold 6242 CPU @ 2.80GHz", "avx2 avx512f fma", {}, 2 * 2.8e9 * 64),
        ("AMD", "avx2 fma", {"base_frequency": "2000000"}, 2 * 2.0e9 * 32),
        ("AMD", "avx2 fma", {"cpuinfo_max_freq": "3000000"}, 2 * 3.0e9 * 32),
        ("AMD", "sse2", {}, 2 * 1.2e9 * 8),
    ],
)
def test_rates_of_cores(tmp_path: Path, model: str, flags: str, clocks: dict[str, str], float32: float) -> None:
    """Processors 0 and 2 are threads of one core, 1 is another core: two cores, of 8.8 GB/s each."""
    (tmp_path / "proc").mkdir()
    blocks = [CPUINFO.format(number, model=model, core=number % 2, flags=flags) for number in range(3)]
    (tmp_path / "proc/cpuinfo").write_text("\n".join(blocks))
    for name, text in clocks.items():
        (tmp_path / "sys/devices/system/cpu/cpu0/cpufreq").mkdir(parents=True)
        (tmp_path / "sys/devices/system/cpu/cpu0/cpufreq" / name).write_text(text + "\n")
    rates = host.cpu_rates((0, 1, 2), tmp_path)
    assert rates.flops_per_second == {"float32": float32, "float64": float32 / 2}
    assert rates.memory_bytes_per_second == 2 * 8_800_000_000
    assert host.cpu_rates((5,), tmp_path / "elsewhere").flops_per_second["float32"] == 2.5e9 * 8  # nothing is known


def test_control_groups(tmp_path: Path) -> None:
    """Memory is limited by the control groups that this process is in."""
    for name, text in {
        "proc/self/cgroup": "5:memory:/jobs/job\n1:cpu,cpuacct:/\n0::/slice/unit\n",
        "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "7000\n",
        "sys/fs/cgroup/slice/memory.max": "9000\n",
        "sys/fs/cgroup/slice/unit/memory.max": "max\n",
        "sys/fs/cgroup/other/memory.max": "1\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(host.memory_limits(tmp_path)) == [7000, 9000]
    assert list(host.memory_limits(tmp_path / "elsewhere")) == []


def test_without_gpus() -> None:
    """Without GPUs there are cores, which share memory and bandwidth and hand tensors over."""
    machine = machine_of([])
    cluster = Cluster.of_machine(machine)
    assert [device.name for device in cluster.devices] == [device.name for device in machine.devices]
    assert {device.memory_bytes for device in cluster.devices} == {16 * GIB}
    routes = set(routes_of(machine).values())
    assert routes == {Route(2_700, 12 * GB, ())}


# PyTorch's view, and the command line


def pytorch_sees(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, str, int]) -> None:
    """(name, UUID, memory) of each."""
    found = [SimpleNamespace(uuid=uuid.removeprefix("GPU-"), total_memory=size) for _, uuid, size in gpus]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: gpus[number][0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: found[number])


def test_cards_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards are numbered as PyTorch does, and those that it alone knows are there, too."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([Card(L4, total_mib=23034, others_mib=12_000), Card(H100)]))
    pytorch_sees(monkeypatch, (H100, UUIDS[1], 80 * GIB), ("AMD Instinct MI300X", "", 192 * GIB), (L4, UUIDS[0], 1))
    devices = detect().devices
    assert [(device.name, device.kind) for device in devices[:3]] == [
        ("cuda0", "h100-sxm-80g"),
        ("cuda1", "mi300x-192g"),
        ("cuda2", "l4-24g"),
    ]
    assert (devices[1].memory_bytes, devices[2].memory_bytes) == (192 * GIB - 512 * MIB, 9728 * MIB)
    names = [device.name for device in devices]
    assert find_targets(names) == tuple(map(target_of, devices))  # without --on
    assert find_targets(names)[-1].cores == (2, 3, 4)


def test_links_that_only_the_kind_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML knows no MI300X: their links are those of a preset."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([]))
    pytorch_sees(monkeypatch, *[("AMD Instinct MI300X", f"GPU-{number}", 192 * GIB) for number in range(8)])
    monkeypatch.setattr(detection, "_DRIVERS", ("null",))  # AMD's driver is there
    machine = detect()
    assert str(machine.links["cuda0", "cuda7"]) == "xgmi3, 64 GB/s"
    preset = Cluster.parse("8xmi300x-192g").route(0, 7)
    assert routes_of(machine)["cuda0>cuda7"] == replace(preset, channels=("cuda0->cuda7",))


def test_unusable_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that PyTorch cannot use is a note."""

    def fail(_number: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([Card(H100)]))
    pytorch_sees(monkeypatch, (H100, UUIDS[0], 1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert [device.name for device in detect().devices] == ["cpu0", "cpu2", "cpu3", "cpu4"]


def test_detect_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command shows cards, links and notes, and its file is the cluster `local`."""
    cards = [Card(H100, others_mib=4096, ends=[1] * 4), Card(H100, ends=[0] * 4)]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(cards, {(0, 1): 30}))
    pytorch_sees(monkeypatch, *[(H100, uuid, 80 * GIB) for uuid in UUIDS[:2]])
    path = tmp_path / "new" / "local.yaml"
    assert main(["devices", "detect", "--json", "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    answer = json.loads(out)
    assert answer["devices"][0] == {
        "name": "cuda0",
        "kind": "h100-sxm-80g",
        "memory_bytes": 76_288 * MIB,
        "on": "cuda:0",
        "gpu": H100,
        "uuid": UUIDS[0],
        "total_memory_bytes": 81_559 * MIB,
        "free_memory_bytes": 76_904 * MIB,
        "used_by_others_bytes": 4096 * MIB,
        "pcie_generation": 5,
        "pcie_width": 16,
    }
    assert answer["links"] == [
        {
            "devices": ["cuda0", "cuda1"],
            "ancestor": "one host bridge",
            "nvlinks": 4,
            "is_switched": False,
            "has_peer_copies": True,
            "bytes_per_second": 100 * GB,
        }
    ]
    assert answer["path"] == str(path)
    assert Cluster.load(path).fingerprint == Cluster.parse("local").fingerprint
    assert main(["devices", "detect"]) == 0
    out = capsys.readouterr().out
    for text in ("79.6 GiB", "75.1 GiB", "PCIe 5 x16", "4 NVLinks, 100 GB/s; one host bridge", "others use 4.0 GiB"):
        assert text in out


def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards are left out where PyTorch has no CUDA."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([Card(H100)]))
    monkeypatch.setattr(torch.version, "cuda", None)
    pytorch_sees(monkeypatch)
    machine = detect()
    assert not machine.gpus
    assert any(note.startswith("1 GPUs are left out: PyTorch ") for note in machine.notes)


@pytest.mark.parametrize("out", [".", "file/local.yaml"])
def test_unwritable_files(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be written is one line."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["devices", "detect", "--out", out]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
