"""TRL's examples with tools and environments under TRL and under oncurve, with forced turns: masks, losses, gradients.

The embedded model gets the chat template that TRL ships for Qwen2.5, with its two tokens. What the policy writes is
forced, as a function of what it read and of its place in the group: calls of a tool, of an async one, of one that is
called twice in a turn, and words to end with. Everything else is each library's own: the schemas told to the model,
the calls read, tools run, answers put between the template's marks, masks, advantages, the loss and its gradient. Each
step takes all prompts, so that the order of rows does not matter, and begins with weights that the steps before made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

PROMPTS, GROUP, STEPS = 2, 3, 2
MOST_TOKENS = 512
"""TRL counts answers of tools among them, oncurve does not; nothing here is cut off."""
END = "<|im_end|>"
FORMS = ("tools", "environment", "environments_by_name")
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
Row = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]
"""Tokens of a prompt, those of its completion, and which of those are trained on."""


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    return a + b


class Counting:
    """A counter that the model raises."""

    def reset(self, **row: Any) -> str:
        """Begin with nothing."""
        self.count = 0
        return " Count."

    def increment(self, step: int) -> int:
        """
        Raises the counter.

        Args:
            step: By how much.

        Returns:
            Where it stands.
        """
        self.count += step
        return self.count


class Doubling(Counting):
    """One that counts twice as fast, and says what an episode is worth."""

    def increment(self, step: int) -> int:
        """
        Raises the counter by twice as much.

        Args:
            step: By how much.

        Returns:
            Where it stands.
        """
        self.count += 2 * step
        return self.count

    def get_reward(self) -> float:
        """The counter."""
        return self.count / 10


def speaking_model(folder: Path) -> str:
    """The embedded model with the two tokens of the template, and with room for what it tells of tools."""
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from oncurve.observe.run_model import EMBEDDED

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": ["<|im_start|>"]})
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.max_position_embeddings = 4096
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def said(form: str, text: str, place: int) -> str:
    """The next turn behind a text that was read."""
    asked = text.rpartition("user\nQuestion ")[2] if "tool_response" not in text else text
    number = sum(asked.encode()) % 7 + place
    told = text.count("<tool_response>")
    name, arguments = ("multiply", f'{{"a": {number}, "b": 3}}') if form == "tools" else (
        "increment", f'{{"step": {number}}}')  # fmt: skip
    match told:
        case 0 if place % 3 == 2:
            return f"It is {number}."
        case 0:
            return f"Let me see.\n{CALL % (name, arguments)}"
        case 1 if form == "tools":
            return CALL % ("async_add", f'{{"a": {number}, "b": 1}}')
        case 1:
            return "\n".join([CALL % (name, arguments)] * 2)
        case _:
            return f"So {number}."


def turn_ids(form: str, tokenizer: Any, read: Sequence[int], place: int) -> list[int]:
    """The same as tokens, with the end of a turn."""
    return list(tokenizer.encode(said(form, tokenizer.decode(list(read)), place) + END, add_special_tokens=False))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Any:
    """An attribute with another value, for a while."""
    kept = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def length_reward(completions: list[Any], **row: Any) -> list[float]:
    """Something to learn: the policy's words, and what it was told."""
    return [sum(len(str(message["content"])) for message in completion) % 11 / 10 for completion in completions]


def options_of(form: str) -> dict[str, Any]:
    """What a trainer is given besides."""
    match form:
        case "tools":
            return {"tools": [multiply, async_add]}
        case "environment":
            return {"environment_factory": Counting}
        case _:
            return {"environment_factory": {"one": Counting, "two": Doubling}}


