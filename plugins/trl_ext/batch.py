"""TRL's tensors by the words of a batch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""What vision models read besides the tokens; TRL passes each by name."""

WORDS = {
    "old_log_prob": "old_per_token_logps",
    "rollout_log_prob": "sampling_per_token_logps",
    "ref_log_prob": "ref_per_token_logps",
    "advantages": "advantages",
}


def to_batch(inputs: Mapping[str, Any], log_prob: Tensor | None = None) -> dict[str, Tensor]:
    """The batch of an objective from the inputs of TRL's loss.

    Args:
        inputs: what `_generate_and_score_completions` made, or a slice of it.
        log_prob: (B, T) of the current policy. TRL leaves the old log-probs out where these are the same.

    Returns:
        Tensors by word; a word that TRL has no tensor for is absent.
    """
    batch = {word: inputs[name] for word, name in WORDS.items() if inputs.get(name) is not None}
    mask = inputs["completion_mask"]
    batch["response_mask"] = mask * inputs["tool_mask"] if inputs.get("tool_mask") is not None else mask
    if log_prob is not None:
        batch["log_prob"] = log_prob
        batch.setdefault("old_log_prob", log_prob.detach())
    return batch
