"""The page of the prompt templates, made from their code."""

from __future__ import annotations

from oncurve.data.prompts import TEMPLATES, Template, write_gold

ROW = {"question": "How much is 2 + 3?", "solution": "2 and 3 make 5.", "answer": "5"}
CODE = {"question": 'def add(a, b):\n    """The sum of a and b."""', "answer": "def add(a, b):\n    return a + b"}
INTRODUCTION = """`data.template` is what a question is written into before the model reads it. These are the templates of the package, each with
one row; the default is `think_answer`. Below "**the model writes**" stands a completion of the form that is asked for, made of the
row's solution and answer. `oncurve check RECIPE` prints a prompt of your own rows, as your model reads it.

- **Without a chat template** (`data.chat=false`, or a model that has none) the model reads the text as it stands here.
- **With one** the instructions are the system message, the question with what surrounds it is the user's message, and the end of the
  prompt, such as ` <think>`, opens the assistant's turn. The model's template writes the rest: its own marks in the place of `User:`
  and `Assistant:`. [Which of the two](#chat-messages) `auto` takes depends on the model and the template.
- **A text file** with `{question}` in it is a template of your own: `data.template=mine.txt`. The form of the completion is read from
  its words: `<answer>`, `####`, else `\\boxed{}`.
- **A prompt in full** in your data needs `as_is`, which keeps it to the letter.

Models continue from exactly these characters: no prompt here ends with a space or a line break, and a completion begins with one where
that is shown.
"""


def templates_markdown() -> str:
    """The page: for each template the prompt, and a completion of the form that it asks for."""
    return (INTRODUCTION + "".join(_section(template) for template in TEMPLATES.values())).rstrip()


def _section(template: Template) -> str:
    row = CODE if "program" in template.name else ROW
    asked = template.turn.replace("{user}", template.user.replace("{question}", row["question"]))
    prompt = "\n".join([*([template.system] if template.system else []), asked]) + template.opening
    notes = ["for base models: the chat template is used only with `data.chat=true`"] * template.is_for_base_models
    notes += ["white space around the question stays"] * template.keeps_space
    said = f"\n{'; '.join(notes).capitalize()}.\n" if notes else ""
    gold = write_gold(row, template)
    return f"\n### {template.name}\n{said}\n{_block(prompt)}\n**the model writes**\n\n{_block(gold)}"


def _block(text: str) -> str:
    return f"````text\n{text}\n````\n"
