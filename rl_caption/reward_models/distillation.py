"""L-CLIP's distillation: students, made from a configuration or from exported folders, and the frozen teacher."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rewards.clip.backbone import Backbone, load_backbone
from rewards.clip.dual import PretrainedDual
from rewards.clip.encoder import EmbeddingCache, image_identity
from rewards.clip.pretrained import save_encoder_config
from rewards.clip.student import LCLIP, MODEL_TYPE, ImageStudent, LCLIPConfig, TextStudent, load_student
from rewards.devices import chunks
from rewards.model_files import MANIFEST, check_memory, float_state, read_object, save_model
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.data.base import Row
from rl_caption.data.encode_features import made_by
from rl_caption.engines import print_main
from rl_caption.errors import ConfigError, naming
from rl_caption.reward_models.batch import Captions, PairBatch

T = TypeVar("T")
Tower: TypeAlias = Literal["image", "text"]
TOWERS: dict[Tower, Any] = {"image": ImageStudent, "text": TextStudent}
TOWER_TYPES: dict[Tower, str] = {"image": f"{MODEL_TYPE}_image", "text": f"{MODEL_TYPE}_text"}
"""``model_type`` in config.json of one tower; a whole L-CLIP has another, so neither is taken for the other."""
PART = 2**16
"""Number of images or captions that are embedded and gathered from the processes at a time."""
TEACHER = "teacher_fingerprint"
"""Key in a tower's config.json: ``Backbone.fingerprint`` of the model that it was distilled from."""


