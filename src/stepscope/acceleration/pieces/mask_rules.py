"""`ScoreRules` of the masks that Hugging Face models create: sliding windows and packed documents.

A mask is a tensor of seq × seq that a kernel reads. Where the arguments of the function that
created it say which keys a query sees, the mask carries these rules as an attribute, and attention
computes them without reading the mask. The first mask of each kind is compared with its rules;
masks with padding, of a filled cache or changed by functions of the model carry none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepscope.acceleration.attention.masks import MASKED_BELOW
from stepscope.acceleration.checks import was_written
from stepscope.attention.rules import ScoreRules
from stepscope.attention.visibility import Lengths, key_intervals
from stepscope.torch_tools.capturing import is_capturing

_ATTRIBUTE = "_stepscope_rules"
_LIBRARY = "transformers.masking_utils"
_CAUSAL, _WINDOW = "create_causal_mask", "create_sliding_window_causal_mask"
_READ = {
    "config",
    "inputs_embeds",
    "input_embeds",
    "attention_mask",
    "past_key_values",
    "position_ids",
}
_WITHOUT_EFFECT = {"cache_position", "layer_idx", "allow_is_causal_skip"}
"""Arguments that do not change the mask of tokens without a cache."""


def rules_of(mask: Any) -> ScoreRules | None:
    """Return the rules that say the same as a mask together with the causal flag, if known."""
    # A mask may be another object: that of FlexAttention, or several masks in a dictionary.
    if type(mask) is not Tensor or was_written(mask):
        return None
    rules: ScoreRules | None = getattr(mask, _ATTRIBUTE, None)
    return rules


class MaskRules:
    """Attaches rules to masks. A kind of mask that once differed from its rules gets none."""

    def __init__(self) -> None:
        self._equal: dict[tuple[object, ...], bool] = {}

    def attach(
        self,
        mask: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own_positions: bool,
    ) -> None:
        """Attach rules to the mask that a function returned for these arguments. The positions are
        the model's own, the same in every call, or those of a batch."""
        if type(mask) is not Tensor or mask.dim() != 4 or mask.shape[-2] != mask.shape[-1]:
            return
        if was_written(mask):
            return
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        if own_positions:
            bound.pop("position_ids", None)
        rules = _rules(function, bound, mask)
        if rules is None:
            return
        kind: tuple[object, ...] = (own_positions, mask.dtype == torch.bool, *rules.names)
        if rules.window is not None:
            # A window of the length of the mask has no effect on it.
            kind = (*kind, mask.shape[-1] > rules.window)
        if kind not in self._equal:
            if is_capturing():
                return
            self._equal[kind] = _says_the_same(rules, mask)
        if self._equal[kind]:
            setattr(mask, _ATTRIBUTE, rules)


def _rules(function: Callable[..., Any], bound: dict[str, Any], mask: Tensor) -> ScoreRules | None:
    if function.__module__ != _LIBRARY or function.__name__ not in (_CAUSAL, _WINDOW):
        return None
    given = {name: value for name, value in bound.items() if value is not None}
    if given.keys() - _READ - _WITHOUT_EFFECT:
        return None
    config, embedded = given["config"], given.get("inputs_embeds", given.get("input_embeds"))
    cache, padding = given.get("past_key_values"), given.get("attention_mask")
    if embedded is None or not getattr(config, "is_causal", True):
        return None
    batch, seq = embedded.shape[:2]
    if mask.shape != (batch, 1, seq, seq) or (cache is not None and cache.get_seq_length()):
        return None
    window = config.sliding_window if function.__name__ == _WINDOW else None
    if window is not None and window < 1:
        return None
    if padding is not None:
        # Without padding, SDPA gets a mask for a window only.
        needed = window is not None or mask.dtype != torch.bool
        if not needed or not _is_all_ones(padding, batch, seq):
            return None
    documents = None
    if padding is None and cache is None:
        documents = _documents(given.get("position_ids"), batch)
    return ScoreRules(window=window, documents=documents)


def _is_all_ones(padding: Any, batch: int, seq: int) -> bool:
    """Return whether no token is padding. Waits for the device."""
    is_mask = isinstance(padding, Tensor) and padding.shape == (batch, seq)
    return is_mask and not is_capturing() and bool((padding != 0).all())


def _documents(positions: Tensor | None, batch: int) -> Tensor | None:
    """Return the number of the document of each token: one starts where positions do not go on."""
    if positions is None or positions.dim() != 2:
        return None
    numbers = torch.zeros_like(positions)
    numbers[:, 1:] = (positions[:, 1:] - positions[:, :-1] != 1).cumsum(-1)
    return numbers if numbers.shape[0] == batch else numbers[0]


def _says_the_same(rules: ScoreRules, mask: Tensor) -> bool:
    """Return whether a mask, boolean or additive, shows the keys that the rules show, and no
    others. Waits for the device."""
    seq = mask.shape[-1]
    low, high = key_intervals(rules, Lengths(seq, seq, True, None, mask.device)).unbind(1)
    key = torch.arange(seq, device=mask.device)
    visible = ((key >= low[..., None]) & (key < high[..., None]))[:, None].expand_as(mask)
    if mask.dtype == torch.bool:
        return torch.equal(mask, visible)
    return torch.equal(mask == 0, visible) and torch.equal(mask > MASKED_BELOW, visible)
