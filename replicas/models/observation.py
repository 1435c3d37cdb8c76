"""What modules of a model are given and give, seen in one forward pass of a few tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.models.attention_recorder import AttentionRecorder
from replicas.models.hf_adapter import AttentionCall, run

_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Observed:
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    attention: tuple[AttentionCall, ...]
    """The calls of attention that it made."""

    def repeat(self, module: nn.Module) -> tuple[Any, tuple[AttentionCall, ...]]:
        """(output, calls of attention) of another module that is given the same."""
        recorder = AttentionRecorder()
        output = module(*self.args, **self.kwargs | {"quire_attention": recorder})
        return output, tuple(recorder.calls)


def observe(model: PreTrainedModel, names: Iterable[str]) -> dict[str, Observed]:
    """What the modules of these names do, as far as they are called once.

    The tokens stand at positions from the first to the model's last, so that what depends on
    positions shows.
    """
    recorder = AttentionRecorder()
    watches = {name: _Watch(recorder) for name in names}
    handles = []
    for name, watch in watches.items():
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(watch.begin))
        handles.append(module.register_forward_hook(watch.end, with_kwargs=True))
    try:
        positions = _positions(model)
        run(model, positions % model.config.get_text_config().vocab_size, positions, recorder)
    finally:
        for handle in handles:
            handle.remove()
    return {name: watch.seen[0] for name, watch in watches.items() if len(watch.seen) == 1}


class _Watch:
    """Hooks of one module."""

    def __init__(self, recorder: AttentionRecorder) -> None:
        self._recorder = recorder
        self._calls_before = 0
        self.seen: list[Observed] = []

    def begin(self, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        self._calls_before = len(self._recorder.calls)

    def end(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        calls = tuple(self._recorder.calls[self._calls_before :])
        self.seen.append(Observed(args, kwargs, output, calls))


def _positions(model: PreTrainedModel) -> Tensor:
    last = model.config.get_text_config().max_position_embeddings - 1
    return torch.linspace(0, last, _TOKENS, device=model.device).long()
