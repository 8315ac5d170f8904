"""What tests share: no network, one thread, and tiny checkpoints that are made on the spot."""

from __future__ import annotations

import gc
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Before anything imports torch or transformers. oncurve itself is imported inside the fixtures only, so that the
# shape checks are installed first.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread only waits for the first

import pytest
from shared_proofs import share_proofs
from tiny_models import make_model, make_tokenizer, make_trained_policy, model_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from oncurve.core.algorithm import Algorithm
    from oncurve.core.records import Completion, Group, Prompt, Reward, SamplingParams
    from oncurve.policy.trained_policy import TrainedPolicy

gc.disable()  # until everything is imported and collected

SLOW = (
    "algorithm/test_learning.py",
    "coldstart/test_coldstart.py",
    "distributed/",
    "documents/test_blocks.py",
    "documents/test_evaluation_page.py",
    "documents/test_notebook.py",
    "documents/test_site.py",
    "episodes/test_exact_tokens.py",
    "episodes/test_soak.py",
    "episodes/test_agent_runs.py",
    "gpu/test_commands_on_a_gpu.py",
    "history/",
    "gpu/test_decoding_on_gpu.py",
    "gpu_kit/test_gpu_first.py",
    "integration/",
    "interface/test_in_a_notebook.py",
    "interface/test_kinds_of_rewards.py",
    "interface/test_trainer.py",
    "interface/test_where_objects_go.py",
    "invariance/",
    "fleet/test_launched.py",
    "learning/",
    "model/test_allocator.py",
    "model/test_decode_cuda_graph.py",
    "packaging/test_wheel.py",
    "recipes/",
    "report/test_dashboard_in_browser.py",
    "report/test_report_in_browser.py",
    "resilience/test_damaged_checkpoints.py",
    "resilience/test_fuzzed_inputs.py",
    "resilience/test_killed_processes.py",
    "resilience/test_killed_runs.py",
    "resilience/test_killed_stages.py",
    "resilience/test_lost_servers.py",
    "resilience/test_own_servers.py",
    "resilience/test_signals.py",
    "resilience/test_surroundings.py",
    "sandbox/test_redteam.py",
    "sample/test_out_of_memory.py",
    "fleet/test_serving.py",
    "fleet/test_transfer.py",
    "fleet/test_weight_histories.py",
    "trl/test_episodes_beside_trl.py",
    "policy/test_short_memory.py",
    "policy/test_lora_runs.py",
)
"""Files and folders under tests/ that start processes, train until something is learned or run documents."""
LONGEST = (
    "fleet/test_vllm.py",
    "recipes/test_recipe_vllm.py",
    "distributed/test_deepspeed.py",
    "gpu/test_commands_on_a_gpu.py",
    "history/",
    "recipes/test_episode_recipes.py",
    "recipes/test_recipe_deepspeed.py",
    "documents/test_blocks.py",
    "zoo/test_zoo.py",
    "interface/test_trainer.py",
    "documents/test_notebook.py",
    "recipes/test_recipe_runs.py",
    "distributed/test_parts.py",
    "sample/test_engine_beside_transformers.py",
    "sample/test_engine.py",
    "trl/test_pairs_with_trl.py",
    "recipes/test_recipe_files.py",
    "sandbox/test_redteam.py",
    "fleet/test_vllm_sleep.py",
    "gpu_kit/test_gpu_first.py",
    "distributed/test_scripts_for_trl.py",
    "resilience/test_killed_runs.py",
    "resilience/test_killed_processes.py",
    "resilience/test_killed_stages.py",
    "learning/test_every_preset.py",
    "fleet/test_launched.py",
)
"""Files that take the most time, begun first: one of them alone at the end would keep a single core busy."""
pytest_plugins = ["process_fixtures"]
ARCHITECTURES = ("qwen2", "llama", "gpt2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what ``make test-fast`` leaves out; what takes longest comes first."""
    tests = Path(__file__).parent
    paths = {item.path for item in items if item.path.is_relative_to(tests)}
    names = {path: path.relative_to(tests).as_posix() for path in paths}
    for item in items:
        if names.get(item.path, "").startswith(SLOW):
            item.add_marker("slow")
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    last = {True: len(ranks), False: len(ranks) + 1}
    items.sort(key=lambda item: ranks.get(names.get(item.path, ""), last["slow" in item.keywords]))


def pytest_collection_finish() -> None:
    """What is imported stays: the collector need not walk through it again and again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: many tests wait for processes that they start."""
    has = getattr(os, "sched_getaffinity", None)  # not on macOS
    return 1 + (len(has(0)) if has else os.cpu_count() or 1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was skipped, by its reason: how many tests, and in which files."""
    skipped: dict[str, Counter[str]] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        files = skipped.setdefault(reason.removeprefix("Skipped: "), Counter())
        files[report.nodeid.split("::")[0].removeprefix("tests/")] += 1
    if skipped:
        terminalreporter.section("skipped")
    for reason, files in sorted(skipped.items(), key=lambda one: -one[1].total()):
        terminalreporter.write_line(f"{files.total():4}  {reason}")
        terminalreporter.write_line(f"      in {', '.join(sorted(files))}")


@pytest.fixture(autouse=True)
def shared_proofs() -> None:
    """Models that are the same are proven once in a process, except by a test from where on it changes code."""
    share_proofs(True)


def _may_change_a_proof(target: Any, what: Any, value: Any = None) -> bool:
    """A proof reads no value of an object, nothing of the system's own modules, and no variable but oncurve's."""
    if target is os.environ:
        return str(what).startswith("ONCURVE")
    if isinstance(target, (str, dict, type)) or callable(value):
        return True
    return isinstance(target, ModuleType) and target.__name__ not in ("sys", "os", "time")


def _unshared(change: Callable[..., None]) -> Callable[..., None]:
    def changed(patch: pytest.MonkeyPatch, target: Any, *what: Any, **options: Any) -> None:
        if _may_change_a_proof(target, *what):
            share_proofs(False)
        change(patch, target, *what, **options)

    return changed


for _name in ("setattr", "delattr", "setitem"):
    setattr(pytest.MonkeyPatch, _name, _unshared(getattr(pytest.MonkeyPatch, _name)))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of all tiny models."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PreTrainedModel]:
    """A fresh tiny model of an architecture: ``tiny_model("llama", seed=1)``."""

    def make(architecture: str = "qwen2", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
        config = model_config(architecture, tokenizer)
        config.update(changes)
        return make_model(config, seed=seed)

    return make


@pytest.fixture(scope="session")
def checkpoints(
    tokenizer: PreTrainedTokenizerFast,
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """A folder with an ordinary checkpoint for each architecture."""
    folders: dict[str, Path] = {}
    for architecture in ARCHITECTURES:
        folders[architecture] = tmp_path_factory.mktemp("checkpoints") / architecture
        tiny_model(architecture).save_pretrained(folders[architecture])
        tokenizer.save_pretrained(folders[architecture])
    return folders


@pytest.fixture(scope="session")
def make_policy(
    tokenizer: PreTrainedTokenizerFast, tiny_model: Callable[..., PreTrainedModel]
) -> Callable[..., TrainedPolicy]:
    """A policy around a fresh tiny model, or around the ``model`` given; other keywords go to the policy."""
    from oncurve.policy.settings import OptimizerSettings

    def make(model: PreTrainedModel | str = "qwen2", **options: Any) -> TrainedPolicy:
        options.setdefault("optimizer", OptimizerSettings(learning_rate=1e-3))
        return make_trained_policy(tiny_model(model) if isinstance(model, str) else model, tokenizer, **options)

    return make


@pytest.fixture(scope="session")
def make_prompts(tokenizer: PreTrainedTokenizerFast) -> Callable[..., list[Prompt]]:
    """Prompts of some texts, numbered in their order."""
    from oncurve.core.records import Prompt

    def make(*texts: str, first_index: int = 0) -> list[Prompt]:
        return [
            Prompt(text, tuple(tokenizer(text)["input_ids"]), first_index + place, {"answer": text[:1]})
            for place, text in enumerate(texts)
        ]

    return make


@pytest.fixture(scope="session")
def random_groups() -> Callable[..., list[Group]]:
    """Groups of random tokens: ragged prompts and completions, some of them truncated."""
    import random

    from oncurve.core.records import Completion, Group, Prompt

    def make(
        num_prompts: int = 3, group_size: int = 4, *, seed: int = 0, longest: int = 12, vocabulary: int = 256
    ) -> list[Group]:
        draw = random.Random(seed)

        def tokens(most: int) -> tuple[int, ...]:
            return tuple(draw.randrange(vocabulary) for _ in range(draw.randint(1, most)))

        def completion(prompt_ids: tuple[int, ...], index: int) -> Completion:
            ids = tokens(longest)
            logprobs = tuple(draw.uniform(-6.0, -0.1) for _ in ids)
            return Completion(prompt_ids, ids, "", logprobs, draw.choice(("stop", "stop", "length")), 0, index)

        prompts = [Prompt("", tokens(9), index) for index in range(num_prompts)]
        return [
            Group(prompt, tuple(completion(prompt.prompt_ids, index) for index in range(group_size)))
            for prompt in prompts
        ]

    return make


@dataclass(frozen=True)
class RewardBy:
    """A reward function that gives 1 where a test says so and 0 elsewhere."""

    is_right: Callable[[Prompt, Completion], bool]
    name: str = "right"

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        from oncurve.core.records import Reward

        values = [float(self.is_right(p, c)) for p, c in zip(prompts, completions, strict=True)]
        return [Reward(value, parts={"correct": value}) for value in values]

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def right_where() -> type[RewardBy]:
    """A reward function made of one that says which completions are right."""
    return RewardBy


@pytest.fixture
def train_in(tmp_path: Path) -> Callable[..., Any]:
    """The loop of the product with the engine, in a folder of the test; gives back the run."""
    from rich.console import Console

    from oncurve.core.loop import train
    from oncurve.data.curriculum import Curriculum
    from oncurve.observe.progress import Progress
    from oncurve.observe.record import RunFolder
    from oncurve.run.services import Run
    from oncurve.run.step_log import StepLog
    from oncurve.sample.engine import InProcessEngine

    def start(
        policy: TrainedPolicy,
        prompts: Sequence[Prompt],
        is_right: Callable[[Prompt, Completion], bool],
        algorithm: Algorithm,
        sampling: SamplingParams,
        *,
        steps: int,
        prompts_per_step: int,
        updates_per_step: int = 1,
        folder: str = "run",
        rewarded: Callable[[RewardBy], Any] = lambda function: function,
        watched: Callable[[InProcessEngine, Path], Any] = lambda engine, place: None,
        **options: Any,
    ) -> Run:
        rows = prompts_per_step * algorithm.group_size
        logged = {key: options.pop(key) for key in ("max_error_fraction", "processes") if key in options}
        quiet = Console(file=io.StringIO())
        with RunFolder(tmp_path / folder) as place, Progress(steps, console=quiet) as progress:
            engine = InProcessEngine(sampling)
            run = Run(
                StepLog(place, progress, **logged),
                profiler=watched(engine, place.path),
                total_steps=steps,
                completions_per_step=rows,
                completions_per_update=rows // updates_per_step,
                **options,
            )
            data = Curriculum(prompts, prompts_per_step, seed=0)
            list(train(policy, engine, data, rewarded(RewardBy(is_right)), algorithm, run))
        return run

    return start
