"""Images of a prompt in `Prefilled.images`."""

from __future__ import annotations

import unittest

from thunder_mods import ContextInfo, Prefilled

TOKENS = [5, -10, -11, -12, -20, -21, 6, -13, 7]
SENT = [
    {"sha256": "a" * 64, "width": 40, "height": 30, "tokens": [-10, -13]},
    {"sha256": "b" * 64, "width": 8, "height": 9, "tokens": [-20]},
]


def prefilled(tokens, sent):
    event = Prefilled("run", 0, 8, ContextInfo(tokens))
    event._sent_images = sent
    return event


class Images(unittest.TestCase):
    def test_each_tile_has_the_hash_of_its_image(self) -> None:
        first = {"sha256": "a" * 64, "width": 40, "height": 30}
        second = {"sha256": "b" * 64, "width": 8, "height": 9}
        self.assertEqual(
            prefilled(TOKENS, SENT).images,
            [
                {"start": 1, "length": 3, **first},
                {"start": 4, "length": 2, **second},
                {"start": 7, "length": 1, **first},
            ],
        )

    def test_positions_are_those_of_the_current_prompt(self) -> None:
        (image,) = prefilled([1, 2, 3, -20, -21], SENT).images
        self.assertEqual((image["start"], image["length"], image["sha256"]), (3, 2, "b" * 64))

    def test_images_of_older_recordings_have_no_hash(self) -> None:
        unknown = {"sha256": None, "width": None, "height": None}
        self.assertEqual(prefilled([5, -10, -11, 6], []).images, [{"start": 1, "length": 2, **unknown}])
        self.assertEqual(prefilled([5, 6], SENT).images, [])


if __name__ == "__main__":
    unittest.main()
