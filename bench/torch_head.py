"""GPT-2 small's floor and step time with whole logits and with `linear_cross_entropy`, one CPU thread, in one process.

Steps take turns, each timed by the processor time of the process; loss and gradients must be equal to the bit.

    python bench/torch_head.py [--layers 12] [--width 768] [--words 50257] [--rounds 3]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import cairn.torch as ct
import torch
from cairn import format_bytes
from support import arguments
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel


class Language(nn.Module):
    """A GPT-2 that returns its loss alone."""

    def __init__(self, model: Any, in_chunks: bool) -> None:
        super().__init__()
        self.model, self.in_chunks = model, in_chunks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.model.transformer(tokens).last_hidden_state.flatten(0, 1)
        target, weight = F.pad(tokens, (0, 1), value=-100)[:, 1:].flatten(), self.model.lm_head.weight
        if self.in_chunks:
            return ct.linear_cross_entropy(hidden, weight, target)
        return F.cross_entropy(F.linear(hidden, weight), target)


def step(model: nn.Module, tokens: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Processor time in seconds, and loss and gradients."""
    torch.manual_seed(1)
    begin = time.process_time()
    loss = model(tokens)
    loss.backward()
    took = time.process_time() - begin
    results = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return took, results


def main() -> int:
    """Prints everything; 1 if results differ."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="of the layers, a multiple of 12")
    parser.add_argument("--words", type=int, default=50257, help="of the vocabulary")
    parser.add_argument("--rounds", type=int, default=3)
    options = arguments.parse(parser, layers=1, width=96, words=1000, rounds=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=options.layers, n_embd=options.width, vocab_size=options.words, use_cache=False)
    ).train()
    tokens = torch.randint(model.config.vocab_size, (2, 256))
    whole, chunks = Language(model, False), Language(model, True)
    equal = all(map(torch.equal, step(whole, tokens)[1], step(chunks, tokens)[1]))
    print(f"loss and gradients are {'equal' if equal else 'NOT EQUAL'}")
    times = [[step(kind, tokens)[0] for kind in (whole, chunks)] for _ in range(options.rounds)]
    before, after = (statistics.median(each) for each in zip(*times, strict=True))
    print(f"step {before:.2f} s and {after:.2f} s, {100 * (after / before - 1):+.1f} %")
    for name, kind in (("whole logits", whole), ("in chunks", chunks)):
        profile = ct.profile(kind, kwargs={"tokens": tokens}, passes=1)
        plan = ct.plan(profile, "64GiB", scope="activations")
        least = ct.plan(profile, plan.least_budget_bytes, scope="activations")
        print(f"{name}: least {format_bytes(plan.least_budget_bytes)}, plain {format_bytes(plan.plain_peak_bytes)}")
        print(*profile.notes, f"set during the {ct.explain(least).floor_at}", sep="\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
