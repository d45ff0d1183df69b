"""Refuse mistakes of a Trainer in a job, each with one sentence that says what to do."""

from __future__ import annotations

from typing import Any

from paceline.train.processes import check_one_rank

PROCESSES = (
    "TrainingArguments found {} processes of torch.distributed; paceline connects the processes of a job itself: start "
    "the script with `paceline run --workers {}`, not with `torchrun` or `accelerate launch --num_processes {}`."
)
SHARDED = (
    "{} divides the parameters among processes, and a worker needs all of them; leave out {} (the optimizer's state is "
    "on the server, not on the GPU)."
)
GPUS = (
    "This worker would use {} GPUs with DataParallel; start one worker for each GPU, and give each its own by "
    "CUDA_VISIBLE_DEVICES."
)
SEARCH = "hyperparameter_search() trains many models, and a job trains one; run the search under plain `python`."
ONE_RUN = (
    "auto_find_batch_size begins training anew with another batch size, and a job trains once; "
    "set per_device_train_batch_size, and leave out auto_find_batch_size."
)


def check(trainer: Any) -> None:
    """Raise ValueError if this Trainer cannot take part in a job."""
    args = trainer.args
    check_one_rank()
    if trainer.is_deepspeed_enabled:
        raise ValueError(SHARDED.format("DeepSpeed", "deepspeed"))
    if trainer.is_fsdp_enabled:
        raise ValueError(SHARDED.format("FSDP", "fsdp"))
    if args.world_size > 1:
        count = args.world_size
        raise ValueError(PROCESSES.format(count, count, count))
    if args.n_gpu > 1:
        raise ValueError(GPUS.format(args.n_gpu))
    if args.auto_find_batch_size:
        raise ValueError(ONE_RUN)
