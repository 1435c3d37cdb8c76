"""What is kept of chains of blocks where pool and host tier are small: from the head on."""

from __future__ import annotations

from typing import Any

import pytest

from replicas.core.host_tier import HostTier
from replicas.core.request import Choice, ChoiceState, Request
from tests.replicas.core.builders import make_hasher, make_request
from tests.replicas.core.harness import BOTH_DEPTHS, Replica

pytestmark = BOTH_DEPTHS

SIZE = 4
PROMPTS = [range(1000 * i, 1000 * i + 41) for i in range(4)]
"""Each takes ten full blocks and one more; nothing in common."""
OTHER = b"another block"


def make_replica(num_blocks: int, host_slots: int, **options: Any) -> Replica:
    """Copies cost nothing, so that all is kept that can be."""
    return Replica(num_blocks, SIZE, host_slots=host_slots, copy_s=0.0, **options)


def host(replica: Replica) -> HostTier:
    assert replica.scheduler.kv.offloader is not None
    return replica.scheduler.kv.offloader.tier


def serve(replica: Replica, name: str, prompt: range, *, n: int = 1) -> Choice:
    """Prefill it, draw one token and let it end."""
    replica.submit(make_request(name, prompt, n=n, max_tokens=1))
    choice = replica.choice(name)
    replica.run()
    return choice


def crowded(host_slots: int) -> Replica:
    """Four chains have gone through a pool for one, and through a tier for some of them."""
    replica = make_replica(12, host_slots, spill_tokens=SIZE)
    for index, prompt in enumerate(PROMPTS):
        serve(replica, f"first {index}", prompt)
    return replica


def kept(replica: Replica, prompt: range) -> str:
    """A letter for each full block: on the Device, on the Host, or lost."""
    pool, tier = replica.scheduler.kv.pool, host(replica)
    return "".join(
        "D" if pool.lookup(digest) else "H" if tier.holds(digest) else "."
        for digest in make_hasher(SIZE).chain(prompt)
    )


@pytest.mark.parametrize("host_slots", range(2, 45, 3))
def test_what_is_left_of_a_spilled_chain_is_its_head(host_slots: int) -> None:
    replica = crowded(host_slots)
    chains = [kept(replica, prompt) for prompt in PROMPTS]
    assert all("." not in chain.rstrip(".") for chain in chains), chains
    assert host(replica).num_used >= min(host_slots, 20)


@pytest.mark.parametrize("host_slots", range(2, 45, 3))
def test_what_a_prompt_lacks_is_known_before_its_admission(host_slots: int) -> None:
    replica = crowded(host_slots)
    for name, prompt in zip("abcd", PROMPTS, strict=True):
        (choice,) = Request(make_request(name, prompt), rank=(0, 0), arrived_at=0.0).choices
        found = len(kept(replica, prompt).rstrip("."))
        assert replica.scheduler.kv.uncached_tokens(choice) == 41 - SIZE * found


@pytest.mark.parametrize("host_slots", range(11, 45, 3))
def test_room_for_a_request_is_not_made_of_what_it_is_about_to_restore(host_slots: int) -> None:
    replica = crowded(host_slots)
    for index, prompt in enumerate(PROMPTS):
        found = len(kept(replica, prompt).rstrip("."))
        choice = serve(replica, f"again {index}", prompt)
        assert choice.cached_tokens + choice.host_cached_tokens == SIZE * found


@pytest.mark.parametrize("caching", [True, False])
def test_of_a_chain_that_came_back_the_tail_goes_first(caching: bool) -> None:
    replica = make_replica(6, 2, caching=caching)
    replica.submit(make_request("A", range(11), max_tokens=9))
    replica.submit(make_request("B", range(50, 61), max_tokens=9))
    while not replica.scheduler.stats.preemptions:
        replica.step()
    victim = replica.choice("B")
    while victim.state is ChoiceState.WAITING or victim.arriving:
        replica.step()
    head, tail = victim.block_hashes[:2]
    assert host(replica).num_used == 2
    assert host(replica).reserve(OTHER) is not None
    assert (host(replica).holds(head), host(replica).holds(tail)) == (True, False)


