# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Images as sequences: a head, a loss and a sampler around any causal model of Transformers.

    backbone = LinearAttentionModel(LinearAttentionConfig(vocab_size=1, hidden_size=256))
    model = ImageModel(backbone)
    model(images).loss.backward()  # (B, N) numbers from 0 to 255
    images = model.complete(torch.empty(4, 0, dtype=torch.long), 28 * 28)

Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236, section 4.2: every number of an
image is predicted from those before it, by a mixture of ten logistic distributions (Salimans et
al., "PixelCNN++", arXiv 1701.05517, section 2.1). The backbone takes `inputs_embeds`: half of each
embeds the number before, the other half says where in the image we are.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_linear_attention.fast.sinusoids import sinusoidal_positions

VALUES = 256  # a number of an image is one of so many
START = VALUES  # stands before the first number
MIN_LOG_SCALE = -7.0  # what is narrower has all of its weight on one number


class ImageOutput(NamedTuple):
    """loss: bits for each number ("bits per dimension"), the mean; parameters: of the mixtures,
    (B, N, 3 mixtures).
    """

    loss: Tensor
    parameters: Tensor


class ImageModel(nn.Module):
    """Predicts images: (B, N) whole numbers from 0 to 255, in the order in which they are told.

    Args:
        backbone: a causal model without a head. It needs neither tokens nor positions of its own.
        features: of the backbone's outputs, where they are not as wide as its inputs.
        mixtures: logistic distributions in a mixture.
    """

    def __init__(self, backbone: PreTrainedModel, features: int | None = None, mixtures: int = 10):
        super().__init__()
        hidden_size = backbone.config.hidden_size
        self.backbone = backbone
        self.embedding = nn.Embedding(VALUES + 1, hidden_size // 2)
        self.head = nn.Linear(features or hidden_size, 3 * mixtures)

    def forward(self, images: Tensor) -> ImageOutput:
        numbers = F.pad(images[:, :-1], (1, 0), value=START)
        output = self.backbone(inputs_embeds=self._embed(numbers), use_cache=False)
        parameters = self.head(output.last_hidden_state)
        loss = -log_likelihood(parameters, images).mean() / math.log(2)
        return ImageOutput(loss, parameters)

    def _embed(self, numbers: Tensor, first: int = 0) -> Tensor:
        """Of (B, N) numbers, the first of which comes before the one at `first`."""
        embedded = self.embedding(numbers)
        places = torch.arange(first, first + numbers.shape[1], device=numbers.device)
        positions = sinusoidal_positions(places, embedded.shape[-1]).to(embedded.dtype)
        return torch.cat([embedded, positions.expand_as(embedded)], dim=-1)

    @torch.no_grad()
    def complete(
        self,
        given: Tensor,
        length: int,
        use_cache: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws what is missing of (B, n) numbers, n from 0 on; returns (B, length) of them.

        Without the cache every number is predicted from all before it, read once more.
        """
        numbers = F.pad(given, (1, 0), value=START)
        past = {}
        for count in tqdm(range(given.shape[1], length), desc="numbers", leave=False, disable=None):
            first = count if past else 0
            output = self.backbone(
                inputs_embeds=self._embed(numbers[:, first:], first), use_cache=use_cache, **past
            )
            if use_cache:
                past = {"past_key_values": output.past_key_values}
            drawn = draw(self.head(output.last_hidden_state[:, -1]), generator)
            numbers = torch.cat([numbers, drawn[:, None]], dim=1)
        return numbers[:, 1:]


def log_likelihood(parameters: Tensor, numbers: Tensor) -> Tensor:
    """Natural logarithms of the probabilities, (...), of numbers (...) from 0 to 255 by mixtures
    (..., 3 M): M logits, means, and logarithms of scales.

    Numbers are at -1 to 1, and each has the weight of what lies nearer to it than to any other, the
    first and the last with all beyond. Equation 2 of PixelCNN++, where a difference of sigmoids
    s(u) - s(l) is s(u) s(-l) (1 - exp(l - u)), which no rounding makes 0.
    """
    logits, means, log_scales = parameters.float().chunk(3, dim=-1)
    inverse_scales = torch.exp(-log_scales.clamp(min=MIN_LOG_SCALE))
    step = 2 / (VALUES - 1)
    offsets = (numbers.float() * step - 1)[..., None] - means
    upper, lower = (offsets + step / 2) * inverse_scales, (offsets - step / 2) * inverse_scales
    inside = torch.log(-torch.expm1(-step * inverse_scales))
    is_first, is_last = (numbers == 0)[..., None], (numbers == VALUES - 1)[..., None]
    below = torch.where(is_last, 0.0, F.logsigmoid(upper))
    above = torch.where(is_first, 0.0, F.logsigmoid(-lower))
    both = torch.where(is_first | is_last, 0.0, inside)
    return torch.logsumexp(F.log_softmax(logits, dim=-1) + below + above + both, dim=-1)


def draw(parameters: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Numbers (...) from mixtures (..., 3 M) as of `log_likelihood`."""
    logits, means, log_scales = parameters.float().chunk(3, dim=-1)
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
    uniform = uniform.clamp(1e-6, 1 - 1e-6)
    choice = (logits - torch.log(-torch.log(uniform))).argmax(dim=-1, keepdim=True)
    mean, log_scale = means.gather(-1, choice), log_scales.gather(-1, choice)
    uniform = torch.rand(mean.shape, generator=generator, device=mean.device).clamp(1e-6, 1 - 1e-6)
    at = mean + torch.exp(log_scale.clamp(min=MIN_LOG_SCALE)) * torch.logit(uniform)
    return ((at[..., 0] + 1) / 2 * (VALUES - 1)).round().clamp(0, VALUES - 1).long()
