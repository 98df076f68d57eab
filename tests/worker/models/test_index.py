import os
from pathlib import Path

import pytest
from pypi_simple import PYPI_SIMPLE_ENDPOINT

from twinpool.errors import UserError
from twinpool.worker.models.index import DEFAULT_TIMEOUT_S, read_index_settings

NO_FILES = {"PIP_CONFIG_FILE": os.devnull}


@pytest.fixture
def pip_conf(tmp_path):
    """Writes a configuration file of pip and gives the environment that names it."""

    def write(text):
        (tmp_path / "pip.conf").write_text(text)
        return {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "HOME": str(tmp_path)}

    return write


def urls(env):
    return [index.url for index in read_index_settings(env).indexes]


def test_nothing_configured():
    settings = read_index_settings(NO_FILES)
    assert [index.url for index in settings.indexes] == [PYPI_SIMPLE_ENDPOINT]
    assert settings.folders == ()
    assert (settings.ca_bundle, settings.proxy, settings.timeout_s) == (None, None, DEFAULT_TIMEOUT_S)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"PIP_INDEX_URL": "http://a/", "UV_DEFAULT_INDEX": "http://b/"}, ["http://a/"]),
        ({"UV_DEFAULT_INDEX": "corp=http://b/?x=1", "UV_INDEX_URL": "http://c/"}, ["http://b/?x=1"]),
        ({"UV_INDEX_URL": "http://c/?x=1"}, ["http://c/?x=1"]),
        ({"PIP_INDEX_URL": "http://a/", "PIP_EXTRA_INDEX_URL": "http://d/ http://e/"}, ["http://a/", "http://d/", "http://e/"]),
        ({"UV_INDEX_URL": "http://c/", "UV_INDEX": "x=http://f/"}, ["http://c/", "http://f/"]),
        ({"PIP_INDEX_URL": "", "UV_INDEX_URL": "http://c/"}, ["http://c/"]),
        ({"UV_OFFLINE": "1"}, []),
        ({"PIP_NO_INDEX": "true", "PIP_INDEX_URL": "http://a/"}, []),
        ({"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://a/"}, ["http://a/"]),
    ],
)
def test_environment(env, expected):
    assert urls(NO_FILES | env) == expected


def test_file(pip_conf):
    env = pip_conf(
        "[global]\nindex-url = http://g/\nextra_index_url =\n    http://h/\n    http://i/\n"
        "find-links = /l\ncert = /c.pem\nproxy = http://p:1\ntimeout = 7\n"
    )
    settings = read_index_settings(env)
    assert [index.url for index in settings.indexes] == ["http://g/", "http://h/", "http://i/"]
    assert {index.origin for index in settings.indexes} == {env["PIP_CONFIG_FILE"]}
    assert settings.folders == (Path("/l"),)
    assert (settings.ca_bundle, settings.proxy, settings.timeout_s) == ("/c.pem", "http://p:1", 7)


def test_the_environment_wins_over_the_file(pip_conf):
    env = pip_conf("[global]\nindex-url = http://g/\ncert = /c.pem\n")
    assert urls(env | {"UV_INDEX_URL": "http://c/"}) == ["http://c/"]
    assert read_index_settings(env | {"PIP_CERT": "/d.pem"}).ca_bundle == "/d.pem"


def test_the_install_section_wins_over_the_global_one(pip_conf):
    assert urls(pip_conf("[install]\nindex-url = http://j/\n[global]\nindex-url = http://g/\n")) == ["http://j/"]


@pytest.mark.parametrize("place", ["xdg/pip/pip.conf", ".pip/pip.conf", "system/pip/pip.conf"])
def test_files_are_found_where_pip_looks(tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text("[global]\nproxy = http://found:1\n")
    env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "xdg"), "XDG_CONFIG_DIRS": str(tmp_path / "system")}
    assert read_index_settings(env).proxy == "http://found:1"


def test_the_users_file_wins_over_the_systems(tmp_path):
    for folder in ("system", "user"):
        (tmp_path / folder / "pip").mkdir(parents=True)
        (tmp_path / folder / "pip" / "pip.conf").write_text(f"[global]\nproxy = http://{folder}:1\n")
    env = {"HOME": "/h", "XDG_CONFIG_HOME": str(tmp_path / "user"), "XDG_CONFIG_DIRS": str(tmp_path / "system")}
    assert read_index_settings(env).proxy == "http://user:1"


def test_a_broken_file_is_named(pip_conf):
    env = pip_conf("index-url = http://g/\n")
    with pytest.raises(UserError, match=r"pip\.conf") as caught:
        read_index_settings(env)
    assert "\n" not in str(caught.value)


def test_ca_bundle_of_the_system():
    assert read_index_settings(NO_FILES | {"SSL_CERT_FILE": "/s.pem"}).ca_bundle == "/s.pem"


@pytest.mark.parametrize(("text", "expected"), [("180", 180.0), ("soon", DEFAULT_TIMEOUT_S), ("0", 1.0)])
def test_timeout(text, expected):
    assert read_index_settings(NO_FILES | {"PIP_DEFAULT_TIMEOUT": text}).timeout_s == expected


def test_links_on_a_network_are_left_to_pip():
    env = NO_FILES | {"PIP_FIND_LINKS": "https://x/links file:///a%20b", "UV_FIND_LINKS": "/c,/d"}
    assert read_index_settings(env).folders == (Path("/a b"), Path("/c"), Path("/d"))
