"""Uploads to the Hugging Face Hub: which files of a model's folder go there, and which secrets never do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from oncurve.errors import CheckpointError, ConfigError
from oncurve.evaluate.card import CARD, is_hub_name
from oncurve.observe.redact import redact
from oncurve.policy.lora import ADAPTER_CONFIG, is_adapter

UPLOADED = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", CARD, "LICENSE*",
)  # fmt: skip
"""Files of an ordinary model; everything else stays here."""
_TEXT = (".json", ".txt", ".jinja", ".md", "")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True, slots=True)
class Upload:
    """What would go to a repository."""

    folder: Path
    repository: str
    files: tuple[tuple[str, int], ...]
    """Names and sizes in bytes."""
    left: tuple[str, ...]
    """Names of what stays, with the reason."""

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size in self.files)

    def describe(self) -> str:
        """Exactly what would be uploaded, for people."""
        lines = [f"{self.repository}: {len(self.files)} files, {self.total_bytes:,} bytes, from {self.folder}"]
        lines += [f"  {size:>16,}  {name}" for name, size in self.files]
        lines += [f"  stays here: {reason}" for reason in self.left]
        return "\n".join(lines)


def plan_upload(folder: Path, repository: str) -> Upload:
    """The files of a model that would be uploaded.

    Raises ConfigError for a name that the hub does not allow, and for anything that looks like a secret in a file;
    CheckpointError if the folder holds no model, no card, or an adapter whose base nobody else could find.
    """
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise ConfigError(f"--repo is {repository!r}; write owner/name, of letters, digits, dots, dashes, underscores")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Name a run or the folder of a model")
    files: list[tuple[str, int]] = []
    left: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            left.append(f"{path.name} (not a plain file)")
        elif any(fnmatch(path.name, pattern) for pattern in UPLOADED):
            files.append((path.name, path.stat().st_size))
        else:
            left.append(f"{path.name} (no part of a model)")
    _check_model(folder, [name for name, _ in files])
    if found := [line for name, _ in files for line in secrets_in(folder / name)]:
        raise ConfigError(
            f"{folder}: refused, because these files hold what looks like a key: {'; '.join(found)}. "
            f"Remove it there, and revoke it if it was ever public"
        )
    return Upload(folder, repository, tuple(files), tuple(left))


def _check_model(folder: Path, names: list[str]) -> None:
    if not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(f"{folder}: no model there (no .safetensors). Name a run or the folder of a model")
    if CARD not in names:
        raise CheckpointError(f"{folder}: has no {CARD}. `oncurve evaluate {folder} --benchmark ... --card` writes one")
    if is_adapter(folder):
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not is_hub_name(base):
            raise CheckpointError(
                f"{folder}: the adapter's base is {base!r}, which nobody else can load. Merge it with `oncurve merge`, "
                f"or write the hub name of the base into {ADAPTER_CONFIG}"
            )


def secrets_in(path: Path) -> Iterator[str]:
    """Where a file holds what looks like a key: the name, and the line of a text. Never the key itself."""
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, 100_000_000)).decode("utf-8", "replace")
        if redact(header) != header:
            yield f"{path.name}, its header"
        return
    if path.suffix not in _TEXT and path.stat().st_size > 50_000_000:
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if redact(text) == text:
        return
    lines = [number for number, line in enumerate(text.splitlines(), 1) if redact(line) != line]
    yield f"{path.name}, line {', '.join(map(str, lines[:5]))}" if lines else path.name


def hub_user(token: str | None = None) -> str:
    """The name on the hub that a token belongs to. Raises ConfigError without a token, CheckpointError if it fails."""
    api, failures = _hub(token)
    try:
        return str(api.whoami()["name"])
    except failures as error:
        raise CheckpointError(f"the hub does not say whose token it is: {_flat(error)}") from None


def push_upload(upload: Upload, *, private: bool, token: str | None = None, message: str | None = None) -> str:
    """Create the repository if it is not there and upload the files, in one commit; the address of the commit.

    Raises ConfigError without a token, CheckpointError if the hub refuses.
    """
    api, failures = _hub(token)
    try:
        api.create_repo(upload.repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=upload.repository,
            folder_path=os.fspath(upload.folder),
            allow_patterns=[name for name, _ in upload.files],
            commit_message=message or "Model trained with oncurve",
        )
    except failures as error:
        raise CheckpointError(f"{upload.repository}: not uploaded: {_flat(error)}") from None
    return str(done.commit_url)


def _hub(token: str | None) -> tuple[Any, tuple[type[BaseException], ...]]:
    """The hub, and what its calls raise. Raises ConfigError without a token."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if (token or get_token()) is None:
        raise ConfigError("no token for the hub. Run `hf auth login`, or set HF_TOKEN; --dry-run needs none")
    no_answer: Any = HfHubHTTPError.__base__  # of whatever HTTP library this version of huggingface_hub uses
    return HfApi(token=token), (HfHubHTTPError, no_answer, OSError)


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
