"""Known benchmarks: where their problems are, and how they are asked, graded and decoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from oncurve.data.datasets import canonical_number, hold_out, load_rows
from oncurve.data.prompts import Template, find_template
from oncurve.data.sources import Row, read_stored
from oncurve.errors import ConfigError, DataError, did_you_mean, listed
from oncurve.records import Completion, Prompt, Reward
from oncurve.rewards.answers import AnswerPlace, find_answer
from oncurve.rewards.base import RewardFunction

SPLITS = ("test", "validation", "remainder")
"""What --split may say. "test" is the published split, whole; "validation" and "remainder" never share a problem."""
VALIDATION_FRACTION = 0.2
"""Share of the problems, chosen by a hash, that is the validation split where a benchmark brings none."""

PROGRAM = Template(
    name="program",
    user="Complete this Python function. Answer with the whole program in one fenced block.\n\n"
    "```python\n{question}\n```",
    turn="Question: {user}\nSolution:",
    completion="\n```python\n{answer}\n```",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How a benchmark is sampled unless somebody says otherwise."""

    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    """Completions of each problem."""
    max_tokens: int = 1024
    """The longest completion; less where the model's context is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One row of ``benchmarks.yaml``, where its keys are explained."""

    name: str
    title: str
    path: str | None = None
    subset: str | None = None
    split: str = "test"
    revision: str | None = None
    rows: int | None = None
    """How many problems the split is known to have; None if nobody knows."""
    validation: Mapping[str, Any] | None = None
    rows_of: str = "plain"
    columns: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    categories: Sequence[str] = ()
    prompt: str = "boxed"
    grader: str = "mathematics"
    decoding: Decoding = field(default_factory=Decoding)

    @property
    def template(self) -> Template:
        """The words around a problem. Raises ConfigError if there is no such template."""
        return PROGRAM if self.prompt == "program" else find_template(self.prompt)


@dataclass(frozen=True, slots=True)
class Problems:
    """The problems of a benchmark, and where they came from."""

    rows: list[Row]
    source: Mapping[str, Any]
    """Path, subset, split, revision, how many rows there were and how they were chosen: for the result."""


def known_benchmarks() -> dict[str, Benchmark]:
    """The benchmarks of ``benchmarks.yaml``, by name."""
    path = Path(__file__).with_name("benchmarks.yaml")
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: _benchmark(name, entry, source=path.name) for name, entry in table.items()}


def find_benchmark(name: str) -> Benchmark:
    """A benchmark by its name, or from a YAML file with the keys of one.

    Raises ConfigError if there is neither, or for keys that a benchmark does not have.
    """
    known = known_benchmarks()
    if name in known:
        return known[name]
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"--benchmark: there is no {name!r}. {did_you_mean(name, known)}Use one of {listed(known)}, "
            f"or a YAML file with the keys that `oncurve/evaluate/benchmarks.yaml` explains."
        )
    try:
        entry = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--benchmark: {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"--benchmark: {path} holds {entry!r:.60}, not the keys of a benchmark such as path: ...")
    return _benchmark(path.stem, {"title": path.stem, **entry}, source=str(path))


def _benchmark(name: str, entry: Mapping[str, Any], *, source: str) -> Benchmark:
    keys = [one.name for one in fields(Benchmark) if one.name != "name"]
    _refuse_unknown(entry, keys, source)
    decoding = entry.get("decoding") or {}
    _refuse_unknown(decoding, [one.name for one in fields(Decoding)], f"{source}, decoding")
    return Benchmark(**{**entry, "name": name, "decoding": Decoding(**decoding)})


def _refuse_unknown(entry: Mapping[str, Any], known: Sequence[str], source: str) -> None:
    for key in entry:
        if key not in known:
            raise ConfigError(
                f"{source}: there is no key {key!r}. {did_you_mean(str(key), known)}It may have {listed(known)}"
            )


def load_problems(
    benchmark: Benchmark, *, data: str | Path | None = None, split: str = "test", limit: int | None = None
) -> Problems:
    """The problems of a split, each with "question" and "answer" as text and all columns of the source.

    ``data`` is a local file, or a folder with one file for each benchmark (``gsm8k.jsonl``, ``gsm8k_test.jsonl``), in
    place of the hub. "test" is the split that is published. "validation" is the benchmark's own, or a fifth of the
    split chosen by a hash of the question; "remainder" is what that fifth leaves.

    Raises ConfigError for another split, DataError if the problems cannot be read.
    """
    if split not in SPLITS:
        raise ConfigError(f"--split: there is no {split!r}. Use one of {listed(SPLITS)}")
    place = dict(benchmark.validation or {}) if split == "validation" and data is None else {}
    has_own = bool(place)
    if not place:
        place = {key: getattr(benchmark, key) for key in ("path", "subset", "split", "revision")}
    if data is not None and benchmark.rows_of == "word_problems":
        raise ConfigError(f"--data: the problems of {benchmark.name} are made on the spot. Leave it out for them")
    if data is not None:
        place = {"path": str(_local_file(Path(data).expanduser(), benchmark.name)), "split": benchmark.split}
    if place["path"] is None and benchmark.rows_of != "word_problems":
        raise ConfigError(f"{benchmark.name} needs --data, a file with the problems as JSON lines")
    rows = _read(benchmark, place)
    source = {**place, "rows_found": len(rows), "rows_known": None if has_own else benchmark.rows, "chosen": split}
    if split != "test" and not has_own:
        remainder, validation = hold_out(rows, fraction=VALIDATION_FRACTION, seed=0)
        rows = validation if split == "validation" else remainder
        source["rule"] = f"hash of the question below {VALIDATION_FRACTION}, or not"
    source["dataset"] = {key: getattr(benchmark, key) for key in ("path", "subset", "split")}
    return Problems(rows[:limit], {**source, "limit": limit})


