"""Waiting for frames of the server: no byte is lost or delayed, and wrong predictions are not repeated immediately."""

import socket
import threading
import time
import unittest

from thunder_mods.worker.channel import PredictiveWait

MILLISECOND = 1_000_000


class Waiting(unittest.TestCase):
    def setUp(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.waiter = PredictiveWait()

    def tearDown(self) -> None:
        self.ours.close()
        self.theirs.close()

    def test_bytes_arrive_in_order_at_any_rate(self) -> None:
        pauses = [0, 0, 0.002, 0.002, 0.002, 0.002, 0, 0.03, 0.002, 0, 0.0005] * 3

        def send() -> None:
            for number, pause in enumerate(pauses):
                time.sleep(pause)
                self.theirs.sendall(bytes([number]))
            self.theirs.close()

        sender = threading.Thread(target=send)
        sender.start()
        received = b""
        while data := self.waiter.next(self.ours):
            received += data
        sender.join()
        self.assertEqual(received, bytes(range(len(pauses))))

    def test_closed_connection_ends_wait_in_every_stage(self) -> None:
        for expected in (0, MILLISECOND, 5 * MILLISECOND):
            waiter = PredictiveWait()
            waiter._last = [expected] * 3
            ours, theirs = socket.socketpair()
            closer = threading.Timer(0.003, theirs.close)
            closer.start()
            self.assertEqual(waiter.next(ours), b"")
            closer.join()
            ours.close()

    def test_wrong_prediction_disables_polling_temporarily(self) -> None:
        self.waiter._last = [MILLISECOND] * 3
        sender = threading.Timer(0.05, lambda: self.theirs.sendall(b"x"))
        sender.start()
        self.assertEqual(self.waiter.next(self.ours), b"x")
        sender.join()
        skipped = 0
        while self.waiter._predict() == 0:
            skipped += 1
        self.assertEqual(skipped, 2)
        self.waiter._record_prediction(False)
        self.waiter._record_prediction(True)
        self.waiter._record_prediction(False)
        self.assertEqual(self.waiter._skipped_waits, 2)

    def test_long_waits_are_not_predicted(self) -> None:
        self.waiter._last = [20 * MILLISECOND] * 3
        self.assertEqual(self.waiter._predict(), 0)
        self.waiter._last = [20 * MILLISECOND, 2 * MILLISECOND, 2 * MILLISECOND]
        self.assertEqual(self.waiter._predict(), 2 * MILLISECOND)


if __name__ == "__main__":
    unittest.main()
