"""The tree of errors. Each kind has an HTTP status, a stable code and advice.

`api` turns any of them into an OpenAI-style body: {"error": {"message", "type", "param", "code"}}.
Foreign exceptions are translated into these at one border, where they arise.
docs/reference/errors.md is generated from it.
"""

from __future__ import annotations


class SplitserveError(Exception):
    """Base of all errors that may reach a client or an operator."""

    status: int = 500
    code: str = "internal_error"
    type: str = "server_error"
    advice: str = "This is a fault of the server. Retry; if it stays, report the request id."
    retry_after_s: float | None = None

    def __init__(
        self, message: str, *, param: str | None = None, advice: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if advice is not None:
            self.advice = advice

    def body(self) -> dict[str, dict[str, str | None]]:
        """The OpenAI error object for this error."""
        return {
            "error": {
                "message": f"{self.message} {self.advice}".strip(),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


# --- the client's errors: nothing was lost, nothing will change by repeating the same request -----


class InvalidRequest(SplitserveError):
    """A body or field that can't be understood."""

    status, code, type = 400, "invalid_request", "invalid_request_error"
    advice = ""


class MalformedJSON(InvalidRequest):
    """The body is not JSON."""

    code = "malformed_json"
    advice = "Send a JSON object with content-type application/json."


class InvalidValue(InvalidRequest):
    """A field has the wrong type or a value outside its range."""

    code = "invalid_value"


class UnsupportedField(InvalidRequest):
    """A field, or a value of a field, that this server does not honour."""

    code = "unsupported_field"
    advice = "Leave it out: this server refuses what it does not honour, rather than ignore it."


class UnknownField(InvalidRequest):
    """A field that is not part of the API."""

    code = "unknown_field"
    advice = "Check its spelling; unknown fields are refused, rather than ignored."


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model's context or the workers' KV pool."""

    code = "context_length_exceeded"
    advice = "Shorten the prompt or lower max_tokens."


class RefusedByEngine(InvalidRequest):
    """An adopted server refused the request; its status and reason are passed on."""

    code = "refused_by_engine"


class ModelNotFound(SplitserveError):
    """The request names a model that is not served here."""

    status, code, type = 404, "model_not_found", "invalid_request_error"
    advice = "GET /v1/models lists what is served."


class RouteNotFound(SplitserveError):
    """No such path."""

    status, code, type = 404, "route_not_found", "invalid_request_error"
    advice = "See /v1/models, /v1/chat/completions, /v1/completions, /health, /ready, /metrics."


class MethodNotAllowed(SplitserveError):
    """The path exists, with another method."""

    status, code, type = 405, "method_not_allowed", "invalid_request_error"
    advice = ""


class MalformedHTTP(SplitserveError):
    """What came over the connection is not a request."""

    status, code, type = 400, "malformed_http", "invalid_request_error"
    advice = "The connection is closed."


class HeadersTooLarge(SplitserveError):
    """The request's line and headers are larger than the limit."""

    status, code, type = 431, "headers_too_large", "invalid_request_error"
    advice = "Send fewer or shorter headers."


class BodyTooLarge(SplitserveError):
    """The body is larger than the limit."""

    status, code, type = 413, "body_too_large", "invalid_request_error"
    advice = "Shorten the prompt."


class BodyTimeout(SplitserveError):
    """The client did not send its body in time."""

    status, code, type = 408, "body_timeout", "invalid_request_error"
    advice = "Send the whole body at once."


# --- the server's state: the same request may succeed later --------------------------------------


class Overloaded(SplitserveError):
    """No capacity within the admission deadline."""

    status, code, type = 429, "overloaded", "rate_limit_error"
    advice = "Retry after the time in the Retry-After header."
    retry_after_s = 2.0


class Draining(SplitserveError):
    """The server is shutting down and takes no new requests."""

    status, code = 503, "draining"
    advice = "Retry on another server."
    retry_after_s = 1.0


class NoWorker(SplitserveError):
    """No worker that can do this came up within the deadline."""

    status, code = 503, "no_worker"
    advice = "Workers are starting or restarting: retry shortly; GET /ready tells."
    retry_after_s = 5.0


class WorkerLost(SplitserveError):
    """Workers died under this request more often than its retry budget allows."""

    status, code = 502, "worker_lost"
    advice = "Retry; if the same request fails again, it may be what kills the worker."


class DeadlineExceeded(SplitserveError):
    """A phase of the request took longer than its deadline."""

    status, code = 504, "deadline_exceeded"
    advice = "The server is too slow or too busy for this request: retry, or shorten it."


class WorkerFault(SplitserveError):
    """A worker reported an error in its own code for this request."""

    status, code = 500, "worker_fault"


class DeviceLost(SplitserveError):
    """A device failed under a worker: its process can compute nothing any more and ends."""

    status, code = 500, "device_lost"


class SlowClient(SplitserveError):
    """The client did not read its stream for longer than the limit."""

    status, code, type = 408, "slow_client", "invalid_request_error"
    advice = "Read the stream as it arrives."


class Cancelled(SplitserveError):
    """The client went away: nobody reads this answer any more."""

    status, code, type = 499, "cancelled", "invalid_request_error"
    advice = ""


# --- configuration and start-up: shown to the operator, never to a client -------------------------


class ConfigError(SplitserveError):
    """A setting that is unknown, out of range or contradicts another."""

    status, code, type = 400, "config_error", "config_error"
    advice = ""


class ModelUnavailable(SplitserveError):
    """A model can't be fetched or read."""

    status, code, type = 400, "model_unavailable", "config_error"
    advice = ""


class UnsupportedModel(SplitserveError):
    """A model whose architecture the engine can't carry."""

    status, code, type = 400, "unsupported_model", "config_error"
    advice = ""


class FormatMismatch(SplitserveError):
    """Two workers' KV formats, identities or wire versions differ; both values are named."""

    status, code = 500, "format_mismatch"
    advice = ""


class TransferFailed(SplitserveError):
    """KV could not be fetched, or came without a proof that it is right."""

    status, code = 502, "transfer_failed"
    advice = ""


class StoreError(SplitserveError):
    """A tier of the KV store can't be reached. Requests go on without it."""

    status, code = 502, "store_unreachable"
    advice = ""
