"""``python weights.py GGUF FOLDER``, in vLLM's environment: a Llama's GGUF as safetensors in bfloat16 and its tokenizer."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

gguf, folder = Path(sys.argv[1]), Path(sys.argv[2])
read = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
loaded = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
# A fresh model: what was read from a GGUF remembers that it was quantised, and so would its configuration.
del loaded.config.quantization_config
plain = LlamaForCausalLM(loaded.config)
plain.load_state_dict(loaded.state_dict())
plain.to(torch.bfloat16).save_pretrained(folder)
AutoTokenizer.from_pretrained(**read).save_pretrained(folder)
