"""Work in threads: items that take memory, and times that overlap."""

import concurrent.futures
import math
from collections.abc import Callable, Iterable, Iterator


def run_within[Item, Result](
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    size: Callable[[Item], int],
    limit: int,
    threads: int,
) -> Iterator[tuple[Item, Result]]:
    """Yields each item with function(item), computed in threads, in the order in which they end.

    An item starts when the sizes of all items at work are within the limit together with its own;
    one that is larger than the limit works alone. Items start in their order.

    Args:
        function: function from an item to its result.
        items: the items.
        size: the bytes that an item holds while it is at work.
        limit: bytes that all items at work hold at most.
        threads: number of items that work at the same time at most.

    Raises:
        Exception: the exception of the first item that fails; items that have not started do not
            start any more, and those at work are awaited.
    """
    futures: dict[concurrent.futures.Future[Result], Item] = {}

    def first_results() -> Iterator[tuple[Item, Result]]:
        completed, _ = concurrent.futures.wait(futures, return_when="FIRST_COMPLETED")
        for future in [future for future in futures if future in completed]:
            item = futures.pop(future)
            yield item, future.result()

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for item in items:
            while futures and (
                len(futures) == threads or sum(map(size, futures.values())) + size(item) > limit
            ):
                yield from first_results()
            futures[pool.submit(function, item)] = item
        while futures:
            yield from first_results()


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of spans (begin, end), so that an instant counts once."""
    seconds, last_end = 0.0, -math.inf
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, last_end))
        last_end = max(last_end, end)
    return seconds
