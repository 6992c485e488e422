"""One step of an embedding model: the gradient is that of the loss of the whole batch,
however the batch is split.
"""

from operator import attrgetter

import pytest
import torch
from accelerate import Accelerator

from rewards.clip.student import LCLIP, LCLIPConfig
from rl_caption.reward_models.batch import PairBatch
from rl_caption.reward_models.encoders import (
    TrainedEncoder,
    random_clip,
    train_only,
    trained_clip,
)
from rl_caption.reward_models.task import EmbeddingTask, concatenate
from tests.reward_models_for_tests import CLIP, CLIP_TASKS, RESNET, STUDENT, config_of

EOT = 49407
TRIPLET = ("text_base", "text_positive", "text_negative")


def pairs(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 49000, (count, 6), generator=generator)
    ids[:, 4], ids[:, 5] = EOT, 0
    texts = {name: ids.roll(shift, 0) for shift, name in enumerate(("text", *TRIPLET))}
    image = torch.randn(
        count,
        3,
        32,
        32,
        generator=generator,
    )
    generated = {
        "image_generated": image.flip(-1),
        "text_generated": ids.roll(4, 0),
    }
    return {
        "image": image,
        **texts,
        **generated,
    }


def split(inputs, size):
    captions = ["a", "b", "a", "c", "d", "a", "b", "e"]
    counts = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    rows = [{"image_id": str(index)} for index in range(8)]
    batches = []
    for start in range(0, 8, size):
        span = slice(start, start + size)
        part = {name: value[span] for name, value in inputs.items()}
        target = {"triplet": counts[span]}
        batches.append(PairBatch(rows[span], part, captions[span], target))
    return batches


def clip_towers(**vision):
    torch.manual_seed(3)
    shape = CLIP | {"vision_cfg": CLIP["vision_cfg"] | vision}
    return trained_clip(random_clip(None, shape)[0]).train()


def student_towers():
    torch.manual_seed(4)
    model = LCLIP(LCLIPConfig(**STUDENT))
    towers = {"image": model.image, "text": model.text}
    return TrainedEncoder(torch.nn.ModuleDict(towers), towers)


class Lookup:
    """A teacher that knows its embeddings by image id."""

    def __init__(self):
        generator = torch.Generator().manual_seed(8)
        tables = torch.randn(2, 8, 16, generator=generator)
        self.table = dict(zip(("image", "text"), tables, strict=True))

    def __call__(self, batch):
        index = [int(row["image_id"]) for row in batch.rows]
        return {name: rows[index] for name, rows in self.table.items()}


def target_of(task):
    return {"distill": Lookup()}.get(task, attrgetter("targets"))


def objective(task):
    model = {"model": {"init": "x"}} if task == "positive_augmented" else {}
    return config_of(task, **model).objective()


def gradients(network):
    """By parameter."""
    return {
        name: value.grad.clone()
        for name, value in network.named_parameters()
        if value.grad is not None
    }


def step(network, task, batches):
    """The gradient of one step by parameter, and what was logged."""
    network.zero_grad()
    accelerator = Accelerator(cpu=True)
    trained = EmbeddingTask(accelerator, network, objective(task), target_of(task))
    (log,) = trained.training_step(batches, 0)
    return gradients(network), log.reduce(accelerator)


def gradient_of(network, loss):
    """The gradient of ``loss`` by parameter."""
    network.zero_grad()
    loss.backward()
    return gradients(network)


def assert_equal(one, other):
    """Equal up to the rounding of float32, which goes with the size of a parameter's
    gradient (up to 20 here).
    """
    assert one.keys() == other.keys()
    norms = torch.stack([value.norm() for value in one.values()])
    assert norms.norm() > 1e-2, "a gradient of zero proves nothing"
    for name in one:
        atol = 1e-6 * max(1.0, one[name].abs().max().item())
        assert torch.allclose(one[name], other[name], atol=atol), name


NETWORKS = dict.fromkeys(CLIP_TASKS, clip_towers) | {"distill": student_towers}


