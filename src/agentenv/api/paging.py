"""Pages of a list that changes while it is read.

A cursor says after which item the next page begins, not at which offset: inserts and removals between two pages
neither repeat nor skip an item that was there all the time. Items are ordered by (time in microseconds, id), which
is total, so equal times are no problem. Pure: takes values, returns values.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from agentenv.errors import InvalidRequest

T = TypeVar("T")

LIMIT_MAX: Final = 100
_TOKEN_CHARS_MAX: Final = 256
_TOKEN = re.compile(r"([0-9]{1,18})__([a-z0-9]{1,64})__(asc|desc)")

SortKey = tuple[int, str]


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which part of the list a client wants; `after` is the last item of the page before."""

    limit: int = LIMIT_MAX
    ascending: bool = False
    after: SortKey | None = None


def parse_page(limit: str | None, order: str | None, token: str | None) -> PageRequest:
    """Read the query parameters `limit`, `order` and `nextToken`; raises `InvalidRequest` naming the wrong one."""
    ascending = _parse_order(order)
    after = _parse_token(token, ascending) if token else None
    return PageRequest(limit=_parse_limit(limit), ascending=ascending, after=after)


def take(items: Iterable[T], key: Callable[[T], SortKey], page: PageRequest) -> tuple[list[T], str | None]:
    """The items of one page and the token of the next one, None on the last page."""
    rest = [item for item in items if page.after is None or _is_after(key(item), page.after, page.ascending)]
    rest.sort(key=key, reverse=not page.ascending)
    chosen = rest[: page.limit]
    if len(chosen) == len(rest):
        return chosen, None
    return chosen, _token(key(chosen[-1]), page.ascending)


def micros(seconds: float) -> int:
    """Unix seconds as whole microseconds, the resolution of every time that we show."""
    return round(seconds * 1_000_000)


def _is_after(key: SortKey, cursor: SortKey, ascending: bool) -> bool:
    return key > cursor if ascending else key < cursor


def _token(key: SortKey, ascending: bool) -> str:
    text = f"{key[0]}__{key[1]}__{'asc' if ascending else 'desc'}"
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


def _parse_limit(limit: str | None) -> int:
    if not limit:
        return LIMIT_MAX
    if not re.fullmatch(r"[0-9]{1,9}", limit) or not 1 <= int(limit) <= LIMIT_MAX:
        raise InvalidRequest(f"limit: must be a whole number from 1 to {LIMIT_MAX}")
    return int(limit)


def _parse_order(order: str | None) -> bool:
    if order not in (None, "", "asc", "desc"):
        raise InvalidRequest("order: must be asc or desc")
    return order == "asc"


def _parse_token(token: str, ascending: bool) -> SortKey:
    match = None
    if len(token) <= _TOKEN_CHARS_MAX:
        try:
            padded = token.encode("ascii") + b"=" * (-len(token) % 4)
            match = _TOKEN.fullmatch(base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii"))
        except (UnicodeError, binascii.Error):
            match = None
    if match is None:
        raise InvalidRequest("nextToken: not a token that this server gave out")
    if (match[3] == "asc") != ascending:
        raise InvalidRequest("nextToken: was given out for the other order")
    return int(match[1]), match[2]
