"""From a recipe to objects: only this package reads the config and knows the parts."""

from oncurve.wiring.agents import make_frames, with_own_chat
from oncurve.wiring.algorithm import algorithm_choices, algorithm_name, check_algorithm, is_served, make_algorithm
from oncurve.wiring.data import (
    Rendered,
    Rows,
    context_of,
    evaluation_section,
    make_prompts,
    make_rows,
    prompt_limit,
    shared_columns,
    split_rows,
    with_epochs,
)
from oncurve.wiring.episodes import NO_QUESTION, give_rewards, make_setup, make_tools_of, with_episodes
from oncurve.wiring.policy import make_device, make_policy, make_processes
from oncurve.wiring.rewards import (
    deciding_reward,
    have_right_answer,
    make_form_reward,
    make_loose_reward,
    make_reward,
    make_reward_function,
    make_structured_reward,
    reward_options,
    with_early_grading,
)
from oncurve.wiring.rollouts import make_sampler
from oncurve.wiring.sampling_params import evaluation_sampling, make_sampling
from oncurve.wiring.servers import make_server_sampler, settle

__all__ = [
    "NO_QUESTION",
    "Rendered",
    "Rows",
    "algorithm_choices",
    "algorithm_name",
    "check_algorithm",
    "context_of",
    "deciding_reward",
    "evaluation_sampling",
    "evaluation_section",
    "give_rewards",
    "have_right_answer",
    "is_served",
    "make_algorithm",
    "make_device",
    "make_form_reward",
    "make_frames",
    "make_loose_reward",
    "make_policy",
    "make_processes",
    "make_prompts",
    "make_reward",
    "make_reward_function",
    "make_rows",
    "make_sampler",
    "make_sampling",
    "make_server_sampler",
    "make_setup",
    "make_structured_reward",
    "make_tools_of",
    "prompt_limit",
    "reward_options",
    "settle",
    "shared_columns",
    "split_rows",
    "with_early_grading",
    "with_episodes",
    "with_epochs",
    "with_own_chat",
]
