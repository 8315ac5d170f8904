"""Files that a script's trainer writes: the model, metrics and state beside the runs, and what goes to the Hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, TrainerState

from oncurve.observe.run_model import is_run, resolve_model
from oncurve.policy.backend import narrow_files
from oncurve.policy.model_folder import stored_type
from oncurve.run.publish import push, write_card
from oncurve.run.trainer import Trainer
from oncurve.run_errors import CheckpointError
from oncurve.trl.processes import ProcessState


def loaded_type(model: str | PreTrainedModel, init: Mapping[str, Any] | None) -> torch.dtype | None:
    """The type of the weights that a script loads or has its trainer load, where it is a half precision."""
    if isinstance(model, str):
        dtype = (init or {}).get("dtype", (init or {}).get("torch_dtype"))
        kind = (
            stored_type(model, (init or {}).get("revision")) if dtype == "auto" else vars(torch).get(str(dtype), dtype)
        )
    else:
        kind = model.dtype
    return kind if kind in (torch.bfloat16, torch.float16) else None


class ScriptFiles:
    """The part of a trainer that writes."""

    args: Any
    oncurve: Trainer
    state: TrainerState
    _is_training: bool
    _saved_type: torch.dtype | None
    """Type of the weights that the script loaded, where they are narrower than those in training."""

    @property
    def accelerator(self) -> ProcessState:
        """The part of accelerate that scripts use: which process this is, and waiting for the others."""
        return self.args.distributed_state

    def is_world_process_zero(self) -> bool:
        """This process writes."""
        return self.args.process_index == 0

    is_local_process_zero = is_world_process_zero

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights and the tokenizer as files of a model; other files of the folder stay."""
        folder, accelerator = Path(output_dir or self.args.output_dir), self.accelerator
        made = folder.absolute().with_name(f".{folder.absolute().name}-{os.getpid()}")
        if self._is_training:
            self.oncurve.save(made)  # all processes together
        if not accelerator.is_main_process:
            return
        if folder.is_symlink():
            folder.unlink()  # a checkpoint of a run, which stays as it is
        folder.mkdir(parents=True, exist_ok=True)
        if not self._is_training and accelerator.num_processes > 1 and self.oncurve.result is not None:
            shutil.copytree(resolve_model(str(self.oncurve.folder)), made)  # what was trained together is there alone
        elif not self._is_training:
            self.oncurve.save(made)
        if self._saved_type is not None:
            narrow_files(made, self._saved_type)
        for path in made.iterdir():
            path.replace(folder / path.name)
        shutil.rmtree(made)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics, in one process."""
        if self.is_world_process_zero():
            Console().print(f"{split} metrics: {dict(metrics)}", markup=False, highlight=False)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics beside the runs."""
        self._write(f"{split}_results.json", json.dumps(dict(metrics), indent=2))

    def save_state(self) -> None:
        """Write ``state`` beside the runs."""
        self._write("trainer_state.json", json.dumps(asdict(self.state), indent=2, sort_keys=True))

    def _write(self, name: str, text: str) -> None:
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "\n", encoding="utf-8")

    def create_model_card(self, model_name: str | None = None, *_: Any, **__: Any) -> None:
        """Write README.md into ``output_dir``: the base, and recipe and measurements of the run."""
        folder, run = Path(self.args.output_dir), self.oncurve.folder
        if self.is_world_process_zero():
            folder.mkdir(parents=True, exist_ok=True)
            is_begun = run is not None and (run / "config.yaml").is_file()
            write_card(folder, name=model_name or folder.resolve().name, run=run if is_begun else None)

    def push_to_hub(self, commit_message: str | None = None, *_: Any, token: str | None = None, **__: Any) -> str:
        """Upload the model of the finished run with its card to ``hub_model_id``; the address of the commit.

        The repository is private unless ``hub_private_repo`` is False. Raises ConfigError without a token and for files
        that look like secrets, CheckpointError without a finished run or if the hub refuses.
        """
        if self.oncurve.folder is None or not is_run(self.oncurve.folder):
            raise CheckpointError("push_to_hub: there is no run yet. Call train() first")
        if not self.is_world_process_zero():
            return ""
        name = self.args.hub_model_id or Path(self.args.output_dir).resolve().name
        folder, key = Path(resolve_model(str(self.oncurve.folder))), token or self.args.hub_token
        is_private = self.args.hub_private_repo is not False
        with tempfile.TemporaryDirectory() as parent:
            if self._saved_type is not None:
                folder = Path(shutil.copytree(folder, Path(parent) / "model"))
                narrow_files(folder, self._saved_type)
            address = push(folder, name, private=is_private, token=key, message=commit_message)
        kind = "private" if is_private else "public"
        Console().print(f"uploaded to {name} ({kind}): {address}", markup=False, soft_wrap=True)
        return address
