"""Two pretrained models, the whole way: trained with every sampler, saved, measured, asked, served and read by others.

`python benchmarks/bench.py fetch_models` makes their folders; without them the tests are skipped.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from nursery import Nursery

PLACE = Path.home() / ".cache" / "oncurve" / "models"
ROUNDING = 2e-3
"""Of a log-probability of weights in bfloat16, at which few tokens of a row differ."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's word to transformers
]
REWARD = '''
def letters(completion, **row):
    """Half of the completions earn something, whatever they say."""
    return sum(map(ord, completion)) % 7 / 7
'''


@pytest.fixture(params=["smollm2-135m", "gemma3-270m"])
def base(request: pytest.FixtureRequest) -> Path:
    place = PLACE / str(request.param)
    if not (place / "model.safetensors").is_file():
        pytest.skip(
            f"there is no {place.name} in ~/.cache/oncurve/models; python benchmarks/bench.py fetch_models makes it"
        )
    return place


def words(base: Path, folder: Path, name: str, *overrides: str) -> list[str]:
    """Two steps of two prompts with two completions of a few tokens, whose rewards differ."""
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    reward = json.dumps([{"type": "custom", "function": f"{folder / 'reward.py'}:letters"}])
    return [
        "train", "word_problems", f"model={base}", f"run.folder={folder}", f"run.name={name}", "run.steps=2",
        "run.prompts_per_step=2", "algorithm.group_size=2", "rollouts.max_completion_tokens=6", "data.limit=20",
        "evaluation.num_prompts=1", "evaluation.num_prompts_during=1", "optimizer.learning_rate=1e-4",
        f"rewards={reward}", *overrides,
    ]  # fmt: skip


def trained_rows(run: Path) -> list[dict[str, Any]]:
    """The metrics of two steps that trained what was sampled."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2]
    assert any(row.get("policy/gradient_norm", 0) > 0 for row in steps)
    assert all(row["mismatch/kl"] < 1e-4 for row in steps)
    return steps


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(300, 316)[None], use_cache=False).logits.log_softmax(-1)


def plain(place: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


def ours(place: Path) -> Any:
    """What oncurve makes of a folder."""
    from oncurve.recipe.load import parse_config
    from oncurve.run.builder import make_policy

    config = parse_config("{data: {type: word_problems}}", [f"model={place}"], source="saved")
    return make_policy(config, is_trained=False).model


@pytest.mark.parametrize(
    ("base", "sampler", "weights"),
    [
        ("smollm2-135m", "engine", "full"),
        ("smollm2-135m", "transformers", "lora"),
        ("gemma3-270m", "engine", "lora"),
        ("gemma3-270m", "transformers", "full"),
    ],
    indirect=["base"],
)
def test_two_steps_and_what_is_saved_is_what_others_read(
    base: Path, sampler: str, weights: str, nursery: Nursery, tmp_path: Path
) -> None:
    chosen = ["policy.lora.rank=4"] if weights == "lora" else []
    asked = words(base, tmp_path, "run", f"rollouts.type={sampler}", *chosen)
    status, said = nursery.run(*asked)
    assert status == 0, said
    assert "model: trained with" in said
    trained_rows(tmp_path / "run")
    saved = tmp_path / "run" / "model"
    if weights == "lora":
        from peft import PeftModel

        read: Any = PeftModel.from_pretrained(plain(base), str(saved)).eval()
    else:
        read = plain(saved)
    wanted = logprobs(read)
    del read
    assert (logprobs(ours(saved)) - wanted).abs().max() < ROUNDING
    assert (wanted - logprobs(plain(base))).abs().max() > ROUNDING, "two steps changed nothing"
    if sampler == "engine":
        _measure_and_ask(tmp_path / "run", nursery, tmp_path)


def _measure_and_ask(run: Path, nursery: Nursery, folder: Path) -> None:
    few = ["evaluation.num_prompts=2", "rollouts.max_completion_tokens=4"]
    status, said = nursery.run("evaluate", run, *few, "--output", folder / "measured")
    assert status == 0, said
    assert "model: sampled" in said
    assert (folder / "measured" / "evaluations").is_dir()
    status, said = nursery.run("sample", run, "How much is 2 + 3?", "--max-tokens", 4)
    assert status == 0, said
    assert re.search(r"\[\d tokens, (length|stop)\]", said)


def test_a_server_samples_with_the_weights_of_each_step(base: Path, nursery: Nursery, tmp_path: Path) -> None:
    server = nursery.start("serve", base, "--port", 0)
    try:
        while not (found := re.search(r"serving on (\S+)", server.output)):
            assert server.is_running(), server.output
            time.sleep(0.05)
        asked = words(base, tmp_path, "run", "rollouts.type=servers", f"rollouts.servers=[{found[1]}]")
        status, said = nursery.run(*asked)
        assert status == 0, said
        trained_rows(tmp_path / "run")
        assert "model: sampled" in server.output
    finally:
        server.kill()
        server.wait()
