"""What an ingress makes of its settings."""

from __future__ import annotations

from cluster.config import LimitsConfig
from cluster.ingress import http_limits
from cluster.openai.service import Limits


def test_the_operators_limits_reach_the_http_front() -> None:
    config = LimitsConfig(
        max_body_mib=0.5, max_batch_prompts=3, max_choices=7, request_timeout_s=90.0
    )
    assert http_limits(config) == Limits(
        max_body_bytes=2**19, max_prompts=3, max_choices=7, request_timeout_s=90.0
    )
    assert http_limits(LimitsConfig()).request_timeout_s is None
