"""The tables and the picture of docs/performance.md, made from the committed measurements alone.

python benchmarks/bench.py chart                   the page and its picture
python benchmarks/bench.py chart phases memory     tables that are on no page, printed
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from record import RESULTS, read_result  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "performance.png"
MIB = 2**20
NOTHING = "Not measured yet.\n"
BESIDE_BEST = 1.3
"""TRL's smallest setting is looked for among those at most this many times slower than its fastest."""

Record = Mapping[str, Any]


def load(results: Path, kind: str, needs: str) -> list[Record]:
    """The records whose file names begin with a word and that have a key, in the order of their names."""
    records = [read_result(path, rows="runs") for path in sorted(results.glob(f"{kind}*.json"))]
    return [record for record in records if needs in record]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of the page; a sentence where there is no row."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return NOTHING
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]) + "\n"


def case_of(record: Record) -> list[str]:
    """Model, lengths, prompt and what is trained."""
    chosen = record["arguments"]
    trained = "all weights" if chosen.get("training", "full") == "full" else "LoRA"
    if chosen.get("kl"):
        trained += f", KL {chosen['kl']:g}"
    if chosen.get("updates", 1) > 1:
        trained += f", {chosen['updates']} updates"
    return [chosen["model"], chosen["case"], str(chosen["prompt_tokens"]), trained]


CASE = ["model", "lengths", "prompt", "trained"]


def side_of(record: Record) -> str:
    """How our side computes."""
    chosen = record["arguments"]
    return f"{chosen['compute']}, {'kernels' if chosen['kernels'] == 'on' else 'torch alone'}"


def processor(record: Record) -> str:
    """The kind of processor that it was measured on, in short."""
    return str(record["run"]["hardware"]["cpu"]).replace("(R)", "").removesuffix(" Processor")


def steps_table(results: Path) -> str:
    """Seconds of a whole step on either side."""
    head = [*CASE, "processor", "TRL's setting", "TRL", "ours", "oncurve", "times faster", "lowest, highest"]
    head += ["sampling", "training"]
    rows = []
    sweeps = {
        (*case_of(record), processor(record)): record["sweep"] for record in load(results, "vs_trl-sweep-", "sweep")
    }
    for record in load(results, "vs_trl-", "trl_setting"):
        found, swept = record["measured"], sweeps.get((*case_of(record), processor(record)))
        low, high = found["speedup_range"]
        rows.append(
            [
                *case_of(record),
                processor(record),
                f"{record['trl_setting']} ({_rank(record['trl_setting'], swept)})",
                f"{found['trl_seconds']['step']:.2f} s",
                side_of(record),
                f"{found['oncurve_seconds']['step']:.2f} s",
                f"**{found['speedup']:.2f}**",
                f"{low:.2f}, {high:.2f}",
                f"{found['sample_speedup']:.2f}",
                f"{found['train_speedup']:.2f}",
            ]
        )
    return table(head, rows)


def _rank(setting: str, sweep: Record | None) -> str:
    """What the sweep of the same case says of a setting, so that nobody takes a slow one for TRL's best."""
    if sweep is None or setting not in sweep["step_seconds"]:
        return "not tried against others"
    count = len(sweep["step_seconds"])
    if setting == sweep["fastest"]:
        return f"fastest of {count}"
    slower = sweep["step_seconds"][setting] / sweep["step_seconds"][sweep["fastest"]]
    if slower < 1.005:
        return f"as fast as {sweep['fastest']}"
    return f"{slower:.2f} times slower than {sweep['fastest']}"


def phases_table(results: Path) -> str:
    """Where the seconds of a step go."""
    head = [*CASE, "side", "sampling", "old and reference", "forward", "backward", "rest of training"]
    rows = []
    for record in load(results, "vs_trl-", "trl_setting"):
        theirs, ours = record["measured"]["trl_seconds"], record["measured"]["oncurve_seconds"]
        rest = theirs["train"] - theirs["old_reference"] - theirs["forward"] - theirs["backward"]
        names = ("generate", "old_reference", "forward", "backward")
        spent = [f"{theirs[name]:.2f}" for name in names]
        rows.append([*case_of(record), f"TRL, {record['trl_setting']}", *spent, f"{rest:z.2f}"])
        both = f"{ours['train'] - ours['old_reference']:.2f} in all"
        sampled = [f"{ours['sample']:.2f}", f"{ours['old_reference']:.2f}"]
        rows.append([*case_of(record), f"oncurve, {side_of(record)}", *sampled, both, "", ""])
    return table(head, rows)


def sweep_table(results: Path) -> str:
    """TRL's settings against each other, seconds per step."""
    records = load(results, "vs_trl-sweep-", "sweep")
    names = list(dict.fromkeys(name for record in records for name in record["sweep"]["step_seconds"]))
    rows = []
    for record in records:
        seconds, fastest = record["sweep"]["step_seconds"], record["sweep"]["fastest"]
        cells = [f"{seconds[name]:.2f}" if name in seconds else "" for name in names]
        marked = [f"**{cell}**" if name == fastest else cell for name, cell in zip(names, cells, strict=True)]
        rows.append([*case_of(record), processor(record), *marked])
    return table([*CASE, "processor", *names], rows)


