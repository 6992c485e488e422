"""The ``Reward`` protocol, its error, and checks of what goes into a reward and comes out of it."""

import difflib
import importlib
import inspect
import linecache
import math
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

Function = TypeVar("Function", bound=Callable[..., Any])
PACKAGES = ("rewards", "rl_caption")
TARGETS: dict[str, str] = {}
"""Module outside ``PACKAGES`` -> key and name by which the user asked for it, such as
``reward my_rewards:Short``; for messages.
"""
_PYTHON = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
"""Folders of the standard library."""
BOUNDS_ROUNDING = 1e-5
"""Tolerance for rounding of float32: a score may exceed a bound b by this times max(1,
|b|).
"""


class RewardError(RuntimeError):
    """A reward could not score its input, or returned something that is not a score.

    A failing reward raises this instead of returning 0.0 or NaN, which a policy would learn from.
    """


@runtime_checkable
class Reward(Protocol):
    """A plain picklable object (never an ``nn.Module``; it may hold one) that scores captions.

    The call has the signature of TRL's reward functions, so every reward also drives
    ``GRPOTrainer`` and ``RLOOTrainer``. ``prompts``, ``completions`` and every column
    have N items; ``**columns`` absorbs columns that the reward does not know
    (``completion_ids``, ``trainer_state``, ``log_extra``, ``log_metric``, ...).

    Columns that the trainer of ``rl_caption`` passes to every reward:

    - ``references`` (``list[list[str]]``): the captions people wrote for the row's
      image, untokenised;
    - ``image_id`` (``list[str]``);
    - ``image``: paths, PIL images or objects with ``render()``; a list or tuple of
      several images is the frames of a video;
    - ``finished`` (``list[bool]``): whether the caption ended with EOS before the
      length limit; without the column, every caption counts as finished. A reward for
      which EOS is a token appends it to finished captions only.
    """

    __name__: str
    """Log key, such as ``cider``."""
    columns: frozenset[str]
    """Required columns, such as ``{"references"}``."""
    bounds: tuple[float, float]
    """Smallest and largest possible score, such as (0, 10) for CIDEr-D."""
    signature: str
    """Everything that a published score depends on (variant, parameters, EOS, document
    frequencies, backbone).
    """

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Return N scores within ``bounds``, in the order of ``completions``."""
        ...


def leaf_rewards(reward: Any) -> Iterator[Any]:
    """Yield the rewards inside a mixture or router (attribute ``rewards``),
    recursively; else ``reward`` itself.
    """
    inner_rewards = getattr(reward, "rewards", None)
    if isinstance(inner_rewards, Mapping):
        for inner in inner_rewards.values():
            yield from leaf_rewards(inner)
    else:
        yield reward


def nearest(name: str, names: Iterable[str]) -> str:
    """The name in ``names`` that is spelt most like ``name``; for messages."""
    return difflib.get_close_matches(name, list(names), 1, cutoff=0)[0]


@contextmanager
def naming(
    where: str,
    kinds: tuple[type[Exception], ...] = (OSError, ValueError),
    error: type[Exception] = ValueError,
    kept: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Context that turns exceptions of ``kinds``, but not of ``kept``, into an
    ``error`` whose message is ``where: message``.
    """
    try:
        yield
    except kinds as found:
        if isinstance(found, kept):
            raise
        raise error(f"{where}: {str(found) or type(found).__name__}") from found


@contextmanager
def errors_of_user_code(
    where: str | Mapping[str, str],
    error: type[Exception] = RewardError,
    kept: tuple[type[Exception], ...] = (RewardError,),
) -> Iterator[None]:
    """Context around calls of code that a configuration may name
    (``package.module:Name``): what a user's code raises becomes an ``error`` whose
    message is ``where``, the user's own line, and what was raised.

    Where code of several targets runs, ``where`` maps the module of each target to the
    target's name. Exceptions of ``kept`` pass unchanged. So does an exception whose
    traceback has no line of the user's code: it is a defect of this package or of a
    library. ``sys.exit`` in a user's code becomes an error, too; ``SystemExit`` from a
    signal handler of this package passes.
    """
    try:
        yield
    except (Exception, SystemExit) as raised:  # whatever people's code raises
        place = None if isinstance(raised, kept) else _place_in_user_code(raised)
        if place is None:
            raise
        module, line = place
        name = where if isinstance(where, str) else where.get(module, module)
        message = "".join(traceback.format_exception_only(raised)).strip()
        raise error(f"{name}: {line}: {message}") from raised


