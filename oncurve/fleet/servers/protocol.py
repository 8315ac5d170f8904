"""The protocol between a trainer and its rollout servers.

The routes and fields are the part of vLLM's that is used here, so that vLLM and ``oncurve serve`` look alike. Tokens go
in and tokens come out; text is never sent. One field is ours: the keys of the random streams, which our own servers
take, so that a completion is the same wherever it is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from oncurve.core.errors import SamplerError
from oncurve.core.records import CUTS, FinishReason, Numbers, SamplingParams

HEALTH = "/health"
WEIGHT_INFO = "/weight_info"
WITH_MODEL = "model"
"""Query of WEIGHT_INFO to which our own servers answer with the configuration of their model as well."""
GENERATE = "/inference/v1/generate"
TOKENIZE = "/tokenize"
PAUSE = "/pause"
RESUME = "/resume"
INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
CALL_WORKERS = "/collective_rpc"
"""vLLM's: a function of our part of its workers."""
WORLD_SIZE = "/get_world_size"
SLEEP = "/sleep"
IS_SLEEPING = "/is_sleeping"
WAKE = "/wake_up"

NO_NUMBER = -9999.0
"""vLLM's log-probability of what has none: minus infinity or no number."""
TOKEN_VARIABLE = "ONCURVE_SERVER_TOKEN"
"""Environment variable with the secret that servers and trainer share."""
SAME_NCCL = "same_nccl"
"""The question to a server before it joins, in the place of a way: it refuses another version of NCCL than its own."""
ADAPTER_MODEL = "oncurve-adapter"
"""The model that vLLM is asked for where an adapter is beside its base."""
WITHOUT_ADAPTER = "oncurve_without_adapter"
"""Name among ``extra_args`` by which our own servers are asked for what the base alone would say."""
KEYS = "oncurve_stream_keys"
"""Name among ``extra_args`` of the random streams, one for each completion."""
READ = {
    "n", "temperature", "max_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs", "prompt_logprobs",
    "include_stop_str_in_output", "detokenize", "extra_args",
}  # fmt: skip
"""The sampling parameters that our own servers read, beside those that cut the distribution."""
VLLM_CUTS = ("top_p", "top_k", "min_p")
"""Parameters that cut the distribution, of vLLM."""


@dataclass(frozen=True, slots=True)
class GeneratedCompletion:
    """One completion as a server gives it back."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    versions: tuple[str, ...]
    """Labels of the weights that sampled it, in order; more than one if they changed in the middle."""
    starts: tuple[int, ...] = (0,)
    """The first token of each."""

    def dated(self, labels: Mapping[str, int]) -> list[tuple[int, int]]:
        """The first token of each version, and its number."""
        return [(start, labels[label]) for start, label in zip(self.starts, self.versions, strict=True)]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for completions of one prompt, as our own server reads it."""

    request_id: str
    token_ids: tuple[int, ...]
    count: int
    params: SamplingParams
    end_ids: tuple[int, ...]
    keys: tuple[int, ...] | None
    is_scored: bool = False
    """Nothing is sampled: the log-probabilities of the prompt are asked for."""
    without_adapter: bool = False
    """The same without the adapter."""

    def check_lengths(self, context_tokens: int) -> None:
        """Raises ValueError without a prompt, and for a completion that may become longer than the model's context."""
        prompt, limit = len(self.token_ids), self.params.max_completion_tokens
        if not prompt or prompt + (0 if self.is_scored else limit) > context_tokens:
            raise ValueError(
                f"{prompt} prompt tokens and {limit} of a completion; together they must be at most {context_tokens}, "
                f"and there must be a prompt"
            )


