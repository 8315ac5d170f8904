"""A sampler that recites, and reward functions that read: what evaluations need, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from oncurve.core.records import Completion, FinishReason, Group, Prompt, Reward, SamplingParams
from oncurve.core.sampler import PolicyView, SamplingRequest
from oncurve.evaluate.evaluate import evaluate
from oncurve.evaluate.evaluation import Evaluation

GREEDY = SamplingParams(temperature=0.0)


def prompts_of(count: int) -> list[Prompt]:
    return [
        Prompt(f"{n}+1?", (n,), n, {"question": f"What is {n} plus 1?", "answer": str(n + 1)}) for n in range(count)
    ]


class Reciter:
    """Gives the texts it was told, by row of the data set."""

    def __init__(self, texts: Sequence[str | Sequence[str]], reasons: Sequence[FinishReason] | None = None) -> None:
        self.texts = texts
        self.reasons = reasons or ["stop"] * len(texts)
        self.calls: list[tuple[int, int, int, SamplingParams | None]] = []

    def load_weights(self, policy: PolicyView, version: int) -> None:
        raise AssertionError("an evaluation measures the weights that are loaded")

    def sample(self, request: SamplingRequest) -> list[Group]:
        self.calls.append((len(request.prompts), request.group_size, request.step, request.params))
        return [Group(prompt, self._completions(prompt, request.group_size)) for prompt in request.prompts]

    def close(self) -> None:
        pass

    def _completions(self, prompt: Prompt, group_size: int) -> tuple[Completion, ...]:
        told = self.texts[prompt.index]
        texts = [told] * group_size if isinstance(told, str) else list(told)[:group_size]
        return tuple(
            Completion(prompt.prompt_ids, (1,) * len(t), t, (-1.0,) * len(t), self.reasons[prompt.index], 0, place)
            for place, t in enumerate(texts)
        )


class Boxed:
    """Right if the text is the answer in brackets, badly formed without brackets, a failure on "boom"."""

    name = "boxed"

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        return [self._one(prompt, completion.text) for prompt, completion in zip(prompts, completions, strict=True)]

    def close(self) -> None:
        pass

    def _one(self, prompt: Prompt, text: str) -> Reward:
        if text == "boom":
            return Reward(None, error="timeout", detail="3 s")
        formed, correct = float(text.startswith("[")), float(text == f"[{prompt.row['answer']}]")
        return Reward(correct, {"format": formed, "correct": correct}, detail=f"read {text}")


class Anywhere(Boxed):
    """Right if the text ends with the answer, in whatever form."""

    name = "anywhere"

    def _one(self, prompt: Prompt, text: str) -> Reward:
        if text == "boom":
            return Reward(None, error="crashed")
        correct = float(text.strip("[]") == prompt.row["answer"])
        return Reward(correct, {"correct": correct})


def evaluation_of(texts: Sequence[str | Sequence[str]], *, samples: int = 1, loose: bool = True) -> Evaluation:
    return evaluate(
        prompts_of(len(texts)),
        Reciter(texts),
        Boxed(),
        lenient_reward_function=Anywhere() if loose else None,
        params=GREEDY if samples == 1 else SamplingParams(temperature=0.7),
        samples_per_prompt=samples,
    )
