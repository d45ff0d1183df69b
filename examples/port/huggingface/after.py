"""Train a tiny BERT to classify sequences with the Trainer of transformers.

python before.py --output_dir runs/bert --num_train_epochs 3 --learning_rate 1e-3
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from paceline.huggingface import PacedTrainer as Trainer


@dataclass
class DataTrainingArguments:
    max_train_samples: int = field(default=1024, metadata={"help": "The number of training examples."})
    max_eval_samples: int = field(default=256, metadata={"help": "The number of evaluation examples."})
    max_seq_length: int = field(default=16, metadata={"help": "The length of a sequence, in tokens."})


@dataclass
class ModelArguments:
    hidden_size: int = field(default=32)
    num_hidden_layers: int = field(default=2)
    hidden_dropout_prob: float = field(default=0.1)


class Sequences(Dataset):
    """Sequences of random tokens. The label says whether one of the first ten tokens of the vocabulary occurs twice."""

    def __init__(self, count, length, seed):
        self.tokens = torch.randint(0, 100, (count, length), generator=torch.Generator().manual_seed(seed))
        self.labels = ((self.tokens < 10).sum(dim=1) >= 2).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.labels[index]}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    train_dataset = Sequences(data_args.max_train_samples, data_args.max_seq_length, seed=1)
    eval_dataset = Sequences(data_args.max_eval_samples, data_args.max_seq_length, seed=2)

    config = BertConfig(
        vocab_size=100,
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=2,
        intermediate_size=4 * model_args.hidden_size,
        hidden_dropout_prob=model_args.hidden_dropout_prob,
        attention_probs_dropout_prob=model_args.hidden_dropout_prob,
        max_position_embeddings=data_args.max_seq_length,
    )
    model = BertForSequenceClassification(config)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
    )

    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
