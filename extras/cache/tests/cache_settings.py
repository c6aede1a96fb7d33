"""Rows of this extra in the tables of settings (`of_extras`)."""

DOCUMENTED = {"SIE_CACHE_BYTES": ("0", "1048576", ("-1", "1g", "")), "SIE_CACHE_TTL_S": ("3600", "1", ("0", "1h", ""))}
