"""Steps as a GPU gets them, on a device made of torch: the tokens are the CPU engine's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import PENDING, SchedulerOutput, StepResult
from replicas.engine import device_runner
from replicas.engine.device_runner import DeviceRunner
from replicas.engine.kv_pool import KVPool
from replicas.engine.synthetic_steps import decode_step, prefill_step, together, warm_up_steps
from tests.replicas.engine.driver import ask, assert_same, make_engine, serve
from tests.replicas.engine.fake_device import FakeDevice, fake_runner
from tests.replicas.engine.tiny_models import Twin, make_twin, random_prompt

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 50}
PENALISED = {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4}
REQUESTS = [
    ask("greedy", random_prompt(21), 12),
    ask("sampled", random_prompt(9, 1), 12, n=3, **SAMPLED),
    ask("penalised", random_prompt(40, 2), 10, frequency_penalty=0.2, **PENALISED),
    ask("biased", random_prompt(12, 3), 8, logit_bias=((7, 4.0), (9, -3.0)), min_p=0.05),
    ask("allowed", random_prompt(5, 4), 8, temperature=1.0, allowed_token_ids=(3, 44, 190, 191)),
    ask("ends", random_prompt(6, 5), 12, ignore_eos=False, min_tokens=4, **SAMPLED),
    ask("scored", random_prompt(17, 6), 9, logprobs=3, prompt_logprobs=2),
    ask("scored too", random_prompt(3, 7), 9, logprobs=0, **SAMPLED),
]


@pytest.fixture(scope="module")
def expected(llama: Twin):
    return serve(make_engine(llama.paged), *REQUESTS)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("graphs_up_to", [0, 4, 16])
def test_an_engine_answers_as_on_the_cpu(llama, expected, depth, graphs_up_to) -> None:
    device = FakeDevice()
    make = fake_runner(llama.paged, device, graphs_up_to=graphs_up_to)
    engine = make_engine(llama.paged, make_runner=make, depth=depth)
    assert_same(serve(engine, *REQUESTS), expected)
    assert (device.replays > 5) == (graphs_up_to > 0)


def test_preemption_and_copied_blocks(llama, expected) -> None:
    make = fake_runner(llama.paged, FakeDevice(), graphs_up_to=8)
    engine = make_engine(
        llama.paged,
        make_runner=make,
        depth=2,
        block_size=4,
        num_gpu_blocks_override=24,
        min_progress_tokens=2,
    )
    assert_same(serve(engine, *REQUESTS), expected)
    assert engine.stats.preemptions > 3


@pytest.mark.parametrize("model_type", ["mistral", "qwen3"])
def test_windows_and_head_norms(model_type, tmp_path) -> None:
    twin = make_twin(tmp_path, model_type)
    requests = [ask(str(n), random_prompt(n), 10) for n in (3, 16, 30)]
    plain = serve(make_engine(twin.paged), *requests)
    make = fake_runner(twin.paged, FakeDevice(), graphs_up_to=4)
    assert_same(serve(make_engine(twin.paged, make_runner=make, depth=2), *requests), plain)


@pytest.fixture
def runner(llama: Twin) -> DeviceRunner:
    pool = KVPool(llama.paged.spec, num_blocks=16, block_size=8, dtype=torch.float32, device="cpu")
    return fake_runner(llama.paged, FakeDevice(), graphs_up_to=4)(pool, 64)


def drawn(runner: DeviceRunner, step: SchedulerOutput) -> list[int]:
    return [token.token_id for token in runner.launch(step).result().sampled.values()]


def test_a_pending_token_is_the_one_drawn_just_before(runner: DeviceRunner) -> None:
    prompts = [prefill_step(5, (1,), index=0), prefill_step(3, (2,), index=1)]
    first = drawn(runner, together(*prompts))
    known = replace_tokens(decode_step([(1,), (2,)], 5), [[first[0]], [first[1]]])
    expected = drawn(runner, known)
    # Again, the other way round, with the first step's end not waited for.
    flight = runner.launch(together(*reversed(prompts)))
    pending = replace_tokens(decode_step([(1,), (2,)], 5), [[PENDING], [PENDING]])
    second = runner.launch(pending)
    assert [flight.result().sampled["", index].token_id for index in (0, 1)] == first
    assert [token.token_id for token in second.result().sampled.values()] == expected


def replace_tokens(step: SchedulerOutput, tokens: list[list[int]]) -> SchedulerOutput:
    items = [replace(item, token_ids=ids) for item, ids in zip(step.scheduled, tokens, strict=True)]
    return replace(step, scheduled=tuple(items))


def test_a_pending_token_that_nobody_drew_is_refused(runner: DeviceRunner) -> None:
    drawn(runner, decode_step([(1,)], 0))
    unknown = replace_tokens(decode_step([(1,), (2,)], 1), [[PENDING], [PENDING]])
    with pytest.raises(ValueError, match=r"drew no token for \('', 1\)"):
        runner.launch(unknown)


def test_no_third_step_is_launched(runner: DeviceRunner) -> None:
    flights = [runner.launch(decode_step([(1,)], 0)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="before the one before the last had ended"):
        runner.launch(decode_step([(1,)], 0))
    for flight in flights:
        flight.result()
    assert len(drawn(runner, decode_step([(1,)], 0))) == 1


def test_graphs_give_what_single_kernels_give(runner: DeviceRunner) -> None:
    step = decode_step([(1,), (2,), (3,)], 7)
    with_graph = drawn(runner, step)
    replays = runner._device.replays
    runner.use_graphs = False
    assert drawn(runner, step) == with_graph
    assert runner._device.replays == replays == 1


def test_what_a_graph_does_can_be_done_without_it(runner: DeviceRunner, monkeypatch) -> None:
    """Padding included: to compare the two bit for bit."""
    step = decode_step([(1,), (2,), (3,)], 7)
    with_graph = drawn(runner, step)
    rows = []
    forward = runner._model.forward
    monkeypatch.setattr(
        runner._model, "forward", lambda ids, *rest: rows.append(len(ids)) or forward(ids, *rest)
    )
    runner.replay_graphs = False
    assert drawn(runner, step) == with_graph
    assert (rows, runner._device.replays) == ([4], 1)
    runner.use_graphs = False
    assert drawn(runner, step) == with_graph
    assert (rows, runner._device.replays) == ([4, 3], 1)
    assert list(runner.graph_sizes) == [1, 2, 4]


def test_prefill_and_steps_of_many_rows_need_no_graph(runner: DeviceRunner) -> None:
    assert len(drawn(runner, decode_step([(n + 1,) for n in range(5)], 0))) == 5
    alone = drawn(runner, prefill_step(2, (1,)))
    mixed = together(prefill_step(2, (1,)), decode_step([(2,)], 0), prefill_step(2, (3,), index=2))
    assert drawn(runner, replace(mixed, scheduled=mixed.scheduled[::2])) == alone * 2
    prefill, decode = prefill_step(2, (1,), index=7), decode_step([(2,)], 0)
    results = runner.launch(together(prefill, decode)).result().sampled
    assert results["", 7].token_id == alone[0], "rows of one token go first, and results find home"
    assert runner._device.replays == 0


def test_a_row_that_draws_nothing_needs_no_graph(runner: DeviceRunner) -> None:
    both = decode_step([(1,), (2,)], 3)
    expected = drawn(runner, both)
    silent = replace(both.scheduled[0], draws=())
    replays = runner._device.replays
    assert drawn(runner, replace(both, scheduled=(silent, both.scheduled[1]))) == expected[1:]
    scored = replace(silent, prompt_logprobs=(3, 4), prompt_token_ids=(0,) * 5)
    scored = replace(scored, sampling=replace(scored.sampling, prompt_logprobs=0))
    flight = runner.launch(replace(both, scheduled=(scored,)))
    runner.launch(decode_step([(2,)], 3)).result()
    assert len(flight.result().prompt_logprobs["", 0]) == 1
    assert runner._device.replays == replays + 1, "only the last one"
    chunk = prefill_step(4, (1,)).scheduled[0]
    result = runner.launch(replace(both, scheduled=(replace(chunk, draws=()),))).result()
    assert result == StepResult({}, {})


@pytest.mark.parametrize("use_graphs", [False, True])
def test_blocks_are_copied_before_they_are_read(runner: DeviceRunner, use_graphs) -> None:
    runner.use_graphs = use_graphs
    history = replace_tokens(prefill_step(7, (1,)), [[5, 9, 4, 77, 31, 8, 50]])
    drawn(runner, history)
    expected = drawn(runner, decode_step([(1,)], 7))
    assert drawn(runner, decode_step([(2,)], 7)) != expected
    copied = replace(decode_step([(2,)], 7), block_copies=((1, 2),))
    assert drawn(runner, copied) == expected


def test_a_step_with_too_much_beside_it_needs_no_graph(llama: Twin, monkeypatch) -> None:
    monkeypatch.setattr(device_runner, "_BESIDE_BYTES", 1024)
    pool = KVPool(llama.paged.spec, num_blocks=4, block_size=8, dtype=torch.float32, device="cpu")
    runner = fake_runner(llama.paged, FakeDevice(), graphs_up_to=2)(pool, 64)
    for edited, replays in ((10, 1), (190, 1)):
        bias = tuple((token, -100.0) for token in range(edited))
        sampling = SamplingParams(1, 0, temperature=0.0, logit_bias=bias)
        assert drawn(runner, decode_step([(1,)], 0, sampling))[0] >= edited
        assert runner._device.replays == replays


def test_a_model_that_waits_runs_without_graphs(llama: Twin, caplog) -> None:
    device = FakeDevice(refuses=True)
    engine = make_engine(llama.paged, make_runner=fake_runner(llama.paged, device, graphs_up_to=4))
    assert "run without graphs: it waits" in caplog.text
    assert list(engine._pipeline._runner.graph_sizes) == []
    assert len(serve(engine, REQUESTS[0])["greedy", 0].token_ids) == 12


def test_warm_up_runs_on_a_pool_of_one_block(llama: Twin) -> None:
    pool = KVPool(llama.paged.spec, num_blocks=1, block_size=8, dtype=torch.float32, device="cpu")
    runner = fake_runner(llama.paged, FakeDevice())(pool, 64)
    names: set[str] = set()
    sampler = runner._sampler
    arrays = sampler.arrays

    def noting(rows):
        made = arrays(rows)
        names.update(made)
        return made

    sampler.arrays = noting
    results = [runner.launch(step).result() for step in warm_up_steps(8)]
    assert {"allowed_rows", "edit_rows", "temperature"} <= names
    assert results[0].prompt_logprobs
    assert any(token.logprobs for token in results[0].sampled.values())
