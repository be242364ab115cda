"""Is a checkpoint good? transformers loads it, answers six prompts, and drafting must not change a token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

NUM_NEW_TOKENS = 120


@dataclass(frozen=True)
class Prompt:
    """What is asked, whether as chat, and what the answer must contain ("" where any story will do)."""

    text: str
    is_chat: bool
    must_say: str = ""


PROMPTS = (
    Prompt("<|bos|>Once upon a time, there was a", is_chat=False),
    Prompt("<|bos|>One sunny day, Lily went to the", is_chat=False),
    Prompt("Tell me a story about Tom and a dog.", is_chat=True, must_say="Tom"),
    Prompt("What is 3 plus 4?", is_chat=True, must_say=" 7."),
    Prompt("What is a frog?", is_chat=True, must_say="frog is a green animal"),
    Prompt("Ben has two kites and gets three more. How many does he have now?", is_chat=True, must_say="five kites"),
)


@dataclass(frozen=True)
class Answer:
    """What came of one prompt."""

    prompt: Prompt
    text: str
    num_tokens: int
    num_forwards: int  # of the main layers, while the MTP layer drafts
    is_same_with_mtp: bool

    @property
    def complaint(self) -> str:
        """Why this answer is not accepted; empty if it is."""
        if not self.is_same_with_mtp:
            return "MTP changed the tokens"
        if self.prompt.must_say not in self.text:
            return f"does not say {self.prompt.must_say!r}"
        return "" if self.text.strip() else "says nothing"


class Checkpoint:
    """A deepseek_v3 checkpoint in float32 under transformers: the official class, none of our code."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoTokenizer, DeepseekV3ForCausalLM

        config = AutoConfig.from_pretrained(folder)
        # transformers knows the MTP layer by the released model's number, 61; here it is the one behind the last.
        drafter = rf"model\.layers\.{config.num_hidden_layers}\..*"
        DeepseekV3ForCausalLM._keys_to_ignore_on_load_unexpected = [drafter]
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        loaded: Any = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        self.model, info = loaded
        self.model.eval()
        self.misloaded = sorted({*info["missing_keys"], *info["unexpected_keys"]})
        self.num_forwards = 0
        self.model.model.register_forward_pre_hook(self._count_forward)

    def _count_forward(self, module: torch.nn.Module, args: object) -> None:
        self.num_forwards += 1

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, *, use_mtp: bool) -> torch.Tensor:
        """Greedy tokens behind the prompt, `[num_new_tokens]`."""
        self.num_forwards = 0
        options = {"use_mtp": True} if use_mtp else {}
        out: torch.Tensor = self.model.generate(
            ids, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=2, **options
        )
        return out[0, ids.shape[1] :]

    def answer(self, prompt: Prompt) -> Answer:
        """Generate plainly and with drafts, and compare."""
        text = prompt.text
        if prompt.is_chat:
            message = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        plain = self.generate(ids, use_mtp=False)
        drafted = self.generate(ids, use_mtp=True)
        said = self.tokenizer.decode(plain, skip_special_tokens=True)
        return Answer(prompt, said, len(drafted), self.num_forwards, torch.equal(plain, drafted))


def show(answers: list[Answer]) -> None:
    """Print one line an answer; tokens are counted in all and for each forward of the main layers."""
    table = Table()
    for heading, max_width in (
        ("prompt", 28),
        ("answer", 28),
        ("tokens", None),
        ("a forward", None),
        ("verdict", None),
    ):
        table.add_column(heading, max_width=max_width, no_wrap=max_width is not None, overflow="ellipsis")
    for answer in answers:
        rate = f"{answer.num_tokens / answer.num_forwards:.2f}"
        table.add_row(answer.prompt.text, answer.text.strip(), str(answer.num_tokens), rate, answer.complaint or "good")
    Console(markup=False).print(table)


def accept(folder: Path) -> list[str]:
    """Print the table and return all complaints; none means that the checkpoint is good."""
    checkpoint = Checkpoint(folder)
    answers = [checkpoint.answer(prompt) for prompt in PROMPTS]
    show(answers)
    complaints = [f"{answer.prompt.text!r}: {answer.complaint}" for answer in answers if answer.complaint]
    return [f"tensor missing or left over: {name}" for name in checkpoint.misloaded] + complaints
