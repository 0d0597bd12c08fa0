"""Vision models under a recipe: images reach the loss. Image processors are the ones that need no torchvision."""

import pytest
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    set_seed,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from tests.trl import runs, tiny
from trl_ext.batch import MODEL_INPUTS

KL = "objective.penalties=[{name: kl, estimator: k3, coefficient: 0.5}]"
SPECIAL = ["<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def tokenizer():
    words = ["<pad>", "<eos>", *SPECIAL, *tiny.CHARACTERS]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    options = {"pad_token": "<pad>", "eos_token": "<eos>", "additional_special_tokens": SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **options)


class WithoutVideo(Qwen2VLProcessor):
    """The one for videos needs torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def llava():
    tok = tokenizer()
    size = {"height": 8, "width": 8}
    images = CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False)
    options = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(images, tok, chat_template=TEMPLATE.replace("IMAGE", "<image>"), **options)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=Qwen2Config(**TEXT),
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
    )
    set_seed(0)
    return LlavaForConditionalGeneration(config), processor


def qwen2_vl():
    tok = tokenizer()
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=1, min_pixels=64, max_pixels=256)
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = WithoutVideo(images, tok, chat_template=template)
    ids = {
        name: tok.convert_tokens_to_ids(word)
        for name, word in (
            ("image_token_id", "<|image_pad|>"),
            ("video_token_id", "<|video_pad|>"),
            ("vision_start_token_id", "<|vision_start|>"),
            ("vision_end_token_id", "<|vision_end|>"),
        )
    }
    config = Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 16,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
        },
        **ids,
    )
    set_seed(0)
    return Qwen2VLForConditionalGeneration(config), processor


def pictures(shift=0, sizes=((8, 8),)):
    rows = []
    for i in range(16):
        image = Image.new("RGB", sizes[i % len(sizes)], ((20 * i + shift) % 256, (90 + shift) % 256, 30))
        rows.append({"prompt": [{"role": "user", "content": f"{i % 10}+1="}], "image": image, "answer": str(i % 10)})
    return Dataset.from_list(rows)


def reward(completions, answer, **_):
    return tiny.digit_reward([completion[0]["content"] for completion in completions], answer)


class Watching(runs.Watching):
    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        self.vision = {n for n, p in model.named_parameters() if "vis" in n and p.grad is not None and p.grad.any()}
        return loss


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (llava, {"pixel_values", "num_images"}),
        (qwen2_vl, {"pixel_values", "num_images", "image_grid_thw", "mm_token_type_ids"}),
    ],
    ids=["llava", "qwen2-vl"],
)
def test_images_reach_the_loss(tmp_path, make, keys):
    """Old log-probs are taken over all rows, current ones over a micro-batch: equal if each row keeps its own image.
    For Qwen2-VL images have two sizes, so that the share of a row's patches differs."""
    model, processor = make()
    sizes = ((8, 8), (16, 8)) if make is qwen2_vl else ((8, 8),)
    config = runs.arguments(
        tmp_path, "training={mini_batch_size: 8, micro_batch_size: 4, steps: 2}", KL, logging_steps=1
    )
    options = {"processing_class": processor, "train_dataset": pictures(sizes=sizes), "reward_funcs": reward}
    model.save_pretrained(tmp_path / "model")  # where TRL takes the reference from
    run = runs.trainer(str(tmp_path / "model"), config, kind=Watching, **options)
    before = runs.snapshot(run.model)
    run.train()
    after = runs.snapshot(run.model)
    assert {name for name in MODEL_INPUTS if run.seen[0].get(name) is not None} == keys
    assert run.vision
    assert any(not torch.equal(before[name], after[name]) for name in run.vision)
    found = runs.logs(run)
    assert all(entry["grad_norm"] > 0 for entry in found)
    assert [entry["on_policy_gap/max"] for entry in found[::2]] == pytest.approx([0, 0], abs=1e-5)
    assert found[0]["penalties/kl/mean"] == pytest.approx(0, abs=1e-9)
    assert found[1]["penalties/kl/mean"] > 1e-9
    inputs = dict(run.seen[0])
    with torch.no_grad():
        loss = run._compute_loss(run.model, inputs)
        other = run._compute_loss(run.model, inputs | {"pixel_values": inputs["pixel_values"].flip(0) + 1})
    assert loss.isfinite()
    assert loss != other


def test_every_input_of_a_vision_model_is_passed_on(tmp_path):
    """Also those that no model above has."""
    run = runs.trained(
        tiny.save_model(tmp_path / "model"), runs.arguments(tmp_path, "training={mini_batch_size: 16, steps: 1}")
    )
    seen, original = {}, run._get_per_token_logps_and_entropies

    def watch(*args, **kwargs):
        seen.update(kwargs)
        return original(*args, **{name: value for name, value in kwargs.items() if name not in MODEL_INPUTS})

    run._get_per_token_logps_and_entropies = watch
    marked = {name: object() for name in MODEL_INPUTS}
    run._compute_loss(run.model, run._buffered_inputs[0] | marked)
    assert {name: seen[name] for name in MODEL_INPUTS} == marked
