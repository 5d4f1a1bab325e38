"""Policies as Hugging Face causal language models, with their tokenizers and files. Shared by trainer ranks and engines."""
