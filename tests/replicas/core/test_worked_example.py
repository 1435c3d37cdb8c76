"""The worked example of preemption by recompute, token by token.

A pool of 4 blocks of 4 tokens; A and B have prompts of 7 tokens. B is preempted after two
outputs: 9 tokens are known, 8 of them have KV.
"""

from __future__ import annotations

import pytest

from replicas.core.request import ChoiceState
from tests.replicas.core.harness import Replica, make_request


@pytest.mark.parametrize(("caching", "recomputed"), [(False, 9), (True, 5)])
def test_recompute(caching: bool, recomputed: int) -> None:
    replica = Replica(4, 4, caching=caching)
    replica.submit(
        make_request("A", range(7), max_tokens=6), make_request("B", range(50, 57), max_tokens=5)
    )
    replica.step()
    replica.step()
    victim = replica.choice("B")
    assert (victim.num_known_tokens, victim.num_computed_tokens) == (9, 8)
    delivered = list(replica.outputs["B", 0])
    assert len(delivered) == 2

    output = replica.step()
    assert output.num_preempted == 1
    assert victim.state is ChoiceState.WAITING
    # Freed tail first: A's third block takes the place of B's second, B's first survives.
    assert replica.scheduler.kv.pool.num_cached == (1 if caching else 0)

    while replica.scheduler.running and replica.scheduler.running[0].request.id == "A":
        assert [item.key[0] for item in replica.step().scheduled] == ["A"]
    resumed = replica.step()
    (item,) = resumed.scheduled
    assert item.key == ("B", 0)
    assert item.epoch == 1
    assert item.start == 9 - recomputed
    assert len(item.token_ids) == recomputed
    (draw,) = item.draws
    assert draw.output_index == 2, "known outputs are not sampled again"
    assert replica.outputs["B", 0][:2] == delivered
    assert len(replica.outputs["B", 0]) == 3

    replica.run()  # compares the streams with an undisturbed run
    receipt = replica.last["B", 0].receipt
    assert receipt is not None
    assert receipt.preemptions == 1
    # The ninth token had not been computed before.
    assert receipt.recomputed_tokens == recomputed - 1
    assert receipt.cached_tokens == 0
