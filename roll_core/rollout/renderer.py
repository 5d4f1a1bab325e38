"""Messages to prompt tokens and completion tokens to text. One rendering for rollouts, evaluation and the warm start."""

from typing import Protocol

from roll_core.config.model import ModelConfig, PretrainedModel, ScratchModel
from roll_core.models import characters
from roll_core.types.trajectory import Message


class Renderer(Protocol):
    stop_token_ids: tuple[int, ...]

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Tokens after which the policy speaks."""
        ...

    def completion(self, text: str) -> tuple[int, ...]:
        """Tokens of a text the policy could have said, with the stop token."""
        ...

    def text(self, token_ids: tuple[int, ...]) -> str:
        """What a completion says, without the stop token."""
        ...


class CharacterRenderer:
    """Messages joined as they are, a token a character."""

    stop_token_ids: tuple[int, ...] = (characters.EOS,)

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return characters.encode("".join(message.text for message in messages))

    def completion(self, text: str) -> tuple[int, ...]:
        return (*characters.encode(text), characters.EOS)

    def text(self, token_ids: tuple[int, ...]) -> str:
        return characters.decode(token_ids)


class ChatTemplateRenderer:
    """The chat template that came with a pretrained model."""

    def __init__(self, model_path: str):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        self.stop_token_ids: tuple[int, ...] = (self._tokenizer.eos_token_id,)

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        chat = [{"role": message.speaker.value, "content": message.text} for message in messages]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def completion(self, text: str) -> tuple[int, ...]:
        return (*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id)

    def text(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def build_renderer(model: ModelConfig) -> Renderer:
    match model:
        case ScratchModel():
            return CharacterRenderer()
        case PretrainedModel():
            return ChatTemplateRenderer(model.path)
