"""Tiny captioners with random weights, images to caption, and captions sampled the slow way."""

import numpy as np
import torch
from PIL import Image

from rl_caption.captioners.tokens import sample_tokens
from rl_caption.captioners.transformer import TransformerCaptioner

REFERENCES = [
    ["a red circle on a grey field", "a red circle", "one circle in red"],
    ["two blue squares", "two squares on a green field", "blue squares"],
    ["a dog runs in the park", "the dog is running", "a small dog"],
    ["a train on the tracks", "a red train near a station", "a train passing by"],
]
NAMES = ["a", "b", "c"]
"""Ids of three images."""
SHAPE = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "num_heads": 4,
    "ffn_dim": 64,
    "max_positions": 16,
}


def tiny_captioner(seed=0, dropout=0.0, **shape):
    """A captioner over 16 x 16 pixels (or over regions, by ``input_kind``) that ends
    captions now and then.
    """
    torch.manual_seed(seed)
    options = {
        "image_size": 16,
        "patch_size": 8,
        "feature_dim": 6,
        **SHAPE,
        **shape,
    }
    captioner = TransformerCaptioner.from_scratch(
        REFERENCES, min_count=1, dropout=dropout, **options
    )
    captioner.policy.eval()
    return captioner


def tiny_rows(count=4, seed=0):
    """Rows with random images."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(
        0,
        256,
        (count, 16, 16, 3),
        dtype=np.uint8,
    )
    return [
        {
            "image_id": f"image-{i}",
            "image": Image.fromarray(pixels[i]),
            "references": REFERENCES[i % len(REFERENCES)],
        }
        for i in range(count)
    ]


def region_inputs(count=3):
    """Region features with different numbers of regions."""
    torch.manual_seed(5)
    mask = torch.arange(5).unsqueeze(0) < torch.tensor([[3], [5], [2]])[:count]
    return {"region_features": torch.randn(count, 5, 6), "region_mask": mask}


def token_ids(*captions, images=3):
    """[B, K, L]: captions of equal length, such as ``"5 6 2"``, the same for every image."""
    ids = [list(map(int, caption.split())) for caption in captions]
    return torch.tensor([ids] * images)


def near(one, other, atol=1e-4):
    """Whether numbers, such as logits in nats, differ by rounding alone."""
    return torch.allclose(one, other, atol=atol)


def logits_of(captioner, inputs, ids, mask=None):
    """Logits of the captioner's own policy by teacher forcing."""
    return captioner.token_logits(captioner.policy, inputs, ids, mask)


def captions_of(
    captioner,
    inputs,
    decoding,
    noise=None,
):
    """Captions that the captioner's own policy generates."""
    return captioner.generate(captioner.policy, inputs, decoding, noise)


@torch.no_grad()
def sample_slowly(
    captioner,
    inputs,
    noise,
    temperature,
    next_logits,
    ending=False,
):
    """Token ids and log-probabilities [B, K, L] of every caption sampled alone, token
    by token: the obvious way.

    ``next_logits`` gives [V] after the token ids of a caption, for the inputs of its
    image. With ``ending``, numbers of ``noise`` are changed so that the first sample of
    image i ends after i + 1 tokens.
    """
    end = captioner.eos_token_id
    tokens = torch.full(noise.shape, captioner.pad_token_id)
    scores = torch.zeros(noise.shape)
    for image, sample in np.ndindex(*noise.shape[:2]):
        one = {key: value[image : image + 1] for key, value in inputs.items()}
        ids = []
        numbers = noise[image, sample]
        for position in range(len(numbers)):
            logits = next_logits(one, ids).float()
            logits[list(captioner.forbidden)] = -torch.inf
            logprobs = (logits / temperature).log_softmax(-1)
            if ending and sample == 0 and position == image:
                probabilities = logprobs.exp()
                numbers[position] = probabilities[:end].sum() + probabilities[end] / 2
            number = numbers[position].view(1, 1)
            chosen = int(sample_tokens(logits[None], number, temperature))
            ids.append(chosen)
            tokens[image, sample, position] = chosen
            scores[image, sample, position] = logprobs[chosen]
            if chosen == end:
                break
    return tokens, scores
