"""A Serve config is taken whole or refused with every mistake named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.config_errors import ConfigError
from cluster.serve_config import load_serve_config, parse_serve_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))

VALID = """\
http_options:
  port: 8000
applications:
  - name: quire
    route_prefix: /
    import_path: cluster.app:build
    runtime_env: {env_vars: {A: b}}
    args:
      model: {source: embedded}
      engine:
        block_size: 16
      replicas: {count: 2}
    deployments:
      - name: Replica
        ray_actor_options: {num_cpus: 1}
        autoscaling_config: {min_replicas: 1, max_replicas: 2}
"""


def _problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_serve_config(text, "cluster.yaml")
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def _edited(old: str, new: str) -> str:
    assert VALID.count(old) == 1
    return VALID.replace(old, new)


def test_the_document_and_the_cluster_come_back() -> None:
    document, config = parse_serve_config(VALID, "cluster.yaml")
    assert document == yaml.safe_load(VALID)
    assert config.engine.block_size == 16
    assert config.replicas.count == 2


def test_args_may_be_left_out() -> None:
    _, config = parse_serve_config("applications: [{import_path: 'cluster.app:build'}]", "x")
    assert config.model.source == "embedded"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configs_we_ship_are_valid(path: Path) -> None:
    document, _ = load_serve_config(path)
    assert ServeDeploySchema.model_validate(document).applications[0].name == "quire"


# What stands in VALID, what stands there instead, the dotted place and what is said of it.
MISTAKES = """
block_size: 16 | max_model_length: 16 | args.engine.max_model_length
    | unknown key; the nearest known key is max_model_len
block_size: 16 | swap_gb: -1 | args.engine.swap_gb
    | unknown key; the nearest known key is swap_space
{source: embedded} | {max_model_len: 100} | args.model.max_model_len
    | unknown key; it belongs under applications[].args.engine
{source: embedded} | {max_num_seq: 100} | args.model.max_num_seq
    | unknown key; the nearest known key is applications[].args.engine.max_num_seqs
route_prefix: / | engine: {} | engine
    | unknown key; it belongs under applications[].args
route_prefix: / | routeprefix: / | routeprefix
    | unknown key; the nearest known key is route_prefix
{num_cpus: 1} | {numcpus: 1} | deployments[0].ray_actor_options.numcpus
    | unknown key; the nearest known key is num_cpus
{min_replicas: 1, max_replicas: 2} | {min_replica: 1}
    | deployments[0].autoscaling_config.min_replica
    | unknown key; the nearest known key is min_replicas
{env_vars: {A: b}} | {envvars: {A: b}} | runtime_env.envvars
    | unknown key; the nearest known key is env_vars
cluster.app:build | cluster.app:main | import_path
    | 'cluster.app:main' is refused; allowed: 'cluster.app:build'
block_size: 16 | block_size: '16' | args.engine.block_size
    | '16' is refused; allowed: an integer from 1 to 256 (default 64)
block_size: 16 | block_size: 0 | args.engine.block_size
    | 0 is refused; allowed: an integer from 1 to 256 (default 64)
block_size: 16 | block_size: 24 | args.engine.block_size
    | 24 is not a power of two; allowed: an integer from 1 to 256 (default 64)
block_size: 16 | swap_space: -1 | args.engine.swap_space
    | -1 is refused; allowed: a number from 0 to 16384 (default 0.0)
block_size: 16 | gpu_memory_utilization: 0 | args.engine.gpu_memory_utilization
    | 0 is refused; allowed: a number above 0 and up to 1 (default 0.9)
block_size: 16 | enable_prefix_caching: 1 | args.engine.enable_prefix_caching
    | 1 is refused; allowed: true or false (default true)
block_size: 16 | kv_cache_dtype: int8 | args.engine.kv_cache_dtype
    | 'int8' is refused; allowed: one of 'auto', 'float32', 'bfloat16', 'fp8', 'fp8_e4m3' \
(default 'auto')
block_size: 16 | kernel_backend: cuda | args.engine.kernel_backend
    | 'cuda' is refused; allowed: one of 'auto', 'triton', 'torch' (default 'auto')
