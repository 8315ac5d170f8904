"""Greedy completions of one model by transformers or by vLLM, as JSON: each engine runs in its own Python.

    python benchmarks/bench.py greedy_texts MODEL PROMPTS.json --engine vllm --tokens 64 --output TEXTS.json

PROMPTS.json is a list of texts, which are read as they are. Arithmetic is in float32, so that the engines differ in
nothing but the order of their sums.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def by_transformers(model: str, prompts: list[str], tokens: int, rows: int | None) -> list[str]:
    """One prompt at a time through the model's own forward pass, or more, padded; an adapter lies on its base."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if (Path(model) / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM as Loader
    else:
        from transformers import AutoModelForCausalLM as Loader
    network = Loader.from_pretrained(model, dtype=torch.float32).eval()
    texts = []
    for first in range(0, len(prompts), rows or 1):
        some = prompts[first : first + (rows or 1)]
        read = tokenizer(some, return_tensors="pt", add_special_tokens=False, padding=len(some) > 1)
        written = network.generate(**read, max_new_tokens=tokens, do_sample=False)
        texts += tokenizer.batch_decode(written[:, read["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def by_vllm(model: str, prompts: list[str], tokens: int, rows: int | None) -> list[str]:
    """All prompts through vLLM's engine, which chooses how many run at a time where ``rows`` is None."""
    from vllm import LLM, SamplingParams

    some = {"max_model_len": 1024, "gpu_memory_utilization": 0.2}  # without a GPU a share of the machine's memory
    some |= {"max_num_seqs": rows} if rows else {}
    engine = LLM(model=model, dtype="float32", enforce_eager=True, seed=0, **some)
    read = [{"prompt_token_ids": engine.get_tokenizer().encode(text, add_special_tokens=False)} for text in prompts]
    written = engine.generate(read, SamplingParams(temperature=0.0, max_tokens=tokens))
    return [one.outputs[0].text for one in written]


ENGINES = {"transformers": by_transformers, "vllm": by_vllm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, help="prompts at a time")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    texts = ENGINES[asked.engine](asked.model, json.loads(asked.prompts.read_text()), asked.tokens, asked.rows)
    asked.output.write_text(json.dumps(texts, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
