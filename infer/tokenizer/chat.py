"""Rendering a conversation with a model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from infer.errors import ConfigError, RequestError
from infer.tokenizer.metering import BUDGET, Budget
from infer.tokenizer.sandbox import ChatEnvironment

MAX_SOURCE = 1 << 18  # the longest template seen in the wild has some 20,000 characters

# What evaluating an expression of a template can raise, Python's own errors included.
_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template; rendering keeps nothing, so threads may share it.

    Raises:
        ConfigError: the source does not compile.
    """

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise ConfigError(
                f"the chat template has {len(source):,} characters; {MAX_SOURCE:,} are allowed"
            )
        try:
            self._template = ChatEnvironment().compile_metered(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ConfigError(f"the chat template does not compile: {_one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Raises:
            RequestError: a message has no role, or the template refused the messages, failed, or
                did what the sandbox forbids.
        """
        _check_messages(messages)
        token = BUDGET.set(Budget())
        try:
            return "".join(
                self._template.generate(
                    messages=messages,
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    documents=documents,
                    **variables,
                )
            )
        except SecurityError as error:
            raise RequestError(f"the chat template was stopped: {_one_line(error)}") from error
        except TemplateError as error:
            raise RequestError(f"the chat template refused: {_one_line(error)}") from error
        except _FAILURES as error:
            raise RequestError(
                f"the chat template failed: {type(error).__name__}: {_one_line(error)}"
            ) from error
        finally:
            BUDGET.reset(token)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is {type(messages).__name__}; give a list like "
            "[{'role': 'user', 'content': '...'}]"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] has no role; give {{'role': ..., 'content': ...}}")
