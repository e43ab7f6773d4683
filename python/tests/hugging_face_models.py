"""Small models of transformers and diffusers' kinds, randomly initialised, each with its sample step."""

from __future__ import annotations

import torch
from model_steps import Step
from torch import Tensor, nn
from torch.nn import functional as F


class Encoding(nn.Module):
    """A variational autoencoder: what its last encoder block saves itself is saved outside of blocks, too."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.mean, self.deviation = nn.Linear(64, 16), nn.Linear(64, 16)
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, deviation = self.mean(h), self.deviation(h)
        return self.decoder(mean + torch.randn_like(mean) * (deviation / 2).exp()), mean, deviation


def encoding() -> Step:
    x = torch.rand(512, 256)

    def loss(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        made, mean, deviation = output
        return F.mse_loss(made, x) - 0.5 * (1 + deviation - mean**2 - deviation.exp()).mean()

    return Step(Encoding().train(), (x,), {}, loss)


class Skipping(nn.Module):
    """A U-Net: what its transposed convolutions return is copied into something larger, and nobody keeps it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def twice(before: int, after: int) -> nn.Sequential:
            first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
            rest = nn.BatchNorm2d(after), nn.ReLU(inplace=True)
            return nn.Sequential(first, nn.BatchNorm2d(after), nn.ReLU(inplace=True), second, *rest)

        self.down = nn.ModuleList([twice(3, width), twice(width, 2 * width)])
        self.middle, self.leave = twice(2 * width, 4 * width), nn.Conv2d(width, 3, 1)
        sizes = ((4 * width, 2 * width), (2 * width, width))
        self.up = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, 2) for before, after in sizes)
        self.joined = nn.ModuleList(twice(before, after) for before, after in sizes)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([skipped.pop(), up(x)], 1))
        return self.leave(x)


def unet(layout: torch.memory_format = torch.contiguous_format) -> Step:
    images, target = torch.randn(2, 3, 64, 64).contiguous(memory_format=layout), torch.randint(3, (2, 64, 64))
    model = Skipping().train().to(memory_format=layout)
    return Step(model, (images,), {}, lambda output: F.cross_entropy(output, target))


def gpt2(layers: int = 3, width: int = 128, vocabulary: int = 1000, length: int = 128) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        vocab_size=vocabulary,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    tokens = torch.randint(vocabulary, (2, length))
    return Step(GPT2LMHeadModel(config).train(), (), {"input_ids": tokens, "labels": tokens})


def bert() -> Step:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=3, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=1000
    )
    tokens = torch.randint(1000, (4, 64))
    mask = torch.ones_like(tokens)
    return Step(BertForMaskedLM(config).train(), (), {"input_ids": tokens, "labels": tokens, "attention_mask": mask})


def llama() -> Step:
    """The embedding is the head's weight."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=344,
        vocab_size=1000,
        tie_word_embeddings=True,
        use_cache=False,
    )
    tokens = torch.randint(1000, (2, 128))
    return Step(LlamaForCausalLM(config).train(), (), {"input_ids": tokens, "labels": tokens})


def mixtral() -> Step:
    """Experts chosen by a router."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=500,
        num_local_experts=4,
        use_cache=False,
    )
    tokens = torch.randint(500, (2, 128))
    return Step(MixtralForCausalLM(config).train(), (), {"input_ids": tokens, "labels": tokens})


def t5() -> Step:
    """Encoder and decoder: a value that all decoder blocks read, and biases that the first block hands to the rest."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=2,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_heads=4,
        vocab_size=500,
        use_cache=False,
        decoder_start_token_id=0,
    )
    tokens = torch.randint(500, (4, 64))
    return Step(T5ForConditionalGeneration(config).train(), (), {"input_ids": tokens, "labels": tokens})


def vit() -> Step:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=4, hidden_size=96, num_attention_heads=3, intermediate_size=384, image_size=64, patch_size=8
    )
    labels = torch.zeros(4, dtype=torch.long)
    kwargs = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": labels}
    return Step(ViTForImageClassification(config).train(), (), kwargs)
