"""The engine's greedy output against transformers, on a 1B-sized model with random weights.

Compared are tokens, by this rule: given the same history, the token that the engine drew must be
the one to which the reference, in float32, gives the highest logit, or one whose logit is lower by
no more than rounding explains. In float32 that is `_TIE`. In bfloat16 it is what logits that are
as far off as the reference's own in bfloat16, times 1.5, can turn round. Token for token equality
with `generate` cannot be asked for: after the first near tie the histories differ. How many equal
it is told.

The reference is transformers. Of 8-bit KV it is our own model over an 8-bit pool with torch's
kernels, whose effect on quality tests show without a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kernels.attention_batch import AttentionBatch, Segment
from kernels.dispatch import KernelBackend
from kernels.fp8 import FP8
from replicas.engine.engine import Engine
from replicas.engine.kv_pool import KVPool
from replicas.models import kv_calibration, loader
from replicas.models.hf_adapter import ATTENTION, PagedModel
from replicas.models.kv_scales import KVScales
from tests.gpu_check.engine_bench import BLOCK_SIZE, Served, make_engine, prompt, request
from tests.gpu_check.items import GREEDY
from tests.gpu_check.model_sizes import SIZE_1B, SIZE_DRY
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import exact

if TYPE_CHECKING:
    from transformers import LlamaConfig

Logits = Callable[[Sequence[int], int], Tensor]
"""(tokens, count) -> logits of the last `count` positions, [count, vocabulary] float32."""

_TIE = 1e-3
_SLACK = 1.5
_LENGTHS = (1, 15, 63, 64, 65, 130, 500, 2100)
_LENGTHS_DRY = (1, 16, 33)


def run(rig: Rig) -> None:
    """A row in float32, a row in bfloat16, a row with 8-bit KV. Weights are the same in all: exact
    in bfloat16."""
    size = SIZE_DRY if rig.dry else SIZE_1B
    count = 6 if rig.dry else 32
    lengths = _LENGTHS_DRY if rig.dry else _LENGTHS
    prompts = [prompt(size, length, 5) for length in lengths]
    wide, narrow = _references(rig)
    ours = _paged(rig, wide), _paged(rig, narrow)
    for item, model, paged in zip(GREEDY, (wide, narrow), ours, strict=False):
        drawn = _serve(_engine(rig, paged), prompts, count)
        logits = [partial(_logits, each) for each in ((wide,) if model is wide else (wide, narrow))]
        wrong, note = _judged(logits, prompts, drawn)
        same = sum(_generate(model, p, count) == o for p, o in zip(prompts, drawn, strict=True))
        note += f"; {same} of {len(prompts)} equal generate's"
        rig.recorder.add(exact(item, wrong, count * len(prompts), note=note))
    scales = kv_calibration.calibrate(ours[1]).to(rig.device)
    engine = _engine(rig, ours[1], kv_cache_dtype="fp8")
    if engine.info.kv_scales != scales.digest:
        raise ValueError(f"the engine stores {engine.info.kv_dtype}, or with other scales")
    drawn = _serve(engine, prompts, count)
    logits = [partial(_fp8_logits, each, scales) for each in ours]
    wrong, note = _judged(logits, prompts, drawn)
    rig.recorder.add(exact(GREEDY[2], wrong, count * len(prompts), note=note))


def _references(rig: Rig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """In float32 and in bfloat16."""
    torch.manual_seed(0)
    size = SIZE_DRY if rig.dry else SIZE_1B
    wide = _made(rig, size.config(), torch.float32, "sdpa")
    _randomise(wide)
    # Made anew: to convert a model rounds the angles of its rotation as well.
    narrow = _made(rig, size.config(), torch.bfloat16, "sdpa")
    narrow.load_state_dict(wide.state_dict())
    return wide, narrow


def _made(rig: Rig, config: LlamaConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    with torch.device(rig.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """transformers' own weights are so small that the last token alone decides what comes next."""
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.normal_()
        elif parameter.dim() > 1:
            parameter.normal_(std=1.6 * parameter.shape[-1] ** -0.5)
        parameter.copy_(parameter.to(torch.bfloat16))


