"""The commands. Each reads its arguments, calls one function, and turns a user's mistake into a message."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from oncurve import __version__
from oncurve.cli import models, recipes, scripts
from oncurve.cli.overrides import Overrides, RecipeArgument, RecipeCommand
from oncurve.commands import runs
from oncurve.commands.launch import launch, supervise
from oncurve.errors import ConfigError, OncurveError
from oncurve.model.out_of_memory import saying
from oncurve.observe.terminal import console, quiet_libraries

app = typer.Typer(
    name="oncurve",
    help="Train reasoning models with GRPO: sample groups, grade each on its own curve, learn from the better ones.",
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
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """What stands before the name of a command."""


Processes = Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one for each GPU.")]
Restarts = Annotated[int, typer.Option(min=0, help="How often to go on by itself after a process was lost.")]


@app.command(cls=RecipeCommand)
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    processes: Processes = None,
    restarts: Restarts = 0,
    go_on: Annotated[bool, typer.Option("--resume", help="Go on with the run of this name if it was begun.")] = False,
) -> None:
    """Train as a recipe says, with a measurement before and after.

    Example: `oncurve train word_problems run.steps=20 run.seed=1`
    """
    from oncurve.config.load import load_config, read_text  # lazy
    from oncurve.config.run_folder import run_folder_path  # lazy
    from oncurve.recipes.find import find_recipe  # lazy
    from oncurve.session.run_status import clear_unbegun, progress_of  # lazy

    path = find_recipe(recipe)
    config = load_config(path, overrides or ())
    folder = run_folder_path(config)
    if (processes or restarts) and "WORLD_SIZE" not in os.environ:
        words = ["train", recipe, *(overrides or ()), f"run.name={folder.name}"]
        first = [*words, "--resume"] if go_on else words
        raise typer.Exit(supervise(first, [*words, "--resume"], processes, restarts, config.run.grace_seconds))
    progress = progress_of(folder) if go_on else "absent"
    if progress == "finished":
        console().print(f"run finished: {folder}", highlight=False)
        return
    quiet_libraries()
    if progress == "begun":
        from oncurve.session.training import resume_run  # lazy

        result = resume_run(folder, given=config, console=console())
    else:
        from oncurve.session.training import run_recipe  # lazy

        if progress == "unbegun":
            clear_unbegun(folder)
        result = run_recipe(config, read_text(path), console=console())
    if result.exit_code:
        raise typer.Exit(result.exit_code)


@app.command(cls=RecipeCommand)
def resume(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was stopped or killed.")],
    overrides: Overrides = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse if the newest checkpoint is broken.")] = False,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Go on with another recipe, data set or number of processes.")
    ] = False,
    processes: Processes = None,
    restarts: Restarts = 0,
) -> None:
    """Go on from the newest good checkpoint of a run, to the same result as if it had never stopped.

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
    """Watch a small model learn word problems in a few minutes, on a CPU and without a network.

    Example: `oncurve demo run.seed=1`
    """
    train("word_problems", overrides)


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="A run, the folder or hub name of a model, or `embedded`.")],
    question: Annotated[list[str] | None, typer.Argument(help="Questions; without any, they are asked for.")] = None,
    template: Annotated[str, typer.Option(help="Prompt template.")] = "think_answer",
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Completions per question.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Limit on completion tokens.")] = 256,
) -> None:
    """Ask a model something and see what it completes.

    Example: `oncurve sample embedded "Tom has 12 apples and buys 7 more. How many apples does Tom have?"`
    """
    quiet_libraries()
    from oncurve.commands.examine import ask  # lazy

    ask(
        model,
        question or (),
        template=template,
        chat=chat,
        count=count,
        temperature=temperature,
        max_tokens=max_tokens,
        console=console(),
    )


app.command(cls=RecipeCommand)(models.evaluate)


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="Folder or hub name of a model, or `embedded`: the one that is trained.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8100,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than this machine's own needs a token.")
    ] = "127.0.0.1",
    registry: Annotated[Path | None, typer.Option(help="Folder where trainers look for servers.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Completions at a time; left out: by memory.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, such as policy.device=cpu.")] = None,
) -> None:
    """Sample for a trainer somewhere else, with the weights that it sends.

    The token of trainer and servers is read from ONCURVE_SERVER_TOKEN.

    Example: `oncurve serve embedded --port 8101`
    """
    quiet_libraries()
    from oncurve.commands.examine import serve_model  # lazy

    serve_model(
        model, host=host, port=port, registry=registry, max_rows=max_rows, overrides=overrides or (), console=console()
    )


