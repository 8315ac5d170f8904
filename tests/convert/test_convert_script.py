"""Is a script read as it would run, without being run?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import HEAD

from oncurve.commands.convert import convert_file
from oncurve.config.load import load_config
from oncurve.errors import ConfigError

Write = Callable[..., Path]


def recipe(path: Path, **options: int) -> tuple[dict[str, object], str]:
    """The recipe that is written, with every default, and the report."""
    report, _ = convert_file(path, Path("recipe.yaml"), **options)
    return load_config("recipe.yaml").model_dump(), report


def losses(path: Path) -> list[str]:
    text, _ = convert_file(path, None, rows=100)
    return [line.removeprefix("# - ") for line in text.splitlines() if line.startswith("# - ")]


def test_a_plain_script_loses_nothing(script: Write) -> None:
    assert losses(script("args = GRPOConfig(output_dir='out', beta=0.04)")) == []


def test_the_script_is_never_run(script: Write) -> None:
    config = "open('ran', 'w').close()\nargs = GRPOConfig('out')\nraise SystemExit"
    recipe(script(config), rows=100)
    assert not Path("ran").exists()


def test_a_batch_is_gone_over_as_often_as_in_trl(script: Write) -> None:
    config = "args = GRPOConfig('out', num_iterations=2, steps_per_generation=4, max_steps=24, warmup_steps=0.5)"
    found, _ = recipe(script(config))
    assert found["run"]["passes_per_step"] == 2
    assert found["run"]["steps"] == 3, "4 updates in a pass, 2 passes"
    assert found["optimizer"]["warmup_updates"] == 12


def test_values_are_followed_through_names_arithmetic_and_attributes(script: Write) -> None:
    config = """
    SIZE = 4
    common = dict(learning_rate=2e-6, num_generations=SIZE)
    args = GRPOConfig(output_dir="out", per_device_train_batch_size=SIZE * 2, max_steps=5 * 4, **common)
    args.epsilon_high = 0.28
    """
    found, _ = recipe(script(config))
    assert found["algorithm"]["group_size"] == 4
    assert found["run"]["prompts_per_step"] == 2
    assert found["run"]["steps"] == 20
    assert found["optimizer"]["learning_rate"] == 2e-6
    assert found["algorithm"]["clip_high"] == 0.28, "what the row dapo has"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("args = GRPOConfig('out', seed=int('7'))", "train.py, line 7: seed: `int('7')` is only known"),
        ("x = 1\nx = 2\nargs = GRPOConfig('out', seed=x)", "train.py, line 9: seed: `x` gets a value in lines 7, 8"),
        ("args = GRPOConfig('out', **more())", "train.py, line 7: **more()"),
        ("args = GRPOConfig('out', num_generation=4)", "train.py, line 7: num_generation: GRPOConfig has no such"),
        ("args = GRPOConfig('out',\n  repetition_penalty=1.1)", "train.py, line 8: repetition_penalty = 1.1"),
        ("args = GRPOConfig('out', loss_type='cispo')", "train.py: epsilon = 0.2: with cispo it is the largest ratio"),
        ("args = GRPOConfig('out', fp16=True)", "train.py, line 7: fp16 = True"),
        ("args = GRPOConfig('out', optim='adafactor')", "train.py, line 7: optim = 'adafactor'"),
        ("args = GRPOConfig('out', model_init_kwargs={'x': 1})", "train.py, line 7: model_init_kwargs"),
    ],
)
def test_what_is_lost_is_named_with_its_line(script: Write, config: str, expected: str) -> None:
    [line] = losses(script(config))
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("callbacks=[Stop()]", "callbacks"),
        ("tools=[search]", "tools"),
        ("whatever=1", "GRPOTrainer has no such argument"),
        ("reward_funcs='org/reward-model'", "a reward model is none of the rewards"),
        ("reward_funcs=[lambda completions, **k: [1.0]]", "it is no function with a name"),
        ("model=build()", "`build(...)` is only known when the script runs"),
    ],
)
def test_arguments_of_the_trainer_that_have_no_place_are_named(script: Write, argument: str, expected: str) -> None:
    given = {"model": "'embedded'", "reward_funcs": "correct", "train_dataset": "data", "args": "args"}
    name, _, value = argument.partition("=")
    given |= {name: value}
    trainer = "data = load_dataset('json', data_files='rows.jsonl')['train']\n"
    trainer += f"GRPOTrainer({', '.join(f'{key}={value}' for key, value in given.items())})"
    [line] = losses(script("args = GRPOConfig('out')", trainer))
    assert expected in line


def test_rewards_of_a_script_that_trains_are_copied_with_what_they_use(script: Write) -> None:
    head = HEAD + "\nimport re\nNUMBER = re.compile('a')\n\ndef helper(text):\n    return NUMBER.search(text)\n"
    head += "\nasync def short(completions, **kwargs):\n    return [float(bool(helper(c))) for c in completions]\n"
    trainer = "GRPOTrainer('embedded', [correct, short], args, load_dataset('json', data_files='rows.jsonl')['train'])"
    found, _ = recipe(script("args = GRPOConfig('out', reward_weights=[1.0, 0.5])", trainer, head), rows=100)
    assert [(r["function"], r["weight"]) for r in found["rewards"]] == [
        ("recipe_rewards.py:correct", 1.0), ("recipe_rewards.py:short", 0.5),
    ]  # fmt: skip
    copied = Path("recipe_rewards.py").read_text()
    assert "import re" in copied
    assert "def helper" in copied
    assert "GRPOTrainer" not in copied
    compile(copied, "recipe_rewards.py", "exec")


def test_rewards_of_a_script_that_only_defines_stay_where_they_are(script: Write) -> None:
    trainer = "if __name__ == '__main__':\n    GRPOTrainer('embedded', correct, args, load_dataset('x/y')).train()"
    found, _ = recipe(script("args = None\ndef main():\n    args = GRPOConfig('out')", trainer), rows=100)
    assert found["rewards"][0]["function"] == "train.py:correct"
    assert not Path("recipe_rewards.py").exists()


def test_trls_own_rewards_become_ours_or_are_loaded_from_there(script: Write) -> None:
    head = HEAD + "\nfrom trl.rewards import accuracy_reward, get_soft_overlong_punishment\n"
    trainer = """
    GRPOTrainer(
        "embedded",
        [accuracy_reward, get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)],
        args,
        load_dataset("x/y", split="train[:50]"),
    )
    """
    found, _ = recipe(script("args = GRPOConfig('out')", trainer, head))
    accuracy, overlong = found["rewards"]
    assert accuracy["function"] == "trl.rewards:accuracy_reward"
    assert (overlong["type"], overlong["max_tokens"], overlong["buffer_tokens"]) == ("overlong", 100, 20)
    assert found["data"]["columns"] == {"question": "prompt", "answer": "solution"}
    assert found["data"]["limit"] == 50


def test_a_conversation_that_a_function_makes_is_followed(script: Write) -> None:
    config = """
    def rows(split="train"):
        data = load_dataset("org/problems")[split]
        data = data.rename_column("final", "answer").shuffle(seed=1)
        return data.map(lambda x: {"prompt": [{"role": "user", "content": x["problem"]}]}).select(range(64))
    args = GRPOConfig("out")
    """
    found, _ = recipe(script(config, "GRPOTrainer('embedded', correct, args, rows('test'))"))
    data = found["data"]
    assert (data["path"], data["split"], data["limit"], data["chat"]) == ("org/problems", "test", 64, True)
    assert data["columns"] == {"question": "problem", "answer": "final"}


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ("LoraConfig()", {"rank": 8, "alpha": 8.0, "target_modules": ("q_proj", "v_proj")}),
        ("LoraConfig(r=16, lora_alpha=32, use_rslora=True, target_modules='all-linear')",
         {"rank": 16, "alpha": 128.0, "target_modules": "all-linear"}),
        ("LoraConfig(r=4, lora_dropout=0.1, bias='none', task_type=TaskType.CAUSAL_LM)", {"rank": 4, "dropout": 0.1}),
    ],
)  # fmt: skip
def test_an_adapter_is_the_same(script: Write, lora: str, expected: dict[str, object]) -> None:
    trainer = f"data = load_dataset('x/y')\nGRPOTrainer('embedded', correct, args, data, peft_config={lora})"
    found, _ = recipe(script("args = GRPOConfig('out', beta=0.1)", trainer), rows=100)
    assert {key: found["policy"]["lora"][key] for key in expected} == expected
    assert found["algorithm"]["reference"] == "base"


def test_quantization_and_the_model_inside_from_pretrained_are_found(script: Write) -> None:
    trainer = """
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained("org/model", revision="v2", quantization_config=bits)
    GRPOTrainer(model, correct, args, load_dataset("x/y"), peft_config=LoraConfig(modules_to_save=["lm_head"]))
    """
    path = script("args = GRPOConfig('out')", trainer)
    [lost] = losses(path)
    assert "modules_to_save" in lost
    found, _ = recipe(path, rows=100)
    assert (found["model"], found["policy"]["revision"]) == ("org/model", "v2")
    assert found["policy"]["quantization"] == "nf4"


def test_options_of_the_command_are_read_from_yaml_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {
        "model_name_or_path": "org/model", "dataset_name": "x/y", "reward_funcs": ["accuracy_reward"], "use_peft": True,
        "learning_rate": "2e-6", "max_steps": 10, "num_generations": 4, "eval_strategy": "steps", "eval_steps": 5,
    }  # fmt: skip
    Path("options.json").write_text(json.dumps(options))
    Path("options.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in options.items()))
    texts = [convert_file(Path(name), None)[0].split("\n", 1)[1] for name in ("options.json", "options.yaml")]
    found, report = recipe(Path("options.yaml"))
    assert found["optimizer"]["learning_rate"] == 2e-6
    assert found["policy"]["lora"]["rank"] == 16
    assert found["evaluation"]["data"]["split"] == "test"
    assert found["evaluation"]["samples"] == 4
    assert "Lost" not in report
    assert "line 5" in texts[1]


def test_steps_and_updates_keep_their_arithmetic(script: Write) -> None:
    config = """
    args = GRPOConfig("out", per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=8,
                      num_generations=8, max_steps=100, save_steps=50, warmup_steps=0.1)
    """
    found, _ = recipe(script(config), processes=2)
    run = found["run"]
    assert (run["prompts_per_step"], run["completions_per_update"]) == (8, 16)
    assert (run["steps"], run["save_every_steps"], run["keep_checkpoints"]) == (25, 12, 2)
    assert found["optimizer"]["warmup_updates"] == 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("print(1)", "neither GRPOConfig"),
        ("def (:", "cannot be read as Python"),
        ("a = GRPOConfig('x')\nb = GRPOConfig('y')", "lines 1, 2; leave the one"),
        ("args = GRPOConfig('x', num_generations=3)", "does not divide the 8 completions"),
        ("args = GRPOConfig('x', loss_type='mine')", "'mine'.* none of TRL's"),
    ],
)
def test_a_script_that_says_nothing_clear_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        convert_file(path, None)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "- 1", "no mapping"), ("a.yaml", "a: 1", "none of its keys"), ("a.json", "{", "not valid YAML"),
        ("a.txt", "", "neither .py nor"), ("missing.py", None, "no such file"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=expected):
        convert_file(tmp_path / name, None)


def test_a_recipe_that_exists_is_not_replaced_unasked(script: Write) -> None:
    path = script("args = GRPOConfig('out')")
    recipe(path, rows=100)
    with pytest.raises(ConfigError, match="exists already"):
        convert_file(path, Path("recipe.yaml"))
    convert_file(path, Path("recipe.yaml"), overwrite=True)