block_size: 16 | preemption_mode: swap | args.engine
    | preemption_mode 'swap' needs a host tier: set swap_space above 0 GiB
block_size: 16 | restore_patience_s: 0 | args.engine.restore_patience_s
    | 0 is refused; allowed: a number above 0 and up to 3600 (default 5.0)
block_size: 16 | spill_prefix_tokens: never | args.engine.spill_prefix_tokens
    | 'never' is refused; allowed: an integer from 1 upwards or null (default 512)
block_size: 16 | max_num_seqs: 600 | args.engine
    | max_num_batched_tokens 512 is less than max_num_seqs 600: \
each running choice needs one token a step
{count: 2} | {count: many} | args.replicas.count
    | 'many' is refused; allowed: an integer from 1 to 1024 or 'auto' (default 'auto')
replicas: {count: 2} | limits: {request_timeout_s: 0} | args.limits.request_timeout_s
    | 0 is refused; allowed: a number above 0 and up to 86400 or null (default null)
replicas: {count: 2} | limits: {request_timeout_s: .inf} | args.limits.request_timeout_s
    | inf is refused; allowed: a number above 0 and up to 86400 or null (default null)
replicas: {count: 2} | limits: {request_timeout_s: .nan} | args.limits.request_timeout_s
    | nan is refused; allowed: a number above 0 and up to 86400 or null (default null)
replicas: {count: 2} | limits: {timeout_s: 5} | args.limits.timeout_s
    | unknown key; the nearest known key is request_timeout_s
{count: 2} | 2 | args.replicas
    | 2 is refused; allowed: a mapping
"""


def _mistakes() -> list[tuple[str, ...]]:
    lines = MISTAKES.strip().replace("\n    |", " |").splitlines()
    return [tuple(line.split(" | ")) for line in lines]


@pytest.mark.parametrize(("old", "new", "place", "says"), _mistakes())
def test_one_mistake_makes_one_line(old: str, new: str, place: str, says: str) -> None:
    assert _problems(_edited(old, new)) == (f"applications[0].{place}: {says}",)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "port: 8000",
            "prot: 8000",
            "http_options.prot: unknown key; the nearest known key is port",
        ),
        ("port: 8000", "port: [8000]", "http_options.port: Input should be a valid integer"),
        ("replicas: {count: 2}", "model: {}", "cluster.yaml:12: the key 'model' is given twice"),
    ],
)
def test_mistakes_outside_the_application_are_placed_too(old: str, new: str, problem: str) -> None:
    assert _problems(_edited(old, new)) == (problem,)


def test_a_key_that_resembles_nothing_is_shown_what_there_is() -> None:
    (problem,) = _problems(_edited("{count: 2}", "{zzz: 1}"))
    assert problem.endswith("known here: count, threads, cpus_per_replica, drain_s, autoscaling")


def test_all_mistakes_are_named_at_once() -> None:
    text = _edited("port: 8000", "prot: 1").replace("block_size: 16", "block_size: 0\n        x: 1")
    assert [problem.split(":")[0] for problem in _problems(text)] == [
        "http_options.prot",
        "applications[0].args.engine.x",
        "applications[0].args.engine.block_size",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1",
        "{}",
        "applications: []",
        "applications: 3",
        "applications: [3]",
        "a: !!python/x 1",
    ],
)
def test_what_is_no_serve_config_is_refused_in_one_line(text: str) -> None:
    assert len(_problems(text)) == 1


def test_a_second_application_is_refused() -> None:
    text = "applications: [{import_path: 'cluster.app:build'}, {import_path: 'other:app'}]"
    assert "applications: give exactly one, Quire's" in _problems(text)


def test_a_merge_key_may_be_overridden() -> None:
    text = _edited(
        "engine:\n        block_size: 16", "engine: {<<: {block_size: 8}, block_size: 4}"
    )
    assert parse_serve_config(text, "x")[1].engine.block_size == 4


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read"):
        load_serve_config(tmp_path / "nothing.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read"):
        load_serve_config(path)


def test_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(VALID)
    monkeypatch.setenv("QUIRE_BLOCKSIZE", "16")
    with pytest.raises(ConfigError, match="QUIRE_BLOCKSIZE"):
        load_serve_config(path)
