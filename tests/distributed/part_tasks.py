"""What processes do in the tests of weights in parts: load a model, save and open checkpoints, watch their memory."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tasks
import torch

from oncurve.algorithm import precision
from oncurve.policy import dithered_parts
from oncurve.policy.distributed import Processes
from oncurve.policy.model_folder import load_tokenizer
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.load import parse_config
from oncurve.run.builder import make_policy
from oncurve.run.checkpoint_manifest import verify
from oncurve.run.state import capture, restore, write

RECIPE = """
model: {model}
data: {{type: word_problems}}
rewards: [{{type: r1_zero}}]
algorithm: {{type: grpo, kl_coef: 0.05, reference: average, reference_share: 0.5, group_size: 4}}
policy: {{parallel: fsdp, compute_type: {compute_type}, shard_degree: {shard_degree}}}
rollouts: {{type: servers, servers: ["http://127.0.0.1:1"]}}
"""


class Peak:
    """How much memory of its own a process takes on top, in bytes."""

    def __init__(self) -> None:
        self.before = self.most = held()

    @property
    def growth(self) -> int:
        return self.most - self.before


def held() -> int:
    """Bytes of this process that no file stands behind: heap, and what is mapped without a file."""
    found = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * sum(map(int, found))


@contextmanager
def watched() -> Iterator[Peak]:
    """The peak while it lasts, looked at all the time."""
    peak, done = Peak(), threading.Event()

    def look() -> None:
        while not done.wait(0.0005):
            peak.most = max(peak.most, held())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield peak
    finally:
        done.set()
        looking.join()


def tokenized(policy: TrainedPolicy) -> TrainedPolicy:
    policy._tokenizer = load_tokenizer("embedded")[1]  # type: ignore[misc]  # the models of tasks have none
    return policy


def recipe_policy(
    processes: Processes, model: Path, *, compute_type: str = "float32", shard_degree: int | None = None
) -> TrainedPolicy:
    """The policy of a recipe that trains a model in parts, with a reference."""
    degree = "null" if shard_degree is None else shard_degree
    config = parse_config(RECIPE.format(model=model, compute_type=compute_type, shard_degree=degree))
    return make_policy(config, with_reference=True, processes=processes)


def move(policy: TrainedPolicy) -> None:
    """One update with a gradient that no model would give."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.trained_model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        tasks.local(parameter.grad).normal_(generator=generator)
    policy.update()


def save(policy: TrainedPolicy, root: Path, *, step: int) -> Path:
    """A checkpoint, by all processes; what it is called."""
    taken = capture(
        policy,
        step=step,
        state={"num_updates": policy.num_updates, "num_scheduled": policy.num_scheduled},
        facts={},
        moves_reference=True,
    )
    write(taken, policy, root)
    policy.processes.all_gather(None)
    return root / f"step_{step:06d}"


