"""Replaces modules of a loaded model by faster ones that compute the same.

Each is run beside its replacement, and replaced only where the results agree.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from transformers import PreTrainedModel

from kernels.elementwise import Elementwise, TorchElementwise
from replicas.models.fused_attention import attention_names, fuse_attention
from replicas.models.fused_decoder_layer import fuse_layers, layer_names
from replicas.models.gated_mlp import fuse_mlps, swap_mlps
from replicas.models.norms import swap_norms
from replicas.models.observation import observe
from replicas.models.packed_linear import pack_linears

_OURS = "replicas.models."

_logger = logging.getLogger(__name__)


@torch.inference_mode()
def swap_for_cpu(model: PreTrainedModel) -> None:
    """Replace, in place, RMS norms, gated MLPs and linear layers. Fusing linear layers would
    gain nothing on a CPU."""
    swap_norms(model, TorchElementwise())
    swap_mlps(model)
    pack_linears(model)


@torch.inference_mode()
def swap_for_gpu(model: PreTrainedModel, ops: Elementwise) -> None:
    """Replace, in place, RMS norms, gated MLPs, attention and decoder layers by ones that do
    their work in fewer kernels. The model's attention must be ours (`hf_adapter.ATTENTION`);
    `ops` may be torch's own, on any device."""
    swap_norms(model, ops)
    fuse_mlps(model, ops)
    fuse_attention(model, observe(model, attention_names(model)))
    fuse_layers(model, observe(model, layer_names(model)))
    _logger.info("replaced modules: %s", dict(_count(model)))


def _count(model: PreTrainedModel) -> Counter[str]:
    modules = (type(module) for module in model.modules())
    return Counter(kind.__name__ for kind in modules if kind.__module__.startswith(_OURS))