def sampling_table(results: Path) -> str:
    """Tokens per second, and shares of what the machine can do."""
    head = [*CASE[:3], "device", "system", "tokens/s", "times", "of the GEMM rate", "of the bandwidth"]
    rows = [
        [
            *case_of(record)[:3],
            record["run"]["gpu"] if record["arguments"]["device"] != "cpu" else "CPU",
            _sampler(name, record),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speedup']:.2f}",
            f"{row['gemm_fraction']:.1%}",
            f"{row['bandwidth_fraction']:.1%}",
        ]
        for record in load(results, "sampling-", "measured")
        for name, row in record["measured"].items()
    ]
    return table(head, rows)


def _sampler(name: str, record: Record) -> str:
    without = record["arguments"]["kernels"] == "off" and name.startswith("engine")
    return f"{name}, torch alone" if without else name


def training_table(results: Path) -> str:
    """Seconds of forward, backward and optimizer on the same batch."""
    head = [*CASE, "way", "seconds", "times faster than the fastest TRL-like"]
    rows = []
    for record in load(results, "training-", "measured"):
        chosen = record["arguments"]
        suffix = ", checkpointing" if chosen["checkpointing"] else ""
        suffix += ", torch alone" if chosen["kernels"] == "off" else ""
        for name, row in record["measured"].items():
            shown = name + suffix if name.startswith("oncurve") else name
            rows.append([*case_of(record), shown, f"{row['seconds']:.3f}", f"{row['speedup']:.2f}"])
    return table(head, rows)


def memory_table(results: Path) -> str:
    """Peak memory of a whole step above the imports, with the two settings of TRL that it is compared with."""
    rows = []
    for record in load(results, "memory-", "measured"):
        theirs = record["measured"]["trl"]
        fastest, smallest = trl_memory_settings(theirs) if theirs else ("", "")
        for system in ("oncurve", "trl"):
            for setting, found in record["measured"][system].items():
                notes = []
                if system == "trl" and setting == fastest:
                    notes.append("TRL's fastest")
                if system == "trl" and setting == smallest:
                    notes.append(f"TRL's smallest within {BESIDE_BEST} times of its fastest")
                name = "TRL" if system == "trl" else "oncurve"
                figures = [f"{found['step_above_baseline'] / MIB:.0f}", f"{min(found['step_seconds']):.2f}"]
                rows.append([*case_of(record), name, setting, *figures, ", ".join(notes)])
    return table([*CASE, "system", "setting", "MiB", "seconds per step", ""], rows)


def trl_memory_settings(theirs: Mapping[str, Record]) -> tuple[str, str]:
    """TRL's fastest setting, and its smallest among those nearly as fast."""
    seconds = {name: min(found["step_seconds"]) for name, found in theirs.items()}
    best = min(seconds.values())
    near = [name for name in theirs if seconds[name] <= BESIDE_BEST * best]
    smallest = min(near, key=lambda name: theirs[name]["step_above_baseline"])
    return min(seconds, key=lambda name: seconds[name]), smallest


def accuracy_table(results: Path) -> str:
    """Seconds to the accuracy, seed by seed; a run that never got there is said to have not."""
    rows = []
    for record in load(results, "time_to_accuracy", "runs"):
        seeds = sorted({run["seed"] for run in record["runs"]})
        found = {(run["system"], run["seed"]): run for run in record["runs"]}
        for seed in seeds:
            ours, theirs = found["oncurve", seed], found["TRL", seed]
            ratio = f"{theirs['seconds'] / ours['seconds']:.2f}" if ours["reached"] and theirs["reached"] else "–"
            rows.append([str(seed), _reached(ours), _reached(theirs), record["trl_setting"], ratio])
        both = [[found[system, seed]["seconds"] for seed in seeds] for system in ("oncurve", "TRL")]
        if all(None not in seconds for seconds in both):
            medians = [statistics.median(seconds) for seconds in both]
            shown = [f"{median:.1f} s" for median in medians]
            rows.append(["median", *shown, record["trl_setting"], f"**{medians[1] / medians[0]:.2f}**"])
    return table(["seed", "oncurve", "TRL", "TRL's setting", "times faster"], rows)


def _reached(run: Record) -> str:
    if run["reached"]:
        return f"{run['seconds']:.1f} s, {run['steps']} steps"
    best = max(point["correct_fraction"] for point in run["points"])
    return f"never in {run['trained_seconds']:.1f} s (best {best:.0%})"


def machines(results: Path) -> str:
    """Which machines and which versions the figures come from."""
    found: dict[str, list[str]] = {}
    for path in sorted(results.glob("*.json")):
        if not path.name.startswith(KINDS):
            continue
        run = read_result(path).get("run", {})
        if "flags" not in run:
            continue
        hardware, versions = run["hardware"], run["libraries"]
        text = (
            f"{run['gpu'] or hardware['cpu']}, {run['threads']} threads on {hardware['cpu_cores']} cores, "
            f"{hardware['memory_gib']} GiB ({', '.join(run['flags'])}); "
            + ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
            + f"; commit {str(run['code']['commit'])[:12]}{' with changes' if run['code']['dirty'] else ''}"
        )
        found.setdefault(text, []).append(f"`{path.name}`")
    if not found:
        return NOTHING
    return "\n".join(f"- {text}: {', '.join(files)}" for text, files in found.items()) + "\n"


