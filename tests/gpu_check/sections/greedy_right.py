"""The engine's greedy output against transformers, on a 1B-sized model with random weights.

Compared are tokens, by this rule: given the same history, the token that the engine drew must be
the one to which transformers, in float32, gives the highest logit, or one whose logit is lower by
no more than rounding explains. In float32 that is `_TIE`. In bfloat16 it is what logits that are
as far off as transformers' own, times 1.5, can turn round. Token for token equality with `generate`
cannot be asked for: after the first near tie the histories differ. How many equal it is told.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.models import loader
from replicas.models.hf_adapter import ATTENTION
from tests.gpu_check.engine_bench import Served, make_engine, prompt, request
from tests.gpu_check.items import GREEDY
from tests.gpu_check.model_sizes import SIZE_1B, SIZE_DRY
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import exact

_TIE = 1e-3
_SLACK = 1.5
_LENGTHS = (1, 15, 63, 64, 65, 130, 500, 2100)
_LENGTHS_DRY = (1, 16, 33)


def run(rig: Rig) -> None:
    """A row in float32, a row in bfloat16. Weights are the same in both: exact in bfloat16."""
    size = SIZE_DRY if rig.dry else SIZE_1B
    count = 6 if rig.dry else 32
    lengths = _LENGTHS_DRY if rig.dry else _LENGTHS
    prompts = [prompt(size, length, 5) for length in lengths]
    wide = _reference(rig)
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    for item, dtype, model in zip(GREEDY, ("float32", "bfloat16"), (wide, narrow), strict=True):
        ours = _serve(rig, model, dtype, prompts, count)
        wrong, worst = 0, 0.0
        for token_ids, drawn in zip(prompts, ours, strict=True):
            allowed = None if dtype == "float32" else narrow
            mistakes, gap = _judge(wide, allowed, token_ids, drawn)
            wrong, worst = wrong + mistakes, max(worst, gap)
        same = sum(_generate(model, p, count) == o for p, o in zip(prompts, ours, strict=True))
        note = f"largest gap {worst:.2g}; {same} of {len(prompts)} equal generate's"
        rig.recorder.add(exact(item, wrong, count * len(prompts), note=note))


def _reference(rig: Rig) -> PreTrainedModel:
    size = SIZE_DRY if rig.dry else SIZE_1B
    torch.manual_seed(0)
    with torch.device(rig.device):
        model = AutoModelForCausalLM.from_config(
            size.config(), dtype=torch.float32, attn_implementation="sdpa"
        )
    _randomise(model)
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


def _serve(
    rig: Rig, model: PreTrainedModel, dtype: str, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """What the engine answers to all prompts at once."""
    config = copy.deepcopy(model.config)  # making a model writes its attention there
    with torch.device(rig.device):
        own = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
        )
    own.load_state_dict(model.state_dict())
    own.eval().requires_grad_(False)
    # Our kernels serve bfloat16; float32 shows that all around them is right.
    backend = "torch" if dtype == "float32" or rig.dry else "triton"
    paged = loader.prepare(own, "random", rig.device, backend)
    served = Served(make_engine(rig, paged, num_gpu_blocks_override=128, kernel_backend=backend))
    names = [str(number) for number in range(len(prompts))]
    served.send(*(request(n, p, count) for n, p in zip(names, prompts, strict=True)))
    served.finish()
    return [served.tokens[name] for name in names]


@torch.inference_mode()
def _judge(
    wide: PreTrainedModel,
    narrow: PreTrainedModel | None,
    token_ids: Sequence[int],
    drawn: Sequence[int],
) -> tuple[int, float]:
    """How many drawn tokens the rule forbids, and the largest gap to the best one."""
    history = torch.tensor([[*token_ids, *drawn[:-1]]], device=wide.device)
    logits = _logits(wide, history, len(drawn))
    chosen = torch.tensor(drawn, device=wide.device)[:, None]
    gaps = logits.amax(1) - logits.gather(1, chosen)[:, 0]
    allowed = torch.full_like(gaps, _TIE)
    if narrow is not None:
        off = (_logits(narrow, history, len(drawn)) - logits).abs().amax(1)
        allowed += 2 * _SLACK * off
    wrong = len(drawn) - int((gaps <= allowed).sum())  # NaN is wrong
    return wrong, float(gaps.max())


def _logits(model: PreTrainedModel, history: Tensor, count: int) -> Tensor:
    """Of the last `count` positions, [count, vocabulary]."""
    output = model(history, use_cache=False, logits_to_keep=count)
    return output.logits[0].float()


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
