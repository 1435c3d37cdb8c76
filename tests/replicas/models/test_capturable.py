"""Forward passes as CUDA graphs hold them: nothing of them is on the host or waits for the device.

On the meta device nothing has a value, so that whatever asks for one fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replicas.models.hf_adapter import AttentionCall, run
from tests.replicas.models.test_fusion import FUSED, TOKENS, fused

OTHERS = {
    "gpt2": {"pad_token_id": None},
    "glm4": {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48},
}
"""Attention stays as transformers has it."""


class OnTheHost(TorchDispatchMode):
    """Notes the operators that take or give tensors in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self.seen.add(str(op))
        return result


class Attends:
    """Gives what has the right shape."""

    def attend(self, call: AttentionCall) -> Tensor:
        return call.query.new_empty(*call.query.shape[:2], call.value.shape[2])


@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_a_forward_pass_needs_nothing_of_the_host(name: str, tiny: Any) -> None:
    model, _ = fused(tiny, name, **{**FUSED, **OTHERS}[name])
    model.to("meta", torch.bfloat16)  # as on a GPU, where experts take no other type
    tokens = torch.tensor(TOKENS[:4], device="meta")
    rows = torch.arange(3, device="meta")
    out = torch.empty(3, 101, device="meta")
    with torch.inference_mode(), OnTheHost() as host:
        run(model, tokens, tokens, Attends(), rows, out)
    assert not host.seen


def test_what_is_on_the_host_is_noted() -> None:
    with OnTheHost() as host:
        torch.ones(3).to("meta") + torch.ones(3, device="meta")
    assert host.seen == {"aten.ones.default", "aten._to_copy.default"}