def make_trainer(library: Any, form: str, model: str, folder: Path, loss: str) -> Any:
    """The same lines for both libraries."""
    from datasets import Dataset

    rows = [
        {
            "prompt": [{"role": "user", "content": f"Question {number}: how much is {number} + 1?"}],
            **({"environment": ("one", "two")[number % 2]} if form == "environments_by_name" else {}),
        }
        for number in range(PROMPTS)
    ]
    args = library.GRPOConfig(
        output_dir=str(folder), max_steps=STEPS, num_generations=GROUP, per_device_train_batch_size=PROMPTS * GROUP,
        max_completion_length=MOST_TOKENS, learning_rate=1e-4, bf16=False, use_cpu=True, logging_steps=1, beta=0.0,
        loss_type=loss, save_strategy="no", report_to="none", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    return library.GRPOTrainer(
        model=model, reward_funcs=length_reward, args=args, train_dataset=Dataset.from_list(rows), **options_of(form)
    )


def under_trl(form: str, model: str, folder: Path, loss: str) -> tuple[list[list[Row]], list[dict[str, float]]]:
    """TRL's rows with their masks, step by step, and what it logged."""
    import trl

    steps: list[list[Row]] = []

    def generate(self: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        seen: Counter[tuple[int, ...]] = Counter()
        made = []
        for ids in prompt_ids:
            made.append(turn_ids(form, self.processing_class, ids, seen[tuple(ids)]))
            seen[tuple(ids)] += 1
        return made, None

    compute = trl.GRPOTrainer._compute_loss

    def watched(self: Any, network: Any, inputs: dict[str, Any]) -> Any:
        steps.append(rows_of_trl(inputs))
        return compute(self, network, inputs)

    with (
        replaced(trl.GRPOTrainer, "_generate_single_turn", generate),
        replaced(trl.GRPOTrainer, "_compute_loss", watched),
    ):
        trainer = make_trainer(trl, form, model, folder, loss)
        trainer.train()
    return steps, logged(trainer)


def rows_of_trl(inputs: dict[str, Any]) -> list[Row]:
    """A batch of TRL's as rows without padding."""
    rows = []
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    for prompt, is_prompt, ids, is_there, is_own in zip(*(inputs[name].tolist() for name in names), strict=True):
        kept = [place for place, there in enumerate(is_there) if there]
        rows.append(
            (
                tuple(token for token, there in zip(prompt, is_prompt, strict=True) if there),
                tuple(ids[place] for place in kept),
                tuple(bool(is_own[place]) for place in kept),
            )
        )
    return rows


class ForcedTurns:
    """Turns of the engine that say what is forced."""

    def __init__(self, say: Callable[[Sequence[int], int], list[int]]) -> None:
        """``say``: the tokens of a turn behind some tokens, and how often these were gone on from before."""
        self.say, self.waiting = say, list[Any]()
        self.seen: Counter[tuple[int, ...]] = Counter()
        """How often each text was gone on from: rows of a group may be asked for one by one."""

    def ask(self, asked: Any) -> None:
        """Say this at the next step."""
        self.waiting.append(asked)

    def advance(self) -> bool:
        """Say one."""
        if not self.waiting:
            return False
        asked = self.waiting.pop(0)
        for place in range(len(asked.keys)):
            ids = self.say(asked.token_ids, self.seen[asked.token_ids])
            self.seen[asked.token_ids] += 1
            asked.deliver(place, (ids, [-1.0] * len(ids), "stop"))
        return True

    def close(self) -> None:
        """Forget what waits."""
        self.waiting = []


def under_oncurve(form: str, model: str, folder: Path, loss: str) -> tuple[list[list[Row]], list[dict[str, float]]]:
    """The same with oncurve's trainer."""
    import oncurve.trl
    from oncurve.sample.engine import InProcessEngine

    def turns(self: Any, *_: Any, **__: Any) -> ForcedTurns:
        return ForcedTurns(partial(turn_ids, form, self._policy.tokenizer))

    steps: list[list[Row]] = []
    with replaced(InProcessEngine, "turns", turns):
        trainer = make_trainer(oncurve.trl, form, model, folder, loss)
        for step in trainer._watched(trainer.oncurve.steps()):
            whole = [one for group in step.groups for one in group.completions]
            steps.append([(one.prompt_ids, one.token_ids, one.written) for one in whole])
    return steps, logged(trainer)


def logged(trainer: Any) -> list[dict[str, float]]:
    """What was logged of each step."""
    rows = [row for row in trainer.state.log_history if "reward" in row]
    return [{key: row[key] for key in ("reward", "loss", "grad_norm")} for row in rows]


def beside(form: str, model: str, folder: Path, loss: str) -> dict[str, Any]:
    """Both libraries on one form: rows and masks that differ, and the largest difference of what they log."""
    sides: dict[str, Callable[..., Any]] = {"trl": under_trl, "oncurve": under_oncurve}
    found = {name: run(form, model, folder / name, loss) for name, run in sides.items()}
    (their_steps, _), (our_steps, our_log) = found["trl"], found["oncurve"]
    result: dict[str, Any] = {"form": form, "loss_type": loss, "steps": len(our_log), "rows": 0, "rows_that_differ": 0}
    result |= {"trained_tokens": 0, "told_tokens": 0}
    for theirs, ours in zip(their_steps, our_steps, strict=True):
        result["rows"] += len(ours)
        result["rows_that_differ"] += (Counter(theirs) - Counter(ours)).total()
        result["trained_tokens"] += sum(sum(row[2]) for row in ours)
        result["told_tokens"] += sum(len(row[2]) - sum(row[2]) for row in ours)
    for key in ("reward", "loss", "grad_norm"):
        pair = {name: [row[key] for row in found[name][1]] for name in sides}
        largest = max(abs(a - b) for a, b in zip(*pair.values(), strict=True))
        result[key] = {**pair, "largest_difference": largest}
    return result
