import json
import random
import sqlite3
import unittest
from pathlib import Path

from limiter.window import SlidingWindow

TRAFFIC = Path(__file__).resolve().parent.parent / "traffic.db"


def model(limit, window_s, times):
    """Slow and obvious: look at all allowed calls of the half-open window (now - window_s, now]."""
    allowed = []
    for now in times:
        inside = [t for t in allowed if now - window_s < t <= now]
        if len(inside) < limit:
            allowed.append(now)
    return allowed


class SlidingWindowTest(unittest.TestCase):
    def test_the_limit_itself_is_allowed_and_no_more(self):
        window = SlidingWindow(3, 10)
        self.assertEqual([window.allow(0) for _ in range(5)], [True, True, True, False, False])

    def test_a_call_leaves_the_window_exactly_at_its_end(self):
        window = SlidingWindow(1, 10)
        self.assertTrue(window.allow(0))
        self.assertFalse(window.allow(9.5))
        self.assertTrue(window.allow(10))

    def test_recorded_traffic_agrees_with_the_model(self):
        with sqlite3.connect(TRAFFIC) as db:
            rows = db.execute("SELECT limit_, window_s, times FROM traffic").fetchall()
        self.assertGreater(len(rows), 0)
        for limit, window_s, times in rows:
            times = json.loads(times)
            window = SlidingWindow(limit, window_s)
            got = [t for t in times if window.allow(t)]
            self.assertEqual(got, model(limit, window_s, times))


def record_traffic(path=TRAFFIC, count=24, seed=7):
    """The project's state: traffic to replay, made once."""
    rng = random.Random(seed)
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE traffic (limit_ INTEGER, window_s REAL, times TEXT)")
        for _ in range(count):
            times = sorted(rng.randrange(0, 200) / 2 for _ in range(120))
            row = (rng.randint(1, 6), rng.randint(1, 12), json.dumps(times))
            db.execute("INSERT INTO traffic VALUES (?, ?, ?)", row)


if __name__ == "__main__":
    unittest.main()
