"""Commands of this extra in the table of hostile replies (`of_extras`)."""

from sie_cache.api import CacheErased, CacheState

COMMANDS = {
    "cache status": (["cache", "status"], CacheState.EXAMPLE),
    "cache erase": (["cache", "erase", "--all"], CacheErased.EXAMPLE),
}