@pytest.mark.parametrize("task", sorted(NETWORKS))
def test_the_gradient_is_that_of_the_loss_of_the_whole_batch_however_it_is_split(task):
    network, inputs = NETWORKS[task](), pairs(8)
    target = target_of(task)(split(inputs, 8)[0])
    loss, _ = objective(task)(network(inputs), target)
    expected = gradient_of(network, loss)
    for size in (8, 4, 1):
        found, logged = step(network, task, split(inputs, size))
        assert logged["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
        assert_equal(expected, found)


def test_the_temperature_is_learnt_once_and_stays_within_its_limits():
    network, inputs = clip_towers(), pairs(8)
    scale = network.model.logit_scale
    with torch.no_grad():
        scale.fill_(50.0)
    found, logged = step(network, "contrastive", split(inputs, 2))
    assert scale.exp().item() == pytest.approx(100.0, rel=1e-5)
    assert logged["contrastive/scale"] == pytest.approx(100.0, rel=1e-5)
    assert found["model.logit_scale"].abs() > 1e-3, (
        "at the limit it still has a gradient"
    )
    with torch.no_grad():
        scale.fill_(-50.0)
    _, logged = step(network, "contrastive", split(inputs, 2))
    assert scale.exp().item() == logged["contrastive/scale"] == 1.0


def test_random_numbers_of_the_second_pass_are_those_of_the_first():
    """Patch dropout leaves out other patches at every pass; the gradient belongs to the
    embeddings that were taken.
    """
    network = clip_towers(patch_dropout=0.5)
    batches = split(pairs(8), 4)
    torch.manual_seed(11)
    found, logged = step(network, "contrastive", batches)
    after = torch.rand(3)
    torch.manual_seed(11)
    outputs = [network(batch.inputs) for batch in batches]
    assert torch.equal(torch.rand(3), after), "each micro-batch draws once"
    loss, _ = objective("contrastive")(concatenate(outputs), {})
    assert logged["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
    assert_equal(gradient_of(network, loss), found)


def test_random_numbers_go_on_after_those_of_the_loss():
    """Else the second passes would wind them back to where the first ones ended."""

    def drawing(outputs, target):
        torch.rand(5)
        return objective("contrastive")(outputs, target)

    network = clip_towers(patch_dropout=0.5)
    batches = split(pairs(8), 4)
    task = EmbeddingTask(Accelerator(cpu=True), network, drawing)
    torch.manual_seed(11)
    next(task.training_step(batches, 0))
    after = torch.rand(3)
    torch.manual_seed(11)
    for batch in batches:
        network(batch.inputs)
    torch.rand(5)
    assert torch.equal(torch.rand(3), after)


def test_a_frozen_tower_gets_no_gradient_and_changes_none():
    network = student_towers()
    inputs = pairs(8)
    whole, _ = step(network, "distill", split(inputs, 8))
    network.model["text"].requires_grad_(False)
    frozen, _ = step(network, "distill", split(inputs, 4))
    assert all(name.startswith("model.image.") for name in frozen)
    assert_equal({name: whole[name] for name in frozen}, frozen)


PROJECTIONS = {"model.visual.proj", "model.text_projection", "model.logit_scale"}


@pytest.mark.parametrize(
    ("what", "tower"),
    [("projections", "ViT"), ("projections", "ResNet"), ("lora", "ViT")],
)
def test_only_what_is_trained_gets_a_gradient_and_micro_batches_do_not_change_it(
    what, tower
):
    shape = {}
    if tower == "ResNet":
        shape = RESNET["vision_cfg"] | {"patch_size": None}
    network = clip_towers(**shape)
    inputs = pairs(8)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    train_only(network.model, what)
    network.train()
    whole, logged = step(network, "positive_augmented", split(inputs, 8))
    parts, again = step(network, "positive_augmented", split(inputs, 4))
    assert_equal(whole, parts)
    assert again == pytest.approx(logged, rel=1e-5)
    if what == "lora":
        assert all(name.endswith((".lora_a", ".lora_b")) for name in whole)
        # four weights of a block in either tower, and the patches' kernel
        assert len(whole) == 2 * (4 + 4 + 1)
    elif tower == "ViT":
        assert whole.keys() == PROJECTIONS
    else:
        pool = {name for name in before if name.startswith("model.visual.attnpool.")}
        assert whole.keys() == pool | PROJECTIONS - {"model.visual.proj"}
    after = network.state_dict()
    for name in before.keys() & after.keys():
        assert torch.equal(after[name], before[name]), "batch norm's, too"
