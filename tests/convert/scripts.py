"""Parts of a training script for TRL."""

HEAD = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

def correct(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]
"""
TRAINER = """
data = load_dataset("json", data_files="rows.jsonl", split="train")
GRPOTrainer(model="embedded", reward_funcs=correct, args=args, train_dataset=data).train()
"""
