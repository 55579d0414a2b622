"""The page cache: bounded, shared, and never stale."""

from __future__ import annotations

import threading

from quire.pages.cache import RESOLVED_MAX, PageCache


def test_bytes_stay_below_the_budget_whatever_is_put() -> None:
    cache = PageCache(64 * 1024)
    for number in range(1000):
        cache.put(("segment", number), bytes(1024))
        assert cache.used_bytes <= 64 * 1024
    assert cache.get(("segment", 999)) is not None
    assert cache.get(("segment", 0)) is None


def test_recently_used_pages_survive_a_scan() -> None:
    cache = PageCache(64 * 1024)
    cache.put("hot", b"h" * 1024)
    for number in range(500):
        cache.put(number, bytes(1024))
        assert cache.get("hot") == b"h" * 1024


def test_putting_a_page_twice_counts_it_once() -> None:
    cache = PageCache(1 << 20)
    for _ in range(100):
        cache.put("one", bytes(1000))
    assert cache.used_bytes == 1000


def test_a_rotation_forgets_resolved_entries() -> None:
    """Otherwise resolved entries would keep alive the bytes that were evicted."""
    cache = PageCache(8 * 1024)
    resolved = cache.resolved(1)
    cache.remember(resolved, 7, (1, 2, bytes(1024)))
    for number in range(8):
        cache.put(number, bytes(1024))
    assert not resolved


def test_a_rotation_forgets_the_resolved_entries_of_views_of_a_closed_database() -> None:
    """Hazard: closing a database only took its entries off the list. Views of it filled them again, and nothing cleared them
    any more: up to 131,072 images beyond the budget."""
    cache = PageCache(8 * 1024)
    used_by_view = cache.resolved(1)
    cache.remember(used_by_view, 7, (1, 2, bytes(1024)))
    cache.forget(1)
    assert not used_by_view
    assert cache.resolved(1) is used_by_view
    cache.remember(used_by_view, 7, (1, 2, bytes(1024)))
    for number in range(8):
        cache.put(number, bytes(1024))
    assert not used_by_view
    del used_by_view
    assert not cache._resolved, "a database that nobody reads leaves nothing"


def test_resolved_entries_are_bounded_in_number() -> None:
    """Pages of zeros use no bytes, so no other limit would evict them."""
    cache = PageCache(1 << 30)
    resolved, zeros = cache.resolved(1), cache.zeros(4096)
    for page in range(RESOLVED_MAX + 10):
        cache.remember(resolved, page, (0, 1, zeros))
    assert len(resolved) <= RESOLVED_MAX
    assert cache.zeros(4096) is zeros


def test_a_cache_of_zero_bytes_still_works() -> None:
    cache = PageCache(0)
    cache.put("a", b"x")
    cache.put("b", b"y")
    assert (cache.get("a"), cache.get("b")) == (b"x", b"y"), "one page in each generation"
    cache.put("c", b"z")
    cache.put("d", b"z")
    assert cache.get("a") is None


def test_two_threads_that_fill_the_cache_at_once_rotate_it_once() -> None:
    cache = PageCache(200 * 1024)
    barrier = threading.Barrier(4)

    def fill(thread: int) -> None:
        barrier.wait()
        for number in range(300):
            cache.put((thread, number), bytes(1024))

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cached = sum(cache.get((thread, number)) is not None for thread in range(4) for number in range(300))
    assert cached >= 50, "the newest pages are still cached"


def test_the_hit_ratio_counts_resolved_hits() -> None:
    cache = PageCache(1 << 20)
    assert cache.hit_ratio == 0.0
    cache.get("missing")
    cache.resolved_hits += 3
    assert cache.hit_ratio == 0.75
