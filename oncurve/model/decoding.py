"""The next token of many rows, when rows of one group share the keys and values of their prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from oncurve.algorithm.precision import head_type
from oncurve.core.decoder import Chosen, RowKeeper, fetched
from oncurve.core.draw import draw, first_above
from oncurve.core.records import SamplingParams
from oncurve.model.allocator import give_back
from oncurve.model.caches import LayerCache
from oncurve.model.decode_memory import PREFILL_TOKENS, grown, whole_blocks
from oncurve.model.decode_native import NativeLayers
from oncurve.model.forward_backward import Angles, LayerPass
from oncurve.model.ops_native import NativeOps, operations
from oncurve.model.packing import prompt_layout
from oncurve.model.trace_ranges import traced
from oncurve.model.weights import Backbone

if TYPE_CHECKING:
    from oncurve.model.decode_cuda_graph import Choose, DeviceDraw, RecordedLayers
    from oncurve.model.decode_torch import TorchLayers

LONG = 128
"""Tokens from which torch reads a prompt faster in the compute type; shorter ones it reads faster in the wide type."""
APART = 16
"""Rows whose logits torch computes at a time, where they must not depend on how many there are."""
SMALLEST_PART, LARGEST_PART = 64, 1024
"""Words of a part of the vocabulary, where a GPU looks for the next token."""


class LayerDecoder:
    """Computes next-token logits from the current weights of a backbone, in a compute type."""

    def __init__(
        self,
        backbone: Backbone,
        head: Tensor,
        compute_type: torch.dtype,
        *,
        head_key: int | None = None,
        slots: int,
        prompt_slots: int,
        prompt_tokens: int,
        completion_tokens: int,
        records: bool = True,
        apart: bool = False,
    ) -> None:
        """Room for ``slots`` rows of up to ``completion_tokens`` behind ``prompt_slots`` prompts.

        Keys and values are kept in the compute type on a GPU and where kernels decode, and in the wide type where torch
        does on a CPU, except for long prompts. With ``records`` a GPU repeats steps as CUDA graphs. ``apart``: on a CPU
        with compiled kernels, what a row gives has the same bits whoever is computed beside it.
        """
        self.backbone, self.compute_type, self.device = backbone, compute_type, backbone.device
        on_cpu = self.device.type == "cpu"
        self.ops, self.wide_ops = (operations(dtype, self.device.type) for dtype in (compute_type, backbone.wide))
        self.vocabulary, self.slots, self.records = len(head), slots, records
        self.apart = apart and on_cpu
        self.keeper: RowKeeper | None = None
        """Takes rows out and puts them back; whoever makes the decoder may give it one."""
        own_type = prompt_type = compute_type
        if on_cpu and not isinstance(self.ops, NativeOps):
            own_type, prompt_type = backbone.wide, compute_type if prompt_tokens >= LONG else backbone.wide
        self.head_of: Callable[[], tuple[Tensor, int | None]] = lambda: (head, head_key)
        """Gives the head as it is now, and the key of its dither."""
        self.renew()
        self.completion_tokens = completion_tokens
        self.angles = Angles(*backbone.rotary(torch.arange(prompt_tokens + completion_tokens, device=self.device)))
        self.capacity = 0 if on_cpu else whole_blocks(completion_tokens)
        own = (slots, self.capacity, backbone.sizes, own_type)
        prompts = (prompt_slots, whole_blocks(prompt_tokens), backbone.sizes, prompt_type)
        with self.device:
            self.caches = [
                LayerCache(self.ops.own_cache(*own), *self.ops.prompt_cache(*prompts)) for _ in backbone.layers
            ]

    def renew(self) -> None:
        """Go on with the weights as they are now; keys and values stay what they are."""
        backbone, ops, compute_type = self.backbone, self.ops, self.compute_type
        head, head_key = self.head_of()
        if isinstance(ops, NativeOps):  # few rows are multiplied faster by its kernel, in float32 too
            self.head = ops.pack([head], [head_key])
        else:
            self.head = ops.head_matrix(head.detach(), head_type(self.device, compute_type, backbone.wide), head_key)
        self.weights = backbone.weights(compute_type)
        self.layers: NativeLayers | TorchLayers
        if isinstance(ops, NativeOps):
            self.layers = NativeLayers(backbone, ops, self.slots)
        elif self.device.type == "cpu":
            from oncurve.model.decode_torch import TorchLayers  # lazy

            self.layers = TorchLayers(backbone, self.weights, ops, compute_type, slots=self.slots)
        else:
            from oncurve.model.decode_cuda_graph import RecordedLayers  # lazy
            from oncurve.model.decode_flash import FlashLayers, can_decode  # lazy

            kind = FlashLayers if can_decode(backbone.sizes, compute_type, self.device) else RecordedLayers
            self.layers = kind(backbone, self.weights, ops, compute_type, slots=self.slots, records=self.records)

    @traced("prefill")
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Compute prompts into prompt slots; the logits of the first completion token of each [P, V]."""
        logits = []
        start = 0
        while start < len(prompts):
            end, tokens = start + 1, len(prompts[start])
            while not self.apart and end < len(prompts) and tokens + len(prompts[end]) <= PREFILL_TOKENS:
                tokens += len(prompts[end])
                end += 1
            logits.append(self._prefill(prompts[start:end], slots[start:end]))
            start = end
        return torch.cat(logits)

    def _prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        layout = prompt_layout(prompts, self.device)
        angles, slot_ids = self.angles.at(layout.positions[0]), torch.tensor(slots)
        pass_ = LayerPass(layout, angles, self.backbone.sizes, self.ops, self.compute_type)
        residual, added = self.backbone.embed(layout.ids[0]), None
        for layer, matrices, cache in zip(self.backbone.layers, self.weights, self.caches, strict=True):

            def store(qkv: Tensor, cache: LayerCache = cache) -> None:
                caches = (cache.prompt_keys, cache.prompt_values)
                self.ops.store_prompts(qkv, angles, layout, slot_ids, caches, self.backbone.sizes)

            state = pass_.forward(layer, matrices, residual, added, store)
            residual, added = pass_.feed_forward(state, matrices)
        assert added is not None
        residual, added = (part.index_select(0, layout.predicts) for part in (residual, added))
        norm, epsilon = self.backbone.body.norm.weight, self.backbone.sizes.epsilon
        _, hidden, _ = self.ops.add_norm(residual, added, norm, epsilon, self.backbone.wide)
        return self.logits(hidden)

    def end_prompts(self) -> None:
        """No prompt is read from now on: kernels decode with weights in an order of their own and need no others."""
        if self.weights:
            self.weights = []
            give_back()

    def step(self, tokens: Tensor, positions: Tensor, addresses: Tensor) -> Tensor:
        """Logits [R, V] in the wide type, as in training, after one more token per row [R] at its position [R].

        ``addresses`` holds for each row its slot, its tokens so far, its prompt's slot and the prompt's tokens [R, 4].
        All three lie on the CPU.
        """
        return self.logits(self.hidden(tokens, positions, addresses))

    @traced("decode")
    def hidden(self, tokens: Tensor, positions: Tensor, addresses: Tensor) -> Tensor:
        """The normed output of the last layer [R, H] after the same."""
        self._grow(int(addresses.numpy()[:, 1].max()) + 1)
        return self.layers(tokens, self.angles, positions, addresses, self.caches)

    def row(self, slot: int, tokens: int) -> list[Tensor]:
        """Copies of the keys and values of a row's first tokens, layer by layer."""
        return [cache.row(slot, whole_blocks(tokens)) for cache in self.caches]

    def put_row(self, slot: int, copies: Sequence[Tensor]) -> None:
        """Let a row go on from such copies."""
        self._grow(copies[0].shape[2])
        for cache, part in zip(self.caches, copies, strict=True):
            cache.put_row(slot, part)

    def prompt(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the keys and values of a prompt, layer by layer."""
        return [cache.prompt(slot) for cache in self.caches]

    def takes_prompt(self, copies: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether there are copies, and of buffers of this size."""
        return bool(copies) and copies[0][0].shape == self.caches[0].prompt_keys.shape[1:]

    def put_prompt(self, slot: int, copies: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Put such copies into a slot; False if there are none, or they are of buffers of another size."""
        if not self.takes_prompt(copies):
            return False
        for cache, part in zip(self.caches, copies, strict=True):
            cache.put_prompt(slot, part)
        return True

    @property
    def recorded(self) -> RecordedLayers | None:
        """The layers, if they repeat recorded steps and draw by themselves, as on a GPU."""
        return cast("RecordedLayers", self.layers) if self.layers.draws else None

    @property
    def draws(self) -> bool:
        """Tokens may be drawn where logits are computed, by ``draw``."""
        return self.layers.draws

    @property
    def mover(self) -> LayerDecoder | None:
        """This decoder; None where rows are read as fast wherever they lie."""
        return None if self.layers.reads_anywhere else self

    @traced("decode")
    def draw(
        self, tokens: Tensor, positions: Tensor, addresses: Tensor, uniform: np.ndarray, choose: Choose
    ) -> DeviceDraw:
        """A step, and the token that is drawn after it for each row [R] by its uniform number.

        What is given lies on the CPU; a token of -1 is the one that was drawn last for its slot. ``choose`` takes
        logits and uniform numbers and gives tokens and log-probabilities; it is the same in all calls and reads nothing
        back from the device.
        """
        recorded = self.recorded
        assert recorded is not None
        self._grow(int(addresses.numpy()[:, 1].max()) + 1)

        def choose_of(hidden: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
            return choose(self.logits(hidden), uniform)

        inputs = (tokens, self.angles, positions, addresses, self.caches)
        return recorded.draw(*inputs, uniform=uniform, choose=choose_of)

    def close(self) -> None:
        """Give back what sampling has taken of a device's memory; nothing is decoded after that."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.caches, self.weights = [], []
        self.keeper = None  # it knows this decoder, and both would wait for the collector of garbage
        if (recorded := self.recorded) is not None:
            recorded.recordings.clear()
            recorded.layers.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def choose(self, logits: Tensor, uniform: Tensor, params: SamplingParams) -> Chosen:
        """The next token of each row and its log-probability, on the CPU; by one kernel where nothing is cut off."""
        if isinstance(self.wide_ops, NativeOps) and not params.cuts:
            tokens, logprobs = self.wide_ops.draw(logits.contiguous(), uniform, params.temperature)
            return tokens.numpy(), logprobs.numpy()
        return fetched(*draw(logits, uniform.to(logits.device), params, find=first_above_on_device))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states [R, H], rounded as in training."""
        if not self.apart or isinstance(self.ops, NativeOps):
            return self.ops.logits(hidden, self.head, self.vocabulary)
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, -len(hidden) % APART))  # products of one size round alike
        parts = [self.ops.logits(part, self.head, self.vocabulary) for part in padded.split(APART)]
        return torch.cat(parts)[: len(hidden)]

    def _grow(self, needed: int) -> None:
        """Make the buffers of completions hold at least so many positions."""
        if needed <= self.capacity:
            return
        more = grown(self.capacity, needed, self.completion_tokens) - self.capacity
        self.capacity += more
        for cache in self.caches:
            cache.grow(cache.positions + more)

    def move(self, slots: Tensor, to: Tensor, tokens: int) -> None:
        """Let the rows in these slots, of up to so many tokens, lie in others, so that attention without a kernel reads
        few slots."""
        for cache in self.caches:
            cache.move(slots.to(self.device), to.to(self.device), tokens)


def first_above_on_device(p: Tensor, uniform: Tensor) -> Tensor:
    """The token of ``first_above``, by parts on a GPU where the vocabulary can be cut."""
    width = part_width(p.shape[1]) if p.is_cuda else 0
    return first_above_by_parts(p, uniform, width) if width else first_above(p, uniform)


def part_width(vocabulary: int) -> int:
    """Into parts of how many words a vocabulary can be cut; 0 if it is not worth it."""
    width = min(vocabulary & -vocabulary, LARGEST_PART)
    return width if width >= SMALLEST_PART else 0


def first_above_by_parts(p: Tensor, uniform: Tensor, width: int) -> Tensor:
    """The same token, found by the sums of parts of the vocabulary first, and then in its part.

    The cumulative sums of a whole vocabulary in float64 are twice its size, written and read again.
    """
    parts = p.unflatten(1, (-1, width))
    sums = parts.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold = uniform[:, None].double() * sums[:, -1:]
    part = torch.searchsorted(sums, threshold, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, part)
    chosen = parts.gather(1, part[..., None].expand(-1, -1, width)).squeeze(1)
    cumulative = chosen.cumsum(dim=-1, dtype=torch.float64).add_(before)
    # By its own sum a part may end a rounding before the threshold: then it is the last of its words with a probability
    last = torch.nextafter(cumulative[:, -1:], torch.zeros_like(threshold))
    word = torch.searchsorted(cumulative, torch.minimum(threshold, last), right=True).clamp_(max=width - 1)
    return torch.add(word, part, alpha=width).squeeze(1)
