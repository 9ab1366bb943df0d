"""Metrics of a scoring service, in the Prometheus format; `prometheus_client` is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from securevfl.network.dispatcher import ServiceDispatcher
from securevfl.network.http import Response

MISSING = b"metrics need prometheus_client: pip install 'securevfl[serving]'\n"
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class ServiceMetrics:
    """Counts requests and their latencies; without the extra it counts nothing, and says so where asked."""

    def __init__(self) -> None:
        try:
            import prometheus_client
        except ImportError:
            self._client: Any = None
            return
        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        made: Mapping[str, Any] = {"registry": self._registry}
        self._requests = prometheus_client.Counter(
            "securevfl_score_requests", "Requests of clients, by status", ["status"], **made
        )
        self._seconds = prometheus_client.Histogram(
            "securevfl_score_seconds", "Seconds until a request was answered", buckets=BUCKETS, **made
        )
        gauges = {
            "scored": "People scored, by the ledger",
            "queued": "People who wait",
            "rounds": "Requests between the organisations, of this process",
            "ready": "Whether somebody would be scored now",
            "away": "Organisations that are away",
        }
        self._gauges = {
            name: prometheus_client.Gauge(f"securevfl_{name}", words, ["model"], **made)
            for name, words in gauges.items()
        }

    def count(self, status: int, seconds: float) -> None:
        """Counts one request."""
        if self._client is not None:
            self._requests.labels(str(status)).inc()
            self._seconds.observe(seconds)

    def page(self, dispatchers: Mapping[str, ServiceDispatcher]) -> Response:
        """The page that Prometheus reads."""
        if self._client is None:
            return Response(HTTPStatus.NOT_IMPLEMENTED, MISSING)
        for model, dispatcher in dispatchers.items():
            found = {
                "scored": dispatcher.used,
                "queued": dispatcher.queued,
                "rounds": dispatcher.asked,
                "ready": dispatcher.ready,
                "away": len(dispatcher.away()),
            }
            for name, value in found.items():
                self._gauges[name].labels(model).set(float(value))
        body = self._client.generate_latest(self._registry)
        return Response(HTTPStatus.OK, body, "text/plain; version=0.0.4; charset=utf-8")
