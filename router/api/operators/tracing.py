"""OpenTelemetry spans of requests: one for the request, and below it those of each answer's queue, prefill and
decode. They are made when a request has ended, so they cost its tokens nothing.

The module needs the packages of the extra `otel`; only a service with --otlp-endpoint imports it.
"""

import time

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lightkv import __version__
from lightkv.router.api.answers.generation import Answer

from .request_log import RequestRecord


class SpanTracer:
    """Makes the spans of each record, and gives them to `processor`. `model`: an attribute of the spans.

    `close` sends what is left.
    """

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        resource = Resource({"service.name": "lightkv", "service.version": __version__})
        # No limit is read from the environment of the process that imports this.
        self._provider = TracerProvider(resource=resource, span_limits=SpanLimits(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("lightkv", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    @classmethod
    def to_collector(cls, endpoint: str, model: str) -> "SpanTracer":
        """Returns a tracer that sends spans by OTLP over HTTP to `endpoint`, in a thread. Spans that the
        collector does not take are dropped."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model)

    def record(self, record: RequestRecord) -> None:
        """Makes the spans of a request that has ended."""
        offset = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + offset

        carrier = {"traceparent": record.traceparent} if record.traceparent else {}
        parent = self._propagator.extract(carrier, Context())
        span = self._tracer.start_span(
            f"{record.method} {record.route or 'unknown'}",
            parent,
            SpanKind.SERVER,
            start_time=at(record.begun),
            attributes={
                "http.request.method": record.method,
                "http.route": record.route or "",
                "http.response.status_code": record.status or 0,
                "lightkv.request_id": record.id,
            },
        )
        generation = record.generation
        if generation is not None:
            span.set_attributes(
                {
                    "gen_ai.request.model": self._model,
                    "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
                    "gen_ai.usage.output_tokens": generation.num_completion_tokens,
                    "lightkv.cached_tokens": generation.num_hit_tokens,
                    "gen_ai.response.finish_reasons": [
                        answer.completion.finish_reason or "abort" for answer in generation.answers
                    ],
                }
            )
            below = set_span_in_context(span, Context())
            for answer in generation.answers:
                of_answer = {"lightkv.answer": answer.index}
                for name, start, end in phases(answer, record.ended):
                    child = self._tracer.start_span(name, below, start_time=at(start), attributes=of_answer)
                    child.end(at(end))
        if (record.status or 500) >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(at(record.ended))

    def close(self) -> None:
        """Sends the spans that wait, and ends the thread that does."""
        self._provider.shutdown()


def phases(answer: Answer, ended: float) -> list[tuple[str, float, float]]:
    """Returns (name, begin, end) of an answer's queue, prefill and decode, in monotonic seconds, as far as it
    came. `ended`: when its request has. An answer without a token counts as queued."""
    clock = answer.clock
    if clock.first is None:
        return [("queue", clock.begun, clock.ended or ended)]
    admitted = min(clock.begun + (clock.waited or 0.0), clock.first)
    return [
        ("queue", clock.begun, admitted),
        ("prefill", admitted, clock.first),
        ("decode", clock.first, clock.ended or ended),
    ]
