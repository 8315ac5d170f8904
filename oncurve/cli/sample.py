"""Command `sample`: completions of questions."""

from __future__ import annotations

from typing import Annotated

import typer

from oncurve.observe.terminal import console, loading_libraries, quiet_libraries


def sample(
    model: Annotated[str, typer.Argument(help="A run, a model folder, a Hugging Face Hub name, or `embedded`.")],
    question: Annotated[list[str] | None, typer.Argument(help="Questions, asked for if omitted.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Prompt template.", show_default="that of the run, else think_answer")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(help="Use the model's chat template.", show_default="as in the run, else if the model has one"),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Completions per question.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum completion tokens.")] = 256,
) -> None:
    """Ask a model a question and print its completions.

    Example: `oncurve sample embedded "Tom has 12 apples and buys 7 more. How many apples does Tom have?"`
    """
    quiet_libraries()
    with loading_libraries():
        from oncurve.run.examine import ask  # lazy

    ask(
        model, question or (), template=template, chat=chat, count=count,
        temperature=temperature, max_tokens=max_tokens, console=console(),
    )  # fmt: skip
