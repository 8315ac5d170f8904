"""The section of a recipe about evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field, PositiveInt

from oncurve.core.records import CUTS, SamplingParams
from oncurve.data.settings import Data
from oncurve.section import CountsWith, NonNegative, Section


class EvaluationSection(Section):
    """Evaluation before, during and after the run."""

    data: Data | None = None
    """Other problems for test and validation; None holds out some of the training data."""
    allow_training_rows: bool = False
    """Rows of ``data`` may be training rows: they show what was learned, and not whether it generalizes."""
    num_prompts: PositiveInt = 500
    """Test problems, before and after the run; held out if ``data`` is None, a fifth where too few rows are left."""
    split_seed: NonNegative = 0
    """Which rows are held out. Independent of run.seed, so that seeds are tested on the same problems."""
    every_steps: NonNegative = 0
    """Also measure the validation problems after every so many steps; 0: only the test, before and after the run."""
    num_prompts_during: PositiveInt = 100
    """Validation problems, during the run; held out like test problems, whether they are measured or not."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1), CountsWith("temperature")] = 1.0
    """Nucleus sampling where the temperature is above 0."""
    samples: PositiveInt = 1
    """Completions per problem; more than one needs a temperature above 0."""

    def sampling(self, training: SamplingParams) -> SamplingParams:
        """Sampling parameters of measurements: random numbers apart from those of training."""
        seed = training.seed + 1_000_003
        return replace(training, **{**CUTS, "top_p": self.top_p}, temperature=self.temperature, seed=seed)