def request_body(
    token_ids: Sequence[int],
    *,
    request_id: str,
    keys: Sequence[int],
    params: SamplingParams,
    end_ids: Sequence[int],
    takes_keys: bool,
    has_adapter: bool = False,
) -> dict[str, Any]:
    """Ask for one completion for each key. There is no ``seed``: on a CPU it can end vLLM's engine. vLLM must be told
    that it ``has_adapter``; our own servers know."""
    sampling: dict[str, Any] = {
        "n": len(keys),
        "temperature": params.temperature,
        **{name: getattr(params, name) for name in CUTS if name in VLLM_CUTS or name in params.active_cuts},
        "max_tokens": params.max_completion_tokens,
        "min_tokens": params.min_completion_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(end_ids),
        "logprobs": 0,
    }
    if params.stop:
        sampling["include_stop_str_in_output"] = True
    else:
        sampling["detokenize"] = False
    if takes_keys:
        sampling["extra_args"] = {KEYS: list(keys)}
    body = {"request_id": request_id, "token_ids": list(token_ids), "sampling_params": sampling}
    return body | ({"model": ADAPTER_MODEL} if has_adapter and not takes_keys else {})


def refuse_unknown_cuts(params: SamplingParams) -> None:
    """Raise SamplerError for a way to cut the distribution that vLLM does not have."""
    if unknown := [name for name in params.active_cuts if name not in VLLM_CUTS]:
        raise SamplerError(
            f"rollouts.{unknown[0]} is {getattr(params, unknown[0])}, and vLLM has no such parameter. Leave it out, or "
            f"take other servers (oncurve serve)"
        )


def read_request(body: Any) -> GenerateRequest:
    """A request as our own server takes it.

    Raises ValueError that says which field is wrong.
    """
    if not isinstance(body, dict) or not isinstance(body.get("sampling_params"), dict):
        raise ValueError("the body must be an object with token_ids and sampling_params")
    sampling = body["sampling_params"]
    if unknown := sorted(sampling.keys() - READ - CUTS.keys()):
        raise ValueError(f"sampling_params.{unknown[0]} is not known to this server; it may be of an older version")
    count = _number(sampling, "n", 1, least=1)
    extra = sampling.get("extra_args") or {}
    keys = extra.get(KEYS)
    if keys is not None and len(keys) != count:
        raise ValueError(f"sampling_params.n is {count}, but there are {len(keys)} stream keys")
    stop = sampling.get("stop") or []
    params = SamplingParams(
        temperature=float(sampling.get("temperature", 1.0)),
        max_completion_tokens=_number(sampling, "max_tokens", 16, least=1),
        min_completion_tokens=_number(sampling, "min_tokens", 0, least=0),
        **{name: max(type(neutral)(sampling.get(name, neutral)), 0) for name, neutral in CUTS.items()},
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )
    return GenerateRequest(
        request_id=str(body.get("request_id", "")),
        token_ids=_tokens(body, "token_ids"),
        count=count,
        params=params,
        end_ids=_tokens(sampling, "stop_token_ids"),
        keys=None if keys is None else tuple(int(key) for key in keys),
        is_scored=sampling.get("prompt_logprobs") is not None,
        without_adapter=bool(extra.get(WITHOUT_ADAPTER)),
    )