def check_names(kwargs: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` unless ``kwargs`` are arguments of ``LCLIPConfig``."""
    known = {field.name for field in fields(LCLIPConfig)}
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise ConfigError(f"model.kwargs has {unknown}: LCLIPConfig takes {sorted(known)}")


def student_config(kwargs: Mapping[str, Any], embed_dim: int | None = None) -> LCLIPConfig:
    """The shape of a student, whose joint width is the teacher's ``embed_dim``, if that is known.

    Raises ``ConfigError`` for arguments that make no student, and for another ``embed_dim`` in ``kwargs``.
    """
    check_names(kwargs)
    width = {} if embed_dim is None else {"embed_dim": embed_dim}
    with naming("model.kwargs"):
        config = LCLIPConfig(**(width | dict(kwargs)))
        with torch.device("meta"):
            check_memory(LCLIP(replace(config, image_encoder=None)))
    return config if embed_dim is None else _checked_width(config, embed_dim)


def _checked_width(config: LCLIPConfig, embed_dim: int) -> LCLIPConfig:
    if config.embed_dim != embed_dim:
        raise ConfigError(
            f"model.kwargs.embed_dim is {config.embed_dim}, the teacher's embeddings have {embed_dim} dimensions: the "
            "student's are compared with them, so set it to that"
        )
    return config


def save_tower(tower: nn.Module, kind: Tower, folder: Path, teacher: str | None = None) -> None:
    """Write ``model.safetensors`` and ``config.json`` of one tower to ``folder``; ``teacher`` is its fingerprint."""
    save_encoder_config(getattr(tower, "encoder", None), folder / "image_encoder")
    config: Any = tower.config
    origin = {"model_type": TOWER_TYPES[kind]} | ({} if teacher is None else {TEACHER: teacher})
    save_model(float_state(tower), {**origin, **asdict(config)}, folder)


def _load_tower(path: str, kind: Tower, key: str, embed_dim: int, teacher: str | None = None) -> Any:
    """A tower that ``save_tower`` wrote; ``key`` of the configuration names the folder."""
    folder = Path(path)
    try:
        tower: Any = load_student(TOWERS[kind], folder, TOWER_TYPES[kind], [TEACHER])
        origin = read_object(folder / "config.json").get(TEACHER)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {error}; expected what distill_{kind} exports") from error
    if None not in (origin, teacher) and origin != teacher:
        raise ConfigError(
            f"{key} is {path!r}, distilled from a teacher of fingerprint {origin}; this run's teacher has {teacher}: "
            "name the same (weights, preprocessing and precision), or distil the tower from this one. If only library "
            f"versions differ, remove {TEACHER} from the tower's config.json, and {MANIFEST}"
        )
    _checked_width(tower.config, embed_dim)
    return tower


def names_teacher(path: str) -> bool:
    """Whether a tower's folder says which teacher it was distilled from; those of older runs do not."""
    return TEACHER in read_object(Path(path) / "config.json")


def build_tower(kind: Tower, init: str | None, kwargs: Mapping[str, Any], embed_dim: int) -> nn.Module:
    """One tower, from a folder or from random weights; ``ConfigError`` where neither can be."""
    if init is None:
        return TOWERS[kind](student_config(kwargs, embed_dim))
    return _load_tower(init, kind, "model.init", embed_dim)


def build_dual(
    init: str | None,
    towers: Mapping[Tower, str | None],
    kwargs: Mapping[str, Any],
    embed_dim: int,
    teacher: str | None = None,
) -> LCLIP:
    """A whole L-CLIP: from its folder, from one folder for each tower, or with random weights where there is none.

    ``kwargs`` are arguments of ``LCLIPConfig`` that no folder gives, ``embed_dim`` is the teacher's joint width.
    ``teacher`` is the fingerprint that towers must name as the teacher they were distilled from; None takes any.

    Raises:
        ConfigError: a folder is not what it should be, the towers or ``kwargs`` do not fit each other, the joint
            width is not the teacher's, or a tower was distilled from another teacher.
    """
    folders = {kind: path for kind, path in towers.items() if path is not None}
    if init is not None:
        if folders:
            raise ConfigError("model.init is a whole L-CLIP: leave model.image_init and model.text_init out")
        with naming("model.init"):
            model = LCLIP.from_pretrained(init).train()
        _checked_width(model.config, embed_dim)
        return model
    loaded = {kind: _load_tower(path, kind, f"model.{kind}_init", embed_dim, teacher) for kind, path in folders.items()}
    if len(loaded) == len(TOWERS) and kwargs:
        raise ConfigError(
            "model.kwargs is set, but model.image_init and model.text_init already have a shape: leave it out"
        )
    config = _joined_config({kind: tower.config for kind, tower in loaded.items()}, kwargs, embed_dim)
    with torch.device("meta"):
        model = LCLIP(replace(config, image_encoder=None))
    model.config = config
    for kind, build in TOWERS.items():
        tower = loaded[kind] if kind in loaded else build(config)
        tower.config = config
        setattr(model, kind, tower)
    return model


def _joined_config(towers: Mapping[Tower, LCLIPConfig], kwargs: Mapping[str, Any], embed_dim: int) -> LCLIPConfig:
    """The shape of both towers: that of loaded towers as they are, the rest from ``kwargs``."""
    values = dict(kwargs)
    source: dict[str, str] = dict.fromkeys(kwargs, "model.kwargs")
    for kind, config in towers.items():
        for name, value in asdict(config).items():
            owner = "image" if name.startswith("image_") or name == "patch_size" else "text"
            if owner != kind and name not in ("embed_dim", "mlp_ratio"):
                continue
            if name in values and values[name] != value:
                found = f"model.{kind}_init has {name} {value!r}, but {source[name]} has {values[name]!r}"
                raise ConfigError(f"{found}: expected equal values")
            values[name], source[name] = value, f"model.{kind}_init"
    return student_config(values, embed_dim)


@torch.no_grad()
def copy_patch_embedding(student: ImageStudent, teacher: Any) -> list[str]:
    """Copy patch projection, class token and, where they fit, positions of an open_clip ViT, and freeze them.

    The bias of the student's patch projection has no counterpart in the teacher: it stays random and is trained, as in
    the released code. Returns the names of the frozen parameters.

    Raises:
        ConfigError: the teacher is no ViT, or its patches have another size or width.
    """
    visual = getattr(teacher, "visual", None)
    sources = {
        "patch_embed.weight": getattr(getattr(visual, "conv1", None), "weight", None),
        "cls_token": getattr(visual, "class_embedding", None),
        "pos_embed": getattr(visual, "positional_embedding", None),
    }
    remedy = "make model.kwargs.patch_size and image_width equal, or set train.freeze_patch_embed to false"
    wanted = tuple(student.get_parameter("patch_embed.weight").shape)
    found = sources["patch_embed.weight"]
    if found is None or sources["cls_token"] is None or found.ndim != 4 or found.shape[2] != visual.conv1.stride[0]:  # type: ignore[union-attr]
        raise ConfigError(
            "the teacher's image encoder is not a ViT, so it has no patch embedding to copy: set "
            "train.freeze_patch_embed to false"
        )
    if tuple(found.shape) != wanted:
        raise ConfigError(
            f"the teacher's patches have width {found.shape[0]} and {found.shape[2]} pixels, but the student's "
            f"{wanted[0]} and {wanted[2]}: {remedy}"
        )
    frozen = []
    for name, source in sources.items():
        target = student.get_parameter(name)
        if source is not None and source.numel() == target.numel():
            target.copy_(source.reshape(target.shape))
            target.requires_grad_(False)
            frozen.append(name)
    return frozen


def embed_distributed(accelerator: Accelerator, items: Sequence[T], embed: Callable[[list[T]], Tensor]) -> Tensor:
    """Embed N items, a part in each process, and gather them: [N, D] on the CPU of every process, in order."""
    processes = accelerator.num_processes
    if processes == 1:
        return embed(list(items)).cpu()
    count = -(-len(items) // processes)
    # A gather needs parts of equal size: the last ones start again at the first item.
    mine = [items[(accelerator.process_index * count + offset) % len(items)] for offset in range(count)]
    return accelerator.gather(embed(mine).to(accelerator.device).contiguous()).cpu()[: len(items)]


def reads_features(backbone: Backbone, features_root: str | None) -> bool:
    """Whether ``backbone`` is a ``PretrainedDual`` and ``features_root`` has the features of its image encoder."""
    model = backbone.model
    if features_root is None or not isinstance(model, PretrainedDual):
        return False
    return made_by(features_root, model.image_encoder)


@torch.no_grad()
def embed_features(backbone: Backbone, rows: Sequence[Row]) -> Tensor:
    """Raw embeddings [N, D], on the CPU, of N rows by their ``features``; see ``reads_features``."""
    model: Any = backbone.model
    weight, found = model.image_head.linear.weight, []
    for part in chunks(rows, 256, "embedding features of images"):
        features = torch.stack([torch.from_numpy(row["features"].load()) for row in part])
        found.append(model.project_image(features.to(weight.device, weight.dtype)).float().cpu())
    return torch.cat(found)


class Teacher:
    """A frozen dual encoder, or one tower of it, that gives raw embeddings (not of unit length).

    Args:
        towers: ``image``, ``text`` or both.
        augmented: images are augmented: at every step, embed the view that the student sees.
        cache_dir: folder that keeps embeddings between runs; None keeps none.
        features_root: features of images. Where they are those of the teacher's own image encoder (it is a
            ``PretrainedDual``), the teacher reads them instead of images.
    """

    def __init__(
        self,
        backbone: Backbone,
        towers: Sequence[str],
        accelerator: Accelerator,
        augmented: bool = False,
        cache_dir: str | None = None,
        features_root: str | None = None,
    ) -> None:
        self.backbone, self.towers, self.accelerator = backbone, tuple(towers), accelerator
        self.reads_features = reads_features(backbone, features_root)
        self.augmented = augmented
        # Tables in memory are those of ``prepare``; the disk cache's own memory is as small as it can be.
        folder = None if cache_dir is None else Path(cache_dir)
        self._disk = None if folder is None else EmbeddingCache(f"{backbone.fingerprint}-raw", folder, max_entries=1)
        self.width = int(self.text_embeddings(["a"]).shape[1])
        self._tables: dict[str, tuple[dict[str, int], Tensor]] = {}
        """Tower -> row of each image id or caption in a table of embeddings [N, D]."""

    def __call__(self, batch: PairBatch) -> dict[str, Tensor]:
        """Embeddings [B, D] by tower, and of hard negatives if there are any; on the training device, no gradient."""
        found = {}
        for tower in self.towers:
            keys = batch.captions if tower == "text" else [row["image_id"] for row in batch.rows]
            known, table = self._tables.get(tower, ({}, torch.zeros(0)))
            if tower == "image" and self.augmented:
                found[tower] = self.backbone.encode_pixels(batch.inputs["image"], normalize=False)
            elif all(key in known for key in keys):
                found[tower] = table[[known[key] for key in keys]]
            else:
                found[tower] = self.text_embeddings(keys) if tower == "text" else self.image_embeddings(batch.rows)
        if batch.false_captions:  # others at every step, so they are not kept on disk
            found["false"] = batch.targets["false"]
            for n, captions in enumerate(batch.false_captions):
                found[f"text_false{n}"] = self.backbone.encode_texts(captions, normalize=False)
        return {name: rows.to(self.accelerator.device) for name, rows in found.items()}

    def image_embeddings(self, rows: Sequence[Row]) -> Tensor:
        """Embeddings of the images of N rows as they are, [N, D] on the CPU; read from ``cache_dir`` if there."""
        if self.reads_features:
            return embed_features(self.backbone, rows)
        return self._embedded([row["image"] for row in rows], self.backbone.encode_images, image_identity, "image")

    def text_embeddings(self, captions: Sequence[str]) -> Tensor:
        """Embeddings of N captions, [N, D] on the CPU; read from ``cache_dir`` if there, by their token ids."""

        def identity(caption: str) -> str:
            return f"tokens:{self.backbone.token_ids([caption])[0].tolist()}"

        return self._embedded(captions, self.backbone.encode_texts, identity, "caption")

    def _embedded(
        self, items: Sequence[Any], encode: Callable[..., Tensor], identity: Callable[[Any], str], kind: str
    ) -> Tensor:
        if self._disk is None:
            return encode(items, normalize=False)
        found = self._disk.embed(items, lambda missing: encode(missing, normalize=False).numpy(), identity, kind)
        return torch.from_numpy(found)

    def prepare(self, rows: Sequence[Row], captions: Captions, cache_bytes: int) -> None:
        """Embed the training split before the first step, captions first, as far as ``cache_bytes`` of memory allow."""
        left = cache_bytes
        if "text" in self.towers:
            texts = (row["references"][:1] if captions == "first" else row["references"] for row in rows)
            distinct = list(dict.fromkeys(caption for own in texts for caption in own))
            left -= self._keep("text", "captions", distinct, distinct, self.text_embeddings, left)
        if "image" in self.towers and not self.augmented:
            self._keep("image", "images", [row["image_id"] for row in rows], rows, self.image_embeddings, left)

    def _keep(
        self,
        tower: Tower,
        what: str,
        keys: Sequence[str],
        items: Sequence[T],
        embed: Callable[[list[T]], Tensor],
        cache_bytes: int,
    ) -> int:
        """Embed all items, ``PART`` at a time, if they fit; returns the bytes that they take."""
        needed = len(items) * self.width * 4
        if needed > cache_bytes:
            instead = "embedded" if self._disk is None else "read from teacher.cache_dir, or embedded the first time,"
            print_main(
                self.accelerator,
                f"teacher: {len(items)} {what} need {needed / 2**20:.0f} MiB, more than teacher.cache_mb has left: "
                f"they are {instead} at every step instead",
            )
            return 0
        print_main(self.accelerator, f"teacher: embedding {len(items)} {what} once ({needed / 2**20:.0f} MiB)")
        table = torch.empty(len(items), self.width)
        for start in range(0, len(items), PART):
            table[start : start + PART] = embed_distributed(self.accelerator, items[start : start + PART], embed)
        self._tables[tower] = {key: index for index, key in enumerate(keys)}, table
        return needed


def load_teacher(accelerator: Accelerator, config: RewardModelConfig, towers: Sequence[Tower]) -> Teacher:
    """The frozen model of the section ``teacher``. ``ConfigError`` where it cannot be loaded."""
    wanted = config.teacher
    assert wanted.name is not None  # check_config
    with naming("teacher"), accelerator.main_process_first():  # which downloads, where that is needed
        options: dict[str, Any] = {"precision": wanted.precision, "batch_size": wanted.batch_size}
        backbone = load_backbone(wanted.name, wanted.pretrained, str(accelerator.device), **options)
    augmented, root = bool(config.data.augment), config.data.features_root
    return Teacher(backbone, towers, accelerator, augmented, wanted.cache_dir, root)