@app.command(cls=RecipeCommand)
def check(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Prove before a run that its data and rewards fit together: every gold answer pays, no prompt holds a solution.

    Example: `oncurve check word_problems data.limit=200`
    """
    from oncurve.config.load import load_config  # lazy
    from oncurve.recipes.find import find_recipe  # lazy

    config = load_config(find_recipe(recipe), overrides or ())
    quiet_libraries()
    from oncurve.commands.examine import check_recipe  # lazy

    if not check_recipe(config, console=console()):
        raise typer.Exit(1)


@app.command(cls=RecipeCommand)
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu: Annotated[str | None, typer.Option(help="Device of the table; else cpu (embedded) or H100 (others).")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many of them train.")] = 1,
    devices: Annotated[Path | None, typer.Option(help="YAML with devices and prices of yours.")] = None,
    shard: Annotated[str | None, typer.Option(help="none, zero1, zero2 or zero3.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Optimizer in the CPU's memory.")] = False,
    placement: Annotated[str, typer.Option(help="colocated, split or disaggregated.")] = "colocated",
    sampler_gpus: Annotated[int, typer.Option(min=0, help="Devices that only sample.")] = 0,
    bandwidth: Annotated[float, typer.Option(min=0.001, help="Gbit/s between machines.")] = 100.0,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a long prompt.")] = None,
    mean_tokens: Annotated[float | None, typer.Option(min=1, help="Tokens of the average completion.")] = None,
    servers: Annotated[str | None, typer.Option(help="Rollout servers to simulate: 4, 1,2,8 or 1..64.")] = None,
    spread: Annotated[float, typer.Option(min=0, help="Deviation of their lengths, as a share of the mean.")] = 0.6,
    losses: Annotated[float, typer.Option(min=0, help="How often a server is lost, per hour.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Before a run: its memory by phase, which GPUs hold it, what to change, how long it takes, what it costs.

    Example: `oncurve plan gsm8k policy.gradient_checkpointing=true --gpu H100`
    """
    from oncurve.commands.plan import plan_recipe  # lazy
    from oncurve.plan.fleet import FleetQuestion, read_counts  # lazy
    from oncurve.recipes.find import find_recipe  # lazy

    text = plan_recipe(
        find_recipe(recipe),
        overrides or (),
        gpu=gpu,
        gpus=gpus,
        devices=devices,
        shard=shard,
        offload=offload,
        placement=placement,
        sampler_gpus=sampler_gpus,
        network_gbit=bandwidth,
        prompt_tokens=prompt_tokens,
        mean_tokens=mean_tokens,
        fleet=FleetQuestion(counts=read_counts(servers), spread=spread, losses_per_hour=losses) if servers else None,
        as_json=as_json,
    )
    sys.stdout.write(text + "\n")


app.command(context_settings=scripts.AsIs)(scripts.trl)
app.command()(scripts.convert)


@app.command()
def coldstart(
    output: Annotated[Path, typer.Option(help="Folder for the new checkpoint.")],
    task: Annotated[str, typer.Option(help="What it learns: word_problems or programs.")] = "word_problems",
    seed: Annotated[int, typer.Option(help="Seed of weights and demonstrations.")] = 0,
    updates: Annotated[int | None, typer.Option(help="Optimizer updates; the shipped model's if omitted.")] = None,
    model: Annotated[str | None, typer.Option(help="Go on from this checkpoint instead of from nothing.")] = None,
) -> None:
    """Build a small base model from nothing by supervised training on imperfect worked solutions.

    Example: `oncurve coldstart --output runs/base --seed 0`
    """
    quiet_libraries()
    from oncurve.commands.examine import build_base  # lazy

    build_base(output, task=task, seed=seed, updates=updates, model=model, console=console())


app.command()(models.download)
app.command()(models.merge)
app.command()(models.push)


app.command()(runs.report)
app.command()(runs.compare)
app.command()(runs.dashboard)


@app.command()
def doctor(
    run: Annotated[Path | None, typer.Argument(help="Folder of a run, finished or not, or its metrics.jsonl.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    machine: Annotated[
        bool,
        typer.Option("--machine", help="List your processes that hold GPU memory, and ask of each whether to end it."),
    ] = False,
) -> None:
    """What is wrong with a run, which numbers show it, and what helps; exit code 1 if something is severe.

    Example: `oncurve doctor runs/demo`
    """
    from oncurve.commands.doctor import examine_run  # lazy

    if machine:
        from oncurve.observe.machine import offer_to_end  # lazy

        offer_to_end(typer.echo, typer.confirm)
        return
    if run is None:
        raise ConfigError("doctor: no run is named. Give the folder of a run, such as `oncurve doctor runs/demo`.")
    if not examine_run(run, sys.stdout, as_json=as_json):
        raise typer.Exit(1)


def main() -> None:
    """Run a command; a user's mistake becomes one message and an exit code, never a traceback."""
    try:
        saying(app)
    except OncurveError as error:
        if str(error):  # without a word where another process of the run says it
            sys.stderr.write(f"oncurve: {error}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write("oncurve: stopped\n")
        raise SystemExit(130) from None
