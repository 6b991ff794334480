"""The API's log: one line of key=value per changing request, and one with a traceback per bug.

Goes through the standard library's logging, under `agentenv.api`, so that where it is written and how much of it is
decided in one place for the whole server. There is no access log: what only reads is not worth a line.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

_render: Final = structlog.processors.KeyValueRenderer(key_order=["event", "operation"], drop_missing=True)


def _to_standard_library(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, Any]]:
    """The traceback stays an exception: the handlers of `logging` know how to write it."""
    trace = event.pop("exc_info", None)
    shown = {key: value for key, value in event.items() if value is not None}
    # A percent sign in the text is no format: there are no arguments, so logging leaves it alone.
    return (str(_render(logger, method, shown)),), {"exc_info": trace}


log: Final[Any] = structlog.wrap_logger(
    logging.getLogger("agentenv.api"),
    processors=[structlog.stdlib.filter_by_level, _to_standard_library],
    wrapper_class=structlog.stdlib.BoundLogger,
)
