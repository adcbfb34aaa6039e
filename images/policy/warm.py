"""Import what vLLM's processes import at start, and inspect the model class: leaves bytecode and a cache entry."""

import importlib

import torch
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

MODULES = ["vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "transformers.models.lfm2.modeling_lfm2"]
if current_platform.is_cpu():
    # The GPU worker's modules need a GPU to be imported.
    MODULES += ["vllm.v1.worker.cpu_worker", "vllm.v1.executor.uniproc_executor", "vllm.model_executor.models.lfm2"]

for module in MODULES:
    importlib.import_module(module)
if current_platform.is_cpu() or torch.cuda.is_available():
    print(ModelRegistry.models["Lfm2ForCausalLM"].inspect_model_cls())
