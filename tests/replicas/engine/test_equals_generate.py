"""The embedded model in float32: the engine's tokens are those of transformers' `generate`."""

from __future__ import annotations

import pytest
import torch

from replicas.models.hf_adapter import PagedModel
from replicas.models.sources import EMBEDDED, resolve
from replicas.protocol import FinishReason, GenerateRequest
from tests.conftest import all_cores
from tests.replicas.engine.driver import Client, ask, make_engine, serve, tokens
from tests.replicas.engine.embedded_reference import (
    MAX_TOKENS,
    Reference,
    digest,
    generate,
    tokenise_prompts,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.all_cores,
    pytest.mark.timeout(600, func_only=True),
]

GROUPS = 8
"""Every eighth prompt is asked for four choices, other ones in each of the eight runs below."""


@pytest.fixture(scope="module")
def references(pytestconfig: pytest.Config) -> dict[str, Reference]:
    """From pytest's cache, where nothing that they depend on has changed since."""
    folder = resolve(EMBEDDED)
    prompts = tokenise_prompts(folder)
    key = f"quire/generate-{digest(folder, prompts)}"
    continuations = pytestconfig.cache.get(key, None)
    if continuations is None:
        torch.set_num_threads(all_cores())  # fixtures of a module come before those of a test
        continuations = generate(folder, prompts)
        pytestconfig.cache.set(key, continuations)
    return {name: Reference(tuple(ids), continuations[name]) for name, ids in prompts.items()}


def requests(references: dict[str, Reference], group: int) -> list[GenerateRequest]:
    return [
        ask(name, reference.prompt, MAX_TOKENS, n=4 if index % GROUPS == group else 1)
        for index, (name, reference) in enumerate(references.items())
    ]


def test_the_prompts_are_those_that_were_asked_for(references: dict[str, Reference]) -> None:
    lengths = [len(reference.prompt) for reference in references.values()]
    assert len(lengths) == 32
    assert {1, 15, 16, 17, 63, 64, 65, 128, 700} <= set(lengths)
    assert {len(reference.continuation) for reference in references.values()} == {MAX_TOKENS}


@pytest.mark.parametrize(
    ("chunk", "block_size", "group"),
    [(16, 16, 0), (16, 64, 2), (512, 16, 4), (512, 64, 6)],
    ids=str,
)
def test_greedy_tokens_are_those_of_generate(
    embedded: PagedModel,
    references: dict[str, Reference],
    chunk: int,
    block_size: int,
    group: int,
) -> None:
    engine = make_engine(
        embedded,
        block_size=block_size,
        num_gpu_blocks_override=8192 // block_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 64),
    )
    for warm in (False, True):
        before = engine.stats.prefix_cache_hits
        answers = serve(engine, *requests(references, group + warm))
        assert tokens(answers) == {key: references[key[0]].continuation for key in answers}
        assert len(answers) == 32 + 3 * len(references) // GROUPS
        if warm:
            assert engine.stats.prefix_cache_hits - before > 1000
    assert engine.stats.preemptions == 0


def test_sampled_choices_are_those_that_each_gives_alone(
    embedded: PagedModel, references: dict[str, Reference]
) -> None:
    """A choice runs alone where the others are aborted before the first step."""
    engine = make_engine(embedded, block_size=16, max_num_batched_tokens=512)
    prompts = [references["17 tokens"].prompt, references["65 tokens"].prompt]
    asked = [
        ask(str(index), prompt, 32, n=4, temperature=0.9, seed=1234 + index)
        for index, prompt in enumerate(prompts)
    ]
    together = serve(engine, *asked)
    assert len({tuple(answer.token_ids) for answer in together.values()}) == 8
    for request in asked:
        for choice in range(request.n):
            client = Client(engine)
            client.send(request)
            for other in set(range(request.n)) - {choice}:
                client.abort(request.request_id, other)
            key = (request.request_id, choice)
            assert client.run()[key].token_ids == together[key].token_ids


def test_an_answer_ends_where_the_model_ends_it(
    embedded: PagedModel, references: dict[str, Reference]
) -> None:
    (end,) = embedded.spec.eos_token_ids
    ending = {
        name: reference for name, reference in references.items() if end in reference.continuation
    }
    assert ending
    engine = make_engine(embedded)
    asked = [
        ask(name, reference.prompt, MAX_TOKENS, ignore_eos=False)
        for name, reference in ending.items()
    ]
    for (name, _), answer in serve(engine, *asked).items():
        expected = ending[name].continuation
        assert answer.token_ids == expected[: expected.index(end) + 1]
        assert (answer.finish_reason, answer.stop_token_id) == (FinishReason.STOP, end)
