"""What `infer.LLM` returns for a request: names and shapes are vLLM's.  No JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm.
        rank: 1 is the likeliest token; None for a token that is not among the likeliest that were
            asked for, whose rank is not computed.
        decoded_token: its text by itself; bytes that are no character of their own give U+FFFD.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: which of the request's n samples it is.
        text: without the id or the stop string that ended it; empty without a tokenizer.
        token_ids: generated ids, the one that ended it included.
        cumulative_logprob: sum over the generated tokens.
        logprobs: one dict a token, {id: Logprob}, the drawn token first; None unless asked for.
        finish_reason: "stop", "length", or "abort" where the model's logits are not numbers.
        stop_reason: the stop string, or the id of `stop_token_ids`, that ended it; None where the
            model's own end of sequence or the length did.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None

    def finished(self) -> bool:
        """Return whether it has ended; here always."""
        return True


@dataclass(frozen=True)
class RequestOutput:
    """The result of one request.

    Attributes:
        request_id: a number as a string, counted up by the LLM.
        prompt: its text; None where it was given as ids.
        prompt_token_ids: its ids.
        prompt_logprobs: None for the first token, then one dict a token, {id: Logprob}; None unless
            asked for.
        outputs: one for each of the n samples.
        finished: always True here.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
