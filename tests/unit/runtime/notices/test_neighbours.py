"""Signals as notices next to other users of signals: event loops, descriptors, forked children."""

from __future__ import annotations

from tests.unit.runtime.notices.test_signals import run


def test_an_existing_wakeup_descriptor_still_works() -> None:
    lines, code, log = run(
        """
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        watcher = watch({SIGTERM: 30.0})
        raise_signal(SIGTERM)
        reported()
        print(list(os.read(read, 9)))
        watcher.close()
        assert signal.set_wakeup_fd(-1) == write
        """
    )

    assert (lines, code) == (["reported SIGTERM 1030.0", "[15]"], 0), log


def test_a_reused_descriptor_is_not_written() -> None:
    lines, code, log = run(
        """
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        watcher = watch({SIGTERM: 30.0})
        theirs, other = os.pipe()
        os.set_blocking(other, False)
        os.dup2(other, write)
        os.set_blocking(theirs, False)
        raise_signal(SIGTERM)
        reported()
        watcher.close()
        assert signal.set_wakeup_fd(-1) == -1
        try:
            print(os.read(theirs, 9))
        except BlockingIOError:
            print("nothing")
        """
    )

    assert (lines, code) == (["reported SIGTERM 1030.0", "nothing"], 0), log


def test_a_signal_is_a_notice_after_the_descriptor_was_replaced() -> None:
    lines, code, log = run(
        """
        import asyncio

        async def main():
            loop, came = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(SIGUSR2, came.set)
            raise_signal(SIGUSR2)
            raise_signal(SIGTERM)
            await asyncio.wait_for(came.wait(), 50)
            print("loop", flush=True)

        watcher = watch({SIGTERM: 30.0})
        asyncio.run(main())
        reported()
        watcher.close()
        """
    )

    assert (lines, code) == (["loop", "reported SIGTERM 1030.0"], 0), log


def test_an_event_loop_still_works() -> None:
    lines, code, log = run(
        """
        import asyncio

        async def main():
            loop, came = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(SIGUSR2, came.set)
            watcher = watch({SIGTERM: 30.0})
            raise_signal(SIGUSR2)
            raise_signal(SIGTERM)
            await asyncio.wait_for(came.wait(), 50)
            reported()
            watcher.close()

        asyncio.run(main())
        """
    )

    assert (lines, code) == (["reported SIGTERM 1030.0"], 0), log


def test_a_signal_ends_a_forked_child_without_a_notice_in_its_parent() -> None:
    lines, code, log = run(
        """
        cloud = Gcp(base_url="http://127.0.0.1:9")
        watcher = watch({SIGTERM: 30.0, SIGUSR1: None}, cloud)
        child = os.fork()
        if child == 0:
            raise_signal(SIGTERM)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        child = os.fork()
        if child == 0:
            watcher.close()
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        try:
            cloud.poll()
        except Exception as error:
            assert type(error).__name__ == "NoAnswer", "the child has ended its parent's polls"
        raise_signal(SIGUSR1)
        reported()
        print(calls.empty())
        watcher.close()
        """
    )

    assert (lines, code) == (["-15", "5", "reported SIGUSR1 None", "True"], 0), log
