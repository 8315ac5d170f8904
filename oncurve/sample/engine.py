"""The engine of a recipe, with our own layers where they know the model; it samples turns of episodes too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from oncurve.core.errors import SamplerError
from oncurve.core.records import Group, Prompt, SamplingParams
from oncurve.core.requests import Request
from oncurve.core.sampler import SamplingRequest, end_token_ids
from oncurve.core.scheduler import RowEngine, RowScheduler
from oncurve.model.allocator import give_back
from oncurve.model.decode_proof import Proof
from oncurve.model.layer_decoders import LayerDecoders
from oncurve.model.row_budget import RowBudget
from oncurve.sample.settings import SamplingKeys

if TYPE_CHECKING:
    from oncurve.sample.turns import Turns


class InProcessEngine(RowEngine):
    """The engine with the fastest decoders that this machine has."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        max_rows: int | None = None,
        kv_tokens: int | None = None,
        cuda_graphs: bool = True,
        own_layers: bool = True,
    ) -> None:
        """``max_rows`` completions run at one time, their keys and values in at most ``kv_tokens`` positions.

        Where None is given, a GPU takes what fits into the memory that is free when it samples, other devices the
        usual number of rows and any number of positions.

        Without ``cuda_graphs`` a GPU samples through the model's modules; without ``own_layers`` every device does.
        """
        proof = Proof(on_cpu=own_layers, on_gpu=own_layers and cuda_graphs)
        super().__init__(params, LayerDecoders(RowBudget(max_rows, kv_tokens), proof))

    def sample(self, request: SamplingRequest) -> list[Group]:
        """One group per prompt; what was freed goes back to the system afterwards."""
        try:
            return super().sample(request)
        finally:
            give_back()

    def try_longest(self, prompt_ids: tuple[int, ...], num_prompts: int, group_size: int) -> None:
        """Draw the first tokens of completions in buffers for the longest ones, behind prompts that are all this one.

        Where memory suffices for fewer rows, later calls sample fewer at a time. Raises SamplerError for one row that
        does not fit.
        """
        if self._policy is None:
            raise SamplerError("the engine has no weights yet; call load_weights before sample")
        model, drawn = self._policy.model, False

        def note(tokens: list[int]) -> None:
            nonlocal drawn
            drawn = True

        prompts = [Prompt("", prompt_ids, index) for index in range(num_prompts)]
        keys = SamplingRequest(prompts, group_size).stream_keys(self.params.seed)
        end_ids = end_token_ids(model, self._policy.tokenizer)
        scheduler = RowScheduler(self._policy, self.decoders, is_closed=True)
        for key in keys:
            scheduler.add(Request(prompt_ids, key, self.params, end_ids, on_tokens=note))
        was_training = model.training
        model.eval()
        try:
            while not drawn and scheduler.has_work:
                scheduler.turn()
        finally:
            scheduler.forget()
            model.train(was_training)
            give_back()

    def turns(self, params: SamplingParams, *, step: int, post: Callable[[Callable[[], None]], None]) -> Turns:
        """Turns of the current weights; they happen in the thread that advances them."""
        from oncurve.sample.turns import EngineTurns  # lazy

        if self._policy is None:
            raise SamplerError("the engine has no weights yet; call load_weights before sample")
        return EngineTurns(self._policy, params, self.decoders)


def make_engine(section: SamplingKeys, *, seed: int) -> InProcessEngine:
    """The engine that a recipe's section asks for."""
    return InProcessEngine(
        section.sampling(seed),
        max_rows=None if section.max_rows == "auto" else section.max_rows,
        kv_tokens=section.kv_tokens,
        cuda_graphs=section.cuda_graphs,
        own_layers=section.type != "transformers",
    )
