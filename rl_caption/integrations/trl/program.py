"""The program ``grpo_vlm``: TRL's trainers on this package's rewards and data, then this package's evaluation."""

import dataclasses
import math
import os
import pickle
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from rewards.base import Reward, reason
from rewards.mixed import MixedReward
from rewards.model_files import MANIFEST, damage, manifest_of, read_object
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import weights_hash
from rl_caption.config.build import (
    build_data,
    build_reward,
    checked_splits,
    quiet_libraries,
    references_of,
    usable_split,
)
from rl_caption.data.base import COLUMNS
from rl_caption.data.files import write_json
from rl_caption.data.fingerprint import changes, fingerprint
from rl_caption.data.loader import micro_batch_size
from rl_caption.data.plain_files import read_json
from rl_caption.data.refused import usable_rows
from rl_caption.evaluation import (
    Evaluation,
    check_writable,
    evaluate_rows,
    format_table,
    write_evaluation,
)
from rl_caption.evaluation.metrics import (
    add_judges,
    check_asked,
    check_judges,
    metrics_tokenizer,
    words_tokenizer,
)
from rl_caption.evaluation.results import read_scores
from rl_caption.integrations.trl.config import GrpoVlmConfig
from rl_caption.integrations.trl.model import (
    Vlm,
    VlmReader,
    adapt,
    export,
    load_deepspeed_weights,
    load_processor,
    load_vlm,
    load_weights,
)
from rl_caption.integrations.trl.rows import FinishedAware, trl_dataset
from rl_caption.monitoring.judges import build_judges
from rl_caption.runtime.engines import (
    accelerator_kwargs,
    gathered_parameters,
    print_main,
    usable_precision,
    use_cpu,
)
from rl_caption.runtime.errors import ConfigError, config_errors, not_installed
from rl_caption.runtime.launch import check_environment, check_processes, run_lock
from rl_caption.training.checkpoint import CheckpointError, save_or_discard
from rl_caption.training.loop import NonFiniteError
from rl_caption.training.run_folder import (
    append_line,
    changed_settings,
    drop_after,
    is_complete,
    refuse_other_run,
    remove_result,
    settings_of,
    write_result,
    write_run_files,
)
from rl_caption.training.setup import CHECKED_IMAGES
from rl_caption.training.validation import decode_candidates

INPUTS = "inputs.json"
"""File of a checkpoint that says what the run was trained on."""


class Inputs(TypedDict):
    """Content of ``INPUTS``."""

    reward: str
    """Signature of the reward."""
    data: dict[str, str]
    """``data.fingerprint`` of the training images."""
    model: NotRequired[str]
    """Hash of the weights in ``model.name``, or its name on the hub."""
    settings: NotRequired[dict[str, Any]]
    """The configuration, as far as it changes what is computed."""


def trl_arguments(config: GrpoVlmConfig, num_processes: int) -> Any:
    """``GRPOConfig`` or ``RLOOConfig``. Every setting that decides what is sampled is given, none left to the model.

    Raises:
        ConfigError: ``train.kwargs`` has an argument that TRL does not know or that another key sets, or TRL refuses a
            combination.
    """
    from trl import GRPOConfig, RLOOConfig

    trl_class: Any = GRPOConfig if config.trainer == "grpo" else RLOOConfig
    arguments, extra = _arguments(config, num_processes), config.train.kwargs
    if double := sorted({*arguments, "generation_kwargs"}.intersection(extra)):
        raise ConfigError(
            f"train.kwargs has {double}: other keys of this configuration set them, see docs/trl.md"
        )
    with config_errors("TRL refuses this configuration (rollout, train, train.kwargs)"):
        trl_config = trl_class(**arguments, **extra)
    if (
        trl_config.n_gpu > 1
    ):  # one process that sees several: Transformers would choose DataParallel, which TRL refuses
        trl_config._n_gpu = 1
    return trl_config


