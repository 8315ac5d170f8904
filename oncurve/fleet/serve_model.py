"""The command `oncurve serve`: a model that samples for trainers and answers chats until it is told to end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from oncurve.agents.recipe_agent import make_frames
from oncurve.fleet.servers.protocol import TOKEN_VARIABLE
from oncurve.model.context import context_of
from oncurve.recipe.load import parse_config
from oncurve.run.builder import make_policy
from oncurve.run.model_paths import describe_sampling
from oncurve.sample.event_loop import require_aiohttp


def serve_model(
    model: str,
    *,
    host: str,
    port: int,
    registry: Path | None,
    max_rows: int | None,
    overrides: Sequence[str],
    console: Console,
) -> None:
    """Sample for trainers until SIGTERM.

    Raises ConfigError if other machines can reach it and no token is set, or if the address is taken.
    """
    require_aiohttp()
    from oncurve.fleet.serving.http_app import SamplingServer, check_host, serve  # lazy

    token = os.environ.get(TOKEN_VARIABLE)
    check_host(host, token)
    config = parse_config("{data: {type: word_problems}}", [f"model={model}", *overrides], source="oncurve serve")
    policy = make_policy(config, is_trained=False)
    server = SamplingServer(
        policy,
        max_rows=max_rows,
        context_tokens=context_of(policy.model.config) or 2**31,
        token=token,
        cuda_graphs=config.rollouts.cuda_graphs,
        frames=make_frames(config, policy.tokenizer),
    )

    def notify(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    notify(describe_sampling(policy))
    asyncio.run(serve(server, host=host, port=port, registry=registry, notify=notify))
