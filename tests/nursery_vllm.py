"""What a server of vLLM and its engine import; and the engine is a fork, as it is on a machine with GPUs."""

from __future__ import annotations

import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.qwen2
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import envs

# For a CPU vLLM asks for processes that import everything again. On other machines forks are its own default.
envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
