"""Prometheus metrics under the names that vLLM's dashboards read. `engine` is the rank.

**Source** vLLM's `vllm/v1/metrics/loggers.py` for names and buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from pegahpc.gateway.expert_counters import ExpertCounters
from pegahpc.gateway.histograms import Histogram
from pegahpc.gateway.router import Reason
from pegahpc.gateway.step_counters import StepCounters
from pegahpc.wire.messages import ExpertLoads, Load, PhaseTimes, RequestUpdate

LABELS: Final = ("model_name", "engine")
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class GatewayMetrics:
    """All of a gateway's metrics, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, what, LABELS, bounds=buckets)
            registry.register(made)
            return made

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(name, what, (*LABELS, *labels), registry=registry)

        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Time between a request's tokens.", ITL_BUCKETS_S)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S)
        self.queue = histogram("vllm:request_queue_time_seconds", "Time in the rank's queue.", REQUEST_BUCKETS_S)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens admitted.")
        self.by_source = counter("vllm:prompt_tokens_by_source", "Prompt tokens computed, or cached.", "source")
        self.cache_queries = counter("vllm:prefix_cache_queries", "Tokens that were looked up in the prefix cache.")
        self.cache_hits = counter("vllm:prefix_cache_hits", "Tokens that were found in the prefix cache.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.success = counter("vllm:request_success", "Requests by how they ended.", "finished_reason")
        self.routed = counter("pegahpc:routing_decisions", "Requests by what decided for their rank.", "reason")
        self.running = Gauge("vllm:num_requests_running", "Requests that decode.", LABELS, registry=registry)
        self.waiting = Gauge("vllm:num_requests_waiting", "Requests in the queue.", LABELS, registry=registry)
        self.cache = Gauge("vllm:kv_cache_usage_perc", "Used share of the cache, 1 is full.", LABELS, registry=registry)
        self.prefix_pages = Gauge(
            "pegahpc:prefix_pages", "Cached pages that the router knows of.", LABELS, registry=registry
        )
        self.steps = StepCounters(LABELS)
        registry.register(self.steps)
        self.experts = ExpertCounters(LABELS)
        registry.register(self.experts)
        self._http = Counter("http_requests", "Responses.", ("handler", "status"), registry=registry)

    def for_rank(self, rank: int) -> RankMetrics:
        """The children of one rank."""
        return RankMetrics(self, self._model_name, str(rank))

    def count_response(self, handler: str, status: int) -> None:
        """One HTTP answer; `handler` is a route, never a path that a client made up."""
        self._http.labels(handler, str(status)).inc()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)


class RankMetrics:
    """One rank's children, looked up once."""

    def __init__(self, metrics: GatewayMetrics, model_name: str, engine: str) -> None:
        labels = self._labels = (model_name, engine)
        self.ttft = metrics.ttft.labels(*labels)
        self.itl = metrics.itl.labels(*labels)
        self.e2e = metrics.e2e.labels(*labels)
        self.queue = metrics.queue.labels(*labels)
        self.prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self.computed = metrics.by_source.labels(*labels, "computed")
        self.cached = metrics.by_source.labels(*labels, "cached")
        self.cache_queries = metrics.cache_queries.labels(*labels)
        self.cache_hits = metrics.cache_hits.labels(*labels)
        self.generation_tokens = metrics.generation_tokens.labels(*labels)
        self.finished = {
            reason: metrics.success.labels(*labels, reason) for reason in ("stop", "length", "abort", "error")
        }
        self.routed = {reason: metrics.routed.labels(*labels, reason) for reason in get_args(Reason)}
        self._gauges = (metrics.running.labels(*labels), metrics.waiting.labels(*labels), metrics.cache.labels(*labels))
        self._prefix_pages = metrics.prefix_pages.labels(*labels)
        self._steps, self._experts = metrics.steps, metrics.experts

    def watch(
        self,
        load: Callable[[], Load],
        *,
        num_prefix_pages: Callable[[], int],
        totals: Callable[[], tuple[int, PhaseTimes]],
        experts: Callable[[], ExpertLoads],
    ) -> None:
        """Read the rank's newest load, its known pages, its steps and phases, its experts when scraped."""
        self._prefix_pages.set_function(num_prefix_pages)
        self._steps.watch(self._labels, totals)
        self._experts.watch(self._labels, experts)
        running, waiting, cache = self._gauges
        running.set_function(lambda: load().num_running)
        waiting.set_function(lambda: load().num_waiting)
        cache.set_function(lambda: load().used_pages / max(load().total_pages, 1))

    def times(self, arrived_s: float, *, num_prompt_tokens: int) -> RequestTimes:
        """The clock of one request."""
        return RequestTimes(self, arrived_s, num_prompt_tokens)


class RequestTimes:
    """When a request arrived, and what its updates say about speed."""

    def __init__(self, metrics: RankMetrics, arrived_s: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._num_prompt_tokens = num_prompt_tokens
        self._last_token_s: float | None = None

    def on_update(self, update: RequestUpdate, now_s: float) -> None:
        """One step's update."""
        if update.scheduled is not None:
            self._metrics.queue.observe(update.scheduled.scheduled_at_s - update.scheduled.queued_at_s)
            self._count_prompt(update.cached_tokens or 0)
        if update.tokens:
            if self._last_token_s is None:
                self._metrics.ttft.observe(now_s - self._arrived_s)
            else:
                self._metrics.itl.observe((now_s - self._last_token_s) / len(update.tokens))
            self._last_token_s = now_s

    def _count_prompt(self, num_cached_tokens: int) -> None:
        """A count that cannot be is cut, not raised: it must not end the reader of the whole rank."""
        num_cached_tokens = min(max(num_cached_tokens, 0), self._num_prompt_tokens)
        metrics = self._metrics
        metrics.prompt_tokens.inc(self._num_prompt_tokens)
        metrics.cache_queries.inc(self._num_prompt_tokens)
        metrics.cache_hits.inc(num_cached_tokens)
        metrics.cached.inc(num_cached_tokens)
        metrics.computed.inc(self._num_prompt_tokens - num_cached_tokens)

    def on_end(self, outcome: str, now_s: float) -> None:
        """The request is over: stop, length, abort (the client left) or error."""
        self._metrics.finished[outcome].inc()
        if outcome in ("stop", "length"):
            self._metrics.e2e.observe(now_s - self._arrived_s)
