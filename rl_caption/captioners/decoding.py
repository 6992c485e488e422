"""Decoding for any captioner: sampling along a prefix tree, and (diverse) beam search.

Captions of an image that begin with the same tokens are one row of the batch until they
differ, and captions that have ended leave it. Every token is drawn with its own random
number, so this changes no caption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rewards.text.degeneration import bad_ending
from rewards.text.tokenize import tokenize
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.tokens import (
    FORBIDDEN_LOGIT,
    Generated,
    forbid,
    sample_tokens,
)

if TYPE_CHECKING:
    from rl_caption.captioners.base import Captioner, Inputs

COMPACT_AT = 1 / 8
"""Fraction of the rows that ended captions must reach before they leave the batch.
Where captions part they leave it at once, because the cache is copied anyway.
"""


@dataclass(frozen=True)
class Prefixes:
    """M different prefixes of captions, one level of the prefix tree; prefixes of an
    image are adjacent.

    Attributes:
        tokens: [M] the newest token of each prefix.
        parent: [M] index of the prefix of the previous call that each prefix extends;
            None stands for 0, 1, ..., M - 1.
        image: [M] index of each prefix's image, ascending.
    """

    tokens: Tensor
    parent: Tensor | None
    image: Tensor


NextLogits = Callable[[Prefixes | None], Tensor]
"""Returns the logits [M, V] of the tokens that follow M prefixes. None stands for the
empty prefix of every image and gives [B, V].
"""


def constrain(
    captioner: Captioner, decoding: Decoding, tokens: Tensor, logits: Tensor
) -> Tensor:
    """Apply the constraints of ``decoding`` to logits or log-probabilities [N, V] that
    follow the tokens so far, [N, t], of captions (without BOS and prompt).

    ``no_repeat_ngram_size``: tokens that would repeat an n-gram get -inf.
    ``block_trigrams``: tokens that would repeat a trigram lose 0.693 times this for
    each earlier occurrence of it; in self-critical.pytorch, where it is 2, 0.693 stands
    for ln 2. ``remove_bad_endings``: EOS gets -inf where the caption ends in one of
    ``BAD_ENDINGS`` or has no word, but not as the first token, as in
    self-critical.pytorch; words are compared, whatever tokens they are made of.
    """
    if decoding.no_repeat_ngram_size:
        from transformers.generation import NoRepeatNGramLogitsProcessor

        repeats = NoRepeatNGramLogitsProcessor(decoding.no_repeat_ngram_size)
        logits = repeats(tokens, logits)  # type: ignore[arg-type, assignment]
    length = tokens.shape[1]
    if decoding.block_trigrams and length > 2:
        trigrams = tokens.unfold(1, 3, 1)  # [N, t - 2, 3]
        repeated = (trigrams[..., :2] == tokens[:, None, -2:]).all(-1)
        penalty = repeated * (-0.693 * decoding.block_trigrams)
        logits = logits.scatter_add(1, trigrams[..., 2], penalty)
    if decoding.remove_bad_endings and length:
        texts = captioner.decode(tokens)
        bad = [bad_ending(tokenize(text)) for text in texts]
        logits = logits.clone()
        logits[
            torch.tensor(bad, device=logits.device), captioner.eos_token_id
        ] = -torch.inf
    return logits


def draw_tokens(
    logits: Tensor, noise: Tensor, decoding: Decoding, best: Tensor
) -> Tensor:
    """Draw K tokens [N, K] from each row of ``logits`` [N, V] with uniform ``noise``
    [N, K] in [0, 1); ``best`` [N, 1] is the arg max. Temperature, top-k and top-p apply
    in this order, as in Transformers.
    """
    from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

    if not decoding.top_k and decoding.top_p == 1:
        return sample_tokens(logits, noise, decoding.temperature, best)
    left: Any = logits / decoding.temperature
    if decoding.top_k:
        left = TopKLogitsWarper(decoding.top_k)(None, left)  # type: ignore[arg-type]
    if decoding.top_p < 1:
        left = TopPLogitsWarper(decoding.top_p)(None, left)  # type: ignore[arg-type]
    return sample_tokens(left, noise, 1.0)


def decode_tree(
    captioner: Captioner,
    next_logits: NextLogits,
    decoding: Decoding,
    noise: Tensor | None,
    share_prefixes: bool = True,
) -> Tensor:
    """Captions [B, R, T <= L] by sampling and arg max, padded after EOS: K samples of
    each image, then the greedy caption.

    Args:
        captioner: gives the special tokens and, for ``remove_bad_endings``, the words of tokens.
        next_logits: the model, which may keep a cache of the prefixes of the previous call.
        noise: [B, K, L] uniform numbers in [0, 1), one for each sampled token.
        share_prefixes: compute equal prefixes of an image once; off where dropout
            should differ between them.
    """
    per_image = decoding.captions_per_image
    limit = decoding.max_new_tokens
    logits = next_logits(None)
    device = logits.device
    image = torch.arange(len(logits), device=device)  # of each prefix
    prefix = image.repeat_interleave(per_image)  # of each caption
    captions = torch.arange(len(prefix), device=device)  # that have not ended
    ids = torch.full((len(prefix), limit), captioner.pad_token_id, device=device)
    for position in range(limit):
        # A caption of each prefix; rows of captions that have ended are not read.
        owner = torch.zeros_like(image).scatter_(0, prefix, captions)
        logits = forbid(logits, captioner.forbidden)
        logits = constrain(captioner, decoding, ids[owner, :position], logits)
        chosen = best = logits.argmax(-1, keepdim=True)
        if decoding.num_samples:
            assert noise is not None, "samples need a number for each token"
            drawn = draw_tokens(logits, noise[image, :, position], decoding, best)
            chosen = torch.cat([drawn, best], dim=1)
        tokens = chosen[prefix, captions % per_image]
        ids[captions, position] = tokens
        goes_on = (tokens != captioner.eos_token_id).nonzero().squeeze(-1)
        if position + 1 == limit or not len(goes_on):
            break
        captions = captions[goes_on]
        tokens = tokens[goes_on]
        parent = prefix[goes_on]
        prefix = torch.arange(len(captions), device=device)
        if share_prefixes:
            vocabulary = logits.shape[-1]
            pairs, prefix = (parent * vocabulary + tokens).unique(return_inverse=True)
            tokens = pairs % vocabulary
            parent = pairs // vocabulary
        prefixes = Prefixes(tokens, parent, image[parent])
        many = len(tokens) > (1 - COMPACT_AT) * len(image)
        if many and (parent.diff() > 0).all():
            # No captions have parted: all rows stay; the few that have ended get padding.
            prefix = parent[prefix]
            newest = torch.full_like(image, captioner.pad_token_id)
            newest[parent] = tokens
            prefixes = Prefixes(newest, None, image)
        image = prefixes.image
        logits = next_logits(prefixes)
    return ids[:, : position + 1].unflatten(0, (-1, per_image))


def beam_search(
    captioner: Captioner, next_logits: NextLogits, decoding: Decoding
) -> Generated:
    """The R best captions of each of B images by beam search in G groups of W beams,
    with their scores.

    A finished caption is scored by its log-probability / length**``length_penalty``
    (length in tokens, EOS included). A group is done when its best W finished captions
    score at least as high as the best of its open beams does at its present length
    (Transformers' ``early_stopping=False``). Captions that reach the length limit count
    as finished. An image whose groups are done leaves the batch.

    Groups make it diverse beam search with Hamming diversity (Vijayakumar et al.,
    "Diverse Beam Search for Improved Description of Complex Scenes", AAAI 2018): a
    token loses ``diversity_penalty`` of log-probability for each beam of an earlier
    group that continues with it at the same step. As in Transformers, the penalties
    stay in the scores. Tokens that constraints exclude have probability 0; the others
    are not renormalised.
    """
    width = decoding.num_beams
    groups = decoding.num_beam_groups
    limit = decoding.max_new_tokens
    eos = captioner.eos_token_id
    logits = next_logits(None).repeat_interleave(width, 0)
    device = logits.device
    active = torch.arange(len(logits) // width, device=device)  # images not done
    shape = (len(active), groups, width // groups)
    rows = active.view(-1, 1, 1).expand(shape)  # prefix of each beam in the latest call
    scores = torch.full(shape, -torch.inf, device=device)  # of the open beams
    best_scores = scores.double()  # of finished captions
    best = torch.full((*shape, limit), captioner.pad_token_id, device=device)
    prefixes = best.clone()
    scores[..., 0] = 0.0  # all beams are equal at first: only one of a group counts
    going = scores[..., 0] == 0  # groups that are not done
    for length in range(1, limit + 1):
        logprobs = forbid(logits, captioner.forbidden).log_softmax(-1)
        earlier = prefixes[..., : length - 1].flatten(0, 2)
        logprobs = constrain(captioner, decoding, earlier, logprobs)
        logprobs = logprobs.unflatten(0, scores.shape)
        ended_scores, ended_parent, scores, parent, token = _extend_beams(
            scores, logprobs, going, decoding.diversity_penalty, eos
        )
        ended = prefixes.take_along_dim(ended_parent.unsqueeze(-1), 2)
        ended[..., length - 1] = eos
        prefixes = prefixes.take_along_dim(parent.unsqueeze(-1), 2)
        prefixes[..., length - 1] = token
        divisor = length**decoding.length_penalty
        ended_scores = ended_scores.double() / divisor
        ended_scores = ended_scores.where(going.unsqueeze(-1), -torch.inf)
        best_scores[active], best[active] = _best(
            torch.cat([best_scores[active], ended_scores], -1),
            torch.cat([best[active], ended], -2),
            shape[-1],
        )
        present = scores.double() / divisor
        going &= best_scores[active, :, -1] < present[..., 0]
        stay = going.any(1)
        if length == limit or not stay.any():
            break
        rows = rows.take_along_dim(parent, 2)
        active, going, scores, prefixes, token, rows = (
            some[stay] for some in (active, going, scores, prefixes, token, rows)
        )
        image = active.repeat_interleave(width)
        logits = next_logits(Prefixes(token.flatten(), rows.flatten(), image))
        rows = torch.arange(len(image), device=device).view(scores.shape)
    open_scores = present.where(going.unsqueeze(-1), -torch.inf)
    best_scores[active], best[active] = _best(
        torch.cat([best_scores[active], open_scores], -1),
        torch.cat([best[active], prefixes], -2),
        shape[-1],
    )
    best_scores, captions = _best(
        best_scores.flatten(1), best.flatten(1, 2), decoding.num_return_sequences
    )
    return Generated(captions[..., :length], best_scores.float())


def _extend_beams(
    scores: Tensor, logprobs: Tensor, going: Tensor, diversity_penalty: float, eos: int
) -> tuple[Tensor, ...]:
    """Extend the beams with ``scores`` [A, G, W] by one token, from ``logprobs`` [A, G,
    W, V]. Tokens that groups choose while they are ``going`` [A, G] are penalised in
    later groups.

    Returns five tensors [A, G, W], best first: scores and parent beams of the captions
    that end now (a score of -inf stands for none), and scores, parent beams and tokens
    of the beams that stay open.
    """
    width = scores.shape[-1]
    vocabulary = logprobs.shape[-1]
    uses = torch.zeros_like(logprobs[:, 0, 0])  # by how many earlier groups
    extensions = []
    for group in range(scores.shape[1]):
        added = logprobs[:, group] - diversity_penalty * uses.unsqueeze(1)
        extended = scores[:, group].unsqueeze(-1) + added
        # 2 W, so that W stay open even if W end.
        best, index = extended.flatten(1).topk(2 * width, dim=-1)
        best = best.masked_fill(best < FORBIDDEN_LOGIT / 2, -torch.inf)
        parent = index // vocabulary
        token = index % vocabulary
        ends = (token == eos) & best.isfinite()
        ended = best.where(ends, -torch.inf)
        order = ends.long().sort(dim=-1, stable=True).indices[:, :width]
        kept = [some.gather(1, order) for some in (best, parent, token)]
        extensions.append([ended[:, :width], parent[:, :width], *kept])
        counted = going[:, group, None].expand_as(order)
        uses.scatter_add_(1, kept[-1], counted.float())
    return tuple(torch.stack(some, 1) for some in zip(*extensions, strict=True))


def _best(scores: Tensor, captions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Scores and captions of the ``count`` best of N captions [..., N, L] by ``scores``
    [..., N], best first; equal scores keep their order.
    """
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    order = order[..., :count].unsqueeze(-1)
    return scores[..., :count], captions.take_along_dim(order, -2)


def select_rows(inputs: Inputs, rows: Tensor) -> Inputs:
    """The inputs of some rows of a batch, in order."""
    return {name: value[rows] for name, value in inputs.items()}


def logits_without_cache(
    captioner: Captioner, policy: nn.Module, inputs: Inputs
) -> NextLogits:
    """``Captioner.next_logits`` without a cache: ``token_logits`` of all tokens of every prefix."""
    first = next(iter(inputs.values()))
    # All tokens of each prefix and a padding token, whose logits are the next token's.
    ids = torch.full((len(first), 1), captioner.pad_token_id, device=first.device)

    def next_logits(prefixes: Prefixes | None) -> Tensor:
        """Logits [N, V] after each prefix; all its tokens are computed anew."""
        nonlocal ids
        expanded = inputs
        if prefixes is not None:
            expanded = select_rows(inputs, prefixes.image)
            if prefixes.parent is not None:
                ids = ids[prefixes.parent]
            before, padding = ids[:, :-1], ids[:, -1:]
            ids = torch.cat([before, prefixes.tokens.unsqueeze(1), padding], dim=1)
        return captioner.token_logits(policy, expanded, ids.unsqueeze(1))[:, 0, -1]

    return next_logits
