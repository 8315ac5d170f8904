"""Is every mistake of a newcomer one message in our words, with what to do, and never a traceback?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oncurve.cli import app

FOREIGN = ("pydantic", "Input should", "yaml.", "while scanning", "Traceback", "KeyError", "[Errno", "site-packages")
FILES = {
    "rows.jsonl": '{"question": "1+1?", "answer": "2"}\n',
    "recipe.yaml": "model: embedded\ndata: {path: rows.jsonl}\nrun: {steps: 2, prompts_per_step: 2}\n",
    "list.yaml": "- a\n- b\n",
    "empty.yaml": "",
    "alias.yaml": "model: *x\n",
    "quote.yaml": 'model: "embedded\ndata: {}\n',
    "tag.yaml": "model: !!python/object/apply:os.system [ls]\n",
    "dots.yaml": "model: embedded\ndata.type: gsm8k\n",
    "file.txt": "x",
    "script.py": "print(1)\n",
    "environment.yaml": "model: embedded\ndata: {type: word_problems}\nrewards: [{type: environment}]\n",
    "turns.jsonl": '{"prompt": "a", "turns": []}\n',
    "wrapped.json": '{"data": [{"question": "1", "answer": "2"}]}',
    "torn.json": '[{"question": "1", "answer": "2"},\n{"question": ',
    "texts.json": '["a"]',
    "twice.csv": "question,question,answer\n1,2,3\n",
    "splits.json": '{"train": [{"question": "1"}], "test": [{"question": "2"}]}',
    "limit.yaml": "model: embedded\ndata: {path: rows.jsonl}\nrewards: [{type: length, limit: 3}]\n",
    "key.yaml": "model: embedded\ndata: {path: rows.jsonl}\nrewards: [{r1_zero: {}}]\n",
    "tools.yaml": "model: embedded\ndata: {path: rows.jsonl}\nrewards: [{type: environment}]\n"
    "rollouts: {tools: [a:b]}\n",
    "held/a/metrics.jsonl": "",
    "two.jsonl": '{"a": 1}\n{"a": 2}\n',
}
MISTAKES = (
    ("train list.yaml", "a recipe is a mapping of sections"),
    ("train empty.yaml", "the file is empty. Begin with `model: embedded`"),
    ("train alias.yaml", "line 1, column 8: a value that begins with * needs quotation marks"),
    ("train quote.yaml", "a quotation mark before this is not closed"),
    ("train tag.yaml", "tags such as !!python are not allowed"),
    ("train dots.yaml", "In a file write data: {type: ...}"),
    ("train gone.yaml", "`oncurve recipe list` shows those"),
    ("train recipe.yaml optimizer.lr=1e-5", "Did you mean 'optimizer.learning_rate'?"),
    ("train recipe.yaml run.batch_size=8", "Did you mean 'run.prompts_per_step'?"),
    ("train recipe.yaml algorithm.num_generations=8", "Did you mean 'algorithm.group_size'?"),
    ("train recipe.yaml algorithm.type=gpro", "Did you mean 'grpo'?"),
    ("train recipe.yaml run.steps=1e3", "must be a whole number; found '1e3'"),
    ("train recipe.yaml run.steps", "not of the form key=value"),
    ("train recipe.yaml run.folder=file.txt run.name=x", "file.txt: is a file, not a folder"),
    ("train recipe.yaml run.name=../up", "not the name of one folder"),
    ("train recipe.yaml model=file.txt", "is a file. Name the folder"),
    ("train recipe.yaml run.steps=010", "YAML does not read 010 in base ten"),
    (
        "train recipe.yaml algorithm.kl_coef=yes",
        "algorithm.kl_coef: this takes no truth value (true, false, yes, no, on, off); found true",
    ),
    ("train recipe.yaml rollouts.tools=a.py:add", "must be a list, such as tools: [a.py:add]"),
    ("train recipe.yaml rollouts.environments=[a.py:Nim]", "Write environments: {a_name: a.py:Nim}"),
    ("train recipe.yaml rollouts.max_tokns=3", "Did you mean 'rollouts.max_completion_tokens'?"),
    ("train recipe.yaml data.path=table.xlsx", "since the ending of 'table.xlsx' says none"),
    ("train recipe.yaml data.path=twice.csv", "the first line names two columns 'question'"),
    ("train recipe.yaml data.path=splits.json", "lists of rows (train 1, test 1). Write each to a file of its own"),
    ("train limit.yaml", "Did you mean 'rewards.0.limited'?"),
    ("train key.yaml", "'r1_zero' is a type, and stands where a key is. Write {type: r1_zero}"),
    ("train tools.yaml", "a reward of type environment is what an environment or an agent gives"),
    ("report rows.jsonl", "row 1 has no step"),
    ("resume held", "Runs in it: held/a"),
    ("evaluate nothing", "nothing: no run, and no such recipe"),
    ("push held/a --repo a,b --dry-run", "is not the name of a repository"),
    ("trl recipe.yaml", "is a recipe of oncurve"),
    ("plan recipe.yaml --gpu A100", "Did you mean A100-80GB or A100-40GB?"),
    ("train recipe.yaml data.path=gone.csv", "there is no file gone.csv"),
    ("train recipe.yaml --learning-rate 3", "optimizer.learning_rate=3"),
    ("train recipe.yaml --rate 3", "No such option: --rate"),  # and no key that merely ends like it
    ("train recipe.yaml -x", "No such option: -x. See `oncurve train --help`"),
    ("trian recipe.yaml", "Did you mean 'train'?"),
    ("check", "Missing argument"),
    ("resume runs/none", "no run to resume"),
    ("evaluate recipe.yaml --samples 3", "--samples was removed: take evaluation.samples=N"),
    ("sample embedded hi --temperature -2", "this must be greater than or equal to 0"),
    ("plan recipe.yaml --gpu 4090", "Did you mean RTX-4090?"),
    ("plan recipe.yaml --shard zero9", "choose one of none, zero1, zero2, zero3"),
    ("doctor", "name the folder of a run"),
    ("doctor runs/a --machine", "--machine lists processes and reads no run"),
    ("dashboard --port http", "Invalid value for '--port': this must be a whole number; found 'http'. See `oncurve"),
    ("report runs --usd-per-hour cheap", "this must be a number; found 'cheap'. See `oncurve report --help`"),
    ("train recipe.yaml data.now=yesterday", "data.now: this must be a date or a time, such as 2026-"),
    ("report nowhere", "metrics.jsonl is missing"),
    ("compare runs/a", "at least two run folders"),
    ("trl script.py", "GRPOTrainer(...)"),
    ("trl --overwrite script.py", "--overwrite is for --recipe FILE"),
    ("convert script.py --output a.yaml", "the command convert was removed: take `oncurve trl --recipe FILE SCRIPT`"),
    ("launch recipe.yaml", "add --slurm"),
    ("", "a command is missing. See `oncurve --help`"),
    ("train recipe.yaml policy.lora={rank:8}", "'rank:8' has no colon with a space behind its key. Write {rank: 8}"),
    ("train recipe.yaml rollouts.stop=[]x", "something follows the value"),
    ("train recipe.yaml data.columns={question:", "a value is missing here"),
    ("train environment.yaml", "a reward of type environment is what an environment or an agent gives"),
    ("train recipe.yaml rollouts.tools=[gone.py:add]", "rollouts.tools: there is no file gone.py"),
    ("train rows.jsonl", "is data, not a recipe"),
    ("train script.py", "script.py: is no recipe, which is a YAML file. Scripts for TRL are run by `oncurve trl"),
    (
        "plan recipe.yaml --devices two.jsonl",
        "two.jsonl: is no table of devices: not valid YAML: line 2, column 1: something follows the value",
    ),
    ("plan recipe.yaml --mean-turns 2", "--mean-turns is for completions with tools, and this recipe has none"),
    ("evaluate recipe.yaml --against runs/gone", "model 'runs/gone': no such folder"),
    ("doctor recipe.yaml", "recipe.yaml: is no run"),
    ("compare runs/a runs/a", "compare: runs/a is named twice"),
    ("train recipe.yaml model=Embedded", "Did you mean 'embedded'?"),
    ("train recipe.yaml", "1 row is too few to hold some of them out"),
    ("train recipe.yaml --seeds 0-2", "write different whole numbers from 0 on, such as --seeds 0,1,2"),
    (
        "train recipe.yaml algorithm.type=custom algorithm.advantage_function=a.py:f",
        "an advantage_function goes with any type",
    ),
    ("train recipe.yaml data.path=gone.parquet", "there is no file gone.parquet"),
    ("train recipe.yaml data.template=Think_Answer", "Did you mean 'think_answer'?"),
    ("coldstart --data turns.jsonl --output base", "turns must be texts, the policy's first"),
    ("coldstart --data rows.jsonl --size xl --output base", "Use one of nano, tiny, small"),
    ("coldstart --data . --output base", "is a folder without a train.jsonl or a saved data set. Name the file"),
    ("coldstart --task wordproblems --output base", "Did you mean 'word_problems'?"),
    ("train recipe.yaml data.path=wrapped.json", "one object that holds 1 row under 'data'. Write the list alone"),
    ("train recipe.yaml data.path=torn.json", "torn.json, line 2: not JSON"),
    ("train recipe.yaml data.path=texts.json", 'texts.json, row 1: the value "a", not an object'),
    ("train recipe.yaml data.template=think", "Did you mean 'think_answer'?"),
    ("train recipe.yaml --seeds 0,1 run.seed=3", "--seeds and run.seed=3: --seeds gives every run its seed"),
    ("evaluate embedded", "is a model, and nothing says on what to evaluate it. Add --benchmark"),
    ("merge nowhere --output merged", "Name a run that trained with policy.lora"),
    ("dashboard recipe.yaml", "Name run folders, or a folder that holds some"),
)


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[words or "nothing" for words, _ in MISTAKES])
def test_a_mistake_is_one_message(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["oncurve", *words.split()])
    with pytest.raises(SystemExit) as ended:
        app.main()
    shown = capsys.readouterr().err
    assert ended.value.code not in (0, None)
    assert said in shown
    assert not any(foreign in shown for foreign in FOREIGN)
    assert not (tmp_path / "runs").exists()