def _place_in_user_code(raised: BaseException) -> tuple[str, str] | None:
    """Module and line (``FILE, line N: CODE``) of the innermost frame in a user's code:
    outside this package, Python, and installed packages that are no target. None if no
    frame is.
    """
    for frame, number in reversed(list(traceback.walk_tb(raised.__traceback__))):
        module = str(frame.f_globals.get("__name__"))
        is_ours = module.split(".")[0] in PACKAGES
        if is_ours and isinstance(raised, SystemExit):
            return None  # asked for by a signal
        file = frame.f_code.co_filename
        packages = {"site-packages", "dist-packages"} & set(Path(file).parts)
        installed = packages or file.startswith((*_PYTHON, "<frozen"))
        if not is_ours and (module in TARGETS or not installed):
            line = linecache.getline(file, number).strip()
            return module, f"{file}, line {number}: {line}"
    return None


def optional(
    module: str, what: str, install: str, error: type[Exception] = ValueError
) -> Any:
    """Import an optional module.

    If it is not installed, raise ``error``: ``what`` ("x needs"), the name of the
    package, and ``pip install`` with ``install``.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0].replace("_", "-")
        raise error(
            f"{what} the package {package} ({missing}): pip install {install}"
        ) from missing


def passes_on(
    *targets: Callable[..., Any], without: Collection[str] = ()
) -> Callable[[Function], Function]:
    """Decorator for a function that passes its ``**keywords`` on to ``targets``: lists
    their parameters as its own, except the names in ``without``.

    A score then need not repeat the options of its encoder, and ``rewards.registry``
    still sees their names.
    """

    def with_signature(function: Function) -> Function:
        """Put the options of ``targets`` into the function's signature."""
        signature = inspect.signature(function)
        options = {
            name: option
            for name, option in signature.parameters.items()
            if option.kind is not option.VAR_KEYWORD
        }
        for target in targets:
            for name, option in inspect.signature(target).parameters.items():
                if name not in without:
                    keyword = option.replace(kind=option.KEYWORD_ONLY)
                    options.setdefault(name, keyword)
        function.__signature__ = signature.replace(parameters=[*options.values()])  # type: ignore[attr-defined]
        return function

    return with_signature


def as_texts(completions: Sequence[Any]) -> list[str]:
    """Return completions as strings; a list of chat messages (TRL) becomes the text of
    its last message.

    Raises:
        RewardError: an item is neither a string nor a list of ``{"role", "content"}`` messages.
    """
    return [_as_text(completion, row) for row, completion in enumerate(completions)]


def _as_text(completion: Any, row: int) -> str:
    content = completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        content = completion[-1].get("content")
        if isinstance(content, list):
            blocks = (block for block in content if isinstance(block, dict))
            content = "".join(block.get("text", "") for block in blocks)
    if isinstance(content, str):
        return content
    raise RewardError(
        f"completion {row} is {completion!r:.80}: expected a string or messages"
    )


def checked_scores(reward: Any, scores: Any, count: int) -> list[float]:
    """Return ``scores``, a list, tuple, array or tensor of ``count`` numbers, as a list
    of finite floats.

    Scores must be within ``reward.bounds``, where it has any, but for rounding
    (``BOUNDS_ROUNDING``).

    Raises:
        RewardError: another type or number of scores, or one that is no number, NaN,
            infinite or outside the bounds; the message names the first row.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    values = scores.tolist() if hasattr(scores, "tolist") else scores  # NumPy, torch
    if not isinstance(values, list | tuple) or len(values) != count:
        raise RewardError(
            f"reward {name!r} returned {scores!r:.80}: expected {count} scores"
        )
    low, high = getattr(reward, "bounds", (-math.inf, math.inf))
    least = low - BOUNDS_ROUNDING * max(1.0, abs(low))
    most = high + BOUNDS_ROUNDING * max(1.0, abs(high))
    numbers = list(map(_as_number, values))
    for row, number in enumerate(numbers):
        if not math.isfinite(number) or not least <= number <= most:
            raise RewardError(
                f"reward {name!r} returned {values[row]!r:.80} for caption {row}: expected a "
                f"finite number within its bounds, {low:g} to {high:g}"
            )
    return numbers


def _as_number(value: Any) -> float:
    """``value`` as a float; NaN where it is no number."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan  # RuntimeError: a tensor of several elements


