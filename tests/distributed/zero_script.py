"""What two processes under DeepSpeed find, in the Python that has it: run by the test, result by result.

python tests/distributed/zero_script.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

import tasks
import workers
from safetensors.torch import save_file

from oncurve.algorithm.precision import set_dither
from oncurve.core.errors import ConfigError
from oncurve.policy.backend import TensorFiles
from oncurve.policy.deepspeed_settings import read_settings
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.sharding import ZeroSettings
from oncurve.run.state import capture, restore

FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 0,
    },
}
"""A file as people have them."""
ZERO = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
SAVED = ("zero2-offload", "zero2-offload-lora", "zero3-offload", "zero3")


def settings(folder: Path, **zero: Any) -> ZeroSettings:
    """A file of the process's own, read back: two processes share the folder."""
    path = folder / f"ds-{os.getpid()}.json"
    path.write_text(json.dumps(FILE | {"zero_optimization": FILE["zero_optimization"] | zero}))  # type: ignore[operator]
    return read_settings(str(path), offload=False)


def train_all(processes: Processes, variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every variant, one after the other in the same processes."""
    found = {}
    for name, options in variants.items():
        options = dict(options)
        with tempfile.TemporaryDirectory() as folder:
            options["settings"] = settings(Path(folder), **options.pop("zero"))
        found[name] = tasks.train(processes, way="deepspeed", double=False, **options)
    return found


def save_and_go_on(processes: Processes, root: Path, variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Two steps of training, and the same with a checkpoint and a new policy in between."""
    found = {}
    for name, options in variants.items():
        place = root / name
        place.mkdir(parents=True, exist_ok=True)
        chosen = {"way": "deepspeed", "double": False, "lora": options["lora"]}
        zero = settings(place, **options["zero"])
        taken: list[Any] = []

        def save(policy: Any, taken: list[Any] = taken) -> None:
            taken.append(
                capture(
                    policy,
                    step=1,
                    state={"num_updates": policy.num_updates, "num_scheduled": policy.num_scheduled},
                    facts={},
                )
            )

        policy = tasks.make_policy(processes, **chosen, settings=zero)
        tasks.train(processes, **chosen, policy=policy, span=(0, 2), after=save)
        whole = tasks.train(processes, **chosen, policy=policy, span=(2, 5))
        policy = tasks.make_policy(processes, **chosen, settings=zero)
        write_tensors_only(taken[0], place, processes)
        kind = "whole" if taken[0].is_whole else "trained"
        load(policy, place, kind)
        again = tasks.train(processes, **chosen, policy=policy, span=(2, 5))
        found[name] = {"whole": whole["weights"], "again": again["weights"]}
    return found


def load(policy: Any, place: Path, kind: str) -> None:
    """What ``restore`` does with a checkpoint, for models without a tokenizer beside them."""
    if kind == "trained":
        restore(policy, place, {"weights": "trained"})
        return
    saved, moments = (TensorFiles(place.glob(f"{stem}*.safetensors")) for stem in ("trained", "optimizer"))
    for name, tensor in policy.trained_model.state_dict(keep_vars=True).items():
        policy.backend.load_shard(tensor, saved.reader(name))
    policy.backend.load_moments(moments)
    policy.publish()
    policy.num_updates = json.loads((place / "state.json").read_text())["num_updates"]


def write_tensors_only(snapshot: Any, place: Path, processes: Processes) -> None:
    """A checkpoint without the tokenizer, which these tiny models do not have: the share of each process."""
    own = f"-{processes.rank + 1:05d}-of-{processes.count:05d}" if snapshot.is_partial else ""
    for stem, tensors in (("trained", snapshot.weights), ("optimizer", snapshot.optimizer)):
        if tensors:
            save_file(dict(tensors), place / f"{stem}{own}.safetensors")
    if processes.is_main:
        (place / "state.json").write_text(json.dumps(dict(snapshot.state)))
    processes.all_gather(None)


def senseless(processes: Processes) -> dict[str, Any]:
    """After two updates, one whose loss has no gradient and one whose loss is no number in one of the processes."""
    found: dict[str, Any] = {}
    policy = tasks.make_policy(processes, "deepspeed", double=False, lora=False, settings=ZeroSettings(FILE | ZERO))
    tasks.train(processes, way="deepspeed", double=False, lora=False, policy=policy, span=(0, 2))
    for name, factor in (("zero", 0.0), ("nan", float("nan") if processes.rank == 1 else 1.0)):
        before = {key: p.detach().clone() for key, p in policy.trained_model.named_parameters()}
        for microbatch in policy.microbatches(tasks.batch_of(one_row=False)):
            logprobs, _ = policy.logprobs(microbatch)
            policy.backward(logprobs.sum() * factor)
        statistics = policy.update()
        found[name] = max(
            float((p - before[key]).detach().abs().max()) for key, p in policy.trained_model.named_parameters()
        )
        keys = ("policy/skipped_updates", "policy/nonfinite_updates")
        found[f"{name}_statistics"] = {key: statistics[key].value for key in keys}
    return found


def dithered(processes: Processes) -> dict[str, dict[str, torch.Tensor]]:
    """Log-probabilities in bfloat16 after two updates by dithered copies, by stage; and those that one process computes
    with the same weights, by the same copies and by copies to the nearest."""
    found = {}
    for stage in (1, 2):
        zero = {"zero_optimization": {"stage": stage}}
        options: dict[str, Any] = {"double": False, "lora": False}
        policy = tasks.make_policy(processes, "deepspeed", **options, settings=ZeroSettings(FILE | zero), dither=7)
        tasks.train(processes, way="deepspeed", **options, policy=policy, span=(0, 2))
        seen = {"deepspeed": policy}
        for name, seed in (("alone", 7), ("nearest", None)):
            seen[name] = alone = tasks.make_policy(ALONE, "ddp", **options, dither=7)
            set_dither(alone.model, seed)
            for key, weight in alone.model.named_parameters():
                weight.data.copy_(policy.backend.full_tensor(dict(policy.trained_model.named_parameters())[key]))
        batch = tasks.batch_of(one_row=False)
        annotated = {name: one.annotate(batch, old=True, entropy=False, reference=False) for name, one in seen.items()}
        found[f"stage {stage}"] = {name: one.old_logprobs for name, one in annotated.items()}
    return found  # type: ignore[return-value]


def refused(processes: Processes) -> dict[str, str]:
    """What DeepSpeed itself does not take, as a message."""
    options: dict[str, Any] = {"way": "deepspeed", "double": False, "lora": False}
    try:
        tasks.make_policy(
            processes, **options, settings=ZeroSettings({"zero_optimization": {"stage": 2, "nonsense": 1}})
        )
    except ConfigError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    variants = {
        "zero1": {"zero": {"stage": 1, "offload_optimizer": {"device": "none"}}, "lora": False},
        "zero2": {"zero": {"stage": 2, "offload_optimizer": {"device": "none"}}, "lora": False},
        "zero2-offload": {"zero": {}, "lora": False},
        "zero2-offload-lora": {"zero": {}, "lora": True},
        "zero2-offload-idle": {"zero": {}, "lora": False, "one_row": True, "kl_coef": 0.0},
        "zero2-offload-lora-idle": {"zero": {}, "lora": True, "one_row": True, "kl_coef": 0.0},
        "zero1-offload": {"zero": {"stage": 1}, "lora": False},
        "zero3": {"zero": {"stage": 3, "offload_optimizer": {"device": "none"}}, "lora": False},
        "zero3-offload": {"zero": {"stage": 3}, "lora": False},
        "zero3-offload-lora": {"zero": {"stage": 3}, "lora": True},
        "zero3-idle": {"zero": {"stage": 3}, "lora": False, "one_row": True, "kl_coef": 0.0},
    }
    if len(sys.argv) > 2:
        variants = {name: variants[name] for name in sys.argv[2:]}
    saved = {name: variants[name] for name in SAVED if name in variants}
    found = {
        "variants": variants,
        "trained": workers.run(2, train_all, folder / "train", variants=variants),
        "saved": workers.run(2, save_and_go_on, folder / "save", root=folder / "saved", variants=saved),
        "senseless": workers.run(2, senseless, folder / "senseless"),
        "refused": workers.run(2, refused, folder / "refused"),
        "dithered": workers.run(2, dithered, folder / "dithered"),
    }
    torch.save(found, folder / "found.pt")
