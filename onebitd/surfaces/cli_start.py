"""`onebitctl` until its modules are there: Ctrl-C ends it in silence, as it does afterwards.

Importing takes a tenth of a second, in which Python would answer Ctrl-C with a traceback of its
import system. So nothing is imported here but `_signal`, which is a part of the interpreter:
`signal` itself takes enum and collections to its help.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # mypy knows signal alone


def main() -> int:
    """Run `onebitctl`; return its exit status (onebitctl(1), EXIT STATUS)."""
    # Whoever started it with SIGINT ignored (nohup, a background job) does not want it either.
    is_ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if is_ours:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from onebitd.surfaces import cli

    if is_ours:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    return cli.main()
