"""Random models of many architectures equal transformers' `generate`, through the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replicas.engine.driver import ask, make_engine, serve, tokens
from tests.replicas.engine.tiny_models import CONFIGS, WINDOW, Twin, make_twin, random_prompt

MAX_TOKENS = 16
PROMPTS = {str(length): random_prompt(length) for length in (1, 16, 17, 40, 75)}


@pytest.fixture(scope="module", params=list(CONFIGS))
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def expected(twin: Twin) -> dict[str, list[int]]:
    return {name: twin.generate(prompt, MAX_TOKENS) for name, prompt in PROMPTS.items()}


def test_the_reference_depends_on_its_context(twin: Twin, expected: dict[str, list[int]]) -> None:
    """Else a wrong attention would pass for a right one."""
    prompt = PROMPTS["40"]
    last = twin.logits(prompt)[-1]
    for distance in (2, WINDOW // 2, WINDOW, 2 * WINDOW - 2):
        changed = list(prompt)
        changed[-distance] = 3
        assert float((twin.logits(changed)[-1] - last).abs().max()) > 0.03
    assert len({token for output in expected.values() for token in output}) > MAX_TOKENS


@pytest.mark.parametrize("block_size", [8, 16])
def test_equals_generate_in_chunks_and_with_prefix_hits(
    twin: Twin, expected: dict[str, list[int]], block_size: int
) -> None:
    engine = make_engine(twin.paged, block_size=block_size)
    requests = [ask(name, prompt, MAX_TOKENS) for name, prompt in PROMPTS.items()]
    cold = serve(engine, *requests)
    assert {name: cold[name, 0].token_ids for name in PROMPTS} == expected
    assert engine.stats.prefix_cache_hits == 0

    warm = serve(engine, *requests)
    assert {name: warm[name, 0].token_ids for name in PROMPTS} == expected
    for name, prompt in PROMPTS.items():
        hits = (len(prompt) - 1) // block_size * block_size
        assert warm[name, 0].took.cached_tokens == hits
    assert engine.stats.preemptions == 0


def test_equals_generate_under_preemption(twin: Twin, expected: dict[str, list[int]]) -> None:
    engine = make_engine(
        twin.paged, block_size=4, num_gpu_blocks_override=24, min_progress_tokens=2
    )
    requests = [ask(name, prompt, MAX_TOKENS, n=3) for name, prompt in PROMPTS.items()]
    answers = serve(engine, *reversed(requests))
    assert tokens(answers) == {(name, index): expected[name] for name, index in answers}
    assert engine.stats.preemptions >= 10
    assert engine.stats.recomputed_tokens > 0


@pytest.mark.parametrize("window", [1, 8, 16, 17])
def test_a_query_sees_exactly_its_window(tmp_path: Path, window: int) -> None:
    """O24: at every position, in chunks, in decode, after a hit and after a preemption."""
    twin = make_twin(tmp_path, "mistral", sliding_window=window)
    prompt = random_prompt(40)
    engine = make_engine(twin.paged, max_num_batched_tokens=5, max_num_seqs=4)
    for name in ("cold", "hit"):
        scored = {"prompt_logprobs": 0} if name == "cold" else {}
        answer = serve(engine, ask(name, prompt, 20, logprobs=0, **scored))[name, 0]
        twin.check_logprobs(prompt, answer)
    assert answer.took.cached_tokens == 32

    small = make_engine(
        twin.paged, num_gpu_blocks_override=10, max_num_batched_tokens=5, max_num_seqs=4
    )
    first = ask("first", random_prompt(10), 40)
    disturbed = ask("disturbed", prompt, 20, logprobs=0, prompt_logprobs=0)
    preempted = serve(small, first, disturbed)["disturbed", 0]
    assert preempted.took.preemptions > 0
    twin.check_logprobs(prompt, preempted)
