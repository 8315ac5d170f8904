"""The generated tables of the page for people who come from TRL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from record import RESULTS, read_result

from oncurve.trl.algorithms import SEQUENCE_LEVEL, TOKEN_LEVEL
from oncurve.trl.options import Fate, raw_table, table, trl_version


def options_markdown() -> str:
    """The tables of all options, by what becomes of them."""
    parts = [
        "### Translated\n",
        *_taken(),
        "\n### No effect here\n",
        *_grouped("nothing"),
        "\n### Not supported\n",
        "A script that changes one of these stops before training; one message lists them all.\n",
        *_grouped("unsupported", changes_learning=True),
        "\n### Ignored with a note\n",
        "The trained model is the same.\n",
        *_grouped("unsupported", changes_learning=False),
        "\n### Losses\n",
        *_losses(),
        "\n### Defaults that changed in TRL\n",
        *_history(),
    ]
    return "\n".join(parts)


def _taken() -> Iterator[str]:
    yield "| GRPOConfig | recipe | how |"
    yield "|---|---|---|"
    taken = sorted((o for o in table().values() if o.fate in ("direct", "computed")), key=lambda option: option.name)
    for option in taken:
        key = f"`{option.to}`" if option.to else "-"
        yield f"| `{option.name}` | {key} | {option.why} |"


def _grouped(fate: Fate, *, changes_learning: bool | None = None) -> Iterator[str]:
    yield "| why | options |"
    yield "|---|---|"
    reasons: dict[str, list[str]] = {}
    for option in table().values():
        if option.fate == fate and changes_learning in (None, option.changes_learning):
            reasons.setdefault(option.why, []).append(option.name)
    for why, names in reasons.items():
        yield f"| {why} | {', '.join(f'`{name}`' for name in names)} |"


def _history() -> Iterator[str]:
    yield "| option | its default, from which version of TRL |"
    yield "|---|---|"
    for name, history in raw_table()["history"].items():
        said = ", ".join(f"`{value}` from {since}" for since, value in history.items())
        yield f"| `{name}` | {said} |"


def _losses() -> Iterator[str]:
    yield "| loss_type | `algorithm.type` | `algorithm.loss` | `algorithm.normalize` | at sequence level |"
    yield "|---|---|---|---|---|"
    for kind, (row, chosen) in TOKEN_LEVEL.items():
        sequence, level = SEQUENCE_LEVEL[kind]
        yield (
            f"| `{kind}` | `{row}` | `{chosen['loss']}` | `{chosen['normalize']}` | `{sequence}`, `{level['loss']}`, "
            f"`{level['normalize']}` |"
        )


def beside_markdown() -> str:
    """What the same script gives under TRL and here, from the results of benchmarks/learning/trl_beside.py."""
    found = read_result(RESULTS / "trl_beside.json", rows="losses")
    lines = [
        f"The largest difference in any step between TRL {trl_version()} and `oncurve trl`, with the largest value, "
        f"for one script, model and data set with forced completions ({found['steps']} steps of "
        f"{found['completions_per_step']} completions, float32; `python benchmarks/bench.py trl_beside`):\n",
        "| loss_type | beta | reward | loss | gradient norm | learning rate |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["losses"]:
        cells = [_difference(row[key]) for key in ("reward", "loss", "grad_norm", "learning_rate")]
        lines.append(f"| `{row['loss_type']}` | {row['beta']:g} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_speed()])


def _speed() -> Iterator[str]:
    """Seconds per step of both, where they were measured."""
    path = RESULTS / "trl_beside_speed.json"
    if not path.is_file():
        return
    found = read_result(path, rows="losses")
    machine = found["machine"]
    if not isinstance(machine, str):
        machine = f"{machine['hardware']['cpu_cores']} x {machine['hardware']['cpu']}"
    [row] = found["losses"]
    theirs, ours = row["seconds_per_step_trl"], row["seconds_per_step_oncurve"]
    yield (
        f"\nThe same script with completions drawn: {theirs:.2f} seconds per step under TRL, {ours:.2f} under "
        f"`oncurve trl` (medians over {found['repeats']} runs of {found['steps']} steps each, taking turns, on {machine}; "
        f"`python benchmarks/bench.py trl_beside --sampled`). [Performance](performance.md) has larger models."
    )


def _difference(quantity: dict[str, Any]) -> str:
    return f"{quantity['largest_difference']:.0e} of {max(abs(value) for value in quantity['trl']):.2g}"


def strangers_markdown() -> str:
    """What became of public scripts, from the results of benchmarks/learning/trl_scripts.py."""
    found = read_result(RESULTS / "trl_scripts.json", rows="scripts")
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(found["counts"].items(), key=lambda each: -each[1]))
    options = [fate for script in found["scripts"] for fate in script["options"].values()]
    taken, idle, said, refused, silent = (
        sum(fate.startswith(kind) for fate in options) for kind in ("taken", "idle", "said", "refused", "silent")
    )
    return (
        f"{len(found['scripts'])} public scripts were run unchanged, with small models and data in place of theirs "
        f"(`python benchmarks/bench.py trl_scripts`): {counts}. "
        f"They set {len(options)} options: {taken} have the same effect here, {idle} have none anywhere, {said} are reported as "
        f"ignored and {refused} stop the script; {silent or 'none'} {'are' if silent else 'is'} dropped silently. "
        "Some were kept because they show a difference, so that the shares say nothing about scripts in general.\n\n"
        + drawn_markdown()
    )


def drawn_markdown() -> str:
    """What became of scripts that were drawn by the names of their files or repositories, under TRL and here."""
    draws = (read_result(RESULTS / f"trl_scripts_{draw}.json", rows="scripts") for draw in ("drawn", "fresh"))
    scripts = [script for draw in draws for script in draw["scripts"]]
    ran = "ran two steps"
    theirs = [script for script in scripts if script["under_trl"] == ran]
    ours = [script for script in theirs if script["outcome"] == ran]
    message = sum(script["outcome"] == "stopped with a message" for script in theirs)
    alike = sum(not script["only_trl_shows"] for script in ours)
    return (
        f"{len(scripts)} others were drawn by the names of their files or repositories, unseen, and run beside TRL, with stand-ins for their "
        f"models, data, packages, services and GPU: TRL trains {len(theirs)}, the rest fail under it. Of those "
        f"{len(ours)} train here and {message} stop with a message. {alike} of the {len(ours)} get to see all that TRL shows "
        f"them: arguments of rewards, callbacks, logs and files."
    )


PARTS = {"options": options_markdown, "beside": beside_markdown, "strangers": strangers_markdown}
"""The generated parts of the page, by their markers."""


def filled(text: str) -> str:
    """The page with its generated parts as they are now."""
    for name, make in PARTS.items():
        before, rest = text.split(f"<!-- {name}:begin -->\n")
        _, after = rest.split(f"<!-- {name}:end -->")
        text = f"{before}<!-- {name}:begin -->\n{make()}\n<!-- {name}:end -->{after}"
    return text


def main() -> None:
    """Write the generated parts into the page that is named."""
    page = Path(sys.argv[1])
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
