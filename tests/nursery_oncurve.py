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

import oncurve.cli.report
import oncurve.data.from_settings
import oncurve.fleet.servers.server_sampler
import oncurve.fleet.serving.http_app
import oncurve.recipe.files
import oncurve.recipe.load
import oncurve.rewards.custom
import oncurve.run.examine
import oncurve.run.resume
import oncurve.run.session
import oncurve.run.training
import oncurve.sample.engine

get_checkpoint_conversion_mapping("qwen2")
word_problems = oncurve.recipe.load.load_config(oncurve.recipe.files.find_recipe("word_problems"))
for rows in (word_problems.data, word_problems.evaluation.data):  # made once, for all forks that train on them
    oncurve.data.from_settings.make_rows(rows, seed=0)