def _number(tree: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    value = tree.get(name, default)
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return value


def _tokens(tree: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = tree.get(name) or []
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError(f"{name} must be a list of token numbers")
    return tuple(ids)


def response_body(request_id: str, sampled: Sequence[GeneratedCompletion]) -> dict[str, Any]:
    """The body of a server's answer."""
    choices = [
        {
            "index": index,
            "token_ids": list(completion.token_ids),
            "logprobs": {"content": [{"logprob": value} for value in completion.logprobs]},
            "finish_reason": completion.finish_reason,
            "weight_versions": _spans(completion),
        }
        for index, completion in enumerate(sampled)
    ]
    return {"request_id": request_id, "choices": choices}


def _spans(completion: GeneratedCompletion) -> list[dict[str, Any]]:
    ends = (*completion.starts[1:], len(completion.token_ids))
    return [
        {"version": label, "start": start, "end": end}
        for label, start, end in zip(completion.versions, completion.starts, ends, strict=True)
    ]


def score_body(token_ids: Sequence[int], *, request_id: str, adapter: bool | None = None) -> dict[str, Any]:
    """Ask for the log-probability of every token behind the first. vLLM samples at least one token beside.

    ``adapter``: with the adapter that a server has beside its base, or without it; None where it has none.
    """
    sampling: dict[str, Any] = {"n": 1, "temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    if adapter is False:
        sampling["extra_args"] = {WITHOUT_ADAPTER: True}
    body = {"request_id": request_id, "token_ids": list(token_ids), "sampling_params": sampling}
    return body | ({"model": ADAPTER_MODEL} if adapter else {})


def scores_body(request_id: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """The body of the answer with scores: nothing for the first token, one entry for each other."""
    scored = [
        None,
        *({str(token): {"logprob": logprob}} for token, logprob in zip(token_ids[1:], logprobs, strict=True)),
    ]
    return {"request_id": request_id, "choices": [], "prompt_logprobs": scored}


def read_scores(body: Any, token_ids: Sequence[int]) -> list[float]:
    """The log-probabilities of all tokens but the first.

    Raises ValueError for an answer that lacks one.
    """
    scored = body.get("prompt_logprobs") if isinstance(body, dict) else None
    if not isinstance(scored, list) or len(scored) != len(token_ids):
        raise ValueError(
            f"{len(token_ids)} tokens were sent, and it gives {len(scored or ())} log-probabilities of them. It must "
            f"be `oncurve serve`, or vLLM 0.32 or newer"
        )
    return [float(entry[str(token)]["logprob"]) for token, entry in zip(token_ids[1:], scored[1:], strict=True)]


def read_response(body: Any, *, request_id: str, count: int) -> list[GeneratedCompletion]:
    """The completions of an answer, in the order of their indices.

    Raises ValueError for an answer to something else, or one that lacks what training needs.
    """
    if not isinstance(body, dict) or request_id not in str(body.get("request_id")):
        raise ValueError("it answers another request")
    completions: dict[int, GeneratedCompletion] = {}
    for choice in body.get("choices") or []:
        completions[int(choice["index"])] = _read_choice(choice)
    if sorted(completions) != list(range(count)):
        raise ValueError(
            f"{count} completions were asked for, and it gives those with the places {sorted(completions)}"
        )
    return [completions[index] for index in range(count)]


def _read_choice(choice: Mapping[str, Any]) -> GeneratedCompletion:
    ids = Numbers[int](choice.get("token_ids") or [], "i")
    reason = choice.get("finish_reason")
    if reason not in get_args(FinishReason):
        raise ValueError(f"a completion ended for the reason {reason!r}")
    content = (choice.get("logprobs") or {}).get("content") or []
    logprobs = Numbers[float]((entry["logprob"] for entry in content), "f")
    spans = choice.get("weight_versions")
    if len(logprobs) != len(ids) or (ids and not spans):
        raise ValueError(
            f"a completion of {len(ids)} tokens has {len(logprobs)} log-probabilities and the weight versions {spans}. "
            f"It must report both: `oncurve serve`, or vLLM 0.32 or newer"
        )
    if min(logprobs, default=0.0) <= NO_NUMBER:
        raise ValueError(
            f"a sampled token has the log-probability {NO_NUMBER:g}, by which vLLM means that it has none: the model's "
            f"logits are no numbers (lower optimizer.learning_rate), or an option of rollouts.vllm_options, such as "
            f"--speculative-config, loses them (leave it out)"
        )
    starts: dict[str, int] = {}
    for span in spans or ():
        starts.setdefault(str(span["version"]), int(span.get("start") or 0))
    return GeneratedCompletion(ids, logprobs, cast("FinishReason", reason), tuple(starts), tuple(starts.values()))