def _paged(rig: Rig, model: PreTrainedModel) -> PagedModel:
    """The same for our engine, which serves bfloat16 by our kernels; float32 shows that all around
    them is right."""
    config = copy.deepcopy(model.config)  # making a model writes its attention there
    own = _made(rig, config, model.dtype, ATTENTION)
    own.load_state_dict(model.state_dict())
    return loader.prepare(own, "random", rig.device, _backend(rig, str(model.dtype)))


def _backend(rig: Rig, dtype: str) -> KernelBackend:
    return "torch" if rig.dry or "float32" in dtype else "triton"


def _engine(rig: Rig, paged: PagedModel, **config: str) -> Engine:
    backend = _backend(rig, paged.spec.dtype)
    return make_engine(rig, paged, num_gpu_blocks_override=128, kernel_backend=backend, **config)


def _serve(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What the engine answers to all prompts at once."""
    served = Served(engine)
    names = [str(number) for number in range(len(prompts))]
    served.send(*(request(n, p, count) for n, p in zip(names, prompts, strict=True)))
    served.finish()
    return [served.tokens[name] for name in names]


def _judged(
    logits: Sequence[Logits], prompts: Sequence[Sequence[int]], drawn: Sequence[Sequence[int]]
) -> tuple[int, str]:
    """How many of all drawn tokens the rule forbids, and the largest gap."""
    wide, narrow = logits if len(logits) == 2 else (*logits, None)
    found = [_judge(wide, narrow, *pair) for pair in zip(prompts, drawn, strict=True)]
    return sum(wrong for wrong, _ in found), f"largest gap {max(gap for _, gap in found):.2g}"


@torch.inference_mode()
def _judge(
    wide: Logits,
    narrow: Logits | None,
    token_ids: Sequence[int],
    drawn: Sequence[int],
) -> tuple[int, float]:
    """How many drawn tokens the rule forbids, and the largest gap to the best one."""
    history = [*token_ids, *drawn[:-1]]
    logits = wide(history, len(drawn))
    chosen = torch.tensor(drawn, device=logits.device)[:, None]
    gaps = logits.amax(1) - logits.gather(1, chosen)[:, 0]
    allowed = torch.full_like(gaps, _TIE)
    if narrow is not None:
        off = (narrow(history, len(drawn)) - logits).abs().amax(1)
        allowed += 2 * _SLACK * off
    wrong = len(drawn) - int((gaps <= allowed).sum())  # NaN is wrong
    return wrong, float(gaps.max())


def _logits(model: PreTrainedModel, history: Sequence[int], count: int) -> Tensor:
    """Of the last `count` positions, [count, vocabulary] float32."""
    tokens = torch.tensor([history], device=model.device)
    output = model(tokens, use_cache=False, logits_to_keep=count)
    return output.logits[0].float()


def _fp8_logits(model: PagedModel, scales: KVScales, history: Sequence[int], count: int) -> Tensor:
    """The same over an 8-bit pool, with torch's kernels."""
    length, device = len(history), model.device
    blocks = -(-length // BLOCK_SIZE)
    pool = KVPool(
        model.spec,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        dtype=FP8,
        device=device.type,
        scales=scales,
    )
    segment = Segment(0, length, range(1, blocks + 1))
    positions = torch.arange(length, device=device)
    return model.forward(
        torch.tensor(history, device=device),
        positions,
        pool,
        AttentionBatch.build([segment], BLOCK_SIZE, device),
        positions[-count:],
    )


def _generate(model: PreTrainedModel, token_ids: Sequence[int], count: int) -> list[int]:
    history = torch.tensor([token_ids], device=model.device)
    output = model.generate(
        history,
        attention_mask=torch.ones_like(history),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(token_ids) :].tolist()
