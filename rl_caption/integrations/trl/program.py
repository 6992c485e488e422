"""The program ``grpo_vlm``: TRL's trainers on this package's rewards and data."""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import GenerationConfig, PrinterCallback, TrainerCallback

from rewards.mixed import MixedReward
from rewards.model_files import MANIFEST, damage, manifest_of
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.loading import weights_hash
from rl_caption.captioners.vlm_families import special_tokens
from rl_caption.config.build import (
    build_data,
    build_reward,
    checked_splits,
    quiet_libraries,
    references_of,
)
from rl_caption.data.base import Row
from rl_caption.data.files import write_json
from rl_caption.data.fingerprint import TIMES, fingerprint
from rl_caption.data.plain_files import read_json
from rl_caption.integrations.trl.config import GrpoVlmConfig
from rl_caption.integrations.trl.model import (
    adapters,
    check_vllm_prompt,
    load_vlm,
    load_weights,
    prompt_once,
    skip_epochs,
    suppression,
    vllm_in_float32,
)
from rl_caption.integrations.trl.rows import FinishedAware, trl_dataset
from rl_caption.runtime.engines import (
    accelerator_kwargs,
    training_precision,
    use_cpu,
)
from rl_caption.runtime.errors import UserError, config_errors, naming
from rl_caption.runtime.launch import check_environment, check_processes, run_lock
from rl_caption.runtime.zero import gathered_parameters
from rl_caption.training.checkpoint import (
    RESULT,
    CheckpointError,
    append_line,
    changed_settings,
    computed_settings,
    drop_after,
    new_folder,
    write_run_files,
)
from rl_caption.training.run import CHECKED_IMAGES, NonFiniteError

INPUTS = "inputs.json"
"""File of a checkpoint with the inputs of the run: configuration, reward, data, model."""
MOST_DIFFERENCE = 0.02
"""Largest mean difference, in nats, between vLLM's log-probabilities of its samples and
TRL's, in float32.
"""


class WrongSamplesError(UserError, RuntimeError):
    """vLLM's log-probabilities differ from TRL's, as with other prompts; the message
    has the difference.
    """


def trl_arguments(config: GrpoVlmConfig) -> Any:
    """``GRPOConfig`` or ``RLOOConfig`` with the arguments of ``trl`` and the arguments
    that follow from other keys.

    Raises ``ConfigError`` for arguments that TRL does not know or refuses.
    """
    from trl import GRPOConfig, RLOOConfig

    user_arguments = config.trl
    ours = {
        "output_dir": str(Path(config.run.dir) / "checkpoints"),
        "reward_weights": [term.weight for term in config.reward.terms.values()],
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,
    }
    defaults: dict[str, Any] = {
        # First the function, which also keeps DeepSpeed from compiling an extension on a CPU.
        "use_cpu": "cpu" in accelerator_kwargs()
        or torch.accelerator.current_accelerator(check_available=True) is None,
        "disable_dropout": True,
        "logging_first_step": True,
        "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty(),
    }
    if not {"bf16", "fp16"} & user_arguments.keys():
        precision = training_precision("auto")
        defaults["bf16"], defaults["fp16"] = precision == "bf16", precision == "fp16"
    trl_class: Any = GRPOConfig if config.trainer == "grpo" else RLOOConfig
    with config_errors("TRL refuses trl"):
        arguments = trl_class(**defaults | user_arguments | ours)
    if arguments.n_gpu > 1:  # Transformers would choose DataParallel, which TRL refuses
        arguments._n_gpu = 1
    return arguments


@contextmanager
def unsharded_models(arguments: Any) -> Iterator[None]:
    """Context in which Transformers loads and decodes models as without ZeRO-3.

    Under ZeRO-3 a model loses the names of its weights in files, and all processes must
    decode equally often, or wait for ever.
    """
    from transformers.integrations.deepspeed import (
        set_hf_deepspeed_config,
        unset_hf_deepspeed_config,
    )

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if arguments.deepspeed_plugin is not None:
            set_hf_deepspeed_config(arguments.deepspeed_plugin.dschf)


