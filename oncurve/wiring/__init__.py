"""From a recipe to objects: only this package reads the config and knows the parts."""

from oncurve.sample.base import context_of
from oncurve.wiring.algorithm import algorithm_choices, algorithm_name, check_algorithm, make_algorithm
from oncurve.wiring.data import (
    Rendered,
    Rows,
    benchmark_rows,
    make_prompts,
    prompt_limit,
    shared_columns,
    split_rows,
    with_epochs,
)
from oncurve.wiring.episodes import NO_QUESTION, give_rewards, make_tools_of, with_episodes
from oncurve.wiring.policy import make_policy, make_processes
from oncurve.wiring.samplers import make_sampler
from oncurve.wiring.sampling_params import evaluation_sampling, make_sampling