KINDS = ("vs_trl-", "sampling-", "training-", "memory-", "time_to_accuracy")
"""How the names of the result files of this page begin."""


def picture(_: Path) -> str:
    """The picture where there is one."""
    if not PICTURE.is_file():
        return NOTHING
    return "![Seconds per step, tokens per second and memory, oncurve against TRL](pictures/performance.png)\n"


PARTS: dict[str, Callable[[Path], str]] = {
    "picture": picture,
    "steps": steps_table,
    "accuracy": accuracy_table,
}
"""What is on the page."""
MORE: dict[str, Callable[[Path], str]] = {
    "memory": memory_table,
    "phases": phases_table,
    "sweep": sweep_table,
    "sampling": sampling_table,
    "training": training_table,
    "machines": machines,
}
"""What is printed when it is named on the command line."""


def page(results: Path = RESULTS) -> str:
    """The page on performance with what the records say between its markers."""
    text = PAGE.read_text(encoding="utf-8")
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        content = make(results)
        text, count = pattern.subn(lambda match, content=content: match[1] + content + match[2], text)
        if count != 1:
            raise ValueError(f"{PAGE.name} needs the markers of {name!r} once and has them {count} times")
    return text


def draw(results: Path, path: Path) -> bool:
    """Bars: seconds per step of both sides, the ratio above each pair. False where nothing has been measured."""
    records = load(results, "vs_trl-", "trl_setting")
    memory = [record for record in load(results, "memory-", "measured") if all(record["measured"].values())]
    if not records:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.62 * len(records) + (0.5 * len(memory) + 1.2 if memory else 0)))
    FigureCanvasAgg(figure)
    heights = [len(records) + 1] + ([len(memory) + 1] if memory else [])
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    labels = [f"{_label(record)}\n{side_of(record)}; TRL at {record['trl_setting']}" for record in records]
    theirs = [record["measured"]["trl_seconds"]["step"] for record in records]
    ours = [record["measured"]["oncurve_seconds"]["step"] for record in records]
    notes = [f"{record['measured']['speedup']:.2f} times faster" for record in records]
    _bars(panels[0], labels, ours, theirs, notes, "Seconds per step", "s")
    if memory:
        pairs = [_memory_pair(record) for record in memory]
        labels = [
            f"{_label(record)}\n{ours}; TRL at {theirs}" for record, (ours, theirs) in zip(memory, pairs, strict=True)
        ]
        sizes = [
            [
                record["measured"][side][pair[place]]["step_above_baseline"] / MIB
                for record, pair in zip(memory, pairs, strict=True)
            ]
            for place, side in enumerate(("oncurve", "trl"))
        ]
        notes = [f"{small / large:.0%}" for small, large in zip(*sizes, strict=True)]
        _bars(panels[1], labels, *sizes, notes, "Peak memory of a step, our smallest and TRL at its fastest", "MiB")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    return True


def _label(record: Record) -> str:
    model, lengths, prompt, trained = case_of(record)
    return f"{model}, {lengths}, prompt {prompt}, {trained}, {processor(record)}"


def _memory_pair(record: Record) -> tuple[str, str]:
    """Our smallest setting, and TRL's fastest."""
    ours, theirs = record["measured"]["oncurve"], record["measured"]["trl"]
    return min(ours, key=lambda name: ours[name]["step_above_baseline"]), trl_memory_settings(theirs)[0]


def _bars(
    axes: Any, labels: list[str], ours: list[float], theirs: list[float], notes: list[str], title: str, unit: str
) -> None:
    """Pairs of bars as shares of TRL's, the figures written at their ends."""
    places = range(len(labels))
    axes.barh([place + 0.2 for place in places], [1.0] * len(labels), height=0.36, color="#c3cad5", label="TRL")
    shares = [a / b for a, b in zip(ours, theirs, strict=True)]
    axes.barh([place - 0.2 for place in places], shares, height=0.36, color="#2563eb", label="oncurve")
    for place, share, mine, yours, note in zip(places, shares, ours, theirs, notes, strict=True):
        digits = 2 if unit == "s" else 0
        axes.text(1.01, place + 0.2, f"{yours:.{digits}f} {unit}", va="center", fontsize=8)
        axes.text(share + 0.01, place - 0.2, f"{mine:.{digits}f} {unit}, {note}", va="center", fontsize=8)
    axes.set_yticks(list(places), labels, fontsize=8)
    axes.set_xticks([])
    axes.set_xlim(0, max(1.15, max(shares) + 0.25))
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)


def main() -> None:
    """Write the picture and the page, or print the tables that are named."""
    if named := sys.argv[1:]:
        for name in named:
            print(MORE[name](RESULTS))
        return
    print(f"{PICTURE.name} written" if draw(RESULTS, PICTURE) else "nothing to draw yet")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.name} written")


if __name__ == "__main__":
    main()
