"""Renderers: messages to prompt tokens, completion tokens to text; used for rollouts, evaluation and the warm start."""

from typing import Protocol

from roll_core.config.model import ModelConfig, PretrainedModel, ScratchModel
from roll_core.errors import UserError, one_line
from roll_core.models import characters
from roll_core.types.trajectory import Message


class Renderer(Protocol):
    """Converter between messages or text and the model's token ids."""

    stop_token_ids: tuple[int, ...]
    """Token ids that end a completion."""

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Return the token ids of a prompt, up to where the policy begins to generate."""
        ...

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a completion text, with the stop token."""
        ...

    def text(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of a completion, without the stop token."""
        ...


class CharacterRenderer:
    """Renderer of models trained from scratch: messages are concatenated, one token per character."""

    stop_token_ids: tuple[int, ...] = (characters.EOS,)

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return characters.encode("".join(message.text for message in messages))

    def completion(self, text: str) -> tuple[int, ...]:
        return (*characters.encode(text), characters.EOS)

    def text(self, token_ids: tuple[int, ...]) -> str:
        return characters.decode(token_ids)


class ChatTemplateRenderer:
    """Renderer of a pretrained model: the tokenizer and chat template that came with it."""

    def __init__(self, model_path: str):
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(f"model.path: the tokenizer in {model_path} cannot be loaded ({one_line(error)})") from None
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"model.path: the tokenizer in {model_path} has no chat template to render prompts with, like most base "
                "models: put a file chat_template.jinja into the folder, for example that of the model's instruct version"
            )
        self.stop_token_ids: tuple[int, ...] = (self._tokenizer.eos_token_id,)
        self.num_tokens: int = len(self._tokenizer)
        """Number of tokens in the tokenizer, added ones included."""

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        chat = [{"role": message.speaker.value, "content": message.text} for message in messages]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def completion(self, text: str) -> tuple[int, ...]:
        return (*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id)

    def text(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def build_renderer(model: ModelConfig) -> Renderer:
    """Build the renderer that fits the model of a config."""
    match model:
        case ScratchModel():
            return CharacterRenderer()
        case PretrainedModel():
            return ChatTemplateRenderer(model.path)