def _local_file(place: Path, name: str) -> Path:
    if not place.exists():
        raise DataError(f"--data: {place} does not exist. Give a file of JSON lines, or a folder with {name}.jsonl")
    if not place.is_dir():
        return place
    for file in (place / f"{name}.jsonl", place / f"{name}_test.jsonl", place / f"{name}.parquet"):
        if file.is_file():
            return file
    raise DataError(f"--data: {place} has neither {name}.jsonl nor {name}_test.jsonl nor {name}.parquet")


def _read(benchmark: Benchmark, place: Mapping[str, Any]) -> list[Row]:
    if benchmark.rows_of == "word_problems":
        return load_rows("word_problems", split=benchmark.split, limit=benchmark.rows)
    kind = "gsm8k" if benchmark.rows_of == "gsm8k" else "huggingface"
    where: dict[str, Any] = {key: place.get(key) for key in ("path", "subset", "revision")}
    try:
        if not benchmark.columns:
            return load_rows(kind, split=str(place["split"]), **where)
        located = read_stored(
            kind, where["path"], split=str(place["split"]), subset=where["subset"], revision=where["revision"]
        )
        return [_renamed(benchmark, number, row) for number, row in located]
    except DataError as error:
        raise DataError(f"benchmark {benchmark.name}: {error}") from None


def _renamed(benchmark: Benchmark, place: str, row: Row) -> Row:
    found = {}
    for ours, theirs in benchmark.columns.items():
        names = [theirs] if isinstance(theirs, str) else list(theirs)
        value = next((row[name] for name in names if row.get(name) not in (None, "", [])), None)
        if value is None:
            raise DataError(f"{place}: no {ours} in {listed(names)}. The row has {listed(row)}; correct its columns")
        found[ours] = _as_text(value)
    return row | found


def _as_text(value: Any) -> str:
    """A question or an answer as text: 142.0 as 142, a list of answers with commas."""
    if isinstance(value, list):
        return ", ".join(map(_as_text, value))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def answer_place(template: Template) -> AnswerPlace:
    """Where a template asks for the answer."""
    for mark, place in (("<answer>", "answer_tag"), ("####", "hash")):
        if mark in template.completion:
            return place  # type: ignore[return-value]  # the literal is in the tuple above
    return "boxed"


@dataclass(frozen=True, slots=True)
class Grader:
    """What grades a benchmark's completions."""

    strict: RewardFunction
    """Right only in the form that was asked for: the number that is reported."""
    loose: RewardFunction | None
    """Right wherever the answer stands; None where that means nothing."""
    extract: Callable[[str], str | None] | None
    """The answer that a majority vote compares; None where answers cannot be compared, as programs."""
    description: str

    def close(self) -> None:
        """End the processes of both."""
        self.strict.close()
        if self.loose is not None:
            self.loose.close()


def make_grader(grader: str, template: Template) -> Grader:
    """The grader of a benchmark, with the form of answer that the template asks for.

    Raises ConfigError for a grader that does not exist.
    """
    if grader == "mathematics":
        from oncurve.rewards.mathematics import Mathematics  # lazy

        place = answer_place(template)
        strict, loose = Mathematics(answer_from=place), Mathematics(answer_from="any")
        return Grader(strict, loose, partial(voted_answer, place=place), f"mathematics, answer in {place}")
    if grader == "programs":
        from oncurve.rewards.programs import Programs  # lazy

        return Grader(Programs(require_fence=False), None, None, "programs: all tests of the row, in a sandbox")
    if ":" in grader:
        from oncurve.rewards.custom import from_function, load_function  # lazy

        return Grader(RightOrWrong(from_function(load_function(grader))), None, None, f"custom: {grader}")
    raise ConfigError(f"grader {grader!r}: use mathematics, programs, or file.py:function")


def voted_answer(text: str, *, place: AnswerPlace) -> str | None:
    """A completion's answer as a vote compares it: numbers in one way to write them; None if there is none."""
    answer = find_answer(text, place)
    return None if answer is None else canonical_number(answer)


class RightOrWrong:
    """A custom reward as a grader: where it names no part "correct", a value of 1 or more is right."""

    def __init__(self, function: RewardFunction) -> None:
        self.function, self.name = function, function.name

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        return [_with_correct(reward) for reward in self.function(prompts, completions)]

    def close(self) -> None:
        """Closes the function."""
        self.function.close()


def _with_correct(reward: Reward) -> Reward:
    if reward.value is None or "correct" in reward.parts:
        return reward
    parts = {**reward.parts, "correct": float(reward.value >= 1.0)}
    return Reward(reward.value, parts=parts, detail=reward.detail)


def template_named(name: str | None, benchmark: Benchmark) -> Template:
    """The template that was asked for, or the benchmark's own. Raises ConfigError if there is none of that name."""
    if name is None:
        return benchmark.template
    return PROGRAM if name == "program" and benchmark.grader == "programs" else find_template(name)
