"""Loading Hugging Face weights into models of any layout, and saving them: see docs/huggingface.md.

`transformers` and `peft` are not needed, except for adapters; the files are in their formats.
"""

from terrazzo.integrations.huggingface.adapters import load_adapter, save_adapter
from terrazzo.integrations.huggingface.families import llama, mixtral, qwen3, qwen3_moe
from terrazzo.integrations.huggingface.load import load_model
from terrazzo.integrations.huggingface.rename import Rename, Rule
from terrazzo.integrations.huggingface.save import save_model

__all__ = [
    "Rename",
    "Rule",
    "llama",
    "load_adapter",
    "load_model",
    "mixtral",
    "qwen3",
    "qwen3_moe",
    "save_adapter",
    "save_model",
]
