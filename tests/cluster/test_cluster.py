"""gdp.cluster.cluster and gdp.cluster.catalogue: quantities, cluster files, presets and their channels."""

import gzip
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdp.cluster import Cluster, Device, Route
from gdp.cluster.achieved import figures_of_kind
from gdp.cluster.catalogue import EXCHANGES, KINDS, LINKS, MACHINES
from gdp.cluster.quantities import parse_number, parse_rate, parse_size, parse_time
from gdp.errors import InputError
from gdp.export.export_target import is_cpu as is_cpu_of
from gdp.graph import Graph, Op
from gdp.simulator.problem import Problem
from hand_cases import make_cluster

TWO_BOXES = """\
format: gdp-cluster
version: 1
name: two-boxes
devices:
  - {name: gpu0, kind: p100-pcie-16g}
  - {name: acc0, kind: my-accelerator, memory: 16GiB, flops: {float32: 9.3e12}, memory_bandwidth: 732GB/s, launch: 4us}
links:
  - {from: gpu0, to: acc0, bandwidth: 12GB/s, latency: 10us, channels: [pcie0]}
  - {from: acc0, to: gpu0, bandwidth: 12GB/s, latency: 10us, channels: [pcie0]}
"""
THREE_CARDS = """\
format: gdp-cluster
version: 1
name: three
devices:
  - {name: a, kind: l4-24g}
  - {name: b, kind: l4-24g}
  - {name: c, kind: l4-24g}
links:
"""


