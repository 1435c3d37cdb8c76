"""The whole engine on an 8B-shaped model with random weights, against what memory and arithmetic
allow."""

from __future__ import annotations

from tests.gpu_check import rig as names
from tests.gpu_check.engine_bench import Served, make_engine, prompt, random_model
from tests.gpu_check.items import ENGINE_SPEED
from tests.gpu_check.model_sizes import SIZE_8B, SIZE_DRY
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import NOTHING, rate

_TOKENS = 48
"""Of each choice, over which decoding is timed."""


def run(rig: Rig) -> None:
    """Decoding alone, decoding a batch, and prompts in chunks of 2,048 tokens."""
    size = SIZE_DRY if rig.dry else SIZE_8B
    model = random_model(rig, size)
    context, many, long = (30, 3, 100) if rig.dry else (1024, 64, 8192)
    room = many * (context + 4 * _TOKENS) // (16 if rig.dry else 64) + 64
    served = Served(make_engine(rig, model, num_gpu_blocks_override=room))
    for item, batch in ((ENGINE_SPEED[0], 1), (ENGINE_SPEED[1], many)):
        prompts = [prompt(size, context, seed) for seed in range(batch)]
        step_s = served.decoding_s(item, prompts, 4 if rig.dry else _TOKENS)
        read = 2.0 * size.step_weights + size.kv_bytes(batch * (context + _TOKENS))
        floor_s = rig.floor_s(names.COPY, read)
        ceiling = None if floor_s is None else batch / floor_s
        note = f"{step_s * 1e3:.2f} ms a step"
        rig.recorder.add(
            rate(item, batch / step_s, "tok/s", ceiling, NOTHING, dry=rig.dry, note=note)
        )
    served.prefill_s("warm-up", prompt(size, long, 99))
    seconds = min(served.prefill_s(str(i), prompt(size, long, i)) for i in range(2))
    floor_s = rig.floor_s(names.MATMUL, size.prefill_operations(long))
    ceiling = None if floor_s is None else long / floor_s
    note = f"{long} tokens in {seconds * 1e3:.0f} ms"
    rig.recorder.add(
        rate(ENGINE_SPEED[2], long / seconds, "tok/s", ceiling, NOTHING, dry=rig.dry, note=note)
    )
