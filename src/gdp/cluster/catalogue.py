"""The built-in kinds of devices and the links between them, each figure with its source.

docs/devices.md has the figures as tables.

Peak rates are dense (no sparsity), of the fastest unit that multiplies matrices of the type: tensor cores if the card
has them. `float32` is the rate without TF32, as in PyTorch's matrix products by default
(`torch.backends.cuda.matmul.allow_tf32` is false); an op that may use TF32 has the dtype `tf32`. A type that is not in
a table runs at the float32 rate: integers other than int8, booleans, complex numbers, and types that the card emulates.
Memory is the nominal capacity; a reserve covers the driver's part of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gdp.cluster.device import Device

GB, TERA, GIB = 10**9, 10**12, 2**30
SOCKET = "upi"

# Asynchronous launches take 3-7 us: V. Volkov, J. Demmel, "Benchmarking GPUs to tune dense linear algebra", SC 2008.
# A. Gray, "Getting Started with CUDA Graphs" (NVIDIA, 2019): 9.6 us for a 2.9 us kernel launched synchronously.
# The host pays it, so it is one figure for all cards.
GPU_LAUNCH_NS = 5_000
# An eager PyTorch 2.13 `add` of one-element tensors takes 0.8-0.9 us on one core of an AMD EPYC (docs/devices.md has
# the command); rounded up for the wake-up of 16 threads, which was not measured.
CPU_LAUNCH_NS = 2_000


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A kind of link, per device and direction.

    `is_switched`: all routes of a device share its port; else each pair of linked devices has its own wires.
    """

    name: str
    bytes_per_second: int
    latency_ns: int
    is_switched: bool = True


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """The figures that devices of a kind share; `port` names the link of its slot (a CPU: of its socket), `nvlink` may
    be "".
    """

    memory_bytes: int
    flops_per_second: Mapping[str, int]
    memory_bytes_per_second: int
    launch_ns: int
    port: str
    nvlink: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.port == SOCKET

    def device(self, name: str, kind: str, memory_bytes: int | None = None) -> Device:
        """Returns the device `name` of this kind, which is called `kind`, with other memory if it is given."""
        memory_bytes = self.memory_bytes if memory_bytes is None else memory_bytes
        return Device(name, kind, memory_bytes, self.flops_per_second, self.memory_bytes_per_second, self.launch_ns)


# An assumption, that of the example in docs/machine-model.md, section 6: the host starts a copy like a kernel,
# over any wires; so one figure for PCIe and NVLink.
COPY_LATENCY_NS = 10_000

# One NVLink in one direction, by generation, nominal: 20 GB/s (P100 white paper), 25 GB/s (V100, A100, H100 white
# papers), 50 GB/s (Blackwell architecture technical brief: 18 links, 1.8 TB/s in both directions).
NVLINK_BYTES_PER_SECOND: Mapping[int, int] = MappingProxyType(
    {1: 20 * GB, 2: 25 * GB, 3: 25 * GB, 4: 25 * GB, 5: 50 * GB}
)

BY_REFERENCE_BYTES_PER_SECOND = 10**15
"""The rate of a route on which nothing is copied.

A rate has to be finite (docs/machine-model.md, section 2); at this one 1 MB occupies its route for 1 ns, the least
there is, and 10 GB for 10 us, which is less than the latency.
"""

# PCIe x16 per direction after line coding: 15.75, 31.5, 63.0 GB/s (PCI Express Base Specification 3.0, 4.0, 5.0).
# Large copies reach 76-87 % of that: 12 GB/s on gen 3, 24 GB/s on gen 4 (same share), 55 GB/s on gen 5 (NVIDIA
# nvbandwidth, README: host_to_device_memcpy_ce).
# NVLink per GPU and direction: 4, 6, 12 and 18 links (P100, V100, A100, H100 white papers), nominal. Before NVSwitch a
# pair of P100 has one of the four links to itself (DGX-1 white paper, hybrid cube-mesh).
# UPI: two of 10.4 GT/s x 2 bytes (Intel ARK, Xeon Gold 6242), nominal.
LINKS: Mapping[str, LinkKind] = MappingProxyType(
    {
        link.name: link
        for link in (
            LinkKind("pcie3", 12 * GB, COPY_LATENCY_NS),
            LinkKind("pcie4", 24 * GB, COPY_LATENCY_NS),
            LinkKind("pcie5", 55 * GB, COPY_LATENCY_NS),
            LinkKind("nvlink1", NVLINK_BYTES_PER_SECOND[1], COPY_LATENCY_NS, is_switched=False),
            LinkKind("nvlink2", 6 * NVLINK_BYTES_PER_SECOND[2], COPY_LATENCY_NS),
            LinkKind("nvlink3", 12 * NVLINK_BYTES_PER_SECOND[3], COPY_LATENCY_NS),
            LinkKind("nvlink4", 18 * NVLINK_BYTES_PER_SECOND[4], COPY_LATENCY_NS),
            LinkKind(SOCKET, 41_600_000_000, 1_000),
        )
    }
)

# A message between two hosts of a data centre takes in the order of 10 us, besides the copy to and from the card:
# L. Barroso et al., "Attack of the Killer Microseconds", Communications of the ACM 60(4), 2017.
NETWORK_LATENCY_NS = 10_000


