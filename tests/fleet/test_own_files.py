"""Which weights a vLLM server must be sent, by the files that it was started with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oncurve.fleet.inside_vllm.own_files import INDEX, OwnFiles

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
OTHER = "model.layers.0.norm.weight"


def files(folder: Path, *, head: float | None, index: bool = False) -> OwnFiles:
    weights = {EMBEDDING: torch.ones(5, 4), NORM: torch.ones(4), OTHER: torch.ones(4)}
    if head is not None:
        weights[HEAD] = torch.full((5, 4), head)
    save_file(weights, folder / "model.safetensors")
    save_file({"tok_embeddings.weight": torch.ones(5, 4)}, folder / "consolidated.safetensors")
    if index:
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")}))
    return OwnFiles(str(folder))


@pytest.mark.parametrize("index", [False, True])
def test_a_head_that_is_the_embedding_need_not_be_sent_twice(tmp_path: Path, index: bool) -> None:
    own = files(tmp_path, head=1.0, index=index)
    for _ in range(2):
        own.check(frozenset({EMBEDDING, NORM, OTHER}))
        own.check(frozenset({EMBEDDING, NORM, OTHER, HEAD}))
    assert [path.name for path in own.base_paths()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("head", "sent", "said"),
    [
        (2.0, {EMBEDDING, NORM, OTHER}, HEAD),
        (1.0, {EMBEDDING, HEAD, NORM}, OTHER),
        (1.0, {NORM, OTHER}, f"{HEAD}, {EMBEDDING}"),
        (None, {EMBEDDING, NORM, OTHER, HEAD}, HEAD),
        (1.0, {EMBEDDING, NORM, OTHER, "model.new.weight"}, f"{HEAD}, model.new.weight"),
    ],
)
def test_what_the_model_needs_must_come_and_nothing_else(
    tmp_path: Path, head: float | None, sent: set[str], said: str
) -> None:
    own = files(tmp_path, head=head)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"see {said}$"):
            own.check(frozenset(sent))


def test_a_model_that_is_in_no_folder_takes_what_comes(tmp_path: Path) -> None:
    own = OwnFiles(str(tmp_path / "absent"))
    own.check(frozenset({HEAD}))
    with pytest.raises(ValueError, match="no folder with safetensors"):
        own.base_paths()
