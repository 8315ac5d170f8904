"""One family of the zoo, the whole way: loaded, trained, sampled, adapted, saved, served and planned.

Each cell is compared with the model's own forward pass in transformers, row by row, without padding and cache. A cell
is "right", or "refused: " and the sentence that a user reads; anything else is a fault.
"""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from families import make_zoo_model

if TYPE_CHECKING:
    from torch import Tensor

    from oncurve.core.batch import Batch
    from oncurve.policy.trained_policy import TrainedPolicy

LOGPROBS, GRADIENT = 2e-4, 1e-3
"""Largest difference of a log-probability, and of the gradient as a part of its size, that is rounding."""
SERVED_ADAPTER = 3e-4
"""The same of any word's log-probability where a server adds an adapter to its base. Qwen3-Next, which is right, has
shown 2.1e-4 on a processor with AVX-512 and no AMX."""
ROWS = ((3, 9), (9, 40), (20, 5), (45, 17))
"""Tokens of prompts and completions of the rows: they cross windows, the rope's original length and the indexer."""
RIGHT = "right"


class Wrong(Exception):
    """A number that is not the model's."""


@dataclass
class Trial:
    """The row of a family in the table."""

    name: str
    road: str = ""
    sampled: str = ""
    cells: dict[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """Cells that are neither right nor refused with a sentence."""
        fine = (RIGHT, "refused: ")
        return [f"{self.name}, {cell}: {said}" for cell, said in self.cells.items() if not said.startswith(fine)]

    def attempt(self, cell: str, check: Callable[[], None]) -> bool:
        """Fill one cell; whether it is right."""
        from oncurve.core.errors import OncurveError

        try:
            check()
            self.cells[cell] = RIGHT
        except OncurveError as refusal:
            self.cells[cell] = f"refused: {refusal}"
        except Wrong as wrong:
            self.cells[cell] = f"WRONG: {wrong}"
        except Exception as error:  # noqa: BLE001  a fault of any kind is what is looked for
            self.cells[cell] = f"TRACEBACK: {type(error).__name__}: {str(error)[:300]}"
        return self.cells[cell] == RIGHT


def try_family(name: str, folder: Path, make_tokenizer: Callable[[], Any], *, plans_here: bool = False) -> Trial:
    """All cells of a family; its files are made in the folder and removed.

    With ``plans_here`` weights are counted in this process, which saves the start of another.
    """
    trial, place = Trial(name), folder / "base"
    try:
        model = make_zoo_model(name)
        model.save_pretrained(place)
        make_tokenizer().save_pretrained(place)
        del model
        _Steps(trial, place, folder, plans_here).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        gc.collect()
    return trial


def _reference(place: Path) -> Any:
    """The model as transformers computes it without anything of ours."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="eager").eval()


def _policy(place: Path, *overrides: str) -> TrainedPolicy:
    from oncurve.recipe.load import parse_config
    from oncurve.run.builder import make_policy

    return make_policy(parse_config("{data: {type: word_problems}}", [f"model={place}", *overrides], source="zoo"))


def batch_of_rows(rows: tuple[tuple[int, int], ...] = ROWS) -> Batch:
    import torch

    from oncurve.core.batch import Batch, Size

    draw = torch.Generator().manual_seed(0)
    prompts, lengths = (torch.tensor(column) for column in zip(*rows, strict=True))
    count, longest = len(rows), int(lengths.max())
    mask = torch.arange(longest)[None] < lengths[:, None]
    prompt_ids = torch.randint(3, 250, (count, int(prompts.max())), generator=draw)
    completion_ids = torch.randint(3, 250, (count, longest), generator=draw)
    zeros, size = torch.zeros(count, longest), Size(count, int(mask.sum()), count)
    groups = torch.arange(count)
    return Batch(prompt_ids, prompts, completion_ids, mask, lengths, groups, torch.zeros(count), zeros, size)


def _plain(model: Any, ids: Tensor, start: int) -> Tensor:
    """log p of the tokens from a place on."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    return logits[start - 1 : -1].gather(1, ids[start:, None])[:, 0]


def plain_rows(model: Any, batch: Batch) -> Tensor:
    import torch

    found = torch.zeros(batch.mask.shape)
    for row in range(len(batch)):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.completion_lengths[row])
        ids = torch.cat([batch.prompt_ids[row, :prompt], batch.completion_ids[row, :length]])
        found[row, :length] = _plain(model, ids, prompt)
    return found


