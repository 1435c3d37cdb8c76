"""In which form a replica's KV is stored: what two replicas must share to exchange blocks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from kernels import dispatch
from kernels.fp8 import FP8
from replicas.config import EngineConfig
from replicas.engine.pool_size import kv_dtype
from replicas.models import kv_calibration, kv_scale_reader
from replicas.models.hf_adapter import PagedModel
from replicas.models.kv_scales import KVScales

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The pool's element type, and the scales of an fp8 one."""

    dtype: torch.dtype
    scales: KVScales | None = None

    @classmethod
    def choose(cls, config: EngineConfig, model: PagedModel, device: str) -> KVFormat:
        """What is configured; the scales are the checkpoint's, or else calibrated now.

        Raises:
            KVScaleError: the checkpoint's scales are of no use.
            KernelBackendError: this device's kernels cannot read fp8.
        """
        dtype = kv_dtype(config, model.spec)
        if dtype != FP8:
            return cls(dtype)
        dispatch.check_fp8(dispatch.backend(config.kernel_backend, device), device)
        scales = kv_scale_reader.read(model.folder, model.spec) if model.folder else None
        source = "the checkpoint"
        if scales is None:
            scales, source = kv_calibration.calibrate(model), "calibration"
        logger.info("fp8 KV with scales from %s, digest %s", source, scales.digest)
        return cls(dtype, scales.to(device))

    @property
    def name(self) -> str:
        """As `kv_cache_dtype` has it."""
        return "fp8_e4m3" if self.dtype == FP8 else str(self.dtype).removeprefix("torch.")

    @property
    def digest(self) -> str:
        """Of the scales; empty without."""
        return "" if self.scales is None else self.scales.digest
