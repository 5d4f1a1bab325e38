"""Policies as Hugging Face causal language models, and their tokenizers, built from config. Shared by trainers and engines."""