def _gradients(logprobs: Tensor, model: Any) -> dict[str, Tensor]:
    import torch

    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    found = torch.autograd.grad(logprobs.sum(), list(weights.values()), allow_unused=True)
    return {name: one for name, one in zip(weights, found, strict=True) if one is not None}


def _demand(what: str, error: float, limit: float) -> None:
    if not error <= limit:
        raise Wrong(f"{what} differ by {error:.2g}")


@dataclass
class _Steps:
    """The steps of a trial, each of which fills a cell."""

    trial: Trial
    base: Path
    folder: Path
    plans_here: bool

    def run(self) -> None:
        self.reference = _reference(self.base)
        if not self.trial.attempt("load", self.load):
            return
        self.limit = self.policy_context()
        self.batch = batch_of_rows(tuple((p, min(c, self.limit - p)) for p, c in ROWS if p < self.limit - 1))
        self.trial.attempt("trainer", self.train)
        self.trial.attempt("gradient", self.gradient)
        if self.trial.attempt("sampler", lambda: self.sample(self.policy, self.reference)):
            self.trial.sampled = way_said(self.policy.model)
        self.trial.attempt("modules", lambda: self.sample(self.policy, self.reference, by_modules=True))
        self.trial.attempt("saved", self.save)
        self.trial.attempt("served", self.serve)
        del self.policy
        if self.trial.attempt("LoRA", self.adapt):
            self.trial.attempt("LoRA served", self.serve_adapter)
        self.trial.attempt("plan", self.plan)

    def policy_context(self) -> int:
        from oncurve.model.context import context_of

        return context_of(self.policy.model.config) or 128

    def load(self) -> None:
        self.policy = _policy(self.base)
        self.served = [copy.deepcopy(self.policy.model) for _ in range(2)]  # two servers that hold the base
        self.trial.road = self.policy.scoring_path.method

    def train(self) -> None:
        import torch

        with torch.no_grad():
            wanted = plain_rows(self.reference, self.batch)
            found = self.policy.logprobs(self.batch)[0]
        _demand("log-probabilities", float((found - wanted)[self.batch.mask].abs().max()), LOGPROBS)

    def gradient(self) -> None:
        wanted = _gradients(plain_rows(self.reference, self.batch), self.reference)
        found = _gradients(self.policy.logprobs(self.batch)[0], self.policy.model)
        if wanted.keys() - found.keys():
            raise Wrong(f"there is no gradient of {sorted(wanted.keys() - found.keys())[:2]}")
        size = sum(float(one.norm()) ** 2 for one in wanted.values()) ** 0.5
        error = max(float((found[name] - one).norm()) for name, one in wanted.items())
        _demand("gradients", error / size, GRADIENT)

    def sample(self, policy: Any, reference: Any, *, by_modules: bool = False) -> None:
        compare_sampled(policy, reference, tokens=min(24, self.limit - 20), by_modules=by_modules)

    def save(self) -> None:
        from oncurve.policy.final_model import write_model

        _move(self.policy.model)
        write_model(self.policy, self.folder / "saved")
        self.same_logits(_reference(self.folder / "saved"), self.policy.model)

    def serve(self) -> None:
        """The moved weights reach a server that holds the base, over the files and checks of a transfer."""
        from oncurve.fleet.serving.weight_update import WeightUpdate

        served = self.served.pop()
        update = WeightUpdate(served)
        update.stage(self.message(self.policy))
        update.apply()
        self.same_logits(served, self.policy.model)

    def message(self, policy: Any) -> dict[str, Any]:
        from oncurve.fleet.weights.shards import write_weights
        from oncurve.fleet.weights.store import WeightStore
        from oncurve.fleet.weights.weight_manifest import describe_files
        from oncurve.fleet.weights.weight_stream import make_shipment

        store = WeightStore(self.folder / "weights", run="zoo")
        thin = policy.adapter_weights()
        if thin is None:
            shipment = make_shipment(policy, "zoo", 1, matrix_type=None)
            manifest = store.publish(1, lambda folder: write_weights(shipment, folder), label=shipment.label)
            return manifest.message(address=None, token=None)

        def write(folder: Path) -> Any:
            thin.save(folder)
            return describe_files(folder)

        return store.publish(2, write, adapter=thin.facts()).message(address=None, token=None)

    def same_logits(self, found: Any, wanted: Any, limit: float = LOGPROBS) -> None:
        import torch

        ids = torch.arange(3, 43)[None]
        with torch.no_grad():
            pair = [model(input_ids=ids, use_cache=False).logits.log_softmax(-1) for model in (found, wanted)]
        _demand("log-probabilities", float((pair[0] - pair[1]).abs().max()), limit)

    def adapt(self) -> None:
        """An adapter that already changes something: trained, saved, read by peft alone, and sampled."""
        import torch
        from peft import PeftModel

        from oncurve.policy.final_model import write_model

        self.adapted = _policy(self.base, "policy.lora.rank=2")
        with torch.no_grad():
            for name, weight in self.adapted.model.named_parameters():
                if weight.requires_grad:
                    weight.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        write_model(self.adapted, self.folder / "adapter")
        whole = PeftModel.from_pretrained(_reference(self.base), str(self.folder / "adapter"), is_trainable=True)
        self.whole = whole.eval()
        with torch.no_grad():
            wanted, found = plain_rows(self.whole, self.batch), self.adapted.logprobs(self.batch)[0]
        _demand("the trainer's log-probabilities", float((found - wanted)[self.batch.mask].abs().max()), LOGPROBS)
        exact = _gradients(plain_rows(self.whole, self.batch), self.whole)
        near = _gradients(self.adapted.logprobs(self.batch)[0], self.adapted.model)
        size = sum(float(one.norm()) ** 2 for one in exact.values()) ** 0.5
        short = {name.removeprefix("base_model.model."): one for name, one in exact.items()}
        error = max(float((near[name] - one).norm()) for name, one in short.items())
        _demand("gradients", error / size, GRADIENT)
        self.sample(self.adapted, self.whole)

    def serve_adapter(self) -> None:
        """The same adapter, handed to a server that holds the base."""
        from oncurve.fleet.serving.weight_update import WeightUpdate

        served = self.served.pop()
        update = WeightUpdate(served)
        update.stage(self.message(self.adapted))
        update.apply()
        self.same_logits(served, self.whole, SERVED_ADAPTER)

    def plan(self) -> None:
        from oncurve.model.count_weights import count
        from oncurve.plan.find_shape import find_shape

        own = sum(weight.numel() for weight in self.reference.parameters())
        place = self.base
        found = (
            count(str(place / "config.json"))["parameters"]
            if self.plans_here
            else find_shape(str(place)).num_parameters
        )
        if found != own:
            raise Wrong(f"{found} weights are counted, and there are {own}")