def _arguments(config: GrpoVlmConfig, num_processes: int) -> dict[str, Any]:
    """The arguments that all keys except ``train.kwargs`` set."""
    train, rollout, run = config.train, config.rollout, config.run
    micro = micro_batch_size(train.batch_size, train.micro_batch_size, num_processes)
    precision = usable_precision(train.mixed_precision)
    revision = (
        config.model.revision if train.kl_coef > 0 and config.lora is None else None
    )  # of the reference model
    checkpointing: dict[str, Any] = {"gradient_checkpointing": train.gradient_checkpointing}
    if (
        "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    ):  # its name in later versions
        checkpointing = {
            "activation_checkpointing": train.gradient_checkpointing,
            "gradient_checkpointing": None,
        }
    return {
        "output_dir": str(Path(run.dir) / "checkpoints"),
        "max_steps": train.max_steps if train.max_steps is not None else -1,
        "num_train_epochs": train.epochs,
        "per_device_train_batch_size": micro * rollout.num_samples,
        "gradient_accumulation_steps": train.batch_size // (micro * num_processes),
        "num_generations": rollout.num_samples,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "use_vllm": rollout.engine == "vllm",
        "disable_dropout": not rollout.dropout,
        "mask_truncated_completions": train.mask_truncated,
        "reward_weights": [term.weight for term in config.reward.terms.values()],
        "beta": train.kl_coef,
        "model_init_kwargs": {"revision": revision} if revision is not None else None,
        "learning_rate": train.lr,
        "lr_scheduler_type": train.schedule
        if train.schedule != "constant"
        else "constant_with_warmup",
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.grad_clip_norm,
        # First the function, which also keeps DeepSpeed from compiling an extension on a CPU.
        "use_cpu": "cpu" in accelerator_kwargs()
        or torch.accelerator.current_accelerator(check_available=True) is None,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        **checkpointing,
        "seed": train.seed,
        "dataloader_num_workers": config.data.num_workers,
        "remove_unused_columns": False,
        "save_strategy": "steps",
        "save_steps": run.save_every,
        "save_total_limit": run.keep_checkpoints,
        "logging_steps": run.log_every,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",
        "report_to": run.trackers or "none",
        "disable_tqdm": not (
            sys.stderr.isatty() or "ipykernel" in sys.modules
        ),  # a notebook has its own bar
    }


def vllm_suppression(token_ids: Collection[int], vocabulary: int, mode: str) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams`` by which tokens are never sampled; it has no ``suppress_tokens``.

    Colocated, a bias of -100 nats. A server gets JSON, in which ids as keys would become text: the ids that are left.
    """
    if mode == "colocate":
        return {"logit_bias": dict.fromkeys(token_ids, -100.0)}
    return {
        "allowed_token_ids": [token for token in range(vocabulary) if token not in {*token_ids}]
    }


def check_engine(arguments: Any) -> None:
    """Raise ``ConfigError`` for an engine, which TRL's ``arguments`` or the launcher chose, that does not work here."""
    # Accelerate's launcher says it by this variable, which does not change the arguments.
    if arguments.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ConfigError(
            "FSDP is not supported (train.kwargs.fsdp, or the launcher): Accelerate uses it on GPUs only, where it is "
            "untested with this program; take configs/accelerate/deepspeed_zero3.yaml, which shards the same"
        )
    zero3 = getattr(getattr(arguments, "deepspeed_plugin", None), "zero_stage", 0) == 3
    if zero3 and not arguments.ds3_gather_for_generation:
        raise ConfigError(
            "train.kwargs.ds3_gather_for_generation is false: expected true, the only value that is tested"
        )


@contextmanager
def unsharded_models(arguments: Any) -> Iterator[None]:
    """Inside, Transformers loads and decodes models as without ZeRO-3.

    With it, a model forgets the names of its weights in files, and processes decode equally often, or wait for ever.
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


def find_trl_checkpoint(config: GrpoVlmConfig) -> tuple[int, Path | None]:
    """The checkpoint to resume and its step; 0 and None to start. Those that a kill cut off are passed over.

    Raises:
        CheckpointError: as for ``rl_caption.training.run_folder.find_checkpoint``.
    """
    folder, resume = Path(config.run.dir), config.run.resume
    if isinstance(resume, str) and resume not in ("auto", "true", "false"):
        if (step := step_of(Path(resume))) is None:
            raise CheckpointError(
                f"run.resume {resume!r} is not a complete checkpoint: it has no readable trainer_state.json"
            )
        return step, Path(resume)
    steps = [
        (step, path)
        for path in folder.glob("checkpoints/checkpoint-*")
        if (step := step_of(path)) is not None
    ]
    if not steps:
        return 0, None
    step, newest = max(steps)
    refuse_other_run(folder, newest.name, cast(Any, config))
    return step, newest


def step_of(checkpoint: Path) -> int | None:
    """The optimizer step of ``checkpoint``; None where ``trainer_state.json``, written last, is not complete."""
    try:
        return int(read_object(checkpoint / "trainer_state.json")["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fine_tune(config: GrpoVlmConfig) -> str:
    """Train, export to ``export/last``, evaluate; return the table of scores, which only the main process has.

    Raises:
        ConfigError, DataError, CheckpointError, LaunchError, EvaluationError, RewardError, NonFiniteError: what is
            wrong, and what would be right.
    """
    check_environment()
    needed = {
        "trl": True,
        "peft": config.lora is not None,
        "tensorboard": "tensorboard" in config.run.trackers,
    }
    if missing := [name for name in needed if needed[name] and find_spec(name) is None]:
        raise ConfigError(not_installed(*missing))
    if config.rollout.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine is 'vllm', which is not installed: pip install 'trl[vllm]', or leave it out"
        )
    quiet_libraries()
    # Before PartialState: these arguments choose the device and initialise the process group.
    arguments = trl_arguments(config, int(os.environ.get("WORLD_SIZE", "1")))
    state: Any = PartialState()
    check_processes(state.num_processes, config.train.num_processes)
    check_engine(arguments)
    if state.device.type == "cpu":
        use_cpu(state.num_processes, config.train.threads)
    with run_lock(config.run.dir) if state.is_main_process else nullcontext():
        start, checkpoint = find_trl_checkpoint(config)
        if (
            checkpoint is not None
            and config.run.resume == "auto"
            and is_complete(Path(config.run.dir))
        ):
            print_main(state, f"{config.run.dir} is complete: remove it, or choose another run.dir")
            return ""
        _, processor = load_processor(config.model)  # refuses a wrong model before data are read
        reader = VlmReader(processor, config.model.prompt)
        return _Run(config, state, arguments, start, checkpoint, reader).train_and_evaluate()


class _Run:
    """A run. Making it reads and checks data, rewards and judges; the model is loaded later."""

    def __init__(
        self,
        config: GrpoVlmConfig,
        state: Any,
        arguments: Any,
        start: int,
        checkpoint: Path | None,
        reader: VlmReader,
    ) -> None:
        self.config, self.state, self.arguments = config, state, arguments
        self.start, self.checkpoint = start, checkpoint
        self.folder, self.split = Path(config.run.dir), config.eval.split
        data = build_data(config.data)
        splits = dict.fromkeys(
            usable_split(data, split) for split in ("train", self.split or "train")
        )
        rows = checked_splits(config.data, data, list(splits), state, self.folder / CHECKED_IMAGES)
        rows = usable_rows(rows, reader, config.data.on_bad, state)
        self.train_rows = rows["train"]
        self.eval_rows = (
            rows[self.split][: config.eval.max_images] if self.split is not None else []
        )
        if len(self.train_rows) < config.train.batch_size:
            raise ConfigError(
                f"train.batch_size is {config.train.batch_size}: the training split has {len(self.train_rows)} usable "
                "images"
            )
        references = references_of(self.train_rows)
        with state.main_process_first():
            self.reward = build_reward(
                config.reward, references, self.folder, config.data.tokenizer
            )
        self.inputs: Inputs = {
            "reward": self.reward.signature,
            "data": fingerprint({"train": self.train_rows}),
            "model": weights_hash(config.model.name),
            "settings": settings_of(cast(Any, config)),
        }
        self._check_inputs()
        columns = {*COLUMNS, "finished"}
        for name, term in self.reward.rewards.items():
            if not term.columns <= columns:
                raise ConfigError(
                    f"reward.terms.{name} needs the columns {sorted(term.columns - columns)}: "
                    f"rewards get {sorted(columns)}"
                )
        self.judges: dict[str, Reward] = {}
        self.tables: dict[str, Evaluation] = {}
        """Name of the folder in ``eval/`` -> what was found; of the main process."""
        if state.is_main_process and self.split is not None:
            check_writable(self.folder / "eval")
            check_asked(config.eval.metrics, config.eval.tokenizer)
            words = words_tokenizer(config.eval.tokenizer, config.data.tokenizer)
            self.judges = build_judges(
                config.eval.judges, None, references_of(self.eval_rows), "eval.judges", words
            )
            check_judges(self.judges, self.eval_rows, f"split {self.split!r}")

    def _check_inputs(self) -> None:
        """Raise CheckpointError for a checkpoint of another reward, other data, another model or configuration, unless
        ``run.resume`` is true; and for a damaged one.
        """
        if self.checkpoint is None:
            return
        for state in (self.checkpoint / "optimizer.pt", self.checkpoint / "scheduler.pt"):
            try:
                if state.exists():
                    torch.load(state, map_location="cpu", weights_only=True, mmap=True)
            except (
                OSError,
                RuntimeError,
                ValueError,
                KeyError,
                EOFError,
                pickle.UnpicklingError,
            ) as error:
                raise CheckpointError(
                    f"{state} is damaged ({reason(error)}): {self._instead()}"
                ) from error
        file, resume = self.checkpoint / INPUTS, self.config.run.resume
        if not file.is_file():
            print_main(
                self.state,
                f"{self.checkpoint} was written by an older version: its reward and data cannot be compared",
            )
            return
        before = read_json(file, CheckpointError, Inputs)
        if (self.checkpoint / MANIFEST).is_file() and (
            change := damage(self.checkpoint)
        ) is not None:
            raise CheckpointError(f"{self.checkpoint} is damaged ({change}): {self._instead()}")
        data, times = changes(before["data"], self.inputs["data"])
        wrong = [f"data: {'; '.join(data)}"] if data else []
        if before["reward"] != self.inputs["reward"]:
            wrong.append(f"reward: {before['reward']} -> {self.inputs['reward']}")
        if "model" in before and before["model"] != self.inputs["model"]:
            wrong.append(f"weights of model.name: {before['model']} -> {self.inputs['model']}")
        if "settings" in before and resume == "auto":
            wrong += changed_settings(before["settings"], cast(Any, self.config))
        if wrong and resume == "auto":
            raise CheckpointError(
                f"{self.checkpoint} was trained with other inputs: {'; '.join(wrong)}. Undo that, choose another "
                "run.dir, or set run.resume to true to continue anyway"
            )
        if wrong or times:
            print_main(
                self.state,
                f"WARNING: {self.checkpoint} was trained with other inputs: {'; '.join([*wrong, *times])}",
            )

    def _instead(self) -> str:
        return f"remove {self.checkpoint}, and the run goes on from the checkpoint before"

    def train_and_evaluate(self) -> str:
        """Train, evaluate before and after, export; return the table of scores, empty outside the main process."""
        config, state = self.config, self.state
        with unsharded_models(self.arguments):
            vlm = load_vlm(config.model, self._dtype())
        trainer = self._trainer(
            vlm
        )  # before the first captions, as it refuses what is wrong; new adapters change none
        if self.split is not None and config.eval.before:
            name = f"{self.split}-before"
            results = self.folder / "eval" / name
            if self.checkpoint is not None and (results / "scores.json").is_file():
                self.tables[name] = read_scores(results, self.judges)
            else:
                self._evaluate(vlm, vlm.policy, name, trainer)
        if state.is_main_process:
            remove_result(self.folder)
            write_run_files(
                cast(Any, config),
                {"reward": self.reward.signature, "num_processes": state.num_processes},
            )
            drop_after(self.folder / "metrics.jsonl", self.start if self.checkpoint else -1)
        print_main(
            state,
            f"{config.trainer} on {len(self.train_rows)} images with the reward {self.reward.signature}",
        )
        step = self._train(trainer)
        sharded = trainer.deepspeed is not None  # not so where all steps were taken before
        with (
            gathered_parameters(trainer.accelerator, trainer.model_wrapped)
            if sharded
            else nullcontext()
        ):
            policy = trainer.accelerator.unwrap_model(trainer.model)
            if config.lora is not None:
                policy = policy.merge_and_unload()
            if state.is_main_process:
                export(vlm, policy, self.folder / "export" / "last")
            if self.split is not None:
                self._evaluate(vlm, policy, self.split, trainer)
        if not state.is_main_process:
            return ""
        metrics = {name: evaluation.metrics for name, evaluation in self.tables.items()}
        write_result(
            self.folder, {"step": step, "metrics": metrics, "reward": self.reward.signature}
        )
        return format_table(self.tables) if self.tables else ""

    def _dtype(self) -> str:
        if self.config.model.dtype != "auto":
            return self.config.model.dtype
        if self.config.lora is None:
            return "float32"
        return (
            "bfloat16" if self.arguments.bf16 else "float16" if self.arguments.fp16 else "float32"
        )

    def _trainer(self, vlm: Vlm) -> Any:
        from trl import GRPOTrainer, RLOOTrainer

        config, arguments = self.config, self.arguments
        # Instead of TRL's own, which suppresses the image token only.
        arguments.generation_kwargs = {"suppress_tokens": vlm.suppressed}
        if config.rollout.engine == "vllm":
            tokens, mode = len(vlm.processor.tokenizer), arguments.vllm_mode
            arguments.generation_kwargs = vllm_suppression(vlm.suppressed, tokens, mode)
        trainer_class: Any = GRPOTrainer if config.trainer == "grpo" else RLOOTrainer
        adapters = adapt(vlm.policy, config.lora, config.model.freeze)
        terms = self.reward.rewards.items()
        try:
            trainer = trainer_class(
                model=vlm.policy,
                reward_funcs=[
                    FinishedAware(reward, vlm.eos_token_ids, name) for name, reward in terms
                ],
                args=arguments,
                train_dataset=trl_dataset(self.train_rows, config.model.prompt),
                processing_class=vlm.processor,
                callbacks=[_Log(self.folder / "metrics.jsonl", self.reward, self.inputs)],
                peft_config=adapters,
            )
        except (ValueError, ImportError, NotImplementedError) as error:
            raise ConfigError(
                f"TRL refuses this configuration (train.kwargs, run.trackers): {error}"
            ) from error
        trainer.remove_callback(PrinterCallback)  # prints every value, without a unit
        folder = Path(self.arguments.output_dir)
        save = trainer._save_checkpoint
        trainer._save_checkpoint = save_or_discard(
            f"a checkpoint in {folder}", folder / ".partial"
        )(save)
        return trainer

    def _train(self, trainer: Any) -> int:
        """Train, or resume and train, to the end; return the last optimizer step."""
        checkpoint = str(self.checkpoint) if self.checkpoint is not None else None
        if checkpoint is not None:
            if self.config.lora is None:
                trainer._load_from_checkpoint = partial(load_weights, trainer.model)
            counts = trainer.set_initial_training_values(
                self.arguments, trainer.get_train_dataloader()
            )
            steps_per_epoch, max_steps = counts[1], counts[-1]
            if self.start >= max_steps:
                # train() would make one more step
                if (Path(checkpoint) / "zero_to_fp32.py").is_file():
                    load_deepspeed_weights(trainer.model, checkpoint)
                else:
                    trainer._load_from_checkpoint(checkpoint)
                return self.start
            skip_epochs(trainer, self.start // steps_per_epoch)
        with warnings.catch_warnings():  # TRL calls Transformers by deprecated names, at every step
            warnings.filterwarnings("ignore", r".*gradient_checkpointing", FutureWarning)
            trainer.train(resume_from_checkpoint=checkpoint)
        return int(trainer.state.global_step)

    def _evaluate(self, vlm: Vlm, policy: Any, name: str, trainer: Any) -> None:
        """Caption the split; in the main process, compute metrics and write both to ``eval/NAME``."""
        policy.to(self.state.device)
        options, rows = self.config.eval, self.eval_rows
        print_main(self.state, f"captioning {len(rows)} images of {options.split!r}")
        decoding = Decoding(
            num_beams=options.num_beams,
            max_new_tokens=self.config.rollout.max_new_tokens,
            batch_size=options.batch_size,
        )
        # In the precision of the training; judges score in their own.
        with unsharded_models(self.arguments):
            candidates = decode_candidates(
                cast(Any, vlm), policy, rows, decoding, trainer.accelerator, "captioning"
            )
        captions = {image_id: texts[0].caption for image_id, texts in candidates.items()}
        if not self.state.is_main_process:
            return
        evaluation = evaluate_rows(
            rows,
            list(captions.values()),
            metrics=options.metrics,
            tokenizer=metrics_tokenizer(options.tokenizer, self.config.data.tokenizer),
            training_captions={
                caption for texts in references_of(self.train_rows) for caption in texts
            },
        )
        self.tables[name] = add_judges(evaluation, rows, captions, self.judges)
        write_evaluation(self.tables[name], captions, self.folder / "eval" / name)
        model = self.folder / "export" / "last" if name == self.split else self.config.model.name
        settings = {
            "data": dataclasses.asdict(self.config.data),
            "split": self.split,
            "weights": weights_hash(model),
        }
        write_json(self.folder / "eval" / name / "settings.json", settings)


def skip_epochs(trainer: Any, epochs: int) -> None:
    """Let ``trainer`` order the images as if it had already gone through them ``epochs`` times.

    TRL's sampler draws the order of each epoch from a generator that no checkpoint holds, so a resumed run would begin
    with the order of the first epoch.
    """
    make = trainer._get_train_sampler

    def sampler(dataset: Any = None) -> Any:
        """The trainer's own sampler, after ``epochs`` epochs."""
        order = make(dataset)
        for _ in range(epochs):
            next(iter(order))  # draws the order of an epoch
        return order

    trainer._get_train_sampler = sampler


class _Log(TrainerCallback):
    """Appends what TRL logs to ``metrics.jsonl``, prints it, and ends a run whose loss is not finite."""

    def __init__(self, path: Path, reward: MixedReward, inputs: Mapping[str, Any]) -> None:
        self.path, self.reward, self.inputs = path, reward, inputs

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what the run was trained on, and a manifest, into the checkpoint that was just saved."""
        PartialState().wait_for_everyone()  # every process writes files
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(checkpoint / INPUTS, self.inputs)
            write_json(checkpoint / MANIFEST, manifest_of(checkpoint))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Use ``train.lr`` and ``train.weight_decay`` as given now, not the checkpoint's (``run.resume: true``)."""
        optimizer, scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
        if not state.global_step or not isinstance(scheduler, LambdaLR):  # of DeepSpeed
            return
        scheduler.base_lrs = [args.learning_rate] * len(optimizer.param_groups)
        # As the trainer made them: biases and gains have no decay. DeepSpeed leaves their group out where it is empty.
        decays = (args.weight_decay, 0.0)[: len(optimizer.param_groups)]
        for group, factor, weight_decay in zip(
            optimizer.param_groups, scheduler.lr_lambdas, decays, strict=True
        ):
            group |= {
                "lr": args.learning_rate * factor(scheduler.last_epoch),
                "weight_decay": weight_decay,
            }
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # what is logged

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Log and print the trainer's values."""
        values = dict(logs or {})
        if "loss" not in values:  # the totals after the last step
            return
        if state.is_world_process_zero:
            append_line(self.path, {"step": state.global_step, **values})
            tqdm.write(
                f"step {state.global_step}/{state.max_steps}  {self._line(values)}", file=sys.stderr
            )
        if not math.isfinite(values["loss"]):
            raise NonFiniteError(
                f"loss is {values['loss']} at step {state.global_step}: lower train.lr, or use bf16"
            )

    def _line(self, values: dict[str, Any]) -> str:
        terms = [
            f"{name} {values[f'rewards/{name}/mean']:.4g} ({term.bounds[0]:g} to {term.bounds[1]:g})"
            for name, term in self.reward.rewards.items()
        ]
        length, clipped = values["completions/mean_length"], values["completions/clipped_ratio"]
        return "  ".join([*terms, f"length {length:.1f} tokens", f"without EOS {clipped:.0%}"])
