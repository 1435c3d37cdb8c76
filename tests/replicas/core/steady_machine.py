"""A scheduler on a machine of constant rates, on which only tokens and copies take time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replicas.core.block_transfer import EndedCopy, Restore, Save
from replicas.core.cost_model import CostModel, Rates
from replicas.core.preemption.last_admitted import LastAdmitted
from replicas.core.preemption.preempter import PreemptionMode
from replicas.core.scheduler import Scheduler, SchedulerConfig
from replicas.core.scheduler_output import ResumeCost, SampledToken, StepResult
from replicas.core.scheduler_stats import SchedulerStats
from replicas.core.updater import StepUpdater
from replicas.protocol import GenerateRequest
from tests.replicas.core.builders import make_kv

GIB = 2**30
PREFILL_TOKENS_PER_S = 2000.0
TOKEN_BYTES = 23_040
"""Of KV: 30 layers x (K, V) x 3 heads x 64 x 2 bytes, the embedded model in bfloat16."""
BLOCK = 64
BLOCK_BYTES = BLOCK * TOKEN_BYTES


class SteadyMachine:
    """Room for six choices of `context` tokens. It believes that copies run at `guess` GiB/s
    until it learns that they run at `gib_per_s`."""

    def __init__(
        self,
        context: int,
        gib_per_s: float,
        *,
        guess: float | None = None,
        mode: PreemptionMode = PreemptionMode.AUTO,
        caching: bool = False,
        spill_tokens: int | None = None,
        fails: Callable[[Save | Restore], bool] = lambda _: False,
    ) -> None:
        rate = (guess or gib_per_s) * GIB
        kv = make_kv(
            6 * (context // BLOCK + 1),
            BLOCK,
            caching=caching,
            host_slots=10_000,
            spill_tokens=spill_tokens,
            costs=CostModel(BLOCK_BYTES, Rates(PREFILL_TOKENS_PER_S, rate, rate)),
        )
        config = SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=10_000,
            min_progress_tokens=1,
            preemption_mode=mode,
            look_ahead=False,
            watermark=0.0,
            hysteresis=0.0,
        )
        self.scheduler = Scheduler(config, kv, LastAdmitted())
        self.copies: list[Save | Restore] = []
        self.resumed: list[ResumeCost] = []
        self.now = 0.0
        """Seconds that steps and copies have taken, one after the other."""
        self._updater = StepUpdater(self.scheduler, ())
        self._copy_s = BLOCK_BYTES / (gib_per_s * GIB)
        self._fails = fails

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats

    @property
    def swap_share(self) -> float:
        """Of all preemptions."""
        return self.stats.swaps / self.stats.preemptions

    def serve(self, requests: Sequence[GenerateRequest]) -> None:
        """All at once, to their ends."""
        for request in requests:
            self.scheduler.add(request, self.now)
        while self.scheduler.has_work:
            output = self.scheduler.schedule(self.now)
            drawn = {draw.key: SampledToken(1) for item in output.scheduled for draw in item.draws}
            seconds = output.num_tokens / PREFILL_TOKENS_PER_S
            self.now += seconds + self._copy_s * len(output.host_copies)
            outcome = self._updater.update(output, StepResult(drawn, {}, seconds), self.now)
            self.resumed += outcome.resumed
            self.copies += output.host_copies
            ended = [EndedCopy(c, not self._fails(c), self._copy_s) for c in output.host_copies]
            self.scheduler.end_copies(ended, self.now)

    def ratios(self, *, swapped: bool) -> list[float]:
        """Predicted over actual seconds of each preemption that ran its course."""
        return [
            cost.predicted_s / cost.actual_s
            for cost in self.resumed
            if cost.caught_up and cost.swapped is swapped and cost.actual_s > 0
        ]
