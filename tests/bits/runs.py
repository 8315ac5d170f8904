"""Small runs through the public interface, and the sha256 of the weights with which each of them ends.

``python tests/bits/runs.py --write`` writes the values of this machine into ``expected.json``; a change that should
change no number must leave them as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ

from tiny_models import END, make_model, make_tokenizer, model_config  # noqa: E402

EXPECTED = HERE / "expected.json"
ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 7) for b in range(1, 5)]
REWARD = '''"""The reward of these runs."""


def reward(completion: str, answer: str) -> float:
    """Many digits, few other things: something that every random model can do a little."""
    return sum(letter.isdigit() or letter in answer for letter in completion) / (1 + len(completion))
'''
SAME_ROWS = {"split_seed": 27}
"""Where rows are held out by all their columns, the seed that takes the two rows which the others hold out."""
LIKELY = ("<tool>", "</tool>", "1", "2", "+", "9", END)
"""What a model for episodes says most: calls, well formed or not, and the end of its turn."""


def tiny_model(folder: Path, architecture: str = "qwen2", *, calls: bool = False, **sizes: int) -> Path:
    """The folder of a random model with bytes as tokens; one that ``calls`` has the marks of a call as tokens too."""
    tokenizer = make_tokenizer()
    if calls:
        tokenizer.add_tokens(["<tool>", "</tool>"])
    config = model_config(architecture, tokenizer)
    config.update(sizes)
    if sizes:
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    model = make_model(config)
    if calls:
        rows = [tokenizer.convert_tokens_to_ids(token) for token in LIKELY]
        model.get_input_embeddings().weight.data[rows] *= 3.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def digits(completion: str, answer: str) -> float:
    """The reward of REWARD."""
    return sum(letter.isdigit() or letter in answer for letter in completion) / (1 + len(completion))


def even_odds(completion: str, answer: str) -> float:
    """Half of all groups of two have no signal."""
    return float(sum(map(ord, completion)) % 2)


def many_calls(completion: str, answer: str) -> float:
    """A call is worth more than its letters cost."""
    return completion.count("tool>") - len(completion) / 100


class Echo:
    """Three turns, each worth its digits."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        return " begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return f"heard {len(action)}", sum(map(str.isdigit, action)) / 10, self.turns == 3, False, {}


async def asks_twice(row: dict[str, Any], client: Any) -> float:
    """Two turns of one conversation, paid by the digits in them."""
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    first = await client.chat.completions.create(model="any", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "and more?"}]
    second = await client.chat.completions.create(model="any", messages=messages)
    said = [one.choices[0].message.content or "" for one in (first, second)]
    return sum(map(str.isdigit, "".join(said))) / 10


asks_twice.deterministic = True  # type: ignore[attr-defined]


