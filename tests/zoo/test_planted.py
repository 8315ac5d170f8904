"""Mistakes planted in copies of a modelling file, under the name of a family that our own layers know."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lanes import gate
from trial import batch_of_rows, compare_sampled, plain_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLANTED = {
    "a head that scales": ("logits = self.lm_head(", "logits = 0.5 * self.lm_head("),
    "a head that reads the sum of two places": (
        "hidden_states = outputs.last_hidden_state",
        "hidden_states = outputs.last_hidden_state; "
        "hidden_states = hidden_states + torch.nn.functional.pad(hidden_states, (0, 0, 1, -1))",
    ),
    "a rope that turns the other way": (
        "q_embed = (q * cos) + (rotate_half(q) * sin)",
        "q_embed = (q * cos) - (rotate_half(q) * sin)",
    ),
    "a rope that changes with the longest row of a call": (
        "q_embed = (q * cos) + (rotate_half(q) * sin)",
        "sin = sin * (1.0 if q.shape[2] <= 24 else 0.5); q_embed = (q * cos) + (rotate_half(q) * sin)",
    ),
    "a window that no setting names": (
        "        attn_output, attn_weights = attention_interface(\n",
        "        places = torch.arange(key_states.shape[2])\n"
        "        starts = places[-query_states.shape[2] :, None] - 12\n"
        "        near = (places[None] > starts) & (places[None] <= starts + 12)\n"
        "        attention_mask = near[None, None]\n"
        "        attn_output, attn_weights = attention_interface(\n",
    ),
    "steps with a cache that are off in the fourth digit": (
        "q_embed = (q * cos) + (rotate_half(q) * sin)",
        "sin = -sin; q = q * (1.0001 if q.shape[2] == 1 else 1.0); q_embed = (q * cos) + (rotate_half(q) * sin)",
    ),
    "a mask that lets each token see the next one's neighbour twice before": (
        "        attn_output, attn_weights = attention_interface(\n",
        "        places = torch.arange(key_states.shape[2])\n"
        "        own = places[-query_states.shape[2] :, None]\n"
        "        attention_mask = ((places[None] <= own) & ((own - places[None]) % 3 != 1))[None, None]\n"
        "        attn_output, attn_weights = attention_interface(\n",
    ),
    "an embedding that scales": ("self.embed_tokens(input_ids)", "3.0 * self.embed_tokens(input_ids)"),
    "a head with a soft cap that no setting names": (
        "logits = self.lm_head(hidden_states)",
        "logits = 2.0 * torch.tanh(self.lm_head(hidden_states) / 2.0)",
    ),
    "a rope of other angles": ("position_ids=position_ids)\n", "position_ids=1.5 * position_ids)\n"),
    "gemma2: no soft cap, which its settings name": (
        "if self.config.final_logit_softcapping is not None:",
        "if False:",
    ),
    "qwen3: queries with the norm of the keys": ("self.q_norm(self.q_proj(", "self.k_norm(self.q_proj("),
    "qwen3: a key's norm over all heads together": (
        "self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)",
        "self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)\n"
        "        key_states = key_states / key_states.pow(2).mean(dim=(1, 3), keepdim=True).sqrt()",
    ),
    "qwen2: a bias that one layer drops": (
        "query_states = self.q_proj(hidden_states).view(",
        "query_states = (self.q_proj(hidden_states) - self.layer_idx * self.q_proj.bias).view(",
    ),
    "mistral: a window that is one token longer than its setting": (
        "        attn_output, attn_weights = attention_interface(\n",
        "        places = torch.arange(key_states.shape[2])\n"
        "        own = places[-query_states.shape[2] :, None]\n"
        "        near = (places[None] <= own) & (places[None] > own - self.config.sliding_window - 1)\n"
        "        attention_mask = near[None, None]\n"
        "        attn_output, attn_weights = attention_interface(\n",
    ),
}
"""By name: what stands in the file of Llama, or of the family that the name begins with, and what is put there."""


REFUSED = ("a rope that changes with the longest row of a call",)
"""Whose next token is not what their own pass over a longer row says."""


def plant(kind: str, place: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A folder with a model whose Python code is that of a family with a mistake."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, (old, new) = kind.partition(":")[0] if ":" in kind else "llama", PLANTED[kind]
    modelling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    source = inspect.getsource(modelling)
    assert old in source
    source = re.sub(r"from \.\.\.(\S*) import", r"from transformers.\1 import", source.replace(old, new))
    source = source.replace("from .conf", f"from transformers.models.{family}.conf")
    source = source.replace("from transformers. import", "from transformers import")
    own: dict[str, Any] = {"final_logit_softcapping": 2.0} if family == "gemma2" else {}
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, max_position_embeddings=128, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, sliding_window=16, **own,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5, generator=draw)
            else:  # biases, and norms that differ
                weight += 0.3 * torch.randn(weight.shape, generator=draw)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    (place / "modeling_planted.py").write_text(source, encoding="utf-8")
    described = json.loads((place / "config.json").read_text())
    described["auto_map"] = {"AutoModelForCausalLM": f"modeling_planted.{type(model).__name__}"}
    (place / "config.json").write_text(json.dumps(described))


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_planted_in_a_modelling_file_is_found_and_then_right(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    from oncurve.recipe.load import parse_config
    from oncurve.run.builder import make_policy
    from oncurve.run_errors import CheckpointError

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    place = tmp_path / f"planted_{list(PLANTED).index(kind)}"
    plant(kind, place, tokenizer)
    load: Any = AutoModelForCausalLM.from_pretrained
    exact = load(place, trust_remote_code=True, dtype=torch.float32).eval()
    own = [f"model={place}", "policy.trust_remote_code=true"]
    config = parse_config("{data: {type: word_problems}}", own, source="planted")
    if kind in REFUSED:
        with pytest.raises(CheckpointError, match=r"changes by .* with the tokens behind it"):
            make_policy(config)
        return
    policy = make_policy(config)
    assert policy.scoring_path.reasons, "own layers computed it as if nothing were planted"
    batch = batch_of_rows()
    with torch.no_grad():
        error = (policy.logprobs(batch)[0] - plain_rows(exact, batch))[batch.mask].abs().max()
    assert error < 2e-4
    for by_modules in (False, True):
        compare_sampled(policy, exact, tokens=24, limit=2e-5, by_modules=by_modules)


LATE = {
    "a window of 40, hidden": (
        "        attn_output, attn_weights = attention_interface(\n",
        "        places = torch.arange(key_states.shape[2])\n"
        "        own = places[-query_states.shape[2] :, None]\n"
        "        attention_mask = ((places[None] <= own) & (places[None] > own - 40))[None, None]\n"
        "        attn_output, attn_weights = attention_interface(\n",
    ),
    "an embedding of padding that is zero": (
        "self.embed_tokens(input_ids)",
        "self.embed_tokens(input_ids) * (input_ids != self.config.pad_token_id)[..., None]",
    ),
}
"""Mistakes in rows that are long, or to tokens that are rare; by name, as those of ``PLANTED``."""
CHANGING = {
    "a mask that changes with more than three rows": (
        "        attn_output, attn_weights = attention_interface(\n",
        "        places = torch.arange(key_states.shape[2])\n"
        "        own = places[-query_states.shape[2] :, None]\n"
        "        near = (places[None] > own - 4) if query_states.shape[0] > 3 else (places[None] >= 0)\n"
        "        attention_mask = ((places[None] <= own) & near)[None, None]\n"
        "        attn_output, attn_weights = attention_interface(\n",
        "among 9 of it in one call",
    ),
    "dropout that never ends": (
        "self.embed_tokens(input_ids)",
        "torch.nn.functional.dropout(self.embed_tokens(input_ids), 0.01, True)",
        "in a second call with the same row",
    ),
}
"""Mistakes by which a row has other numbers each time, with words of the refusal."""


def planted(name: str, mistake: tuple[str, str], place: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    """The recipe of a folder with a mistake, for rows of 100 tokens and more."""
    from oncurve.recipe.load import parse_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLANTED, name, mistake)
        plant(name, place, tokenizer)
    own = [f"model={place}", "policy.trust_remote_code=true", "rollouts.max_completion_tokens=100"]
    return parse_config("{data: {type: word_problems}}", own, source="planted")


@pytest.mark.parametrize("name", [*LATE, *CHANGING])
def test_code_of_its_own_is_looked_at_in_long_rows_rare_tokens_and_several_calls(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    from oncurve.run.builder import make_policy
    from oncurve.run_errors import CheckpointError

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    place = tmp_path / f"late_{[*LATE, *CHANGING].index(name)}"
    if name in CHANGING:
        old, new, refusal = CHANGING[name]
        with pytest.raises(CheckpointError, match=refusal):
            make_policy(planted(name, (old, new), place, tokenizer))
        return
    policy = make_policy(planted(name, LATE[name], place, tokenizer))
    load: Any = AutoModelForCausalLM.from_pretrained
    exact = load(place, trust_remote_code=True, dtype=torch.float32).eval()
    batch = batch_of_rows(((3, 9), (20, 100)))
    batch.completion_ids[1, 5] = 0
    with torch.no_grad():
        error = (policy.logprobs(batch)[0] - plain_rows(exact, batch))[batch.mask].abs().max()
    assert error < 2e-4


def test_what_no_row_showed_at_load_is_found_on_the_first_rollouts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    from oncurve.core.errors import TrainingError
    from oncurve.run.builder import make_policy
    from oncurve.run.guards import compare_policy

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    embedding = "self.embed_tokens(input_ids)"
    masked = f"{embedding} * (input_ids != 7)[..., None]"
    policy = make_policy(planted("token 7 is masked", (embedding, masked), tmp_path / "late", tokenizer))
    batch, lines = batch_of_rows(((3, 9), (20, 100))), list[str]()
    batch.completion_ids[batch.completion_ids == 7] = 8
    listen: Any = {"is_exact": False, "is_quiet": False, "notify": lines.append, "write": lines.append}
    compare_policy(policy, batch, **listen)
    assert lines[0].startswith("your model's own pass: ")
    assert "nats a token, chance is 5.6: so does a model that never" in lines[0]
    batch.completion_ids[1, 50] = 7
    with pytest.raises(TrainingError, match="training computes another model than its own forward pass"):
        compare_policy(policy, batch, **listen)
    batch.completion_ids[1, 50] = 8
    with pytest.raises(TrainingError, match="the sampler computes another model"):  # it gave zeros
        compare_policy(policy, batch, **listen | {"is_exact": True})

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("oncurve.policy.scoring_path.compare_with_own_pass", no_memory)
    compare_policy(policy, batch, **listen)
    assert lines[-1].endswith("there is no memory for its logits")


@pytest.mark.parametrize("fault", ["angles", "places", "a soft cap"])
def test_a_sampler_that_computes_another_model_ends_the_run_before_it_trains(
    fault: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing looks for a mistake in decoding alone when a model is loaded: kernels for CPUs are proven by tests."""
    from tiny_models import make_model, model_config
    from typer.testing import CliRunner

    from oncurve.cli.app import app
    from oncurve.core.errors import TrainingError
    from oncurve.model.decoding import Angles, LayerDecoder

    make_model(model_config("qwen2", tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    made, logits = LayerDecoder.__init__, LayerDecoder.logits

    def decodes_wrongly(self: Any, backbone: Any, *args: Any, **words: Any) -> None:
        made(self, backbone, *args, **words)
        places = torch.arange(1024)
        self.angles = Angles(*backbone.rotary(1.5 * places if fault == "angles" else (places - 1).clamp(min=0)))

    if fault == "a soft cap":
        monkeypatch.setattr(LayerDecoder, "logits", lambda self, hidden: 2.0 * (logits(self, hidden) / 2.0).tanh())
    else:
        monkeypatch.setattr(LayerDecoder, "__init__", decodes_wrongly)
    (tmp_path / "reward.py").write_text(
        "def letters(completion, **row):\n    return sum(map(ord, completion)) % 7 / 7\n"
    )
    reward = json.dumps([{"type": "custom", "function": f"{tmp_path / 'reward.py'}:letters"}])
    words = [
        "train", "word_problems", f"model={tmp_path / 'base'}", f"run.folder={tmp_path}", "run.name=run", "run.steps=2",
        "run.prompts_per_step=2", "algorithm.group_size=2", "rollouts.max_completion_tokens=12", "data.limit=20",
        "evaluation.num_prompts=1", f"rewards={reward}",
    ]  # fmt: skip
    done = CliRunner().invoke(app, words)
    said = str(done.exception)
    assert isinstance(done.exception, (TrainingError, SystemExit)), said
    assert "the sampler computes another model" in done.output + said


@pytest.mark.parametrize("name", gate(["bert", "xlnet", "reformer"], "bert", "xlnet"))
def test_a_model_that_is_no_causal_language_model_is_refused_when_it_is_loaded(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from oncurve.recipe.load import parse_config
    from oncurve.run.builder import make_policy
    from oncurve.run_errors import CheckpointError

    small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": len(tokenizer)}
    own: dict[str, Any] = {
        "bert": {**small, "num_hidden_layers": 2},  # is_decoder is missing
        "xlnet": {"d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 64, "vocab_size": len(tokenizer)},
        "reformer": {**small, "attn_layers": ["local"], "axial_pos_embds": False, "is_decoder": True},
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **own[name])).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = parse_config("{data: {type: word_problems}}", [f"model={tmp_path}"], source="not causal")
    with pytest.raises(CheckpointError, match=r"no causal language model|cannot compute a row"):
        make_policy(config)
