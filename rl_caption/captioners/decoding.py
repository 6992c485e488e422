"""Decoding for any captioner: sampling along a prefix tree, and (diverse) beam search.

Captions of an image that begin with the same tokens are one row of the batch until they differ, and
captions that have ended leave it. Every token is drawn with its own random number, so this changes
no caption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

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
    from rl_caption.captioners.base import Captioner

Processor = Callable[[Tensor, Tensor], Tensor]
"""Changes the logits or log-probabilities [N, V] of the next tokens, given the tokens of the
captions so far [N, t], without BOS and prompt. It is called as Transformers' ``LogitsProcessor``
is.
"""

COMPACT_AT = 1 / 8
"""Ended captions leave the batch at once where captions part, because the cache is copied anyway;
elsewhere when they are this fraction of the rows.
"""


@dataclass(frozen=True)
class Prefixes:
    """M different prefixes of captions, one level of the prefix tree; those of an image are
    adjacent.

    Attributes:
        tokens: [M] the newest token of each.
        parent: [M] index of the prefix of the previous call that each extends; None stands for 0,
            1, ..., M - 1.
        image: [M] index of the image of each, ascending.
    """

    tokens: Tensor
    parent: Tensor | None
    image: Tensor

    def extend(self, earlier: Tensor) -> Tensor:
        """All tokens [M, t + 1] of the prefixes, from the tokens ``earlier`` [., t] of those of the
        previous call.
        """
        before = earlier if self.parent is None else earlier[self.parent]
        return torch.cat([before, self.tokens.unsqueeze(1)], dim=1)


Finished: TypeAlias = list[tuple[float, list[int]]]
"""Ended captions of a group of beams or of an image: score and token ids of each."""
NextLogits = Callable[[Prefixes | None], Tensor]
"""Returns the logits [M, V] of the tokens that follow M prefixes. None stands for the empty prefix
of every image and gives [B, V].
"""


@torch.no_grad()
def decode_with_scores(
    captioner: Captioner,
    next_logits: NextLogits,
    images: int,
    decoding: Decoding,
    noise: Tensor | None,
    share_prefixes: bool = True,
) -> Generated:
    """Decode captions of B images by sampling, arg max or beam search.

    Args:
        captioner: gives the special tokens and, for ``remove_bad_endings``, the words of tokens.
        next_logits: the model, which may keep a cache of the prefixes of the previous call.
        images: B.
        noise: [B, K, L] uniform numbers in [0, 1), one for each sampled token.
        share_prefixes: compute equal prefixes of an image once; off where dropout should differ
            between them.

    Returns:
        Token ids [B, R, T] padded after EOS, T <= L: K samples, then
        the greedy caption. With beam search the R best captions and their scores.

    Raises:
        ValueError: samples are to be drawn and ``noise`` is None.
    """
    if decoding.num_beams > 1:
        return beam_search(captioner, next_logits, images, decoding)
    if decoding.num_samples and noise is None:
        raise ValueError(
            "sampling needs noise [B, K, L]: one uniform number for each token"
        )
    if decoding.has_constraints:
        next_logits = _add_processors(next_logits, constraints(captioner, decoding))
    return Generated(
        _decode_tree(captioner, next_logits, images, decoding, noise, share_prefixes),
        None,
    )


def constraints(captioner: Captioner, decoding: Decoding) -> list[Processor]:
    """Processors that depend on the tokens before: repeated n-grams, repeated trigrams, bad
    endings.
    """
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

    processors: list[Processor] = []
    if decoding.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(decoding.no_repeat_ngram_size))
    if decoding.block_trigrams:
        processors.append(partial(penalise_trigrams, alpha=decoding.block_trigrams))
    if decoding.remove_bad_endings:
        processors.append(
            partial(
                refuse_bad_endings,
                decode=captioner.decode,
                eos_token_id=captioner.eos_token_id,
            )
        )
    return processors


def truncations(decoding: Decoding) -> list[Processor]:
    """Processors that truncate the distribution of samples, in the order of Transformers."""
    from transformers.generation.logits_process import (
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors: list[Processor] = []
    if decoding.top_k:
        processors.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p < 1:
        processors.append(TopPLogitsWarper(decoding.top_p))
    return processors


def penalise_trigrams(tokens: Tensor, logits: Tensor, alpha: float) -> Tensor:
    """Lower the logit of a token that would repeat a trigram by 0.693 ``alpha`` for each earlier
    occurrence of it.

    As self-critical.pytorch's ``block_trigrams``, where alpha is 2 and 0.693 stands for ln 2.
    """
    if tokens.shape[1] < 3:
        return logits
    trigrams = tokens.unfold(1, 3, 1)  # [N, t - 2, 3]
    repeated = (trigrams[..., :2] == tokens[:, None, -2:]).all(-1)
    return logits.scatter_add(1, trigrams[..., 2], repeated * (-0.693 * alpha))


def refuse_bad_endings(
    tokens: Tensor,
    logits: Tensor,
    decode: Callable[[Tensor], list[str]],
    eos_token_id: int,
) -> Tensor:
    """Set the logit of EOS to -inf where the caption so far ends in one of ``BAD_ENDINGS`` or has
    no word.

    The first token is left alone. Captions are compared by words, whatever tokens those are made
    of. After self-critical.pytorch's ``remove_bad_endings``.
    """
    if not tokens.shape[1]:
        return logits
    bad = torch.tensor(
        [bad_ending(tokenize(text)) for text in decode(tokens)], device=logits.device
    )
    logits = logits.clone()
    logits[bad, eos_token_id] = -torch.inf
    return logits


def _add_processors(next_logits: NextLogits, processors: list[Processor]) -> NextLogits:
    """``next_logits`` followed by ``processors``, which are given all tokens of every prefix."""
    earlier = torch.empty(0)

    def processed_logits(prefixes: Prefixes | None) -> Tensor:
        """The logits of ``next_logits`` [P, V] after every processor."""
        nonlocal earlier
        logits = next_logits(prefixes).float()
        if prefixes is None:
            earlier = torch.empty(
                len(logits), 0, dtype=torch.long, device=logits.device
            )
        else:
            earlier = prefixes.extend(earlier)
        for process in processors:
            logits = process(earlier, logits)
        return logits

    return processed_logits


def draw_tokens(
    logits: Tensor,
    noise: Tensor,
    decoding: Decoding,
    truncate: Sequence[Processor],
    best: Tensor,
) -> Tensor:
    """Draw K tokens [N, K] from each of the distributions of ``logits`` [N, V] by ``noise`` [N, K];
    ``best`` [N, 1] is the arg max.
    """
    if not truncate:
        return sample_tokens(logits, noise, decoding.temperature, best)
    left = logits / decoding.temperature
    for process in truncate:
        left = process(torch.empty(0), left)
    return sample_tokens(left, noise, 1.0)


def _decode_tree(
    captioner: Captioner,
    next_logits: NextLogits,
    images: int,
    decoding: Decoding,
    noise: Tensor | None,
    share_prefixes: bool,
) -> Tensor:
    per_image = decoding.captions_per_image
    limit = decoding.max_new_tokens
    truncate = truncations(decoding)
    logits = forbid(next_logits(None), captioner.forbidden)
    image = torch.arange(images, device=logits.device)  # of each prefix
    captions = torch.arange(
        images * per_image, device=logits.device
    )  # that have not ended
    prefix = image.repeat_interleave(per_image)  # of each caption
    ids = torch.full(
        (len(captions), limit), captioner.pad_token_id, device=logits.device
    )
    for position in range(limit):
        chosen = best = logits.argmax(-1, keepdim=True)
        if noise is not None and decoding.num_samples:
            drawn = draw_tokens(
                logits, noise[image, :, position], decoding, truncate, best
            )
            chosen = torch.cat([drawn, best], dim=1)
        tokens = chosen[prefix, captions % per_image]
        ids[captions, position] = tokens
        (goes_on,) = (tokens != captioner.eos_token_id).nonzero(as_tuple=True)
        if position + 1 == limit or not len(goes_on):
            break
        captions = captions[goes_on]
        tokens = tokens[goes_on]
        parent = prefix[goes_on]
        if share_prefixes:
            vocabulary = logits.shape[-1]
            pairs, prefix = torch.unique(
                parent * vocabulary + tokens, return_inverse=True
            )
            tokens = pairs % vocabulary
            parent = pairs // vocabulary
        else:
            prefix = torch.arange(len(captions), device=logits.device)
        prefixes = Prefixes(tokens, parent, image[parent])
        if len(tokens) > (1 - COMPACT_AT) * len(image) and bool(
            (parent.diff() > 0).all()
        ):
            # None have parted and few have ended: all rows stay, the ended ones with padding as
            # their next token.
            in_place = torch.full_like(image, captioner.pad_token_id).index_copy_(
                0, parent, tokens
            )
            prefix = parent[prefix]
            prefixes = Prefixes(in_place, None, image)
        image = prefixes.image
        logits = forbid(next_logits(prefixes), captioner.forbidden)
    return ids[:, : position + 1].unflatten(0, (images, per_image))


@torch.no_grad()
def beam_search(
    captioner: Captioner, next_logits: NextLogits, images: int, decoding: Decoding
) -> Generated:
    """The R best captions of each of B images, by beam search of width W in G groups of W / G
    beams.

    A finished caption is scored by its log-probability / length**``length_penalty`` (length in
    tokens, EOS included). A group is done when its best W / G finished captions score at least as
    high as the best of its open beams does at its present length (Transformers'
    ``early_stopping=False``). Captions that reach the length limit count as finished. An image
    whose groups are done leaves the batch.

    Groups make it diverse beam search with Hamming diversity (Vijayakumar et al., "Diverse Beam
    Search for Improved
    Description of Complex Scenes", AAAI 2018): a token loses ``diversity_penalty`` of
    log-probability for each beam of an earlier group that continues with it at the same step. As in
    Transformers, the penalties stay in the scores. Tokens that constraints exclude have probability
    0; the others are not renormalised.
    """
    width = decoding.num_beams
    groups = decoding.num_beam_groups
    limit = decoding.max_new_tokens
    each = width // groups
    penalty = decoding.length_penalty
    processors = constraints(captioner, decoding)
    finished: list[list[Finished]] = [
        [[] for _ in range(groups)] for _ in range(images)
    ]
    logits = next_logits(None).repeat_interleave(width, 0)
    device = logits.device
    active = torch.arange(images, device=device)  # images that are not done
    going = torch.ones(
        images, groups, dtype=torch.bool, device=device
    )  # groups that are not done
    scores = torch.full((images, groups, each), -torch.inf, device=device)
    scores[..., 0] = 0.0  # all beams are equal at first: only one of a group counts
    prefixes = torch.empty(images, width, 0, dtype=torch.long, device=device)
    for length in range(1, limit + 1):
        logprobs = forbid(logits, captioner.forbidden).log_softmax(-1)
        for process in processors:
            logprobs = process(prefixes.flatten(0, 1), logprobs)
        logprobs = logprobs.unflatten(0, (len(active), groups, each))
        ended = [finished[image] for image in active.tolist()]
        scores, parent, token = _extend_groups(
            decoding, captioner.eos_token_id, logprobs, scores, prefixes, going, ended
        )
        rows = parent.flatten(1) + width * torch.arange(
            len(active), device=device
        ).unsqueeze(1)
        token = token.flatten(1)
        prefixes = torch.cat(
            [prefixes.flatten(0, 1)[rows], token.unsqueeze(-1)], dim=-1
        )
        firsts = (scores[..., 0].double() / length**penalty).tolist()
        going &= torch.tensor(
            [
                [_can_improve(*pair, each) for pair in zip(of_image, best, strict=True)]
                for of_image, best in zip(ended, firsts, strict=True)
            ],
            device=device,
        )
        stay = going.any(1).nonzero().squeeze(1)
        active, going, scores, prefixes, token, rows = (
            tensor[stay] for tensor in (active, going, scores, prefixes, token, rows)
        )
        if not len(active) or length == limit:
            break
        image_of = active.repeat_interleave(width)
        # At first there was one prefix an image.
        before = image_of if length == 1 else rows.flatten()
        logits = next_logits(Prefixes(token.flatten(), before, image_of))
    open_scores = (scores.double() / limit**penalty).tolist()
    captions = prefixes.unflatten(1, (groups, each)).tolist()
    for row, group in going.nonzero().tolist():
        pairs = zip(open_scores[row][group], captions[row][group], strict=True)
        finished[active[row]][group] += [pair for pair in pairs if pair[0] > -torch.inf]
    return _n_best(finished, each, decoding.num_return_sequences, captioner, device)


def _extend_groups(
    decoding: Decoding,
    eos_token_id: int,
    logprobs: Tensor,
    scores: Tensor,
    prefixes: Tensor,
    going: Tensor,
    finished: Sequence[Sequence[Finished]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Extend the beams of A images by one token; returns scores, parents and tokens [A, G, W / G]
    of the open ones.

    Captions that end are added to ``finished`` (by image and group) unless their group is done
    (``going`` [A, G] is False). ``logprobs`` is [A, G, W / G, V], ``scores`` [A, G, W / G],
    ``prefixes`` [A, W, length so far].
    """
    groups, width = scores.shape[1:]
    divisor = (prefixes.shape[-1] + 1) ** decoding.length_penalty
    chosen_before = torch.zeros_like(
        logprobs[:, 0, 0]
    )  # how many earlier groups took a token
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for group in range(groups):
        candidates = logprobs[:, group]
        if groups > 1:
            candidates = (
                candidates - decoding.diversity_penalty * chosen_before.unsqueeze(1)
            )
        best, parent, token = _best_extensions(scores[:, group], candidates)
        parent = parent + group * width
        ends = (token == eos_token_id) & best.isfinite()
        for row, rank in (ends[:, :width] & going[:, group, None]).nonzero().tolist():
            caption = [*prefixes[row, parent[row, rank]].tolist(), eos_token_id]
            finished[row][group].append((best[row, rank].item() / divisor, caption))
        # Candidates that go on, best first.
        order = ends.long().sort(dim=-1, stable=True).indices[:, :width]
        kept.append(
            (best.gather(1, order), parent.gather(1, order), token.gather(1, order))
        )
        counted = going[:, group, None].float().expand(-1, width)
        chosen_before.scatter_add_(1, kept[-1][2], counted)
    scores, parent, token = (
        torch.stack(tensors, dim=1) for tensors in zip(*kept, strict=True)
    )
    return scores, parent, token


def _best_extensions(scores: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 2 W best extensions of W beams by one token, so that W stay open even if W end.

    From ``scores`` [A, W] and ``logprobs`` [A, W, V]: scores, beams and tokens [A, 2 W], best
    first; extensions by a forbidden token have the score -inf.
    """
    best, index = (
        (scores.unsqueeze(-1) + logprobs).flatten(1).topk(2 * scores.shape[1], dim=-1)
    )
    best = best.masked_fill(best < FORBIDDEN_LOGIT / 2, -torch.inf)
    vocabulary = logprobs.shape[-1]
    return best, index // vocabulary, index % vocabulary


def _best(captions: Finished, count: int) -> Finished:
    """The ``count`` captions with the highest scores, best first; of equal ones, the first."""
    return sorted(captions, key=lambda item: -item[0])[:count]


def _can_improve(finished: Finished, score: float, count: int) -> bool:
    """Whether an open beam of ``score`` beats one of the best ``count`` of ``finished``, which
    keeps no others.
    """
    finished[:] = _best(finished, count)
    return len(finished) < count or finished[-1][0] < score


def _n_best(
    finished: list[list[Finished]],
    each: int,
    count: int,
    captioner: Captioner,
    device: torch.device,
) -> Generated:
    """The best ``count`` captions of each image, of at most ``each`` of a group; if there are
    fewer, empty ones with the score -inf.
    """
    scores: list[list[float]] = []
    flat: list[Tensor] = []
    for of_image in finished:
        captions = [*chain.from_iterable(_best(group, each) for group in of_image)]
        captions = _best(captions + [(-torch.inf, [])] * count, count)
        scores.append([score for score, _ in captions])
        flat += [torch.tensor(ids, dtype=torch.long) for _, ids in captions]
    padded = nn.utils.rnn.pad_sequence(
        flat, batch_first=True, padding_value=captioner.pad_token_id
    )
    ids = padded.to(device).unflatten(0, (len(finished), count))
    return Generated(ids, torch.tensor(scores, device=device))


def select_rows(inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """The inputs of some rows of a batch, in order."""
    return {name: value[rows] for name, value in inputs.items()}


def logits_without_cache(
    captioner: Captioner, policy: nn.Module, inputs: dict[str, Tensor]
) -> NextLogits:
    """``Captioner.next_logits`` without a cache: ``token_logits`` of all tokens of every prefix."""
    first = next(iter(inputs.values()))
    earlier = torch.empty(len(first), 0, dtype=torch.long, device=first.device)

    def next_logits(prefixes: Prefixes | None) -> Tensor:
        """Logits [P, V] after all tokens of each of P prefixes."""
        nonlocal earlier
        expanded = inputs
        if prefixes is not None:
            earlier = prefixes.extend(earlier)
            expanded = select_rows(inputs, prefixes.image)
        ids = nn.functional.pad(
            earlier, (0, 1), value=captioner.pad_token_id
        )  # its logits are those of the next token
        return captioner.token_logits(policy, expanded, ids.unsqueeze(1))[:, 0, -1]

    return next_logits
