"""Where transfers run beside the compute, on a CPU: what they raise comes back to the caller."""

import threading

import pytest

from attention.transports.queues import HostQueue


def fail():
    raise RuntimeError("the flag is gone")


def settled(queue):
    """Once the thread has done all that it was given."""
    queue.thread.submit(int).result()
    return queue


NEXT = {
    "issue": lambda queue: queue.issue(int, [], "kv", 0),
    "join": lambda queue: queue.join(),
}


@pytest.mark.parametrize("what", NEXT)
def test_an_error_of_what_has_no_handle_is_raised_by_the_next(what):
    queue = HostQueue()
    queue.then(fail)
    settled(queue)
    with pytest.raises(RuntimeError, match="the flag is gone"):
        NEXT[what](queue)


def test_a_wait_raises_what_failed_first():
    queue, held = HostQueue(), threading.Event()
    queue.then(held.wait)
    queue.then(fail)
    handle = queue.issue(lambda: 1 / 0, [], "kv", 0)
    held.set()
    with pytest.raises(RuntimeError, match="the flag is gone"):
        handle.wait()
    with pytest.raises(ZeroDivisionError):
        handle.wait()


def test_an_error_is_raised_once_and_what_follows_it_is_done():
    queue, done = HostQueue(), []
    queue.then(fail)
    queue.then(lambda: done.append(1))
    with pytest.raises(RuntimeError, match="the flag is gone"):
        settled(queue).join()
    queue.join()
    queue.issue(lambda: done.append(2), [], "kv", 0).wait()
    assert done == [1, 2]
