"""The commands. Each reads its arguments, calls one function, and turns a user's mistake into a message."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from oncurve import __version__
from oncurve.cli import models, recipes, scripts
from oncurve.cli.overrides import Overrides, RecipeArgument, RecipeCommand
from oncurve.commands import runs
from oncurve.commands.launch import launch, supervise
from oncurve.errors import ConfigError, OncurveError, Stopped
from oncurve.model.out_of_memory import saying
from oncurve.observe.terminal import console, quiet_libraries

app = typer.Typer(
    name="oncurve",
    help="Train reasoning models with GRPO, on a CPU, a GPU or a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(recipes.recipes)


def _say_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"oncurve {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the name of a command."""


Processes = Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU.")]
Restarts = Annotated[int, typer.Option(min=0, help="Maximum automatic restarts after a process dies.")]
GoOn = Annotated[bool, typer.Option("--resume", help="Resume the run with this name if it exists.")]


@app.command(cls=RecipeCommand)
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    processes: Processes = None,
    restarts: Restarts = 0,
    go_on: GoOn = False,
) -> None:
    """Train a model from a recipe, evaluating it before and after.

    Example: `oncurve train word_problems run.steps=20 run.seed=1`
    """
    from oncurve.recipe.find import find_recipe  # lazy
    from oncurve.recipe.load import load_config  # lazy
    from oncurve.recipe.preflight import check_cheaply  # lazy
    from oncurve.recipe.run_folder import run_folder_path  # lazy
    from oncurve.session.run_status import clear_unbegun, progress_of  # lazy

    path = find_recipe(recipe)
    config = load_config(path, overrides or ())
    folder = run_folder_path(config)
    if (processes or restarts) and "WORLD_SIZE" not in os.environ:
        words = ["train", recipe, *(overrides or ()), f"run.name={folder.name}"]
        first = [*words, "--resume"] if go_on else words
        raise typer.Exit(supervise(first, [*words, "--resume"], processes, restarts, config.run.grace_seconds))
    progress = progress_of(folder) if go_on else "absent"
    check_cheaply(config, new_folder=folder if progress == "absent" else None)
    if progress == "finished":
        console().print(f"run finished: {folder}", highlight=False)
        return
    quiet_libraries()
    if progress == "begun":
        from oncurve.session.training import resume_run  # lazy

        result = resume_run(folder, given=config, console=console())
    else:
        try:
            from oncurve.session.trainer import Trainer  # lazy
        except KeyboardInterrupt:
            raise Stopped("stopped before the first step; there is nothing to resume", exit_code=130) from None

        if progress == "unbegun":
            clear_unbegun(folder)
        result = Trainer.for_command(recipe, overrides or (), console=console()).train()
    if result.exit_code:
        raise typer.Exit(result.exit_code)


@app.command(cls=RecipeCommand)
def sft(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    processes: Processes = None,
    restarts: Restarts = 0,
    go_on: GoOn = False,
) -> None:
    """Train on completions in the data before GRPO: the supervised stage of the recipe.

    Rows are {prompt, completion}, {messages}, {text}, or {question, solution, answer} in the recipe's template.

    Example: `oncurve sft word_problems sft.epochs=1 optimizer.learning_rate=1e-4`
    """
    from oncurve.recipe.find import find_recipe  # lazy
    from oncurve.recipe.load import read_tree  # lazy

    given = list(overrides or ())
    if not any(one.startswith(("sft.", "sft=")) for one in given) and not read_tree(find_recipe(recipe)).get("sft"):
        given.append("sft={}")
    train(recipe, given, processes, restarts, go_on)


