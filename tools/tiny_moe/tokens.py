"""The tokenizer: byte-level BPE with single digits, its special tokens, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny_moe.presets import MAX_POSITIONS

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
SPECIAL_TOKENS = (PAD, BOS, END, "<|user|>", "<|assistant|>", "<|system|>")  # their ids are 0, 1, 2, ...
PAD_ID, BOS_ID, END_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<|user|>' + m['content'] }}"
    "{% elif m['role'] == 'system' %}{{ '<|system|>' + m['content'] }}"
    "{% else %}{{ '<|assistant|>' + m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(corpora: Sequence[Path], vocab_size: int) -> Tokenizer:
    """Train on the files as they are; deterministic for the same files."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in corpora], trainer)
    return tokenizer


def tokenizer_config() -> bytes:
    """tokenizer_config.json, as transformers and the gateway read it."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return json.dumps(config, indent=1).encode()
