"""The worked example of preemption, by recompute and by swap, token by token.

A pool of 4 blocks of 4 tokens; A and B have prompts of 7 tokens. B is preempted after two
outputs: 9 tokens are known, 8 of them have KV.
"""

from __future__ import annotations

import pytest

from replicas.core.block_transfer import Restore, Save
from replicas.core.preemption.preempter import PreemptionMode
from replicas.core.request import ChoiceState
from tests.replicas.core.builders import make_request
from tests.replicas.core.harness import Replica


@pytest.mark.parametrize(
    ("mode", "caching", "restored_blocks", "processed"),
    [
        (PreemptionMode.RECOMPUTE, False, 0, 9),
        (PreemptionMode.RECOMPUTE, True, 0, 5),
        (PreemptionMode.SWAP, False, 2, 1),
        (PreemptionMode.SWAP, True, 1, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("copy_steps", [0, 3])
def test_a_preemption(
    mode: PreemptionMode, caching: bool, restored_blocks: int, processed: int, copy_steps: int
) -> None:
    replica = Replica(4, 4, caching=caching, mode=mode, host_slots=8, copy_steps=copy_steps)
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
    saves = 2 if mode is PreemptionMode.SWAP else 0
    assert len(output.host_copies) == saves
    # A waits for as long as the copies read what it is to get.
    while replica.scheduler.num_copies:
        assert len(replica.outputs["A", 0]) == 2
        replica.step()
    replica.step()
    # Freed tail first: A's third block takes the place of B's second, B's first survives.
    assert replica.scheduler.kv.pool.num_cached == (1 if caching else 0)

    copies: list[Save | Restore] = []
    while victim.state is ChoiceState.WAITING:
        output = replica.step()
        copies += output.host_copies
        assert [item.key[0] for item in output.scheduled if item.key[0] == "A"] in ([], ["A"])
    resumed = output
    while not resumed.scheduled:
        resumed = replica.step()
    assert [type(copy) for copy in copies] == [Restore] * restored_blocks
    (item,) = resumed.scheduled
    assert item.key == ("B", 0)
    assert item.epoch == 3, "of the third admission"
    assert item.start == 9 - processed
    assert len(item.token_ids) == processed
    (draw,) = item.draws
    assert draw.output_index == 2, "known outputs are not sampled again"
    assert replica.outputs["B", 0][:2] == delivered
    assert len(replica.outputs["B", 0]) == 3

    replica.run()  # compares the streams with an undisturbed run
    receipt = replica.last["B", 0].receipt
    assert receipt is not None
    assert (receipt.preemptions, receipt.swaps) == (1, int(mode is PreemptionMode.SWAP))
    # The ninth token had not been computed before.
    assert receipt.recomputed_tokens == processed - 1
    assert receipt.restored_tokens == 4 * restored_blocks
    assert receipt.cached_tokens == receipt.host_cached_tokens == 0
