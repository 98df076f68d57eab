"""Where this user installs packages from, read as pip and uv read it: environment, then pip's configuration files.

There may be no pip here to ask (environments made by uv have none), so its files are read directly. The index's
address may carry a password: it is never printed, the setting it came from is.
"""

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from twinpool.errors import UserError

if TYPE_CHECKING:
    import requests

# A caching mirror may first fetch the whole file itself, and stays silent meanwhile.
DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Index:
    """One package index; ``origin`` is the setting that named it, for messages."""

    url: str
    origin: str


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """What the user configured about package indexes."""

    indexes: tuple[Index, ...]  # in the order to ask them
    folders: tuple[Path, ...]  # find-links on this disk
    ca_bundle: str | None
    proxy: str | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on an index, with the index's own credentials where they are meant for it too."""

    url: str
    auth: tuple[str, str] | None


def read_index_settings(env: Mapping[str, str] = os.environ) -> IndexSettings:
    """The settings of pip and uv; the default index when neither names one."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    pip = _pip_files(env)

    def pip_setting(name: str) -> tuple[str, str] | None:
        """The value and where it stands; the environment wins over the files."""
        variable = "PIP_" + name.upper().replace("-", "_")
        return (env[variable], variable) if env.get(variable) else pip.get(name)

    def uv_setting(variable: str) -> tuple[str, str] | None:
        return (env[variable], variable) if env.get(variable) else None

    indexes: list[Index] = []
    if not any(map(_is_true, (pip_setting("no-index"), uv_setting("UV_NO_INDEX"), uv_setting("UV_OFFLINE")))):
        main = (
            uv_setting("PIP_INDEX_URL")
            or uv_setting("UV_DEFAULT_INDEX")
            or uv_setting("UV_INDEX_URL")
            or pip_setting("index-url")
            or (PYPI_SIMPLE_ENDPOINT, "the default")
        )
        extra = (pip_setting("extra-index-url"), uv_setting("UV_INDEX"), uv_setting("UV_EXTRA_INDEX_URL"))
        for found in (main, *extra):
            if found:
                indexes += [Index(_without_name(url), found[1]) for url in found[0].split()]
    links = [pip_setting("find-links"), uv_setting("UV_FIND_LINKS")]
    folders = [_local_path(link) for found in links if found for link in found[0].replace(",", " ").split()]
    cert, proxy = pip_setting("cert"), pip_setting("proxy")
    timeout = pip_setting("timeout") or pip_setting("default-timeout")
    return IndexSettings(
        indexes=tuple(indexes),
        folders=tuple(folder for folder in folders if folder),
        ca_bundle=cert[0] if cert else env.get("SSL_CERT_FILE") or None,
        proxy=proxy[0] if proxy else None,
        timeout_s=_seconds(timeout[0]) if timeout else DEFAULT_TIMEOUT_S,
    )


def open_session(settings: IndexSettings) -> "requests.Session":
    """An HTTP session under these settings. Proxies and CA bundles in the environment, and netrc, are honoured too."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    from twinpool import __version__

    session = requests.Session()
    session.headers["User-Agent"] = f"twinpool/{__version__}"
    if settings.ca_bundle:
        session.verify = settings.ca_bundle
    if settings.proxy:
        session.proxies = {"http": settings.proxy, "https": settings.proxy}
    patience = Retry(
        total=2,
        backoff_factor=0.2,
        status_forcelist=(429, 500, 502, 503, 504),
        raise_on_status=False,
        respect_retry_after_header=False,  # somebody waits at the terminal, not for the hour it may ask
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=patience))
    return session


def find_file(session: "requests.Session", index: Index, project: str, name: str, timeout_s: float) -> RemoteFile | Path | None:
    """The file called ``name`` on the project's page of the index; ``None`` if the index does not have it.

    Raises ``OSError`` (the root of what ``requests`` raises, too) or ``ValueError`` when the page cannot be read.
    """
    from pypi_simple import NoSuchProjectError, ProjectPage, PyPISimple

    if folder := _local_path(index.url):  # a mirror on this disk
        page_file = folder / project / "index.html"
        if not page_file.is_file():
            return None
        page = ProjectPage.from_html(project, page_file.read_bytes(), base_url=page_file.as_uri())
    else:
        try:
            page = PyPISimple(index.url, session=session).get_project_page(project, timeout=timeout_s)
        except NoSuchProjectError:
            return None
    for package in page.packages:
        if package.filename == name:
            url = package.url.partition("#")[0]
            return _local_path(url) or RemoteFile(url, _credentials(index.url, url))
    return None


def _credentials(index_url: str, file_url: str) -> tuple[str, str] | None:
    """The index's user and password, for files on the index's own host; never for another one."""
    index, file = urlsplit(index_url), urlsplit(file_url)
    if index.username is None or file.username is not None or index.hostname != file.hostname:
        return None
    return unquote(index.username), unquote(index.password or "")


def _pip_files(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Each setting in pip's files with the file it stands in; a later file wins, ``[install]`` over ``[global]``."""
    found: dict[str, tuple[str, str]] = {}
    for file in _pip_file_paths(env):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file)
        except (configparser.Error, UnicodeDecodeError) as problem:
            reason = str(problem).splitlines()[0]
            raise UserError(f"mend pip's configuration in {file}, or set PIP_CONFIG_FILE=/dev/null: {reason}") from None
        for section in ("global", "install"):
            if parser.has_section(section):
                found |= {name.replace("_", "-"): (value, str(file)) for name, value in parser.items(section) if value}
    return found


def _pip_file_paths(env: Mapping[str, str]) -> Iterator[Path]:
    """pip's configuration files from the weakest to the strongest, as its documentation orders them."""
    chosen = env.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    home = Path(env.get("HOME") or os.path.expanduser("~"))
    mac = sys.platform == "darwin"
    if mac:
        yield Path("/Library/Application Support/pip/pip.conf")
    for folder in reversed(env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(os.pathsep)):
        yield Path(folder, "pip", "pip.conf")
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    application_support = home / "Library" / "Application Support" / "pip"
    if mac and application_support.is_dir():
        yield application_support / "pip.conf"
    else:
        yield Path(env.get("XDG_CONFIG_HOME") or home / ".config", "pip", "pip.conf")
    yield Path(sys.prefix, "pip.conf")
    if chosen:
        yield Path(chosen)


def _local_path(link: str) -> Path | None:
    """The path that a ``file:`` URL or a bare path means; ``None`` for nothing and for what is on a network."""
    if link.startswith("file:"):
        return Path(url2pathname(urlsplit(link).path))
    return None if "://" in link or not link else Path(link).expanduser()


def _without_name(url: str) -> str:
    """uv lets an index have a name: ``corp=https://…``."""
    name, equals, rest = url.partition("=")
    return rest if equals and "/" not in name else url


def _is_true(found: tuple[str, str] | None) -> bool:
    return found is not None and found[0].lower() in ("1", "true", "yes", "on", "y", "t")


def _seconds(text: str) -> float:
    try:
        return max(float(text), 1.0)
    except ValueError:
        return DEFAULT_TIMEOUT_S
