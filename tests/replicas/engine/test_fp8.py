"""KV in 8-bit floats: stored and read with the same scales wherever it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from replicas.core.block_hash import BlockHasher
from replicas.engine.engine import Engine
from replicas.engine.kv_pool import KVPool
from replicas.host_store import InProcessStore
from replicas.models.kv_scales import KVScaleError
from tests.replicas.engine.driver import (
    Answers,
    ask,
    make_engine,
    serve,
    tokens,
)
from tests.replicas.engine.fp8_models import Fp8Model, scaled_copy, scales_of_layers
from tests.replicas.engine.slow_host import cheap
from tests.replicas.engine.test_preemption import SAMPLED, tight
from tests.replicas.engine.tiny_models import Twin, random_prompt

K_SCALE, V_SCALE = 0.02, 0.05
LOUD = 200.0
FLIP = 0.03
"""Where float32 noise falls on the border between two e4m3 numbers, a value that is computed again
may be rounded the other way."""
SHOW = {"logprobs": 0, "prompt_logprobs": 0}


@pytest.fixture(scope="module", params=[1.0, LOUD])
def model(request: pytest.FixtureRequest, llama: Twin, tmp_path_factory: Any) -> Fp8Model:
    """O25: with `LOUD` keys and values all but the smallest are beyond what e4m3 holds without a
    scale."""
    gain = request.param
    scales = (K_SCALE * gain, V_SCALE * gain)
    assert llama.paged.folder is not None
    folder = tmp_path_factory.mktemp("fp8") / "model"
    scaled_copy(llama.paged.folder, folder, gain=gain, extra=scales_of_layers(*scales))
    return Fp8Model.load(folder, *scales)


def same_but_for_flips(actual: Answers, expected: Answers) -> None:
    """Equal tokens, and logprobs equal but for `FLIP`."""
    assert tokens(actual) == tokens(expected)
    pairs = [
        (ours.logprob, theirs.logprob)
        for key, answer in actual.items()
        for ours, theirs in zip(answer.logprobs, expected[key].logprobs, strict=True)
    ]
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    assert median(differences) < 1e-5
    assert max(differences) < FLIP


def fp8_engine(model: Fp8Model, **config: Any) -> Engine:
    return make_engine(model.paged, kv_cache_dtype="fp8", **config)


def check(model: Fp8Model, prompt: Sequence[int], answers: Answers) -> None:
    """What each choice was told is what a model gives that rounds keys and values to e4m3 and is
    exact otherwise; rounding is far from harmless here, so that nothing else would do."""
    for answer in answers.values():
        errors = model.errors(prompt, answer)
        assert median(errors) < 1e-5
        assert max(errors) < FLIP
        assert fmean(model.errors(prompt, answer, rounded=False)) > 0.03


@pytest.mark.parametrize("length", [5, 40, 90])
@pytest.mark.parametrize("chunk", [16, 256])
def test_prefill_and_decode_are_as_good_as_e4m3_allows(
    model: Fp8Model, length: int, chunk: int
) -> None:
    """O25: prefill at once or in chunks of 16, then decode."""
    prompt = random_prompt(length)
    engine = fp8_engine(model, max_num_batched_tokens=chunk)
    check(model, prompt, serve(engine, ask("a", prompt, 20, **SHOW)))


def test_a_prefix_hit_reads_what_another_wrote(model: Fp8Model) -> None:
    """O25: after a prefix hit."""
    engine, prompt = fp8_engine(model), random_prompt(45)
    serve(engine, ask("first", (*prompt[:42], 9), 1))
    again = serve(engine, ask("second", prompt, 16, logprobs=0))
    assert again["second", 0].took.cached_tokens == 40
    check(model, prompt, again)


def test_copies_of_shared_blocks_keep_their_values(
    model: Fp8Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O25: after copy-on-write of the prompt's partial block."""
    copied: list[tuple[int, int]] = []
    copy = KVPool.copy

    def spy(pool: KVPool, pairs: Sequence[tuple[int, int]]) -> None:
        copied.extend(pairs)
        copy(pool, pairs)

    monkeypatch.setattr(KVPool, "copy", spy)
    prompt = random_prompt(21)
    answers = serve(fp8_engine(model), ask("a", prompt, 16, n=4, logprobs=0, **SAMPLED))
    assert len(copied) >= 3
    assert len({tuple(ids) for ids in tokens(answers).values()}) == 4
    check(model, prompt, answers)


def test_what_comes_back_from_the_host_is_what_went(model: Fp8Model) -> None:
    """O25: after a swap out and in."""
    prompts = {str(i): random_prompt(18 + i, i) for i in range(4)}
    engine = tight_fp8(model, 20, "swap")
    answers = serve(engine, *(ask(name, p, 24, logprobs=0) for name, p in prompts.items()))
    assert engine.stats.swaps > 0
    assert engine.stats.restored_tokens > 0
    for (name, choice), answer in answers.items():
        check(model, prompts[name], {(name, choice): answer})


