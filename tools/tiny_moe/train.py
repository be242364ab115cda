"""Training: tokens from the corpora, AdamW under a cosine, bias balancing, validation, export."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tiny_moe.export import export
from tiny_moe.network import Network
from tiny_moe.presets import Preset
from tiny_moe.tokens import BOS_ID, END, END_ID, train_tokenizer

REPORT_EVERY_S = 30.0
MAX_VALIDATION_TOKENS = 200_000
NUM_VALIDATION_BATCHES = 8
SHUFFLE_SEED = 0  # of the documents, apart from the seed of the run: two runs see the same split
Losses = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Validation:
    """What the trained network does on documents that it did not see; losses in nats a token."""

    main_loss: float
    mtp_loss: float
    draft_agreement: float  # share of positions where the MTP argmax is the main argmax, teacher-forced


@dataclass(frozen=True)
class Data:
    """Token streams on the training device, and how windows are drawn from them."""

    train: Tensor
    validation: Tensor
    preset: Preset

    def batch(self, stream: Tensor) -> Tensor:
        """Random windows, `[batch_size, window + 2]` int64."""
        width = self.preset.window + 2
        last = len(stream) - width
        if last < 1:
            raise ValueError(f"the corpus is too small: a stream has {len(stream)} tokens, a window takes {width}")
        starts = torch.randint(0, last, (self.preset.batch_size,), device=stream.device)
        return stream[starts[:, None] + torch.arange(width, device=stream.device)].long()


def load_data(corpora: Sequence[Path], tokenizer: Tokenizer, preset: Preset, *, device: torch.device) -> Data:
    """Shuffle the documents, wrap each in begin and end tokens, and set a twentieth aside for validation."""
    texts = "".join(path.read_text() for path in corpora).split(f"{END}\n")
    random.Random(SHUFFLE_SEED).shuffle(texts)
    encoded = tokenizer.encode_batch([text.strip() for text in texts if text.strip()])
    stream = torch.tensor([token for one in encoded for token in (BOS_ID, *one.ids, END_ID)], dtype=torch.int32)
    num_validation = min(len(stream) // 20, MAX_VALIDATION_TOKENS)
    print(f"{len(stream) / 1e6:.2f} M tokens, {sum(map(len, texts)) / len(stream):.2f} characters a token", flush=True)
    return Data(stream[num_validation:].to(device), stream[:num_validation].to(device), preset)


def make_optimizer(network: Network, preset: Preset) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in network.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in network.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": preset.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=preset.learning_rate, betas=(0.9, 0.95), eps=1e-8)


def learning_rate(preset: Preset, step: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warm = min(1.0, step / preset.num_warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / preset.num_steps))
    return preset.learning_rate * warm * (0.05 + 0.95 * cosine)


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU; a CPU trains in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


class Progress:
    """A line on the first and the last step, and twice a minute between."""

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.started = self.reported = time.monotonic()

    def report(self, step: int, main_loss: Tensor, mtp_loss: Tensor) -> None:
        """Print where the run is, if it is time."""
        now, preset = time.monotonic(), self.preset
        if now - self.reported < REPORT_EVERY_S and step not in (0, preset.num_steps - 1):
            return
        self.reported = now
        tokens_per_s = (step + 1) * preset.batch_size * preset.window / max(now - self.started, 1e-9)
        print(
            f"{now - self.started:5.0f} s  step {step + 1}/{preset.num_steps}  loss {main_loss.item():.3f}"
            f"  mtp {mtp_loss.item():.3f}  {tokens_per_s:.0f} tokens/s",
            flush=True,
        )


def fit(network: Network, data: Data, preset: Preset, *, losses: Losses) -> list[float]:
    """Run all steps; returns the main loss of each."""
    optimizer, progress = make_optimizer(network, preset), Progress(preset)
    history: list[Tensor] = []
    for step in range(preset.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(preset, step)
        with mixed_precision(data.train.device):
            main_loss, mtp_loss = losses(data.batch(data.train))
        loss = main_loss + preset.mtp_loss_weight * mtp_loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), preset.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for moe in network.moe_layers():
            moe.balance(preset.bias_update * (1 - step / preset.num_steps))
        history.append(main_loss.detach())  # .item() here would wait for the device in every step
        progress.report(step, main_loss, mtp_loss)
    return [one.item() for one in history]


@torch.no_grad()
def validate(network: Network, data: Data) -> Validation:
    """Losses and draft agreement on the documents set aside."""
    network.eval()
    with mixed_precision(data.validation.device):
        batches = [data.batch(data.validation) for _ in range(NUM_VALIDATION_BATCHES)]
        main_losses, mtp_losses = zip(*(network.losses(batch) for batch in batches), strict=True)
        main_BTW, mtp_BTW = network(batches[0])
    agrees = mtp_BTW[:, :-1].argmax(-1) == main_BTW[:, 1:].argmax(-1)
    return Validation(
        main_loss=torch.stack(main_losses).mean().item(),
        mtp_loss=torch.stack(mtp_losses).mean().item(),
        draft_agreement=agrees.float().mean().item(),
    )


def train(
    preset: Preset, corpora: Sequence[Path], out: Path, *, seed: int = 0, use_compile: bool = False
) -> list[float]:
    """Train a tokenizer and a network, write the checkpoint to `out`, and return the loss of every step."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = train_tokenizer(corpora, preset.shape.vocab_size)
    data = load_data(corpora, tokenizer, preset, device=device)
    network = Network(preset.shape).to(device)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    print(f"{num_parameters / 1e6:.2f} M parameters on {device}", flush=True)
    losses: Losses = torch.compile(network.losses) if use_compile else network.losses
    history = fit(network, data, preset, losses=losses)
    found = validate(network, data)
    print(
        f"validation loss {found.main_loss:.3f}, mtp {found.mtp_loss:.3f};"
        f" draft agrees with main argmax: {found.draft_agreement:.3f}"
    )
    print(f"{out}: {export(network, tokenizer, out)} bytes of weights")
    return history