@app.command(cls=RecipeCommand)
def resume(
    run: Annotated[Path, typer.Argument(help="Folder of an interrupted run.")],
    overrides: Overrides = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if the newest checkpoint is damaged.")] = False,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Allow changes to the recipe, the data or the number of processes.")
    ] = False,
    processes: Processes = None,
    restarts: Restarts = 0,
) -> None:
    """Resume a run from its newest valid checkpoint. The result is the same as without the interruption.

    Example: `oncurve resume runs/demo`
    """
    if (processes or restarts) and "WORLD_SIZE" not in os.environ:
        again = ["resume", str(run)]
        flags = [flag for flag, is_given in (("--strict", strict), ("--allow-change", allow_change)) if is_given]
        raise typer.Exit(supervise([*again, *(overrides or ()), *flags], again, processes, restarts))
    quiet_libraries()
    from oncurve.session.training import resume_run  # lazy

    result = resume_run(run, overrides or (), strict=strict, allow_change=allow_change, console=console())
    if result.exit_code:
        raise typer.Exit(result.exit_code)


app.command()(launch)


@app.command(cls=RecipeCommand)
def demo(overrides: Overrides = None) -> None:
    """Train the built-in model on word problems: a few minutes on a CPU, no network needed.

    Example: `oncurve demo run.seed=1`
    """
    train("word_problems", overrides)


app.command(cls=RecipeCommand)(models.sample)
app.command(cls=RecipeCommand)(models.evaluate)


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="The model that is being trained: a folder, a Hugging Face Hub name, or `embedded`.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8100,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anything but localhost needs a token.")
    ] = "127.0.0.1",
    registry: Annotated[Path | None, typer.Option(help="Shared folder in which trainers discover servers.")] = None,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Completions generated at a time (default: as memory allows).")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="A recipe setting, such as policy.device=cpu; repeat for several.")
    ] = None,
) -> None:
    """Serve rollouts to a trainer on another machine or in another process, with the weights it sends.

    Trainer and servers read their shared token from ONCURVE_SERVER_TOKEN.

    Example: `oncurve serve embedded --port 8101`
    """
    quiet_libraries()
    from oncurve.extensions import extension  # lazy

    extension("serve")(
        model, host=host, port=port, registry=registry, max_rows=max_rows, overrides=overrides or (), console=console()
    )


