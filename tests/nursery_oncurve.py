"""What most commands import, and what transformers works out once in a process that loads a model.

None of it may start a thread, which a fork would lose.
"""

from __future__ import annotations

import peft  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import transformers.generation.utils
import transformers.models.auto.modeling_auto
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen2.tokenization_qwen2  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import oncurve.commands.examine
import oncurve.commands.runs
import oncurve.fleet.servers.server_sampler
import oncurve.fleet.serving.http_app
import oncurve.rewards.custom
import oncurve.sample.engine
import oncurve.session.resume
import oncurve.session.session
import oncurve.session.training  # noqa: F401

get_checkpoint_conversion_mapping("qwen2")
