"""The built-in kinds of devices and the links between them, each figure with its source.

docs/devices.md has the figures as tables.

Peak rates are dense (no sparsity), of the fastest unit that multiplies matrices of the type: tensor cores if the card
has them. `float32` is the rate without TF32, as in PyTorch's matrix products by default
(`torch.backends.cuda.matmul.allow_tf32` is false); an op that may use TF32 has the dtype `tf32`. A type that is not in
a table runs at the float32 rate: integers other than int8, booleans, complex numbers, and types that the card emulates.

Memory of GPUs is what a program can use: the total that CUDA reports, which PyTorch prints when it runs out of memory
("GPU 0 has a total capacity of 23.64 GiB"), less CONTEXT_GIB for the program's own context. Where no such message was
found, the total is a share of the nominal capacity, that of cards with the same kind of memory. The P100s are the
machine of the GDP paper: they keep their nominal 16 GiB, and `--reserve` covers the driver's part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gdp.cluster.device import Device

GB, TERA, MIB, GIB = 10**9, 10**12, 2**20, 2**30
SOCKET = "upi"

# An estimate of a CUDA context: second processes on a card, which seem to hold little else, have "470.64 MiB memory
# in use", "502.71 MiB" (github.com/3DTopia/Phidias-Diffusion/issues/8, RTX 4090;
# github.com/Ksuriuri/index-tts-vllm/issues/91, RTX 5090).
CONTEXT_GIB = 0.5
# The total over the nominal capacity, for cards without a source of their own (RTX 4090 0.985, RTX 5090 0.980, RTX 3080
# 0.978, A30 0.980).
TOTAL_SHARE = 0.978
# Metal's recommendedMaxWorkingSetSize by default, of unified memory: three quarters (github.com/ggml-org/llama.cpp
# prints it when it starts; `sysctl iogpu.wired_limit_mb` raises it).
APPLE_SHARE = 0.75

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
    nominal_gib: int = 0  # as it is sold; `memory_bytes` is what a program can use

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
# Blackwell: 18 links (HGX B200 data sheet, 1.8 TB/s in both directions), nominal.
# Infinity Fabric between two MI300X: 128 GB/s in both directions (AMD Instinct MI300X platform data sheet), nominal.
# Thunderbolt 4 between two Macs: 40 Gbit/s (Apple, technical specifications), nominal.
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
            LinkKind("nvlink5", 18 * NVLINK_BYTES_PER_SECOND[5], COPY_LATENCY_NS),
            LinkKind("xgmi3", 64 * GB, COPY_LATENCY_NS, is_switched=False),
            LinkKind("thunderbolt4", 5 * GB, COPY_LATENCY_NS),
            LinkKind(SOCKET, 41_600_000_000, 1_000),
        )
    }
)

# A message between two hosts of a data centre takes in the order of 10 us, besides the copy to and from the card:
# L. Barroso et al., "Attack of the Killer Microseconds", Communications of the ACM 60(4), 2017.
NETWORK_LATENCY_NS = 10_000


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A host as it is sold or rented: its devices, and its network cards for them."""

    local: str
    network: str  # the number of cards and the rate of one
    source: str


MACHINES: Mapping[str, MachineKind] = MappingProxyType(
    {
        "dgx-a100": MachineKind("8xa100-sxm-80g", "8x200gbit", "NVIDIA DGX A100 data sheet: 8 ConnectX of 200 Gb/s"),
        "dgx-h100": MachineKind("8xh100-sxm-80g", "8x400gbit", "NVIDIA DGX H100 data sheet: 8 ConnectX-7 of 400 Gb/s"),
        "dgx-b200": MachineKind("8xb200-sxm-180g", "8x400gbit", "NVIDIA DGX B200 data sheet: 8 ConnectX-7 of 400 Gb/s"),
        "aws-p4d": MachineKind("8xa100-sxm-40g", "4x100gbit", "AWS, EC2 P4 instances: p4d.24xlarge, 400 Gbps with EFA"),
        "aws-p5": MachineKind("8xh100-sxm-80g", "8x400gbit", "AWS, EC2 P5 instances: p5.48xlarge, 3,200 Gbps with EFA"),
        "azure-nd-a100-v4": MachineKind(
            "8xa100-sxm-40g", "8x200gbit", "Microsoft, ND A100 v4-series: 200 Gb/s InfiniBand for each GPU"
        ),
        "azure-nd-h100-v5": MachineKind(
            "8xh100-sxm-80g", "8x400gbit", "Microsoft, ND H100 v5-series: 400 Gb/s InfiniBand for each GPU"
        ),
        "gcp-a2-ultra": MachineKind("8xa100-sxm-80g", "1x100gbit", "Google Cloud, a2-ultragpu-8g: up to 100 Gbps"),
        "gcp-a3-mega": MachineKind(
            "8xh100-sxm-80g", "8x200gbit", "Google Cloud, a3-megagpu-8g: 8 network cards, up to 1,600 Gbps"
        ),
    }
)


