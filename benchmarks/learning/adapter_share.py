"""How much of a small LoRA adapter do rollout servers sample from?

A base on bfloat16's grid, an adapter of rank 16 that AdamW moves at a rate of 1e-5 after advantages of +1 and -1, and
servers as a run starts them: `oncurve serve` and vLLM, in float32 and in bfloat16. After 1, 5, 10 and 30 steps the
adapter is published as a run publishes it, and the log-probabilities of the same tokens are asked for over HTTP.
Reported is the projection of their change since step 0 on the change that the adapter makes in float32, with its
standard error over rows: 1 means that the servers have all that was taught. Beside it stand the same of the policy
that trains, in the type in which it trains, and the projection of the servers' change on the trainer's, which noise in
the latter makes smaller.

    python benchmarks/learning/adapter_share.py --output benchmarks/results/adapter_share.json
    python benchmarks/learning/adapter_share.py --model MODEL --rows 32 --ways serve-float32

Ways with vLLM need ONCURVE_VLLM_PYTHON. No time is measured.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import random
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oncurve.core.policy import compute_context
from oncurve.core.records import SamplingParams
from oncurve.fleet.servers.children import ChildServers, own_environment, serve_command
from oncurve.fleet.servers.local_vllm import VllmServers
from oncurve.fleet.servers.server_sampler import ServerSampler
from oncurve.fleet.settings import Deadlines, ServerKeys
from oncurve.policy.lora import add_adapter
from oncurve.policy.model_folder import load_model
from oncurve.policy.settings import LoraSettings, OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

STEPS = (1, 5, 10, 30)
WAYS = ("serve-float32", "serve-bfloat16", "vllm-float32", "vllm-bfloat16")
RANK, RATE = 16, 1e-5
TOKENS = 96
ADAPTER = "oncurve-adapter"


def base_folder(model: str, place: Path) -> Path:
    """The base as published models are: its weights in bfloat16."""
    loaded, tokenizer = load_model(model)
    loaded.to(torch.bfloat16).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@torch.no_grad()
def sampled_rows(model: Any, tokenizer: Any, count: int, seed: int) -> torch.Tensor:
    """Rows of a question and what the base makes of it."""
    torch.manual_seed(seed)
    draw, rows = random.Random(seed), []
    for start in range(0, count, 32):
        text = f"Question: Tom has {draw.randint(2, 60)} apples and buys {draw.randint(2, 60)} more.\nAnswer:"
        ids = torch.tensor([tokenizer(text)["input_ids"]]).expand(min(32, count - start), -1)
        words = {"do_sample": True, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
        rows.append(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **words)[:, -TOKENS - 1 :])
    return torch.cat(rows)


def logprobs(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """log p of every token of each row but the first."""
    found = []
    for part in rows.split(16):
        logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, part[:, 1:, None])[..., 0])
    return torch.cat(found)


def own_logprobs(model: Any, rows: torch.Tensor, kind: Any) -> torch.Tensor:
    """The same through the layers that train, in a type."""
    from oncurve.core.batch import Batch, Size
    from oncurve.policy.forward import completion_logprobs

    found = []
    with torch.no_grad(), compute_context(torch.device("cpu"), kind):
        for part in rows.split(16):
            many, length = len(part), part.shape[1] - 1
            ones, zeros = torch.ones(many, dtype=torch.long), torch.zeros(many, length)
            mask, size = torch.ones(many, length, dtype=torch.bool), Size(many, many * length, many)
            batch = Batch(
                part[:, :1], ones, part[:, 1:], mask, ones * length, torch.arange(many), zeros[:, 0], zeros, size
            )
            found.append(completion_logprobs(model, batch, temperature=1.0, packed=True)[0])
    return torch.cat(found)


def train(model: Any, rows: torch.Tensor) -> Iterator[int]:
    """AdamW on advantages of +1 and -1; gives the number of each step after it."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    signs = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(1)).sign()
    for step in range(1, max(STEPS) + 1):
        (-(logprobs(model, rows) * signs).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def share(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Projection of a change [rows, tokens] on the exact one, and its standard error over rows."""
    found, exact = found.double(), exact.double()
    size = exact.square().sum()
    fraction = (found * exact).sum() / size
    error = (((found - fraction * exact) * exact).sum(dim=1).square().sum() ** 0.5) / size
    return {"share": round(float(fraction), 4), "standard_error": round(float(error), 4)}


@contextmanager
def servers_of(way: str, base: Path, logs: Path) -> Iterator[ChildServers]:
    """One server of a kind, as a run starts it."""
    kind, dtype = way.split("-")
    if kind == "serve":
        command = serve_command(str(base), settings=[f"policy.compute_type={dtype}", "policy.device=cpu"])
        made = ChildServers(1, name="oncurve", logs=logs, command=command, environment=own_environment(1))
    else:
        words = {"adapter_rank": RANK} if "adapter_rank" in inspect.signature(VllmServers.__init__).parameters else {}
        made = VllmServers(
            str(base), ServerKeys.model_construct(vllm_servers=1), dtype=dtype, on_cpu=True, logs=logs, **words
        )
    try:
        yield made
    finally:
        made.close()


def scores(url: str, rows: torch.Tensor, *, adapter: bool) -> torch.Tensor:
    """What a server says of the same tokens."""
    found = []
    for row in rows.tolist():
        sampling = {"n": 1, "temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body: dict[str, Any] = {"request_id": "share", "token_ids": row, "sampling_params": sampling}
        body |= {"model": ADAPTER} if adapter else {}
        words = {"data": json.dumps(body).encode(), "headers": {"Content-Type": "application/json"}}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/inference/v1/generate", **words)) as answer:
            told = json.loads(answer.read())["prompt_logprobs"]
        found.append([entry[str(token)]["logprob"] for token, entry in zip(row[1:], told[1:], strict=True)])
    return torch.tensor(found)


def measure(
    way: str, base: Path, versions: dict[int, Any], rows: torch.Tensor, exact: dict[int, Any]
) -> dict[str, Any]:
    """The shares of one way, step by step."""
    kind, dtype = way.split("-")
    model, tokenizer = load_model(str(base))
    adapter = add_adapter(model, LoraSettings(rank=RANK), base=str(base))
    words: dict[str, Any] = {"compute_type": dtype, "adapter": adapter}
    policy = TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings(), **words)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place, servers_of(way, base, Path(place) / "logs") as made:
        deadlines = Deadlines(gone_seconds=600.0)
        sampler = ServerSampler(
            SamplingParams(),
            ServerKeys.model_construct(servers=tuple(made.urls), deadlines=deadlines),
            weights_folder=Path(place) / "weights",
        )
        try:
            before: dict[str, torch.Tensor] = {}
            for step, weights in versions.items():
                model.load_state_dict(weights, strict=False)
                sampler.load_weights(policy, step)
                now = {
                    "servers": scores(made.urls[0], rows, adapter=kind == "vllm" and hasattr(made, "adapter_rank")),
                    "training": own_logprobs(model, rows, dtype),
                }
                if step == 0:
                    before = now
                    continue
                found[str(step)] = {name: share(one - before[name], exact[step]) for name, one in now.items()}
                own = now["training"] - before["training"]
                found[str(step)]["servers_of_training"] = share(now["servers"] - before["servers"], own)
                found[str(step)] |= {
                    name.removeprefix("mismatch/"): value
                    for name, value in sampler.weight_metrics().items()
                    if name.startswith("mismatch/")
                }
                print(way, step, json.dumps(found[str(step)]), flush=True)
        finally:
            sampler.close()
    return found


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--train-rows", type=int, default=64)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default=None, help="what is measured, if it is not this folder")
    chosen = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as place:
        base = base_folder(chosen.model, Path(place) / "base")
        model, tokenizer = load_model(str(base))
        rows = sampled_rows(model, tokenizer, chosen.rows, seed=0)
        add_adapter(model, LoraSettings(rank=RANK), base=str(base))

        def trained() -> dict[str, torch.Tensor]:
            return {name: copy.deepcopy(one) for name, one in model.state_dict().items() if ".lora_" in name}

        versions, exact = {0: trained()}, {}
        with torch.no_grad():
            start = logprobs(model, rows)
        for step in train(model, rows[: chosen.train_rows]):
            if step in STEPS:
                versions[step] = trained()
                with torch.no_grad():
                    exact[step] = logprobs(model, rows) - start
        nats = {str(step): float(change.square().mean() ** 0.5) for step, change in exact.items()}
        result = {
            "model": Path(chosen.model).name,
            "rank": RANK,
            "rate": RATE,
            "tokens": int(np.prod(rows[:, 1:].shape)),
            "change_nats": nats,
            "commit": chosen.commit,
            "ways": {},
        }
        for way in chosen.ways.split(","):
            result["ways"][way] = measure(way, base, versions, rows, exact)
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
