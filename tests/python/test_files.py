"""`python -m thunder_mods.testing`, and packages in memory."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from thunder_mods.worker.package import load

MOD = "from thunder_mods import mod\n\n\n@mod\ndef calm(event, actions):\n    return None\n"


def run_tests(files, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, "utf-8")
        command = [sys.executable, "-B", "-m", "thunder_mods.testing", str(Path(folder) / "calm.py"), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return result.returncode, result.stdout, result.stderr


class Files(unittest.TestCase):
    def test_tests_of_file_and_test_file_run(self):
        inside = MOD + "\n\ndef test_inside():\n    print('unseen')\n"
        beside = "from calm import calm\n\n\ndef test_beside():\n    assert calm is None\n\n\ndef test_fixture(tmp_path):\n    pass\n"
        code, output, _ = run_tests({"calm.py": inside, "test_calm.py": beside}, "--json")
        result = json.loads(output)
        self.assertEqual((code, result["passed"], result["failed"], result["skipped"]), (1, 1, 1, 1))
        failed = next(test for test in result["tests"] if test["outcome"] == "failed")
        self.assertIn("AssertionError", failed["message"])
        self.assertEqual(run_tests({"calm.py": inside})[0], 0)

    def test_file_without_tests_exits_with_2(self):
        code, _, errors = run_tests({"calm.py": MOD})
        self.assertEqual(code, 2)
        self.assertIn("test_calm.py", errors)
        self.assertEqual(run_tests({"calm.py": "def x(:\n"})[0], 2)


class Packages(unittest.TestCase):
    def test_package_is_imported_from_memory(self):
        files = {"calm_pkg/words.py": "WORD = 'calm'\n", "calm_pkg/main.py": "from .words import WORD\n"}
        self.assertEqual(load(json.dumps(files), "calm_pkg.main")["WORD"], "calm")

    def test_reserved_package_name_raises_import_error(self):
        for name in ("thunder_mods/x.py", "sys.py"):
            with self.assertRaises(ImportError):
                load(json.dumps({name: ""}), "x")


if __name__ == "__main__":
    unittest.main()