def _rates(**tera_per_second: float) -> Mapping[str, int]:
    return MappingProxyType({dtype: round(value * TERA) for dtype, value in tera_per_second.items()})


def _gpu(
    gib: int, rates: Mapping[str, int], gb_per_second: float, port: str, nvlink: str = "", *, total_gib: float
) -> DeviceKind:
    """Returns a GPU sold with `gib`, of which CUDA reports `total_gib`; a context takes its part of that."""
    usable_bytes = int((total_gib - CONTEXT_GIB) * 1024) * MIB
    return DeviceKind(usable_bytes, rates, int(gb_per_second * GB), GPU_LAUNCH_NS, port, nvlink, gib)


def _p100(rates: Mapping[str, int], nvlink: str = "") -> DeviceKind:
    return DeviceKind(16 * GIB, rates, 732 * GB, GPU_LAUNCH_NS, "pcie3", nvlink, 16)


def _geforce(float32: float, *, float8: bool) -> Mapping[str, int]:
    """Returns the rates of a GeForce card of the Ampere, Ada or Blackwell generation by its float32 rate.

    The ratios are those of the RTX 3090, 4090 and 5090 in NVIDIA's white papers (GA102, Ada, RTX Blackwell; each in
    appendix A): float64 1/64, TF32 1, float16 and bfloat16 2, int8 8, and since Ada float8 4, accumulated in float32.
    """
    rates = {"float64": float32 / 64, "float32": float32, "tf32": float32, "float16": 2 * float32}
    rates |= {"bfloat16": 2 * float32, "int8": 8 * float32}
    return _rates(**rates, **({"float8_e4m3fn": 4 * float32, "float8_e5m2": 4 * float32} if float8 else {}))


def _apple(gib: int, float32: float, gb_per_second: int) -> DeviceKind:
    """Returns the GPU of an Apple chip, whose memory is the host's; 16 bit types run at the float32 rate."""
    rates = _rates(float32=float32, float16=float32, bfloat16=float32)
    return DeviceKind(
        int(gib * APPLE_SHARE * GIB), rates, gb_per_second * GB, GPU_LAUNCH_NS, "thunderbolt4", nominal_gib=gib
    )


def _cpu(gib: int, rates: Mapping[str, int], bytes_per_second: int) -> DeviceKind:
    return DeviceKind(gib * GIB, rates, bytes_per_second, CPU_LAUNCH_NS, SOCKET, nominal_gib=gib)


_HOPPER = _rates(
    float64=67, float32=67, tf32=494.5, float16=989.5, bfloat16=989.5, float8_e4m3fn=1979, float8_e5m2=1979, int8=1979
)

_AMPERE = _rates(float64=19.5, float32=19.5, tf32=156, float16=312, bfloat16=312, int8=624)

KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {
        # NVIDIA Tesla P100 PCIe data sheet (2016): 4.7 / 9.3 / 18.7 TFLOP/s, 16 GB at 732 GB/s, PCIe 3.0 x16.
        "p100-pcie-16g": _p100(_rates(float64=4.7, float32=9.3, float16=18.7)),
        # NVIDIA Tesla P100 (SXM2) data sheet (2016): 5.3 / 10.6 / 21.2 TFLOP/s, 16 GB at 732 GB/s, NVLink 160 GB/s.
        "p100-sxm-16g": _p100(_rates(float64=5.3, float32=10.6, float16=21.2), "nvlink1"),
        # NVIDIA V100 data sheet (2020), SXM2: 7.8 / 15.7 / 125 (tensor) TFLOP/s, 32 GB at 900 GB/s, NVLink 300 GB/s.
        "v100-sxm-32g": _gpu(
            32,
            _rates(float64=7.8, float32=15.7, float16=125),
            900,
            "pcie3",
            "nvlink2",
            total_gib=31.73,  # as in many reports
        ),
        # NVIDIA A100 data sheet (2021), 80 GB SXM: FP64 tensor 19.5, FP32 19.5, TF32 156, FP16 and BF16 312 TFLOP/s,
        # INT8 624 TOP/s, 2039 GB/s, NVLink 600 GB/s, PCIe Gen4.
        "a100-sxm-80g": _gpu(
            80,
            _AMPERE,
            2039,
            "pcie4",
            "nvlink3",
            total_gib=79.14,  # as in many reports
        ),
        # The same data sheet, 40 GB: the rates of 80 GB, 1555 GB/s; SXM with NVLink 600 GB/s, PCIe without.
        # Reports have 39.38 to 39.56 GiB.
        "a100-sxm-40g": _gpu(40, _AMPERE, 1555, "pcie4", "nvlink3", total_gib=39.38),
        "a100-pcie-40g": _gpu(40, _AMPERE, 1555, "pcie4", total_gib=39.38),
        # NVIDIA H100 data sheet (2023), SXM: FP64 tensor 67, FP32 67 TFLOP/s; with sparsity, so halved here: TF32 989,
        # FP16 and BF16 1979, FP8 and INT8 3958; 3.35 TB/s, NVLink 900 GB/s, PCIe Gen5.
        "h100-sxm-80g": _gpu(80, _HOPPER, 3350, "pcie5", "nvlink4", total_gib=79.18),
        # NVIDIA H200 data sheet (2024), SXM: the rates of the H100, 141 GB at 4.8 TB/s.
        "h200-sxm-141g": _gpu(
            141,
            _HOPPER,
            4800,
            "pcie5",
            "nvlink4",
            total_gib=139.8,  # as in many reports
        ),
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
            total_gib=22.03,  # as in many reports
        ),
        # NVIDIA Ampere GA102 architecture white paper, appendix A: FP32 35.6, TF32 35.6, FP16 and BF16 with FP32
        # accumulation 71 TFLOP/s, INT8 284 TOP/s, FP64 1/64 of FP32, 24 GB at 936 GB/s, PCIe Gen4.
        "rtx3090-24g": _gpu(
            24,
            _rates(float64=0.556, float32=35.6, tf32=35.6, float16=71, bfloat16=71, int8=284),
            936,
            "pcie4",
            total_gib=24 * TOTAL_SHARE,
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
            total_gib=23.64,  # github.com/3DTopia/Phidias-Diffusion/issues/8
        ),
        # NVIDIA A10 data sheet (2021): FP32 31.2, TF32 62.5, FP16 and BF16 125 TFLOP/s, INT8 250 TOP/s, 24 GB at 600
        # GB/s, PCIe Gen4. FP64 is 1/64 of FP32 (GA102 white paper).
        "a10-24g": _gpu(
            24,
            _rates(float64=0.4875, float32=31.2, tf32=62.5, float16=125, bfloat16=125, int8=250),
            600,
            "pcie4",
            total_gib=22.06,  # as in reports
        ),
        # NVIDIA A30 data sheet (2021): FP64 tensor 10.3, FP32 10.3, TF32 82, FP16 and BF16 165 TFLOP/s, INT8 330 TOP/s,
        # 24 GB at 933 GB/s, PCIe Gen4.
        "a30-24g": _gpu(
            24,
            _rates(float64=10.3, float32=10.3, tf32=82, float16=165, bfloat16=165, int8=330),
            933,
            "pcie4",
            total_gib=23.53,  # github.com/google/RB-Modulation/issues/5
        ),
        # NVIDIA T4 data sheet (2019): FP32 8.1, FP16 65 TFLOP/s, INT8 130 TOP/s, 16 GB at 300 GB/s, PCIe Gen3 x16. FP64
        # is 1/32 of FP32 (Turing architecture white paper).
        "t4-16g": _gpu(
            16,
            _rates(float64=0.253, float32=8.1, float16=65, int8=130),
            300,
            "pcie3",
            total_gib=14.56,  # github.com/Zheng-Chong/CatVTON/issues/133
        ),
        # NVIDIA L40S data sheet (2023): FP32 91.6; with sparsity, so halved here: TF32 366, FP16 and BF16 733, FP8 and
        # INT8 1466; 48 GB at 864 GB/s, PCIe Gen4 x16. FP64 is 1/64 of FP32 (Ada architecture white paper). The 362.05
        # that it prints for dense FP16 is twice the L40's 181.05; 4 x FP32, 2 x TF32 and half of 733 are 366 or more.
        "l40s-48g": _gpu(
            48,
            _rates(
                float64=1.431,
                float32=91.6,
                tf32=183,
                float16=366.5,
                bfloat16=366.5,
                float8_e4m3fn=733,
                float8_e5m2=733,
                int8=733,
            ),
            864,
            "pcie4",
            total_gib=44.39,  # the least of reports; 44.53: github.com/Wan-Video/Wan2.1/issues/205
        ),
        # NVIDIA, GeForce specifications: CUDA cores x boost clock x 2: 3584 x 1.78 GHz, 8704 x 1.71, 4352 x 2.54, 9728
        # x 2.51, 8960 x 2.45, 10752 x 2.62, 21760 x 2.41; memory bandwidth of the same pages. The RTX 4060 Ti has
        # 8 lanes of PCIe 4.0, which carry as much as 16 of PCIe 3.0. Totals: the least of reports.
        "rtx3060-12g": _gpu(12, _geforce(12.76, float8=False), 360, "pcie4", total_gib=11.62),
        "rtx3080-10g": _gpu(
            10,
            _geforce(29.77, float8=False),
            760,
            "pcie4",
            total_gib=9.78,  # github.com/zai-org/CogVideo/issues/34
        ),
        "rtx4060ti-16g": _gpu(16, _geforce(22.1, float8=True), 288, "pcie3", total_gib=16 * TOTAL_SHARE),
        "rtx4080-16g": _gpu(16, _geforce(48.8, float8=True), 716.8, "pcie4", total_gib=16 * TOTAL_SHARE),
        "rtx5070ti-16g": _gpu(16, _geforce(43.9, float8=True), 896, "pcie5", total_gib=15.45),
        "rtx5080-16g": _gpu(16, _geforce(56.3, float8=True), 960, "pcie5", total_gib=15.45),
        "rtx5090-32g": _gpu(
            32,
            _geforce(104.9, float8=True),
            1792,
            "pcie5",
            total_gib=31.36,  # github.com/TrajectoryCrafter/TrajectoryCrafter/issues/20
        ),
        # NVIDIA HGX B200 data sheet (2025), per GPU: FP64 tensor 37, FP32 75 TFLOP/s; with sparsity, so halved here:
        # TF32 2200, FP16 and BF16 4500, FP8 and INT8 9000; 180 GB at 8 TB/s, NVLink 1.8 TB/s, PCIe Gen5. The
        # driver has 178.35 GiB and 7680 bits at 3996 MHz, twice a cycle (github.com/pytorch/ao/pull/4002): 7672 GB/s.
        "b200-sxm-180g": _gpu(
            180,
            _rates(
                float64=37,
                float32=75,
                tf32=1100,
                float16=2250,
                bfloat16=2250,
                float8_e4m3fn=4500,
                float8_e5m2=4500,
                int8=4500,
            ),
            7672,
            "pcie5",
            "nvlink5",
            total_gib=178.35,
        ),
        # AMD Instinct MI300X data sheet (2023): FP64 matrix 163.4, FP32 matrix 163.4, TF32 653.7, FP16 and BF16 1307.4,
        # FP8 2614.9 TFLOP/s, INT8 2614.9 TOP/s, 192 GB at 5.3 TB/s, PCIe Gen5 x16, Infinity Fabric to 7 others.
        "mi300x-192g": _gpu(
            192,
            _rates(
                float64=163.4,
                float32=163.4,
                tf32=653.7,
                float16=1307.4,
                bfloat16=1307.4,
                float8_e4m3fn=2614.9,
                float8_e5m2=2614.9,
                int8=2614.9,
            ),
            5300,
            "pcie5",
            "xgmi3",
            total_gib=191.69,  # the least of reports; others have 191.98
        ),
        # Apple, technical specifications: GPU cores, memory, 400, 800, 400, 819 and 546 GB/s. Rates: a core has 128
        # lanes of a multiply-add; Apple gives 13.6 and 27.2 TFLOP/s for the M2 chips. For the others the clocks are
        # estimates of third parties (1.38, 1.4 and 1.58 GHz): 40, 80 and 40 cores x 128 x 2 x clock.
        "m2-max-96g": _apple(96, 13.6, 400),
        "m2-ultra-192g": _apple(192, 27.2, 800),
        "m3-max-128g": _apple(128, 14.1, 400),
        "m3-ultra-512g": _apple(512, 28.7, 819),
        "m4-max-128g": _apple(128, 16.2, 546),
        # Intel ARK, Xeon Gold 6242: 16 cores at 2.8 GHz with two AVX-512 FMA units: 16 x 2 x 16 lanes x 2 x 2.8e9 =
        # 2.867e12 float32, half of it in float64, four times in int8 (VNNI); 6 channels of DDR4-2933: 140.8 GB/s; six
        # modules of 32 GiB are an assumption.
        "cpu-16core": _cpu(192, _rates(float64=1.4336, float32=2.8672, int8=11.4688), 140_800_000_000),
        # Desktops: cores x base clock x 32 float32 FLOP per cycle (two 256 bit FMA units), half of it in float64; two
        # channels of the fastest DIMMs that the maker supports; the size of the memory is an assumption.
        # AMD, Ryzen 9 7950X: 16 x 4.5 GHz, DDR5-5200. Ryzen 5 5600X: 6 x 3.7 GHz, DDR4-3200.
        "cpu-ryzen9-7950x": _cpu(64, _rates(float64=1.152, float32=2.304), 83_200_000_000),
        "cpu-ryzen5-5600x": _cpu(32, _rates(float64=0.3552, float32=0.7104), 51_200_000_000),
        # Intel ARK, Core i9-14900K: 8 x 3.2 GHz, and 16 small cores x 2.4 GHz x 16 FLOP per cycle, DDR5-5600.
        "cpu-i9-14900k": _cpu(64, _rates(float64=0.7168, float32=1.4336), 89_600_000_000),
    }
)