def write(tmp_path: Path, text: str, name: str = "cluster.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def channels_of(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    names = [device.name for device in cluster.devices]
    pairs = [(a, b) for a in range(len(names)) for b in range(len(names)) if a != b]
    return {f"{names[a]}>{names[b]}": cluster.route(a, b).channels for a, b in pairs}


def test_example_of_the_machine_model(tmp_path: Path) -> None:
    """The example of the machine model is read as written."""
    cluster = Cluster.load(write(tmp_path, TWO_BOXES))
    gpu, accelerator = cluster.devices
    assert gpu == Device(
        "gpu0",
        "p100-pcie-16g",
        16 * 2**30,
        {"float32": 9_300_000_000_000, "float16": 18_700_000_000_000, "float64": 4_700_000_000_000},
        732_000_000_000,
        5_000,
        *figures_of_kind("p100-pcie-16g"),
    )
    figures = (16 * 2**30, {"float32": 9_300_000_000_000}, 732_000_000_000, 4_000)
    assert accelerator == Device("acc0", "my-accelerator", *figures)
    assert cluster.channels == ("pcie0",)
    assert cluster.route(0, 1) == cluster.route(1, 0) == Route(10_000, 12_000_000_000, ("pcie0",))
    assert cluster.latency_ns.tolist() == [[0, 10_000], [10_000, 0]]
    assert cluster.route_channels == (((), (0,)), ((0,), ()))


@given(
    st.fractions(0, 8000), st.integers(0, 12), st.sampled_from(["B", "KB", "GB", "KiB", "GiB", "TiB"]), st.booleans()
)
def test_quantities_are_rounded_up(value: Fraction, digits: int, unit: str, spaced: bool) -> None:
    """Quantities are rounded up from their exact decimal value."""
    scaled = math.floor(value * 10**digits)
    number = f"{scaled // 10**digits}.{scaled % 10**digits:0{digits}d}" if digits else str(scaled)
    factor = 1 if unit == "B" else {"K": 1, "G": 3, "T": 4}[unit[0]]
    factor = 1 if unit == "B" else (1024 if "i" in unit else 1000) ** factor
    expected = math.ceil(Fraction(number) * factor)
    gap = " " if spaced else ""
    assert parse_size(f"{number}{gap}{unit}", "x") == expected
    assert parse_rate(f"{number}{gap}{unit}/s", "x") == expected


@pytest.mark.parametrize(
    ("parse", "value", "expected"),
    [
        (parse_size, "1.5GiB", 1_610_612_736),
        (parse_size, 7.000001, 8),
        (parse_rate, "12.5GB/s", 12_500_000_000),
        (parse_time, "0.5us", 500),
        (parse_time, "1.0000000001s", 1_000_000_001),
        (parse_time, 0.1, 1),
        (parse_number, "9.3e12", 9_300_000_000_000),
        (parse_number, 9.3e12, 9_300_000_000_000),
        (parse_number, "9223372036854775807", 2**63 - 1),  # a float would round it to 2^63
        (parse_size, "1e-300", 1),
    ],
)
def test_quantity_examples(parse: object, value: object, expected: int) -> None:
    """Quantities have the values of the documentation."""
    assert callable(parse)
    assert parse(value, "x") == expected


@pytest.mark.parametrize(
    "value",
    [
        "12GB",
        "12gb/s",
        "-1GB/s",
        "nan",
        "inf",
        float("nan"),
        float("inf"),
        True,
        None,
        "",
        "GB/s",
        "1 2GB/s",
        "1e999999999",
        "9" * 5000,
        2**63,
        "1_000",
        "0x10",
    ],
)
def test_bad_rates(value: object) -> None:
    """A value that is no rate is an input error that names its place."""
    with pytest.raises(InputError, match=r"^link 3: bandwidth is .*12\.5GB/s$"):
        parse_rate(value, "link 3: bandwidth")


def test_routes_without_channels(tmp_path: Path) -> None:
    """A pair without channels has its own in each direction."""
    text = THREE_CARDS + "  - {from: '*', to: '*', bandwidth: 1GB/s, latency: 0}\n"
    cluster = Cluster.load(write(tmp_path, text))
    assert channels_of(cluster)["a>b"] == ("a->b",)
    assert len(cluster.channels) == 6


def test_channel_lists(tmp_path: Path) -> None:
    """An empty list of channels means no waiting, and named channels are shared by both directions."""
    text = THREE_CARDS + (
        "  - {from: a, to: [b, c], both: true, bandwidth: 1GB/s, latency: 0, channels: [root, slot]}\n"
        "  - {from: b, to: c, bandwidth: 2GB/s, latency: 1us, channels: []}\n"
        "  - {from: c, to: b, bandwidth: 3GB/s, latency: 1us}\n"
    )
    cluster = Cluster.load(write(tmp_path, text))
    shared = ("root", "slot")
    assert channels_of(cluster) == {
        "a>b": shared,
        "a>c": shared,
        "b>a": shared,
        "c>a": shared,
        "b>c": (),
        "c>b": ("c->b",),
    }
    assert cluster.bytes_per_second[1, 2] == 2_000_000_000


def test_both_ways_between_all(tmp_path: Path) -> None:
    """Routes both ways between all devices are those of one way between all."""
    one_way = Cluster.load(write(tmp_path, THREE_CARDS + "  - {from: '*', to: '*', bandwidth: 1, latency: 0}\n"))
    both = Cluster.load(
        write(tmp_path, THREE_CARDS + "  - {from: '*', to: '*', bandwidth: 1, latency: 0, both: true}\n")
    )
    assert both.fingerprint == one_way.fingerprint


HEAD = "format: gdp-cluster\nversion: 1\nname: x\n"
ONE = "  - {name: a, kind: l4-24g}\n"
TWO = HEAD + "devices:\n" + ONE + "  - {name: b, kind: l4-24g}\nlinks:\n"
LINK = "  - {from: a, to: b, both: true, bandwidth: 1GB/s, latency: 1us}\n"
BAD_FILES = {
    "empty": ("", ["is empty", "gdp-cluster document is expected"]),
    "not a mapping": ("- 1\n", ["is a list", "mapping is expected"]),
    "syntax": ("format: gdp-cluster\ndevices: [1, 2\nname: x\n", ["line 3", "not valid YAML", "mend"]),
    "duplicate key": (HEAD + "name: y\n", ["line 4 column 1", "'name' is given twice", "mend"]),
    "duplicate key in a device": (HEAD + "devices:\n  - {name: a, name: b}\n", ["line 5", "'name' is given twice"]),
    "two documents": (HEAD + "---\n" + HEAD, ["not valid YAML"]),
    "control characters": ("name: \x01\n", ["not valid YAML"]),
    "deep nesting": ("[" * 5000, ["not valid YAML"]),
    "other format": ("format: gdp-graph\nversion: 1\n", ["format is 'gdp-graph'", "'gdp-cluster' is expected"]),
    "other version": ("format: gdp-cluster\nversion: 2\n", ["version is 2", "version 1"]),
    "unknown key": (TWO + LINK + "colour: red\n", ["cluster: unknown key 'colour'", "known keys: format"]),
    "no name": ("format: gdp-cluster\nversion: 1\ndevices: []\n", ["name is missing", "add it"]),
    "no devices": (HEAD + "devices: []\n", ["devices: there are 0", "1 to 1,024 are expected"]),
    "1,025 devices": (
        HEAD + "devices:\n" + "".join(f"  - {{name: d{i}, kind: l4-24g}}\n" for i in range(1025)),
        ["devices: there are 1025", "1 to 1,024"],
    ),
    "unknown key in a device": (
        HEAD + "devices:\n  - {name: a, kind: l4-24g, speed: 1}\n",
        ["device 0 'a'", "'speed'"],
    ),
    "name is a number": (HEAD + "devices:\n  - {name: 7, kind: l4-24g}\n", ["device 0", "name is 7", "quote it"]),
    "name is a star": (HEAD + "devices:\n  - {name: '*', kind: l4-24g}\n", ["device 0 '*'", "not usable", "printable"]),
    "duplicate device": (HEAD + "devices:\n" + ONE + ONE, ["device 1 'a'", "also that of device 0", "unique"]),
    "unknown kind": (
        HEAD + "devices:\n  - {name: a, kind: l4-24, memory: 1GB}\n",
        ["device 0 'a'", "'l4-24' is not built in", "flops, memory_bandwidth, launch", "did you mean l4-24g"],
    ),
    "no float32": (
        HEAD + "devices:\n  - {name: a, kind: l4-24g, flops: {float16: 1}}\n",
        ["'a'", "no float32", "add it"],
    ),
    "zero flops": (
        HEAD + "devices:\n  - {name: a, kind: l4-24g, flops: {float32: 0}}\n",
        ["'flops float32' is 0", "more than 0"],
    ),
    "bad size": (
        HEAD + "devices:\n  - {name: a, kind: l4-24g, memory: 3 apples}\n",
        ["'a': memory", "3 apples", "1.5GiB"],
    ),
    "negative launch": (
        HEAD + "devices:\n  - {name: a, kind: l4-24g, launch: -1us}\n",
        ["launch is '-1us'", "at least 0"],
    ),
    "negative issue": (HEAD + "devices:\n  - {name: a, kind: l4-24g, issue: -1us}\n", ["issue is '-1us'"]),
    "unknown device": (TWO + LINK.replace("to: b", "to: bb"), ["link 0: to 'bb'", "did you mean b?"]),
    "link without latency": (TWO + "  - {from: a, to: b, bandwidth: 1}\n", ["link 0", "latency is missing", "add it"]),
    "covered twice": (TWO + LINK + LINK, ["link 1: a->b is also in link 0", "exactly one entry"]),
    "not covered": (TWO + LINK.replace("both: true, ", ""), ["links: no entry covers b->a", "add one"]),
    "no links": (HEAD + "devices:\n" + ONE + "  - {name: b, kind: l4-24g}\n", ["a->b and 1 more pairs", '"*"']),
    "itself": (TWO + LINK.replace("to: b", "to: a"), ["link 0: links 'a' to itself", "two different devices"]),
    "listed twice": (TWO + LINK.replace("to: b", "to: [b, b]"), ["link 0: to 'b' is listed twice", "once"]),
    "empty list": (TWO + LINK.replace("to: b", "to: []"), ["link 0: to is []", "a list of devices"]),
    "zero bandwidth": (TWO + LINK.replace("1GB/s", "0"), ["link 0: bandwidth is 0", "more than 0"]),
    "size as a rate": (TWO + LINK.replace("1GB/s", "1GB"), ["link 0: bandwidth is '1GB'", "GB/s"]),
    "negative latency": (TWO + LINK.replace("1us", "-1us"), ["link 0: latency is '-1us'", "at least 0"]),
    "both is text": (TWO + LINK.replace("true", "'yes'"), ["link 0: both is 'yes'", "true or false"]),
    "channel twice": (TWO + LINK.replace("both", "channels: [x, x], both"), ["channel 'x'", "twice", "once"]),
    "channels of numbers": (TWO + LINK.replace("both", "channels: [1], both"), ["channels is [1]", "list of names"]),
    "another's channel": (
        TWO + "  - {from: a, to: b, bandwidth: 1, latency: 0}\n"
        "  - {from: b, to: a, bandwidth: 1, latency: 0, channels: [a->b]}\n",
        ["link 1: channel 'a->b'", "link 0", "rename"],
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case: str, tmp_path: Path) -> None:
    """A bad file is one line with file, place and remedy."""
    text, fragments = BAD_FILES[case]
    path = write(tmp_path, text)
    with pytest.raises(InputError) as error:
        Cluster.load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    """Damaged and missing files are input errors."""
    zipped = gzip.compress(TWO_BOXES.encode())
    (tmp_path / "short.yaml.gz").write_bytes(zipped[:-12])
    (tmp_path / "half.json").write_text('{"format": ')
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\xfe\n")
    for name, fragment in {
        "short.yaml.gz": "truncated or damaged gzip",
        "half.json": "line 1 column",
        "latin.yaml": "not valid YAML",
        "missing.yaml": "no such file",
    }.items():
        with pytest.raises(InputError, match=rf"{name}: .*{fragment}"):
            Cluster.parse(str(tmp_path / name))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    count = draw(st.integers(1, 5))
    names = draw(
        st.lists(
            st.sampled_from(["gpu0", "1e3", "on", "a b", "µ", "~", "x: y", "#0", "'"]),
            min_size=count,
            max_size=count,
            unique=True,
        )
    )
    amount = st.integers(1, 2**63 - 1)
    devices = [
        Device(
            name,
            draw(st.sampled_from(["l4-24g", "mine", "2020-01-01"])),
            draw(amount),
            {"float32": draw(amount)},
            draw(amount),
            draw(amount),
        )
        for name in names
    ]
    channels = st.lists(st.sampled_from(["b", "a", "gpu0->on", "10", "9"]), unique=True).map(tuple)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return Cluster.build(
        draw(st.sampled_from(["", "null", "two words"])),
        devices,
        {pair: Route(draw(st.integers(0, 2**63 - 1)), draw(amount), draw(channels)) for pair in pairs},
    )


@given(cluster=clusters())
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    """Files are read back exactly."""
    folder = tmp_path_factory.mktemp("round")
    for name in ("a.yaml", "a.json", "a.yaml.gz", "a.json.gz"):
        cluster.save(folder / name)
        again = Cluster.load(folder / name)
        assert again.to_document() == cluster.to_document()
        assert (again.devices, again.channels, again.route_channels) == (
            cluster.devices,
            cluster.channels,
            cluster.route_channels,
        )
        assert np.array_equal(again.latency_ns, cluster.latency_ns)
        assert again.fingerprint == cluster.fingerprint
        again.save(folder / f"b{name}")
        assert (folder / f"b{name}").read_bytes() == (folder / name).read_bytes()


def test_fingerprints(tmp_path: Path) -> None:
    """The fingerprint leaves out the cluster's name and notation, and nothing else."""

    def fingerprint(text: str) -> str:
        return Cluster.load(write(tmp_path, text)).fingerprint

    known = fingerprint(TWO_BOXES)
    assert fingerprint(TWO_BOXES.replace("two-boxes", "other")) == known
    one_entry = TWO_BOXES[: TWO_BOXES.index("links:")] + (
        "links: [{from: acc0, to: '*', both: true, bandwidth: 12e9, latency: 0.01ms, channels: [pcie0]}]\n"
    )
    assert fingerprint(one_entry) == known
    changes = {"gpu0": "gpu1", "pcie0": "pcie1", "my-acc": "an-acc", "16GiB": "17GiB", "9.3e12": "9.4e12"}
    changes |= {"732GB": "733GB", "4us": "5us", "12GB/s": "13GB/s", "10us": "11us"}
    for old, new in changes.items():
        assert fingerprint(TWO_BOXES.replace(old, new)) != known, old


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_built_in_kinds(kind: str) -> None:
    """Every built-in kind makes a pair with routes both ways."""
    cluster = Cluster.parse(f"2x{kind}")
    assert [device.kind for device in cluster.devices] == [kind, kind]
    assert cluster.name == f"2x{kind}"
    assert (cluster.bytes_per_second + np.eye(2, dtype=np.int64) > 0).all()


def test_tables_of_the_documentation() -> None:
    """The tables in the documentation are those of the code."""
    text = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    dtypes = ("float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "int8")
    for name, machine in MACHINES.items():
        assert f"| `{name}` | `({machine.local})@{machine.network}` | {machine.source} |" in text
    for name, kind in KINDS.items():
        rates = [f"{kind.flops_per_second[t] / 1e12:g}" if t in kind.flops_per_second else "-" for t in dtypes]
        links = f"{kind.port}, {kind.nvlink}" if kind.nvlink else kind.port
        cells = [f"{kind.memory_bytes / 2**30:.2f}", *rates, f"{kind.memory_bytes_per_second / 1e9:g}"]
        costs = ["-" if value is None else f"{value:g}" for value in (kind.watts, kind.dollars_per_hour)]
        assert f"| `{name}` | {' | '.join([*cells, *costs])} | {links} |" in text
    for link in LINKS.values():
        assert f"| `{link.name}` | {link.bytes_per_second / 1e9:g} | {link.latency_ns / 1e3:g} |" in text


def test_pcie_slots() -> None:
    """PCIe cards share their own slots alone."""
    cluster = Cluster.parse("2xp100-pcie-16g+cpu-16core")
    assert [device.name for device in cluster.devices] == ["gpu0", "gpu1", "cpu0"]
    assert channels_of(cluster) == {
        "gpu0>gpu1": ("gpu0.pcie.up", "gpu1.pcie.down"),
        "gpu1>gpu0": ("gpu0.pcie.down", "gpu1.pcie.up"),
        "gpu0>cpu0": ("gpu0.pcie.up",),
        "cpu0>gpu0": ("gpu0.pcie.down",),
        "gpu1>cpu0": ("gpu1.pcie.up",),
        "cpu0>gpu1": ("gpu1.pcie.down",),
    }
    assert cluster.route(0, 1) == Route(5_770, 12_000_000_000, ("gpu0.pcie.up", "gpu1.pcie.down"), "pcie3")
    assert cluster.route(0, 2) == Route(10_000, 12_000_000_000, ("gpu0.pcie.up",))  # a copy to the host


def test_the_slowest_slot() -> None:
    """A route is as fast as its slowest slot."""
    cluster = Cluster.parse("p100-pcie-16g+l4-24g+h100-sxm-80g")
    rates = [int(cluster.bytes_per_second[a, b]) for a, b in [(0, 1), (1, 2), (2, 0)]]
    assert rates == [LINKS["pcie3"].bytes_per_second, LINKS["pcie4"].bytes_per_second, LINKS["pcie3"].bytes_per_second]


def test_switched_nvlink() -> None:
    """Switched NVLink shares ports, and reaches the CPU over PCIe."""
    cluster = Cluster.parse("2xa100-sxm-80g+cpu-16core")
    channels = ("gpu0.nvlink.out", "gpu1.nvlink.in")
    assert cluster.route(0, 1) == Route(8_920, 226_000_000_000, channels, "nvlink3")  # 300 GB/s by the sheet
    assert cluster.route(0, 2).channels == ("gpu0.pcie.up",)


def test_hybrid_cube_mesh() -> None:
    """Eight P100 form the hybrid cube mesh."""
    cluster = Cluster.parse("8xp100-sxm-16g")
    wired = [
        (a, b) for a in range(8) for b in range(8) if a != b and cluster.route(a, b).channels == (f"gpu{a}->gpu{b}",)
    ]
    assert len(wired) == 8 * 4  # four links a card
    assert (0, 4) in wired
    assert (0, 5) not in wired
    assert cluster.route(0, 5) == Route(5_770, 12_000_000_000, ("gpu0.pcie.up", "gpu5.pcie.down"), "pcie3")


def test_network_cards_of_hosts() -> None:
    """The devices of a host share a network card in each direction."""
    cluster = Cluster.parse("2x(2xp100-pcie-16g+cpu-16core)@10gbit")
    assert [device.name for device in cluster.devices[2:5]] == ["host0.cpu0", "host1.gpu0", "host1.gpu1"]
    channels = channels_of(cluster)
    assert channels["host0.gpu1>host1.gpu0"] == (
        "host0.gpu1.pcie.up",
        "host0.net.out",
        "host1.gpu0.pcie.down",
        "host1.net.in",
    )
    assert channels["host0.cpu0>host1.cpu0"] == ("host0.net.out", "host1.net.in")
    assert channels["host0.gpu0>host0.gpu1"] == ("host0.gpu0.pcie.up", "host0.gpu1.pcie.down")
    assert cluster.route(0, 3).bytes_per_second == 1_150_000_000  # 0.92 of 10 Gbit/s
    assert cluster.route(0, 3).latency_ns == 9_300
    assert cluster.route(0, 5).latency_ns == 20_000  # to a CPU: the copy and the network


def test_pods_share_uplinks() -> None:
    """Two uplinks of 100 Gbit/s for four network cards: hosts 0 and 2 of a pod take turns, and so do 1 and 3."""
    cluster = Cluster.parse("2x(4x(2xa100-sxm-80g)@100gbit)@200gbit")
    assert [device.name for device in cluster.devices][7:9] == ["pod0.host3.gpu1", "pod1.host0.gpu0"]
    channels = channels_of(cluster)
    assert channels["pod0.host2.gpu0>pod1.host1.gpu1"] == (
        "pod0.host2.gpu0.pcie.up",
        "pod0.host2.net.out",
        "pod0.up0.out",
        "pod1.host1.gpu1.pcie.down",
        "pod1.host1.net.in",
        "pod1.up1.in",
    )
    assert "pod0.up0.out" in channels["pod0.host0.gpu1>pod1.host0.gpu0"]
    assert not any("up" in name.split(".") for name in channels["pod0.host0.gpu0>pod0.host3.gpu1"][1:])
    rates = cluster.bytes_per_second
    assert rates[0, 2] == rates[0, 8] == 12_500_000_000, "that of a network card"
    slow = Cluster.parse("2x(4x(2xa100-sxm-80g)@100gbit)@40gbit")
    assert slow.bytes_per_second[0, 8] == 5_000_000_000, "that of the uplink"
    assert "pod0.up.out" in channels_of(slow)["pod0.host3.gpu1>pod1.host0.gpu0"]
    full = Cluster.parse("2x(4x(2xa100-sxm-80g)@100gbit)@400gbit")
    assert full.route(0, 8).channels == (
        "pod0.host0.gpu0.pcie.up",
        "pod0.host0.net.out",
        "pod1.host0.gpu0.pcie.down",
        "pod1.host0.net.in",
    )


def test_network_cards_of_machines() -> None:
    """A DGX H100 has eight cards of 400 Gbit/s, an EC2 p4d four for eight devices."""
    cluster = Cluster.parse("2xDGX-H100")
    assert cluster.num_devices == 16
    assert cluster.route(3, 8 + 5) == Route(
        9_300,
        46_000_000_000,  # 0.92 of 400 Gbit/s
        ("host0.gpu3.pcie.up", "host0.net3.out", "host1.gpu5.pcie.down", "host1.net5.in"),
        "network",
    )
    assert "host0.net1.out" in Cluster.parse("2xaws-p4d").route(5, 8).channels
    spelled = Cluster.parse("2x(2x(8xa100-sxm-80g)@8x200gbit)@6400gbit")
    assert spelled.fingerprint == Cluster.parse("2x(2xdgx-a100)@6400gbit").fingerprint
    assert Cluster.parse("16x8xH100-SXM-80g").fingerprint == Cluster.parse("16xdgx-h100").fingerprint
    assert Cluster.parse("2x4xl4-24g@2x25gbit").fingerprint == Cluster.parse("2x(4xl4-24g)@2x25gbit").fingerprint


def test_link_suffixes() -> None:
    """A link suffix replaces the kind's own link."""
    channels = "gpu0.pcie.up", "gpu1.pcie.down"
    assert Cluster.parse("2xa100-sxm-80g:pcie5").route(0, 1) == Route(5_770, 55 * 10**9, channels, "pcie5")
    assert Cluster.parse("2xp100-pcie-16g:nvlink2").route(0, 1).exchange == "nvlink2"


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("4xp100-pci", "did you mean p100-pcie-16g"),
        ("", "no kind ''"),
        ("2xa100-sxm-80g+", "no kind ''"),
        ("2xl4-24g:pci4", "did you mean pcie4"),
        ("cpu-16core:pcie4", "no link 'pcie4' for cpu-16core"),
        ("1025xl4-24g", "1,025 devices; 1 to 1,024"),
        ("513x(2xl4-24g)@10gbit", "1,026 devices; 1 to 1,024"),
        ("9x(16xdgx-a100)@400gbit", "1,152 devices; 1 to 1,024"),
        ("2x(2xdgx-a100)@0gbit", "at least 1"),
        ("2x(2xdgx-a100)@2x400gbit", "one uplink rate"),
        ("2x(2x(2xl4-24g)@10gbit+cpu-16core)@20gbit", "hosts and their network"),
        ("2xdgx-a10", "no kind"),
        ("2x4xl4-24g", r"rate of a network card between the hosts: 2x\(4xl4-24g\)@100gbit"),
        ("16x8xh100", "no kind '8xh100'"),
        ("cpu-16core+0xl4-24g", "0 devices"),
        ("0x(l4-24g)@10gbit", "at least 1"),
        ("2x(l4-24g)@0gbit", "at least 1"),
        ("9" * 5000 + "xl4-24g", "these are more than 1,024 devices"),
        ("2x(2xl4-24g)", "hosts and their network"),
    ],
)
def test_bad_presets(text: str, fragment: str) -> None:
    """A bad preset is an input error with a remedy."""
    with pytest.raises(InputError, match=fragment) as error:
        Cluster.parse(text)
    assert "\n" not in str(error.value)


def test_files_win_over_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing file wins over a preset."""
    write(tmp_path, TWO_BOXES, "4xl4-24g")
    monkeypatch.chdir(tmp_path)
    assert Cluster.parse("4xl4-24g").name == "two-boxes"
    assert Cluster.parse("3xl4-24g").num_devices == 3


def test_device_numbers() -> None:
    """`device_number` finds names and suggests near ones."""
    cluster = Cluster.parse("2xl4-24g")
    assert cluster.device_number("gpu1") == 1
    with pytest.raises(InputError, match=r"did you mean gpu[01] or gpu[01]\?"):
        cluster.device_number("gpu")


def test_arrays() -> None:
    """Arrays are read-only."""
    cluster = Cluster.parse("2xl4-24g")
    with pytest.raises(ValueError, match="read-only"):
        cluster.latency_ns[0, 1] = 0


def test_kinds_and_links_are_found_in_any_case() -> None:
    """`2xL4-24G:PCIe3` is how users write it; the cluster is the same but for its name."""
    assert Cluster.parse("2xL4-24G:PCIe3").fingerprint == Cluster.parse("2xl4-24g:pcie3").fingerprint


@pytest.mark.parametrize(("kind", "reported"), [("a100-sxm-80g", 79.14), ("rtx4090-24g", 23.64)])
def test_usable_memory(kind: str, reported: float) -> None:
    """79.14 GiB of 80 and 23.64 of 24, less 0.5 GiB for a context; the P100 of the GDP paper keeps all 16 GiB."""
    assert KINDS[kind].memory_bytes == int((reported - 0.5) * 1024) * 2**20
    assert KINDS["p100-pcie-16g"].memory_bytes == 16 * 2**30


def test_an_issue_of_zero_is_left_out(tmp_path: Path) -> None:
    """Clusters whose hosts take no time have the fingerprint of before; the issue of another survives its file."""
    cluster = make_cluster(2, {})
    assert cluster.fingerprint == "dc261074081141c55de4dab9f275155a9a7e892dd68d3b4dbd49853968044ccd"
    document = cluster.to_document()
    assert "issue" not in document["devices"][0]
    document["devices"][1]["issue"] = "5us"
    slow = Cluster.from_document(document)
    slow.save(tmp_path / "slow.yaml")
    read = Cluster.load(tmp_path / "slow.yaml")
    assert [device.issue_ns for device in read.devices] == [0, 5000]
    assert read.fingerprint == slow.fingerprint != cluster.fingerprint


def test_links_as_exchanges_use_them() -> None:
    """Links of a preset are what NCCL reaches over them; files and fingerprints keep what links tell."""
    told = Cluster.parse("2x(4xl40s-48g:pcie4-host)@100gbit")
    channels = ("host0.gpu0.pcie.up", "host0.gpu1.pcie.down")
    assert told.route(0, 1) == Route(5_770, 5_200_000_000, channels, "pcie4-host")
    # over the network and to the CPU a card has its slot, and of 100 Gbit/s, which are slower, a share of 0.92
    far = told.route(0, 4)
    assert (far.latency_ns, far.bytes_per_second, far.exchange) == (9_300, 11_500_000_000, "network")
    unlike = Cluster.parse("2xl40s-48g:pcie4-host+l4-24g+cpu-16core")
    rates = [int(unlike.bytes_per_second[pair]) for pair in ((0, 1), (0, 2), (0, 3), (2, 3))]
    assert rates == [EXCHANGES["pcie4-host"].rate(3), 5.2e9, 24e9, 24e9]
    assert Cluster.from_document(told.to_document()).fingerprint == told.fingerprint
    document = told.to_document()
    document["links"][0]["exchange"] = "nvlink33"
    with pytest.raises(InputError, match=r"link 0: exchange 'nvlink33' is unknown; did you mean nvlink3"):
        Cluster.from_document(document)


@pytest.mark.parametrize(
    ("name", "kind", "is_cpu"),
    [
        ("gpu0", "a100-sxm-80g", False),
        ("host0.gpu1", "corelink", False),
        ("cpunode1-gpu0", "h100-sxm-80g", False),
        ("cpu0", "cpu-16core", True),
        ("dev", "amd-epyc-16core", True),
        ("host1.cpu0", "xeon", True),
        ("CPU", "mine", True),
    ],
)
def test_cpus_are_known_by_kind_or_name(name: str, kind: str, is_cpu: bool) -> None:
    """A processor of the user's own kind is one to the simulator and to exports alike."""
    device = Device(name, kind, 2**30, {"float32": 10**12}, 10**11, 1000)
    assert device.is_cpu == is_cpu
    problem = Problem.build(Graph.build("one", [Op("a", "mm", flops=1)], []), Cluster.build("c", [device], {}))
    assert is_cpu_of(problem).tolist() == [is_cpu]
