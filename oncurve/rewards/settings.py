"""The rewards that a recipe can name. Each stands in one file with its settings, its grader and what is known of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from oncurve.rewards.formats import BoxedFormatReward, FormatReward, HashFormatReward, StepFormatReward
from oncurve.rewards.late_graders import (
    CosineLengthReward,
    InstructionsReward,
    JsonSchemaReward,
    JudgeReward,
    LengthReward,
    OverlongReward,
    ProgramsReward,
    RepetitionReward,
    ToolCallsReward,
)
from oncurve.rewards.mathematics import MathematicsReward
from oncurve.rewards.r1_zero import R1ZeroReward
from oncurve.rewards.user_functions import CustomReward, EnvironmentSection, PythonReward

Reward = Annotated[
    R1ZeroReward
    | MathematicsReward
    | FormatReward
    | BoxedFormatReward
    | HashFormatReward
    | StepFormatReward
    | ProgramsReward
    | JsonSchemaReward
    | ToolCallsReward
    | InstructionsReward
    | JudgeReward
    | LengthReward
    | OverlongReward
    | RepetitionReward
    | CosineLengthReward
    | CustomReward
    | PythonReward
    | EnvironmentSection,
    Field(discriminator="type"),
]
