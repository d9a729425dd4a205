"""Downloads one file from the Python package registry that pip is set up for, and keeps it only if
it has the digest that is asked for. Standard library only.

    python registry.py NAME FILE SHA256 FOLDER

pip has no way to download a source distribution without running the code that builds it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import posixpath
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

INDEX = "https://pypi.org/simple"
SECTIONS = ("global", "download", ":env:")  # as pip reads them: a later one counts more


class Anchors(HTMLParser):
    """The targets of a page's links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.targets += [value for name, value in attrs if name == "href" and value]


def settings_in(listed: str) -> dict[str, str]:
    """pip's settings from the lines of `pip config list`."""
    lines = re.findall(r"^(global|download|:env:)\.([\w-]+)=(.*)$", listed, re.M)
    lines.sort(key=lambda line: SECTIONS.index(line[0]))
    return {name: ast.literal_eval(value) for _section, name, value in lines}


def places(settings: Mapping[str, str], name: str) -> Iterator[str]:
    """The pages and folders that may link to files of a package, the first to be asked first."""
    yield from settings.get("find-links", "").split()
    if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        for index in (settings.get("index-url", INDEX), *settings.get("extra-index-url", "").split()):
            yield f"{index.rstrip('/')}/{name}/"


def folder_of(place: str) -> Path | None:
    """The folder or file of this machine that a place names; None where it names a page."""
    if place.startswith("file:"):
        return Path(url2pathname(urlsplit(place).path))
    return None if "://" in place else Path(place).expanduser()


def links_to(place: str, file: str, opener: urllib.request.OpenerDirector, timeout_s: float) -> list[str]:
    """The addresses under which a place offers the file. Raises OSError."""
    if (folder := folder_of(place)) is not None:
        if (folder / file).is_file():
            return [(folder / file).absolute().as_uri()]
        page = folder / "index.html" if folder.is_dir() else folder
        if not page.is_file():
            return []
        place = page.absolute().as_uri()
    with opener.open(shown(place), timeout=timeout_s) as answer:
        page_text = answer.read().decode("utf-8", errors="replace")
    targets = [urljoin(answer.url, target) for target in Anchors(page_text).targets]
    return [target for target in targets if posixpath.basename(unquote(urlsplit(target).path)) == file]


def opener_of(settings: Mapping[str, str], addresses: Iterable[str]) -> urllib.request.OpenerDirector:
    """What opens addresses with the proxy and the certificates that pip is set to, and with the
    passwords that stand in `addresses`, each for its own host only.
    """
    proxies = {kind: settings["proxy"] for kind in ("http", "https")} if settings.get("proxy") else None
    passwords = urllib.request.HTTPPasswordMgrWithPriorAuth()
    for address in addresses:
        parts = urlsplit(address)
        if parts.username is not None:
            host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/"
            passwords.add_password(
                None, host, unquote(parts.username), unquote(parts.password or ""), is_authenticated=True
            )
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=settings.get("cert") or None)),
        urllib.request.HTTPBasicAuthHandler(passwords),
    )
    opener.addheaders.append(("Accept", "text/html, */*;q=0.1"))
    return opener


def download(name: str, file: str, sha256: str, folder: Path, settings: Mapping[str, str]) -> int:
    """Puts the file into the folder, from the first place that has it with that digest; the exit
    status. What was tried is printed.
    """
    wanted = tuple(places(settings, name))
    opener = opener_of(settings, wanted)
    timeout_s = float(settings.get("default-timeout") or settings.get("timeout") or 60)
    for place in wanted:
        try:
            for address in links_to(place, file, opener, timeout_s):
                print(f"Downloading {file} from {shown(address)}", flush=True)
                part = folder / f"{file}.part"
                with opener.open(shown(address), timeout=timeout_s) as answer, part.open("wb") as out:
                    shutil.copyfileobj(answer, out)
                if (got := sha256_of(part)) == sha256:
                    os.replace(part, folder / file)
                    return 0
                print(f"ERROR: its sha256 is {got}, not {sha256}", flush=True)
        except (OSError, ValueError) as error:  # of urllib, too: its errors are OSErrors
            print(f"WARNING: {shown(place)}: {error}", flush=True)
    print(f"ERROR: No place of the package registry has {file} with the sha256 {sha256}")
    return 1


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def shown(address: str) -> str:
    """The address without a password, as a log has it; the opener has the password."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


def main(argv: Sequence[str]) -> int:
    name, file, sha256, folder = argv
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return download(name, file, sha256, Path(folder), settings_in(listed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
