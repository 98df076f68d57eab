"""Brings one pinned file from the user's package index to this disk, however often the connection breaks.

What has arrived stays in ``NAME.part``, also after an error or a kill; the next try asks for the rest only. Nothing is
trusted before its hash is right.
"""

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.errors import UserError
from twinpool.worker.models.catalogue import PinnedFile
from twinpool.worker.models.index import IndexSettings, RemoteFile, find_file, open_session

if TYPE_CHECKING:
    import requests

CHUNK_BYTES = 1 << 18

OnProgress = Callable[[int, int], None]  # bytes so far, bytes in all


def is_pinned(path: Path, pinned: PinnedFile) -> bool:
    """Whether the file is there and has the pinned size and hash (145 MB take 0.1 to 0.4 s)."""
    return path.is_file() and path.stat().st_size == pinned.size_bytes and sha256_of(path) == pinned.sha256


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_file(settings: IndexSettings, project: str, wanted: PinnedFile, part: Path, on_progress: OnProgress) -> Path:
    """The wanted file of the project, its hash checked: ``part``, or a copy that lies elsewhere on this disk.

    Raises ``UserError`` with the reason why none of the user's indexes could give it, ``OSError`` if ``part`` cannot
    be written.
    """
    for folder in settings.folders:
        if is_pinned(folder / wanted.name, wanted):
            return folder / wanted.name
    problems: list[str] = []
    with closing(open_session(settings)) as session:
        for index in settings.indexes:
            try:
                found = find_file(session, index, project, wanted.name, settings.timeout_s)
            except (OSError, ValueError) as problem:
                problems.append(f"{_reason(problem)} (package index: {index.origin})")
                continue
            if isinstance(found, Path) and is_pinned(found, wanted):
                return found
            if not isinstance(found, RemoteFile):
                problems.append(f"{wanted.name} is not on the package index ({index.origin})")
                continue
            try:
                _Download(session, found, wanted, part, settings.timeout_s, on_progress).run()
            except UserError as problem:
                problems.append(f"{problem} (package index: {index.origin})")
                continue
            return part
    raise UserError(problems[0] if problems else "package indexes are switched off (PIP_NO_INDEX or UV_OFFLINE)")


@dataclass(frozen=True, slots=True)
class _Download:
    """One file on its way into ``part``."""

    session: "requests.Session"
    remote: RemoteFile
    wanted: PinnedFile
    part: Path
    timeout_s: float
    on_progress: OnProgress

    def run(self) -> None:
        """Download until the hash is right; begin anew, once, if what an earlier run left behind was damaged."""
        resumed = self.part.exists()
        self._fill()
        if resumed and not is_pinned(self.part, self.wanted):
            self.part.unlink()
            self._fill()
        if not is_pinned(self.part, self.wanted):
            self.part.unlink()
            raise UserError(f"what arrived as {self.wanted.name} has the wrong SHA-256, so it was thrown away")

    def _fill(self) -> None:
        """Bring ``part`` to its full size: as long as a connection gets further than the last, open another."""
        while True:
            have = self.part.stat().st_size if self.part.exists() else 0
            if have > self.wanted.size_bytes:
                self.part.unlink()
                have = 0
            self.on_progress(have, self.wanted.size_bytes)
            if have == self.wanted.size_bytes:
                return
            if self._receive(have) <= have:
                raise UserError("the connection broke; what has arrived is kept")

    def _receive(self, have: int) -> int:
        """Use one connection, with ``have`` bytes there already; how many are there after it."""
        import requests

        headers = {"Accept-Encoding": "identity"}  # else the range would count compressed bytes
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            response = self.session.get(
                self.remote.url, headers=headers, auth=self.remote.auth, timeout=self.timeout_s, stream=True
            )
        except OSError as problem:
            raise UserError(_reason(problem)) from problem
        with closing(response):
            continues = self._check_head(response, have)
            done = have if continues else 0  # a server without ranges sends everything again
            with self.part.open("ab" if continues else "wb") as out:
                try:
                    for chunk in response.iter_content(CHUNK_BYTES):
                        out.write(chunk)
                        done += len(chunk)
                        self.on_progress(done, self.wanted.size_bytes)
                        if done > self.wanted.size_bytes:
                            break
                except requests.RequestException:
                    pass  # the caller sees how far it came and asks for the rest
        return done

    def _check_head(self, response: "requests.Response", have: int) -> bool:
        """Whether the body goes on after the ``have`` bytes, instead of beginning anew. Raises if it is neither."""
        name, size = self.wanted.name, self.wanted.size_bytes
        if response.status_code not in (200, 206):
            raise UserError(f"the index answered {response.status_code} for {name}")
        continues = response.status_code == 206
        span, _, total = response.headers.get("Content-Range", "").partition("/")
        announced = total if continues else response.headers.get("Content-Length", "")
        if announced.isdecimal() and int(announced) != size:
            raise UserError(f"the file called {name} there is another one ({announced} bytes)")
        if continues and span != f"bytes {have}-{size - 1}":
            raise UserError(f"the index answered with another range of {name} than asked for")
        return continues


def _reason(problem: Exception) -> str:
    """Why the index could not be read, in few words: the library's own text is long and names the address."""
    from requests import exceptions

    match problem:
        case exceptions.SSLError():
            return "its certificate is not trusted: point PIP_CERT or SSL_CERT_FILE at the right CA bundle"
        case exceptions.ProxyError():
            return "the proxy refused: check HTTPS_PROXY"
        case exceptions.Timeout():
            return "no answer in time"
        case exceptions.HTTPError() if problem.response is not None:
            return f"it answered {problem.response.status_code}"
        case exceptions.ConnectionError():
            return "no connection"
        case exceptions.RequestException() | ValueError():
            return "its page cannot be read"
        case _:
            return str(problem)
