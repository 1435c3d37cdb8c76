"""One cluster for all tests that do not need their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster_process import ClusterProcess, running

ENGINE = {"block_size": 16, "num_gpu_blocks_override": 128, "max_model_len": 4096}
"""A pool of 2,048 tokens under a longer context, so that both limits can be met."""
MAX_QUEUED = 48
REPLICAS = 3


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cluster records what it is asked."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, traces: Path) -> Iterator[ClusterProcess]:
    """Three replicas of the embedded model in float32, with a thread each."""
    with running(
        tmp_path_factory.mktemp("cluster"),
        model={"source": "embedded", "dtype": "float32"},
        engine=ENGINE,
        replicas={"count": REPLICAS, "threads": 1},
        limits={"max_queued_requests": MAX_QUEUED},
        recording={"folder": str(traces)},
    ) as it:
        it.wait_replicas(REPLICAS)
        yield it
