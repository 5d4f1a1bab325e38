"""Prompt messages of a problem: its own text or messages, with the template and system message of the config."""

from collections.abc import Sequence

from roll_core.config.problems import PROMPT, PromptTemplate
from roll_core.types.trajectory import Message, Speaker


def prompt_messages(template: PromptTemplate, problem: str | Sequence[Message]) -> tuple[Message, ...]:
    """Build the messages of a problem. The template is applied to its text, or to its last user message."""
    messages = [Message(Speaker.USER, problem)] if isinstance(problem, str) else list(problem)
    user_indices = [index for index, message in enumerate(messages) if message.speaker is Speaker.USER]
    if not user_indices:
        raise ValueError("has no message of role 'user'")
    question = messages[user_indices[-1]].text
    messages[user_indices[-1]] = Message(Speaker.USER, template.template.replace(PROMPT, question))
    if template.system is None:
        return tuple(messages)
    if messages[0].speaker is Speaker.SYSTEM:
        raise ValueError("has a system message of its own: make problems.system null")
    return (Message(Speaker.SYSTEM, template.system), *messages)
