from __future__ import annotations

import pytest

from replicas.core.kv_manager import KVManager
from replicas.core.request import Choice, Request
from replicas.protocol import TokenLogprobs
from tests.replicas.core.builders import make_kv, make_request, with_prompt_logprobs

PROMPT = range(100, 120)


def make_choices(name: str, prompt: range, *, n: int = 1, salt: str = "") -> list[Choice]:
    data = make_request(name, prompt, n=n, salt=salt)
    return Request(data, rank=(0, 1), arrived_at=0.0).choices


def make_choice(name: str, prompt: range, *, salt: str = "") -> Choice:
    return make_choices(name, prompt, salt=salt)[0]


def compute(kv: KVManager, choice: Choice, count: int) -> None:
    """Grow by `count` tokens as a step does."""
    kv.grow(choice, count)
    choice.num_computed_tokens += count
    kv.publish(choice)


def cache(kv: KVManager, prompt: range, salt: str = "") -> list[int]:
    """Leave the full blocks of `prompt` cached; returns its table."""
    choice = make_choice("warm", prompt, salt=salt)
    assert kv.admit(choice, 0)
    compute(kv, choice, len(prompt))
    blocks = choice.blocks
    kv.release(choice)
    return blocks


def test_admission_gives_room_for_the_whole_known_history() -> None:
    kv, choice = make_kv(8, 4), make_choice("a", PROMPT[:10])
    choice.output_token_ids += [1, 2, 3]
    assert kv.admit(choice, 0)
    assert len(choice.blocks) == kv.blocks_for(13) == 4
    assert choice.num_computed_tokens == 0


@pytest.mark.parametrize(("reserve", "admitted"), [(5, True), (6, False)])
def test_admission_leaves_the_reserve_free(reserve: int, admitted: bool) -> None:
    kv, choice = make_kv(8, 4), make_choice("a", PROMPT[:12])
    assert kv.admit(choice, reserve) is admitted
    assert kv.pool.num_free == (5 if admitted else 8)


def test_cached_hits_do_not_count_as_free_room() -> None:
    kv = make_kv(4, 4)
    cache(kv, PROMPT[:12])
    choice = make_choice("b", PROMPT[:20])  # 3 of the 4 free blocks are its own hits
    assert not kv.admit(choice, 0)
    assert choice.blocks == []
    assert (kv.pool.num_free, kv.pool.num_cached) == (4, 3)
    kv.check_integrity([])


def test_admission_never_evicts_its_own_hits() -> None:
    kv = make_kv(4, 4)
    blocks = cache(kv, PROMPT[:12])
    cache(kv, range(4))
    choice = make_choice("b", PROMPT[:16])
    assert kv.admit(choice, 0)
    assert choice.blocks[:3] == blocks
    assert choice.num_computed_tokens == 12


@pytest.mark.parametrize(
    ("known", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)]
)
def test_hits_leave_at_least_one_token_to_compute(known: int, hits: int) -> None:
    kv = make_kv(20, 4)
    cache(kv, PROMPT[:12])
    choice = make_choice("b", PROMPT[:known])
    assert kv.admit(choice, 0)
    assert choice.num_computed_tokens == 4 * hits


def test_hits_end_at_the_first_block_that_is_gone() -> None:
    kv = make_kv(3, 4)
    cache(kv, PROMPT[:12])
    kv.pool.release(*kv.pool.allocate(1))  # evicts one
    choice = make_choice("b", PROMPT[:12])
    assert kv.admit(choice, 0)
    assert choice.num_computed_tokens == 8, "the tail goes first"


def test_other_salts_and_no_caching_find_nothing() -> None:
    kv = make_kv(20, 4)
    cache(kv, PROMPT[:12], salt="tenant")
    choice = make_choice("b", PROMPT[:12])
    assert kv.admit(choice, 0)
    assert choice.num_computed_tokens == 0

    kv = make_kv(20, 4, caching=False)
    cache(kv, PROMPT[:12])
    assert kv.pool.num_cached == 0
    assert kv.admit(choice := make_choice("c", PROMPT[:12]), 0)
    assert choice.num_computed_tokens == 0


def test_a_block_in_use_is_shared_at_once() -> None:
    kv = make_kv(6, 4)
    first, second = make_choice("a", PROMPT[:10]), make_choice("b", PROMPT[:9])
    assert kv.admit(first, 0)
    compute(kv, first, 10)
    assert kv.admit(second, 0)
    assert second.blocks[:2] == first.blocks[:2]
    kv.release(first)
    assert [kv.pool.references(b) for b in second.blocks] == [1, 1, 1]
    kv.check_integrity([second])


