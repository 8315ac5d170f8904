"""What runs in a process that has a pretend GPU, of decoding: functions that tests call by name."""

from __future__ import annotations

import gc
import logging
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "model"))

from own_layer_cases import FAMILIES
from pretend.counting import counting

from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.model import decode_flash, layer_decoders, recordings
from oncurve.model import decode_proof as proof
from oncurve.model.decode_cuda_graph import RecordedLayers
from oncurve.model.decode_flash import FlashLayers
from oncurve.model.decoding import LayerDecoder
from oncurve.model.weights import Backbone
from oncurve.sample.engine import InProcessEngine

PROMPTS = [list(range(1, 42)), [5, 9, 3], [7] * 17]
ROOM = {"slots": 40, "prompt_slots": 4, "prompt_tokens": 41, "completion_tokens": 170}
GREEDY = SamplingParams(max_completion_tokens=24, temperature=0)


def model_of(family: str, layers: int = 2) -> Any:
    config, kind = FAMILIES[family]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    ends = {"bos_token_id": None, "eos_token_id": 63, "pad_token_id": 0, "initializer_range": 0.25}
    made = kind(config(vocab_size=64, num_hidden_layers=layers, intermediate_size=96, **sizes, **ends))
    return made.eval().cuda()


def decoder_of(model: Any, *, masked: bool = False, records: bool = True) -> LayerDecoder:
    with patch.object(decode_flash, "can_decode", (lambda *_: False) if masked else decode_flash.can_decode):
        head = model.get_output_embeddings().weight.detach()
        decoder = LayerDecoder(Backbone(model), head, torch.bfloat16, **ROOM, records=records)
    assert type(decoder.layers) is (RecordedLayers if masked else FlashLayers)
    decoder.prefill(PROMPTS, [0, 1, 2])
    return decoder


def given(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and places of a step: rows begin at different times, some end, one moves to another slot."""
    slots, prompts, ahead = [17, 2, 3, 11, 0, 9, 1], [0, 0, 2, 1, 2, 0, 0], [0, 0, 3, 0, 1, 0, 2]
    if step >= 20:
        slots, prompts, ahead = slots[1:4], prompts[1:4], ahead[1:4]
    past = torch.tensor([step + more for more in ahead])
    lengths = torch.tensor([len(PROMPTS[prompt]) for prompt in prompts])
    places = torch.stack([torch.tensor(slots), past, torch.tensor(prompts), lengths], dim=1)
    random = torch.Generator().manual_seed(step)
    return torch.randint(1, 63, (len(slots),), generator=random), past + lengths, places


def _steps_by_all_ways(family: str, plant: str) -> dict[str, Any]:
    """How far the logits of recorded, eager, flash and masked steps are apart, and how many recordings there were."""
    model = model_of(family)
    decoders = [
        decoder_of(model, masked=masked, records=records) for masked in (False, True) for records in (True, False)
    ]
    apart, largest = {"recorded": 0.0, "masked": 0.0}, 0.0
    for step in range(40):
        if step == 10 and plant == "buffers move":
            for decoder in decoders:
                for cache in decoder.caches:
                    cache.grow(cache.positions + 32)
        logits = [decoder.step(*given(step)).cpu() for decoder in decoders]
        recorded = [float((one - other).abs().max()) for one, other in (logits[:2], logits[2:])]
        apart["recorded"] = max(apart["recorded"], *recorded)
        apart["masked"] = max(apart["masked"], float((logits[0] - logits[2]).abs().max()))
        largest = max(largest, float(logits[0].abs().max()))
    counts = [decoder.layers.recordings.count for decoder in decoders]
    return {**apart, "largest": largest, "counts": counts}


def _launches(family: str) -> dict[str, int]:
    """Operations of a layer; a norm is six of them here and one on CUDA."""
    counts, norms = [], []
    for layers in (2, 3):
        decoder = decoder_of(model_of(family, layers), records=False)
        decoder.step(*given(0))
        with counting() as counted:
            decoder.step(*given(1))
        counts.append(counted.num_launches)
        norms.append(counted.launches["aten::rsqrt.out"])
    return {"operations": counts[1] - counts[0], "norms": norms[1] - norms[0]}


def a_step_that_asks() -> dict[str, Any]:
    """A decode step that reads a number back cannot be recorded; sampling goes on without."""
    model, said = model_of("qwen2"), Said()
    right = FlashLayers.step

    def asks(self: Any, shape: Any, numbers: Tensor, **known: Any) -> Tensor:
        numbers[0].item()
        return right(self, shape, numbers, **known)

    logging.getLogger(recordings.__name__).addHandler(said)
    with torch.inference_mode(), patch.object(FlashLayers, "step", asks):
        for _ in range(2):
            asking, plain = decoder_of(model), decoder_of(model, records=False)
            same = all(torch.equal(asking.step(*given(step)), plain.step(*given(step))) for step in range(4))
    return {"same": same, "count": asking.layers.recordings.count, "said": said.lines}


def steps_by_all_ways(family: str, plant: str) -> dict[str, Any]:
    """See there."""
    with torch.inference_mode():
        return _steps_by_all_ways(family, plant)


def launches(family: str) -> dict[str, int]:
    """See there."""
    with torch.inference_mode():
        return _launches(family)


class Said(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Words:
    """A tokenizer of numbers."""

    eos_token_id, pad_token_id = 63, 0

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]


@contextmanager
def half_width():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        yield


def sampled(model: Any, params: SamplingParams = GREEDY, *, way: str = "flash") -> list[tuple[int, ...]]:
    """Completions of the engine; its own step, that with masks, or the model's module."""
    policy: Any = SimpleNamespace(model=model, tokenizer=Words(), compute=half_width)
    engine = InProcessEngine(params, cuda_graphs=way != "module")
    engine.load_weights(policy, version=0)
    prompts = [Prompt(index=number, prompt_ids=tuple(ids), text="") for number, ids in enumerate(PROMPTS)]
    objection = patch.object(proof, "mismatch", lambda *_, **__: None)
    with (
        objection,
        patch.object(decode_flash, "can_decode", decode_flash.can_decode if way == "flash" else lambda *_: False),
    ):
        groups = engine.sample(SamplingRequest(prompts, 4, step=3))
    return [completion.token_ids for group in groups for completion in group.completions]


def engine_by_all_ways() -> dict[str, Any]:
    """Greedy completions by each way, before and after the weights changed in place."""
    model = model_of("qwen2")
    found = {}
    for weights in ("before", "after"):
        found[weights] = {way: sampled(model, way=way) for way in ("flash", "masked", "module")}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(torch.linspace(0.2, 1.8, parameter.shape[-1], device="cuda"))
    return found


def engine_ahead() -> dict[str, Any]:
    """Drawn completions: by steps that start before the tokens of the one before were seen, and one after another."""
    model, params = model_of("qwen3"), SamplingParams(max_completion_tokens=40, seed=3)
    ahead = sampled(model, params)
    with patch.object(layer_decoders.AheadBatch, "_ahead", lambda *_: None):
        after = sampled(model, params)
    return {"ahead": ahead, "after": after}


def kept_after_sampling() -> dict[str, Any]:
    """Memory of the device before and after a call, and what the host waited for in it."""
    model, params = model_of("qwen2"), SamplingParams(max_completion_tokens=40, seed=3)
    model(torch.ones(1, 8, dtype=torch.int64, device="cuda"))  # what the device keeps from its first use
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with counting() as counted:
        completions = sampled(model, params)
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {
        "before": before,
        "after": after,
        "waits": counted.synchronizations,
        "graphs": counted.graph_launches,
        "steps": max(map(len, completions)),
    }
