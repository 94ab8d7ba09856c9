"""A middleware that lets the last send of a reply finish.

quart-trio runs a request in a nursery with a watcher on `receive()`, which cancels the nursery when
the client is gone. Hypercorn, inside the last send, closes its stream and so wakes that watcher
itself, before it has recycled or closed the connection: the cancel arrives in the middle, and
connections with `Connection: close`, HTTP/1.0 ones and idle keep-alive ones stay open for ever
(hypercorn 0.18, quart-trio 0.12). Shielding the last send keeps the order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from hypercorn.typing import (
        ASGIFramework,
        ASGIReceiveCallable,
        ASGISendCallable,
        ASGISendEvent,
        Scope,
    )

_LAST_SEND_S: Final = 60.0
"""What cannot be cancelled must end by itself."""


def shield_final_send(app: ASGIFramework) -> ASGIFramework:
    """Return `app`, with the send that ends an HTTP reply shielded from cancellation.

        app.asgi_app = shield_final_send(app.asgi_app)

    Only that send, and for a minute at most: everything before it is cancelled as ever when the
    client leaves.
    """

    async def shielded(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_through(message: ASGISendEvent) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            deadline = trio.current_time() + _LAST_SEND_S if last else math.inf
            with trio.CancelScope(shield=last, deadline=deadline):
                await send(message)

        await app(scope, receive, send_through)

    return shielded