def sections(folder: Path, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Three steps of four prompts with four completions, and what differs from that."""
    base: dict[str, dict[str, Any]] = {
        "data": {"template": "plain"},
        "algorithm": {"group_size": 4},
        "rollouts": {"max_completion_tokens": 12},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"num_prompts": 1, "num_prompts_during": 1},
        "policy": {"device": "cpu"},
        "run": {"steps": 3, "prompts_per_step": 4, "folder": str(folder), "name": "run", "save_every_steps": 0},
    }
    return {name: {**base.get(name, {}), **changes.get(name, {})} for name in {**base, **changes}}


def checksum(run: Path) -> str:
    """Of the weights with which a run ended."""
    [weights] = [*(run / "model").glob("*model.safetensors")]
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def trained(
    folder: Path,
    architecture: str = "qwen2",
    *,
    reward: Callable[..., float] | None = digits,
    calls: bool = False,
    parts: dict[str, Any] | None = None,
    **changes: dict[str, Any],
) -> str:
    """One run; ``parts`` are tools, environments or an agent."""
    import oncurve

    model = tiny_model(folder / "model", architecture, calls=calls)
    chosen = sections(folder, **changes)
    data = {"type": "jsonl", "path": str(folder / "rows.jsonl"), **chosen.pop("data")}
    write_rows(folder)
    return checksum(oncurve.train(model, data, reward, **(parts or {}), **chosen).folder)


def write_rows(folder: Path) -> None:
    """The rows of all runs as a file."""
    lines = (json.dumps(row) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


def grpo(folder: Path) -> str:
    """The defaults."""
    return trained(folder)


def dapo(folder: Path, *, rounding: str = "dither") -> str:
    """Two updates for the completions of a step, in bfloat16."""
    policy = {"compute_type": "bfloat16", "rounding": rounding}
    return trained(folder, algorithm={"type": "dapo"}, policy=policy, run={"completions_per_update": 8})


def nearest(folder: Path) -> str:
    """The same with copies that are rounded to the nearest."""
    return dapo(folder, rounding="nearest")


def kl(folder: Path) -> str:
    """A reference, two passes over each step, and a part of the distribution."""
    rollouts = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
    return trained(folder, algorithm={"kl_coef": 0.1}, rollouts=rollouts, run={"passes_per_step": 2})


def refill(folder: Path) -> str:
    """Groups without signal are replaced."""
    return trained(
        folder, reward=even_odds, algorithm={"group_size": 2}, run={"refill_rounds": 2, "prompts_per_step": 3}
    )


def lora(folder: Path) -> str:
    """An adapter, with a reference that is the base under it."""
    return trained(folder, policy={"lora": {"rank": 4}}, algorithm={"kl_coef": 0.1})


def sft(folder: Path) -> str:
    """Demonstrations."""
    import oncurve

    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in ROWS]
    chosen = {
        name: keys for name, keys in sections(folder, sft={"epochs": 1}).items() if name not in ("data", "algorithm")
    }
    del chosen["run"]["steps"]
    return checksum(oncurve.sft(tiny_model(folder / "model"), rows, digits, **chosen).folder)


def tools(folder: Path) -> str:
    """Calls in the middle of a completion."""
    parts = {"tools": ["calculator"]}
    return trained(folder, calls=True, reward=many_calls, parts=parts, rollouts={"max_completion_tokens": 40})


def environment(folder: Path) -> str:
    """Three turns, paid by the environment."""
    return trained(
        folder, calls=True, reward=None, parts={"environments": Echo}, rollouts={"max_completion_tokens": 40},
        evaluation=SAME_ROWS,
    )  # fmt: skip


def agent(folder: Path) -> str:
    """A program that talks to the policy."""
    return trained(
        folder, calls=True, reward=None, parts={"agent": asks_twice}, rollouts={"max_completion_tokens": 40},
        evaluation=SAME_ROWS,
    )  # fmt: skip


def padded(folder: Path) -> str:
    """A row for each completion, in place of packed ones."""
    return trained(folder, policy={"packing": False})


def gpt2(folder: Path) -> str:
    """An architecture without layers of our own."""
    return trained(folder, "gpt2")


RECIPE = """\
model: model
data: {type: jsonl, path: rows.jsonl, template: plain}
rewards: [{type: custom, function: "reward.py:reward"}, {type: length, weight: 0.1, max_tokens: 8}]
algorithm: {group_size: 4}
rollouts: {max_completion_tokens: 12}
optimizer: {learning_rate: 1.0e-2}
evaluation: {num_prompts: 1, num_prompts_during: 1}
policy: {device: cpu}
run: {steps: 4, prompts_per_step: 4, folder: ., name: run, save_every_steps: 1, keep_checkpoints: 1}
"""


def recipe_in(folder: Path) -> str:
    """A recipe with its rows, reward and model in a folder, all of them a few kilobytes; its name there."""
    tiny_model(folder / "model", hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    write_rows(folder)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return "recipe.yaml"


def go_on(folder: Path) -> str:
    """The rest of such a run."""
    import oncurve

    with contextlib.chdir(folder):
        return checksum(folder / oncurve.Trainer.from_recipe("recipe.yaml").resume().folder)


def from_recipe(folder: Path) -> str:
    """The recipe without a stop."""
    import oncurve

    with contextlib.chdir(folder):
        return checksum(folder / oncurve.Trainer.from_recipe(recipe_in(folder)).train().folder)


def start(command: list[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> int:
    """Exit status of a process."""
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, check=False).returncode


def two_processes(folder: Path, start: Callable[..., int] = start) -> str:
    """Two processes over gloo."""
    command = [sys.executable, "-m", "oncurve", "train", recipe_in(folder), "--processes", "2"]
    assert start(command, cwd=folder) == 0
    return checksum(folder / "run")


def torch_alone(folder: Path, start: Callable[..., int] = start) -> str:
    """Without kernels of our own, which a process chooses once."""
    command = [sys.executable, str(HERE / "runs.py"), "--run", "grpo", str(folder)]
    assert start(command, env=os.environ | {"ONCURVE_KERNELS": "0"}) == 0
    return checksum(folder / "run")


def killed_and_resumed(folder: Path, start: Callable[..., int] = start) -> str:
    """What a run that is killed after three steps leaves behind, continued."""
    recipe_in(folder)
    assert start([sys.executable, str(HERE / "runs.py"), "--be-killed"], cwd=folder) == -signal.SIGKILL
    return go_on(folder)


def be_killed() -> None:
    """The recipe in this folder, until its process is killed."""
    import oncurve

    for step in oncurve.Trainer.from_recipe("recipe.yaml").steps():
        if step.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)


RUNS: dict[str, Callable[[Path], str]] = {
    "grpo": grpo,
    "dapo": dapo,
    "nearest": nearest,
    "kl": kl,
    "refill": refill,
    "lora": lora,
    "sft": sft,
    "tools": tools,
    "environment": environment,
    "agent": agent,
    "padded": padded,
    "gpt2": gpt2,
    "from_recipe": from_recipe,
}
IN_PROCESSES: dict[str, Callable[..., str]] = {
    "two_processes": two_processes,
    "torch_alone": torch_alone,
    "killed_and_resumed": killed_and_resumed,
}


def kind_of_machine() -> str:
    """What decides the last bits of arithmetic: processor, torch, and the compiler of the kernels."""
    import torch

    names = ("vendor_id", "flags")
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text(encoding="utf-8", errors="replace") if cpu.exists() else ""
    found = {name.strip(): rest for name, _, rest in (line.partition(":") for line in text.splitlines())}
    vendor, flags = (found.get(name, "").split() for name in names)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    version = ["without a compiler"]
    if compiler is not None:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    return ", ".join(
        [
            f"{platform.system()} {platform.machine()}",
            *vendor,
            torch.backends.cpu.get_cpu_capability(),
            *sorted({"avx512_bf16", "amx_bf16"} & set(flags)),
            f"torch {torch.__version__}",
            version[0],
            f"{torch.get_num_threads()} thread",
        ]
    )


def write() -> None:
    """The values of this machine, beside those of others."""
    found: dict[str, str] = {}
    for name, run in {**RUNS, **IN_PROCESSES}.items():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            found[name] = run(Path(folder).resolve())
        print(f"{name:20} {found[name]}", flush=True)
    known = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {}
    text = json.dumps({**known, kind_of_machine(): found}, indent=2, sort_keys=True)
    EXPECTED.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--write"]:
            write()
        case ["--be-killed"]:
            be_killed()
        case ["--run", name, place]:
            RUNS[name](Path(place))
        case _:
            raise SystemExit(__doc__)
