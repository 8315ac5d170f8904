"""The commands together, in the order of their help; a user's mistake becomes a message."""

from __future__ import annotations

import io
import re
import signal
import sys
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from types import FrameType
from typing import Annotated, Any

import typer

from oncurve import __version__
from oncurve.cli.arguments import Commands, RecipeCommand
from oncurve.constants import INTERRUPTED
from oncurve.core.errors import OncurveError
from oncurve.run_errors import call_with_memory_error

COMMANDS = {
    "train": "train",
    "sft": "train",
    "resume": "train",
    "launch": "launch",
    "demo": "train",
    "sample": "sample",
    "evaluate": "evaluate",
    "serve": "serve",
    "check": "check",
    "plan": "plan",
    "trl": "trl",
    "coldstart": "coldstart",
    "download": "hub",
    "merge": "hub",
    "push": "hub",
    "replay": "history",
    "regrade": "history",
    "report": "report",
    "compare": "compare",
    "dashboard": "dashboard",
    "doctor": "doctor",
}
"""The commands in the order of their help, each with the module of its function."""
OF_RECIPES = {"train", "sft", "resume", "demo", "sample", "evaluate", "check", "plan", "coldstart", "replay"}
"""Commands that take settings of a recipe."""


def make_app(command: str | None = None) -> typer.Typer:
    """The command line; with the name of a ``command``, that one alone, which starts faster."""
    app = typer.Typer(
        name="oncurve",
        cls=Commands,
        help="Train reasoning models with GRPO, on a CPU, a GPU or a cluster.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(_options)
    for name in [command] if command in COMMANDS else COMMANDS:
        module = import_module(f"oncurve.cli.{COMMANDS[name]}")
        function = getattr(module, name)
        if name == "trl":
            app.command(context_settings=module.AsIs)(function)
        elif name in OF_RECIPES:
            app.command(cls=RecipeCommand)(function)
        else:
            app.command()(function)
    if command not in COMMANDS:
        app.add_typer(import_module("oncurve.cli.recipe").recipes)
    return app


def __getattr__(name: str) -> Any:
    """``app``, with all commands."""
    if name == "app":
        return make_app()
    raise AttributeError(name)


def _say_version(is_requested: bool) -> None:
    if is_requested:
        sys.stdout.write(f"oncurve {__version__}\n")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the name of a command."""


def _run() -> None:
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    code = make_app(sys.argv[1] if len(sys.argv) > 1 else None)(standalone_mode=False)
    if heard and code == INTERRUPTED:  # typer makes an exit code of it, without a word
        raise KeyboardInterrupt
    if isinstance(code, int) and code:
        raise SystemExit(code)


UsageMistake: type[Exception] = typer.BadParameter.__bases__[0]
"""The exception of typer for a mistake on the command line, a class of the click that it brings along."""
NUMBERS = {"integer": "whole number", "number": "number"}


def _usage(error: Any) -> str:
    """A mistake on the command line in one sentence, and where the options are listed."""
    path_words = error.ctx.command_path.split() if error.ctx is not None else []
    command = " ".join(["oncurve", *(word for word in path_words[1:] if word.isalpha() and word != "oncurve")])
    text = error.format_message().replace("Input should be ", "this must be ").rstrip(".")
    text = re.sub(r"a valid (integer|number), unable to parse .*", lambda kind: f"a {NUMBERS[kind[1]]}", text)
    if "this must be" in text:  # without what was found
        options = error.param.opts if error.param is not None else ()
        typed = [word.partition("=")[2] for word in sys.argv if word.partition("=")[0] in options and "=" in word]
        typed += [value for word, value in pairwise(sys.argv) if word in options]
        text += f"; found {typed[-1]!r}" if typed else ""
    if not text:
        return "a command is missing. See `oncurve --help`"
    return f"{text}{'' if text.endswith('?') else '.'} See `{command} --help`"


def main() -> None:
    """Run a command; a user's mistake becomes one message and an exit code, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a reward may print what the terminal's encoding has not
        with suppress(OSError):  # of a stream that has become a pipe since it was opened
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        call_with_memory_error(_run)
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
