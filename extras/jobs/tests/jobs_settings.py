"""Rows of this extra in the tables of settings (`of_extras`)."""

DOCUMENTED = {
    "SIE_JOBS_URLS": ("(unset)", "s3://bucket/a,/mnt/jobs", (",", "ftp://host/x", "s3://a,gs://")),
    "SIE_JOBS_SINKS": (
        "(unset)",
        "main=qdrant://host:6333,pg=postgresql://user:canary-9f31@host/db",
        (
            ",",
            "main",
            "main=",
            "=qdrant://host",
            "a b=qdrant://host",
            "a=qdrant://h,a=qdrant://h",
            "a=qdrant://h:x",
            "a=postgresql:///db",
        ),
    ),
    "SIE_JOBS_AT_ONCE": ("4", "0", ("-1", "x", "")),
    "SIE_JOBS_KEEP_S": ("2592000", "60", ("59", "1d", "")),
    "SIE_JOBS_PER_KEY": ("1000", "1", ("0", "x", "")),
    "SIE_JOBS_BYTES_PER_KEY": ("4194304", "65536", ("65535", "4m", "")),
    "SIE_MAX_JOBS": ("10000", "1", ("0", "x", "")),
    "SIE_MAX_JOBS_BYTES": ("67108864", "65536", ("65535", "64m", "")),
    "SIE_FILES_PER_KEY": ("10000", "1", ("0", "x", "")),
    "SIE_FILES_BYTES_PER_KEY": ("68719476736", "1048576", ("1048575", "1g", "")),
    "SIE_MAX_FILES": ("100000", "1", ("0", "x", "")),
    "SIE_MAX_FILES_BYTES": ("1099511627776", "1048576", ("1048575", "1t", "")),
    "SIE_JOBS_CACHE_BYTES": ("4294967296", "0", ("-1", "1g", "")),
}
SECRETS = ("SIE_JOBS_SINKS",)  # its legal value has the canary of test_settings.py