def score_captions(
    reward: Any,
    where: str,
    prompts: Sequence[Any] | None,
    completions: Sequence[Any],
    columns: Mapping[str, Any],
) -> list[float]:
    """Call ``reward`` on N captions and return its N scores, checked by ``checked_scores``.

    Raises:
        RewardError: the reward failed, or its scores are wrong. The message begins with
            ``where``, such as ``reward term 'cider'``. Other exceptions of a user's
            reward become this error (``errors_of_user_code``).
    """
    prefixed = naming(where, (RewardError,), RewardError)
    with naming(where, (OSError,), RewardError), errors_of_user_code(where), prefixed:
        return checked_scores(
            reward, reward(prompts, completions, **columns), len(completions)
        )


def required_column(
    columns: dict[str, Any], name: str, reward: str, count: int
) -> Sequence[Any]:
    """Return the column ``name``, which must have ``count`` items.

    In the column ``image``, a list of a single image is replaced by that image. If
    there is no ``image``, TRL's column ``images`` is used; each of its rows must be a
    list of exactly one image.

    Raises:
        RewardError: the column is missing or has another length, a row has no image, or
            a row of ``images`` has several.
    """
    column = columns.get(name)
    most = math.inf
    if column is None and name == "image":
        column = columns.get("images")
        most = 1
    if column is None:
        raise RewardError(
            f"reward {reward!r} needs the column {name!r}, not {sorted(columns)}"
        )
    if len(column) != count:
        raise RewardError(
            f"reward {reward!r}: column {name!r} has {len(column)} items for {count} captions"
        )
    if name != "image":
        return column
    images = []
    for row, item in enumerate(column):
        frames = item if isinstance(item, list | tuple) else [item]
        if item is None or not 1 <= len(frames) <= most:
            raise RewardError(
                f"reward {reward!r}: row {row} has no image, or several: {item!r:.80}"
            )
        images.append(frames[0] if len(frames) == 1 else item)
    return images


def eos_captions(reward: Any, columns: dict[str, Any], count: int) -> Sequence[Any]:
    """Whether each of ``count`` captions gets EOS as a token: never if ``reward.eos``
    is false.

    Otherwise it is the column ``finished``, or true for every caption without that
    column.
    """
    if not reward.eos or columns.get("finished") is None:
        return [reward.eos] * count
    return required_column(columns, "finished", reward.__name__, count)


def reference_lists(
    columns: dict[str, Any], reward: str, count: int
) -> list[tuple[str, ...]]:
    """Return the column ``references``: one tuple of captions for each of ``count`` rows.

    Rows that hold the same list object (the K samples of an image) get the same tuple object.

    Raises:
        RewardError: the column is missing or has another length, a row has no
            reference, or a reference is not a string.
    """
    # A lazy column makes its rows when they are read: in a list they live, and their ids differ.
    rows = list(required_column(columns, "references", reward, count))
    checked: dict[int, tuple[str, ...]] = {}
    for row, captions in enumerate(rows):
        if id(captions) not in checked:
            checked[id(captions)] = _checked_references(captions, row, reward)
    return [checked[id(captions)] for captions in rows]


def _checked_references(captions: Any, row: int, reward: str) -> tuple[str, ...]:
    texts: Any = None if isinstance(captions, str) else captions
    if (
        not isinstance(texts, Sequence)
        or not texts
        or not all(isinstance(caption, str) for caption in texts)
    ):
        raise RewardError(
            f"reward {reward!r}: row {row} has the references {captions!r:.80}: expected a list of "
            f"strings"
        )
    return tuple(texts)
