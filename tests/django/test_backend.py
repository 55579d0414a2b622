"""A Django project on a store: migrations, the ORM, the test runner and the management command, each in a separate
process."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

import quire

SETTINGS = """
SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "quire.django", "NAME": "store/shop"}}
INSTALLED_APPS = ["quire.django", "shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TEST_RUNNER = "quire.django.runner.ForkingRunner"
USE_TZ = True
"""
MODELS = """
from django.db import models
class Item(models.Model):
    name = models.CharField(max_length=20, unique=True)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    seen = models.DateTimeField(auto_now_add=True)
    sold = models.BooleanField(default=False)
"""
TESTS = """
import datetime, decimal
from django.db import IntegrityError, connection, transaction
from django.test import TestCase, TransactionTestCase
from shop.models import Item

class Types(TestCase):
    def test_values_come_back_as_they_were(self):
        Item.objects.create(name="100% tea", price="4.50")
        item = Item.objects.get(name__contains="%")
        self.assertEqual((item.price, item.sold), (decimal.Decimal("4.50"), False))
        self.assertIsInstance(item.seen, datetime.datetime)
        with self.assertRaises(IntegrityError), transaction.atomic():
            Item.objects.create(name="100% tea", price=1)
        self.assertEqual(Item.objects.filter(name__regex="^100").count(), 1)

class LeavesRows(TransactionTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with connection.cursor() as cursor:
            cursor.execute("create table leftover(a)")
            cursor.execute("insert into shop_item(name, price, seen, sold) values (%s, 1, '2026-01-01', 0)", ["kept"])
    def test_its_rows_are_there(self):
        self.assertEqual(Item.objects.count(), 1)

class SeesNothing(TransactionTestCase):
    def test_of_what_another_class_has_left(self):
        self.assertEqual(Item.objects.count(), 0)
        self.assertNotIn("leftover", connection.introspection.table_names())
"""
MANAGE = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop" / "migrations").mkdir(parents=True)
    files = {
        "settings.py": SETTINGS,
        "manage.py": MANAGE,
        "shop/__init__.py": "",
        "shop/models.py": MODELS,
        "shop/tests.py": TESTS,
        "shop/migrations/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    manage(tmp_path, "makemigrations", "shop")
    manage(tmp_path, "migrate")
    return tmp_path


def manage(project: Path, *arguments: str) -> str:
    command = [sys.executable, "manage.py", *arguments]
    result = subprocess.run(
        command, cwd=project, env={**os.environ}, capture_output=True, text=True, timeout=250, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


CREATE = "from shop.models import Item; Item.objects.create(name='tea', price=4)"
COUNT = "from shop.models import Item; print('items:', Item.objects.count())"


MONTHS = """
from django.db.models import Count
from django.db.models.functions import SHA256, TruncMonth
from shop.models import Item
found = Item.objects.annotate(month=TruncMonth("seen")).values("month").annotate(n=Count("id"))
print("months:", [row["n"] for row in found], Item.objects.filter(seen__month__gte=1, name__regex="^t").count())
print("digest:", Item.objects.values_list(SHA256("name"), flat=True).get()[:8], Item.objects.dates("seen", "month").count())
"""


@pytest.mark.slow
def test_functions_of_django_work_through_the_owner(project: Path) -> None:
    with quire.open(project / "store") as store, store.serve():
        manage(project, "shell", "-c", CREATE)
        output = manage(project, "shell", "-c", MONTHS)
    assert "months: [1] 1" in output
    assert f"digest: {hashlib.sha256(b'tea').hexdigest()[:8]} 1" in output


@pytest.mark.slow
def test_a_project_uses_a_store_that_another_process_serves(project: Path) -> None:
    with quire.open(project / "store") as store, store.serve():
        manage(project, "shell", "-c", CREATE)
        assert "items: 1" in manage(project, "shell", "-c", COUNT)


FAIL_ONCE = """
from django.db import DatabaseError, close_old_connections, connection
from quire.durable.failpoints import armed
from shop.models import Item
connection.settings_dict["CONN_MAX_AGE"] = None
for name, action in (("tea", "off"), ("milk", "raise:EIO"), ("coffee", "off")):
    try:
        with armed("pages.segment.frames", action):
            Item.objects.create(name=name, price=4)
    except DatabaseError:
        print("failed:", name)
    before = connection.connection
    close_old_connections()
    print(name, "kept:", connection.connection is before)
"""


@pytest.mark.slow
def test_a_persistent_connection_is_replaced_after_a_failed_sync(project: Path) -> None:
    """Hazard: with `CONN_MAX_AGE` every request failed after a failed sync, until the process ended."""
    output = manage(project, "shell", "-c", FAIL_ONCE)
    assert [line for line in output.splitlines() if line.startswith("failed:") or " kept: " in line] == [
        "tea kept: True",
        "failed: milk",
        "milk kept: False",
        "coffee kept: True",
    ]


@pytest.mark.slow
def test_a_project_migrates_tests_and_branches(project: Path) -> None:
    manage(project, "shell", "-c", CREATE)
    assert "items: 1" in manage(project, "shell", "-c", COUNT)
    output = manage(project, "test", "-v", "2")
    assert "Ran 3 tests" in output
    assert "OK" in output
    assert '"NAME": "store/what_if"' in manage(project, "quire_branch", "what_if")
    with quire.open(project / "store") as store:
        assert sorted(info.name for info in store.databases()) == ["shop", "what_if"]


INHERITING = """
from django.test import TestCase
from shop.models import Item

class Parent(TestCase):
    @classmethod
    def setUpTestData(cls):
        Item.objects.create(name=cls.__name__, price=1)
    def test_its_data_is_that_of_its_class(self):
        self.assertEqual([item.name for item in Item.objects.all()], [type(self).__name__])

class Child(Parent):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
"""
FAILING = f"""
from django.test import TransactionTestCase
from shop.models import Item

class {"A" * 200}(TransactionTestCase):
    def test_its_name_is_too_long_for_a_database(self):
        pass

class Later(TransactionTestCase):
    def test_the_migrated_database_is_still_there(self):
        self.assertEqual(Item.objects.count(), 0)
"""


@pytest.mark.slow
def test_a_class_whose_parent_has_tests_too_is_set_up_as_itself(project: Path) -> None:
    """Hazard: a parent that was wrapped by the runner set itself up in place of its subclass, which then had the wrong data."""
    (project / "shop" / "tests.py").write_text(INHERITING)
    assert "Ran 2 tests" in manage(project, "test")


@pytest.mark.slow
def test_a_class_that_cannot_be_forked_leaves_the_database_to_the_others(project: Path) -> None:
    """Hazard: the cleanup after a fork that failed dropped the migrated database, so every later class failed."""
    (project / "shop" / "tests.py").write_text(FAILING)
    with pytest.raises(AssertionError, match=r"(?s)Ran 1 test.*FAILED \(errors=1\)"):
        manage(project, "test")


@pytest.mark.slow
def test_a_branch_begins_at_the_version_that_the_project_uses(project: Path) -> None:
    """Hazard: a project whose NAME selects a version got a branch of the newest one."""
    with quire.open(project / "store") as store:
        store.snapshot("shop", "monday")
    manage(project, "shell", "-c", CREATE)
    (project / "settings.py").write_text(SETTINGS.replace("store/shop", "quire:///store/shop?at=monday"))
    manage(project, "quire_branch", "what_if")
    (project / "settings.py").write_text(SETTINGS.replace("store/shop", "store/what_if"))
    assert "items: 0" in manage(project, "shell", "-c", COUNT)


# ── Django's own tests ────────────────────────────────────────────────────────────────────────────────────────────────
SOURCES = "QUIRE_DJANGO_SOURCES"
"""Environment variable: a directory with Django's sources, which contain its tests. Without it they are downloaded."""
LABELS = ["basic", "lookup", "aggregation", "transactions", "schema", "introspection", "datetimes", "bulk_create"]
OWN_SETTINGS = """
DATABASES = {{
    "default": {{"ENGINE": "quire.django", "NAME": "{store}/shop"}},
    "other": {{"ENGINE": "quire.django", "NAME": "{store}/other"}},
}}
SECRET_KEY = "x"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
USE_TZ = False
"""


def django_sources(directory: Path) -> Path:
    """The sources of the installed release of Django; skips the test if they are not available."""
    if SOURCES in os.environ:
        return Path(os.environ[SOURCES])
    options = ["--no-deps", "--no-binary", ":all:", "--quiet", "--dest", str(directory)]
    command = [sys.executable, "-m", "pip", "download", *options, f"django=={version('django')}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    if result.returncode:
        pytest.skip(f"Django's sources are not available: set {SOURCES}")
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_slice_of_djangos_own_tests_passes(tmp_path: Path) -> None:
    sources = django_sources(tmp_path)
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "quire_settings.py").write_text(OWN_SETTINGS.format(store=tmp_path / "store"))
    command = [sys.executable, "runtests.py", "--settings=quire_settings", "--parallel=1", *LABELS]
    path = os.pathsep.join([str(tmp_path / "settings"), str(sources)])
    result = subprocess.run(
        command,
        cwd=sources / "tests",
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    ran = re.search(r"Ran (\d+) tests", result.stderr)
    assert ran is not None
    assert int(ran[1]) > 600
