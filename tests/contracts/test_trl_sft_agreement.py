"""Loss and gradient of a supervised update against TRL's SFTTrainer on the same ragged rows, computed live."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trl_reference

from oncurve.algorithm.presets import build
from oncurve.core.batch import collate
from oncurve.core.sampler import SamplingRequest
from oncurve.data.demonstrations import Demonstration, demonstrated_row, render_demonstrations
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.demonstrated import DemonstrationSampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.skipif(bool(trl_reference.REASON), reason=trl_reference.REASON or "TRL is here")

TOLERANCE = 1e-5
CHAT = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


SIZES = ((3, 2), (9, 5), (4, 1), (1, 7), (6, 3))
TURNS = [said("user", "Hi?"), said("assistant", "Yes."), said("user", "2+3?"), said("assistant", "It is 5.")]
ROWS: dict[str, list[dict[str, Any]]] = {
    "prompt and completion": [{"prompt": "q" * size, "completion": " bc" * more} for size, more in SIZES],
    "messages": [
        {"messages": TURNS},
        {"messages": TURNS[:2]},
        {"messages": [said("system", "Short."), *TURNS[2:]]},
        {"messages": [*TURNS, said("user", "x" * 9 + "?"), said("assistant", "No.")]},
    ],
    "prompt and completion as messages": [
        {"prompt": TURNS[:1], "completion": TURNS[1:2]},
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {"prompt": [said("user", "x" * 9)], "completion": [said("assistant", "No.")]},
    ],
    "text": [{"text": "once upon " * size} for size, _ in SIZES],
}


def theirs(
    rows: list[dict[str, Any]], model: PreTrainedModel, tokenizer: Any, folder: Path, *, packing: bool
) -> tuple[float, dict[str, torch.Tensor], list[tuple[int, ...]]]:
    """Loss and gradient of one update of TRL's trainer over all rows, and the tokens of each row."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's and those of what it is built on
        args = SFTConfig(
            output_dir=str(folder), per_device_train_batch_size=len(rows), packing=packing, max_length=256, bf16=False,
            use_cpu=True, gradient_checkpointing=False, report_to="none", assistant_only_loss="messages" in rows[0],
            dataloader_pin_memory=False, max_steps=1,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=copy.deepcopy(tokenizer)
        )
        [inputs] = list(trainer.get_train_dataloader())
        labels = inputs["labels"]
        # what transformers counts over an update: the labels that are predicted
        count = (labels[:, 1:] != -100).sum()
        loss = trainer.compute_loss(trainer.model.train(), dict(inputs), num_items_in_batch=count)
        loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    if packing:
        cuts = inputs["cu_seq_lens_q"].tolist()
        ids = [tuple(inputs["input_ids"][0, a:b].tolist()) for a, b in pairwise(cuts)]
    else:
        pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ids = [tuple(row[mask.bool()].tolist()) for row, mask in pairs]
    return loss.item(), gradients, ids


def ours(shown: list[Demonstration], policy: TrainedPolicy) -> tuple[float, dict[str, torch.Tensor]]:
    algorithm = build("rft", group_size=1, max_completion_tokens=8)
    request = SamplingRequest([one.prompt for one in shown], 1)
    batch = collate(DemonstrationSampler(shown).sample(request), torch.ones(len(shown), 1))
    total = 0.0
    for microbatch in policy.microbatches(batch):
        loss, _ = algorithm.loss(*policy.logprobs(microbatch), microbatch)
        policy.backward(loss)
        total += loss.item()
    named = policy.trained_model.named_parameters()
    return total, {name: one.grad for name, one in named if one.grad is not None}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ROWS)
def test_loss_and_gradient_are_those_of_trl(
    kind: str, packing: bool, tokenizer: Any, tiny_model: Callable[..., PreTrainedModel],
    make_policy: Callable[..., TrainedPolicy], tmp_path: Path,
) -> None:  # fmt: skip
    tool = copy.deepcopy(tokenizer)
    tool.chat_template = CHAT
    policy = make_policy(tiny_model("qwen2"), packing=packing, tokens_per_microbatch=60)
    rows = [demonstrated_row(f"row {place}", row) or row for place, row in enumerate(ROWS[kind])]
    shown, _ = render_demonstrations(rows, tool)
    loss, gradients = ours(shown, policy)
    expected, their_gradients, their_ids = theirs(ROWS[kind], tiny_model("qwen2"), tool, tmp_path, packing=packing)
    assert sorted((*one.prompt.prompt_ids, *one.token_ids) for one in shown) == sorted(their_ids)
    assert loss == pytest.approx(expected, abs=TOLERANCE)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - their_gradients[name]).abs().max() < TOLERANCE, name
