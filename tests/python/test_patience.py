"""Waiting for the server's frames: nothing is lost or kept back, whatever the rhythm; a wrong guess is not repeated at once."""

import socket
import threading
import time
import unittest

from thunder_mods.worker.channel import Patience

MILLISECOND = 1_000_000


class Waiting(unittest.TestCase):
    def setUp(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.patience = Patience()

    def tearDown(self) -> None:
        self.ours.close()
        self.theirs.close()

    def test_bytes_come_in_order_in_any_rhythm(self) -> None:
        pauses = [0, 0, 0.002, 0.002, 0.002, 0.002, 0, 0.03, 0.002, 0, 0.0005] * 3

        def send() -> None:
            for number, pause in enumerate(pauses):
                time.sleep(pause)
                self.theirs.sendall(bytes([number]))
            self.theirs.close()

        sender = threading.Thread(target=send)
        sender.start()
        came = b""
        while data := self.patience.next(self.ours):
            came += data
        sender.join()
        self.assertEqual(came, bytes(range(len(pauses))))

    def test_a_closed_connection_ends_the_wait_at_every_stage(self) -> None:
        for expected in (0, MILLISECOND, 5 * MILLISECOND):
            patience = Patience()
            patience._last = [expected] * 3
            ours, theirs = socket.socketpair()
            closer = threading.Timer(0.003, theirs.close)
            closer.start()
            self.assertEqual(patience.next(ours), b"")
            closer.join()
            ours.close()

    def test_a_wrong_guess_makes_it_sleep_the_next_times(self) -> None:
        self.patience._last = [MILLISECOND] * 3
        sender = threading.Timer(0.05, lambda: self.theirs.sendall(b"x"))
        sender.start()
        self.assertEqual(self.patience.next(self.ours), b"x")
        sender.join()
        skipped = 0
        while self.patience._foresee() == 0:
            skipped += 1
        self.assertEqual(skipped, 2)
        self.patience._judge(False)
        self.patience._judge(True)
        self.patience._judge(False)
        self.assertEqual(self.patience._trust, -2)

    def test_long_waits_are_not_foreseen(self) -> None:
        self.patience._last = [20 * MILLISECOND] * 3
        self.assertEqual(self.patience._foresee(), 0)
        self.patience._last = [20 * MILLISECOND, 2 * MILLISECOND, 2 * MILLISECOND]
        self.assertEqual(self.patience._foresee(), 2 * MILLISECOND)


if __name__ == "__main__":
    unittest.main()