def test_outputs_are_found_as_well_as_prompts() -> None:
    kv, choice = make_kv(8, 4), make_choice("a", PROMPT[:6])
    assert kv.admit(choice, 0)
    compute(kv, choice, 6)
    for token in (1, 2, 3):
        choice.output_token_ids.append(token)
        compute(kv, choice, 1)
    kv.release(choice)
    assert kv.admit(choice, 0)
    assert choice.num_computed_tokens == 8


def test_release_is_idempotent() -> None:
    kv, choice = make_kv(4, 4), make_choice("a", PROMPT[:5])
    assert kv.admit(choice, 0)
    kv.release(choice)
    kv.release(choice)
    kv.check_integrity([])
    assert kv.pool.num_free == 4


def test_growing_takes_a_block_only_at_a_border() -> None:
    kv, choice = make_kv(4, 4), make_choice("a", PROMPT[:6])
    assert kv.admit(choice, 0)
    compute(kv, choice, 6)
    missing = []
    for token in range(4):
        choice.output_token_ids.append(token)
        missing.append(kv.missing_blocks(choice, 1))
        compute(kv, choice, 1)
    assert missing == [0, 0, 1, 0]


def test_a_shared_partial_block_is_copied_by_all_but_the_last_writer() -> None:
    kv = make_kv(8, 4)
    parent, child = make_choices("a", PROMPT[:6], n=2)
    assert kv.admit(parent, 0)
    compute(kv, parent, 6)
    kv.fork(parent, child)
    assert child.blocks == parent.blocks
    shared = parent.blocks[1]
    for choice in (parent, child):
        choice.output_token_ids.append(choice.index)
    assert kv.missing_blocks(parent, 1) == 1
    assert kv.grow(parent, 1) == (shared, parent.blocks[1])
    assert parent.blocks[1] != shared
    assert kv.missing_blocks(child, 1) == 0
    assert kv.grow(child, 1) is None
    assert child.blocks[1] == shared
    kv.check_integrity([parent, child])


def test_full_shared_blocks_are_not_copied() -> None:
    kv = make_kv(8, 4)
    parent, child = make_choices("a", PROMPT[:8], n=2)
    assert kv.admit(parent, 0)
    compute(kv, parent, 8)
    kv.fork(parent, child)
    for choice in (parent, child):
        choice.output_token_ids.append(1)
        assert kv.missing_blocks(choice, 1) == 1
        assert kv.grow(choice, 1) is None
    assert parent.blocks[:2] == child.blocks[:2]
    assert parent.blocks[2] != child.blocks[2]


def test_prompt_logprobs_take_no_first_time_hit() -> None:
    kv = make_kv(20, 4)
    cache(kv, PROMPT[:12])
    data = with_prompt_logprobs(make_request("b", PROMPT[:13], n=2))
    first, second = Request(data, rank=(0, 1), arrived_at=0.0).choices
    assert kv.admit(first, 0)
    assert first.num_computed_tokens == 0
    compute(kv, first, 13)  # its blocks hold what is cached already: they stay private
    kv.release(first)

    # A resumed one takes what it has the logprobs of; its twin reports none and takes all.
    entry = TokenLogprobs(-1.0, 1, ())
    for known, hits in ((0, 0), (7, 4), (8, 8), (11, 8), (12, 12)):
        first.prompt_logprobs = [entry] * known
        assert kv.admit(first, 0)
        assert first.num_computed_tokens == hits
        kv.release(first)
    assert kv.admit(second, 0)
    assert second.num_computed_tokens == 12


def test_complete_prompt_logprobs_leave_outputs_to_be_found() -> None:
    kv = make_kv(8, 4)
    data = with_prompt_logprobs(make_request("a", PROMPT[:5]))
    (choice,) = Request(data, rank=(0, 1), arrived_at=0.0).choices
    assert kv.admit(choice, 0)
    compute(kv, choice, 5)
    choice.prompt_logprobs = [TokenLogprobs(-1.0, 1, ())] * 4
    for token in range(5):
        choice.output_token_ids.append(token)
        compute(kv, choice, 1)
    kv.release(choice)
    assert kv.admit(choice, 0)
    assert choice.num_computed_tokens == 8
