"""The messages a problem is put to the policy in: its own text or messages, and the words that the config adds."""

from collections.abc import Sequence

from roll_core.config.problems import PROMPT, PromptTemplate
from roll_core.types.trajectory import Message, Speaker


def worded(wording: PromptTemplate, problem: str | Sequence[Message]) -> tuple[Message, ...]:
    """A problem as messages. The template is put around its text, or around the last message the user says."""
    messages = [Message(Speaker.USER, problem)] if isinstance(problem, str) else list(problem)
    asked = [place for place, message in enumerate(messages) if message.speaker is Speaker.USER]
    if not asked:
        raise ValueError("has no message of role 'user'")
    question = messages[asked[-1]].text
    messages[asked[-1]] = Message(Speaker.USER, wording.template.replace(PROMPT, question))
    if wording.system is None:
        return tuple(messages)
    if messages[0].speaker is Speaker.SYSTEM:
        raise ValueError("has a system message of its own: make problems.system null")
    return (Message(Speaker.SYSTEM, wording.system), *messages)
