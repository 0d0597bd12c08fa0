"""The embedded tokenizer: one token a character."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+="


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer of the embedded task; it pads on the left and has no chat template.

    Returns:
        A tokenizer whose `len` is the vocabulary size a model needs: the characters, `<pad>`, `<eos>`, and `<unk>`
        for every other character.

    Example:
        >>> build_tokenizer()("07+58=")["input_ids"]
        [3, 10, 13, 8, 11, 14]
    """
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