def tight_fp8(model: Fp8Model | Twin, num_blocks: int, mode: str, **config: Any) -> Engine:
    twin: Any = model  # `tight` takes whatever has a paged model
    return tight(twin, num_blocks, mode, kv_cache_dtype="fp8_e4m3", **config)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_run_equals_the_undisturbed_one(llama: Twin, mode: str, caching: bool) -> None:
    requests = [
        ask(str(i), random_prompt(5 + i, i), 24, n=1 + i % 3, logprobs=0, **SAMPLED)
        for i in range(8)
    ]
    undisturbed = serve(make_engine(llama.paged, kv_cache_dtype="fp8"), *requests)
    engine = tight_fp8(llama, 20, mode, enable_prefix_caching=caching)
    same_but_for_flips(serve(engine, *requests), undisturbed)
    assert engine.stats.preemptions >= 5
    assert (engine.stats.restored_tokens > 0) == (mode == "swap")


def test_prefixes_from_the_host_tier_equal_the_first_run(llama: Twin) -> None:
    engine = make_engine(
        llama.paged,
        kv_cache_dtype="fp8",
        num_gpu_blocks_override=30,
        host_blocks=100,
        spill_prefix_tokens=100,
        make_copier=cheap,
    )
    requests = [ask(str(i), random_prompt(160, i), 4, logprobs=1) for i in range(3)]
    first = [serve(engine, request) for request in requests]
    for request, before in zip(requests, first, strict=True):
        again = serve(engine, request)
        same_but_for_flips(again, before)
        assert again[request.request_id, 0].took.host_cached_tokens > 0


def test_a_token_takes_half_the_bytes_of_bfloat16_and_the_pool_holds_twice_the_blocks(
    llama: Twin,
) -> None:
    def info(dtype: str) -> Any:
        config = {"kv_cache_dtype": dtype, "num_gpu_blocks_override": None}
        return make_engine(llama.paged, kv_cache_memory_gib=0.015625, **config).info

    half, byte = info("bfloat16"), info("fp8")
    assert byte.block_bytes * 2 == half.block_bytes
    # The reserved block is not among them.
    assert byte.num_blocks + 1 == 2 * (half.num_blocks + 1)
    assert half.num_blocks > 100


def test_what_is_stored_is_named_after_its_scales(llama: Twin, tmp_path: Path) -> None:
    """O25: prefix keys, and the identity of host memory, differ where dtype or scales do."""
    assert llama.paged.folder is not None
    fingerprint = llama.paged.spec.fingerprint
    seen: dict[str, tuple[Any, bytes, frozenset[bytes]]] = {}

    def run(name: str, paged: Any, **config: Any) -> None:
        identities: list[bytes] = []

        def open_store(identity: bytes, block_bytes: int) -> InProcessStore:
            identities.append(identity)
            return InProcessStore(4, block_bytes)

        engine = make_engine(paged, open_store=open_store, swap_space=1.0, **config)
        serve(engine, ask("a", random_prompt(40), 1))
        seen[name] = (engine.info, identities[0], frozenset(engine.take_events().stored))

    models = {}
    for name, scale in (("one", 0.02), ("same", 0.02), ("other", 0.020001)):
        extra = scales_of_layers(scale, V_SCALE)
        folder = scaled_copy(llama.paged.folder, tmp_path / name, extra=extra)
        models[name] = paged = Fp8Model.load(folder, scale, V_SCALE).paged
        # Of the same weights: only the scales are to tell.
        paged.spec = replace(paged.spec, fingerprint=fingerprint)
        run(name, paged, kv_cache_dtype="fp8")
    run("bfloat16", models["one"], kv_cache_dtype="bfloat16")
    run("float32", models["one"])
    run("calibrated", llama.paged, kv_cache_dtype="fp8")

    assert seen["one"] == seen["same"]
    names = ("one", "other", "bfloat16", "float32", "calibrated")
    assert len({seen[name][1] for name in names}) == len(names)
    digests = [digest for name in names for digest in seen[name][2]]
    assert len(set(digests)) == len(digests) == 5 * len(names)
    assert [seen[name][0].kv_dtype for name in names] == ["fp8_e4m3"] * 2 + [
        "bfloat16",
        "float32",
        "fp8_e4m3",
    ]
    assert [bool(seen[name][0].kv_scales) for name in names] == [True, True, False, False, True]
    for name in names:  # and a router, which knows the info alone, computes the same
        info = seen[name][0]
        hasher = BlockHasher(
            fingerprint=info.fingerprint,
            kv_dtype=info.kv_dtype,
            kv_scales=info.kv_scales,
            block_size=info.block_size,
        )
        assert frozenset(hasher.chain(random_prompt(40))) == seen[name][2]


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_scales_of_the_checkpoint_matter_to_fp8_alone(
    llama: Twin, tmp_path: Path, dtype: str
) -> None:
    assert llama.paged.folder is not None
    extra = scales_of_layers(-1.0, V_SCALE)
    folder = scaled_copy(llama.paged.folder, tmp_path / "bad", extra=extra)
    paged = Fp8Model.load(folder, 1.0, 1.0).paged
    make_engine(paged, kv_cache_dtype=dtype)
    with pytest.raises(KVScaleError, match="k_scale of layer 0, kv head 0 is -1"):
        make_engine(paged, kv_cache_dtype="fp8")
