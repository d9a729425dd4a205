"""The pack as ``pipemesh``, and the fixtures of all tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "pool"))
from package import register_package  # noqa: E402

sys.path.pop(0)
register_package(ROOT)


def pytest_addoption(pluginmanager):
    pluginmanager.import_plugin("pipemesh.tests.fixtures")
