"""What became of an HTTP request, for its span and its line in the log."""

from dataclasses import dataclass

from deploy.api.call import Call
from deploy.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class Outcome:
    """``call``: None of a request that generates nothing or was refused before. ``error``: came after the status."""

    request_id: str
    method: str
    route: str
    status: int
    duration_s: float
    call: Call | None
    error: ApiError | None
    tenant: str | None = None  # None: unknown

    @property
    def error_type(self) -> str | None:
        if self.error is not None and self.error.code is not None:
            return self.error.code
        return str(self._final_status) if self._final_status >= 400 else None

    @property
    def is_server_error(self) -> bool:
        return self._final_status >= 500

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self.call is None else self.call.num_used_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.call is None else self.call.num_output_tokens

    @property
    def finish_reasons(self) -> list[str]:
        """One for each choice."""
        return [] if self.call is None else [choice.outcome.value for choice in self.call.choices]

    @property
    def _final_status(self) -> int:
        return self.status if self.error is None else int(self.error.status)

    def fields(self) -> dict[str, object]:
        """Of the access line."""
        fields: dict[str, object] = {
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "duration_ms": round(self.duration_s * 1e3, 1),
        }
        if self.tenant:
            fields["tenant"] = self.tenant
        if self.error_type is not None:
            fields["error_type"] = self.error_type
        if self.call is not None:
            fields |= {
                "call_id": self.call.id,
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": self.num_output_tokens,
                "finish_reasons": self.finish_reasons,
            }
        return fields
