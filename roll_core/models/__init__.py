"""Policies as Hugging Face causal language models, and their tokenizers. Shared by trainers and engines."""