def test_room_for_a_block_is_not_made_by_evicting_another_of_its_chain() -> None:
    """The tier is full, and has the chain's middle, which was wanted longest ago."""
    for copies in ("swap", "spill"):
        replica = make_replica(8, 3)
        replica.submit(make_request("A", range(13), max_tokens=2))
        replica.step()
        choice, tier = replica.choice("A"), host(replica)
        chain = choice.block_hashes[:3]
        for digest in (chain[1], OTHER, OTHER[::-1]):
            tier.reserve(digest)
            tier.keep(digest)
            tier.commit(digest)
        offloader = replica.scheduler.kv.offloader
        assert offloader is not None
        if copies == "swap":
            offloader.swap_out(choice, 3)
        else:
            offloader.spill(list(zip(choice.blocks, chain, strict=False))[::-1])
        assert [copy.digest for copy in offloader.take()] == [chain[2], chain[0]]


def test_a_request_saves_what_it_evicts_and_nothing_else() -> None:
    replica = make_replica(30, 60, spill_tokens=SIZE)
    prompt = range(1000, 1069)
    serve(replica, "warm", prompt)
    assert serve(replica, "again", prompt).cached_tokens == 68
    assert replica.scheduler.stats.spilled_blocks == 0, "there are blocks that hold nothing"
    rest = range(2000, 2051)
    serve(replica, "fills the rest", rest)
    before = set(host(replica).digests)
    longer = range(1000, 1076)  # its hits are to be evicted first, were they not hits
    assert serve(replica, "longer", longer).cached_tokens == 68
    saved = set(host(replica).digests) - before
    # One for its last block, and one for what it might have grown into.
    assert saved == set(make_hasher(SIZE).chain(rest)[-2:])


def test_who_finds_no_room_saves_nothing() -> None:
    replica = make_replica(20, 60, spill_tokens=SIZE)
    serve(replica, "warm", range(1000, 1041))
    replica.submit(make_request("runs", range(9), max_tokens=20))
    replica.step()
    replica.submit(make_request("large", range(2000, 2079), max_tokens=1))
    before = replica.scheduler.stats.spilled_blocks
    for _ in range(4):
        replica.step()
    assert replica.choice("large").state is ChoiceState.WAITING
    assert replica.scheduler.stats.spilled_blocks == before
    replica.run()


def test_what_forks_off_evicts_nothing_that_has_not_been_saved() -> None:
    replica = make_replica(20, 60, spill_tokens=SIZE, max_num_seqs=20)
    prompt = range(1000, 1069)
    serve(replica, "warm", prompt)
    replica.submit(make_request("n", range(8), n=12, max_tokens=3))
    while replica.has_work:
        replica.step()
        assert "." not in kept(replica, prompt)
    replica.check_idle()


def test_what_running_choices_grow_into_has_been_saved() -> None:
    replica = make_replica(20, 60, spill_tokens=SIZE)
    prompt = range(1000, 1069)
    serve(replica, "warm", prompt)
    replica.submit(*(make_request(f"r{i}", [i] * 3, max_tokens=12) for i in range(3)))
    while replica.has_work:
        replica.step()
        assert "." not in kept(replica, prompt)
    assert replica.scheduler.stats.spilled_blocks >= 6
    replica.check_idle()


def test_a_prefix_that_was_found_on_the_host_is_worth_keeping_again() -> None:
    replica = make_replica(12, 20)
    prompt = range(1000, 1018)
    for name in ("first", "second"):
        serve(replica, name, prompt)
    serve(replica, "large", range(100, 145))
    choice = serve(replica, "third", prompt)
    assert (choice.cached_tokens, choice.host_cached_tokens) == (0, 16)
    for digest in make_hasher(SIZE).chain(prompt):
        host(replica).discard(digest)
    serve(replica, "larger", range(200, 245))
    assert serve(replica, "fourth", prompt).host_cached_tokens == 16


def test_who_comes_back_is_no_sign_that_its_blocks_are_popular() -> None:
    replica = make_replica(4, 8)
    replica.submit(make_request("A", range(7), max_tokens=9))
    replica.submit(make_request("B", range(50, 57), max_tokens=9))
    replica.run()
    assert replica.scheduler.stats.restored_tokens > 0
    serve(replica, "large", range(100, 115))
    assert replica.scheduler.stats.spilled_blocks == 0


def test_saved_blocks_go_back_to_where_they_were_in_the_pool() -> None:
    """What is being evicted is still the first to go when it has been written."""
    replica = make_replica(12, 60, spill_tokens=SIZE)
    serve(replica, "first", PROMPTS[0][:21])
    serve(replica, "second", PROMPTS[1][:21])
    replica.submit(make_request("r", [1] * 3, max_tokens=12))
    replica.run()
    assert kept(replica, PROMPTS[0][:21]) == "DDDHH"
    assert kept(replica, PROMPTS[1][:21]) == "DDDDD"
