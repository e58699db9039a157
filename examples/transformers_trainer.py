"""A transformer that reads images of digits, row by row, with transformers' Trainer.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py --cpu --checkpoint DIR

Two lines are evenstride's: the import, and the name of the class. docs/how-to/transformers.md has
the details.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from evenstride.integrations.transformers import EvenTrainer  # 1: instead of Trainer

WIDTH = 192  # of the model, and so of a row


class Digits(Dataset):
    """Handwritten digits, 8 rows of 8 pixels each; a fifth of them for evaluation."""

    def __init__(self, *, train: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        chosen = (np.arange(len(images)) % 5 != 0) == train
        rows = torch.tensor(images[chosen], dtype=torch.float32).view(-1, 8, 8) / 8 - 1
        self.rows = rows.repeat_interleave(WIDTH // 8, dim=-1)
        self.labels = torch.tensor(labels[chosen])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs_embeds": self.rows[index], "labels": self.labels[index]}


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def small_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=1,
            num_labels=10,
            hidden_size=WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=8,
        )
    )


def main(args: argparse.Namespace) -> EvenTrainer:
    trainer = EvenTrainer(  # 2
        model=small_model(),
        args=TrainingArguments(
            output_dir=str(args.checkpoint or "runs/transformers"),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulate,
            per_device_eval_batch_size=256,
            learning_rate=1e-3,
            eval_strategy="epoch",
            save_strategy="epoch" if args.checkpoint else "no",
            save_total_limit=2,
            logging_steps=20,
            use_cpu=args.cpu,
            dataloader_pin_memory=not args.cpu,
            report_to="none",
        ),
        train_dataset=Digits(train=True),
        eval_dataset=Digits(train=False),
        compute_metrics=accuracy,
    )
    saved = args.checkpoint and args.checkpoint.exists()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.checkpoint) if saved else None)
    if trainer.is_world_process_zero():
        print(trainer.stride.summary())
    return trainer


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even with a GPU")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="samples per process and micro-step")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-steps per update")
    parser.add_argument("--checkpoint", type=Path, help="folder of the checkpoints")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
