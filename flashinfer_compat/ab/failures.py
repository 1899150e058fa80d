"""What a server can do wrong, one exception for each kind."""

from __future__ import annotations

from flashinfer_compat.ab.printable import printable
from flashinfer_compat.errors import FlashInferCompatError

__all__ = [
    "ConnectionFailedError",
    "CutAnswerError",
    "HTTPStatusError",
    "LogprobsMissingError",
    "MalformedAnswerError",
    "ModelNotChosenError",
    "RateLimitedError",
    "ReportedError",
    "ServerError",
    "TimedOutError",
]


class ServerError(FlashInferCompatError):
    """A server cannot be used, or did not answer a prompt; `code` is stable, for programs."""

    code = "server"
    gives_up = False
    """Whether the server's other prompts are not asked any more."""

    def __init__(self, server: str, problem: str, way_out: str = "") -> None:
        self.server = server
        self.problem = problem
        self.way_out = way_out
        super().__init__(printable(f"{server}: {problem}.") + (f" {way_out}" if way_out else ""))

    def to_dict(self) -> dict[str, str]:
        """The failure as plain JSON values."""
        return {"code": self.code, "type": type(self).__name__, "message": str(self)}


class ConnectionFailedError(ServerError):
    """The connection was refused, not found, reset, or closed before an answer began."""

    code = "connection_failed"
    gives_up = True


class TimedOutError(ServerError):
    """The whole answer did not come in time."""

    code = "timed_out"
    gives_up = True


class HTTPStatusError(ServerError):
    """The status is not 200; the message holds what the body says."""

    code = "http_error"

    def __init__(self, server: str, status: int, said: str, way_out: str = "") -> None:
        self.status = status
        super().__init__(server, f"HTTP {status}, {said}", way_out)


class RateLimitedError(ServerError):
    """Status 429 again and again, also after waiting."""

    code = "rate_limited"
    gives_up = True


class MalformedAnswerError(ServerError):
    """The answer is not JSON, or not in the form of an OpenAI answer."""

    code = "malformed"


class CutAnswerError(ServerError):
    """The connection or the stream ended in the middle of an answer."""

    code = "cut"


class ReportedError(ServerError):
    """The status was 200, and the answer itself says that generation failed."""

    code = "reported"


class LogprobsMissingError(ServerError):
    """Log-probabilities are to be judged, and the server gives none."""

    code = "no_logprobs"


class ModelNotChosenError(ServerError):
    """The server has no model, or several and none was named."""

    code = "model_not_chosen"
