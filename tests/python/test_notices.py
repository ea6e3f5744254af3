"""The third-party notices of the release archive."""

import os
import shutil
import subprocess
import tomllib
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PATH": f"{Path.home() / '.cargo/bin'}{os.pathsep}{os.environ['PATH']}"}


@unittest.skipUnless(shutil.which("cargo", path=ENVIRONMENT["PATH"]), "cargo is not installed")
class Notices(unittest.TestCase):
    def output_of(self, *command):
        return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout

    def test_every_linked_crate_and_bundled_source_has_a_license_text(self):
        notices = self.output_of(str(ROOT / ".ci/notices"))
        overview, *texts = notices.split("=" * 100)
        listed = {line.split(" · ")[0] for line in overview.splitlines()[2:] if line}
        # Files such as COPYRIGHT only point to the text.
        full = [text.strip() for text in texts if len(text) > 600]
        self.assertEqual(listed, {name for text in full for name in text.split("\n", 1)[0].split(", ")})

        # Features and other systems may exclude a crate of the program, but none of these.
        dependencies = tomllib.loads((ROOT / "Cargo.toml").read_text())
        names = {name.rpartition(" ")[0] for name in listed}
        self.assertLessEqual(set(dependencies["dependencies"]), names)
        self.assertIn("codemirror-6", listed)
        # Only tests use these, and sqlx-mysql only with a feature that is off.
        self.assertTrue(names.isdisjoint({*dependencies["dev-dependencies"], "sqlx-mysql"} - {"proc-macro2", "syn"}))

        for holder in ("The ggml authors", "Marijn Haverbeke", "Meta Platforms, Inc."):
            self.assertIn(holder, notices)


if __name__ == "__main__":
    unittest.main()