def _rates(**tera_per_second: float) -> Mapping[str, int]:
    return MappingProxyType({dtype: round(value * TERA) for dtype, value in tera_per_second.items()})


def _gpu(gib: int, rates: Mapping[str, int], gb_per_second: int, port: str, nvlink: str = "") -> DeviceKind:
    return DeviceKind(gib * GIB, rates, gb_per_second * GB, GPU_LAUNCH_NS, port, nvlink)


_HOPPER = _rates(
    float64=67, float32=67, tf32=494.5, float16=989.5, bfloat16=989.5, float8_e4m3fn=1979, float8_e5m2=1979, int8=1979
)

KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {
        # NVIDIA Tesla P100 PCIe data sheet (2016): 4.7 / 9.3 / 18.7 TFLOP/s, 16 GB at 732 GB/s, PCIe 3.0 x16.
        "p100-pcie-16g": _gpu(16, _rates(float64=4.7, float32=9.3, float16=18.7), 732, "pcie3"),
        # NVIDIA Tesla P100 (SXM2) data sheet (2016): 5.3 / 10.6 / 21.2 TFLOP/s, 16 GB at 732 GB/s, NVLink 160 GB/s.
        "p100-sxm-16g": _gpu(16, _rates(float64=5.3, float32=10.6, float16=21.2), 732, "pcie3", "nvlink1"),
        # NVIDIA V100 data sheet (2020), SXM2: 7.8 / 15.7 / 125 (tensor) TFLOP/s, 32 GB at 900 GB/s, NVLink 300 GB/s.
        "v100-sxm-32g": _gpu(32, _rates(float64=7.8, float32=15.7, float16=125), 900, "pcie3", "nvlink2"),
        # NVIDIA A100 data sheet (2021), 80 GB SXM: FP64 tensor 19.5, FP32 19.5, TF32 156, FP16 and BF16 312 TFLOP/s,
        # INT8 624 TOP/s, 2039 GB/s, NVLink 600 GB/s, PCIe Gen4.
        "a100-sxm-80g": _gpu(
            80,
            _rates(float64=19.5, float32=19.5, tf32=156, float16=312, bfloat16=312, int8=624),
            2039,
            "pcie4",
            "nvlink3",
        ),
        # NVIDIA H100 data sheet (2023), SXM: FP64 tensor 67, FP32 67 TFLOP/s; with sparsity, so halved here: TF32 989,
        # FP16 and BF16 1979, FP8 and INT8 3958; 3.35 TB/s, NVLink 900 GB/s, PCIe Gen5.
        "h100-sxm-80g": _gpu(80, _HOPPER, 3350, "pcie5", "nvlink4"),
        # NVIDIA H200 data sheet (2024), SXM: the rates of the H100, 141 GB at 4.8 TB/s.
        "h200-sxm-141g": _gpu(141, _HOPPER, 4800, "pcie5", "nvlink4"),
        # NVIDIA L4 data sheet (2023): FP32 30.3 TFLOP/s; with sparsity, so halved here: TF32 120, FP16, BF16 242,
        # FP8 and INT8 485; 24 GB at 300 GB/s, PCIe Gen4 x16. FP64 is 1/64 of FP32 (Ada architecture white paper).
        "l4-24g": _gpu(
            24,
            _rates(
                float64=0.473,
                float32=30.3,
                tf32=60,
                float16=121,
                bfloat16=121,
                float8_e4m3fn=242.5,
                float8_e5m2=242.5,
                int8=242.5,
            ),
            300,
            "pcie4",
        ),
        # NVIDIA Ampere GA102 architecture white paper, appendix A: FP32 35.6, TF32 35.6, FP16 and BF16 with FP32
        # accumulation 71 TFLOP/s, INT8 284 TOP/s, FP64 1/64 of FP32, 24 GB at 936 GB/s, PCIe Gen4.
        "rtx3090-24g": _gpu(
            24, _rates(float64=0.556, float32=35.6, tf32=35.6, float16=71, bfloat16=71, int8=284), 936, "pcie4"
        ),
        # NVIDIA Ada architecture white paper, appendix A: FP32 82.6, TF32 82.6, FP16 and BF16 165.2, FP8 330.3 TFLOP/s,
        # each with FP32 accumulation, INT8 660.6 TOP/s, FP64 1/64 of FP32; 24 GB, 1008 GB/s, PCIe Gen4.
        "rtx4090-24g": _gpu(
            24,
            _rates(
                float64=1.29,
                float32=82.6,
                tf32=82.6,
                float16=165.2,
                bfloat16=165.2,
                float8_e4m3fn=330.3,
                float8_e5m2=330.3,
                int8=660.6,
            ),
            1008,
            "pcie4",
        ),
        # Intel ARK, Xeon Gold 6242: 16 cores at 2.8 GHz with two AVX-512 FMA units: 16 x 2 x 16 lanes x 2 x 2.8e9 =
        # 2.867e12 float32, half of it in float64, four times in int8 (VNNI); 6 channels of DDR4-2933: 140.8 GB/s; six
        # modules of 32 GiB are an assumption.
        "cpu-16core": DeviceKind(
            192 * GIB, _rates(float64=1.4336, float32=2.8672, int8=11.4688), 140_800_000_000, CPU_LAUNCH_NS, SOCKET
        ),
    }
)