def memory(processes: Processes, *, model: Path, root: Path) -> dict[str, int]:
    """Peaks of loading a model, of copying and writing a checkpoint, and of reading it; and what a part is."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # what is freed goes back at once, and does not count
    with watched() as loading:
        policy = recipe_policy(processes, model)
    move(policy)
    with watched() as copying:
        taken = capture(policy, step=1, state={"num_updates": 1, "num_scheduled": 1}, facts={}, moves_reference=True)
    with watched() as writing:
        write(taken, policy, root)
    kept = sum(t.nbytes for kind in (taken.weights, taken.optimizer, taken.reference) for t in (kind or {}).values())
    processes.all_gather(None)
    weights = sum(tasks.local(p).nbytes for p in policy.trained_model.parameters())
    del taken, policy
    fresh = recipe_policy(processes, model)
    folder = root / "step_000001"
    manifest = verify(folder)
    with watched() as reading:
        restore(fresh, folder, manifest)
    return {
        "loading": loading.growth,
        "copying": copying.growth,
        "writing": writing.growth,
        "reading": reading.growth,
        "kept": kept,
        "part": weights,
        "largest": max(p.numel() * p.element_size() for p in fresh.trained_model.parameters()),
    }


def state_of(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    """All weights, moments and the weights of the reference, whole."""
    found = {name: policy.backend.full_tensor(p).clone() for name, p in policy.trained_model.named_parameters()}
    found |= {
        name: policy.backend.full_tensor(value).clone() for name, value in policy.backend.optimizer_tensors().items()
    }
    if policy.reference is not None:
        found |= {
            f"ref:{name}": policy.backend.full_tensor(p).clone() for name, p in policy.reference.named_parameters()
        }
    return found


def save_trained(processes: Processes, *, root: Path, **options: Any) -> dict[str, Any]:
    """Two updates, a checkpoint, and three more."""
    policy = tokenized(tasks.make_policy(processes, **options))
    tasks.train(processes, policy=policy, span=(0, 2), **options)
    policy.move_reference(0.3)
    save(policy, root, step=2)
    saved = state_of(policy)
    return {"saved": saved, "end": tasks.train(processes, policy=policy, span=(2, 5), **options)["weights"]}


def go_on(processes: Processes, *, root: Path, **options: Any) -> dict[str, Any]:
    """The same from that checkpoint."""
    policy = tokenized(tasks.make_policy(processes, **options))
    folder = root / "step_000002"
    restore(policy, folder, verify(folder))
    opened = state_of(policy)
    return {"opened": opened, "end": tasks.train(processes, policy=policy, span=(2, 5), **options)["weights"]}


def broken_write(processes: Processes, *, root: Path) -> str:
    """What is said when the second process cannot write its share."""
    from oncurve.run import state
    from oncurve.run_errors import CheckpointError

    policy = tokenized(tasks.make_policy(processes, "fsdp", double=False, lora=False))
    save(policy, root, step=1)
    if not processes.is_main:
        state.save_file = full  # type: ignore[assignment]
    try:
        save(policy, root, step=2)
    except CheckpointError as error:
        return str(error)
    return ""


def learn_in_half_width(processes: Processes, *, model: Path, shard_degree: int | None) -> dict[str, Any]:
    """Two updates in bfloat16: the weights, the metrics, the copy of the weights to sample from, and the share of the
    numbers of one microbatch's gradient that bfloat16 holds: all of them, if it was summed in bfloat16."""
    policy = recipe_policy(processes, model, compute_type="bfloat16", shard_degree=shard_degree)
    policy.rate_of = lambda number: 1e-3
    batch = tasks.batch_of(one_row=False)
    for _ in range(2):
        narrow = torch.zeros(2)
        for number, part in enumerate(policy.microbatches(batch)):
            policy.backward(-policy.logprobs(part)[0].sum())
            for name, parameter in policy.trained_model.named_parameters() if number == 0 else ():
                is_rounded = "layers." in name and parameter.ndim > 1  # the other weights are computed with as they are
                gradient = tasks.local(parameter.grad) if is_rounded else torch.zeros(0)
                narrow += torch.tensor([(gradient == gradient.bfloat16().float()).sum(), gradient.numel()])
        metrics = policy.update()
    policy.publish()
    copied = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    whole = {name: policy.backend.full_tensor(one).clone() for name, one in policy.trained_model.named_parameters()}
    share = float(narrow[0] / narrow[1])
    return {"whole": whole, "copied": copied, "arrived": metrics["policy/arrived"], "narrow": share}


def full(*_: Any, **__: Any) -> None:
    raise OSError("No space left on device")


def logprobs(
    processes: Processes, *, model: Path, compute_type: str, tokens: int = 50, planted: bool = False
) -> torch.Tensor:
    """Log-probabilities of the batch of these tests under a policy as the recipe makes it; ``planted``: with a mistake
    in the index of a part's numbers."""
    if planted:
        dithered_parts.narrow = lambda part, dtype, key, first: precision.narrow(part, dtype, key, 0)
    policy = recipe_policy(processes, model, compute_type=compute_type)
    policy.tokens_per_microbatch = tokens
    found = policy.annotate(tasks.batch_of(one_row=False), old=True, entropy=False, reference=True)
    assert found.old_logprobs is not None
    assert found.ref_logprobs is not None
    assert torch.equal(found.old_logprobs, found.ref_logprobs)
    return found.old_logprobs
