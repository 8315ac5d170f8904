"""Results in the file format of lm-evaluation-harness 0.4.13."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from oncurve.evaluate.evaluate import Evaluation, Example
from oncurve.observe.record import write_json, write_lines
from oncurve.records import Prompt

FILTER = "none"
"""The harness names each number "metric,filter"; ours are graded as they are."""
TASK_VERSION = 1.0


def write_harness(
    folder: Path,
    results: Mapping[str, Any],
    evaluations: Mapping[str, Evaluation],
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    now: datetime,
) -> Path:
    """Write ``results_<time>.json`` and ``samples_<task>_<time>.jsonl`` of each benchmark, in a folder for the model.

    Raises OSError if they cannot be written.
    """
    stamp = now.isoformat().replace(":", "-")
    place = folder / safe_name(results["model"]["label"])
    samples = {name: list(sample_rows(results, name, evaluations[name], prompts[name])) for name in evaluations}
    for name, rows in samples.items():
        write_lines(place / f"samples_{name}_{stamp}.jsonl", rows)
    write_json(place / f"results_{stamp}.json", harness_results(results, samples, now=now))
    return place


def safe_name(model: str) -> str:
    """A model's name as the harness writes it into paths."""
    return re.sub(r"[\"<>:/|\\?*\[\]]+", "__", model)


def harness_results(
    results: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]], *, now: datetime
) -> dict[str, Any]:
    """The aggregated results. ``lm_eval_version`` is null: the harness did not run."""
    entries: Mapping[str, Any] = results["benchmarks"]
    run, model = results["run"], results["model"]
    tasks = {name: _task_numbers(name, entry) for name, entry in entries.items()}
    return {
        "results": tasks,
        "group_subtasks": {name: [] for name in entries},
        "configs": {name: _task_config(name, entry) for name, entry in entries.items()},
        "versions": dict.fromkeys(entries, TASK_VERSION),
        "n-shot": dict.fromkeys(entries, 0),
        "higher_is_better": {name: dict.fromkeys(_metrics(entry), True) for name, entry in entries.items()},
        "n-samples": {name: _sample_counts(entry) for name, entry in entries.items()},
        "config": {
            "model": "oncurve",
            "model_args": f"pretrained={model['name']}",
            "model_num_parameters": model["num_parameters"],
            "model_dtype": results["sampler"]["compute_type"],
            "model_revision": model["revision"] or "",
            "model_sha": model["sha256"] or "",
            "batch_size": None,
            "batch_sizes": [],
            "device": results["sampler"]["device"],
            "use_cache": None,
            "limit": None,
            "bootstrap_iters": 4000,
            "gen_kwargs": None,
        },
        "git_hash": run["code"]["commit"],
        "date": now.timestamp(),
        "transformers_version": run["packages"].get("transformers"),
        "lm_eval_version": None,
        "exported_by": f"oncurve {run['oncurve']}",
        "task_hashes": {name: _task_hash(rows) for name, rows in samples.items()},
        "model_source": "oncurve",
        "model_name": model["label"],
        "model_name_sanitized": safe_name(model["label"]),
        "system_instruction": None,
        "system_instruction_sha": None,
        "fewshot_as_multiturn": False,
        "chat_template": None,
        "chat_template_sha": None,
        "total_evaluation_time_seconds": str(sum(entry["seconds"] for entry in entries.values())),
    }


def sample_rows(
    results: Mapping[str, Any], name: str, evaluation: Evaluation, prompts: Sequence[Prompt]
) -> Iterator[dict[str, Any]]:
    """One row per problem with all of its completions, as the harness logs samples.

    ``exact_match`` is the share of the graded completions that is right, null where none could be graded.
    """
    entry = results["benchmarks"][name]
    metric, settings = _metrics(entry)[0], _generation(entry)
    by_index = {prompt.index: prompt for prompt in prompts}
    for examples in evaluation.by_prompt():
        prompt = by_index[examples[0].index]
        document = {key: value for key, value in prompt.row.items() if isinstance(value, (str, int, float, bool))}
        graded = [example.is_correct for example in examples if example.category != "error"]
        yield {
            "doc_id": prompt.index,
            "doc": document,
            "target": str(prompt.row["answer"]),
            "arguments": {"gen_args_0": {"arg_0": prompt.text, "arg_1": settings}},
            "resps": [[example.completion for example in examples]],
            "filtered_resps": [_filtered(example) for example in examples],
            "filter": FILTER,
            "metrics": [metric],
            "doc_hash": _hash(json.dumps(document, indent=2, ensure_ascii=False)),
            "prompt_hash": _hash(prompt.text),
            "target_hash": _hash(str(prompt.row["answer"])),
            metric: sum(graded) / len(graded) if graded else None,
        }


def _metrics(entry: Mapping[str, Any]) -> list[str]:
    """Names of the numbers, the share of right completions first, under the names that the harness has for them."""
    first = "pass@1" if entry["grader_name"] == "programs" else "exact_match"
    sizes = [int(k) for k in entry["numbers"]["pass"] if int(k) > 1]
    voted = [int(k) for k in entry["numbers"]["majority"] or {}]
    return [first, *(f"pass@{k}" for k in sizes), *(f"maj@{k}" for k in voted)]


def _task_numbers(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    numbers = entry["numbers"]
    values = [
        numbers["avg"],
        *(v for k, v in numbers["pass"].items() if int(k) > 1),
        *(numbers["majority"] or {}).values(),
    ]
    found: dict[str, Any] = {"name": name, "alias": name, "sample_len": numbers["num_prompts"]}
    for metric, estimate in zip(_metrics(entry), values, strict=True):
        error = estimate.get("standard_error")
        found[f"{metric},{FILTER}"] = estimate["value"]
        found[f"{metric}_stderr,{FILTER}"] = "N/A" if error is None else error
    return found


def _task_config(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    dataset = entry["source"]["dataset"]
    return {
        "task": name,
        "dataset_path": dataset["path"],
        "dataset_name": dataset["subset"],
        "test_split": dataset["split"],
        "doc_to_text": entry["prompt"]["example"],
        "doc_to_target": "{{answer}}",
        "output_type": "generate_until",
        "generation_kwargs": _generation(entry),
        "repeats": entry["numbers"]["samples_per_prompt"],
        "num_fewshot": 0,
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in _metrics(entry)],
        "should_decontaminate": False,
        "metadata": {"version": TASK_VERSION, "graded_by": entry["grader"]},
    }


def _generation(entry: Mapping[str, Any]) -> dict[str, Any]:
    params = entry["decoding"]
    return {
        "until": list(params["stop"]),
        "do_sample": params["temperature"] > 0,
        "temperature": params["temperature"],
        "top_p": params["top_p"],
        "max_gen_toks": params["max_completion_tokens"],
    }


def _sample_counts(entry: Mapping[str, Any]) -> dict[str, int]:
    return {"original": entry["source"]["rows_found"], "effective": entry["numbers"]["num_prompts"]}


def _filtered(example: Example) -> str:
    return example.completion if example.extracted is None else example.extracted


def _task_hash(rows: Sequence[Mapping[str, Any]]) -> str:
    return _hash("".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
