"""The step contract between gateway and engines: msgspec structs, no pickle.

A client (the gateway) sends `Attach` once, then `Request` and `Abort`. A rank answers with one `StepOutputs` a
step at most, which holds one `RequestUpdate` for each request that the step touched. Each request gets exactly one
terminal. Field order in an update is event order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

WIRE_VERSION = 2
MAX_LOGPROBS = 20  # best tokens that are told for one position, at most


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one request draws its tokens. Every field is honoured; what cannot be is refused by `Rejected`."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]; 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # in [0, 1); 0: off
    seed: int = 0  # unsigned 64 bits; the gateway draws one where the user gave none
    presence_penalty: float = 0.0  # in [-2, 2]; off the logit of every token generated before
    frequency_penalty: float = 0.0  # in [-2, 2]; the same, once for each time that it was generated
    repetition_penalty: float = 1.0  # above 0; prompt and generated tokens; 1: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """A client says that it is there; from now on it gets this rank's load."""

    version: int = WIRE_VERSION


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One sequence to generate. Token ids only: text never crosses this border."""

    id: str
    prompt_tokens: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_token_ids: tuple[int, ...] = ()  # the model's own eos ids included, unless the user said ignore_eos
    min_tokens: int = 0  # until so many are generated, no stop token can be drawn
    logprobs: int | None = None  # None: none; n: the chosen token's, and those of the n best (MAX_LOGPROBS)
    prompt_logprobs: int | None = None  # the same for every prompt token but the first; takes no prefix hit


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client is gone: free the request's pages within one step. Unknown ids are no error."""

    id: str


ToRank = Attach | Request | Abort


class ContextLength(msgspec.Struct, frozen=True, kw_only=True, tag="context_length"):
    """prompt + max_tokens can never fit the model's context."""

    prompt_tokens: int
    max_tokens: int
    limit: int


class CacheBudget(msgspec.Struct, frozen=True, kw_only=True, tag="cache_budget"):
    """The request's whole life can never fit this rank's cache."""

    tokens: int
    limit: int


class BadRequest(msgspec.Struct, frozen=True, kw_only=True, tag="bad_request"):
    """A field that the engine cannot honour; `param` is its name on the wire."""

    param: str
    message: str


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The fleet takes no new work."""


RejectReason = ContextLength | CacheBudget | BadRequest | Draining


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The request ran to its end. On "stop" the last token is the stop token: counted, not to be shown."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The request was never admitted and changed nothing."""

    reason: RejectReason


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not go on with this request (non-finite logits, the end of the fleet)."""

    message: str


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """Answer to `Abort` of a request that was known."""


Terminal = Finished | Rejected | Failed | Aborted


class Scheduled(msgspec.Struct, frozen=True, kw_only=True):
    """The request left the queue; seconds of the rank's monotonic clock."""

    queued_at_s: float
    scheduled_at_s: float


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """How probable the model thought one token, before penalties, bias and temperature.

    Natural logarithms of the softmax over the model's own logits. Tokens that can never be drawn (padding of the
    vocabulary, suppressed ids) count in that sum and are left out of `top`.
    """

    token: int
    logprob: float
    rank: int  # 1: the most probable of those that can be drawn, ties to the lowest id
    top: list[tuple[int, float]]  # (token id, logprob) of the n best, in order of rank


class RequestUpdate(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step did for one request."""

    id: str
    scheduled: Scheduled | None = None  # exactly once, before the first token
    cached_tokens: int | None = None  # with `scheduled`: prompt tokens whose rows were in the cache
    prompt_logprobs: list[TokenLogprob] = []  # of prompt tokens from index 1 on, in pieces as chunks complete
    tokens: list[int] = []  # none while prefill goes on; more than one when drafts are accepted
    logprobs: list[TokenLogprob] = []  # one for each of `tokens`, when they were asked for
    terminal: Terminal | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a router and a dashboard want to know of one rank."""

    num_running: int
    num_waiting: int
    used_pages: int  # held by or promised to requests; pages only kept for the prefix cache are not used
    total_pages: int  # without the padding page


class KvEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one rank's prefix cache, in order: names of pages (`pegahpc.page_names`) that can be hit or no more.

    A client that attaches first gets one message with `is_snapshot`: `stored` is then everything there is.
    """

    stored: list[bytes] = []
    removed: list[bytes] = []
    is_snapshot: bool = False


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the engine started that its loop spent in each phase."""

    schedule_s: float = 0.0
    forward_s: float = 0.0  # the decoder, exchanges included
    exchange_s: float = 0.0  # of that: waiting for peers
    sample_s: float = 0.0
    publish_s: float = 0.0
    idle_s: float = 0.0


class LayerExperts(msgspec.Struct, frozen=True, array_like=True):
    """One MoE layer's routed experts on one rank, since the start."""

    layer: int
    rows: list[int]  # that came to each local expert
    num_seen: int  # experts with rows, summed over steps


class ExpertLoads(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's experts were asked to do since the start."""

    num_steps: int  # in which some rank had work: the same on all ranks
    first_expert: int
    layers: list[LayerExperts]


class StepOutputs(msgspec.Struct, kw_only=True):
    """At most one message a step and client; with no updates at least every `HEARTBEAT_S`.

    `step` counts every step, idle ones included: it is the rank's pulse.
    """

    rank: int
    step: int
    load: Load
    updates: list[RequestUpdate] = []
    kv_events: KvEvents | None = None
    phases: PhaseTimes | None = None  # with heartbeats
    experts: ExpertLoads | None = None  # with heartbeats


HEARTBEAT_S = 0.25

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_outputs = msgspec.msgpack.Decoder(StepOutputs).decode