def compare_sampled(
    policy: Any, reference: Any, *, tokens: int, limit: float = LOGPROBS, by_modules: bool = False
) -> None:
    """Sample groups of two prompts with the engine, through our own layers or the model's modules.

    They are compared with the reference's own pass over each row.
    """
    import torch

    from oncurve.core.records import Prompt, SamplingParams
    from oncurve.core.sampler import SamplingRequest
    from oncurve.model.stand_in import nudged
    from oncurve.sample.engine import InProcessEngine

    engine = InProcessEngine(SamplingParams(max_completion_tokens=tokens), own_layers=not by_modules)
    engine.load_weights(policy, version=0)
    prompts = [Prompt("", tuple(range(5, 5 + length)), place) for place, length in enumerate((3, 20))]
    for group in engine.sample(SamplingRequest(prompts, 3)):
        for completion in group.completions:
            ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
            start = len(completion.prompt_ids)
            with torch.no_grad():
                wanted, near = _plain(reference, ids, start), nudged(reference, ids[None])[0].log_softmax(-1)
            error = (torch.tensor(completion.sampler_logprobs) - wanted).abs().max()
            rounding = (near[start - 1 : -1].gather(1, ids[start:, None])[:, 0] - wanted).abs().max()
            _demand("log-probabilities", float(error), max(limit, float(rounding)))  # a router may stand at a tie


def way_said(model: Any) -> str:
    """How the engine samples from a model."""
    from oncurve.model.module_caches import cache_kind_of
    from oncurve.model.weights import supports

    return "own layers" if supports(model) else cache_kind_of(model).name


def _move(model: Any) -> None:
    """Other weights, as after training."""
    import torch

    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=draw)
