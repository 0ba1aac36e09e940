"""BERT and T5 of Hugging Face: pip install transformers; compile_sweep.py --model hf:bert"""

import torch
import transformers
from torch.nn.functional import cross_entropy


def bert(device):
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForMaskedLM(config).to(device)
    text = torch.randint(config.vocab_size, (4, 512), device=device)
    return model, (text,), lambda output: cross_entropy(output.logits.flatten(0, 1), text.flatten())


def t5(device):
    # a key-value cache does not work with activation checkpointing
    config = transformers.T5Config(dropout_rate=0.0, use_cache=False)
    model = transformers.T5ForConditionalGeneration(config).to(device)
    text = torch.randint(config.vocab_size, (4, 512), device=device)
    inputs = (text, torch.ones_like(text), text)  # encoder, attention mask, decoder
    return model, inputs, lambda output: cross_entropy(output.logits.flatten(0, 1), text.flatten())
