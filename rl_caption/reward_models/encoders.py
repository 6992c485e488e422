"""Dual encoders to train; open_clip models built, loaded, saved, and tuned in parts
(LoRA, projections).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.checkpoints import KEEP, stretch_text_tower
from rewards.clip.preprocessing import (
    causal_features,
    is_causal,
    preprocessing_of,
)
from rewards.clip.pretrained import UNLOADABLE
from rewards.model_files import (
    check_state,
    read_object,
    save_model,
)
from rl_caption.config.schema import TrainConfig
from rl_caption.runtime.errors import ConfigError, naming

_PROJECTIONS = {
    "image": ("visual.proj", "visual.attnpool."),
    "text": ("text_projection",),
}
"""Names of the last layers; a ResNet's is its attention pool."""
_BLOCK_WEIGHTS = (
    "attn.in_proj_weight",
    "attn.out_proj.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
)


class TrainedEncoder(nn.Module):
    """A dual encoder, or one tower of it, that is being trained.

    Args:
        model: module with the parameters.
        encode: functions of ``model`` from pixels [B, 3, S, S] (``image``) and token
            ids [B, L] (``text``) to raw embeddings [B, D].
        max_scale: largest inverse temperature ``exp(model.logit_scale)``, a further
            output ``scale``; None: the model has none.
    """

    def __init__(
        self,
        model: Any,
        encode: Mapping[str, Callable[[Tensor], Tensor]],
        max_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.encode = encode
        self.max_scale = max_scale

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Embed inputs by name: images where the name starts with ``image``, else texts."""
        embeddings = {}
        for name, value in inputs.items():
            tower = "image" if name.startswith("image") else "text"
            embeddings[name] = self.encode[tower](value)
        if self.max_scale is not None:
            logit_scale = self.model.logit_scale
            # Before it is used, so that it has a gradient at the limit.
            with torch.no_grad():
                logit_scale.clamp_(0, math.log(self.max_scale))
            embeddings["scale"] = logit_scale.exp()
        return embeddings

    def train(self, mode: bool = True) -> Self:
        """Set the training mode. Frozen batch norm stays in evaluation mode: its
        statistics belong to its weights.
        """
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm) and is_frozen(module):
                module.eval()
        return self


def trained_clip(
    clip: Any, max_scale: float = 100.0, frozen_positions: int = 0
) -> TrainedEncoder:
    """An open_clip model to train; the first ``frozen_positions`` positions of its text
    tower get no gradient.
    """
    if frozen_positions:
        positions = torch.arange(len(clip.positional_embedding))
        later = (positions >= frozen_positions)[:, None]
        clip.positional_embedding.register_hook(
            lambda gradient: gradient * later.to(gradient.device)
        )
    encode = {"image": clip.encode_image, "text": clip.encode_text}
    if is_causal(clip):
        encode["text"] = partial(causal_features, clip)
    return TrainedEncoder(clip, encode, max_scale)


def is_frozen(module: nn.Module) -> bool:
    """Whether the module has parameters, and none is trained."""
    return {parameter.requires_grad for parameter in module.parameters()} == {False}


def random_clip(name: str | None, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An open_clip model with random weights, and its model JSON: the JSON of ``name``,
    if any, updated with ``kwargs``.

    Raises:
        ConfigError: an unknown architecture, or a shape that open_clip cannot build.
    """
    import open_clip
    from open_clip.transform import PreprocessCfg

    shape: Any = {} if name is None else open_clip.get_model_config(name)
    if shape is None:
        raise ConfigError(
            f"model.name is {name!r}, which open_clip does not know: see open_clip.list_models()"
        )
    for key, value in kwargs.items():
        if isinstance(value, dict):
            value = shape.get(key, {}) | value
        shape[key] = value
    _check_native(shape, "model.kwargs")
    shape.pop("custom_text", None)
    unbuildable = (*UNLOADABLE, AssertionError, ZeroDivisionError)
    with naming("model.kwargs: open_clip cannot build this model", unbuildable):
        model = open_clip.CLIP(**shape)
    model.visual.preprocess_cfg = vars(PreprocessCfg(size=model.visual.image_size))
    return model, shape


def pretrained_clip(
    name: str | None,
    init: str,
    context_length: int | None = None,
    keep_positions: int = KEEP,
) -> tuple[Any, dict[str, Any]]:
    """An open_clip model with the weights ``init``, and its model JSON.

    ``init`` is a folder, or with the architecture ``name`` a tag or a checkpoint file.
    The position table of the text tower is stretched to ``context_length`` rows; its
    first ``keep_positions`` rows stay as they are.

    Raises:
        ConfigError: the weights cannot be found or loaded, belong to another kind of
            model, or cannot be stretched so.
    """
    import open_clip

    with naming("model.init"):
        if name is None:
            shape: Any = read_object(Path(init) / "open_clip_config.json")["model_cfg"]
            model: Any = load_frozen_encoder(init).model
        else:
            model = load_frozen_encoder(name, init).model
            shape = open_clip.get_model_config(name)
    _check_native(shape, "model.init")
    shape.pop("custom_text", None)
    if context_length is not None:
        with naming("model.context_length, model.keep_positions"):
            stretch_text_tower(model, context_length, keep_positions)
    # From the loaded weights: tags and OpenAI's archives have QuickGELU, the architecture's JSON
    # does not.
    gelu = open_clip.transformer.QuickGELU
    shape["quick_gelu"] = any(isinstance(module, gelu) for module in model.modules())
    shape["text_cfg"]["context_length"] = int(model.context_length)
    # A TorchScript archive may hold another architecture than the named one.
    with torch.device("meta"):
        expected = open_clip.CLIP(**shape)
    with naming(f"model.init {init!r} with model.name {name!r}"):
        check_state(model.state_dict(), expected.state_dict(), "the weights")
    return model.float().requires_grad_(True), shape


def _check_native(shape: dict[str, Any], key: str) -> None:
    """Refuse towers and tokenisers that are not CLIP's own: they need files that the
    export would not have.
    """
    used = {**shape.get("vision_cfg", {}), **shape.get("text_cfg", {}), **shape}
    for option in ("timm_model_name", "hf_model_name", "hf_tokenizer_name"):
        if used.get(option):
            raise ConfigError(f"{key}: a model with {option} cannot be trained here")


def save_clip(model: Any, shape: dict[str, Any], folder: Path) -> None:
    """Write a folder for ``load_frozen_encoder`` and
    ``open_clip.create_model("local-dir:...")``; LoRA is merged.
    """
    pixels = asdict(preprocessing_of(model.visual)) | {"mode": "RGB"}
    config = {"model_cfg": shape, "preprocess_cfg": pixels}
    save_model(merged_state(model), config, folder, "open_clip_")


class LowRank(nn.Module):
    """LoRA as a parametrisation: ``W + (alpha / rank) B A`` instead of a weight W (Hu
    et al. 2022, equation 3).

    W is taken as a matrix of ``rows`` rows; A is [rank, columns], and B is [rows,
    rank], 0 at first. As a parametrisation it holds for all code that reads the weight,
    fused attention included.
    """

    def __init__(self, weight: Tensor, rows: int, rank: int, scale: float) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(rank, weight.numel() // rows))
        self.lora_b = nn.Parameter(torch.zeros(rows, rank))
        self.scale = scale
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """The updated weight, of the same shape."""
        return weight + self.scale * (self.lora_b @ self.lora_a).view_as(weight)


def train_only(
    clip: Any,
    what: Literal["projections", "lora", "all"],
    rank: int = 4,
    alpha: float = 1.0,
) -> None:
    """Freeze an open_clip model except ``what``.

    ``projections`` (PAC-S): the last projection of each tower (of a ResNet its
    attention pool) and the temperature. ``lora`` (PAC-S++): a ``LowRank`` update of the
    four matrices of each block in both towers, and of the patch embedding's kernel [D,
    3, k, k], taken as a matrix of k D rows with rank k ``rank``. ``all``: nothing is
    frozen.

    Raises:
        ConfigError: the model has no such layers.
    """
    if what == "all":
        return
    clip.requires_grad_(False)
    if what == "lora":
        scale = alpha / rank
        kernel = clip.visual.conv1.weight
        for transformer in (clip.visual.transformer, clip.transformer):
            for block, path in product(transformer.resblocks, _BLOCK_WEIGHTS):
                owner, _, name = path.rpartition(".")
                weight = block.get_parameter(path)
                update = LowRank(weight, len(weight), rank, scale)
                parametrize.register_parametrization(
                    block.get_submodule(owner), name, update
                )
        side = kernel.shape[-1]
        update = LowRank(kernel, len(kernel) * side, rank * side, scale)
        parametrize.register_parametrization(clip.visual.conv1, "weight", update)
        return
    for tower, names in _PROJECTIONS.items():
        projections = [
            projection
            for name, projection in clip.named_parameters()
            if name.startswith(names)
        ]
        if not projections:
            raise ConfigError(
                f"train.trainable is 'projections', but the {tower} tower has none: take all or "
                f"lora"
            )
        for parameter in (*projections, clip.logit_scale):
            parameter.requires_grad_(True)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with every LoRA update added to its weight, under the names of the
    model without LoRA.
    """
    state = {
        name: value
        for name, value in model.state_dict().items()
        if "parametrizations." not in name
    }
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            for name in module.parametrizations:
                state[f"{path}.{name}".lstrip(".")] = getattr(module, name)
    return state


def check_batch_norm(network: nn.Module, train: TrainConfig, processes: int) -> None:
    """Raise ``ConfigError`` where ``network`` trains batch norm, and a step has several
    micro-batches or processes.

    Batch norm takes the statistics of one micro-batch of one process: the step would
    depend on how the batch is split, and the running statistics, which the exported
    model uses, on the process. Frozen layers keep their statistics.
    """
    trained = [
        name
        for name, module in network.named_modules()
        if isinstance(module, _BatchNorm) and not is_frozen(module)
    ]
    if trained and (
        processes > 1 or train.micro_batch_size not in (None, train.batch_size)
    ):
        raise ConfigError(
            f"the model trains batch norm (such as {trained[0]}), so every step must be one "
            "micro-batch of one process: start one process, and leave train.micro_batch_size null; "
            "or choose an image encoder without batch norm, a ViT"
        )
