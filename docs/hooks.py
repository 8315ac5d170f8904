"""How does the site show what the pages link to outside of docs/? As pages of its own: source, notebooks, CHANGELOG.

In the repository such a link leads to the file. A link whose text is a name in backticks and whose target is a Python
file, [`group_relative`](../oncurve/algorithm/advantages.py), leads to that function or class on the site.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "repository"
"""Folder of the site for files from outside of docs/."""
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files from outside of docs/ that are pages of the navigation."""
LINK = re.compile(r"\[(?P<text>[^\]\n]*(?:\][^\](\n][^\]\n]*)*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file that a page links to and that lies outside of docs/."""
    remaining = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    added: set[str] = set()

    def add(path: str) -> None:
        if path not in added:
            added.add(path)
            page = as_page(path)
            remaining.append((path, page if path.endswith(".md") else ""))
            inclusion = InclusionLevel.INCLUDED if path in PAGES else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri_of(path), content=page, inclusion=inclusion))

    for path in PAGES:
        add(path)
    while remaining:
        for path in outside(*remaining.pop()):
            add(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links that lead out of docs/ at the pages of those files."""
    uri = page.file.src_uri
    named = {page: path for path, page in PAGES.items()}
    is_outside = uri in named or uri.startswith(f"{FOLDER}/")
    source = named.get(uri, uri.removeprefix(f"{FOLDER}/")) if is_outside else f"docs/{uri}"
    if is_outside and not (ROOT / source).is_file():
        return markdown  # a page made of code, which has no links

    def rewritten(found: re.Match[str]) -> str:
        path = resolve(source, found["target"])
        if path.startswith("docs/"):
            if not is_outside:
                return found[0]
            target, anchor = path.removeprefix("docs/"), found["anchor"] or ""
        elif (ROOT / path).is_file():
            target, anchor = uri_of(path), found["anchor"] or anchor_of(path, found["text"])
        else:
            return found[0]
        return f"[{found['text']}]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{anchor})"

    return LINK.sub(rewritten, markdown)


def outside(source: str, text: str) -> Iterator[str]:
    """Files outside of docs/ to which a page of the repository links."""
    for found in LINK.finditer(text):
        path = resolve(source, found["target"])
        if not path.startswith(("docs/", "../")) and (ROOT / path).is_file():
            yield path


def resolve(source: str, target: str) -> str:
    """The path in the repository to which a link of a file leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def uri_of(path: str) -> str:
    """The page of the site that shows a file of the repository."""
    return PAGES.get(path) or (f"{FOLDER}/{path}" if path.endswith(".md") else f"{FOLDER}/{path}.md")


def anchor_of(path: str, text: str) -> str:
    """The heading of a function or class, if the text of a link to a Python file names one."""
    name = re.fullmatch(r"`([A-Za-z_][\w.]*?)(?:\(\))?`", text)
    if not path.endswith(".py") or not name:
        return ""
    first = name[1].partition(".")[0]
    return f"#{first.lower()}" if first in names_of((ROOT / path).read_text(encoding="utf-8")) else ""


def names_of(code: str) -> dict[str, int]:
    """Functions and classes of a module with the line in which each begins, decorators included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(code).body if isinstance(node, kinds)]
    return {node.name: min([node.lineno, *(each.lineno for each in node.decorator_list)]) for node in nodes}


def as_page(path: str) -> str:
    """A file of the repository as a page."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return notebook_page(path, json.loads(text))
    language = LANGUAGES.get(os.path.splitext(path)[1], "text")
    parts = {1: ""}
    if language == "python":
        parts |= {line: f"## {name}" for name, line in names_of(text).items()}
    lines, starts = text.splitlines(), sorted(parts)
    page = [f"# {path}"]
    for start, end in zip(starts, [*starts[1:], len(lines) + 1], strict=True):
        body = "\n".join(lines[start - 1 : end - 1]).rstrip()
        if body or parts[start]:
            page.append(f'{parts[start]}\n\n``````{language} linenums="{start}"\n{body}\n``````')
    return "\n\n".join(page) + "\n"


def notebook_page(path: str, notebook: dict[str, Any]) -> str:
    """A notebook as a page: its text and its code."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    shown = [text if kind == "markdown" else f"``````python\n{text}\n``````" for kind, text in cells]
    return "\n\n".join(shown) + f"\n\nThe file is `{path}` of the repository.\n"
