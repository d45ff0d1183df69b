"""The option --page: a live page of a job, in a browser."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.text import Text

from paceline.cli.listening import announce, host_and_port, url_of
from paceline.cli.shared import errors, need, refuse

if TYPE_CHECKING:
    from paceline.serve.wire.tls import Tls

PageOption = Annotated[
    str | None,
    typer.Option(
        "--page",
        metavar="[HOST:]PORT",
        help="Show the job as a live page in a browser. On any host but loopback, the page asks for a password: "
        "the job's token, or one that the command prints.",
    ),
]
SpeedOption = Annotated[
    float | None,
    typer.Option(
        "--speed", min=0.0, help="Show a recorded run on the page at this many times its speed; 0: at once.  [a minute]"
    ),
]


#: Shows the job of a server from now on; `floor` is its shortest time per iteration, if that is known.
Show: TypeAlias = Callable[..., None]


@dataclass(frozen=True)
class PagePlace:
    """The socket of a page, and what viewers need."""

    listening: socket.socket
    host: str  # as the user has named it
    token: bytes
    is_own_token: bool  # which nobody knows but this command
    tls: Tls | None

    @property
    def url(self) -> str:
        """The address of the page."""
        return url_of(self.host, self.listening.getsockname()[1], self.tls)

    def announce(self) -> None:
        """Print where the page is, and the password that it asks for."""
        announce("Page", self.url, self.tls)
        if self.token:
            known = self.token.decode() if self.is_own_token else "the job's token, or `paceline token --role watch`"
            errors.print(Text(f"It asks for a password: {known}"))


def page_place(
    text: str | None, token: bytes | None, tls: Tls | None, insecure: bool | None = None
) -> PagePlace | None:
    """Listen for the viewers of a page, or return None without --page.

    Refuse the command if that cannot be done safely, or at all.

    token: the job's; None if nobody knows it, so that the page needs one of its own. insecure: may other machines see
    the page without TLS? None: the page makes a certificate if the job has none.
    """
    if text is None:
        return None
    for module in ("starlette", "uvicorn"):
        need(module, "--page", "page")
    from paceline.cli.connection import AUTO, own_certificate
    from paceline.serve.server import Address, ServerError
    from paceline.serve.wire.endpoint import is_loopback

    host, port = host_and_port(text, "--page", 8787)
    is_own_token = token is None
    if is_loopback(host):
        token, tls = b"", None
    else:
        token = secrets.token_urlsafe(24).encode() if token is None else token
        try:
            if insecure is None and not (tls and tls.cert and tls.key):
                tls = own_certificate(AUTO)
            Address(host, port, bool(insecure)).check(token, tls)
        except ServerError as error:
            refuse(f"--page: {error}")
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(where)
            listening.listen(64)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        is_elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = "choose an address of this machine" if is_elsewhere else "choose another port"
        refuse(f"--page cannot listen on {host}:{port} ({error.strerror}): {remedy}.")
    return PagePlace(listening, host, token, is_own_token, tls)


@contextmanager
def job_page(
    place: PagePlace | None,
    title: str,
    wrap: Callable[[Sequence[str]], Sequence[str]] = lambda command: command,
) -> Iterator[Show | None]:
    """A page in a process of its own, for as long as the context lasts.

    Yield a function that takes the Endpoint of a job's server, from when on the page shows that job; or None if there
    is no place for a page. wrap: changes the command line of the process.
    """
    if place is None:
        yield None
        return
    from paceline.page.process import PageProcess, PageSetup

    place.announce()
    setup = PageSetup(title=title, host=place.host, token=place.token, tls=place.tls)
    with PageProcess(place.listening, setup, wrap) as process:
        yield process.follow


def show_recorded(
    place: PagePlace, trace: Path, title: str, speed: float | None, floors: Sequence[float | None] = ()
) -> None:
    """Show a recorded run on a page until Ctrl-C. Refuse a file that is not a trace."""
    from paceline.page.serving import serve_page
    from paceline.page.sources import duration, replay
    from paceline.page.state import PageState, Shown

    state = PageState(Shown(title=title, recorded=True, floors=list(floors)))

    async def tell(state: PageState) -> None:
        await replay(state, trace, speed)
        await asyncio.Event().wait()  # the last picture stays

    try:
        duration(trace)  # a page of a file that is not a trace is not announced
        place.announce()
        errors.print("Ctrl-C ends it.")
        asyncio.run(serve_page(place.listening, state, tell, token=place.token, tls=place.tls, host=place.host))
    except KeyboardInterrupt:
        pass
    except (ValueError, KeyError) as error:
        unknown = f"{trace} is not a whole trace: its worker {error} never joined."
        refuse(unknown if isinstance(error, KeyError) else str(error))
    finally:
        place.listening.close()
