"""`infer chat`: a conversation at the terminal, or from a pipe."""

import contextlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.drafting import check_draft, drafter_of
from infer.cli.generate import write_stream
from infer.cli.loading import load_model, use_compilation_cache
from infer.cli.options import (
    DraftOption,
    DraftRuleOption,
    DtypeOption,
    ImplementationOption,
    KVDtypeOption,
    MinPOption,
    ModelOption,
    PackedOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    value_of,
)
from infer.cli.request import Prompt, sampling_fields, sampling_params
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.generation import StreamState

_COMMANDS = "/reset forgets the conversation, /exit ends (so does Ctrl-D); Ctrl-C stops a reply"


def chat(
    model: ModelOption,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a reply at most.")] = 512,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    kv_dtype: KVDtypeOption = None,
    draft: DraftOption = None,
    draft_rule: DraftRuleOption = None,
    implementation: ImplementationOption = None,
    dtype: DtypeOption = None,
    packed: PackedOption = None,
) -> None:
    """Talk with a model; from a pipe, every line is a message."""
    use_compilation_cache()
    base = sampling_fields(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    sampling = sampling_params(base, Prompt(text="", where="options"))
    check_draft(draft, draft_rule)
    form = value_of(implementation)
    loaded, _ = load_model(model, dtype, packed, form)
    if not loaded.tokenizer.chat_template:
        raise ConfigError(
            f"{model} has no chat template (a base model?), so it cannot chat; "
            f"continue a text with `infer generate --model {model}` or take an instruct model"
        )
    options: dict[str, Any] = {"kv_dtype": value_of(kv_dtype), "implementation": form}
    if draft is not None:
        options["draft"] = drafter_of(draft, loaded, dtype, packed, form, draft_rule)
    options = {name: value for name, value in options.items() if value is not None}
    Conversation(loaded, sampling, system, options).run()


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(
        self,
        model: Any,
        sampling: Any,
        system: str | None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.model, self.sampling, self.options = model, sampling, options
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.state: StreamState | None = None  # of the last reply: what was said is not prefilled
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Answer line after line until the input ends or /exit."""
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (editing and history for input())
            print(_COMMANDS, file=sys.stderr)
        while (line := self._read()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self.messages, self.state = list(self.opening), None
            elif text.startswith("/") and len(text.split()) == 1:
                print(f"unknown command {text}: {_COMMANDS}", file=sys.stderr)
            elif text:
                self._answer(text)

    def _read(self) -> str | None:
        """Return the next line, None at the end; Ctrl-C at the prompt only clears the line."""
        if not self.interactive:
            line = sys.stdin.readline()
            return line if line else None
        while True:
            try:
                return input("> ")
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D ends)", file=sys.stderr)

    def _answer(self, text: str) -> None:
        """Stream one reply; what was said of an interrupted one stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            ids = self.model.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True
            )
            reply = self.model.stream(ids, sampling=self.sampling, state=self.state, **self.options)
            write_stream(_kept(reply, said))
            self.state = reply.state
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            print("\n(stopped)", file=sys.stderr)
        except ValueError as error:  # too long for the context, refused by the template
            if not self.interactive:
                raise
            self.messages.pop()
            print(f"{error} (/reset starts anew)", file=sys.stderr)
            return
        print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(said)})


def _kept(pieces: Any, said: list[str]) -> Any:
    for piece in pieces:
        said.append(piece)
        yield piece