@app.command(cls=RecipeCommand)
def check(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Validate data and rewards before training.

    Reference answers must earn full reward, made-up completions must not, and prompts must not leak the solution.

    Example: `oncurve check word_problems data.limit=200`
    """
    from oncurve.recipe.find import find_recipe  # lazy
    from oncurve.recipe.load import load_config  # lazy
    from oncurve.recipe.preflight import check_cheaply  # lazy

    config = load_config(find_recipe(recipe), overrides or ())
    check_cheaply(config)
    quiet_libraries()
    from oncurve.commands.examine import check_recipe  # lazy

    if not check_recipe(config, console=console()):
        raise typer.Exit(1)


@app.command(cls=RecipeCommand)
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU type, such as RTX-4090 (default: cpu for the embedded model, else H100).")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs for training.")] = 1,
    devices: Annotated[Path | None, typer.Option(help="YAML file with your own devices and prices.")] = None,
    shard: Annotated[str | None, typer.Option(help="Sharding: none, zero1, zero2 or zero3.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Keep the optimizer state in CPU memory.")] = False,
    placement: Annotated[
        str, typer.Option(help="Where rollouts run: colocated, split or disaggregated.")
    ] = "colocated",
    sampler_gpus: Annotated[int, typer.Option(min=0, help="GPUs used only for rollouts.")] = 0,
    bandwidth: Annotated[float, typer.Option(min=0.001, help="Network bandwidth between machines in Gbit/s.")] = 100.0,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Length of a long prompt in tokens.")] = None,
    mean_tokens: Annotated[float | None, typer.Option(min=1, help="Mean completion length in tokens.")] = None,
    mean_turns: Annotated[float | None, typer.Option(min=1, help="With tools: mean turns of a completion.")] = None,
    answer_tokens: Annotated[float | None, typer.Option(min=1, help="With tools: mean tokens of an answer.")] = None,
    tool_seconds: Annotated[float | None, typer.Option(min=0, help="With tools: seconds until an answer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Estimate memory, fitting GPUs, time and cost of a recipe before running it.

    Example: `oncurve plan gsm8k policy.gradient_checkpointing=true --gpu H100`
    """
    from oncurve.commands.plan import plan_recipe  # lazy
    from oncurve.recipe.find import find_recipe  # lazy

    text = plan_recipe(
        find_recipe(recipe),
        overrides or (),
        gpu=gpu,
        gpus=gpus,
        devices=devices,
        shard=shard,
        offloads_optimizer=offload,
        placement=placement,
        sampler_gpus=sampler_gpus,
        network_gbit=bandwidth,
        prompt_tokens=prompt_tokens,
        mean_tokens=mean_tokens,
        mean_turns=mean_turns,
        answer_tokens=answer_tokens,
        tool_seconds=tool_seconds,
        as_json=as_json,
    )
    sys.stdout.write(text + "\n")


app.command(context_settings=scripts.AsIs)(scripts.trl)
app.command()(scripts.convert)


@app.command(cls=RecipeCommand)
def coldstart(
    output: Annotated[Path, typer.Option(help="Folder for the new run, which is a model too.")],
    task: Annotated[
        str, typer.Option(help="Task: word_problems, programs, calculator, calculator_chains, guess_number or maze.")
    ] = "word_problems",
    seed: Annotated[int, typer.Option(help="Random seed for the weights.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Train a small base model from random weights on imperfect worked solutions, by the recipe TASK/base.

    Example: `oncurve coldstart --task word_problems --output runs/base`
    """
    quiet_libraries()
    from oncurve.commands.make_base import prepare_base  # lazy

    recipe, given = prepare_base(output, task=task, seed=seed)
    train(recipe, [*given, *(overrides or ())])


app.command()(models.download)
app.command()(models.merge)
app.command()(models.push)


app.command()(runs.report)
app.command()(runs.compare)
app.command()(runs.dashboard)


@app.command()
def doctor(
    run: Annotated[Path | None, typer.Argument(help="Folder of a run, finished or not, or its metrics.jsonl.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    machine: Annotated[
        bool,
        typer.Option("--machine", help="List your processes that hold GPU memory and offer to end each."),
    ] = False,
) -> None:
    """Diagnose a run: problems, the numbers that show them, and what to do. Exit code 1 if one is severe.

    Example: `oncurve doctor runs/demo`
    """
    from oncurve.commands.doctor import examine_run  # lazy

    if machine:
        from oncurve.observe.machine import offer_to_end  # lazy

        offer_to_end(typer.echo, typer.confirm)
        return
    if run is None:
        raise ConfigError("doctor: name the folder of a run, such as `oncurve doctor runs/demo`.")
    if not examine_run(run, sys.stdout, as_json=as_json):
        raise typer.Exit(1)


def _run() -> None:
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    code = app(standalone_mode=False)
    if heard and code == INTERRUPTED:  # typer makes an exit code of it, without a word
        raise KeyboardInterrupt
    if isinstance(code, int) and code:
        raise SystemExit(code)


INTERRUPTED = 130
"""Exit code after Ctrl-C."""
UsageMistake: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for a mistake on the command line; it carries click's class with it."""


def _usage(error: Any) -> str:
    """A mistake on the command line in one sentence, and where the options are listed."""
    words = error.ctx.command_path.split() if error.ctx is not None else []
    place = " ".join(["oncurve", *(word for word in words[1:] if word.isalpha() and word != "oncurve")])
    text = error.format_message().replace("Input should be ", "this must be ").rstrip(".")
    if not text:
        return "a command is missing. See `oncurve --help`"
    return f"{text}{'' if text.endswith('?') else '.'} See `{place} --help`"


def main() -> None:
    """Run a command; a user's mistake becomes one message and an exit code, never a traceback."""
    try:
        saying(_run)
    except UsageMistake as error:
        sys.stderr.write(f"oncurve: {_usage(error)}\n")
        raise SystemExit(2) from None
    except OncurveError as error:
        if str(error):  # without a word where another process of the run says it
            sys.stderr.write(f"oncurve: {error}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write("oncurve: stopped\n")
        raise SystemExit(INTERRUPTED) from None
