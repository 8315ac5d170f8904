"""Do the code blocks of a page do what they are there for?

The blocks of a page are run in order, in one scratch folder; the Python ones share their names. The convention:

- `python` and `bash` blocks are run, `yaml` and `json` blocks are read, and a `yaml` block with a section of a recipe
  must load: a part of one stands in for that part of the recipe `word_problems`. Blocks in other languages, or without
  one, are only shown; they hold no command of ours.
- ```` ```yaml title="mine.yaml" ```` also writes the block to a file of the scratch folder, for the blocks after it.
- `<!-- not run: as in PAGE.md -->` on the line before leaves a block out that stands in a page of the same words, which
  is run; what the block prints must stand there as well.
- `<!-- not run: REASON -->` leaves any other block out. Its `oncurve` commands, their options and the keys
  of recipes in them must exist all the same.
- A `text` block that begins on the line right below a block is what that block prints. Words must be equal, numbers
  within two units of the last digit shown or two per cent: another processor rounds differently. In a line with `...`,
  which stands for anything, numbers are not compared; a line of `...` alone stands for any lines.

    python docs/blocks.py PAGE FOLDER            run a page
    python docs/blocks.py PAGE FOLDER --write    and put what its blocks print where the page shows it
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import re
import shlex
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 400
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
COMMAND = re.compile(r"^ *(?:oncurve|python|pip|make) [a-z-]", re.MULTILINE)
OPERATORS = re.compile(r"[;&|<>()]+")
INSTALLERS = ("pip", "pipx", "uv", "git", "cd")


class BlockError(Exception):
    """A block that does not do what its page says."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    line: int
    """Of its fence in the page, counted from 1."""
    language: str
    code: str
    title: str | None
    """The file that it is, if it is one."""
    reason: str | None
    """Why it is not run."""
    is_output: bool
    """It is what the block above it prints."""
    span: tuple[int, int]
    """Where its code stands in the page."""


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    for found in FENCE.finditer(text):
        before = text[: found.start()].rstrip("\n").rpartition("\n")[2].strip()
        is_next = text[: found.start()].endswith(before + "\n") and bool(before)
        reason = re.fullmatch(r"<!-- not run: (.+) -->", before) if is_next else None
        title = re.search(r'title="([^"]+)"', found["info"])
        yield Block(
            line=text.count("\n", 0, found.start()) + 1,
            language=found["info"].split()[0] if found["info"].split() else "",
            code=textwrap.dedent(found["code"]),
            title=title and title[1],
            reason=reason and reason[1],
            is_output=is_next and before == "```" and found["info"] == "text",
            span=found.span("code"),
        )


