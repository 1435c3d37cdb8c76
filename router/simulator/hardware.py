"""What replicas can be simulated on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, or one CPU socket. Peaks are the maker's; the shares of them that are reached
    and the overhead are ASSUMPTIONS, the same for all policies: good for comparing policies,
    not for promising latencies."""

    name: str
    peak_flops: float
    """Dense bfloat16 operations a second."""
    memory_bytes: float
    bandwidth: float
    """Bytes a second, of the memory that holds weights and KV."""
    host_bandwidth: float
    """Bytes a second between there and host memory, each way: about 0.8 of PCIe's nominal rate
    on a GPU."""
    flops_share: float = 0.5
    """Of `peak_flops`, reached by a large prefill."""
    bandwidth_share: float = 0.8
    """Of `bandwidth`, reached by a decoding batch."""
    memory_share: float = 0.9
    """Of `memory_bytes`, for weights and KV; as `gpu_memory_utilization`."""
    overhead_s: float = 0.001
    """Of a step: scheduling, launches, sampling."""


HARDWARE = {
    each.name: each
    for each in (
        # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS, 80 GB, 2,039 GB/s, PCIe 4.0 x16.
        Hardware("a100", 312e12, 80e9, 2.039e12, 25e9),
        # NVIDIA H100 SXM data sheet: 1,979 TFLOPS with sparsity, half of it dense; 80 GB,
        # 3.35 TB/s, PCIe 5.0 x16.
        Hardware("h100", 989.5e12, 80e9, 3.35e12, 50e9),
        # NVIDIA H200 SXM data sheet: as H100, but 141 GB and 4.8 TB/s.
        Hardware("h200", 989.5e12, 141e9, 4.8e12, 50e9),
        # Intel Xeon Platinum 8480+ (one socket): 56 cores at 2.0 GHz with AMX, 2,048 bfloat16
        # operations a cycle each; 8 channels of DDR5-4800; 128 GB of it taken for a replica.
        # AMX is far from its peak in practice; a copy reads and writes the same memory.
        Hardware(
            "cpu",
            229e12,
            128e9,
            307.2e9,
            50e9,
            flops_share=0.2,
            bandwidth_share=0.7,
            overhead_s=0.002,
        ),
    )
}
"""By name."""
