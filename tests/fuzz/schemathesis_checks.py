"""What schemathesis holds each reply against; loaded by it (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.check  # type: ignore[untyped-decorator] # it is installed beside, not here
def explained(ctx: Any, response: Any, case: Any) -> None:
    """A server error has a message, and it is not that of a fault of the daemon's own."""
    del ctx, case
    if response.status_code >= 500:
        message = response.json()["error"]["message"]
        assert message
        assert "its log says why" not in message
