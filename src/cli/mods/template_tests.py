"""Tests of mod_name, for `thunder mods test mod_name.py` and for pytest."""

from mod_name import mod_name
from thunder_mods.testing import run


def test_replaces_the_ending():
    assert run(mod_name, model="Hello! You?").check().text == "Hello. You?"


def test_leaves_the_rest_alone():
    assert run(mod_name, model="Hello there.").check().text == "Hello there."


def test_uses_its_configuration():
    result = run(mod_name, model="Hello! You?", config={"ending": "?", "instead": "."})
    assert result.check().text == "Hello! You."
