"""Bad input to the real cluster: a clear error that names the field, and no harm done."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.cluster_process import MODEL, ClusterProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHAT = [{"role": "user", "content": "Hello"}]
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}

CASES: list[tuple[str, str, dict[str, Any], int, list[str]]] = [
    ("unknown model", "completions", {"model": "gpt-9"}, 404, ["gpt-9"]),
    ("prompt too long", "completions", {"prompt": [5] * 5000}, 400, ["5000", "4096"]),
    ("over the pool", "completions", {"prompt": [5] * 2048}, 400, ["2048", "pool"]),
    ("empty prompt", "completions", {"prompt": ""}, 400, ["prompt"]),
    ("no tokens", "completions", {"max_tokens": 0}, 400, ["max_tokens", "1"]),
    ("over the context", "completions", {"max_tokens": 5000}, 400, ["max_tokens", "4096"]),
    ("unknown token id", "completions", {"prompt": [49152]}, 400, ["49152", "prompt"]),
    ("wrong type", "completions", {"max_tokens": "many"}, 400, ["max_tokens"]),
    ("no choices", "completions", {"n": 0}, 400, ["n", "1"]),
    ("cold", "completions", {"temperature": -1}, 400, ["temperature", "0"]),
    (
        "unknown role",
        "chat/completions",
        {"messages": [{"role": "king", "content": "x"}]},
        400,
        ["king"],
    ),
    (
        "bias outside the vocabulary",
        "completions",
        {"logit_bias": {"49152": 1}},
        400,
        ["logit_bias"],
    ),
    ("unknown parameter", "completions", {"temprature": 1}, 400, ["temprature", "temperature"]),
]


@pytest.mark.parametrize(
    ("path", "change", "status", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_is_refused_by_name(
    cluster: ClusterProcess, path: str, change: dict[str, Any], status: int, words: list[str]
) -> None:
    chat = {"model": MODEL, "messages": CHAT, "max_tokens": 4}
    body = (COMPLETION if path == "completions" else chat) | change
    answer = httpx.post(f"{cluster.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    for word in words:
        assert word in error["message"]


def test_bad_json_is_refused(cluster: ClusterProcess) -> None:
    answer = httpx.post(f"{cluster.url}/v1/completions", content=b'{"model": ', timeout=60)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_bad_requests_disturb_no_stream(cluster: ClusterProcess) -> None:
    body = COMPLETION | {"stream": True, "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    def stream(between: bool) -> str:
        lines = []
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    lines.append(httpx.Response(200, text=line[6:]).json()["choices"][0]["text"])
                    if between:
                        bad = COMPLETION | {"logit_bias": {"AI": 1}}
                        refused = httpx.post(f"{cluster.url}/v1/completions", json=bad, timeout=60)
                        assert refused.status_code == 400
        return "".join(lines)

    assert stream(between=True) == stream(between=False)


def test_the_cluster_is_unharmed(cluster: ClusterProcess) -> None:
    answer = httpx.post(f"{cluster.url}/v1/completions", json=COMPLETION, timeout=60)
    assert answer.status_code == 200
    for snapshot in httpx.get(f"{cluster.url}/health").json()["replicas"].values():
        assert snapshot["used_blocks"] == 0
        assert snapshot["failure"] is None
