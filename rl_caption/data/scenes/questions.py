"""Exact multiple-choice questions about scenes, for the reward ``caption_qa``, and what a caption answers to them.

Every fact of a scene (``world.facts``) whose subject a question can name has a question. The choices are values that
are false of the scene, but for the answer.
"""

import re
from collections.abc import Iterator, Sequence

from rewards.language.caption_qa import ImageQuestion
from rl_caption.data.scenes.language import NUMBERS, plural
from rl_caption.data.scenes.oracle import Chunk, Parse, parse
from rl_caption.data.scenes.world import (
    BACKGROUNDS,
    COLOURS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Draws,
    Kind,
    Scene,
    relations_between,
)

CHOICES = 4
"""Most choices of a question."""
INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_BACKGROUND = "What colour is the background?"
_SHAPE = "Which of these shapes is in the image?"
_SINGULAR = {plural(shape): shape for shape in SHAPES}
_ATTRIBUTE = re.compile(r"What (colour|size|texture) (?:is|are) the (?:(\w+) )?(\w+)\?")
_COUNT = re.compile(r"How many (\w+) (\w+) are there\?")
_RELATION = re.compile(r"Seen from the (\w+) (\w+), where (?:is|are) the (\w+) (\w+)\?")


def scene_questions(scene: Scene, seed: int = 0, count: int | None = None) -> list[ImageQuestion]:
    """Questions about a scene, ``count`` of them at most (None: all), in random order; a pure function.

    They are about the background; the shape, colour, size, texture and number of things; and where things are, seen
    from others. The answer to each is in ``language.long_reference``.
    """
    draws = Draws("questions", seed, repr(scene))
    questions = draws.permute(list(_questions(scene, draws)))
    return questions if count is None else questions[:count]


def _questions(scene: Scene, draws: Draws) -> Iterator[ImageQuestion]:
    def choose(question: str, answer: str, values: Sequence[str]) -> ImageQuestion:
        others = draws.permute([value for value in values if value != answer])[: CHOICES - 1]
        return {"question": question, "choices": draws.permute([answer, *others]), "answer": answer}

    yield choose(_BACKGROUND, scene.background, BACKGROUNDS)
    shapes = [kind.shape for kind in scene.kinds]
    for index, kind in enumerate(scene.kinds):
        be = "is" if len(kind.things) == 1 else "are"
        yield choose(_SHAPE, kind.shape, [shape for shape in SHAPES if shape not in shapes])
        if shapes.count(kind.shape) == 1:
            yield choose(f"What colour {be} the {_noun(kind)}?", kind.colour, COLOURS)
        yield choose(f"What size {be} the {kind.colour} {_noun(kind)}?", kind.size, SIZES)
        yield choose(f"What texture {be} the {kind.colour} {_noun(kind)}?", kind.texture, TEXTURES)
        if len(kind.things) > 1:
            yield choose(
                f"How many {kind.colour} {_noun(kind)} are there?",
                NUMBERS[len(kind.things)],
                NUMBERS[2:],
            )
        for other in scene.kinds[index + 1 :]:
            if relations := relations_between(kind, other):
                false = [relation for relation in RELATIONS if relation not in relations]
                where = f"Seen from the {other.colour} {_noun(other)}, where {be} the {kind.colour} {_noun(kind)}?"
                yield choose(where, relations[0], false)


def _noun(kind: Kind) -> str:
    return kind.shape if len(kind.things) == 1 else plural(kind.shape)


def read_answer(caption: str, question: ImageQuestion) -> str | None:
    """The choice that a caption states, read by the oracle's parser; None where it states none of them, or several.

    Raises:
        ValueError: the question is none of ``scene_questions``.
    """
    stated = _stated(parse(caption), question["question"])
    answers = {value for value in stated if value in question["choices"]}
    return answers.pop() if len(answers) == 1 else None


def _stated(parsed: Parse, question: str) -> list[str]:
    """Everything that a caption states about what a question asks for."""
    if question == _BACKGROUND:
        return list(parsed.backgrounds)
    if question == _SHAPE:
        return [thing.shape for thing in parsed.things if thing.shape is not None]
    if match := _ATTRIBUTE.fullmatch(question):
        attribute, colour, noun = match.groups()
        things = [thing for thing in parsed.things if _may_be(thing, colour, noun)]
        return [value for thing in things for name, value in thing.attributes if name == attribute]
    if match := _COUNT.fullmatch(question):
        counts = [thing.number for thing in parsed.things if _may_be(thing, *match.groups())]
        return [
            NUMBERS[number] for number in counts if number is not None and number < len(NUMBERS)
        ]
    if match := _RELATION.fullmatch(question):
        from_colour, from_noun, colour, noun = match.groups()
        stated = []
        for first, relation, second in parsed.relations:
            ends = parsed.things[first], parsed.things[second]
            for (one, other), name in ((ends, relation), (ends[::-1], INVERSE[relation])):
                if _may_be(one, colour, noun) and _may_be(other, from_colour, from_noun):
                    stated.append(name)
        return stated
    raise ValueError(f"{question!r:.80} is no question about a generated scene")


def _may_be(thing: Chunk, colour: str | None, noun: str) -> bool:
    """Whether a thing of a caption has this shape, and no other colour."""
    colours = [value for name, value in thing.attributes if name == "colour"]
    return thing.shape == _SINGULAR.get(noun, noun) and (
        colour is None or colours in ([], [colour])
    )