def find_checkpoint(
    folder: Path, inputs: Mapping[str, Any], resume: bool
) -> tuple[int, Path | None]:
    """Step and path of the newest intact checkpoint; 0 and None for a new run. Damaged
    checkpoints are passed over.

    Raises ``CheckpointError`` where there is one and ``resume`` is false, or its inputs
    differ.
    """
    intact = [
        path for path in folder.glob("checkpoints/checkpoint-*") if damage(path) is None
    ]
    if not intact:
        return 0, None
    step, newest = max((int(path.name.split("-")[1]), path) for path in intact)
    if not resume:
        raise CheckpointError(
            f"{folder} holds a run and run.resume is false: choose another run.dir"
        )
    before = read_json(newest / INPUTS, CheckpointError)
    if changed := changed_settings(before, inputs):
        raise CheckpointError(
            f"{newest} was trained with other inputs: {'; '.join(changed)}. Choose another run.dir"
        )
    return step, newest


def fine_tune(config: GrpoVlmConfig) -> str:
    """Train, and export to ``export/last``; return a line with the model's folder,
    empty in all but the main process.

    Raises:
        ConfigError, DataError, CheckpointError, LaunchError, RewardError,
            NonFiniteError: what is wrong, and what would be right.
    """
    check_environment()
    quiet_libraries()
    # TRL calls Transformers by deprecated names, at every step.
    warnings.filterwarnings("ignore", r".*gradient_checkpointing", FutureWarning)
    # Before PartialState: these arguments choose the device and initialise the process group.
    arguments = trl_arguments(config)
    state: Any = PartialState()
    check_processes(state.num_processes, config.train.num_processes)
    if state.device.type == "cpu":
        use_cpu(state.num_processes, config.train.threads)
    folder = Path(config.run.dir)
    with run_lock(folder) if state.is_main_process else nullcontext():
        with unsharded_models(arguments):
            captioner = load_vlm(config.model)
        data, cache = build_data(config.data), folder / CHECKED_IMAGES
        splits = ["train"]
        rows = checked_splits(config.data, data, splits, state, cache)["train"]
        with state.main_process_first():
            texts = references_of(rows)
            reward = build_reward(config.reward, texts, folder, config.data.tokenizer)
        # Must be the same when the run is resumed. Values as in JSON.
        inputs = computed_settings(config.model_dump(mode="json"))
        inputs["reward"] = reward.signature
        inputs["weights"] = weights_hash(str(config.model.init))
        for name, value in fingerprint({"train": rows}).items():
            if not name.endswith(TIMES):
                inputs[name] = value
        start, checkpoint = find_checkpoint(folder, inputs, config.run.resume)
        # ``generate`` takes missing arguments from the model's own settings, such as a ban on
        # repeated words.
        model = captioner.policy.model
        generation = model.generation_config
        trainer = make_trainer(config, arguments, captioner, rows, reward, inputs)
        if state.is_main_process:
            extra = {"reward": reward.signature, "num_processes": state.num_processes}
            write_run_files(folder, config.model_dump(mode="json"), extra)
            drop_after(folder / "metrics.jsonl", start if checkpoint else -1)
        step = train(trainer, start, checkpoint, config.model.lora is not None)
        model.generation_config = generation
        export = folder / "export" / "last"
        whole: Any = nullcontext()
        if trainer.deepspeed is not None:  # not so where all steps were taken before
            whole = gathered_parameters(trainer.accelerator, trainer.model_wrapped)
        with (
            whole,
            new_folder(export, replaces=True) as partial_folder,
        ):
            if state.is_main_process:  # plain: adapters are merged in float32
                captioner.save_pretrained(captioner.policy, partial_folder)
        if not state.is_main_process:
            return ""
        write_json(folder / RESULT, {"step": step, "reward": reward.signature})
        return f"model in {export}; rl-caption evaluate --model {export} judges it"


