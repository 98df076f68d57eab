import pytest

from twinpool.http1.urls import Url, parse_url


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h:80", Url("http", "h", 80, "")),
        (" https://h/v1/ ", Url("https", "h", None, "/v1/")),
        ("http://[::1]:8000", Url("http", "::1", 8000, "")),
        ("http://bücher.example/köln%20", Url("http", "xn--bcher-kva.example", None, "/k%C3%B6ln%20")),
    ],
)
def test_what_goes_on_the_wire_is_ascii(text: str, found: Url) -> None:
    assert parse_url(text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://h/a b", "white space"),
        ("http://h/a\r\nx: y", "white space"),
        ("http://h\x1b", "control character"),
        ("http://" + "a" * 300, "no host can have this name"),
        ("http://a..b", "no host can have this name"),
        ("http://", "names no host"),
        ("http://a,b", "names no host"),
        ("ftp://h", "neither http nor https"),
        ("http://h?x=1", "more than a host"),
        ("http://user@h", "keys are given in files"),
        ("http://h:0", "nobody listens on port 0"),
        ("http://h:99999", "Port out of range"),
        ("http://[::1", "Invalid IPv6"),
    ],
)
def test_what_is_no_place_of_a_service(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_url(text)
