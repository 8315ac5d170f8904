"""Stage B of a first hour on a GPU: training, sampling and memory of models of 0.5 and 1.5 billion parameters."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_first_agreement import Heard, gaps, policy_of, sample
from gpu_first_probe import Answer, Setting, judged
from gpu_first_timing import checkpoint, is_gpu, kernels, memory, nominal, seconds_each, seconds_of
from models import FIRST_WORD, SHAPES, Shape, build, make_prompts
from roofline import backward, decode, forward

from oncurve.algorithm.presets import build as build_algorithm
from oncurve.core.batch import Batch, collate
from oncurve.core.draw import draw
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.model.decoding import LayerDecoder
from oncurve.model.weights import backbone_of, head_matrix
from oncurve.policy.model_folder import load_model
from oncurve.policy.settings import OptimizerSettings, PolicySection
from oncurve.policy.trained_policy import TrainedPolicy

TINY = Shape(hidden=64, layers=2, heads=4, kv_heads=2, mlp=128, vocabulary=1024)
CONTEXT = 4096


def shape_of(setting: Setting) -> Shape:
    """Of the model that an item is about."""
    return TINY if setting.tiny else SHAPES[setting.options["model"]]


def half(setting: Setting) -> str:
    """The compute type of a run on the device."""
    return "bfloat16" if is_gpu(setting.device) else "float32"


def models(setting: Setting) -> Answer:
    """Random checkpoints of both sizes, whose completions never end by themselves."""
    made = {}
    for size in ("0.5B", "1.5B"):
        folder = setting.work / "models" / size
        if not (folder / "config.json").is_file():
            unfinished = folder.with_name(f".{size}")
            build(unfinished, TINY if setting.tiny else SHAPES[size], mean_tokens=None, max_length=CONTEXT)
            unfinished.rename(folder)
        made[size] = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    return judged(True, ", ".join(f"{size}: {gigabytes:.2f} GB" for size, gigabytes in made.items()))


def make_batch(setting: Setting, tokenizer: Any, *, prompts: int, group: int, prompt: int, most: int) -> Batch:
    """Completions of random tokens, between a quarter of the most and the most, with a signal in every group."""
    generator = torch.Generator().manual_seed(1)
    vocabulary, groups = shape_of(setting).vocabulary, []
    for one in make_prompts(tokenizer, count=prompts, num_tokens=prompt):
        completions = []
        for index in range(group):
            length = int(torch.randint(max(most // 4, 1), most + 1, (), generator=generator))
            ids = tuple(torch.randint(FIRST_WORD, vocabulary, (length,), generator=generator).tolist())
            completions.append(Completion(one.prompt_ids, ids, "", (-10.0,) * length, "stop", 0, index))
        groups.append(Group(one, tuple(completions)))
    signs = torch.randint(0, 2, (prompts, group), generator=generator) - 0.5
    return collate(groups, signs * (1 + torch.rand(signs.shape, generator=generator)))


def proofs(setting: Setting) -> Answer:
    """How far each way of computing is from padded rows in float32, and what half width alone makes of those."""
    heard, folder = Heard(), checkpoint(setting.work, setting.options["model"])
    model, tokenizer = load_model(str(folder))
    model = model.to(setting.device)
    batch = make_batch(setting, tokenizer, prompts=2, group=4, prompt=48, most=16 if setting.tiny else 160)

    def outcome(packing: bool, kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
        policy = TrainedPolicy(
            model, tokenizer, optimizer=OptimizerSettings(), section=PolicySection(packing=packing), compute_type=kind
        )
        logprobs, _ = policy.logprobs(batch)
        model.zero_grad(set_to_none=True)
        (logprobs * batch.advantages[:, None].to(logprobs)).sum().backward()
        return logprobs.detach().double().cpu(), model.model.layers[0].self_attn.q_proj.weight.grad.double().cpu()

    exact = outcome(False, "float32")
    found = {"padded, half": outcome(False, "bfloat16"), "packed, float32": outcome(True, "float32")}
    found["packed, half"] = outcome(True, "bfloat16")
    far = {way: [float((one - ideal).norm() / ideal.norm()) for one, ideal in zip(values, exact, strict=True)]
           for way, values in found.items()}  # fmt: skip
    policy = policy_of(setting.device, half(setting), str(folder))
    prompts = make_prompts(tokenizer, count=4, num_tokens=48)
    params = SamplingParams(max_completion_tokens=8 if setting.tiny else 200)
    decoded = {way: vars(gaps(policy, sample(policy, prompts, 4, params, cuda_graphs=recorded)))
               for way, recorded in (("engine", True), ("modules", False))}  # fmt: skip
    warned = [line for line in heard.lines if line.startswith(("WARNING", "ERROR"))]
    rounding = far["padded, half"]
    said = "; ".join(warned) or (
        f"of log-probabilities: rounding {rounding[0]:.1e}, "
        + ", ".join(f"{way} {values[0]:.1e}" for way, values in far.items() if way != "padded, half")
        + f"; decoding: mean {decoded['engine']['mean']:.1e}, modules {decoded['modules']['mean']:.1e}"
    )
    return judged(not warned, said, relative=far, decoding=decoded, log=heard.lines)


def training(setting: Setting) -> Answer:
    """Updates at 8,192 tokens a microbatch: with and without checkpointing."""
    way, folder = setting.options["way"], checkpoint(setting.work, setting.options["model"])
    _, tokenizer = load_model(str(folder))
    most = (2, 2, 16, 24) if setting.tiny else (16, 8, 256, 512)
    batch = make_batch(setting, tokenizer, **dict(zip(("prompts", "group", "prompt", "most"), most, strict=True)))
    work = operations(shape_of(setting), batch)
    if way == "packed":  # to share nothing, every completion says that its prompt is its own
        batch = replace(batch, group_ids=torch.arange(len(batch))).measured()
    rate, table = nominal(setting.device), {}
    for checkpointing in (False, True):
        name = "checkpointing" if checkpointing else "plain"
        policy = policy_of(
            setting.device, half(setting), str(folder), packing=way != "padded", gradient_checkpointing=checkpointing,
            tokens_per_microbatch=8192,
        )  # fmt: skip
        step = update(policy, batch)
        memory(setting.device)
        seconds = seconds_of(step, setting.device, repeats=1 if setting.tiny else 3)
        table[name] = {
            "seconds": seconds,
            "tokens_per_second": int(batch.row_lengths.sum()) / seconds,
            "share_of_nominal": work / seconds / rate.operations_per_second if rate else None,
            **memory(setting.device),
        }
        if name == "plain":
            table["kernels"] = kernels(step, setting.device)
        del policy, step
        gc.collect()
        if is_gpu(setting.device):
            torch.cuda.empty_cache()
    plain = table["plain"]
    share = plain["share_of_nominal"]
    said = ", ".join(
        f"{name} {row['tokens_per_second']:,.0f} tokens/s" for name, row in table.items() if name != "kernels"
    )
    said += "" if share is None else f"; plain {share:.1%} of the nominal rate, peak {plain['peak_gib']:.1f} GiB"
    return judged(True, said, ways=table, train_utilization=share, operations=work)


def operations(shape: Shape, batch: Batch) -> float:
    """The least work of an update: every token once, prompts once for their group, nothing computed again."""
    rows = list(zip(*(part.tolist() for part in (batch.group_ids, batch.prompt_lengths, batch.completion_lengths)),
                    strict=True))  # fmt: skip
    predicted, size = int(batch.mask.sum()), shape.size(2)
    once = forward(size, rows, predicted=predicted)
    return once.operations + backward(size, once, predicted=predicted).operations


def update(policy: TrainedPolicy, batch: Batch) -> Callable[[], None]:
    """An update as the loop takes it."""
    algorithm = build_algorithm("dapo", group_size=8, max_completion_tokens=512)

    def step() -> None:
        for part in policy.microbatches(batch):
            logprobs, entropy = policy.logprobs(part)
            loss, _ = algorithm.loss(logprobs, entropy, part.to(logprobs.device))
            policy.backward(loss)
        policy.update()

    return step


def decoding(setting: Setting) -> Answer:
    """Decode steps by rows and context, recorded and operation by operation; the draw; kernels of one step."""
    policy = policy_of(setting.device, half(setting), str(checkpoint(setting.work, setting.options["model"])))
    shapes = [(2, 24)] if setting.tiny else list(itertools.product((1, 32, 128, 256, 512), (256, 1024, 3000)))
    steps, watched = {}, {}
    for rows, context in shapes:
        for records in (True, False) if is_gpu(setting.device) else (False,):
            way = f"{rows} rows, {context} tokens, {'recorded' if records else 'operation by operation'}"
            try:
                with decode_step(policy, rows, context, records=records) as step:
                    first = seconds_of(step, setting.device, repeats=1, warmup=0)
                    each = seconds_each(step, setting.device, times=2 if setting.tiny else 20)
                    steps[way] = {"first": first, "each": each}
                    if (rows, context) in ((128, 1024), (2, 24)):
                        watched[way] = kernels(step, setting.device)
            except torch.OutOfMemoryError:
                steps[way] = {"first": None, "each": None}
            gc.collect()
    draws = {rows: draw_seconds(setting, rows) for rows in ((2,) if setting.tiny else (1, 32, 128, 256, 512))}
    said = ", ".join(f"{way}: {row['each'] * 1e3:.2f} ms" for way, row in steps.items()
                     if row["each"] and way.startswith(("128", "256 rows, 1024", "2 rows")))  # fmt: skip
    return judged(bool(said), said, steps=steps, draw=draws, kernels=watched)


@contextmanager
def decode_step(
    policy: TrainedPolicy,
    rows: int,
    context: int,
    *,
    records: bool,
    change: Callable[[LayerDecoder], None] | None = None,
) -> Iterator[Callable[[], Any]]:
    """While it lasts, a function that computes one more token of many rows, and draws none.

    ``change`` may alter the decoder before its first step.
    """
    backbone = backbone_of(policy.model)
    if backbone is None:
        raise SystemExit("the engine does not know the layers of this model")
    count, prompt = -(-rows // 8), min(256, context // 2)
    past = context - prompt - 1
    with torch.inference_mode(), policy.compute():
        kind = backbone.compute_type()
        with torch.autocast(backbone.device.type, enabled=False):
            decoder = LayerDecoder(
                backbone, head_matrix(policy.model), kind, slots=rows, prompt_slots=count, prompt_tokens=prompt,
                completion_tokens=past + 1, records=records,
            )  # fmt: skip
            decoder.prefill([[FIRST_WORD + number] * prompt for number in range(count)], range(count))
            decoder.end_prompts()
            if change is not None:
                change(decoder)
            slots = torch.arange(rows)
            told = (slots, torch.full_like(slots, past), slots // 8, torch.full_like(slots, prompt))
            places, tokens = torch.stack(told, dim=1), torch.full_like(slots, FIRST_WORD)
            yield lambda: decoder.step(tokens, torch.full_like(slots, prompt + past), places)


def draw_seconds(setting: Setting, rows: int) -> float:
    """Of drawing a token for each row."""
    logits = torch.randn(rows, shape_of(setting).vocabulary, device=setting.device)
    uniform = torch.rand(rows, dtype=torch.float64, device=setting.device)
    return seconds_each(lambda: draw(logits, uniform, SamplingParams(), forbidden=[]), setting.device, times=10)


def sampling(setting: Setting) -> Answer:
    """The engine as a run uses it: tokens per second, with and without a stop string, and through modules."""
    policy = policy_of(setting.device, half(setting), str(checkpoint(setting.work, setting.options["model"])))
    count, prompt, new = (1, 16, 8) if setting.tiny else (32, 256, 256)
    prompts, group = make_prompts(policy.tokenizer, count=count, num_tokens=prompt), 8
    rate, table = nominal(setting.device), {}
    ways: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "256 rows": ((), {}),
        "256 rows, a stop string": (("</answer>",), {}),
        "128 rows": ((), {"max_rows": 128}),
        "modules": ((), {"cuda_graphs": False}),
    }
    for name, (stop, options) in ways.items():
        chosen = prompts[: max(count // 4, 1)] if name == "modules" else prompts
        params = SamplingParams(max_completion_tokens=new, stop=stop)
        kept: list[Group] = []

        def once(
            kept: list[Group] = kept, chosen: list[Prompt] = chosen, params: SamplingParams = params, **options: Any
        ) -> None:
            kept[:] = sample(policy, chosen, group, params, **options)

        seconds = seconds_of(partial(once, **options), setting.device, repeats=1)
        batches = -(-len(chosen) * group // options.get("max_rows", 256))
        table[name] = {"seconds": seconds, **throughput(setting, kept, seconds, batches=batches)}
    least = table["256 rows"]["bytes"]
    share = least / table["256 rows"]["seconds"] / rate.bytes_per_second if rate else None
    said = ", ".join(f"{name}: {row['tokens_per_second']:,.0f} tokens/s" for name, row in table.items())
    said += "" if share is None else f"; {share:.1%} of the nominal bandwidth"
    return judged(True, said, ways=table, sample_utilization=share, after=memory(setting.device))


def throughput(setting: Setting, groups: list[Group], seconds: float, *, batches: int) -> dict[str, float]:
    """Tokens per second, and the least bytes that their decoding reads."""
    lengths = [(len(group.prompt.prompt_ids), [len(c.token_ids) for c in group.completions]) for group in groups]
    tokens, longest = sum(sum(own) for _, own in lengths), max(max(own) for _, own in lengths)
    least = decode(shape_of(setting).size(2), lengths, steps=batches * longest)
    return {"tokens_per_second": tokens / seconds, "tokens": tokens, "bytes": least.bytes}
