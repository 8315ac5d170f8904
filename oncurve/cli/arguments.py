"""Commands that take settings of a recipe, with a hint for a setting that is written as an option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from oncurve.core.errors import ConfigError

RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe file, its folder, or the name of a recipe in the package.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value settings, such as run.steps=50.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Host = Annotated[str, typer.Option(help="Address to listen on. Anything but localhost needs a token.")]

SEEN = "`oncurve check` finds problems that are trained on and evaluated"
REMOVED = {
    "sample": dict.fromkeys(
        ("--keep-correct", "--per-prompt", "--min-reward"),
        "take algorithm.type=rft, which trains on what is correct in each step",
    ),
    "evaluate": {
        "--data": "take data.path=FILE",
        "--split": "take data.split=NAME",
        "--limit": "take evaluation.num_prompts=N",
        "--samples": "take evaluation.samples=N",
        "--temperature": "take evaluation.temperature=0.6",
        "--top-p": "take evaluation.top_p=0.95",
        "--max-tokens": "take rollouts.max_completion_tokens=N",
        "--seed": "take run.seed=N",
        "--template": "take data.template=NAME",
        "--chat": "take data.chat=true",
        "--no-chat": "take data.chat=false",
        "--sampler": "take rollouts.type=transformers",
        "--also": "evaluate each run by itself",
        "--trained-on": SEEN,
        "--ngram": SEEN,
        "--card": "the card of a run holds the results of its own evaluation",
    },
}
"""Options of earlier versions by their command, and what to take instead."""
REMOVED_COMMANDS = {"convert": "take `oncurve trl --recipe FILE SCRIPT`, with the script's own arguments behind it"}
"""Commands of earlier versions, and what to take instead."""


class Commands(TyperGroup):
    """All commands, with a hint for one that was removed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises ConfigError for a command that was removed."""
        if args[0] in REMOVED_COMMANDS:
            raise ConfigError(f"the command {args[0]} was removed: {REMOVED_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)


class RecipeCommand(TyperCommand):
    """A command whose arguments may be ``key=value``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises ConfigError for an unknown option that reads like a key of a recipe."""
        known = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for index, word in enumerate(args):
            if word == "--":
                break
            option, _, value = word.partition("=")
            if option in REMOVED.get(ctx.info_name, {}):
                raise ConfigError(f"{option} was removed: {REMOVED[ctx.info_name][option]}")
            if option.startswith("--") and option not in {*known, "--help"}:
                following = args[index + 1] if index + 1 < len(args) else ""
                if key := key_for(option):
                    setting = value or ("VALUE" if following.startswith("-") or not following else following)
                    raise ConfigError(f"there is no option {option}. Settings are written key=value: {key}={setting}")
        return super().parse_args(ctx, args)


def key_for(option: str) -> str | None:
    """The key of a recipe that an option such as --steps or --run.steps stands for; None if there is none.

    >>> key_for("--learning-rate")
    'optimizer.learning_rate'
    """
    from oncurve.recipe.messages import known_keys  # lazy

    word = option.removeprefix("--").replace("-", "_")
    keys: Sequence[str] = list(known_keys())
    exact = [key for key in keys if key == word or key.rpartition(".")[2] == word]
    return min(exact, key=lambda key: (key != word, not key.startswith("run."), keys.index(key)), default=None)