def make_trainer(
    config: GrpoVlmConfig,
    arguments: Any,
    captioner: HuggingFaceCaptioner,
    rows: Sequence[Row],
    reward: MixedReward,
    inputs: Mapping[str, Any],
) -> Any:
    """TRL's trainer of the model, whose special tokens are never sampled."""
    from trl import GRPOTrainer, RLOOTrainer

    model = captioner.policy.model
    ends, unwritten = special_tokens(captioner.processor, model)
    model.generation_config = GenerationConfig(eos_token_id=ends)
    colocated = arguments.use_vllm and arguments.vllm_mode == "colocate"
    if colocated:
        check_vllm_prompt(captioner, rows[0])
    # Instead of TRL's own, which suppresses the image token only.
    mode = arguments.vllm_mode if arguments.use_vllm else None
    suppressed = suppression(unwritten, len(captioner.tokenizer), mode)
    arguments.generation_kwargs = suppressed | (arguments.generation_kwargs or {})
    trainer_class: Any = GRPOTrainer if config.trainer == "grpo" else RLOOTrainer
    terms = reward.rewards.items()
    lora = adapters(captioner, config.model)
    exact = colocated and not (arguments.bf16 or arguments.fp16)
    refusals = (ValueError, ImportError, NotImplementedError)
    with (
        naming("TRL refuses this configuration", refusals),
        vllm_in_float32() if exact else nullcontext(),
    ):
        trainer = trainer_class(
            model=model,
            reward_funcs=[FinishedAware(term, ends, name) for name, term in terms],
            args=arguments,
            train_dataset=trl_dataset(rows, captioner.prompt),
            processing_class=captioner.processor,
            callbacks=[Log(Path(config.run.dir) / "metrics.jsonl", inputs)],
            peft_config=lora,
        )
    if colocated:
        prompt_once(trainer, captioner.policy.config.image_token_id)
    trainer.remove_callback(PrinterCallback)  # prints every value, without a unit
    return trainer


def train(
    trainer: Any, start: int, checkpoint: Path | None, with_adapters: bool
) -> int:
    """Train, or resume from the step ``start`` and train, to the end; return the last
    optimizer step.
    """
    if checkpoint is not None:
        if not with_adapters:
            trainer._load_from_checkpoint = partial(load_weights, trainer.model)
        loader = trainer.get_train_dataloader()
        counts = trainer.set_initial_training_values(trainer.args, loader)
        if start >= counts[-1]:  # train() would make one more step
            if with_adapters and not (checkpoint / "zero_to_fp32.py").is_file():
                trainer._load_from_checkpoint(str(checkpoint))
            else:
                load_weights(trainer.model, checkpoint)
            return start
        skip_epochs(trainer, start // counts[1])
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return int(trainer.state.global_step)


class Log(TrainerCallback):
    """Appends TRL's logged values to ``metrics.jsonl``, prints them, and ends a run
    with a non-finite loss or wrong log-probabilities.
    """

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None:
        self.path, self.inputs = path, inputs

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the inputs of the run, and a manifest, into the checkpoint that was
        just saved.
        """
        PartialState().wait_for_everyone()  # every process writes files
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(checkpoint / INPUTS, self.inputs)
            write_json(checkpoint / MANIFEST, manifest_of(checkpoint))

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log, print and check the trainer's values. Raises ``NonFiniteError`` and
        ``WrongSamplesError``.
        """
        values = dict(logs or {})
        if "loss" not in values:  # the totals after the last step
            return
        if state.is_world_process_zero:
            append_line(self.path, {"step": state.global_step, **values})
            line = f"step {state.global_step}/{state.max_steps}"
            for key, value in values.items():
                if key.endswith(("/mean", "/mean_length")):
                    line += f"  {key} {value:.4g}"
            tqdm.write(line, file=sys.stderr)
        if not math.isfinite(values["loss"]):
            raise NonFiniteError(
                f"loss is {values['loss']} at step {state.global_step}: lower trl.learning_rate"
            )
        difference = values.get("sampling/sampling_logp_difference/mean", 0.0)
        if difference > MOST_DIFFERENCE and not (args.bf16 or args.fp16):
            raise WrongSamplesError(
                "the log-probabilities by which vLLM samples and TRL scores differ by "
                f"{difference:.3g} nats on average at step {state.global_step} (at "
                f"most {MOST_DIFFERENCE} is rounding): of other prompts, or in another "
                "precision"
            )