class Page:
    """A page whose blocks are run in a folder."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.text = path.read_text(encoding="utf-8")
        self.names: dict[str, Any] = {"__name__": "page"}
        self.printed: str | None = None
        """What the last block printed; None if it was not run."""

    def run(self, *, write: bool = False) -> None:
        """Every block in order. With ``write`` the page gets the outputs as they are now, where they differ.

        Raises BlockError naming the page and the line.
        """
        fresh, last = "", 0
        for block in blocks_of(self.text):
            try:
                self._do(block)
                if block.is_output and self.printed is not None:
                    if not write:
                        compare_outputs(block.code, self.printed)
                    elif not is_same_output(block.code, self.printed):
                        fresh += self.text[last : block.span[0]] + self.printed.rstrip("\n") + "\n"
                        last = block.span[1]
            except BlockError as error:
                raise BlockError(f"{self.path.name}, line {block.line}: {error}") from None
        if write and last:
            self.path.write_text(fresh + self.text[last:], encoding="utf-8")

    def _do(self, block: Block) -> None:
        if not block.language and COMMAND.search(block.code):
            raise BlockError("this block holds commands and has no language; write ```bash, or ```text")
        if block.title:
            (self.folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.title).write_text(block.code, encoding="utf-8")
        if block.reason and (other := re.fullmatch(r"as in (\S+\.md)", block.reason)):
            self.printed = shown_in((self.path.parent / other[1]).read_text(encoding="utf-8"), block.code)
        elif block.reason:
            self.printed = None
            if block.language == "bash":
                check_commands(block.code, self.folder)
        elif block.language == "python":
            self.printed = self._run_python(block)
        elif block.language == "bash":
            self.printed = self._run_bash(block)
        elif block.language == "yaml":
            check_yaml(block.code)
        elif block.language == "json":
            check_json(block.code)

    def _run_python(self, block: Block) -> str:
        name = f"<{self.path.name}, line {block.line}>"
        linecache.cache[name] = (len(block.code), None, block.code.splitlines(keepends=True), name)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(block.code, name, "exec"), self.names)
        except Exception:  # noqa: BLE001 - code of a page may raise anything
            raise BlockError(f"the block fails:\n{traceback.format_exc()}") from None
        return printed.getvalue()

    def _run_bash(self, block: Block) -> str:
        script = ["bash", "-euo", "pipefail", "-c", block.code]
        try:
            done = subprocess.run(
                script, cwd=self.folder, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise BlockError(f"the block takes more than {SECONDS} s") from None
        if done.returncode:
            raise BlockError(f"the block ends with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout


def shown_in(text: str, code: str) -> str | None:
    """What a page shows that some commands print; None if it shows nothing.

    Raises BlockError if the page does not run them.
    """
    blocks = list(blocks_of(text))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if code in block.code and block.reason is None:
            return following.code if following is not None and following.is_output else None
    raise BlockError("the page that it names does not run it")


def compare_outputs(shown: str, printed: str) -> None:
    """Raise BlockError where a page shows something else than its block prints."""
    if not is_same_output(shown, printed):
        raise BlockError(f"the page shows\n{shown}\nbut the block prints\n{printed}\n`make docs` writes it anew")


def is_same_output(shown: str, printed: str) -> bool:
    """The same lines: equal words, numbers that differ by rounding alone, anything where a line shows three dots.

    A line of nothing but three dots stands for any number of lines.

    >>> is_same_output("first\\n...\\nlast", "first\\n1\\n2\\nlast")
    True
    >>> is_same_output("loss -0.0312, 5 rows, took ... s", "loss -0.0313, 5 rows, took 7 s")
    True
    """
    return _is_same(shown.rstrip().splitlines(), printed.rstrip().splitlines())


def _is_same(lines: list[str], others: list[str]) -> bool:
    for place, line in enumerate(lines):
        if line.strip() == "...":
            return any(_is_same(lines[place + 1 :], others[start:]) for start in range(place, len(others) + 1))
        if place >= len(others) or not is_same_line(line, others[place]):
            return False
    return len(lines) == len(others)


def is_same_line(shown: str, printed: str) -> bool:
    """The same for one line; how many spaces there are between words does not matter."""
    shown, printed = " ".join(shown.split()), " ".join(printed.split())
    pattern = ".*".join(re.escape(NUMBER.sub("0", part)) for part in shown.split("..."))
    if "..." in shown:
        return bool(re.fullmatch(pattern, NUMBER.sub("0", printed)))
    return bool(re.fullmatch(pattern, NUMBER.sub("0", printed))) and all(
        is_near(one, other) for one, other in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    )


def is_near(one: str, other: str) -> bool:
    """Two numbers as they are written: equal if whole, otherwise two last digits or two per cent apart at most."""
    first, second = (float(number.replace(",", "")) for number in (one, other))
    if "." not in one and "e" not in one:
        return first == second
    digits, _, exponent = one.partition("e")
    last = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(first - second) <= max(2.001 * last, 0.02 * abs(first))


def commands_of(code: str) -> Iterator[list[str]]:
    """The words of every simple command of a shell script.

    >>> list(commands_of("A=1 torchrun -m oncurve \\\\\\n  train x.yaml 2>&1 | tee log"))
    [['A=1', 'torchrun', '-m', 'oncurve', 'train', 'x.yaml'], ['1'], ['tee', 'log']]
    """
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if OPERATORS.fullmatch(word):
                yield words[:-1] if word[0] in "<>" and words and words[-1].isdigit() else words  # the 2 of 2>&1
                words = []
            else:
                words.append(word)
        yield words


def check_commands(code: str, folder: Path) -> None:
    """Raise BlockError for a command of oncurve, an option or a key of a recipe that does not exist."""
    try:
        commands = list(commands_of(code))
    except ValueError as error:
        raise BlockError(f"this is no shell script: {error}") from None
    for words in commands:
        if "oncurve" in words and not any(name in words[: words.index("oncurve")] for name in INSTALLERS):
            check_command(words[words.index("oncurve") + 1 :], folder)
        if words[:1] == ["make"]:
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            if missing := [word for word in words[1:] if "=" not in word and word not in targets]:
                raise BlockError(f"the Makefile has no target {missing[0]!r}")


def check_command(arguments: list[str], folder: Path) -> None:
    """Raise BlockError for arguments of ``oncurve`` that it would refuse before it does anything."""
    import typer.main

    from oncurve.cli.app import app

    if not arguments or arguments[0].startswith("-"):
        return
    command: Any = typer.main.get_command(app)
    said = f"oncurve {shlex.join(arguments)}"
    while isinstance(known := vars(command).get("commands"), dict):
        if not arguments or arguments[0] not in known:
            raise BlockError(f"`{said}`: there is no such command")
        command, arguments = known[arguments[0]], arguments[1:]
    if "--help" in arguments:
        return
    try:
        given = command.make_context(command.name, list(arguments)).params
    except Exception as error:  # noqa: BLE001 - click's, wherever typer keeps them
        raise BlockError(f"`{said}`: {vars(error).get('message') or error}") from None
    check_overrides(given.get("recipe") or "", given.get("overrides") or (), folder, said)


def check_overrides(recipe: str, overrides: list[str], folder: Path, said: str) -> None:
    """Raise BlockError for a key that no recipe has, or that does not fit into the recipe where that is at hand."""
    from oncurve.core.errors import ConfigError
    from oncurve.recipe.files import shipped_recipes
    from oncurve.recipe.load import load_config
    from oncurve.recipe.messages import known_keys

    try:
        if recipe in shipped_recipes():
            load_config(shipped_recipes()[recipe], overrides)
        elif (folder / recipe).is_file():
            load_config(folder / recipe, overrides)
    except ConfigError as error:
        raise BlockError(f"`{said}`: {error}") from None
    keys = set(known_keys())
    for override in overrides:
        key = ".".join(part for part in override.partition("=")[0].split(".") if not part.isdigit())
        if not any(f"{known}.".startswith(f"{key}.") for known in keys):
            raise BlockError(f"`{said}`: no recipe has a key {key!r}")


def check_yaml(code: str) -> None:
    """Raise BlockError for YAML that cannot be read, and for a recipe, or a part of one, that does not load."""
    import yaml

    from oncurve.core.errors import ConfigError
    from oncurve.recipe.files import shipped_recipes
    from oncurve.recipe.load import parse_config
    from oncurve.recipe.schema import Config

    try:
        tree = yaml.safe_load(code)
        if not isinstance(tree, dict) or not set(tree) & set(Config.model_fields):
            return
        if not {"model", "data"} <= set(tree):
            whole = yaml.safe_load(shipped_recipes()["word_problems"].read_text(encoding="utf-8"))
            parse_config(code + "\n" + yaml.safe_dump({key: whole[key] for key in whole if key not in tree}))
        else:
            parse_config(code)
    except (yaml.YAMLError, ConfigError) as error:
        raise BlockError(str(error)) from None


def check_json(code: str) -> None:
    """Raise BlockError for what is neither JSON nor one JSON value on each line."""
    try:
        json.loads(code)
    except ValueError:
        try:
            [json.loads(line) for line in code.splitlines() if line]
        except ValueError as error:
            raise BlockError(f"this is no JSON: {error}") from None


if __name__ == "__main__":
    sys.path.insert(0, str(Path(sys.argv[2]).resolve()))
    try:
        Page(Path(sys.argv[1]).resolve(), Path(sys.argv[2])).run(write="--write" in sys.argv[3:])
    except BlockError as found:
        raise SystemExit(str(found)) from None
