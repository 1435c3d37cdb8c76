"""A runner with Triton's kernels."""

from __future__ import annotations

import torch

from kernels import dispatch
from replicas.engine.cuda_device import CudaDevice
from replicas.engine.device_runner import DeviceRunner
from replicas.engine.device_sampler import TritonSampler
from replicas.engine.kv_pool import KVPool
from replicas.engine.step_planner import TritonPlanner
from replicas.models.hf_adapter import PagedModel


def triton_runner(model: PagedModel, pool: KVPool, max_model_len: int) -> DeviceRunner:
    """One for choices of up to `max_model_len` tokens; without graphs before it captures some.

    Raises:
        ValueError: the kernels do not take the model's shapes; the message names what.
    """
    spec = model.spec
    planner = TritonPlanner(
        spec,
        block_size=pool.block_size,
        kv_dtype=pool.dtype,
        max_blocks=-(-max_model_len // pool.block_size),
        device=torch.device(pool.blocks.device),
    )
    device = CudaDevice()
    sampler = TritonSampler(spec.vocab_size, spec.eos_token_ids, device.name)
    moves = dispatch.block_moves("triton")
    return DeviceRunner(model, pool, planner, sampler, moves, device)
